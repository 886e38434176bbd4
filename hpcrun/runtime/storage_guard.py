"""Keeps memory from being freed while a thread copies from it.

Resizing the storage of a tensor frees memory that another thread may be reading, which ends the process. Such
a resize waits here until the thread has finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_lock = threading.Lock()
_guarded_storages: list[tuple[Future[Any], frozenset[int]]] = []
"""Futures of readers, and the storages that each of them reads."""


def guard_until_read(reading: Future[Any], tensors: Sequence[Tensor]) -> None:
    """Make resizing the storages of these tensors wait until they have been read."""
    storages = frozenset(_storage_of(tensor) for tensor in tensors if tensor.is_cpu)
    if not storages:
        return
    kept = (reading, storages)
    with _lock:
        _guarded_storages.append(kept)
        if len(_guarded_storages) == 1:
            for owner in _OWNERS:
                owner.resize_ = _wait_before_resize(owner.resize_)
    reading.add_done_callback(lambda _: _release(kept))


def _release(kept: tuple[Future[Any], frozenset[int]]) -> None:
    with _lock:
        _guarded_storages.remove(kept)
        if not _guarded_storages:
            for owner in _OWNERS:
                del owner.resize_  # torch's own is that of the class above


def _wait_before_resize(resize: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(self: Any, *sizes: Any, **options: Any) -> Any:
        storage = _storage_of(self) if isinstance(self, Tensor) else self._cdata
        for reading, storages in list(_guarded_storages):
            if storage in storages:
                with suppress(Exception):  # its error is raised at the fence
                    reading.result()
        return resize(self, *sizes, **options)

    return resize_


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_OWNERS: tuple[Any, ...] = (torch.UntypedStorage, Tensor)
