"""Placement: which node of an attempt each rank stands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcrun.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """The node of every rank, in rank order; prints, dumps to JSON and reads back."""

    ranks: tuple[str, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in the order of their first ranks."""
        return tuple(dict.fromkeys(self.ranks))

    @property
    def per_node(self) -> int:
        """The most ranks that a node has."""
        return max(map(self.ranks.count, self.nodes), default=0)

    def on(self, node: str) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, where in enumerate(self.ranks) if where == node]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"nodes": list(self.nodes), **asdict(self)}


def in_blocks(nodes: Sequence[str], ranks: int, per_node: int) -> Placement:
    """Neighbouring ranks on the same node, nodes in the given order; UsageError where they are too few."""
    if len(nodes) * per_node < ranks:
        raise UsageError(
            f"resources.nodes: {ranks} ranks with {per_node} on each node need"
            f" {-(-ranks // per_node)} nodes, but there are {len(nodes)}: {','.join(nodes)}"
        )
    return Placement(tuple(nodes[rank // per_node] for rank in range(ranks)))
