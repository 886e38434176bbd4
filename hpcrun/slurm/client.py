"""Slurm's commands as we run them: what a person has set for their own use of them changes no answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpcrun import process
from hpcrun.errors import UsageError

KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET")
"""Where the cluster is, and who one is there."""
_COMMAND_PREFIXES = (
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_"),
    *("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_"),
)
"""Formats, filters, sort orders, questions back (SCANCEL_INTERACTIVE), and the allocation around us."""
_CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")


def slurm_client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a command of Slurm's that is told everything by its arguments."""
    return {k: v for k, v in environ.items() if k in KEPT_VARIABLES or not k.startswith(_COMMAND_PREFIXES)}


def run_slurm_client(
    argv: Sequence[str], *, timeout_s: float, more: Mapping[str, str] | None = None
) -> process.CompletedCommand:
    """Run squeue, sinfo, sacct, scancel or scontrol in that environment, with `more` in it."""
    return process.run(argv, timeout_s=timeout_s, env=slurm_client_environment(os.environ) | dict(more or {}))


def cluster_from_environment(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that says which cluster a person works with, and its value; None where none is set.

    UsageError where the two that Slurm knows differ.
    """
    found = [(name, environ[name].strip()) for name in _CLUSTERS if environ.get(name, "").strip()]
    if len({value for _, value in found}) > 1:
        told = " and ".join(f"{name} is {value}" for name, value in found)
        raise UsageError(f"{told}: which cluster is meant? unset one of the two")
    return found[0] if found else None


def choose_cluster(asked: str | None) -> str | None:
    """What -M gets: the cluster that is asked for, else the one that the environment names."""
    found = None if asked else cluster_from_environment(os.environ)
    return found[1] if found else asked
