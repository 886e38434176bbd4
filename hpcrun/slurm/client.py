"""Runs Slurm's commands so that the user's own settings for them do not change their output."""

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
    """Return the environment for a Slurm command whose arguments specify everything."""
    return {k: v for k, v in environ.items() if k in KEPT_VARIABLES or not k.startswith(_COMMAND_PREFIXES)}


def run_slurm_client(
    argv: Sequence[str], *, timeout_s: float, extra: Mapping[str, str] | None = None
) -> process.CompletedCommand:
    """Run squeue, sinfo, sacct, scancel or scontrol in that environment, with the `extra` variables."""
    return process.run(
        argv, timeout_s=timeout_s, env=slurm_client_environment(os.environ) | dict(extra or {})
    )


def cluster_option(cluster: str | None) -> list[str]:
    """The option -M of a command, where it is not about the cluster here."""
    return ["-M", cluster] if cluster else []


def cluster_from_environment(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable that names the user's cluster, and its value; None if none is set.

    UsageError if the two variables that Slurm knows differ.
    """
    variables = [(name, environ[name].strip()) for name in _CLUSTERS if environ.get(name, "").strip()]
    if len({value for _, value in variables}) > 1:
        shown = " and ".join(f"{name} is {value}" for name, value in variables)
        raise UsageError(f"{shown}: they name different clusters; unset one of the two")
    return variables[0] if variables else None


def choose_cluster(requested: str | None) -> str | None:
    """Return the value for -M: the requested cluster, else the one that the environment names."""
    variable = None if requested else cluster_from_environment(os.environ)
    return variable[1] if variable else requested
