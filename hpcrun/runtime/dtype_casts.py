"""Casts tensors to other types and counts the values that change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hpcrun.errors import UsageError

_BLOCK = 1 << 24
"""Elements compared at a time, which limits the size of copies."""
_WIDER = {"float16": "bfloat16", "bfloat16": "float32", "float32": "float64"}


@dataclass
class CastSummary:
    """Counts for all tensors cast from one type to another."""

    source: str
    target: str
    tensors: int = 0
    values: int = 0
    rounded: int = 0
    """Values that have changed."""
    zeroed: int = 0
    """Of these, values that have become zero."""
    first: str = ""
    """A tensor with rounded values."""

    def __str__(self) -> str:
        count = f"{self.tensors} tensor{'s' if self.tensors > 1 else ''}"
        what = f"{count} cast from {self.source} to {self.target}"
        if not self.rounded:
            return f"{what}: no value changed"
        zeroed = f" ({self.zeroed} became zero)" if self.zeroed else ""
        return f"{what}: {self.rounded} of {self.values} values rounded{zeroed}, first in {self.first}"


class DtypeCaster:
    """Casts tensors for one import or export, and counts."""

    def __init__(self, option: str, *, may_round: bool) -> None:
        """`option`: to name in errors; without `may_round` a value that would change is refused."""
        self._option, self._may_round = option, may_round
        self._found: dict[tuple[str, str], CastSummary] = {}

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast to a type; UsageError where a value is too large for it, or would be rounded and may not."""
        if tensor.dtype == dtype:
            return tensor
        source, target = _name(tensor.dtype), _name(dtype)
        cast = self._found.setdefault((source, target), CastSummary(source, target))
        cast.tensors += 1
        cast.values += tensor.numel()
        cast_tensor = tensor.to(dtype)
        if torch.promote_types(tensor.dtype, dtype) == dtype:
            return cast_tensor
        rounded = 0
        for before, after in zip(_blocks(tensor), _blocks(cast_tensor), strict=True):
            lost = torch.isinf(after) & torch.isfinite(before)
            if lost.any():
                largest = float(before[lost].abs().max())
                raise UsageError(
                    f"{self._option} {target}: {name} holds {largest:.6g}, too large for it; use"
                    f" {_WIDER[target]}"
                )
            changed = (after.to(before.dtype) != before) & ~torch.isnan(before)
            rounded += int(changed.sum())
            cast.zeroed += int((changed & (after == 0)).sum())
        if rounded and not self._may_round:
            raise UsageError(
                f"{name}: {rounded} of {tensor.numel()} values in {source} would be rounded in {target};"
                f" give {self._option} {target} to allow it"
            )
        cast.first = cast.first or (name if rounded else "")
        cast.rounded += rounded
        return cast_tensor

    def all(self) -> list[CastSummary]:
        """Return the counts, one for each pair of types."""
        return list(self._found.values())

    def as_json(self) -> list[dict[str, Any]]:
        """Return the counts as JSON values."""
        return [asdict(cast) for cast in self._found.values()]


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.reshape(-1), _BLOCK)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
