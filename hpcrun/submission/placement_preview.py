"""The current network, and where a job would be placed in it; also offline, from a captured topology."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.errors import SiteError, UsageError
from hpcrun.fabric.cost import BLOCK
from hpcrun.fabric.graph import Fabric
from hpcrun.fabric.place import PlacementResult, place_job
from hpcrun.fabric.topology_reader import find_fabric
from hpcrun.fabric.traffic import estimate_traffic
from hpcrun.health.lemon_nodes import load_nodes_to_avoid
from hpcrun.hostlist import expand_hosts
from hpcrun.slurm.cluster_state import LiveCluster, query_cluster
from hpcrun.slurm.nodes import NodeRecord
from hpcrun.specs.badnodes import bad_node_files, load_bad_nodes
from hpcrun.specs.cluster import ClusterSpec, find_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.specs.plan import Plan

FREE_STATE = "free"
_UNAVAILABLE_FLAGS = {"RESERVED", "COMPLETING", "PLANNED"}
"""Flags of an idle node that Slurm gives to no job now, or holds for another one."""


@dataclass(frozen=True)
class NetworkState:
    """The nodes, how they hang together, and in which state each is."""

    fabric: Fabric
    states: Mapping[str, str] = field(default_factory=dict)
    """free, busy, out of service, or unknown, by node; nodes to keep away from are `bad`."""
    bad: Mapping[str, str] = field(default_factory=dict)
    """Nodes to keep away from, with the reason."""
    notes: tuple[str, ...] = ()
    """What is unusual or unknown about the network."""
    damaged: tuple[str, ...] = ()
    """The parts of the topology and of the lists of bad nodes that cannot be read, and are ignored."""

    @property
    def free(self) -> list[str]:
        """The nodes that a job could have now, in Slurm's order."""
        return [node for node in self.fabric.nodes if self.states.get(node) == FREE_STATE]


@dataclass(frozen=True)
class PlacementPreview:
    """Where a job would be placed if Slurm gave it the most suitable nodes."""

    network: NetworkState
    placed: PlacementResult
    leaves: int | None
    """Under how few leaf switches its nodes find room; None where no leaves are known."""
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        rest = {"leaves": self.leaves, "free": self.network.free, "bad": dict(self.network.bad)}
        return {
            **self.placed.as_json(),
            **rest,
            "source": self.network.fabric.source,
            "notes": list(self.notes),
        }


def require_network(
    topology: Path | None, cluster: str | None, partition: str | None = None, reservation: str | None = None
) -> NetworkState:
    """The network of a file, or of the live cluster; SiteError where there is neither."""
    profile = find_cluster(None if cluster in (None, "default", "local") else cluster)
    if topology is not None:
        return load_network(profile, None, file=topology)
    try:
        live = query_cluster(profile.slurm_cluster if profile else None)
    except SiteError as error:
        raise SiteError(f"{error}; --topology FILE reads a captured topology") from None
    return load_network(profile, live, partition=partition, reservation=reservation)


def load_network(
    cluster: ClusterSpec | None,
    live: LiveCluster | None,
    *,
    file: Path | None = None,
    partition: str | None = None,
    needed: int = 0,
    reservation: str | None = None,
) -> NetworkState:
    """Load the network from a file, the profile or Slurm; without Slurm every node counts as free.

    `needed`: how many nodes the job takes; no more nodes are avoided for the faults that runs saw than leave
    these. `reservation`: the job's own, whose nodes are free to the job; nodes of others are not.
    """
    bad, now = load_bad_nodes(bad_node_files().values()), time.time()
    avoided = bad.active(now)
    records = live.nodes if live else ()
    if live and partition:
        records = tuple(live.nodes_of(partition)) or records
    fabric = find_fabric(cluster, live, file, [node.name for node in records] or None)
    states = dict.fromkeys(fabric.nodes, FREE_STATE if live is None else "unknown")
    states |= {node.name: _node_state(node, reservation) for node in records if node.name in states}
    where = partition or (cluster.default_partition if cluster else None)
    among = (live.nodes_of(where) if live and where else []) or records
    lemons = load_nodes_to_avoid([node.name for node in among] or fabric.nodes, avoided, needed, now)
    avoided |= lemons.active(now)
    states |= dict.fromkeys((node for node in avoided if node in states), "bad")
    unread, notes = (fabric.notes, ()) if fabric.is_unread else ((), fabric.notes)
    return NetworkState(fabric, states, avoided, notes, (*unread, *bad.notes, *lemons.notes))


def _node_state(node: NodeRecord, reservation: str | None) -> str:
    usable = node.state.usable
    if usable is None:
        return "unknown"
    if not usable:
        return "out of service"
    taken = _UNAVAILABLE_FLAGS & set(node.state.flags)
    if reservation and node.reservation == reservation:
        taken -= {"RESERVED"}
    return FREE_STATE if node.state.name == "IDLE" and not taken else "busy"


def preview_placement(spec: JobSpec, plan: Plan | None, network: NetworkState) -> PlacementPreview:
    """Place a job; if too few nodes are free, among all in service. UsageError if these are too few."""
    resources = spec.resources
    excluded = set(expand_hosts(resources.exclude or "", "resources.exclude"))
    traffic = estimate_traffic(spec.model, plan, spec)
    usable = [
        node for node in network.fabric.nodes if network.states.get(node) in (FREE_STATE, "busy", "unknown")
    ]
    notes: list[str] = []
    choices = [("", network.free), ("not enough nodes are free now: placed among all in service", usable)]
    if resources.placement == "pin":
        choices = [("", list(expand_hosts(resources.nodelist or "", "resources.nodelist")))]
    for note, nodes in choices:
        notes = [note] if note else []
        try:
            placed = place_job(
                network.fabric,
                nodes,
                spec.ranks,
                spec.ranks_per_node,
                spec.degrees,
                traffic,
                spares=resources.spares,
                policy=resources.placement,
                avoid=excluded,
                node_count=resources.nodes,
            )
            break
        except UsageError:
            if nodes is choices[-1][1]:
                raise
    return PlacementPreview(network, placed, _count_leaves(network.fabric, placed), tuple(notes))


def _count_leaves(fabric: Fabric, placed: PlacementResult) -> int | None:
    """How many leaf switches the nodes are under; blocks of NVLink are below the leaf."""
    index = next((at for at, level in enumerate(fabric.levels) if level.name != BLOCK), None)
    if index is None:
        return None
    above = {fabric.unit(node, index) for node in (*placed.placement.nodes, *placed.spares)}
    return None if None in above else len(above)
