"""What every rank of an attempt runs: our own training, or a program of the user's in a script of ours."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping

from hpcrun.errors import EXIT_RANKS_DIED, EXIT_SITE, UsageError
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.records import write_atomically
from hpcrun.specs.run_variables import NODE_MARK
from hpcrun.specs.rundir import Attempt

RANK_PREFIX_VARIABLE = "HPCRUN_RANK_PREFIX"
"""Words of the template's before a rank's command, such as those of a container runtime."""
SRUN_OPTIONS_VARIABLE = "HPCRUN_RANK_SRUN"
"""Words of the template's for the srun that starts the ranks, such as those of pyxis."""

_RANK_SCRIPT = """\
#!/bin/sh
# Starts one rank of the command: says which rank it is, hands on signals, and records how it ended.
umask 077
RANK=${{PMI_RANK:-${{OMPI_COMM_WORLD_RANK:-${{PMIX_RANK:-${{SLURM_PROCID:-0}}}}}}}}
LOCAL_RANK=${{MPI_LOCALRANKID:-${{OMPI_COMM_WORLD_LOCAL_RANK:-${{SLURM_LOCALID:-0}}}}}}
WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={ranks_per_node} NODE_RANK=$((RANK / {ranks_per_node}))
GROUP_RANK=$NODE_RANK
export RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK
attempt={attempt}
quoted={quoted}
node=$(uname -n)
exec >>"$attempt/logs/rank-$RANK.log" 2>&1
# Slurm signals every process of a step, and a record must not be lost because its mv was one of them.
record() {{ (
    trap '' HUP INT TERM USR1 USR2
    printf '%s\\n' "$2" >"$attempt/ranks/.rank-$RANK.$1.$$" &&
        mv -f "$attempt/ranks/.rank-$RANK.$1.$$" "$attempt/ranks/rank-$RANK.$1"
); }}
give_up() {{
    record error.json "{{\\"rank\\": $RANK, \\"node\\": \\"$node\\", \\"kind\\": \\"command\\", \
\\"expected\\": true, \\"message\\": \\"$1\\", \\"exit_code\\": $2, \\"time\\": $(date +%s.%N)}}"
}}
placed=$(sed -n "$((RANK + 1))p" "$attempt/hosts")
if [ "${{node%%.*}}" != "${{placed%%.*}}" ]; then
    give_up "is to stand on $placed, and the launcher has put it on $node" {misplaced}
    exit {misplaced}
fi
socket=${{HPCRUN_WORKER_SOCKET:-}}
case $socket in *"{mark}"*)
    export HPCRUN_WORKER_SOCKET="${{socket%%"{mark}"*}}$placed${{socket##*"{mark}"}}" ;;
esac
# Values of this node alone, but where somebody has set another one than all ranks get.
tab=$(printf '\t')
ours=$(sed -n "/^${{node%%.*}}$tab/p;/^rank:$RANK$tab/p" "$attempt/settings.tsv" 2>/dev/null)
while IFS="$tab" read -r _ name value usual; do
    if [ -n "$name" ] && [ "$(printenv "$name" || printf %s "$usual")" = "$usual" ]; then
        export "$name=$value"
    fi
done 2>/dev/null <<END
$ours
END
# CPUs one by one, so that lists such as 0-3,8 can be compared.
each() {{
    (IFS=,; for part in $1; do
        cpu=${{part%-*}}
        while [ "$cpu" -le "${{part#*-}}" ]; do printf ' %s ' "$cpu"; cpu=$((cpu + 1)); done
    done)
}}
are_in() {{
    given=$(each "$2")
    for cpu in $(each "$1"); do
        case $given in *" $cpu "*) ;; *) return 1 ;; esac
    done
}}
bound() {{ sed -n "s/^Cpus_allowed_list:[ $tab]*//p" "/proc/$$/status" 2>/dev/null; }}
before=$(bound)
if [ -z "${{HPCRUN_CPUS:-}}" ] || [ -z "$before" ] || [ "$before" = "$HPCRUN_CPUS" ]; then
    :
elif ! are_in "$HPCRUN_CPUS" "$before"; then
    words="is to run on CPUs $HPCRUN_CPUS, and has been bound to $before before it has started"
    if [ {bound_by} = rank ]; then
        give_up "$words" {misplaced}
        exit {misplaced}
    fi
    echo "hpcrun: rank $RANK $words; left so"
elif ! command -v taskset >/dev/null; then
    [ "$LOCAL_RANK" -ne 0 ] || echo "hpcrun: there is no taskset on $node: its ranks run on CPUs $before"
elif ! taskset -pc "$HPCRUN_CPUS" $$ >/dev/null || ! are_in "$(bound)" "$HPCRUN_CPUS"; then
    echo "hpcrun: rank $RANK could not be bound to CPUs $HPCRUN_CPUS and runs on $(bound)"
fi
child=
for name in USR1 USR2 TERM INT; do
    trap "interrupted=yes; if [ -n \"\\$child\" ]; then kill -s $name \"\\$child\"; fi" "$name"
done
"$@" </dev/null &
child=$!
read -r _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ started _ <"/proc/$$/stat"
record json "{{\\"rank\\": $RANK, \\"local_rank\\": $LOCAL_RANK, \\"node\\": \\"$node\\", \\"pid\\": $$, \
\\"start_ticks\\": $started, \\"started\\": $(date +%s), \\"shm\\": [], \
\\"binding\\": {{\\"before\\": \\"$before\\", \\"cpus\\": \\"$(bound)\\"}}}}"
# A wait that a signal has ended says nothing about the command; one that comes after the command's status
# was collected says 127.
status=
while :; do
    interrupted=
    wait "$child"
    now=$?
    if [ -z "$status" ] || [ "$now" -ne 127 ]; then status=$now; fi
    [ -n "$interrupted" ] || break
done
trap '' HUP INT TERM USR1 USR2
if [ "$status" -ne 0 ] && [ "$status" -ne 75 ]; then
    how="ended with exit code $status"
    if [ "$status" -gt 128 ]; then how="was killed by signal $((status - 128))"; fi
    code={died}
    if [ "$status" -eq 93 ]; then code=93; fi
    # A function has said more of its end than its exit code does.
    [ -e "$attempt/ranks/rank-$RANK.error.json" ] ||
        give_up "the command $how; log: $quoted/logs/rank-$RANK.log" "$code"
fi
record exit.json "{{\\"rank\\": $RANK, \\"exit_code\\": $status}}"
exit "$status"
"""


def rank_command(
    attempt: Attempt, spec: JobSpec, placement: Placement, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The command of every rank of an attempt; the script before a user's command is written as well."""
    prefix = template_words(environ, RANK_PREFIX_VARIABLE)
    if spec.command is None:
        in_container = prefix or template_words(environ, SRUN_OPTIONS_VARIABLE)
        python = spec.python or "python3" if in_container else sys.executable
        # -P: a file of the user's that is called like a module must not become that module.
        return (*prefix, python, "-P", "-m", "hpcrun", "_rank", str(attempt.run.path), str(attempt.number))
    script = attempt.rank_script
    write_atomically(script, _render_rank_script(attempt, placement))
    return ("/bin/sh", str(script), *prefix, *spec.command)


def template_words(environ: Mapping[str, str], name: str) -> list[str]:
    """The words that a template has left in a variable; UsageError when its quotes do not match."""
    try:
        return shlex.split(environ.get(name, ""))
    except ValueError as error:
        raise UsageError(
            f"{name}: cannot be split into words: {error}; mend the template that sets it"
        ) from None


def _render_rank_script(attempt: Attempt, placement: Placement) -> str:
    path = str(attempt.path)
    return _RANK_SCRIPT.format(
        attempt=shlex.quote(path),
        quoted=shlex.quote(json.dumps(path)[1:-1]),
        ranks=len(placement.ranks),
        mark=NODE_MARK,
        ranks_per_node=placement.per_node,
        bound_by=placement.bound_by,
        died=EXIT_RANKS_DIED,
        misplaced=EXIT_SITE,
    )
