"""ClusterSpec: what an admin says about a cluster once, so that no user and no script has to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from hpcrun.errors import SpecError, SpecProblem, UsageError
from hpcrun.specs.fields import (
    ExpandablePath,
    MemoryText,
    ModuleName,
    SpecSection,
    SystemName,
    TimeText,
    VariableName,
    VariablePattern,
    keep_required_variables,
)
from hpcrun.specs.preflight import SitePreflightSpec
from hpcrun.specs.profiles import list_profiles
from hpcrun.specs.telemetry import HookList, SiteTelemetrySpec
from hpcrun.specs.validation import problems_of_validation_error
from hpcrun.specs.yaml import YamlDocument, load_yaml, parse_yaml, render_yaml


class PartitionSpec(SpecSection):
    """One partition: what its nodes have, and the limits of a job."""

    default: bool = Field(default=False, description="used when a job names no partition; at most one")
    max_time: TimeText | None = Field(default=None, description="longest time limit, such as 2-00:00:00")
    max_nodes: int | None = Field(default=None, ge=1, description="largest number of nodes per job")
    gpus_per_node: int | None = Field(default=None, ge=0, description="GPUs per node")
    gpu_type: SystemName | None = Field(
        default=None, description="Slurm's name of the GPU type, such as h100"
    )
    cpus_per_node: int | None = Field(default=None, ge=1, description="CPUs per node")
    mem_per_node: MemoryText | None = Field(default=None, description="memory per node, such as 2000G")
    exclusive: bool = Field(default=False, description="request whole nodes")
    qos: SystemName | None = Field(default=None, description="quality of service when a job names none")


class GpuSpec(SpecSection):
    """How GPUs are requested."""

    request: Literal["gpus-per-node", "gres", "gpus", "gpus-per-task", "none"] = Field(
        default="gpus-per-node",
        description="sbatch option: --gpus-per-node=[TYPE:]N, --gres=gpu[:TYPE]:N, --gpus=[TYPE:]N"
        " (total over all nodes, which Slurm may distribute unevenly), or --gpus-per-task (hides GPUs of a"
        " node from each other)",
    )
    typed: bool = Field(default=False, description="include the partition's gpu_type in the request")
    bind: str | None = Field(default="none", description="srun --gpu-bind; null: omit")


class MpiSpec(SpecSection):
    """The MPI library of the ranks, and what starts them."""

    library: Literal["mpich", "openmpi", "intel", "cray", "none"] = Field(
        default="mpich", description="MPI that mpi4py loads at run time"
    )
    libmpi: ExpandablePath | None = Field(default=None, description="path of the library (MPI4PY_LIBMPI)")
    pmi: Literal["pmi2", "pmix", "pmix_v3", "pmix_v4", "pmix_v5", "cray_shasta", "none"] = Field(
        default="pmi2", description="srun --mpi: pmi2 for MPICH, pmix for Open MPI"
    )
    launcher: Literal["hydra", "srun", "mpirun"] = Field(default="hydra", description="what starts the ranks")


class PythonSpec(SpecSection):
    """The interpreter on the compute nodes."""

    path: ExpandablePath | None = Field(default=None, description="default: the interpreter that submits")
    checks: list[str] = Field(default=[], description="modules that must be importable there, such as torch")


class ContainerSpec(SpecSection):
    """How ranks run in containers; supervisor and agents stay outside."""

    runtime: Literal["pyxis", "apptainer", "singularity", "none"] = Field(default="none")
    mounts: list[str] = Field(default=[], description="SOURCE:TARGET[:ro], added to every job")
    options: list[str] = Field(default=[], description="extra arguments for the runtime")


class ModulesSpec(SpecSection):
    """Environment modules."""

    init: list[str] = Field(default=[], description="shell lines that define `module`; the admin's code")
    purge: bool = Field(default=False, description="run `module purge` first")
    load: list[ModuleName] = Field(default=[], description="loaded for every job, before the job's own")


class NetworkSpec(SpecSection):
    """The network between nodes."""

    interface: SystemName | None = Field(default=None, description="IP interface, such as ib0 or eth0")
    hcas: list[SystemName] = Field(default=[], description="InfiniBand or RoCE devices, such as mlx5_0")
    fabric_suffix: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9.-]*$",
        description="suffix that turns a node's name into its fabric address",
    )
    fabric: SystemName | None = Field(
        default=None,
        description="fabric type, such as infiniband or roce-spectrum; see `hpcrun tune checklist`",
    )
    traffic_class: int | None = Field(
        default=None,
        ge=0,
        le=255,
        description="RoCE: traffic class byte of the lossless class (DSCP x 4 + ECN bits)",
    )
    service_level: int | None = Field(
        default=None, ge=0, le=15, description="InfiniBand: service level for jobs"
    )
    adaptive_routing_levels: list[Annotated[int, Field(ge=0, le=15)]] = Field(
        default=[], description="InfiniBand: service levels that the subnet manager routes adaptively"
    )
    address_family: Literal["ipv4", "ipv6"] | None = Field(
        default=None, description="RoCE: address family of the adapters; default: NCCL's default, ipv4"
    )
    address_range: str | None = Field(
        default=None,
        pattern=r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$",
        description="RoCE: network of the adapters' addresses, such as 10.1.0.0/16",
    )
    nccl_topology: ExpandablePath | None = Field(
        default=None, description="NCCL topology file for this type of (virtual) machine"
    )
    reports: ExpandablePath | None = Field(
        default=None,
        description="output of `hpcrun doctor --all --json`, for per-node values",
    )
    policy: ExpandablePath | None = Field(
        default=None, description="file written by `hpcrun tune policy add`: settings with measured gain"
    )


class LevelSpec(SpecSection):
    """One level of the network, counted from the node."""

    name: SystemName = Field(description="leaf, spine, core, ...")
    bandwidth_GBps: float = Field(
        gt=0, description="bandwidth of one node's link at this level, one direction"
    )
    oversubscription: float = Field(
        default=1.0,
        ge=1,
        description="oversubscription of the links into this level: traffic from below over capacity",
    )
    latency_us: float | None = Field(default=None, gt=0, description="latency added by this level, one way")


class TopologySpec(SpecSection):
    """Where the shape of the network is known from, and what its levels carry."""

    source: Literal["slurm", "file", "table", "names", "none"] = Field(
        default="slurm",
        description="where the topology comes from: scontrol, a topology file, the table here, node"
        " names, or flat: one switch",
    )
    file: ExpandablePath | None = Field(
        default=None, description="topology.conf or topology.yaml; with source: file"
    )
    table: dict[SystemName, str | dict[SystemName, str | dict[SystemName, str]]] | None = Field(
        default=None,
        description="leaves with their nodes, {leaf1: n[01-04]}, or spines with their leaves; with"
        " source: table",
    )
    pattern: str | None = Field(
        default=None, description="regular expression on node names with a group `leaf`; with source: names"
    )
    levels: list[LevelSpec] = Field(default=[], description="levels from the leaf upwards")


class FileSystemSpec(SpecSection):
    """One file system as jobs see it."""

    path: ExpandablePath = Field(description="mount point or directory; $USER and ~ are expanded")
    kind: Literal["lustre", "gpfs", "beegfs", "nfs", "weka", "local", "other"] = Field(default="other")
    shared: bool = Field(default=True, description="the same on login and compute nodes")
    purged_days: int | None = Field(
        default=None, ge=1, description="files older than this many days are removed by the site"
    )
    node_write_GBps: float | None = Field(default=None, gt=0, description="write bandwidth of one node")
    write_GBps: float | None = Field(
        default=None, gt=0, description="write bandwidth of one job over all its nodes"
    )


class ClusterSpec(SpecSection):
    """A cluster's profile."""

    name: SystemName = Field(description="name by which jobs select the cluster")
    default: bool = Field(default=False, description="used when a job names no cluster")
    slurm_cluster: SystemName | None = Field(default=None, description="sbatch -M; null: the local one")
    slurm_version: str | None = Field(
        default=None, pattern=r"^[0-9]{2}\.[0-9]{2}(\.[0-9]+)?$", description="such as 24.05, in quotes"
    )
    slurm_module: ModuleName | None = Field(
        default=None, description="environment module that provides the Slurm commands"
    )
    account: SystemName | None = Field(default=None, description="account when a job names none")
    partitions: dict[SystemName, PartitionSpec] = Field(default={}, description="partitions by name")
    gpus: GpuSpec = GpuSpec()
    mpi: MpiSpec = MpiSpec()
    python: PythonSpec = PythonSpec()
    container: ContainerSpec = ContainerSpec()
    modules: ModulesSpec = ModulesSpec()
    network: NetworkSpec = NetworkSpec()
    topology: TopologySpec = TopologySpec()
    file_systems: dict[SystemName, FileSystemSpec] = Field(
        default={}, description="file systems by name: scratch, home, ..."
    )
    preflight: SitePreflightSpec = SitePreflightSpec()
    quota: list[str] = Field(
        default=[], description="command that prints the user's quota, as a list of words"
    )
    root: ExpandablePath | None = Field(default=None, description="directory for run directories")
    log_roots: list[ExpandablePath] = Field(
        default=[], description="directories in which run directories may be made; empty: anywhere"
    )
    setup: list[str] = Field(default=[], description="shell lines to run before the job; the admin's code")
    teardown: list[str] = Field(default=[], description="shell lines to run after the job; the admin's code")
    env: Annotated[dict[VariableName, str | None], AfterValidator(keep_required_variables)] = Field(
        default={}, description="environment of every job; null unsets a variable; the job's own values win"
    )
    env_deny: list[VariablePattern] = Field(
        default=[],
        description="variables that no job inherits from the submitting shell, as shell patterns such as"
        " TRITON_CACHE_DIR or *_CACHE_PATH",
    )

    telemetry: SiteTelemetrySpec = SiteTelemetrySpec()
    hooks: HookList = Field(
        default=[], description="programs to call for every run, in addition to the job's; the admin's code"
    )

    @property
    def default_partition(self) -> str | None:
        """The partition of a job that names none, as far as the profile says."""
        return next((name for name, partition in self.partitions.items() if partition.default), None)


def load_cluster(path: Path) -> ClusterSpec:
    """Read a profile; SpecError lists every mistake with file, line and key."""
    return _resolve_cluster(load_yaml(path))


def parse_cluster(text: str, name: str) -> ClusterSpec:
    """The same for text that is already in memory."""
    return _resolve_cluster(parse_yaml(text, name))


def render_cluster(cluster: ClusterSpec) -> str:
    """A profile as YAML, defaults included; parse_cluster reads it back to the same profile."""
    return render_yaml(cluster.model_dump(mode="json"))


def find_cluster(name: str | None = None) -> ClusterSpec | None:
    """The profile of this name or path; without one the default or only one, or None where there is none."""
    if name is not None and (name.endswith((".yaml", ".yml")) or "/" in name):
        return load_cluster(Path(name))
    clusters = {path: load_cluster(path) for path in list_profiles()}
    names = ", ".join(cluster.name for cluster in clusters.values()) or "none"
    if name is not None:
        matches = [cluster for cluster in clusters.values() if cluster.name == name]
        if not matches:
            raise UsageError(f"{name}: no profile of this name; there are: {names}")
        return matches[0]
    chosen = [path for path, cluster in clusters.items() if cluster.default] or list(clusters)
    if len(chosen) > 1:
        places = ", ".join(map(str, chosen))
        raise UsageError(
            f"{places}: which is the cluster? name one of {names}, or set `default: true` in one"
        )
    return clusters[chosen[0]] if chosen else None


def _resolve_cluster(document: YamlDocument) -> ClusterSpec:
    # A key with nothing after it, all its lines commented out, stands for its defaults.
    given = {k: v for k, v in document.values.items() if v is not None or k not in ClusterSpec.model_fields}
    try:
        cluster = ClusterSpec.model_validate(given)
    except ValidationError as error:
        problems = problems_of_validation_error(error, ClusterSpec)
    else:
        problems = list(_contradictions(cluster))
        if not problems:
            return cluster
    raise SpecError(
        [SpecProblem(problem.key, problem.text, document.where(problem.key)) for problem in problems]
    )


def _contradictions(cluster: ClusterSpec) -> Iterable[SpecProblem]:
    defaults = [name for name, partition in cluster.partitions.items() if partition.default]
    for name in defaults[1:]:
        yield SpecProblem(
            f"partitions.{name}.default", f"{defaults[0]} is the default already; keep one of the two"
        )
    topology, mpi = cluster.topology, cluster.mpi
    for source, key in (("file", "file"), ("table", "table"), ("names", "pattern")):
        if topology.source == source and getattr(topology, key) is None:
            yield SpecProblem(f"topology.{key}", f"is missing; topology.source is {source}")
    if mpi.launcher == "hydra" and mpi.library in ("openmpi", "cray"):
        yield SpecProblem("mpi.launcher", f"hydra does not start {mpi.library}; use srun or mpirun")
    if mpi.launcher == "srun" and mpi.library == "mpich" and mpi.pmi.startswith("pmix"):
        yield SpecProblem("mpi.pmi", f"mpich does not speak {mpi.pmi}; use pmi2")
    if cluster.gpus.typed:
        for name, partition in cluster.partitions.items():
            if partition.gpus_per_node and partition.gpu_type is None:
                yield SpecProblem(f"partitions.{name}.gpu_type", "is missing; gpus.typed asks for it")
