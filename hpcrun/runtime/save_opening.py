"""Which tensors of a save fill a state, checked before any of them is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from hpcrun.checkpoint.chunk_reader import ChunkSource
from hpcrun.errors import UsageError
from hpcrun.runtime.control import Control
from hpcrun.runtime.random_state import rng_state
from hpcrun.runtime.resharding import dtype_name

EntrySelector = Callable[[str, int, ChunkSource], dict[str, Tensor]]
"""Takes a save (its name in messages, how many ranks wrote it, its chunks) and returns the tensors to fill by
their stored names; UsageError where the save does not fit."""


def select_whole_state(
    state: dict[str, Tensor], expected: dict[str, tuple[int, ...]], control: Control
) -> EntrySelector:
    """Select all tensors of `state`; the save must hold just those of the whole job, `expected`."""

    def select(where: str, world_size: int, source: ChunkSource) -> dict[str, Tensor]:
        tensors = source.manifest.tensors
        stored = {name: tensor.shape for name, tensor in tensors.items() if not name.startswith("rng.")}
        _refuse_mismatch(where, "lacks", expected.keys() - stored.keys())
        _refuse_mismatch(where, "also holds", stored.keys() - expected.keys())
        _refuse_mismatch(
            where, "has another shape of", [name for name in expected if stored[name] != expected[name]]
        )
        _refuse_mismatch(
            where,
            "has another type of",
            [name for name, tensor in state.items() if tensors[name].dtype != dtype_name(tensor)],
        )
        return state | select_random_state(world_size, source, control)

    return select


def select_random_state(world_size: int, source: ChunkSource, control: Control) -> dict[str, Tensor]:
    """Select the random state of this rank, if a world of this size and this kind of device has saved it."""
    name, random_state = f"rng.{control.rank}", rng_state()
    stored = source.manifest.tensors.get(name)
    is_alike = world_size == control.size and stored is not None and stored.shape == random_state.shape
    return {name: random_state} if is_alike else {}


def _refuse_mismatch(where: str, verb: str, names: Iterable[str]) -> None:
    if wrong := sorted(names):
        rest = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UsageError(
            f"{where}: {verb} {wrong[0]}{rest}; was the model changed?"
            " Resume with the model of the run, or start a new run with model.weights"
        )
