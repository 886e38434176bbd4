"""A state as people have it, nested dicts and lists of tensors and values, as named tensors and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrun.errors import UsageError
from hpcrun.runtime.planning import local_of

_LEAST_BYTES = 256
"""Plain values take twice this, or twice that, and so on: a longer number does not change the structure."""


@dataclass
class Tree:
    """A state, taken apart."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Every tensor by its path, those too that are the same memory under several names."""
    values: dict[str, Any] = field(default_factory=dict)
    """Everything else."""
    places: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Of each value: the container that holds it, and its key there."""

    def ties(self) -> dict[str, str]:
        """Names of tensors that are another one's memory, and the first name that has it."""
        # Most begin where no other does; only of the others more has to be looked at, which takes longer.
        begins: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            begins.setdefault(local_of(tensor).data_ptr(), []).append(name)
        first: dict[Any, str] = {}
        return {
            name: owner
            for names in begins.values()
            if len(names) > 1
            for name in names
            if (owner := first.setdefault(_memory(name, self.tensors[name]), name)) != name
        }


def take_apart(state: Mapping[str, Any]) -> Tree:
    """Names are the keys on the way, joined by dots; UsageError for what cannot be saved."""
    tree = Tree()
    for path, container, key, value in _leaves(state, ""):
        if path in tree.tensors or path in tree.values:
            raise UsageError(f"state: two things are called {path}; rename one of the keys")
        if path.startswith(("rng.", "hpcrun.")):
            raise UsageError(f"state: {path}: names that begin with rng or hpcrun are ours; rename the key")
        if isinstance(value, Tensor):
            tree.tensors[path] = value
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"state: {path} is of type {type(value).__name__}; a state holds tensors, numbers, texts, and"
                " dicts and lists of them"
            ) from None
        tree.values[path], tree.places[path] = value, (container, key)
    return tree


def put_back(tree: Tree, values: Mapping[str, Any]) -> None:
    """Set the plain values of a state to those that were saved."""
    for path, (container, key) in tree.places.items():
        if path in values and isinstance(container, MutableMapping | list):
            is_tuple = isinstance(container[key], tuple)
            container[key] = tuple(values[path]) if is_tuple else values[path]


def pack(told: Mapping[str, Any]) -> Tensor:
    """A JSON value as a small tensor."""
    text = json.dumps(told, separators=(",", ":")).encode()
    size = _LEAST_BYTES
    while size < len(text):
        size *= 2
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)


def unpack(data: bytes | bytearray) -> dict[str, Any]:
    """What `pack` was given."""
    told: dict[str, Any] = json.loads(data)
    return told


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """(path, container, key, value) of everything that is no container of others."""
    items: Iterable[tuple[Any, Any]] = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in items:
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, Tensor):  # most are, and the other questions take longer
            yield below, node, key, value
            continue
        is_inner = bool(value) if isinstance(value, Mapping) else _has_tensors([value])
        if is_inner:
            yield from _leaves(value, below)
        else:
            yield below, node, key, value


def _has_tensors(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(_has_tensors(value) for value in node.values())
    if isinstance(node, list | tuple):
        return any(_has_tensors(value) for value in node)
    return isinstance(node, Tensor)


def _memory(name: str, tensor: Tensor) -> Any:
    """Equal for tensors that are one and the same; tensors without elements are never."""
    local = local_of(tensor)
    if not local.numel() or local.device.type == "meta":
        return name
    where = tensor.placements if isinstance(tensor, DTensor) else ()
    shape = (tuple(tensor.shape), tuple(local.shape), local.stride())
    return (local.device, local.data_ptr(), local.dtype, *shape, where)
