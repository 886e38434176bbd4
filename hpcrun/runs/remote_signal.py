"""How a supervisor is reached that has taken a run over: the batch shell leads to nobody any more."""

from __future__ import annotations

import signal

from hpcrun.runs.snapshot import RunSnapshot
from hpcrun.slurm.allocation import node_step
from hpcrun.slurm.client import cluster_option, run_slurm_client

_SRUN_S = 30.0
# The pid may be another process's by now: the fields of its stat from the state on start with the 3rd.
_KILL_SCRIPT = (
    'set -- "$1" "$2" "$3" $(sed "s/.*) //" "/proc/$2/stat");'
    ' [ "${23}" = "$3" ] || { echo "it has ended just now" >&2; exit 1; }; kill -s "$1" "$2"'
)


def signal_successor(view: RunSnapshot | None, number: signal.Signals, cluster: str = "") -> str:
    """Signal the supervisor on another node that leads the run; "" where the batch shell still leads to it.

    SiteError in srun's words when it cannot be reached.
    """
    supervisor, job = (view.process, view.supervisor.get("slurm_job")) if view else (None, None)
    if view is None or not view.is_taken_over or supervisor is None or job is None:
        return ""
    host, who = supervisor
    argv = node_step(host, f"--jobid={job}", *cluster_option(cluster))
    name = number.name.removeprefix("SIG")
    words = ["sh", "-c", _KILL_SCRIPT, "sh", name, str(who.pid), str(who.start_ticks)]
    run_slurm_client([*argv, *words], timeout_s=_SRUN_S).require_success()
    return f"pid {who.pid} on {host}"
