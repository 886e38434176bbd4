"""Save and resume in the run directory: torch's distributed checkpoint, committed by one rename.

A step is either wholly there, with its record written last, or it is not there at all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpcrun.errors import SiteError, UsageError
from hpcrun.runtime.control import Control
from hpcrun.specs.records import sync_directory, write_json
from hpcrun.specs.saves import FORMAT_VERSION, RECORD, Saved, saved_steps


class Checkpointer:
    """Saves and restores the training state of all ranks together."""

    def __init__(self, checkpoints: Path, control: Control, *, attempt: int, keep: int) -> None:
        self._root, self._control, self._attempt, self._keep = checkpoints, control, attempt, keep

    def newest(self) -> Saved | None:
        """The newest committed step, the same answer on every rank."""
        found = self._control.everywhere(lambda: [_plain(saved) for saved in saved_steps(self._root)])
        return _saved(found[-1]) if found else None

    def save(self, step: int, position: int, state: dict[str, Tensor]) -> Path:
        """Write the state of a step; every rank returns when it is committed and durable."""
        final = self._root / f"step-{step:08d}"
        aside = self._root / f".step-{step:08d}.{self._attempt}"
        if self._control.everywhere(lambda: _prepare(final, aside)):
            return final
        entries: dict[str, Any] = state | {f"rng.{self._control.rank}": _rng_state()}
        with _quiet():
            self._on_all(lambda: dcp_save(entries, checkpoint_id=aside))
        record = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "position": position,
            "world_size": self._control.size,
            "attempt": self._attempt,
        }
        self._control.everywhere(lambda: self._commit(aside, final, record))
        return final

    def _commit(self, aside: Path, final: Path, record: dict[str, Any]) -> None:
        write_json(aside / RECORD, record)
        aside.rename(final)
        sync_directory(self._root)
        for old in saved_steps(self._root)[: -self._keep]:
            # Renamed first: a deletion that is cut short must not look like a committed step. The new step
            # stands, so what cannot be deleted now is left to the next save.
            with contextlib.suppress(OSError):
                doomed = old.path.with_name(f".{old.path.name}.deleted")
                old.path.rename(doomed)
                shutil.rmtree(doomed)

    def load(self, saved: Saved, state: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
        """Fill the state's tensors in place from a saved step, whatever layout wrote it; random state last.

        `expected` names every tensor of the whole job with its whole shape; nothing else may be stored.
        """
        stored = _read_metadata(saved)
        _check_entries(saved, stored, expected)
        entries: dict[str, Any] = dict(state)
        mine, random_state = f"rng.{self._control.rank}", _rng_state()
        # Another kind of device keeps another kind of random state.
        same_world = saved.world_size == self._control.size and mine in stored
        if same_world and stored[mine].size == random_state.shape:
            entries[mine] = random_state
        with _quiet():
            self._on_all(lambda: dcp_load(entries, storage_reader=FileSystemReader(saved.path)))
        if mine in entries:
            _set_rng_state(entries[mine])

    def _on_all(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, CheckpointException) as error:
            raise SiteError(f"{self._root}: {_first_line(error)}") from None


def load_weights(saved: Saved) -> dict[str, Tensor]:
    """The whole weights of a saved step on one process, by canonical name; needs no process group."""
    stored = _read_metadata(saved)
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    with _quiet():
        dcp_load(state, storage_reader=FileSystemReader(saved.path), no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def check_owner(path: Path) -> None:
    """Refuse a checkpoint that somebody else could have written: its metadata is a pickle, which is code."""
    for item in (path, *path.iterdir()):
        status = item.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH:
            raise UsageError(
                f"{item}: belongs to another user or is writable by all; loading it could run their code."
                " Copy it to a directory of your own that only you may write"
            )


def _prepare(final: Path, aside: Path) -> bool:
    """Whether the step is there already; else an empty place to write it."""
    if (final / RECORD).is_file():
        return True
    for leftover in (final, *aside.parent.glob(".step-*")):
        if leftover.exists():
            shutil.rmtree(leftover)
    aside.mkdir(parents=True, mode=0o700)
    return False


def _read_metadata(saved: Saved) -> dict[str, Any]:
    """What a saved step holds, by name; SiteError when that cannot be read."""
    check_owner(saved.path)
    try:
        return dict(FileSystemReader(saved.path).read_metadata().state_dict_metadata)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise SiteError(
            f"{saved.path}: is damaged ({error}); remove that directory to go on from the save before it"
        ) from None


def _check_entries(saved: Saved, stored: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    """Strict both ways: a tensor too many or too few means that the job is not the one that was saved."""
    there = {name: tuple(entry.size) for name, entry in stored.items() if not name.startswith("rng.")}
    for verb, names in (
        ("lacks", sorted(expected.keys() - there.keys())),
        ("also holds", sorted(there.keys() - expected.keys())),
        ("has another shape of", sorted(n for n in expected if there.get(n, expected[n]) != expected[n])),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UsageError(
                f"{saved.path}: {verb} {names[0]}{more}; was the model changed?"
                " Resume with the model of the run, or start a new run with model.weights"
            )


def _rng_state() -> Tensor:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def _set_rng_state(state: Tensor) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if state.numel() > size:
        torch.cuda.set_rng_state(state[size:])


def _plain(saved: Saved) -> list[Any]:
    return [str(saved.path), saved.step, saved.position, saved.world_size, saved.attempt]


def _saved(fields: list[Any]) -> Saved:
    return Saved(Path(fields[0]), *fields[1:])


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
