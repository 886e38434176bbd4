"""Saves of format 1, torch's own distributed checkpoint: still read, no longer written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from hpcrun.errors import SiteError
from hpcrun.runtime.torch_dcp import TorchReader, check_checkpoint_owner
from hpcrun.specs.saves import SavedCheckpoint


def stored_shapes(saved: SavedCheckpoint) -> dict[str, tuple[int, ...]]:
    """The whole shape of every tensor of a save, by name; SiteError when that cannot be read."""
    return {name: tuple(entry.size) for name, entry in _open(saved).tensors.items()}


def load(saved: SavedCheckpoint, entries: dict[str, Tensor]) -> None:
    """Fill tensors in place, all ranks together; SiteError where the files do not give them."""
    reader = _open(saved)
    try:
        with _quiet():
            dcp_load(dict(entries), storage_reader=reader)
    except (OSError, CheckpointException) as error:
        raise SiteError(f"{saved.path}: is damaged: {_first_line(error)}") from None


def load_whole(saved: SavedCheckpoint, prefix: str) -> dict[str, Tensor]:
    """The whole tensors whose names begin so, on one process."""
    reader = _open(saved)
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.tensors.items()
        if name.startswith(prefix)
    }
    with _quiet():
        dcp_load(state, storage_reader=reader, no_dist=True)
    return state


def _open(saved: SavedCheckpoint) -> TorchReader:
    """With its list of tensors read, which runs nothing; UsageError where others could have written it."""
    check_checkpoint_owner(saved.path)
    reader = TorchReader(saved.path)
    reader.read_metadata()
    return reader


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
