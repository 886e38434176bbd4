"""Matches a saved state with the state to be filled; nothing is changed here."""

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
    holds_any,
    holds_tensor_nodes,
    is_stateful,
    is_tensor_node,
    tensor_nodes,
    tree_leaves,
    unflatten_state,
)


@dataclass
class TensorTarget:
    """A saved tensor, and the tensor that it is read into."""

    keys: KeyPath
    name: str
    """The name that it is stored under."""
    tensor: Tensor | None
    """The state's present tensor."""
    like: Tensor | None = None
    """A tensor with the layout that a new one needs."""
    is_free: bool = False
    """Whether another tensor may take its place, because it is passed to load_state_dict."""
    is_sharded: bool = False


@dataclass
class PlainValueTarget:
    """A plain value, and the place that it is set in."""

    keys: KeyPath
    container: Any
    key: Any
    value: Any


@dataclass
class StatefulTarget:
    """An object whose load_state_dict is called."""

    keys: KeyPath
    object: Any
    node: ValueNode = None
    """Its saved state; unused where `current` is filled instead."""
    current: Any = None
    """The state_dict of a module, whose tensors are filled in place."""
    parameters: Mapping[Hashable, Tensor] | None = None
    """The parameters of an optimizer of torch's, by number."""
    state: Any = None
    """The state to pass to load_state_dict."""


@dataclass
class StateMatch:
    """What of a saved state goes where in the one to be filled."""

    targets: list[TensorTarget] = field(default_factory=list)
    values: list[PlainValueTarget] = field(default_factory=list)
    objects: list[StatefulTarget] = field(default_factory=list)
    lacks: list[tuple[KeyPath, Tensor | None]] = field(default_factory=list)
    """What the save lacks."""
    extra: list[KeyPath] = field(default_factory=list)
    """What only the save has."""
    mismatched: list[tuple[KeyPath, str]] = field(default_factory=list)
    """What does not fit its place, and why."""


class StateMatcher:
    """Walks through both states at once."""

    def __init__(
        self,
        state_dict_of: Callable[[KeyPath, Any], Any],
        types: TypesByName,
        stored: Mapping[str, StoredTensor],
        only: str,
    ) -> None:
        """`state_dict_of`: returns the state_dict of the object at these keys; `only`: a prefix of names."""
        self._state_dict_of, self._types, self._stored, self._only = state_dict_of, types, stored, only
        self.match = StateMatch()

    def walk(self, new: Any, node: ValueNode, keys: KeyPath = (), container: Any = None) -> None:
        """Match a part of the new state with its saved node."""
        if isinstance(new, Tensor):
            if not self._is_selected(keys):
                return
            if is_tensor_node(node):
                self.match.targets.append(TensorTarget(keys, node["v"], new))
            else:
                self.match.mismatched.append((keys, "is not a tensor in the save"))
        elif is_stateful(new):
            self._object(new, node, keys)
        elif (
            not keys or has_tensors_or_objects(new) or (_is_container(new) and self._has_tensors(node, keys))
        ):
            self._below(new, node, keys)
        elif self._is_selected(keys):
            self._value(new, node, keys, container)

    def _has_tensors(self, node: ValueNode, keys: KeyPath) -> bool:
        return holds_tensor_nodes(node, self._types, keys)

    def _is_selected(self, keys: KeyPath) -> bool:
        return f"{render_key_path(keys)}.".startswith(self._only)

    def _below(self, new: Any, node: ValueNode, keys: KeyPath) -> None:
        saved = child_nodes(node, self._types, keys)
        # 1 and True are different keys here.
        mine = {(type(key), key): value for key, value in _items(new)}
        its = {(type(key), key): child for key, child in (saved or {}).items()}
        for typed_key, value in mine.items():
            below = (*keys, typed_key[1])
            if typed_key in its:
                self.walk(value, its[typed_key], below, new)
            else:
                leaves = self.leaves(value, below)
                self.match.lacks += [(path, leaf) for path, leaf in leaves if self._is_selected(path)]
        if saved is None and self._is_selected(keys):
            self.match.extra.append(keys)
        for typed_key, child in its.items():
            if typed_key not in mine:
                paths = tree_leaves(child, self._types, (*keys, typed_key[1]))
                self.match.extra += filter(self._is_selected, paths)

    def leaves(self, new: Any, keys: KeyPath) -> Iterator[tuple[KeyPath, Tensor | None]]:
        """Yield every tensor, object and plain value of a new state."""
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
        current = self._state_dict_of(keys, new)
        if isinstance(new, torch.nn.Module) or holds_any(current, is_stateful):
            self._below(current, node, keys)
            self.match.objects.append(StatefulTarget(keys, new, current=current))
            return
        if is_part:
            raise UsageError(f"load: only={self._only!r}: {name} takes its state whole; use only='{name}.'")
        parameters = None
        if isinstance(new, torch.optim.Optimizer):
            numbered = parameters_by_number(new, node, self._types)
            if isinstance(numbered, str):
                self.match.mismatched.append((keys, numbered))
                return
            parameters = numbered
        self._tensors_of(current, node, keys, parameters)
        self.match.objects.append(StatefulTarget(keys, new, node=node, parameters=parameters))

    def _tensors_of(
        self, current: Any, node: ValueNode, keys: KeyPath, parameters: Mapping[Hashable, Tensor] | None
    ) -> None:
        """Add the tensors to pass to an object: its own, filled, or new ones."""
        for below, tensor_node in tensor_nodes(node, self._types):
            mine = _value_at(current, below)
            like = mine if isinstance(mine, Tensor) else None
            stored = self._stored.get(tensor_node["v"])
            # The step count stays on the host, unless the optimizer moves it.
            if like is None and parameters is not None and stored is not None and below[-1] != "step":
                param = parameters.get(parameter_number(below))
                dtype: torch.dtype = getattr(torch, stored.dtype)
                like = init_optimizer_state(param, stored.shape, dtype)
            target = TensorTarget((*keys, *below), tensor_node["v"], like, like, is_free=True)
            target.is_sharded = bool(tensor_node.get("sharded"))
            self.match.targets.append(target)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))


def _value_at(value: Any, keys: KeyPath) -> Any:
    """Return the value at these keys, or None."""
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
