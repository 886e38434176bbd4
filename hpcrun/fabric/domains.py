"""What fails together: for every level of the fabric, the unit that each node is in."""

from __future__ import annotations

from collections.abc import Iterable

from hpcrun.fabric.graph import Fabric


def failure_domains(fabric: Fabric, nodes: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """Level → node → unit, innermost level first; None: not known. A fabric without levels gives nothing."""
    chosen = tuple(dict.fromkeys(nodes))
    return {
        level.name: {node: fabric.unit(node, index) for node in chosen}
        for index, level in enumerate(fabric.levels)
    }
