"""A state as people have it, nested dicts and lists of tensors and values, as named tensors and back."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrun.errors import UsageError
from hpcrun.runtime.planning import local_of

_LEAST_BYTES = 256
"""Plain values take twice this, or twice that, and so on: a longer number does not change the structure."""


@runtime_checkable
class Stateful(Protocol):
    """What tells its state and takes it back, as torch's modules, optimizers and schedulers do."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state."""


@dataclass
class Tree:
    """A state, taken apart."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Every tensor by its path, those too that are the same memory under several names."""
    values: dict[str, Any] = field(default_factory=dict)
    """Everything else."""
    places: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Of each value: the container that holds it, and its key there."""
    objects: dict[str, tuple[Stateful, dict[str, Any]]] = field(default_factory=dict)
    """Models, optimizers, schedulers …: by their path, with the state that they gave."""

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
    for path, container, key, value in _leaves(state, "", tree.objects):
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
                f"state: {path} is of type {type(value).__name__}; a state holds tensors, numbers, texts,"
                " dicts and lists of them, and what has state_dict() and load_state_dict()"
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


def hand_back(tree: Tree, filled: Collection[str]) -> None:
    """Give objects the state that was loaded into what they told of themselves, where any was."""
    for path, (one, told) in tree.objects.items():
        if any(name.startswith(f"{path}.") for name in filled):
            one.load_state_dict(told)


def begin_optimizers(state: Mapping[str, Any], path: str = "") -> dict[str, torch.optim.Optimizer]:
    """Give optimizers that have not stepped a state that can be filled; those that it was done to, by path.

    By a step of no length along no gradient, which counts as one: what is not filled has to be forgotten.
    """
    begun: dict[str, torch.optim.Optimizer] = {}
    for key, value in state.items():
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            begun |= begin_optimizers(value, below)
        elif isinstance(value, torch.optim.Optimizer) and not value.state:
            _step_nowhere(value)
            begun[below] = value
    return begun


def forget_unfilled(begun: Mapping[str, torch.optim.Optimizer], filled: Collection[str]) -> None:
    """Make optimizers that were begun, and of which nothing was filled, as new again."""
    for path, optimizer in begun.items():
        if not any(name.startswith(f"{path}.state.") for name in filled):
            optimizer.state.clear()


def _step_nowhere(optimizer: torch.optim.Optimizer) -> None:
    params = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    grads, rates = [one.grad for one in params], [group["lr"] for group in optimizer.param_groups]
    for one in params:
        one.grad = torch.zeros_like(one)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for one, grad in zip(params, grads, strict=True):
        one.grad = grad


def _leaves(
    node: Any, path: str, objects: dict[str, tuple[Stateful, dict[str, Any]]]
) -> Iterator[tuple[str, Any, Any, Any]]:
    """(path, container, key, value) of everything that is no container of others; objects are gathered."""
    items: Iterable[tuple[Any, Any]] = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in items:
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, Tensor):  # most are, and the other questions take longer
            yield below, node, key, value
            continue
        if isinstance(value, Stateful):
            objects[below] = value, value.state_dict()
            yield from _leaves(objects[below][1], below, objects)
            continue
        is_inner = bool(value) if isinstance(value, Mapping) else _has_tensors([value])
        if is_inner:
            yield from _leaves(value, below, objects)
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
