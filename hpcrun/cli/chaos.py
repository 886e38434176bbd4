"""`hpcrun chaos`: rehearse faults on a running run of one's own, one by one or as a scenario."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.errors import EXIT_CHECK_FAILED, SpecProblem, UsageError
from hpcrun.specs.run_lookup import find_run
from hpcrun.specs.rundir import RunDir

if TYPE_CHECKING:
    from hpcrun.chaos.inject import InjectionTarget

SCHEMA_VERSION = 1

app = typer.Typer(
    no_args_is_help=True,
    help="Rehearse faults on a running run of one's own. Every one is recorded in the run's chaos.jsonl, and"
    " `hpcrun events RUN` tells it. Nothing but processes of that run is touched.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's id or its beginning, a run directory, a Slurm job id; RUN/3 is an element of a sweep.",
    ),
]
_Rank = Annotated[int | None, typer.Option(metavar="R", help="Which rank, counted over all nodes from 0.")]
_Node = Annotated[str | None, typer.Option(metavar="N", help="Which node of the run.")]
_Random = Annotated[bool, typer.Option("--random", help="Take one at random, and say which.")]
_Seed = Annotated[int | None, typer.Option(help="For --random: the same seed takes the same one again.")]
_For = Annotated[str | None, typer.Option("--for", metavar="T", help="Undo it after this time, such as 30s.")]
_Force = Annotated[bool, typer.Option("--force", help="Also where it hurts more than the one node.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done, and how.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with the records.")]


@app.command("kill-rank")
def kill_rank(
    name: _Run,
    rank: _Rank = None,
    signal: Annotated[str, typer.Option(metavar="NAME", help="Such as KILL, TERM, SEGV, BUS.")] = "KILL",
    at_random: _Random = False,
    seed: _Seed = None,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Send a signal to a rank: to its program and all below it."""
    values = {"rank": rank, "signal": signal, "random": at_random, "seed": seed}
    _inject(name, "kill-rank", values, yes, dry_run, as_json)


@app.command("stop-rank")
def stop_rank(
    name: _Run,
    rank: _Rank = None,
    for_time: _For = None,
    at_random: _Random = False,
    seed: _Seed = None,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Freeze a rank (SIGSTOP) as if it hung; without --for until resume-rank."""
    values = {"rank": rank, "for": for_time, "random": at_random, "seed": seed}
    _inject(name, "stop-rank", values, yes, dry_run, as_json)


@app.command("resume-rank")
def resume_rank(
    name: _Run,
    rank: _Rank = None,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Let a rank that was stopped go on (SIGCONT)."""
    _inject(name, "resume-rank", {"rank": rank}, yes, dry_run, as_json)


@app.command("kill-agent")
def kill_agent(
    name: _Run,
    node: _Node = None,
    at_random: _Random = False,
    seed: _Seed = None,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Kill our agent on a node; its ranks are left to what the run does about that."""
    _inject(name, "kill-agent", {"node": node, "random": at_random, "seed": seed}, yes, dry_run, as_json)


@app.command()
def vanish(
    name: _Run,
    node: _Node = None,
    at_random: _Random = False,
    seed: _Seed = None,
    force: _Force = False,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Kill all of the run on a node at once, the agent first, as if its power were gone.

    Unlike a power-off it is not silent: the kernel closes the connections, and Slurm keeps the node.
    """
    values = {"node": node, "random": at_random, "seed": seed, "force": force}
    _inject(name, "vanish", values, yes, dry_run, as_json)


@app.command()
def slow(
    name: _Run,
    node: _Node = None,
    share: Annotated[float, typer.Option(help="Of the time, taken from the ranks.")] = 0.5,
    for_time: _For = None,
    at_random: _Random = False,
    seed: _Seed = None,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Make the ranks of a node slower: they are stopped for a share of every 0.2 s (SIGSTOP, SIGCONT)."""
    values = {"node": node, "share": share, "for": for_time, "random": at_random, "seed": seed}
    _inject(name, "slow", values, yes, dry_run, as_json)


@app.command("fill-disk")
def fill_disk(
    name: _Run,
    node: _Node = None,
    where: Annotated[
        str | None, typer.Option(metavar="DIR", help="In which file system: scratch or tmpfs of the node.")
    ] = None,
    leave: Annotated[str, typer.Option(metavar="SIZE", help="Leave this much, such as 100M.")] = "1M",
    for_time: _For = None,
    at_random: _Random = False,
    seed: _Seed = None,
    force: _Force = False,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Fill a file system of a node with a file without a name, which is gone whatever ends us.

    A tmpfs takes its room from the memory of the node, which may count against the job.
    """
    values: dict[str, Any] = {"node": node, "where": where, "leave": leave, "for": for_time}
    values |= {"random": at_random, "seed": seed, "force": force}
    _inject(name, "fill-disk", values, yes, dry_run, as_json)


@app.command("kill-supervisor")
def kill_supervisor(name: _Run, yes: _Yes = False, dry_run: _DryRun = False, as_json: _Json = False) -> None:
    """Kill the supervisor of a run: in a batch job another comes in its place, else the run ends."""
    _inject(name, "kill-supervisor", {}, yes, dry_run, as_json)


@app.command()
def play(
    name: _Run,
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.yaml", help="A list of {at: 10s, do: kill-rank, rank: 1}.")
    ],
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Play a scenario: faults in order, each at its time (at: 10s) or after its step (step: 20).

    It is checked as a whole before the first. The exit code is 1 where one of them could not be done.
    """
    from hpcrun.chaos.inject import require_running
    from hpcrun.chaos.scenario import ScenarioRun, check_targets, load_scenario

    scenes = load_scenario(scenario)
    run = find_run(name, use="plan" if dry_run else "act")
    require_running(run)
    aims = check_targets(run, scenes)
    plans = [
        f"at {scene.when}: {aimed or f'{scene.fault.do} (its victim has not come up yet)'}"
        for scene, aimed in zip(scenes, aims, strict=True)
    ]
    if dry_run:
        if as_json:
            _dump(run=run.id, would=plans)
        else:
            print("\n".join(plans))
        return
    _confirm(run, plans, yes)
    records: list[dict[str, Any]] = []

    def write(record: dict[str, Any]) -> None:
        records.append(record)
        if not as_json:
            _print_record(record)

    all_done = ScenarioRun(run, _note, write).run_all(scenes)
    if as_json:
        _dump(run=run.id, records=records, all_done=all_done)
    if not all_done:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _inject(name: str, do: str, values: dict[str, Any], yes: bool, dry_run: bool, as_json: bool) -> None:
    from hpcrun.chaos import inject
    from hpcrun.chaos.faults import parse_fault

    fault, problems = parse_fault({"do": do, **values})
    if fault is None:
        raise UsageError("\n".join(_as_option_problem(one) for one in problems))
    run = find_run(name, use="plan" if dry_run else "act")
    inject.require_running(run)
    aimed = inject.find_target(run, fault)
    if dry_run:
        _print_dry_run(aimed, as_json)
        return
    if fault.is_random:
        _note(f"at random: {aimed} (seed {aimed.fault.seed})")
    _confirm(run, [str(aimed)], yes)
    records = inject.inject_fault(aimed, lambda record: None if as_json else _print_record(record))
    if as_json:
        _dump(run=run.id, records=records)


def _as_option_problem(problem: SpecProblem) -> str:
    return str(SpecProblem(f"--{problem.key}", problem.text))


def _print_dry_run(aimed: InjectionTarget, as_json: bool) -> None:
    words = shlex.join(aimed.command())
    if as_json:
        _dump(run=aimed.run.id, would=str(aimed), seed=aimed.fault.seed, command=aimed.command())
        return
    print(f"would {aimed}")
    print(words)


def _confirm(run: RunDir, plans: Sequence[str], yes: bool) -> None:
    """Ask, where there is somebody to be asked."""
    if yes or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return
    for line in plans:
        _note(f"{run.id}: {line}")
    if not typer.confirm("hpcrun: do it?", err=True):
        _note("nothing was done")
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print_record(record: dict[str, Any]) -> None:
    stamp = time.strftime("%H:%M:%S", time.localtime(record["time"]))
    pids = f" (pid {', '.join(map(str, record['pids']))})" if record["pids"] else ""
    print(f"{stamp}  {record['node']}: {record['text']}{pids}", flush=True)


def _dump(**values: Any) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}))


def _note(text: str) -> None:
    sys.stderr.write(f"hpcrun: {text}\n")
    sys.stderr.flush()
