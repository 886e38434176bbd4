"""The first module of a rank: it loads MPI before torch, and only then the training."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path

from hpcrun.launch.rank_shim import RankRequests, exit_at_stop
from hpcrun.specs.rundir import RunDir


def load_mpi() -> None:
    """Start MPI, where it is installed, before torch is loaded.

    MPICH sends its addresses in blocks that it does not clear. Slurm's pmi2 takes 1,024 bytes a request, in
    which zeros take almost no room; but in a heap that torch's import has filled with text the blocks exceed
    that, and the ranks cannot connect: one start in fifteen of four ranks failed.
    """
    # The place that needs MPI reports that it is missing.
    with contextlib.suppress(ImportError, RuntimeError):
        importlib.import_module("mpi4py.MPI")


def main(run_dir: str, number: int, requests: RankRequests) -> int:
    """Run a rank of an attempt that our supervisor started; return the exit code."""
    exit_at_stop(RunDir(Path(run_dir)).attempt(number), requests)
    load_mpi()
    return int(importlib.import_module("hpcrun.runtime.rank").main(run_dir, number, requests))
