"""A state as people have it, as named tensors and a tree of plain values around them, and back.

The tree has the types of runtime.plain_values; where a tensor was, it names the one that is stored. Tensors
that are one and the same are stored once.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
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
    child_nodes,
    decode_value,
    encode_value,
    reject_other_values,
    render_key_path,
)
from hpcrun.runtime.tensor_memory import find_aliases, tensor_problem

TENSOR_TAG = "tensor"
RESERVED_PREFIXES = ("rng.", "hpcrun.")
"""Beginnings of names that are not a state's own."""
_RECORD_VERSION = 2
_STORABLE_VALUES_HINT = (
    "; a state keeps tensors, plain values of Python, numpy and torch, dicts and lists of them, and what has"
    " state_dict() and load_state_dict()"
)
_MIN_RECORD_BYTES = 256
"""A record takes twice this, or twice that, and so on: a longer number does not change the structure."""


@runtime_checkable
class Stateful(Protocol):
    """What tells its state and takes it back, as torch's modules, optimizers and schedulers do."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state."""


@dataclass
class StateTree:
    """A state as a tree, and its tensors by the keys that lead to them."""

    tree: ValueNode = None
    tensors: dict[KeyPath, Tensor] = field(default_factory=dict)
    nodes: dict[KeyPath, dict[str, Any]] = field(default_factory=dict)
    """Of each tensor, its place in the tree."""


@dataclass
class FlatState:
    """What is stored of a state."""

    tensors: dict[str, Tensor]
    tree: ValueNode


def flatten_state(state: Mapping[str, Any]) -> FlatState:
    """Names are the keys on the way, joined by dots; UsageError for what cannot be saved."""
    found = build_state_tree(state)
    problems = [
        (keys, problem) for keys, tensor in found.tensors.items() if (problem := tensor_problem(tensor))
    ]
    if problems:
        more = f", and {len(problems) - 1} more cannot be saved" if len(problems) > 1 else ""
        raise UsageError(f"state: {render_key_path(problems[0][0])}: {problems[0][1]}{more}")
    names = _cached_tensor_names(tuple(found.tensors))
    tensors = dict(zip(names, found.tensors.values(), strict=True))
    aliases = find_aliases(tensors)
    for (name, tensor), node in zip(tensors.items(), found.nodes.values(), strict=True):
        node["v"] = aliases.get(name, name)
        if isinstance(tensor, DTensor):
            node["sharded"] = True
    stored = {name: tensor.detach() for name, tensor in tensors.items() if name not in aliases}
    return FlatState(stored, found.tree)


def build_state_tree(state: Mapping[str, Any], keys: KeyPath = ()) -> StateTree:
    """A state as a tree; UsageError, with its keys, for a value that cannot be kept."""
    found = StateTree()
    objects = 0

    def other(value: Any, keys: KeyPath) -> ValueNode:
        nonlocal objects
        if isinstance(value, Tensor):
            found.tensors[keys] = value
            found.nodes[keys] = node = {TYPE_TAG: TENSOR_TAG}
            return node
        if is_stateful(value):
            objects += 1
            try:
                return encode_value(_plain_mapping(value.state_dict(), keys), other, keys)
            finally:
                objects -= 1
        if isinstance(value, Mapping) and not objects and has_tensors_or_objects(value):
            return encode_value(dict(value), other, keys)  # it is filled where it is
        raise LookupError

    try:
        found.tree = encode_value(_plain_mapping(state, keys), other, keys)
    except PlainValueError as error:
        where = render_key_path(error.keys) or "the state itself"
        advice = _STORABLE_VALUES_HINT if error.problem.startswith("is of type") else ""
        raise UsageError(f"state: {where} {error.problem}{advice}") from None
    return found


def unique_tensor_names(keys: Iterable[KeyPath]) -> dict[KeyPath, str]:
    """A name for each; where dots or the types of keys would make two of them one, it says all keys."""
    dotted = {one: render_key_path(one) for one in keys}
    counts = Counter(dotted.values())
    return {
        one: name if counts[name] == 1 and _is_plain(name) else _full_key_text(one)
        for one, name in dotted.items()
    }


@functools.lru_cache(2)
def _cached_tensor_names(keys: tuple[KeyPath, ...]) -> tuple[str, ...]:
    """`unique_tensor_names` in their order; from save to save they are the same."""
    return tuple(unique_tensor_names(keys).values())


def unflatten_state(
    node: ValueNode, tensors: Callable[[KeyPath], Tensor], types: TypesByName, keys: KeyPath
) -> Any:
    """What a tree was made of, with these tensors; PlainValueError where this side lacks a class for it."""

    def other(node: dict[str, Any], keys: KeyPath) -> Tensor:
        if node[TYPE_TAG] != TENSOR_TAG:
            raise PlainValueError(keys, f"is a {node[TYPE_TAG]}, which this hpcrun does not know")
        return tensors(keys)

    return decode_value(node, other, types, keys)


def tensor_nodes(
    node: ValueNode, types: TypesByName, keys: KeyPath = ()
) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Every tensor in a tree, with the keys that lead to it."""
    if is_tensor_node(node):
        yield keys, node
        return
    for key, below in (child_nodes(node, types, keys) or {}).items():
        yield from tensor_nodes(below, types, (*keys, key))


def tree_leaves(node: ValueNode, types: TypesByName, keys: KeyPath = ()) -> Iterator[KeyPath]:
    """The tensors of a tree, and its largest parts without any."""
    below = child_nodes(node, types, keys)
    if below is None or not any(True for _ in tensor_nodes(node, types, keys)):
        yield keys
        return
    for key, one in below.items():
        yield from tree_leaves(one, types, (*keys, key))


def merge_trees(one: ValueNode, two: ValueNode, types: TypesByName) -> ValueNode:
    """A tree with what only the second has beside what the first has; of both, the first one's."""
    mine, its = child_nodes(one, types), child_nodes(two, types)
    if mine is None or its is None or isinstance(one, list) or isinstance(two, list):
        return one
    both = {key: merge_trees(node, its[key], types) if key in its else node for key, node in mine.items()}
    whole = both | {key: node for key, node in its.items() if key not in mine}
    if TYPE_TAG not in one and TYPE_TAG not in two:
        return whole
    return {
        TYPE_TAG: "dict",
        "v": [[encode_value(key, reject_other_values), node] for key, node in whole.items()],
    }


def tree_differences(
    saved: ValueNode, found: ValueNode, types: TypesByName, keys: KeyPath = ()
) -> Iterator[KeyPath]:
    """Where a tree has other values than another; what only the second has is none."""
    if is_tensor_node(saved) and is_tensor_node(found):
        return
    mine, its = child_nodes(saved, types, keys), child_nodes(found, types, keys)
    if mine is None or its is None or is_tensor_node(saved) or is_tensor_node(found):
        if _ordered_text(saved) != _ordered_text(found):
            yield keys
        return
    if isinstance(saved, list) and len(mine) != len(its):
        yield keys
        return
    for key, node in mine.items():
        if key in its:
            yield from tree_differences(node, its[key], types, (*keys, key))
        else:
            yield (*keys, key)


def is_tensor_node(node: ValueNode) -> bool:
    """Whether a tree has a tensor here."""
    return isinstance(node, dict) and node.get(TYPE_TAG) == TENSOR_TAG


def is_stateful(value: Any) -> bool:
    """Whether a value tells its own state and takes it back."""
    return isinstance(value, Stateful) and not isinstance(value, type)


def has_tensors_or_objects(value: Any) -> bool:
    """Whether tensors or objects are somewhere in it, so that it is filled and not replaced."""
    if isinstance(value, Mapping):
        return any(has_tensors_or_objects(one) for one in value.values())
    if isinstance(value, list | tuple):
        return any(has_tensors_or_objects(one) for one in value)
    return isinstance(value, Tensor) or is_stateful(value)


def pack_tree(tree: ValueNode) -> Tensor:
    """A tree as a small tensor."""
    text = json.dumps({"version": _RECORD_VERSION, "state": tree}, separators=(",", ":")).encode()
    size = _MIN_RECORD_BYTES
    while size < len(text):
        size *= 2
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)


def unpack_tree(data: bytes | bytearray, where: str) -> ValueNode:
    """What `pack` was given; UsageError for the record of an older hpcrun."""
    told = json.loads(data)
    if not isinstance(told, dict) or told.get("version") != _RECORD_VERSION:
        raise UsageError(f"{where}: its state was written by an hpcrun before this one, and cannot be loaded")
    return told["state"]


def _plain_mapping(state: Any, keys: KeyPath) -> Any:
    """The state of a script or an object, of whatever class it is."""
    if not isinstance(state, Mapping):
        raise PlainValueError(keys, f"has a state of type {type(state).__name__}, which is no dict")
    return state if type(state) in (dict, OrderedDict) else dict(state)


def _is_plain(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith((*RESERVED_PREFIXES, "["))


def _full_key_text(keys: KeyPath) -> str:
    return json.dumps([encode_value(key, reject_other_values) for key in keys], separators=(",", ":"))


def _ordered_text(node: ValueNode) -> Hashable:
    return json.dumps(node, sort_keys=True)
