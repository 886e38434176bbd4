"""Checks of a launch that need no nodes: made at the submission, and again on the node.

Checks that need a node are where they are used.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from hpcrun.checkpoint.parity.sets import check_survivable
from hpcrun.errors import SiteError, SpecProblem, UsageError
from hpcrun.hydra import find_mpiexec
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec

LauncherName = Literal["hydra", "srun", "mpirun"]


def launcher_name(cluster: ClusterSpec | None) -> LauncherName:
    """What starts the ranks between nodes."""
    return cluster.mpi.launcher if cluster else "hydra"


def why_no_step_options(launcher: LauncherName) -> str | None:
    """Why a launcher cannot start ranks in a container that srun makes; None where it can."""
    if launcher == "srun":
        return None
    return f"mpi.launcher: {launcher} starts no container of srun's; set mpi.launcher: srun in the profile"


def find_launch_problems(
    job: JobSpec, cluster: ClusterSpec | None, runtime: str | None, levels: Collection[str] | None = None
) -> list[SpecProblem]:
    """List what this profile cannot launch of a job.

    `runtime`: the runtime of its container, if it has one; `levels`: the fabric levels that its nodes have in
    common, if they are known.
    """
    problems = []
    why = why_no_step_options(launcher_name(cluster)) if runtime == "pyxis" else None
    if why is not None:
        problems.append(SpecProblem("container", why))
    parity = job.checkpoint.parity
    if job.checkpoint.memory:
        try:
            check_survivable(parity.survive, parity.scheme, job.resources.nodes, levels)
        except UsageError as error:
            problems.append(SpecProblem("", str(error)))
    return problems


def why_not_launchable_here(cluster: ClusterSpec | None) -> list[str]:
    """What this interpreter on this host lacks to start ranks; that of a compute node may have it."""
    reasons = [missing_modules(cluster.python.checks if cluster else [], sys.executable, os.uname().nodename)]
    try:
        if launcher_name(cluster) == "hydra":
            find_mpiexec()
    except SiteError as error:
        reasons.append(str(error))
    return [reason for reason in reasons if reason]


def missing_modules(names: Sequence[str], python: str, host: str) -> str | None:
    """Say which of these modules this interpreter lacks; None if it has them all."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"{python} on {host} lacks {', '.join(missing)}; set python in the job or python.path in the profile"
        " to one that has them, or install them there"
    )


def check_run_root(root: Path) -> None:
    """UsageError unless run directories can be made under a root, which need not exist."""
    # os.access, unlike Path.exists, also answers for a directory that may not be entered.
    place = next(path for path in (root, *root.absolute().parents) if os.access(path, os.F_OK))
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        problem = "may not be written" if place.is_dir() else "is not a directory"
        text = "set HPCRUN_ROOT to a directory that you may write"
        raise UsageError(f"{root}: no run directory can be made here: {place} {problem}; {text}")
