"""Sums gradients over full replicas while backward still runs.

FSDP can do this too (a shard axis of one), but waits for every bucket on devices without streams; DDP wraps
whole modules, and cannot wrap a pipeline stage or a tensor-parallel parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpcrun.runtime.parallel import wrap_local_piece

FIRST_BUCKET_BYTES, MAX_BUCKET_BYTES = 1 << 20, 32 << 20
"""The first bucket is small so that it leaves early; each next is twice as large, to use the network well."""


class ReplicaReducer:
    """Starts the all-reduce of a bucket of gradients as soon as its last one is ready."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        # Backward produces gradients roughly from the last parameter to the first.
        self._buckets = [_Bucket(part) for part in _pack_buckets(list(parameters)[::-1])]
        self._armed = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = partial(self._on_gradient_ready, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def arm(self, on: bool) -> None:
        """Set whether the next backward is of a step's last microbatch, so that its gradients are final."""
        self._armed = on

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, and put the sums into `.grad`."""
        for bucket in self._buckets:
            if bucket.work is None:
                bucket.send(self._group)
        for bucket in self._buckets:
            bucket.receive()
        self._armed = False

    def _on_gradient_ready(self, bucket: _Bucket, _parameter: Tensor) -> None:
        if self._armed:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                bucket.send(self._group)


class _Bucket:
    """A few parameters and one flat buffer for their gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.waiting = len(parameters)
        self.work: Any = None
        self._buffer: Tensor | None = None
        self._views: tuple[Tensor, ...] = ()

    def send(self, group: dist.ProcessGroup) -> None:
        gradients = [_local(parameter.grad) for parameter in self.parameters]
        if self._buffer is None:
            self._buffer = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
            flat = torch.split(self._buffer, [gradient.numel() for gradient in gradients])
            self._views = tuple(
                view.view(gradient.shape) for view, gradient in zip(flat, gradients, strict=True)
            )
        torch._foreach_copy_(list(self._views), gradients)
        self.work = dist.all_reduce(self._buffer, group=group, async_op=True)

    def receive(self) -> None:
        self.work.wait()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            assert parameter.grad is not None
            # Sums over other axes that are still open stay open.
            parameter.grad = wrap_local_piece(parameter.grad, view)
        self.work, self.waiting = None, len(self.parameters)


def _pack_buckets(parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size, limit = 0, FIRST_BUCKET_BYTES
    for parameter in parameters:
        local = _local(parameter)
        bucket.append(parameter)
        size += local.numel() * local.element_size()
        if size >= limit:
            yield bucket
            bucket, size, limit = [], 0, min(2 * limit, MAX_BUCKET_BYTES)
    if bucket:
        yield bucket


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a parameter without a gradient cannot be summed"
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
