"""Phases of a rank in which it is asked to stop: each in a child that is forked when all has been imported.

Run as a program: `stop_phases.py DIRECTORY JOB`; prints what became of each phase, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpcrun.checkpoint.policy import auto_interval
from hpcrun.launcher_world import World
from hpcrun.runtime import loop, rank
from hpcrun.runtime.sharded_model import ShardedModel
from hpcrun.specs.metrics import Metric
from hpcrun.specs.records import read_json, read_json_lines
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import resumable_checkpoints

HELD: dict[str, tuple[Any, str]] = {
    "data": (rank, "inspect_corpus"),
    "rendezvous": (rank, "open_process_groups"),
    "weights and model": (loop, "ShardedModel"),
    "restore": (loop, "restore_from_plan"),
    "first evaluation": (ShardedModel, "evaluate"),
    "compilation and first step": (ShardedModel, "forward_backward"),
}
"""Where a rank is held, in a call that does not come back to Python."""


class Silent:
    """A display that shows nothing."""

    def note(self, text: str) -> None: ...

    def ranks_ready(self, ranks: int, seconds: float) -> None: ...

    def step(self, metric: Metric) -> None: ...

    def finished(self, outcome: object) -> None: ...


def train(job: str, *overrides: str) -> int:
    return rank.join_world(Path(job), overrides, None, World("single", 0, 1, 0, 1), lambda _steps: Silent())


def held(place: tuple[Any, str], job: str, ready: int) -> int:
    def block(*_args: Any, **_options: Any) -> None:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(ready, b"x")
        store.wait(["never"])

    setattr(*place, block)
    return train(job)


def signalled(method: str, call: int, job: str, *overrides: str) -> int:
    """Asked to stop by itself, in one of its calls of a method."""
    original, count = getattr(ShardedModel, method), 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    setattr(ShardedModel, method, counted)
    code = train(job, *overrides)
    sys.stderr.write(f"{count} calls\n")
    return code


def by_the_clock(job: str) -> int:
    vars(auto_interval).update(MIN_INTERVAL_S=0.0, MAX_INTERVAL_S=0.0, DEFAULT_OVERHEAD_BOUND=1e9)
    return train(job, "train.steps=3")


def child(action: Callable[[int], int], root: Path, signals_it: bool) -> dict[str, Any]:
    """What a child that does this leaves; it is sent SIGTERM as soon as it says that it is held."""
    reader, writer = os.pipe()
    root.mkdir()
    pid = os.fork()
    if not pid:
        os.environ["HPCRUN_ROOT"] = str(root)
        try:
            os._exit(action(writer))
        finally:
            os._exit(99)
    os.close(writer)
    begin = time.monotonic()
    if os.read(reader, 1) and signals_it:
        begin = time.monotonic()
        os.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.monotonic() - begin
    os.close(reader)
    (path,) = root.iterdir()
    run = RunDir(path)
    lines = list(read_json_lines(run.metrics)) if run.metrics.exists() else []
    return {
        "code": code,
        "result": read_json(run.attempt(1).result),
        "saved": [one.step for one in resumable_checkpoints(run.checkpoints)],
        "kinds": [[line["kind"], line.get("step")] for line in lines],
        "seconds": seconds,
    }


def main(root: Path, job: str) -> None:
    """Go through them all."""
    eval_job = ("train.eval.every=1", "train.eval.sequences=8", "train.gbs=1", "train.mbs=1")
    actions: dict[str, Callable[[int], int]] = {
        **{name: partial(held, place, job) for name, place in HELD.items()},
        "a step": lambda _: signalled("forward_backward", 3, job),
        "an evaluation": lambda _: signalled("evaluate", 10, job, *eval_job),
        "the last evaluation": lambda _: signalled("evaluate", 10, job, "train.steps=1", *eval_job),
        "by the clock": lambda _: by_the_clock(job),
    }
    found = {
        name: child(action, root / str(number), name in HELD)
        for number, (name, action) in enumerate(actions.items())
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
