"""Storage that really hangs: a file system that is frozen while a script saves to it, in each mode."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcrun.specs.saves import resumable_checkpoints
from tests.checkpoint.faults import Case, SkippedError, Told

ROOT = Path(__file__).parents[2]
FROZEN_STEPS, STEP_S, TOLD_S, END_S = 8, 12.0, 20.0, 120.0


@contextmanager
def freezable(root: Path) -> Iterator[Path]:
    """A file system of its own; whoever writes to it while it is frozen hangs, and cannot be killed."""
    maker, tool = shutil.which("mkfs.ext4"), shutil.which("fsfreeze")
    if os.getuid() != 0 or maker is None or tool is None:
        raise SkippedError("freezing a file system needs root, mkfs.ext4 and fsfreeze")
    image, place = root / "image", root / "disk"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    place.mkdir()
    subprocess.run([maker, "-q", str(image)], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SkippedError(f"no such file system here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """For so long every write there hangs."""
    subprocess.run(["fsfreeze", "-f", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(place)], check=True)


class Script:
    """A script that is led step by step, and listened to."""

    def __init__(self, directory: Path, behind: str, memory: int) -> None:
        program = [sys.executable, str(Path(__file__).with_name("hung_script.py"))]
        self.child = subprocess.Popen(
            [*program, str(directory), behind, str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self.heard, self.lines = list[dict[str, Any]](), list[str]()
        self._news: queue.Queue[dict[str, Any]] = queue.Queue()
        for target in (self._hear, self._read):
            threading.Thread(target=target, daemon=True).start()

    def _hear(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._news.put(json.loads(line))

    def _read(self) -> None:
        assert self.child.stderr is not None
        self.lines.extend(self.child.stderr)

    def order(self, word: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{word}\n")
        self.child.stdin.flush()

    def await_one(self, key: str, limit_s: float, **words: Any) -> dict[str, Any] | None:
        """The next thing with this key and these words that it says; None where it says none in time."""
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                one = self._news.get(timeout=left)
            except queue.Empty:
                return None
            self.heard.append(one)
            if key in one and (not words or words.items() <= dict(one[key]).items()):
                return one
        return None

    def has_heard(self, kind: str) -> bool:
        """Whether there was such a record."""
        return any(one.get("record", {}).get("kind") == kind for one in self.heard)

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


def hung(behind: str, memory: int) -> Case:
    """Storage hangs in the middle of a run, and comes back: what training was told, and if it went on."""

    def play(root: Path, quick: bool) -> Told:
        told = Told("", 1)
        with freezable(root) as disk:
            script = Script(disk / "run", behind, memory)
            try:
                _play(script, disk, behind, memory, told)
            finally:
                script.end()
            told.happened = next((one for one in script.lines if str(disk) in one), "").strip()
            told.silent += not told.happened
            steps = [one.step for one in resumable_checkpoints(disk / "run" / "checkpoints")]
            told.silent += 1 not in steps
            told.loaded(f"{len(steps)} of {1 + FROZEN_STEPS} saves in the directory afterwards")
        return told

    return play


def _play(script: Script, disk: Path, behind: str, memory: int, told: Told) -> None:
    stops = behind == "wait" or not memory
    script.order("lasting")
    assert script.await_one("step", END_S) is not None, script.lines
    with frozen(disk):
        begin, heard = time.monotonic(), len(script.heard)
        for _ in range(FROZEN_STEPS):
            script.order("save")
            if stops:
                continue
            script.await_one("step", STEP_S)
            time.sleep(1.0)
        is_told = script.has_heard("save_stalled") or script.await_one("record", TOLD_S, kind="save_stalled")
        told_s = time.monotonic() - begin
        done = [one["seconds"] for one in script.heard[heard:] if "step" in one]
        # It is told, and training goes on where nothing is to stop it.
        told.silent += not is_told or (not stops and len(done) < FROZEN_STEPS)
        longest = max(done, default=0.0)
        told.loaded(f"told within {told_s:.0f} s, {len(done)} steps while frozen, longest {longest:.1f} s")
    script.order("end")
    told.silent += script.await_one("closed", END_S) is None


HUNG_CASES: dict[str, Case] = {
    "storage hangs, saves are skipped": hung("skip", 2),
    "storage hangs, saves are degraded": hung("degrade", 2),
    "storage hangs, saves are waited for": hung("wait", 2),
    "storage hangs, no memory for saves": hung("wait", 0),
}
