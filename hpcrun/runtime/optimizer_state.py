"""Loads the state of torch's optimizers exactly; their load_state_dict casts it to the parameter's type."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from hpcrun.runtime.plain_values import KeyPath, TypesByName, ValueNode, child_nodes
from hpcrun.runtime.tensor_memory import same_bytes


def parameters_by_number(
    optimizer: torch.optim.Optimizer, node: ValueNode, types: TypesByName
) -> dict[Hashable, Tensor] | str | None:
    """Return the parameters by their numbers in a saved state, or a text where its groups differ.

    None where the state does not have the form of torch's optimizers.
    """
    fields = child_nodes(node, types) or {}
    saved = child_nodes(fields.get("param_groups"), types)
    if saved is None or "state" not in fields:
        return None
    numbers = []
    for group in saved.values():
        listed = child_nodes((child_nodes(group, types) or {}).get("params"), types)
        if listed is None:
            return None
        numbers.append(list(listed.values()))
    here = [group["params"] for group in optimizer.param_groups]
    if [len(group) for group in here] != [len(group) for group in numbers]:
        was = f"was saved with parameters in groups of {_counts(numbers)}"
        return f"{was}; here they are in groups of {_counts(here)}"
    return {
        number: param
        for group, params in zip(numbers, here, strict=True)
        for number, param in zip(group, params, strict=True)
    }


def init_optimizer_state(param: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Allocate a tensor of a parameter's state with the same layout; None where the shape differs."""
    if param is None or tuple(param.shape) != shape:
        return None
    return torch.empty_like(param, dtype=dtype, requires_grad=False)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Call an optimizer's load_state_dict with what it can cast."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(state)
        return
    # load_state_dict changes texts and named tuples: they are set afterwards.
    castable = {number: _castable(values) for number, values in state["state"].items()}
    optimizer.load_state_dict({**state, "state": castable})


def set_optimizer_state_exactly(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], parameters: Mapping[Hashable, Tensor]
) -> None:
    """Set an optimizer's state to exactly what was passed, where it has changed it."""
    for number, values in state["state"].items():
        key = parameters.get(number, number)
        optimizer.state[key] = _exact(values, optimizer.state.get(key))


def parameter_number(keys: KeyPath) -> Hashable:
    """Return the number of the parameter that a value of an optimizer's state belongs to."""
    return keys[1] if len(keys) > 2 and keys[0] == "state" else None


def _exact(handed: Any, actual: Any) -> Any:
    if isinstance(handed, Tensor):
        if not isinstance(actual, Tensor) or type(actual) is not type(handed):
            return handed
        return actual if same_bytes(handed, actual) else handed.to(actual.device)
    if type(handed) is dict:
        mine = actual if isinstance(actual, Mapping) else {}
        return {key: _exact(value, mine.get(key)) for key, value in handed.items()}
    if type(handed) in (list, tuple):
        is_alike = isinstance(actual, list | tuple) and len(actual) == len(handed)
        there = actual if is_alike else [None] * len(handed)
        return type(handed)(_exact(*both) for both in zip(handed, there, strict=True))
    return handed


def _castable(value: Any) -> Any:
    if type(value) is dict:
        return {key: _castable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_castable(item) for item in value)
    return value if isinstance(value, Tensor | int | float) else None


def _counts(groups: list[Any]) -> str:
    return ", ".join(str(len(group)) for group in groups)
