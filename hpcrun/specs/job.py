"""JobSpec: everything a job file can say, with its defaults; `train --print-schema` prints it for editors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hpcrun.mesh import ParallelDegrees
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.data import DataSpec
from hpcrun.specs.elastic import ElasticSpec
from hpcrun.specs.fields import (
    AbsolutePath,
    ModuleName,
    NoNulText,
    SingleLineText,
    SpecSection,
    SystemName,
    VariableName,
    VariablePattern,
    keep_required_variables,
)
from hpcrun.specs.model import ModelSpec
from hpcrun.specs.preflight import PreflightSelection
from hpcrun.specs.resources import JobContainerSpec, ResourcesSpec, RetrySpec, SweepSpec
from hpcrun.specs.telemetry import HookList, TelemetrySpec
from hpcrun.specs.watch import WatchSpec

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

_OF_RANKS = {
    "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
}  # fmt: skip
_OF_OTHERS = {"HPCRUN_": "hpcrun", "SUBMITIT_": "hpcrun", "SLURM_": "Slurm", "PMI_": "MPI", "PMIX_": "MPI"}


def _require_free_name(name: str) -> str:
    if name in _OF_RANKS:
        raise ValueError("is set for each rank, so that it finds the others; leave it out")
    for prefix, owner in _OF_OTHERS.items():
        if name.startswith(prefix):
            raise ValueError(f"names that begin with {prefix} are set by {owner}; choose another name")
    return name


def _program_first(command: list[str]) -> list[str]:
    if not command[0]:
        raise ValueError("its first word is the program to run, and is empty")
    return command


_Variable = Annotated[VariableName, AfterValidator(_require_free_name)]
"""An environment variable that nobody else sets."""


class ParallelSpec(SpecSection):
    """How the model and the batch are cut: world = pp · dp_replicate · dp_shard · cp · tp."""

    pp: int = Field(default=1, ge=1, description="pipeline stages (ranks along the layers)")
    dp_replicate: int = Field(default=1, ge=1, description="full replicas of the (sharded) model")
    dp_shard: int = Field(default=1, ge=1, description="ranks that share the states of one replica (FSDP)")
    cp: int = Field(default=1, ge=1, description="context parallel: ranks along the sequence")
    tp: int = Field(default=1, ge=1, description="tensor and sequence parallel: ranks within a layer")
    ep: int = Field(default=1, ge=1, description="expert parallel")
    zero: int | None = Field(
        default=None,
        ge=0,
        le=3,
        description="0 replicate; 1 shard the optimizer; 2 also gradients; 3 also parameters."
        " Default: 0 when dp_shard is 1, else 3, under pp 1",
    )
    schedule: PipelineSchedule = Field(default="1f1b", description="pipeline schedule")
    virtual_stages: int | None = Field(
        default=None,
        ge=1,
        description="stages per rank; default 2 for interleaved and zero_bubble, else 1",
    )
    microbatches: int | None = Field(
        default=None,
        ge=1,
        description="microbatches per step and data-parallel rank; gbs = mbs · microbatches · dp",
    )


class LrScalingSpec(SpecSection):
    """Scale the learning rate with the global batch: lr · (gbs/base_gbs), or its square root."""

    rule: Literal["linear", "sqrt"]
    base_gbs: int = Field(ge=1, description="global batch for which `lr` was chosen")


class EvalSpec(SpecSection):
    """Loss on the held-out share of the data."""

    every: int = Field(
        default=0, ge=0, description="steps between evaluations; 0: only before and after training"
    )
    sequences: int | None = Field(
        default=None, ge=1, description="number of held-out sequences to evaluate; default: all"
    )


class ProfileSpec(SpecSection):
    """A window of steps recorded by torch's profiler, one trace file a rank."""

    start: int = Field(ge=1, description="first step to record")
    steps: int = Field(default=3, ge=1, description="number of steps to record")
    ranks: list[Annotated[int, Field(ge=0)]] = Field(default=[0], min_length=1, description="ranks to record")


class TrainSpec(SpecSection):
    """Optimization: number of steps, batch sizes, schedule."""

    steps: int = Field(default=100, ge=1, description="optimizer steps")
    mbs: int = Field(default=1, ge=1, description="sequences per microbatch")
    gbs: int | None = Field(
        default=None, ge=1, description="sequences per step; default mbs · microbatches · dp"
    )
    lr: float = Field(default=3e-4, gt=0, description="peak learning rate")
    lr_scaling: LrScalingSpec | None = Field(default=None, description="scale lr with the global batch")
    min_lr: float = Field(
        default=0.1, ge=0, le=1, description="final learning rate as a fraction of the peak"
    )
    warmup: int = Field(default=0, ge=0, description="steps of linear warm-up")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine", description="learning-rate schedule after the warm-up"
    )
    decay: float = Field(default=0.1, gt=0, le=1, description="fraction of the steps over which wsd decays")
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW weight decay")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.95], min_length=2, max_length=2, description="AdamW betas"
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon")
    grad_clip: float | None = Field(default=1.0, gt=0, description="largest global gradient norm; null: none")
    precision: Literal["fp32", "bf16", "fp64"] = Field(
        default="fp32",
        description="compute precision; bf16 keeps fp32 weights and reductions; fp64 is for checking",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="recompute activations in the backward pass"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the weights and the data order")
    eval: EvalSpec = Field(default=EvalSpec())
    compile: bool = Field(default=False, description="torch.compile each block (needs a C++ compiler)")
    profile: ProfileSpec | None = Field(default=None, description="record a window of steps; null: none")

    @property
    def kept_dtype(self) -> str:
        """The type that weights and moments are kept in, in torch's words."""
        return "float64" if self.precision == "fp64" else "float32"


class JobSpec(SpecSection):
    """A job file, resolved."""

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="name of the run: letters, digits, . _ -",
    )
    model: ModelSpec | None = Field(default=None, description="preset name, sizes, or hf: DIR")
    data: DataSpec | None = Field(default=None, description="text: PATH or tokens: FILE")
    parallel: ParallelSpec = Field(default=ParallelSpec(), description="parallel layout")
    train: TrainSpec = Field(default=TrainSpec(), description="optimization")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="when and where to save")
    resources: ResourcesSpec = Field(
        default=ResourcesSpec(), description="resources to request from the cluster"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto uses cuda only when every local rank has its own GPU"
    )
    env: Annotated[dict[_Variable, NoNulText | None], AfterValidator(keep_required_variables)] = Field(
        default={},
        description="environment of the ranks: names of letters, digits, _ with text values; null unsets"
        " a variable",
    )
    env_deny: list[VariablePattern] = Field(
        default=[],
        description="variables not to inherit from the submitting shell, as shell patterns such as"
        " TRITON_CACHE_DIR or *_CACHE_PATH; in addition to the profile's",
    )
    modules: list[ModuleName] = Field(
        default=[], description="environment modules to load, such as cuda/12.4, after the profile's"
    )
    python: AbsolutePath | None = Field(
        default=None,
        description="an absolute path to Python on the compute nodes; default: the profile's or this one",
    )
    container: JobContainerSpec | None = Field(default=None, description="container for the ranks")
    secrets: dict[_Variable, Annotated[SingleLineText, Field(min_length=1)]] = Field(
        default={}, description="environment of the ranks from files that only you may read: NAME: PATH"
    )
    retry: RetrySpec | None = Field(
        default=None,
        description="when to continue automatically; default for training: whenever there is a save. A"
        " command reports with exit code 75 that it has saved",
    )
    watch: WatchSpec = Field(
        default=WatchSpec(), description="when missing progress counts as a hang; slow nodes"
    )
    preflight: PreflightSelection = Field(
        default=True, description="check nodes before an attempt; a list: only these checks"
    )
    telemetry: TelemetrySpec = Field(default=TelemetrySpec(), description="where else to send metrics")
    hooks: HookList = Field(default=[], description="programs to call when the state of the run changes")
    elastic: ElasticSpec | None = Field(
        default=None, description="continue with fewer replicas; default: never"
    )
    sweep: SweepSpec | None = Field(default=None, description="values to try, each in a run of its own")
    cluster: SystemName | None = Field(
        default=None,
        description="name of a profile (letters, digits, . _ -); local: on this machine, without Slurm;"
        " default: the default profile",
    )
    command: Annotated[list[NoNulText], Field(min_length=1), AfterValidator(_program_first)] | None = Field(
        default=None,
        description="any command, started once per rank, in place of model, data and train",
    )

    @property
    def degrees(self) -> ParallelDegrees:
        """The mesh that the job declares."""
        p = self.parallel
        return ParallelDegrees(pp=p.pp, dp_replicate=p.dp_replicate, dp_shard=p.dp_shard, cp=p.cp, tp=p.tp)

    @property
    def ranks(self) -> int:
        """How many ranks it takes: the mesh's; a command without one has a rank a GPU, else a rank a node."""
        world, resources = self.degrees.world_size, self.resources
        if self.command is None or world > 1:
            return world
        return resources.nodes * (resources.ranks_per_node or resources.gpus_per_node or 1)

    @property
    def ranks_per_node(self) -> int:
        """How many of them stand on each node."""
        return self.resources.ranks_per_node or max(1, self.ranks // self.resources.nodes)

    @property
    def retries(self) -> RetrySpec | None:
        """When it may go on by itself; None for never. A command is not known to save, so it has to say."""
        is_known = self.command is None or self.resources.spares > 0
        return self.retry or (RetrySpec() if is_known else None)


UNSUPPORTED_KEYS = ("parallel.cp", "parallel.ep")
"""Keys whose work is still to come: a value other than the default is refused, ignoring it would be a lie."""
