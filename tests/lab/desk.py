"""A user's desk on the lab's login node: a site with a profile, runs of one's own, our command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.lab.cluster import Lab

PATIENCE_S = 400.0
"""A test that fails alone waits for so long: the lab's nodes share the machine with whatever else it does."""

_undisturbed: dict[str, dict[int, float]] = {}
"""Text of a job to its losses."""


@dataclass
class Desk:
    """Where a test of submitted jobs works."""

    lab: Lab
    path: Path

    @property
    def runs(self) -> Path:
        """The root of the run directories."""
        return self.path / "runs"

    def profile(self, text: str = "") -> None:
        """Replace the profile of the lab."""
        place = self.path / "site" / "profiles" / "lab.yaml"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"name: lab\n{text}", encoding="utf-8")

    def hpcrun(
        self, *words: str, code: int | None = 0, before: tuple[str, ...] = (), timeout_s: float = PATIENCE_S
    ) -> process.CompletedCommand:
        """Run our command on the login node; `before` are words in front of it, such as those of salloc."""
        environ = {
            "HPCRUN_ROOT": str(self.runs),
            "HPCRUN_SITE": str(self.path / "site"),
            "XDG_CONFIG_HOME": str(self.path / "config"),
            "OMP_NUM_THREADS": "1",
        }
        argv = [*before, "python", "-m", "hpcrun", *words]
        done = self.lab.run(argv, env=environ, cwd=self.path, timeout_s=timeout_s)
        assert code in (None, done.exit_code), f"{words}: {done.exit_code}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def shared_memory(self, nodes: Iterable[str]) -> dict[str, set[str]]:
        """The files in the /dev/shm of nodes; what other tests have killed may have left some."""
        seek = ["find", "/dev/shm", "-type", "f"]
        return {name: {*self.lab.node(name).run(seek).require_success().stdout.split()} for name in nodes}

    def submit(self, *words: str) -> RunDir:
        """Submit a job; the run."""
        return RunDir(self.runs / self.hpcrun("submit", *words).stdout.strip())

    def undisturbed_losses(self) -> dict[int, float]:
        """The loss of each step of job.yaml on one node, where nothing happens to it; trained once a job."""
        text = (self.path / "job.yaml").read_text(encoding="utf-8")
        if text not in _undisturbed:
            self.hpcrun("train", "job.yaml", "name=undisturbed", "resources={nodes: 1}")
            (path,) = self.runs.iterdir()
            lines = read_json_lines(RunDir(path).metrics)
            _undisturbed[text] = {line["step"]: line["loss"] for line in lines if line.get("kind") == "step"}
        return _undisturbed[text]

    def until(self, condition: Callable[[], bool], run: RunDir, timeout_s: float = PATIENCE_S) -> None:
        """Wait for something to become true of a run."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, story(run)
            time.sleep(0.1)

    def until_none_is_left(self, run: RunDir) -> None:
        """Wait until Slurm has no job any more; on lost nodes one completes only when they are given up."""
        self.lab.give_up_lost()
        self.until(lambda: self.lab.run(["squeue", "-h"]).stdout == "", run)

    def ended(self, run: RunDir, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The exit record of a run, when it has one."""
        self.until(run.exit.exists, run, timeout_s)
        record = run.read_exit()
        assert record is not None
        return record


def story(run: RunDir) -> str:
    """Everything that a run has left in words, for a test that fails."""
    paths = [*run.submitit.glob("*_log.*"), *run.path.glob("attempts/*/logs/*.log")]
    paths += [*sorted(run.agent_logs.glob("*.log")), run.exit, run.events]
    texts = (f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths if path.exists())
    return "\n".join(texts)


def records(run: RunDir, pattern: str) -> list[Any]:
    """The JSON files of a run that match, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(run.path.glob(pattern))]
