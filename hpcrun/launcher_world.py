"""Are we already a rank of somebody's world? Read from the environment that launchers leave behind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Slurm numbers the batch script, the interactive step and the extern step from here on.
_FIRST_SPECIAL_STEP = 4294967290

_WORLD_VARIABLES = re.compile(
    r"PMI_|PMI2_|PMIX_|MPI_LOCAL|HYDRA_|HYDI_|OMPI_COMM_WORLD_|PRTE_|PALS_|TORCHELASTIC_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\Z"
    r"|HPCRUN_(CPUS|NIC|GPU_UUID)\Z"
    r"|(GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_WORLD_SIZE|ROLE_NAME)\Z"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|TASK_PID)\Z"
    r"|SLURM_(STEP|STEPID|PTY|SRUN|LAUNCH|PMI|PMIX|MPI|DISTRIBUTION)(_|\Z)"
)


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks that a launcher started."""

    kind: str
    """Who started us: hydra, openmpi, slurm, torchrun, or pmi for other launchers that speak PMI."""
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def detect_world(environ: Mapping[str, str], *, stdin_is_tty: bool = False) -> World | None:
    """The world that this process is a rank of, or None: a shell, even inside an allocation, is not a rank.

    A launcher started inside a Slurm step is nearer to us than the step, so its variables are read first.
    """
    env = _EnvironmentNumbers(environ)
    if "MPI_LOCALRANKID" in environ and (world := env.world("hydra", "PMI_RANK", "PMI_SIZE")):
        return world
    if world := env.world("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return world
    if "TORCHELASTIC_RUN_ID" in environ and (world := env.world("torchrun", "RANK", "WORLD_SIZE")):
        return world
    if "SLURM_JOB_ID" not in environ:
        return env.world("pmi", "PMI_RANK", "PMI_SIZE")
    step = env.number("SLURM_STEP_ID")
    shell = any(name.startswith("SLURM_PTY_") for name in environ) or stdin_is_tty
    if step is None or step >= _FIRST_SPECIAL_STEP or shell:
        return None
    # SLURM_NTASKS may be the allocation's: the step's own count is the better one.
    return env.world("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") or env.world(
        "slurm", "SLURM_PROCID", "SLURM_NTASKS"
    )


def rank_from_environment(environ: Mapping[str, str]) -> int | None:
    """The rank in an environment that whichever launcher has made, nearest launcher first."""
    env = _EnvironmentNumbers(environ)
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
    return next((rank for name in names if (rank := env.number(name)) is not None), None)


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a world of our own: what says who is which rank of another one is left out."""
    return {name: value for name, value in environ.items() if not _WORLD_VARIABLES.match(name)}


_LOCAL_VARIABLES = {
    "hydra": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "openmpi": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "torchrun": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "slurm": ("SLURM_LOCALID", ""),
    "pmi": ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
}


class _EnvironmentNumbers:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def number(self, name: str) -> int | None:
        text = self.environ.get(name, "")
        return int(text) if text.isascii() and text.isdigit() else None

    def world(self, kind: str, rank_name: str, size_name: str) -> World | None:
        rank, size = self.number(rank_name), self.number(size_name)
        if rank is None or size is None or rank >= size:
            return None
        local_rank, local_size = _LOCAL_VARIABLES[kind]
        return World(kind, rank, size, self.number(local_rank), self.number(local_size))
