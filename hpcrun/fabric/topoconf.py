"""Whether a topology.yaml, or what `scontrol show topoconf` prints, is one; every mistake with its line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrun.errors import SpecError, SpecProblem
from hpcrun.specs.yaml import LIST_KEY, YamlDocument, parse_yaml_list

_LISTS = {
    "tree": ("switches", "switch"),
    "block": ("blocks", "block"),
    "ring": ("rings", "ring"),
    "torus3d": ("toruses", "name"),
}
"""Where each kind of topology lists its units, and the key of a unit's name."""
_PARTS = {
    "tree": ("nodes", "children"),
    "block": ("nodes",),
    "ring": ("nodes",),
    "torus3d": ("nodes", "regions"),
}
"""What a unit of each kind holds: at least one of them."""
_KNOWN = ("topology", "cluster_default", "flat", *_LISTS)


def check_topoconf(text: str, name: str) -> None:
    """SpecError with all that is wrong."""
    document = parse_yaml_list(text, name)
    problems: list[SpecProblem] = []
    seen: dict[str, str] = {}
    for number, entry in enumerate(document.values[LIST_KEY]):
        key = f"{LIST_KEY}.{number}"
        for where, text_of in _check_topology(entry):
            problems.append(_problem(document, key, where, text_of))
        title = entry.get("topology")
        if isinstance(title, str) and seen.setdefault(title, key) != key:
            text_of = f"{title!r} stands twice; give each topology a name of its own"
            problems.append(_problem(document, key, "topology", text_of))
    if problems:
        raise SpecError(problems)


def _problem(document: YamlDocument, key: str, where: str, text: str) -> SpecProblem:
    return SpecProblem(where, text, document.where(f"{key}.{where}" if where else key))


def _check_topology(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong in one topology: the key, and words."""
    title = entry.get("topology")
    if not isinstance(title, str) or not title:
        yield "topology", "must be the topology's name"
    if not isinstance(entry.get("cluster_default"), bool | None):
        yield "cluster_default", "must be true or false"
    if not isinstance(entry.get("flat"), bool | None):
        yield "flat", "must be true or false"
    for key in entry:
        close = difflib.get_close_matches(key, _KNOWN, n=1, cutoff=0.75)
        if key not in _KNOWN and close:
            yield key, f"is not known; did you mean {close[0]}?"
    kinds = [kind for kind in _LISTS if entry.get(kind) not in (None, {})]
    if not kinds and entry.get("flat") is not True:
        listed = ", ".join(key for key in entry if key not in ("topology", "cluster_default")) or "nothing"
        yield "", f"describes no topology; write one of flat: true, {', '.join(_LISTS)}; found: {listed}"
    for kind in kinds:
        yield from _check_section(kind, entry[kind])


def _check_section(kind: str, section: Any) -> Iterator[tuple[str, str]]:
    lists, unit_key = _LISTS[kind]
    form = f"a list of {lists}, each `- {unit_key}: NAME` with {' or '.join(_PARTS[kind])}"
    if not isinstance(section, dict):
        yield kind, f"must hold {lists}: {form}"
        return
    units = section.get(lists)
    if units is None:
        listed = ", ".join(section) or "nothing"
        yield kind, f"must hold {lists}: {form}; found: {listed}"
        return
    if not isinstance(units, list) or not units:
        what = "nothing" if units == [] else f"{str(units)[:40]!r}"
        yield f"{kind}.{lists}", f"must be {form}, and is {what}; Slurm refuses this file"
        return
    for number, unit in enumerate(units):
        yield from _check_unit(kind, f"{kind}.{lists}.{number}", unit)


def _check_unit(kind: str, where: str, unit: Any) -> Iterator[tuple[str, str]]:
    unit_key = _LISTS[kind][1]
    if not isinstance(unit, dict):
        yield where, f"must be `{unit_key}: NAME` with {' or '.join(_PARTS[kind])}"
        return
    if not isinstance(unit.get(unit_key), str | int) or unit.get(unit_key) == "":
        yield where, f"has no name; write `{unit_key}: NAME`"
    for part in ("nodes", "children"):
        if not isinstance(unit.get(part), str | int | None):
            yield f"{where}.{part}", "must be one text such as n[01-04], no YAML list"
    if not any(unit.get(part) for part in _PARTS[kind]):
        # A block, ring or torus may stand there for nodes to come.
        keys = {unit_key, "nodes", "children", "regions", "dims", "cross_topology"}
        close = [key for key in unit if key not in keys]
        if kind == "tree" or close:
            hint = f"; found: {', '.join(map(str, close))}" if close else ""
            yield where, f"holds nothing; write {' or '.join(_PARTS[kind])}{hint}"
