"""Hydra, the process manager of the MPICH wheel: how it is found, started and read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcrun import process
from hpcrun.errors import SiteError

_REMEDY = "pip install 'hpcrun-slurm[train]'"


def find_mpiexec() -> Path:
    """The mpiexec that came with this Python environment's MPI library; SiteError when there is none."""
    folders = [
        Path(sys.executable).parent,
        Path(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))),
    ]
    for folder in folders:
        if (folder / "mpiexec.hydra").is_file() and os.access(folder / "mpiexec", os.X_OK):
            return folder / "mpiexec"
    first = folders[0] / "mpiexec"
    found = "is not MPICH's" if first.exists() else "does not exist"
    raise SiteError(f"{first} {found}, and it starts the ranks; {_REMEDY}")


def start_ranks(
    mpiexec: Path, ranks: int, command: Sequence[str], environ: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start that many ranks on this node; Hydra's own words, and theirs before the shim, go to the log.

    Ours are both the clean-up (Hydra would blur who died first) and the signals (it dies of some).
    """
    argv = [
        str(mpiexec),
        "-disable-auto-cleanup",
        "-print-all-exitcodes",
        # Inside an allocation Hydra would choose Slurm by itself.
        *("-rmk", "user", "-launcher", "fork"),
        *("-n", str(ranks)),
        *command,
    ]
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            preexec_fn=_bind_to(os.getpid()),
        )


def _bind_to(supervisor: int) -> Callable[[], None]:
    """For the child between fork and exec: to end with us, however we end."""

    def bind() -> None:
        process.die_with_parent(signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    return bind


def wait_statuses(log: Path) -> list[int]:
    """The wait status of every rank, in rank order, as Hydra printed them at its end; empty if it did not."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return []
    found = re.findall(r"^\[mpiexec@[^\]]*\] Exit codes: \[[^\]]*\] ([\d,]+)$", text, re.MULTILINE)
    return [int(status) for status in found[-1].split(",")] if found else []


def describe_status(status: int) -> str:
    """A wait status in words: `was killed by signal 9 (SIGKILL)`, `ended with exit code 3`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        return f"was killed by signal {number} ({name})"
    return f"ended with exit code {os.WEXITSTATUS(status)}"
