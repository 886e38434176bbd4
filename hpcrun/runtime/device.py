"""Chooses the device of a rank, and tells its peak speed and memory use."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from hpcrun.errors import SiteError
from hpcrun.formulas import peak_flops
from hpcrun.runtime.control import Control


@dataclass(frozen=True)
class Device:
    """The device of this rank and the backend of its process groups."""

    torch_device: torch.device
    backend: str
    name: str
    reason: str
    uuid: str | None = None
    """Of the GPU."""
    visible: tuple[str, ...] = ()
    """The UUIDs of all GPUs that this rank sees."""

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.torch_device.type == "cuda"

    def peak_flops(self, precision: str) -> float | None:
        """Return the dense peak in FLOP/s, None where it is unknown."""
        return peak_flops(self.name, precision) if self.is_cuda else None

    def peak_memory_bytes(self) -> int:
        """Return the peak memory so far: of the allocator on a GPU, resident on a CPU."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch_device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def synchronize(self) -> None:
        """Wait for queued kernels, so that times measured afterwards include them."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)


def choose_device(requested: str, control: Control, placed: str | None = None) -> Device:
    """Choose cuda only if every rank of every node has a GPU of its own; the result says why.

    `placed`: the UUID of this rank's GPU by the placement; without it, or where a rank of the node does not
    see its own, GPUs are taken in their order.
    """
    uuids = _gpus() if requested != "cpu" else []
    views = control.allgather([control.node, uuids])
    mine = [view for node, view in views if node == control.node]
    assigned = control.allgather([control.node, placed and bare_uuid(placed)])
    index = _own_gpu(mine, control.local_rank, [uuid for node, uuid in assigned if node == control.node])
    fitted = control.allgather(index is not None)
    everyone = all(fitted)
    if requested == "cpu":
        return _cpu("asked for")
    if everyone and index is not None:
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
        reason = "asked for" if requested == "cuda" else "every local rank has a GPU of its own"
        return Device(device, "cpu:gloo,cuda:nccl", name, reason, uuids[index], tuple(uuids))
    if requested == "cuda":
        raise SiteError(
            f"device: cuda, but there are {_shortage(views, fitted)};"
            " use device: cpu, fewer ranks a node, or a torch built for CUDA"
        )
    return _cpu(_shortage(views, fitted) if any(uuids for _, uuids in views) else "no GPU here")


def _shortage(views: list[tuple[str, list[str]]], fitted: list[bool]) -> str:
    """Describe what the first node lacks whose ranks have no GPU of their own."""
    node = views[fitted.index(False)][0]
    here = [uuids for other, uuids in views if other == node]
    return f"{len({uuid for uuids in here for uuid in uuids})} GPUs for {len(here)} ranks on {node}"


def _cpu(reason: str) -> Device:
    return Device(torch.device("cpu"), "gloo", "cpu", reason)


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    every = (torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count()))
    return [bare_uuid(str(uuid)) for uuid in every]


def bare_uuid(text: str) -> str:
    """Return a UUID without the prefix GPU-, which the driver writes and torch does not."""
    return text.strip().lower().removeprefix("gpu-")


def _own_gpu(views: list[list[str]], local_rank: int, placed: list[str | None]) -> int | None:
    """Return the index of this rank's own GPU, by the placement or by what the ranks see, or None.

    Ranks either all see all GPUs, or each sees its own.
    """
    seen, mine = views[local_rank], placed[local_rank]
    if len(set(placed)) == len(views) and all(uuid in view for uuid, view in zip(placed, views, strict=True)):
        return seen.index(mine) if mine is not None else None
    if all(view == seen for view in views):
        return local_rank if local_rank < len(seen) else None
    firsts = [view[0] for view in views if view]
    return 0 if len(set(firsts)) == len(views) else None
