"""The topology of a cluster, from any text or answer that describes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.fabric.graph import Fabric, FabricLevel, flat_fabric, pluralize
from hpcrun.fabric.infiniband import is_ibnetdiscover_output, parse_ibnetdiscover
from hpcrun.fabric.topoconf import check_topoconf
from hpcrun.fabric.tree import BLOCK, build_fabric, level_name
from hpcrun.hostlist import expand_hosts, fold_hosts, sort_hosts
from hpcrun.local_identity import expand_path
from hpcrun.slurm.cluster_state import FLAT_TOPOLOGY_ANSWER, LiveCluster
from hpcrun.slurm.nodes import NodeRecord
from hpcrun.slurm.topology import (
    NamedTopology,
    TopologyUnit,
    find_unread_statements,
    parse_topoconf,
    parse_topology,
    split_topology_address,
)
from hpcrun.specs.cluster import ClusterSpec, LevelSpec, TopologySpec
from hpcrun.specs.yaml import parse_yaml

_TOPOCONF = re.compile(r"^\s*-\s*(?:\{\s*)?topology\s*:", re.MULTILINE)
_YAML = (".yaml", ".yml")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*", re.ASCII)
_GIGA, _MICRO = 1e9, 1e-6
_MOST_NAMED = 200
"""Characters of a host list in a note."""


def parse_fabric(text: str, *, name: str) -> Fabric:
    """The graph that a text describes, whichever form it has; `name` is the file, for messages.

    Forms: scontrol show topology, scontrol show topoconf and topology.yaml, topology.conf, a YAML table of
    leaves, ibnetdiscover. Of several topologies the cluster's default is taken.
    A text that describes none gives a flat Fabric with a note; UsageError where it contradicts itself.
    """
    if units := parse_topology(text):
        fabric = build_fabric(units, name, f"{name} ({_form(units)})")
        if not fabric.nodes:
            raise UsageError("; ".join([f"{name}: no unit in it has nodes", *_unread_line_notes(text, name)]))
        return replace(fabric, notes=(*fabric.notes, *_unread_line_notes(text, name)))
    if is_ibnetdiscover_output(text):
        return parse_ibnetdiscover(text, f"{name} (ibnetdiscover)")
    if _TOPOCONF.search(text):
        return _from_topoconf(text, name)
    table = _table_in(text, name)
    if table is not None:
        return fabric_from_table(table, name)
    words = " ".join(word for word in text.split() if word.isprintable())[:_MOST_NAMED]
    if FLAT_TOPOLOGY_ANSWER in text:
        return flat_fabric((), name, [f"{name}: no topology known, it says: {words}"])
    return flat_fabric(
        (), name, [f"{name}: no topology known, it says: {words or 'nothing'}"], is_unread=True
    )


def _unread_line_notes(text: str, name: str) -> Iterator[str]:
    """Lines among those of a topology that were not understood."""
    lost = find_unread_statements(text)
    if lost:
        line, words = lost[0]
        count = f"{len(lost)} {pluralize('line', len(lost))} not understood and left out"
        yield f"{name}:{line}: {count}, such as {words[:60]!r}; known are SwitchName= and BlockName= lines"


def _form(units: Sequence[TopologyUnit]) -> str:
    kinds = dict.fromkeys(unit.kind for unit in units if unit.kind != "aggregate")
    return "Slurm: " + " and ".join({"switch": "tree"}.get(kind, str(kind)) for kind in kinds)


def _from_topoconf(text: str, name: str) -> Fabric:
    check_topoconf(text, name)
    topologies = parse_topoconf(text)
    chosen = next((topology for topology in topologies if topology.is_default), topologies[0])
    if not chosen.units:
        return flat_fabric((), name, [f"{name}: no switches known, the topology {chosen.name} is flat"])
    blocks = _other_blocks(chosen, topologies)
    fabric = build_fabric([*chosen.units, *blocks], name, f"{name} (topology {chosen.name})")
    others = [topology.name for topology in topologies if topology is not chosen]
    note = f"{name}: of several topologies {chosen.name} is taken, besides {', '.join(others)}"
    note += (
        "; its blocks are a level below the leaves"
        if fabric.levels[:1] == (FabricLevel(BLOCK),) and blocks
        else ""
    )
    return replace(fabric, notes=(note, *fabric.notes)) if others else fabric


def _other_blocks(chosen: NamedTopology, topologies: Iterable[NamedTopology]) -> list[TopologyUnit]:
    """The NVLink blocks of another topology, where the one in use is a tree."""
    if any(unit.kind != "switch" for unit in chosen.units):
        return []
    kinds = (topology.units for topology in topologies if topology is not chosen)
    return list(next((units for units in kinds if units and all(unit.kind == "block" for unit in units)), ()))


def _table_in(text: str, name: str) -> dict[str, Any] | None:
    """The mapping in a YAML file; None where the text is none, and nothing says that it should be."""
    try:
        table = parse_yaml(text, name).values
    except UsageError:
        if name.endswith(_YAML):
            raise
        return None
    return table if name.endswith(_YAML) or _is_table(table) else None


def _is_table(value: Any) -> bool:
    """Whether all of it are lists of hosts, and not words after a colon as in an error's text."""
    if isinstance(value, dict):
        return bool(value) and all(map(_is_table, value.values()))
    try:
        return isinstance(value, str) and len(expand_hosts(value)) > 1
    except UsageError:
        return False


def fabric_from_table(table: Mapping[str, Any], name: str) -> Fabric:
    """Leaves with their nodes, `{leaf1: n[01-04]}`, or nested: `{spine1: {leaf1: n[01-04]}}`."""
    return build_fabric(_units_of(table, name), name, f"{name} (table)", of_slurm=False)


def _units_of(table: Mapping[str, Any], where: str) -> Iterator[TopologyUnit]:
    for name, below in table.items():
        if not _WORD.fullmatch(name):
            raise UsageError(
                f"{where}: {name!r} is not a name of a switch; use letters, digits and . _ : + -"
            )
        if isinstance(below, Mapping):
            yield TopologyUnit("switch", name, children=",".join(below))
            yield from _units_of(below, f"{where} {name}")
        elif below is None or isinstance(below, str):
            yield TopologyUnit("switch", name, below or "")
        else:
            text = f"{where} {name}: must be a list of nodes such as n[01-04], or leaves with their nodes"
            raise UsageError(text)


def fabric_from_names(
    nodes: Iterable[str], pattern: str, features: Mapping[str, Sequence[str]] = {}
) -> Fabric:
    """Leaves from a regular expression with a group `leaf`, and perhaps `spine` and `core`.

    It is searched in each node's name, or where they are given in the node's features.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"topology.pattern: {pattern!r} is not a regular expression: {error}") from None
    groups = [group for group in map(level_name, range(3)) if group in compiled.groupindex]
    if groups[:1] != ["leaf"]:
        raise UsageError(
            f"topology.pattern: {pattern!r} has no group `leaf`; write the part that names the leaf"
            " as (?P<leaf>...)"
        )
    names = tuple(dict.fromkeys(nodes))
    rows: list[tuple[str | None, ...]] = []
    for node in names:
        match = next(
            filter(None, map(compiled.search, features.get(node, ()) if features else (node,))), None
        )
        rows.append(tuple(match[group] if match else None for group in groups))
    missing = [node for node, row in zip(names, rows, strict=True) if row[0] is None]
    notes = [f"topology.pattern finds no leaf for {_few(missing)}"] if missing else []
    if len(missing) == len(names):
        return flat_fabric(names, "topology.pattern", notes, is_unread=True)
    of = "features" if features else "names"
    return Fabric(
        names, tuple(map(FabricLevel, groups)), tuple(rows), {}, f"node {of} (topology.pattern)", tuple(notes)
    )


def fabric_from_addresses(addresses: Mapping[str, tuple[str, str]]) -> Fabric:
    """The part of the topology that a job has, from SLURM_TOPOLOGY_ADDR and its pattern on every node."""
    notes, rows, rails = [], {}, {}
    for node, (address, pattern) in addresses.items():
        levels = split_topology_address(address, pattern)[:-1]
        if not levels and pattern != "node":
            notes.append(f"{node}: the address {address!r} does not fit its pattern {pattern!r}")
        row: dict[str, str] = {}
        for height, (_, text) in enumerate(level for level in reversed(levels) if level[0] == "switch"):
            names = _split_switch_names(text)
            if names:
                row[level_name(height)] = names[0]
            if height == 0 and len(names) > 1:
                rails[node] = names
        row.update((BLOCK, text) for kind, text in levels if kind == "block" and text)
        rows[node] = row
    level_names = {level for row in rows.values() for level in row}
    deepest = max((pattern.count(".") for _, pattern in addresses.values()), default=0)
    names_of = [level for level in (BLOCK, *map(level_name, range(deepest))) if level in level_names]
    if not names_of:
        notes.append("Slurm gives the nodes no place in a topology")
    return Fabric(
        tuple(rows),
        tuple(map(FabricLevel, names_of)),
        tuple(tuple(row.get(level) for level in names_of) for row in rows.values()),
        rails,
        "SLURM_TOPOLOGY_ADDR",
        tuple(notes),
    )


def _split_switch_names(text: str) -> tuple[str, ...]:
    """The switches of one level of an address: a host list where there are several."""
    try:
        return expand_hosts(text) if "[" in text or "," in text else (text,) if text else ()
    except UsageError:
        return (text,)


def find_fabric(
    cluster: ClusterSpec | None,
    live: LiveCluster | None,
    file: Path | None,
    nodes: Sequence[str] | None = None,
) -> Fabric:
    """The best description there is: the file, else the profile's source, else Slurm's answer, else flat.

    `nodes`, else those that Slurm lists, give the order, and what is not among them is left out.
    UsageError for a file or a profile that is wrong; an odd answer of Slurm only leaves a note.
    """
    spec = cluster.topology if cluster else TopologySpec()
    order = tuple(nodes) if nodes is not None else ()
    if file is not None:
        fabric = parse_fabric(_text(file), name=str(file))
        if fabric.is_unread:
            raise UsageError(fabric.notes[0])
    else:
        order = order or tuple(node.name for node in live.nodes) if live else order
        fabric = _from_profile(spec, live, order)
    if order:
        fabric = _restrict_to_nodes(fabric, order)
    return _with_levels(fabric, spec.levels)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None


def _from_profile(spec: TopologySpec, live: LiveCluster | None, order: Sequence[str]) -> Fabric:
    if spec.source == "file" and spec.file is not None:
        file = Path(expand_path(spec.file))
        return parse_fabric(_text(file), name=str(file))
    if spec.source == "table" and spec.table is not None:
        return fabric_from_table(spec.table, "topology.table")
    if spec.source == "names" and spec.pattern is not None:
        return _from_pattern(spec.pattern, live, order)
    if spec.source == "none":
        if len(spec.levels) == 1 and order:
            level = FabricLevel(spec.levels[0].name)
            return Fabric(
                tuple(order), (level,), ((level.name,),) * len(order), {}, "the profile: one switch"
            )
        return flat_fabric(order, "the profile", ["no topology known: the profile says topology.source none"])
    fabric = _from_slurm(live, order)
    if not fabric.levels and not fabric.grids and spec.pattern is not None and order:
        return _from_pattern(spec.pattern, live, order)
    return fabric


def _from_slurm(live: LiveCluster | None, order: Sequence[str]) -> Fabric:
    if live is None:
        return flat_fabric(order, "nothing", ["no topology known: Slurm was not asked"])
    if not live.units:
        reason = live.unknown.get("topology")
        words = reason or f"TopologyPlugin={live.plugin} knows no switches and no blocks"
        return flat_fabric(order, "Slurm", [f"no topology known: {words}"], is_unread=reason is not None)
    try:
        return build_fabric(live.units, "scontrol show topology", f"Slurm ({_form(live.units)[7:]})")
    except UsageError as error:
        return flat_fabric(order, "Slurm", [f"no topology known: {error}"], is_unread=True)


def _from_pattern(pattern: str, live: LiveCluster | None, order: Sequence[str]) -> Fabric:
    """By the names; where they tell nothing, by the features that the admin gave the nodes."""
    fabric = fabric_from_names(order, pattern)
    records: Sequence[NodeRecord] = live.nodes if live else ()
    features = {node.name: node.features for node in records if node.features}
    return fabric if fabric.levels or not features else fabric_from_names(order, pattern, features)


def _restrict_to_nodes(fabric: Fabric, order: Sequence[str]) -> Fabric:
    """The fabric over these nodes; where it knows levels, those that it does not place are said."""
    restricted = fabric.restricted(order)
    gridded = {node for grid in restricted.grids for node in grid.nodes}
    lost = [
        node
        for node, above in zip(restricted.nodes, restricted.units, strict=True)
        if node not in gridded and not any(above)
    ]
    if not lost or not (fabric.levels or fabric.grids):
        return restricted
    return replace(restricted, notes=(*restricted.notes, f"in no unit of the topology: {_few(lost)}"))


def _few(nodes: Sequence[str]) -> str:
    text = fold_hosts(sort_hosts(nodes))
    text = text if len(text) <= _MOST_NAMED else f"{text[:_MOST_NAMED]}..."
    return f"{len(nodes)} {pluralize('node', len(nodes))}, {text}"


def _with_levels(fabric: Fabric, specs: Sequence[LevelSpec]) -> Fabric:
    """What the profile says of the levels, by name where one fits, else by position from the leaf upwards."""
    notes = list(fabric.notes)
    named = {spec.name: spec for spec in specs}
    if not named.keys() & {level.name for level in fabric.levels}:
        switches = [level.name for level in fabric.levels if level.name != BLOCK]
        named = dict(zip(switches, specs, strict=False))
    levels = []
    for level in fabric.levels:
        spec = named.get(level.name)
        if spec is None:
            levels.append(level)
            notes.append(
                f"{level.name}: bandwidth unknown; name it in topology.levels of the cluster's profile"
            )
            continue
        latency_s = None if spec.latency_us is None else spec.latency_us * _MICRO
        levels.append(FabricLevel(spec.name, spec.bandwidth_GBps * _GIGA, spec.oversubscription, latency_s))
    unused = [spec.name for spec in specs if spec.name not in {level.name for level in levels}]
    if unused and fabric.levels:
        notes.append(f"the profile's levels {', '.join(unused)} are not in the topology")
    return replace(fabric, levels=tuple(levels), notes=tuple(notes))
