"""What of a saved state goes where in the one that is to be filled; nothing is touched here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpcrun.checkpoint.format import TensorEntry as StoredTensor
from hpcrun.errors import UsageError
from hpcrun.runtime.optimizer_state import init_optimizer_state, parameter_number, parameters_by_number
from hpcrun.runtime.plain_values import (
    KeyPath,
    PlainValueError,
    TypesByName,
    ValueNode,
    are_equal_nodes,
    child_nodes,
    render_key_path,
)
from hpcrun.runtime.state_tree import (
    build_state_tree,
    has_tensors_or_objects,
    is_stateful,
    is_tensor_node,
    tensor_nodes,
    tree_leaves,
    unflatten_state,
)


@dataclass
class TensorTarget:
    """A saved tensor, and what it is read into."""

    keys: KeyPath
    name: str
    """That it is stored under."""
    tensor: Tensor | None
    """Where the state has it now."""
    like: Tensor | None = None
    """Lies as a new one has to."""
    is_free: bool = False
    """It may be another tensor: it is handed over."""
    is_sharded: bool = False


@dataclass
class PlainValueTarget:
    """A plain value, and where it goes."""

    keys: KeyPath
    container: Any
    key: Any
    value: Any


@dataclass
class StatefulTarget:
    """An object that is handed its state."""

    keys: KeyPath
    object: Any
    node: ValueNode = None
    """Its state as it was saved; for a module what it told of itself is filled."""
    told: Any = None
    parameters: Mapping[Hashable, Tensor] | None = None
    """Of an optimizer of torch's."""
    state: Any = None
    """What it is handed."""


@dataclass
class StateMatch:
    """A saved state beside the one to be filled."""

    targets: list[TensorTarget] = field(default_factory=list)
    values: list[PlainValueTarget] = field(default_factory=list)
    objects: list[StatefulTarget] = field(default_factory=list)
    lacks: list[tuple[KeyPath, Tensor | None]] = field(default_factory=list)
    """What the save does not have."""
    extra: list[KeyPath] = field(default_factory=list)
    """What the save alone has."""
    mismatched: list[tuple[KeyPath, str]] = field(default_factory=list)
    """What cannot be put where it belongs, and why."""


class StateMatcher:
    """Walks through both states at once."""

    def __init__(
        self,
        told_by: Callable[[KeyPath, Any], Any],
        types: TypesByName,
        stored: Mapping[str, StoredTensor],
        only: str,
    ) -> None:
        """`told_by`: what an object at a place tells of its state; `only`: the beginning of wanted names."""
        self._state_dict_of, self._types, self._stored, self._only = told_by, types, stored, only
        self.match = StateMatch()

    def walk(self, new: Any, node: ValueNode, keys: KeyPath = (), container: Any = None) -> None:
        """Match a part of the new state with what was saved of it."""
        if isinstance(new, Tensor):
            if not self._is_selected(keys):
                return
            if is_tensor_node(node):
                self.match.targets.append(TensorTarget(keys, node["v"], new))
            else:
                self.match.mismatched.append((keys, "is no tensor in the save"))
        elif is_stateful(new):
            self._object(new, node, keys)
        elif (
            not keys or has_tensors_or_objects(new) or (_is_container(new) and self._has_tensors(node, keys))
        ):
            self._below(new, node, keys)
        elif self._is_selected(keys):
            self._value(new, node, keys, container)

    def _has_tensors(self, node: ValueNode, keys: KeyPath) -> bool:
        return any(True for _ in tensor_nodes(node, self._types, keys))

    def _is_selected(self, keys: KeyPath) -> bool:
        return f"{render_key_path(keys)}.".startswith(self._only)

    def _below(self, new: Any, node: ValueNode, keys: KeyPath) -> None:
        saved = child_nodes(node, self._types, keys)
        mine = {(type(key), key): (key, value) for key, value in _items(new)}
        its = {} if saved is None else {(type(key), key): (key, one) for key, one in saved.items()}
        for both, (key, value) in mine.items():
            below = (*keys, key)
            if both in its:
                self.walk(value, its[both][1], below, new)
            else:
                self.match.lacks += [one for one in self.leaves(value, below) if self._is_selected(one[0])]
        if saved is None and self._is_selected(keys):
            self.match.extra.append(keys)
        for both, (key, one) in its.items():
            if both not in mine:
                leaves = tree_leaves(one, self._types, (*keys, key))
                self.match.extra += [found for found in leaves if self._is_selected(found)]

    def leaves(self, new: Any, keys: KeyPath) -> Iterator[tuple[KeyPath, Tensor | None]]:
        """Every tensor, object and plain value of a new state."""
        if isinstance(new, Tensor):
            yield keys, new
        elif is_stateful(new):
            yield keys, None
            if isinstance(new, torch.nn.Module):
                yield from self.leaves(self._state_dict_of(keys, new), keys)
        elif (not keys or has_tensors_or_objects(new)) and _is_container(new):
            for key, value in _items(new):
                yield from self.leaves(value, (*keys, key))
        else:
            yield keys, None

    def _value(self, new: Any, node: ValueNode, keys: KeyPath, container: Any) -> None:
        if self._has_tensors(node, keys):
            self.match.extra += tree_leaves(node, self._types, keys)
            return
        try:
            value = unflatten_state(node, _no_tensor, self._types, keys)
        except PlainValueError as error:
            self.match.mismatched.append((error.keys, error.problem))
            return
        if isinstance(container, MutableMapping | list):
            self.match.values.append(PlainValueTarget(keys, container, keys[-1], value))
        elif not _has_value_already(new, node):
            what = f"has another value in the save, and a {type(container).__name__} does not take it"
            self.match.mismatched.append((keys, f"{what}; use a dict or a list"))

    def _object(self, new: Any, node: ValueNode, keys: KeyPath) -> None:
        name = render_key_path(keys)
        is_whole = f"{name}.".startswith(self._only)
        is_part = not is_whole and self._only.startswith(f"{name}.")
        if not is_whole and not is_part:
            return
        if child_nodes(node, self._types, keys) is None:
            self.match.mismatched.append((keys, "has no state in the save"))
            return
        told = self._state_dict_of(keys, new)
        if isinstance(new, torch.nn.Module) or _holds_objects(told):
            self._below(told, node, keys)
            self.match.objects.append(StatefulTarget(keys, new, told=told))
            return
        if is_part:
            raise UsageError(f"load: only={self._only!r}: {name} takes its state whole; use only='{name}.'")
        parameters = None
        if isinstance(new, torch.optim.Optimizer):
            found = parameters_by_number(new, node, self._types)
            if isinstance(found, str):
                self.match.mismatched.append((keys, found))
                return
            parameters = found
        self._tensors_of(told, node, keys, parameters)
        self.match.objects.append(StatefulTarget(keys, new, node=node, parameters=parameters))

    def _tensors_of(
        self, told: Any, node: ValueNode, keys: KeyPath, parameters: Mapping[Hashable, Tensor] | None
    ) -> None:
        """What an object is handed: its own tensors, filled, or new ones."""
        for below, one in tensor_nodes(node, self._types):
            mine = _value_at(told, below)
            like = mine if isinstance(mine, Tensor) else None
            stored = self._stored.get(one["v"])
            # The count of steps lies on the host, or where the optimizer moves it.
            if like is None and parameters is not None and stored is not None and below[-1] != "step":
                param = parameters.get(parameter_number(below))
                dtype: torch.dtype = getattr(torch, stored.dtype)
                like = init_optimizer_state(param, stored.shape, dtype)
            target = TensorTarget((*keys, *below), one["v"], like, like, is_free=True)
            target.is_sharded = bool(one.get("sharded"))
            self.match.targets.append(target)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))


def _holds_objects(told: Any) -> bool:
    if isinstance(told, Mapping):
        return any(_holds_objects(one) for one in told.values())
    if isinstance(told, list | tuple):
        return any(_holds_objects(one) for one in told)
    return is_stateful(told)


def _value_at(value: Any, keys: KeyPath) -> Any:
    """What lies at some keys; None where nothing does."""
    for key in keys:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return value


def _has_value_already(value: Any, node: ValueNode) -> bool:
    try:
        return are_equal_nodes(build_state_tree({"value": value}).tree["value"], node)
    except UsageError:
        return False


def _no_tensor(keys: KeyPath) -> Tensor:
    raise AssertionError(f"{render_key_path(keys)}: a tensor in a plain value")
