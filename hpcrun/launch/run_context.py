"""Where a supervisor works: on this machine alone or in an allocation, and how ranks start there."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from hpcrun.address import HostAddress, reachable_address
from hpcrun.errors import SiteError, UsageError
from hpcrun.fabric.domains import failure_domains
from hpcrun.fabric.graph import Fabric
from hpcrun.fabric.place import order_granted_nodes
from hpcrun.fabric.topology_reader import fabric_from_addresses, find_fabric
from hpcrun.fabric.traffic import estimate_traffic
from hpcrun.launch.agents.agent_nodes import AgentNodes
from hpcrun.launch.agents.agent_pool import AgentPool
from hpcrun.launch.agents.local_node import LocalNode
from hpcrun.launch.agents.nodes import Nodes
from hpcrun.launch.failover.state import FailoverState, read_left_out_nodes
from hpcrun.launch.launchers import HydraLauncher, Launcher, MpirunLauncher, SrunLauncher
from hpcrun.launch.rank_command import SRUN_OPTIONS_VARIABLE, template_words
from hpcrun.launcher_world import without_rank_variables
from hpcrun.process import environment_with_package
from hpcrun.runs.lease import Leadership
from hpcrun.slurm.allocation import Allocation, find_allocation, step_environment
from hpcrun.slurm.cluster_state import LiveCluster, query_topology
from hpcrun.specs.cluster import ClusterSpec, NetworkSpec, find_cluster
from hpcrun.specs.fields import matches_any_pattern, unset_variables
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement, place_in_blocks, with_explanation
from hpcrun.specs.plan import Plan
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.launch_checks import launcher_name, why_no_step_options


@dataclass(frozen=True)
class RunContext:
    """The place itself, as a value."""

    allocation: Allocation | None = None
    cluster: ClusterSpec | None = None
    _topology: list[LiveCluster] = field(default_factory=list, compare=False, repr=False)
    """As Slurm has told it once: after a fault nobody waits for it again."""

    @property
    def is_here(self) -> bool:
        """Whether all ranks stand on this very host."""
        return self.allocation is None or self.allocation.nodes == (os.uname().nodename,)

    @property
    def is_batch(self) -> bool:
        """Whether a job that was submitted has brought us here."""
        return self.allocation is not None and self.allocation.is_batch

    @property
    def address_here(self) -> HostAddress:
        """Where the other nodes of the allocation reach this host."""
        network = self.cluster.network if self.cluster else NetworkSpec()
        names = self.allocation.nodes if self.allocation else ()
        return reachable_address(network.interface, names, network.fabric_suffix)

    def per_node(self, spec: JobSpec) -> int:
        """How many ranks each node gets; UsageError where there are too few nodes."""
        resources = spec.resources
        if self.allocation is None:
            if resources.nodes > 1:
                raise UsageError(
                    f"resources.nodes: {resources.nodes} nodes are asked for, but this is one machine; use"
                    " hpcrun submit, run this inside an allocation (salloc), or set resources.nodes=1"
                )
            return spec.ranks
        nodes = self.allocation.nodes
        spread = resources.nodes == 1 and resources.ranks_per_node is None
        # A job that says nothing of nodes takes all that there are.
        per_node = -(-spec.ranks // max(1, len(nodes) - resources.spares)) if spread else spec.ranks_per_node
        place_in_blocks(nodes, spec.ranks, per_node)
        return per_node

    def place(
        self, spec: JobSpec, plan: Plan | None, nodes: Nodes, excluded: Collection[str] = ()
    ) -> Placement:
        """A node for every rank, in the order that costs the step's traffic least."""
        per_node = self.per_node(spec)
        degrees, ranks = (plan.degrees, plan.degrees.world_size) if plan else (spec.degrees, spec.ranks)
        if self.allocation is None:
            return Placement((os.uname().nodename,) * ranks)
        placed = order_granted_nodes(
            self._fabric(nodes),
            [node for node in self.allocation.nodes if node in nodes.alive],
            ranks,
            per_node,
            degrees,
            estimate_traffic(spec.model, plan, spec),
            policy=spec.resources.placement,
            avoid=excluded,
        )
        return with_explanation(placed.placement, placed.spares, placed.method, placed.why)

    def _fabric(self, nodes: Nodes) -> Fabric:
        """The whole network, as the profile or Slurm has it; else ours alone, by the addresses of the nodes.

        The whole, because a switch carries as much as all the nodes below it need, not only those of the job.
        """
        if not self._topology:
            self._topology.append(query_topology(self.cluster.slurm_cluster if self.cluster else None))
        fabric = find_fabric(self.cluster, self._topology[0], None)
        addresses = nodes.addresses
        return (
            fabric_from_addresses(addresses) if addresses and not (fabric.levels or fabric.grids) else fabric
        )

    def domains(self, nodes: Nodes, names: Sequence[str]) -> dict[str, dict[str, str | None]]:
        """What fails together, by level of the fabric; nothing where there is no fabric."""
        return {} if self.allocation is None else failure_domains(self._fabric(nodes), names)

    def launcher(self, spec: JobSpec) -> Launcher:
        """What starts the ranks: by the profile between nodes, Hydra on one."""
        cluster, step = self.cluster, template_words(os.environ, SRUN_OPTIONS_VARIABLE)
        launcher = launcher_name(cluster)
        if step and (why := why_no_step_options(launcher)):
            raise SiteError(why)
        if self.allocation is None or launcher == "hydra":
            interface = None
            if not self.is_here:
                # Its proxies on the other nodes come back to this address, whatever our name means to them.
                with suppress(SiteError):  # told where the agents are to come in
                    here = self.address_here
                    # Of an interface it takes the IPv4 address alone.
                    interface = here.interface if ":" not in here.text else None
            return HydraLauncher(agents=not self.is_here, interface=interface)
        if launcher == "mpirun":
            return MpirunLauncher()
        pmi = cluster.mpi.pmi if cluster else "pmi2"
        return SrunLauncher(pmi, [*self._step_options(spec), *step], self.allocation.nodes)

    def _step_options(self, spec: JobSpec) -> list[str]:
        cluster, resources = self.cluster, spec.resources
        options = [f"--cpus-per-task={resources.cpus_per_rank}"] if resources.cpus_per_rank else []
        if not options:
            options = ["--cpu-bind=none"]
        if cluster and cluster.gpus.bind and resources.gpus_per_node:
            options.append(f"--gpu-bind={cluster.gpus.bind}")
        return options

    def inherited_environment(self, spec: JobSpec) -> dict[str, str]:
        """What agents and ranks inherit of our own environment: nothing that the job unsets, or denies."""
        # A batch job was submitted without what is denied, and what the site has set since then is meant.
        deny = [] if self.is_batch else [*(self.cluster.env_deny if self.cluster else ()), *spec.env_deny]
        unset, environ = unset_variables(spec.env), without_rank_variables(os.environ)
        left = {k: v for k, v in environ.items() if k not in unset and not matches_any_pattern(k, deny)}
        return environment_with_package(left)

    @contextmanager
    def nodes(self, run: RunDir, spec: JobSpec, succession: FailoverState | None = None) -> Iterator[Nodes]:
        """The nodes, with an agent on each where there are to be any, for as long as the block lasts.

        With a `succession` the agents are there already, and were another supervisor's.
        """
        if self.allocation is None or (self.is_here and (succession is None or succession.epoch is None)):
            here = LocalNode(run)
            try:
                yield here
            finally:
                here.close()
            return
        names = self.allocation.nodes
        environ = step_environment(self.inherited_environment(spec))
        address = self.address_here.text
        leadership = Leadership(run, succession.epoch if succession else None)
        missing, gone = (succession.missing, read_left_out_nodes(run)[0]) if succession else ("", frozenset())
        crew = AgentPool(run, leadership, address, names, missing, gone)
        try:
            again = self.allocation
            crew.set_restart_command(lambda node: [*again.agent_steps(run, [node])[node,], "called"], environ)
            if succession is None:
                crew.start(self.allocation.agent_steps(run, names), environ)
            else:
                crew.adopt(starts_missing=succession.is_in_place)
            yield AgentNodes(crew, run)
        finally:
            crew.close()


def find_run_context(cluster: str | None) -> RunContext:
    """Where this process stands; in an allocation the profile of that name, or the default one, holds."""
    allocation = find_allocation(os.environ)
    if allocation is None:
        return RunContext()
    return RunContext(allocation, None if cluster == "local" else find_cluster(cluster))
