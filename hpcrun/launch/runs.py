"""What is known of runs from their directories alone, and how a running one is asked to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.errors import UsageError
from hpcrun.launch.ownership import is_running_here, supervisor_of
from hpcrun.specs.records import LineReader, read_json
from hpcrun.specs.rundir import RunDir

_TAIL_BYTES = 65536
_POLL_S = 0.2
_KILL_WAIT_S = 15.0


@dataclass(frozen=True)
class RunState:
    """A run at one moment. `state`: running, done, saved, failed, interrupted, dead (its supervisor
    vanished), or unknown, for the reason in `message`."""

    run: RunDir
    state: str
    message: str = ""
    exit_code: int | None = None
    attempt: int | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    host: str | None = None
    pid: int | None = None
    changed: float = 0.0
    """When it last wrote something (wall clock)."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, the run by its id and path."""
        values = {name: value for name, value in vars(self).items() if name != "run"}
        return {"id": self.run.id, "path": str(self.run.path), **values}


def look_at(run: RunDir) -> RunState:
    """The state of a run; damaged records make it unknown."""
    try:
        job, ended, attempts = supervisor_of(run), run.read_exit(), run.attempts()
        state, message = _state(run, job, ended)
        step, loss, eval_loss = _progress(run)
    except UsageError as error:
        return RunState(run, "unknown", str(error), changed=_changed(run))
    if ended and ended.get("step") is not None:
        step = ended["step"]
    return RunState(
        run,
        state,
        message,
        exit_code=ended["exit_code"] if ended else None,
        attempt=attempts[-1].number if attempts else None,
        step=step,
        steps=job.get("steps"),
        loss=loss,
        eval_loss=eval_loss,
        host=job.get("host"),
        pid=job.get("pid"),
        changed=_changed(run),
    )


def _state(run: RunDir, job: dict[str, Any], ended: dict[str, Any] | None) -> tuple[str, str]:
    if ended:
        return ended["status"], ended["message"]
    if job:
        if job["host"] != os.uname().nodename:
            return "unknown", f"it was started on {job['host']}; look there whether it still runs"
        if is_running_here(run):
            return "running", ""
        return "dead", f"its supervisor (pid {job['pid']}) is gone; hpcrun train --resume {run.id}"
    for attempt in reversed(run.attempts()):
        result = read_json(attempt.result)
        if isinstance(result, dict):
            return result["status"], ""
        break
    return "unknown", "no supervisor of ours has recorded itself here"


def _progress(run: RunDir) -> tuple[int | None, float | None, float | None]:
    try:
        size = run.metrics.stat().st_size
    except FileNotFoundError:
        return None, None, None
    records = LineReader(run.metrics, max(0, size - _TAIL_BYTES)).read()
    steps = [record for record in records if record.get("kind", "step") == "step"]
    evals = [record["eval_loss"] for record in records if "eval_loss" in record]
    last = steps[-1] if steps else {}
    return last.get("step"), last.get("loss"), evals[-1] if evals else None


def _changed(run: RunDir) -> float:
    newest = 0.0
    for path in (run.spec, run.job, run.events, run.metrics, run.exit):
        try:
            newest = max(newest, path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return newest


def log_path(run: RunDir, rank: int | None = None, attempt: int | None = None) -> Path:
    """The log of a rank (default 0) of an attempt (default the newest); UsageError says which there are."""
    attempts = run.attempts()
    if not attempts:
        raise UsageError(f"{run.id} has no attempt yet, so there are no logs")
    numbers = [one.number for one in attempts]
    if attempt is not None and attempt not in numbers:
        raise UsageError(f"{run.id} has no attempt {attempt}; there are {', '.join(map(str, numbers))}")
    chosen = run.attempt(attempt or numbers[-1])
    path = chosen.log(rank or 0)
    if path.is_file():
        return path
    if rank is None and chosen.launcher_log.is_file():
        return chosen.launcher_log
    there = sorted(p.name for p in path.parent.glob("*.log")) if path.parent.is_dir() else []
    raise UsageError(f"{path}: there is no such log; there are: {', '.join(there) or 'none'}")


def read_log(run: RunDir, path: Path, *, follow: bool) -> Iterator[str]:
    """The text of a log, piece by piece; following it ends when the run does."""
    with path.open(encoding="utf-8", errors="replace") as file:
        over = False
        while True:
            # Looked at first: what was written until then is still read.
            over = over or not follow or look_at(run).state != "running"
            while text := file.read(_TAIL_BYTES):
                yield text
            if over:
                return
            time.sleep(_POLL_S)


def cancel(run: RunDir, *, now: bool = False) -> str:
    """Ask a run to save and stop, or with `now` to end at once; says what was done.

    UsageError when it does not run on this host.
    """
    state = look_at(run)
    if state.state != "running":
        told = f" ({state.message})" if state.message else ""
        raise UsageError(
            f"{run.id} is not running here, it is {state.state}{told}; there is nothing to cancel"
        )
    job = supervisor_of(run)
    handle = process.Handle(process.ProcessId(job["pid"], job["start_ticks"]))
    try:
        if not now:
            handle.signal(signal.SIGTERM)
            return f"{run.id}: asked pid {job['pid']} to save and stop"
        deadline = time.monotonic() + _KILL_WAIT_S
        # The supervisor ends its ranks at the second interrupt; two at once may arrive as one.
        while handle.signal(signal.SIGINT) and handle.is_alive():
            if time.monotonic() > deadline:
                handle.signal(signal.SIGKILL)
            time.sleep(_POLL_S)
    finally:
        handle.close()
    return f"{run.id}: ended without a save"
