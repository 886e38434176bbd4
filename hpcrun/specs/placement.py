"""Placement: which node of an attempt each rank stands on, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcrun.errors import UsageError
from hpcrun.mesh import ParallelDegrees
from hpcrun.specs.records import read_json, write_json

BoundBy = Literal["rank", "either", "launcher"]


@dataclass(frozen=True)
class Binding:
    """What a local rank should use; None and empty where the node has none, or does not say."""

    local_rank: int
    gpu: int | None = None
    """By its place in PCI order among all GPUs of the node."""
    uuid: str | None = None
    nic: str | None = None
    cpus: str = ""
    """A list such as 0-3,8."""


@dataclass(frozen=True)
class Placement:
    """The node of every rank, in rank order; prints, dumps to JSON and reads back."""

    ranks: tuple[str, ...]
    spares: tuple[str, ...] = ()
    """Nodes that stand by, without ranks."""
    method: str = "as given"
    """How it was found: exact, heuristic, as given."""
    why: tuple[str, ...] = ()
    """In words, a line each."""
    bindings: tuple[Binding | None, ...] = ()
    """What each rank uses of its node; None for one whose node has said nothing of itself."""
    bound_by: BoundBy = "rank"
    """Who binds the ranks to their CPUs.

    rank: each itself, so that one which comes up bound is an error; either: the launcher or a container may
    have done it, and what holds is told; launcher: nothing is placed.
    """

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in the order of their first ranks."""
        return tuple(dict.fromkeys(self.ranks))

    @property
    def per_node(self) -> int:
        """The most ranks that a node has."""
        return max(Counter(self.ranks).values(), default=0)

    def binding(self, rank: int) -> Binding | None:
        """What a rank uses of its node; None where that was not decided."""
        return self.bindings[rank] if rank < len(self.bindings) else None

    def on(self, node: str) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, where in enumerate(self.ranks) if where == node]

    def local_ranks(self) -> list[int]:
        """The place of every rank among those of its node."""
        seen: dict[str, int] = {}
        places = []
        for node in self.ranks:
            places.append(seen.get(node, 0))
            seen[node] = places[-1] + 1
        return places

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "nodes": list(self.nodes),
            "ranks": list(self.ranks),
            "local_ranks": self.local_ranks(),
            "spares": list(self.spares),
            "method": self.method,
            "why": list(self.why),
            "bindings": [asdict(binding) if binding else None for binding in self.bindings],
            "bound_by": self.bound_by,
        }


def write_placement(path: Path, placement: Placement, degrees: ParallelDegrees) -> None:
    """Put a placement in its file, with the mesh coordinate of every rank where the mesh spans them."""
    ranks = range(len(placement.ranks))
    spans = degrees.world_size == len(placement.ranks)
    mesh = [degrees.coordinates(rank) for rank in ranks] if spans else None
    write_json(path, placement.as_json() | {"mesh": mesh})


def read_placement(path: Path) -> tuple[Placement, list[dict[str, int]] | None] | None:
    """A placement and its mesh coordinates, or None where there is no file; UsageError for a damaged one."""
    record = read_json(path)
    if record is None:
        return None
    try:
        return _parse_placement(record)
    except (KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{path}: is not a placement of this version of hpcrun; start the run again"
        ) from None


def _parse_placement(record: Mapping[str, Any]) -> tuple[Placement, list[dict[str, int]] | None]:
    # Placements of a run that began before there were bindings have none.
    bindings = tuple(Binding(**binding) if binding else None for binding in record.get("bindings", ()))
    placement = Placement(
        tuple(record["ranks"]),
        tuple(record["spares"]),
        record["method"],
        tuple(record["why"]),
        bindings,
        record.get("bound_by", "either"),
    )
    return placement, record["mesh"]


def place_in_blocks(nodes: Sequence[str], ranks: int, per_node: int) -> Placement:
    """Neighbouring ranks on the same node, nodes in the given order; UsageError where they are too few."""
    if len(nodes) * per_node < ranks:
        raise UsageError(
            f"resources.nodes: {ranks} ranks with {per_node} on each node need"
            f" {-(-ranks // per_node)} nodes, but there are {len(nodes)}: {','.join(nodes)}"
        )
    return Placement(tuple(nodes[rank // per_node] for rank in range(ranks)))


def with_explanation(
    placement: Placement, spares: Sequence[str], method: str, why: Sequence[str]
) -> Placement:
    """The same with what is known of how it came about."""
    return replace(placement, spares=tuple(spares), method=method, why=tuple(why))
