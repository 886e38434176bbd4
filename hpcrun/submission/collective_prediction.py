"""Prediction of collectives for ranks of a job, a platform, a cluster or an NCCL log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hpcrun.errors import SiteError, UsageError
from hpcrun.specs.load import ResolvedJob, load_job
from hpcrun.specs.placement import place_in_blocks
from hpcrun.submission.placement_preview import preview_placement, require_network
from hpcrun.tuning.log.nccl_log import NcclLog, machine_from_log
from hpcrun.tuning.model.nccl_model import model_version_notes
from hpcrun.tuning.model.platforms import (
    CollectiveLibrary,
    ModelErrorSpec,
    PlatformSpec,
    find_model_error,
    find_platform,
)
from hpcrun.tuning.model.predict import (
    AlphaBetaInput,
    PredictedCollective,
    Prediction,
    predict_alpha_beta,
    predict_nccl,
)


@dataclass(frozen=True)
class RankLayout:
    """Where the ranks are: of a job, or given by numbers; and what the network is known from."""

    job: Path | None
    overrides: Sequence[str]
    nodes: int | None
    ranks_per_node: int | None
    platform_name: str | None
    topology: Path | None
    cluster: str | None

    def __post_init__(self) -> None:
        if self.names_job and self.nodes is not None:
            source = self.job or self.overrides[0]
            raise UsageError(f"--nodes: {source} says how many already; leave one of the two out")

    @property
    def names_job(self) -> bool:
        """Whether there is a job, by its file or by overrides alone."""
        return self.job is not None or bool(self.overrides)

    @cached_property
    def platform(self) -> PlatformSpec | None:
        """The platform that was named."""
        return find_platform(self.platform_name) if self.platform_name else None

    @cached_property
    def resolved(self) -> ResolvedJob:
        """The job."""
        return load_job(self.job, self.overrides)

    def size(self) -> tuple[int, int]:
        """Nodes, and ranks on each."""
        if self.names_job:
            spec = self.resolved.spec
            return -(-spec.ranks // spec.ranks_per_node), spec.ranks_per_node
        if self.nodes is None:
            raise UsageError("no ranks are given; give a JOB, or --nodes N, or --log FILE")
        ranks_per_node = self.ranks_per_node or (self.platform.gpus_per_node if self.platform else None)
        if ranks_per_node is None:
            raise UsageError("--ranks-per-node: is missing, and no platform says how many GPUs a node has")
        return self.nodes, ranks_per_node

    def network(self) -> AlphaBetaInput:
        """Nodes and ranks in the network: the platform's own levels, or the cluster's."""
        nodes, ranks_per_node = self.size()
        platform = self.platform
        inside = platform.within if platform else None
        reduce_s = 1 / (platform.reduce_GBps * 1e9) if platform and platform.reduce_GBps else 0.0
        if platform and not self.topology and (fabric := platform.fabric(nodes)) is not None:
            ranks = place_in_blocks(fabric.nodes, nodes * ranks_per_node, ranks_per_node).ranks
            small = platform.small_fabric(nodes)
            up_to = platform.small_messages.up_to_bytes if platform.small_messages else 0
            return AlphaBetaInput(fabric, ranks, inside, reduce_s, small, up_to)
        if platform and not (self.topology or self.cluster or self.names_job):
            raise UsageError(
                f"--platform {self.platform_name}: does not say what its network's levels carry; --topology"
                " FILE --cluster NAME tells it, or a platform FILE.yaml with `levels`"
            )
        job = self.resolved if self.names_job else None
        partition = job.spec.resources.partition if job else None
        try:
            network = require_network(
                self.topology, self.cluster or (job.spec.cluster if job else None), partition
            )
        except SiteError as error:
            raise SiteError(f"{error}; --platform NAME|FILE.yaml needs no cluster") from None
        if job is not None:
            ranks = preview_placement(job.spec, job.plan, network).placed.placement.ranks
        elif len(network.fabric.nodes) < nodes:
            raise UsageError(f"--nodes {nodes}: the topology has {len(network.fabric.nodes)}")
        else:
            ranks = place_in_blocks(network.fabric.nodes, nodes * ranks_per_node, ranks_per_node).ranks
        return AlphaBetaInput(network.fabric, ranks, inside, reduce_s)

    def errors(self, library: CollectiveLibrary, nodes: int) -> Callable[[int], ModelErrorSpec | None]:
        """The model's error by message size, where it was measured."""
        return lambda size: find_model_error(self.platform, library, nodes, size)


def predict_collective(
    layout: RankLayout,
    collective: PredictedCollective,
    library: CollectiveLibrary,
    sizes: list[int],
    version: tuple[int, int],
) -> Prediction:
    """The prediction by NCCL's model of the platform, or by the network's levels."""
    if library == "nccl" and layout.platform is not None:
        return _predict_by_platform(layout, layout.platform, collective, sizes, version)
    network = layout.network()
    if library == "nccl":
        note = (
            "nothing is known of NCCL's graphs here (--platform NAME, or --log FILE): α-β times of"
            " algorithms like NCCL's, good for their order only"
        )
        source = "as the cluster's levels say"
        return predict_alpha_beta(network, library, collective, sizes, lambda _: None, source, [note])
    source = f"levels of {network.fabric.source}"
    if layout.platform:
        source = f"{layout.platform_name}: {layout.platform.source}"
    errors = layout.errors(library, len({*network.ranks}))
    return predict_alpha_beta(network, library, collective, sizes, errors, source)


def _predict_by_platform(
    layout: RankLayout,
    platform: PlatformSpec,
    collective: PredictedCollective,
    sizes: list[int],
    version: tuple[int, int],
) -> Prediction:
    nodes, ranks_per_node = layout.size()
    machine = platform.machine(nodes, ranks_per_node, version)
    if machine is None:
        kind = "one node" if nodes == 1 else "several nodes"
        raise UsageError(
            f"--platform {layout.platform_name}: NCCL's graphs for {kind} are not known; use --log FILE"
        )
    source, notes = f"{layout.platform_name}: {platform.source}", model_version_notes(version)
    return predict_nccl(machine, collective, sizes, layout.errors("nccl", nodes), source, notes=notes)


def predict_from_log(
    layout: RankLayout, collective: PredictedCollective, sizes: list[int], log: NcclLog, path: Path
) -> Prediction:
    """The prediction by the table in an NCCL log, or by the graphs in it."""
    platform = layout.platform
    capability = platform.capability if platform else None
    machine, notes = machine_from_log(log, str(path), layout.nodes, layout.ranks_per_node, capability)
    if platform is not None:
        machine = replace(machine, cpu=platform.cpu, nic_latency_us=platform.nic_latency_us)
    table = log.expectations(collective) if collective != "alltoall" else {}
    errors = layout.errors("nccl", machine.nodes)
    source = f"{path}, {log.library or 'NCCL'} {log.version or 'of unknown version'}"
    return predict_nccl(machine, collective, sizes, errors, source, table or None, notes)
