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
    TAG,
    Keys,
    Node,
    PlainValueError,
    Types,
    children,
    decode,
    encode,
    no_others,
    path_of,
)
from hpcrun.runtime.tensor_memory import aliases_of, problem_of

TENSOR = "tensor"
RESERVED = ("rng.", "hpcrun.")
"""Beginnings of names that are not a state's own."""
_RECORD_VERSION = 2
_ADVICE = (
    "; a state keeps tensors, plain values of Python, numpy and torch, dicts and lists of them, and what has"
    " state_dict() and load_state_dict()"
)
_LEAST_BYTES = 256
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

    tree: Node = None
    tensors: dict[Keys, Tensor] = field(default_factory=dict)
    nodes: dict[Keys, dict[str, Any]] = field(default_factory=dict)
    """Of each tensor, its place in the tree."""


@dataclass
class FlatState:
    """What is stored of a state."""

    tensors: dict[str, Tensor]
    tree: Node


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Names are the keys on the way, joined by dots; UsageError for what cannot be saved."""
    found = tree_of(state)
    problems = [(keys, problem) for keys, tensor in found.tensors.items() if (problem := problem_of(tensor))]
    if problems:
        more = f", and {len(problems) - 1} more cannot be saved" if len(problems) > 1 else ""
        raise UsageError(f"state: {path_of(problems[0][0])}: {problems[0][1]}{more}")
    names = _usual_names(tuple(found.tensors))
    tensors = dict(zip(names, found.tensors.values(), strict=True))
    aliases = aliases_of(tensors)
    for (name, tensor), node in zip(tensors.items(), found.nodes.values(), strict=True):
        node["v"] = aliases.get(name, name)
        if isinstance(tensor, DTensor):
            node["sharded"] = True
    stored = {name: tensor.detach() for name, tensor in tensors.items() if name not in aliases}
    return FlatState(stored, found.tree)


def tree_of(state: Mapping[str, Any], keys: Keys = ()) -> StateTree:
    """A state as a tree; UsageError, with its keys, for a value that cannot be kept."""
    found = StateTree()
    objects = 0

    def other(value: Any, keys: Keys) -> Node:
        nonlocal objects
        if isinstance(value, Tensor):
            found.tensors[keys] = value
            found.nodes[keys] = node = {TAG: TENSOR}
            return node
        if is_object(value):
            objects += 1
            try:
                return encode(_plain_mapping(value.state_dict(), keys), other, keys)
            finally:
                objects -= 1
        if isinstance(value, Mapping) and not objects and has_parts(value):
            return encode(dict(value), other, keys)  # it is filled where it is
        raise LookupError

    try:
        found.tree = encode(_plain_mapping(state, keys), other, keys)
    except PlainValueError as error:
        where = path_of(error.keys) or "the state itself"
        advice = _ADVICE if error.problem.startswith("is of type") else ""
        raise UsageError(f"state: {where} {error.problem}{advice}") from None
    return found


def names_of(keys: Iterable[Keys]) -> dict[Keys, str]:
    """A name for each; where dots or the types of keys would make two of them one, it says all keys."""
    dotted = {one: path_of(one) for one in keys}
    counts = Counter(dotted.values())
    return {
        one: name if counts[name] == 1 and _is_plain(name) else _in_full(one) for one, name in dotted.items()
    }


@functools.lru_cache(2)
def _usual_names(keys: tuple[Keys, ...]) -> tuple[str, ...]:
    """`names_of` in their order; from save to save they are the same."""
    return tuple(names_of(keys).values())


def unflatten(node: Node, tensors: Callable[[Keys], Tensor], types: Types, keys: Keys) -> Any:
    """What a tree was made of, with these tensors; PlainValueError where this side lacks a class for it."""

    def other(node: dict[str, Any], keys: Keys) -> Tensor:
        if node[TAG] != TENSOR:
            raise PlainValueError(keys, f"is a {node[TAG]}, which this hpcrun does not know")
        return tensors(keys)

    return decode(node, other, types, keys)


def tensor_nodes(node: Node, types: Types, keys: Keys = ()) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """Every tensor in a tree, with the keys that lead to it."""
    if is_tensor(node):
        yield keys, node
        return
    for key, below in (children(node, types, keys) or {}).items():
        yield from tensor_nodes(below, types, (*keys, key))


def leaves_of(node: Node, types: Types, keys: Keys = ()) -> Iterator[Keys]:
    """The tensors of a tree, and its largest parts without any."""
    below = children(node, types, keys)
    if below is None or not any(True for _ in tensor_nodes(node, types, keys)):
        yield keys
        return
    for key, one in below.items():
        yield from leaves_of(one, types, (*keys, key))


def merge(one: Node, two: Node, types: Types) -> Node:
    """A tree with what only the second has beside what the first has; of both, the first one's."""
    mine, its = children(one, types), children(two, types)
    if mine is None or its is None or isinstance(one, list) or isinstance(two, list):
        return one
    both = {key: merge(node, its[key], types) if key in its else node for key, node in mine.items()}
    whole = both | {key: node for key, node in its.items() if key not in mine}
    if TAG not in one and TAG not in two:
        return whole
    return {TAG: "dict", "v": [[encode(key, no_others), node] for key, node in whole.items()]}


def differences(saved: Node, found: Node, types: Types, keys: Keys = ()) -> Iterator[Keys]:
    """Where a tree has other values than another; what only the second has is none."""
    if is_tensor(saved) and is_tensor(found):
        return
    mine, its = children(saved, types, keys), children(found, types, keys)
    if mine is None or its is None or is_tensor(saved) or is_tensor(found):
        if _ordered_text(saved) != _ordered_text(found):
            yield keys
        return
    if isinstance(saved, list) and len(mine) != len(its):
        yield keys
        return
    for key, node in mine.items():
        if key in its:
            yield from differences(node, its[key], types, (*keys, key))
        else:
            yield (*keys, key)


def is_tensor(node: Node) -> bool:
    """Whether a tree has a tensor here."""
    return isinstance(node, dict) and node.get(TAG) == TENSOR


def is_object(value: Any) -> bool:
    """Whether a value tells its own state and takes it back."""
    return isinstance(value, Stateful) and not isinstance(value, type)


def has_parts(value: Any) -> bool:
    """Whether tensors or objects are somewhere in it, so that it is filled and not replaced."""
    if isinstance(value, Mapping):
        return any(has_parts(one) for one in value.values())
    if isinstance(value, list | tuple):
        return any(has_parts(one) for one in value)
    return isinstance(value, Tensor) or is_object(value)


def pack(tree: Node) -> Tensor:
    """A tree as a small tensor."""
    text = json.dumps({"version": _RECORD_VERSION, "state": tree}, separators=(",", ":")).encode()
    size = _LEAST_BYTES
    while size < len(text):
        size *= 2
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)


def unpack(data: bytes | bytearray, where: str) -> Node:
    """What `pack` was given; UsageError for the record of an older hpcrun."""
    told = json.loads(data)
    if not isinstance(told, dict) or told.get("version") != _RECORD_VERSION:
        raise UsageError(f"{where}: its state was written by an hpcrun before this one, and cannot be loaded")
    return told["state"]


def _plain_mapping(state: Any, keys: Keys) -> Any:
    """The state of a script or an object, of whatever class it is."""
    if not isinstance(state, Mapping):
        raise PlainValueError(keys, f"has a state of type {type(state).__name__}, which is no dict")
    return state if type(state) in (dict, OrderedDict) else dict(state)


def _is_plain(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith((*RESERVED, "["))


def _in_full(keys: Keys) -> str:
    return json.dumps([encode(key, no_others) for key in keys], separators=(",", ":"))


def _ordered_text(node: Node) -> Hashable:
    return json.dumps(node, sort_keys=True)
