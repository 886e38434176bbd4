"""Saves of format 1, torch's own distributed checkpoint: still read, no longer written."""

from __future__ import annotations

import os
import pickle
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from hpcrun.errors import SiteError, UsageError
from hpcrun.specs.saves import Saved


def stored_shapes(saved: Saved) -> dict[str, tuple[int, ...]]:
    """The whole shape of every tensor of a save, by name; SiteError when that cannot be read."""
    return {name: tuple(entry.size) for name, entry in _read_metadata(saved).items()}


def load(saved: Saved, entries: dict[str, Tensor]) -> None:
    """Fill tensors in place, all ranks together; SiteError where the files do not give them."""
    check_owner(saved.path)
    try:
        with _quiet():
            dcp_load(dict(entries), storage_reader=FileSystemReader(saved.path))
    except (OSError, CheckpointException) as error:
        raise SiteError(f"{saved.path}: is damaged: {_first_line(error)}") from None


def load_whole(saved: Saved, prefix: str) -> dict[str, Tensor]:
    """The whole tensors whose names begin so, on one process."""
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _read_metadata(saved).items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with _quiet():
        dcp_load(state, storage_reader=FileSystemReader(saved.path), no_dist=True)
    return state


def check_owner(path: Path) -> None:
    """Refuse a checkpoint that somebody else could have written: its metadata is a pickle, which is code."""
    for item in (path, *path.iterdir()):
        status = item.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH:
            raise UsageError(
                f"{item}: belongs to another user or is writable by all; loading it could run their code."
                " Copy it to a directory of your own that only you may write"
            )


def _read_metadata(saved: Saved) -> dict[str, Any]:
    check_owner(saved.path)
    try:
        return dict(FileSystemReader(saved.path).read_metadata().state_dict_metadata)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise SiteError(f"{saved.path}: is damaged: {error}") from None


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return str(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns of single-process use and of typed storages; neither concerns the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
