"""Faults of one rank among several: it raises at an agreement, does what no other does, or is killed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from tests.checkpoint.faults import Case, SkippedError, Told

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "tests" / "runtime" / "collective_verbs_world.py"
RANKS, LIMIT_S, START_S = 3, 60.0, 240.0
By = Literal["mpi", "store"]


def world(root: Path, by: By, verbs: str, memories: str, stride: int) -> list[dict[str, Any]]:
    """What a world of ranks tells of its cases."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if by == "mpi" and mpiexec is None:
        raise SkippedError("needs mpiexec: pip install 'hpcrun-slurm[train]'")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    launch = [str(mpiexec), "-launcher", "fork", "-n", str(RANKS), sys.executable]
    (root / by).mkdir()
    done = subprocess.run(
        [*(launch if by == "mpi" else torchrun), str(WORLD), str(root / by), verbs, memories, str(stride)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def one_raises(by: By) -> Case:
    """At each agreement of each method, in turn the first rank and the last."""

    def play(root: Path, quick: bool) -> Told:
        from tests.runtime.collective_verbs_world import silent_in

        told = Told("ValueError, KeyboardInterrupt, MemoryError or OSError on one of three ranks")
        for case in world(root, by, "open,save,wait,load,close", "0,2", 5 if quick else 1):
            told.faults += 1
            wrong = silent_in(case)
            told.silent += bool(wrong) or case["seconds"] > LIMIT_S
            told.loaded(f"{case['case'][0]}: all hear, and the next save comes back whole")
            told.happened = wrong[0] if wrong else told.happened
        return told

    return play


def killed(root: Path, quick: bool) -> Told:
    """One rank is killed in the middle of a save, and nobody but the others is there to notice."""
    told = Told("")
    for victim in range(RANKS)[:: 2 if quick else 1]:
        told.faults += 1
        folder = root / str(victim)
        folder.mkdir()
        children = _start(folder, victim)
        for child in children:
            try:
                child.wait(LIMIT_S + START_S)
            except subprocess.TimeoutExpired:
                child.kill()
                told.silent += 1
        for rank in set(range(RANKS)) - {victim}:
            path = folder / f"said-{rank}.json"
            said, seconds = json.loads(path.read_text()) if path.exists() else ("", LIMIT_S)
            is_named = f"rank {victim} on " in said
            told.silent += not is_named or seconds > LIMIT_S / 2
            told.happened = said
            told.loaded(f"told after {seconds:.0f} s")
    return told


def _start(folder: Path, victim: int) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    words = [sys.executable, str(WORLD), str(folder), "kill", str(victim)]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
    return [subprocess.Popen(words, env=environ | one, stderr=subprocess.DEVNULL) for one in ranks]


RANK_CASES: dict[str, Case] = {
    "one rank raises at each agreement, over MPI": one_raises("mpi"),
    "one rank raises at each agreement, over a store": one_raises("store"),
    "one rank is killed in a save": killed,
}
