"""Tells which tensors share memory, and whether their contents have changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from hpcrun.runtime.resharding import is_storable_dtype, local_tensor

_PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHOLE_ITEMS, _SAMPLE_ITEMS, _SAMPLE_PLACES = 1024, 16, 4
"""Up to the first number of elements all are compared; of more, a sample at a few places, because each place
costs a cache line."""


def tensor_problem(tensor: Tensor) -> str:
    """Return why a tensor cannot be saved or filled; empty where it can."""
    kind = type(tensor)
    if kind in _PLAIN_TENSOR_TYPES and _is_usual(tensor):
        return ""
    if kind is DTensor and isinstance(tensor, DTensor):
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            return "is a DTensor of partial sums; redistribute it"
        return tensor_problem(tensor.to_local())
    if kind not in _PLAIN_TENSOR_TYPES:
        return f"is of the tensor type {kind.__module__}.{kind.__qualname__}; give a torch.Tensor"
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"is a {layout} tensor; give its dense parts"
    if tensor.is_quantized:
        return "is a quantised tensor; give its int_repr() and scales"
    if not is_storable_dtype(tensor.dtype):
        return f"is of type {str(tensor.dtype).removeprefix('torch.')}, which a save does not know"
    if tensor.is_meta:
        return "is on the meta device, without elements; make it real with to_empty()"
    extent = tensor.numel() if tensor.is_contiguous() else _element_span(tensor)
    if extent and (tensor.storage_offset() + extent) * tensor.itemsize > tensor.untyped_storage().nbytes():
        return "has lost its memory, which was resized or freed"
    return ""


def _is_usual(tensor: Tensor) -> bool:
    """Check quickly what holds for most tensors: contiguous, in memory that exists."""
    return (
        tensor.layout is torch.strided
        and is_storable_dtype(tensor.dtype)
        and not tensor.is_meta
        and not tensor.is_nested
        and tensor.is_contiguous()
        and tensor.storage_offset() * tensor.itemsize + tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def tensor_identity(tensor: Tensor) -> Hashable | None:
    """Return a value that is equal for the same tensor; None for tensors without elements."""
    local = local_tensor(tensor)
    if not local.numel():
        return None
    where = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ()
    marks = (local.is_conj(), local.is_neg())
    shape = (tuple(tensor.shape), tuple(local.shape), local.stride())
    return (local.device, local.data_ptr(), local.dtype, *shape, *marks, where)


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of tensors that repeat another one, with the first name of that."""
    # Most addresses are unique; only the others need the slower comparison.
    begins = [local_tensor(tensor).data_ptr() for tensor in tensors.values()]
    if len(set(begins)) == len(begins):
        return {}
    counts = Counter(begins)
    first: dict[Hashable, str] = {}
    aliases = dict[str, str]()
    for name, begin in zip(tensors, begins, strict=True):
        identity = tensor_identity(tensors[name]) if counts[begin] > 1 else None
        if identity is not None and (owner := first.setdefault(identity, name)) != name:
            aliases[name] = owner
    return aliases


def overlapping_clusters(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield groups of tensors, by number, whose memory may overlap; a tensor alone may overlap itself."""
    spans = []
    for number, tensor in enumerate(tensors):
        local = local_tensor(tensor)
        if local.numel():
            begin = local.data_ptr()
            end = begin + _element_span(local) * local.itemsize
            spans.append((str(local.device), begin, end, number))
    spans.sort()
    cluster, reach, place = list[int](), 0, ""
    for device, begin, end, number in spans:
        if cluster and (device != place or begin >= reach):
            yield cluster
            cluster, reach = [], 0
        cluster.append(number)
        reach, place = max(reach, end), device
    if cluster:
        yield cluster


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether some of its elements may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def write_elements(target: Tensor, content: Tensor) -> None:
    """Copy elements into a tensor; where its elements share memory, the last one wins."""
    if not overlaps_itself(target):
        target.copy_(content)
        return
    flat = torch.as_strided(target, (_element_span(target),), (1,))
    places = torch.arange(flat.numel(), device=target.device).as_strided(target.shape, target.stride())
    flat[places.reshape(-1)] = content.reshape(-1).to(target.device)


def can_hold_all(targets: Sequence[Tensor], contents: Sequence[Tensor]) -> bool:
    """Whether tensors that share memory can hold these contents at the same time; tries it on a copy."""
    begin = min(target.data_ptr() for target in targets)
    end = max(target.data_ptr() + _element_span(target) * target.itemsize for target in targets)
    memory = torch.empty(end - begin + 16, dtype=torch.uint8)
    # Elements begin at multiples of their size, as in the targets.
    begin -= begin % 16
    tries = []
    for target in targets:
        start = (target.data_ptr() - begin) // target.itemsize
        room = memory[: memory.numel() // target.itemsize * target.itemsize].view(target.dtype)
        view = room.as_strided(target.shape, target.stride(), start)
        view = view.conj() if target.is_conj() else view
        tries.append(torch._neg_view(view) if target.is_neg() else view)
    for view, content in zip(tries, contents, strict=True):
        write_elements(view, content)
    return all(same_bytes(view, content) for view, content in zip(tries, contents, strict=True))


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits; NaN equals itself."""
    first, second = (local_tensor(tensor).detach().resolve_conj().resolve_neg() for tensor in (first, second))
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    second = second.to(first.device)
    return torch.equal(_as_bytes(first.reshape(-1)), _as_bytes(second.reshape(-1)))


class TensorSamples:
    """Some elements of each of many tensors, all of small ones: shows changes of whole tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors, which `changed` reads again."""
        self._views: dict[tuple[Any, ...], tuple[list[int], list[Tensor]]] = {}
        with torch.no_grad():
            for number, tensor in enumerate(tensors):
                view = _sample_view(tensor)
                numbers, views = self._views.setdefault((view.device, view.dtype, view.dim()), ([], []))
                numbers.append(number)
                views.append(view)
            self._before = [_concatenate_as_integers(views) for _, views in self._views.values()]

    @torch.no_grad()
    def changed(self, gone: Collection[int] = ()) -> list[int]:
        """Return the numbers of changed tensors; `gone`: those whose memory must not be read."""
        changed = []
        for (numbers, views), before in zip(self._views.values(), self._before, strict=True):
            if not gone and torch.equal(before, _concatenate_as_integers(views)):
                continue
            parts = torch.split(before, [view.numel() for view in views])
            for number, view, part in zip(numbers, views, parts, strict=True):
                if number not in gone and not torch.equal(_concatenate_as_integers([view]), part):
                    changed.append(number)
        return sorted(changed)


def _sample_view(tensor: Tensor) -> Tensor:
    """Return a view of some elements, or a copy where the layout needs one."""
    local = local_tensor(tensor)
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    if local.dtype.itemsize == 1:  # torch cannot concatenate all one-byte types
        local = local.view(torch.uint8)
    if (count := local.numel()) > _WHOLE_ITEMS:
        if local.is_contiguous():
            sizes = (_SAMPLE_PLACES, _SAMPLE_ITEMS // _SAMPLE_PLACES)
            return local.as_strided(sizes, (count // _SAMPLE_PLACES, 1))
        step = max(1, math.ceil((count / _SAMPLE_ITEMS) ** (1 / local.dim())))
        local = local[(slice(None, None, step),) * local.dim()]
    return local.reshape(-1)


def _concatenate_as_integers(views: list[Tensor]) -> Tensor:
    """Copy views of one type into one tensor of integers, in which NaN equals itself."""
    row = torch.cat(views)
    row = torch.view_as_real(row) if row.dtype == torch.complex128 else row
    return row.view(_INTEGER_DTYPES[row.itemsize]).reshape(-1)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _element_span(tensor: Tensor) -> int:
    """Return how many elements its memory spans, from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
