"""Converts a nested state to named tensors and a tree of plain values around them, and back.

The tree's nodes are those of runtime.plain_values; in the place of a tensor stands the name of the stored
one. A tensor that occurs several times is stored once.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrun.errors import UsageError
from hpcrun.runtime.plain_values import (
    TYPE_TAG,
    KeyPath,
    PlainValueError,
    TypesByName,
    ValueNode,
    are_equal_nodes,
    child_nodes,
    decode_value,
    encode_value,
    reject_other_values,
    render_key_path,
)
from hpcrun.runtime.tensor_memory import find_aliases, tensor_problem

TENSOR_TAG = "tensor"
RESERVED_PREFIXES = ("rng.", "hpcrun.")
"""Prefixes of names that are not the state's own."""
_RECORD_VERSION = 2
_STORABLE_VALUES_HINT = (
    "; a state keeps tensors, plain values of Python, numpy and torch, dicts and lists of them, and what has"
    " state_dict() and load_state_dict()"
)
_MIN_RECORD_BYTES = 256
"""Sizes of a record are this times a power of two, so that a longer number does not change the structure."""


@runtime_checkable
class Stateful(Protocol):
    """An object that returns its state and takes it back, as torch's modules and optimizers do."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state."""


@dataclass
class StateTree:
    """A state as a tree, and its tensors by the keys that lead to them."""

    tree: ValueNode = None
    tensors: dict[KeyPath, Tensor] = field(default_factory=dict)
    nodes: dict[KeyPath, dict[str, Any]] = field(default_factory=dict)
    """The node of each tensor in the tree."""


@dataclass
class FlatState:
    """What is stored of a state: its tensors by name, and the tree around them."""

    tensors: dict[str, Tensor]
    tree: ValueNode


def flatten_state(state: Mapping[str, Any]) -> FlatState:
    """Convert a state; names are the keys joined by dots. UsageError for what cannot be saved."""
    built = build_state_tree(state)
    problems = [
        (keys, problem) for keys, tensor in built.tensors.items() if (problem := tensor_problem(tensor))
    ]
    if problems:
        rest = f", and {len(problems) - 1} more cannot be saved" if len(problems) > 1 else ""
        raise UsageError(f"state: {render_key_path(problems[0][0])}: {problems[0][1]}{rest}")
    names = _cached_tensor_names(tuple(built.tensors))
    tensors = dict(zip(names, built.tensors.values(), strict=True))
    aliases = find_aliases(tensors)
    for (name, tensor), node in zip(tensors.items(), built.nodes.values(), strict=True):
        node["v"] = aliases.get(name, name)
        if isinstance(tensor, DTensor):
            node["sharded"] = True
    stored = {name: tensor.detach() for name, tensor in tensors.items() if name not in aliases}
    return FlatState(stored, built.tree)


def build_state_tree(state: Mapping[str, Any], keys: KeyPath = ()) -> StateTree:
    """Convert a state to a tree; UsageError, with its keys, for a value that cannot be saved."""
    built = StateTree()
    objects = 0

    def other(value: Any, keys: KeyPath) -> ValueNode:
        nonlocal objects
        if isinstance(value, Tensor):
            built.tensors[keys] = value
            built.nodes[keys] = node = {TYPE_TAG: TENSOR_TAG}
            return node
        if is_stateful(value):
            objects += 1
            try:
                return encode_value(_plain_mapping(value.state_dict(), keys), other, keys)
            finally:
                objects -= 1
        if isinstance(value, Mapping) and not objects and has_tensors_or_objects(value):
            return encode_value(dict(value), other, keys)  # its class does not matter: it is filled in place
        raise LookupError

    try:
        built.tree = encode_value(_plain_mapping(state, keys), other, keys)
    except PlainValueError as error:
        where = render_key_path(error.keys) or "the state itself"
        advice = _STORABLE_VALUES_HINT if error.problem.startswith("is of type") else ""
        raise UsageError(f"state: {where} {error.problem}{advice}") from None
    return built


def unique_tensor_names(keys: Iterable[KeyPath]) -> dict[KeyPath, str]:
    """Return a name for each; where joining by dots would be ambiguous, the keys as JSON."""
    dotted = {path: render_key_path(path) for path in keys}
    counts = Counter(dotted.values())
    return {
        path: name if counts[name] == 1 and _is_plain(name) else _full_key_text(path)
        for path, name in dotted.items()
    }


@functools.lru_cache(2)
def _cached_tensor_names(keys: tuple[KeyPath, ...]) -> tuple[str, ...]:
    """Return `unique_tensor_names` in order; the same from save to save."""
    return tuple(unique_tensor_names(keys).values())


def unflatten_state(
    node: ValueNode, tensors: Callable[[KeyPath], Tensor], types: TypesByName, keys: KeyPath
) -> Any:
    """Convert a tree back, with these tensors; PlainValueError where a class is missing here."""

    def other(node: dict[str, Any], keys: KeyPath) -> Tensor:
        if node[TYPE_TAG] != TENSOR_TAG:
            raise PlainValueError(keys, f"is a {node[TYPE_TAG]}, which this hpcrun does not know")
        return tensors(keys)

    return decode_value(node, other, types, keys)


def tensor_nodes(
    node: ValueNode, types: TypesByName, keys: KeyPath = ()
) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield every tensor in a tree, with the keys that lead to it."""
    if is_tensor_node(node):
        yield keys, node
        return
    for key, below in (child_nodes(node, types, keys) or {}).items():
        yield from tensor_nodes(below, types, (*keys, key))


def tree_leaves(node: ValueNode, types: TypesByName, keys: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the keys of the tensors of a tree, and of its largest parts without any."""
    below = child_nodes(node, types, keys)
    if below is None or not holds_tensor_nodes(node, types, keys):
        yield keys
        return
    for key, child in below.items():
        yield from tree_leaves(child, types, (*keys, key))


def holds_tensor_nodes(node: ValueNode, types: TypesByName, keys: KeyPath) -> bool:
    """Whether a tree has a tensor anywhere."""
    return any(True for _ in tensor_nodes(node, types, keys))


def merge_trees(first: ValueNode, second: ValueNode, types: TypesByName) -> ValueNode:
    """Merge two trees; of what both have, the first one's is taken."""
    mine, others = child_nodes(first, types), child_nodes(second, types)
    if mine is None or others is None or isinstance(first, list) or isinstance(second, list):
        return first
    both = {
        key: merge_trees(node, others[key], types) if key in others else node for key, node in mine.items()
    }
    whole = both | {key: node for key, node in others.items() if key not in mine}
    if TYPE_TAG not in first and TYPE_TAG not in second:
        return whole
    return {
        TYPE_TAG: "dict",
        "v": [[encode_value(key, reject_other_values), node] for key, node in whole.items()],
    }


def tree_differences(
    saved: ValueNode, current: ValueNode, types: TypesByName, keys: KeyPath = ()
) -> Iterator[KeyPath]:
    """Yield the keys where two trees differ; what only the current one has does not count."""
    if is_tensor_node(saved) and is_tensor_node(current):
        return
    mine, others = child_nodes(saved, types, keys), child_nodes(current, types, keys)
    if mine is None or others is None or is_tensor_node(saved) or is_tensor_node(current):
        if not are_equal_nodes(saved, current):
            yield keys
        return
    if isinstance(saved, list) and len(mine) != len(others):
        yield keys
        return
    for key, node in mine.items():
        if key in others:
            yield from tree_differences(node, others[key], types, (*keys, key))
        else:
            yield (*keys, key)


def is_tensor_node(node: ValueNode) -> bool:
    """Whether a node stands for a tensor."""
    return isinstance(node, dict) and node.get(TYPE_TAG) == TENSOR_TAG


def is_stateful(value: Any) -> bool:
    """Whether a value is an object with a state of its own."""
    return isinstance(value, Stateful) and not isinstance(value, type)


def has_tensors_or_objects(value: Any) -> bool:
    """Whether a value holds tensors or objects, so that it is filled and not replaced."""
    return holds_any(value, lambda item: isinstance(item, Tensor) or is_stateful(item))


def holds_any(value: Any, is_match: Callable[[Any], bool]) -> bool:
    """Whether a value, or anything in it if it is a container, matches."""
    if isinstance(value, Mapping):
        return any(holds_any(item, is_match) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_any(item, is_match) for item in value)
    return is_match(value)


def pack_tree(tree: ValueNode) -> Tensor:
    """Store a tree in a small tensor."""
    text = json.dumps({"version": _RECORD_VERSION, "state": tree}, separators=(",", ":")).encode()
    size = _MIN_RECORD_BYTES
    while size < len(text):
        size *= 2
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)


def unpack_tree(data: bytes | bytearray, where: str) -> ValueNode:
    """Return the tree that `pack_tree` stored; UsageError for one of an older hpcrun."""
    record = json.loads(data)
    if not isinstance(record, dict) or record.get("version") != _RECORD_VERSION:
        raise UsageError(f"{where}: its state was written by an hpcrun before this one, and cannot be loaded")
    return record["state"]


def _plain_mapping(state: Any, keys: KeyPath) -> Any:
    """Return the state of a script or an object, whose mapping may be of any class, as a plain dict."""
    if not isinstance(state, Mapping):
        raise PlainValueError(keys, f"has a state of type {type(state).__name__}, which is not a dict")
    return state if type(state) in (dict, OrderedDict) else dict(state)


def _is_plain(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith((*RESERVED_PREFIXES, "["))


def _full_key_text(keys: KeyPath) -> str:
    return json.dumps([encode_value(key, reject_other_values) for key in keys], separators=(",", ":"))
