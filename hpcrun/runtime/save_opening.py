"""One save that all ranks try: first they look whether it does, then they fill the state from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hpcrun.checkpoint.chunk_reader import ChunkSource
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.errors import UsageError
from hpcrun.runtime.control import Control
from hpcrun.runtime.resharding import dtype_name, fill_from_chunks
from hpcrun.specs.saves import SavedCheckpoint

EntrySelector = Callable[[str, int, ChunkSource], dict[str, Tensor]]
"""Looks at a state before it is loaded (its name for people, how many ranks wrote it, its chunks) and says
what is to be filled from it; UsageError where it does not do."""


@dataclass(frozen=True)
class RestoreTarget:
    """What is to be filled from a save."""

    state: dict[str, Tensor]
    expected: dict[str, tuple[int, ...]]
    """Of the whole job."""
    control: Control
    random_state: Tensor
    """Memory of the size that this rank's has here."""
    fit: EntrySelector | None

    @property
    def own(self) -> str:
        """The name of this rank's random state."""
        return f"rng.{self.control.rank}"

    def select_entries(self, source: ChunkSource, where: str, world_size: int) -> dict[str, Tensor]:
        """What is to be filled from this; UsageError where it is not what is stored."""
        if self.fit is not None:
            return self.fit(where, world_size, source)
        stored = {name: tensor.shape for name, tensor in source.manifest.tensors.items()}
        _check_entries(where, stored, self.expected)
        # Another kind of device keeps another kind of random state.
        is_alike = world_size == self.control.size and stored.get(self.own) == self.random_state.shape
        entries = self.state | ({self.own: self.random_state} if is_alike else {})
        _check_types(source, where, entries)
        return entries


class RestoreCandidate:
    """A save, as one rank tries it."""

    def __init__(self, saved: SavedCheckpoint, wanted: RestoreTarget) -> None:
        self._saved, self._wanted = saved, wanted
        self._source: GenerationReader | None = None
        self._entries: dict[str, Tensor] = {}

    def look(
        self, open_save: Callable[[SavedCheckpoint], GenerationReader], opened: contextlib.ExitStack
    ) -> None:
        """Find what is to be filled, and touch nothing.

        With `fit` the state is somebody's who may go on with it after an error: then every byte is proved
        before the first is filled.
        """
        saved = self._saved
        source = self._source = opened.enter_context(open_save(saved))
        self._entries = self._wanted.select_entries(source, str(saved.path), saved.world_size)
        if self._wanted.fit is not None:
            fill_from_chunks(source, self._entries, only_prove=True)

    def fill(self) -> None:
        """Fill the state."""
        assert self._source is not None, "a save is filled from before it was opened"
        fill_from_chunks(self._source, self._entries)

    @property
    def random_state(self) -> Tensor | None:
        """Of this rank, once it is filled, if that save has one that fits."""
        return self._entries.get(self._wanted.own)


def _check_entries(
    where: str, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    """Strict both ways: a tensor too many or too few means that the job is not the one that was saved."""
    there = {name: shape for name, shape in stored.items() if not name.startswith("rng.")}
    for verb, names in (
        ("lacks", sorted(expected.keys() - there.keys())),
        ("also holds", sorted(there.keys() - expected.keys())),
        ("has another shape of", sorted(n for n in expected if there.get(n, expected[n]) != expected[n])),
    ):
        _refuse_mismatch(where, verb, names)


def _check_types(source: ChunkSource, where: str, entries: dict[str, Tensor]) -> None:
    stored = source.manifest.tensors
    names = [name for name, tensor in entries.items() if stored[name].dtype != dtype_name(tensor)]
    _refuse_mismatch(where, "has another type of", names)


def _refuse_mismatch(where: str, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UsageError(
            f"{where}: {verb} {names[0]}{more}; was the model changed?"
            " Resume with the model of the run, or start a new run with model.weights"
        )
