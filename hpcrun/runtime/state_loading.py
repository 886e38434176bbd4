"""What of a script's state is filled from a save, and what of it is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcrun.checkpoint.reader import ChunkSource
from hpcrun.errors import UsageError
from hpcrun.runtime import checkpoint
from hpcrun.runtime.control import Control
from hpcrun.runtime.planning import dtype_name, raw_bytes
from hpcrun.runtime.trees import Tree, put_back, unpack


class StateLoading:
    """What of a state is filled from a save."""

    def __init__(self, control: Control, tree: Tree, *, strict: bool, only: str) -> None:
        self._control, self._tree, self._strict, self._only = control, tree, strict, only
        mine = {name: list(tensor.shape) for name, tensor in tree.tensors.items()}
        self._names = {name for told in control.allgather(list(mine)) for name in told}
        self._values: dict[str, Any] = {}
        self._tied: dict[str, str] = {}
        self.filled: set[str] = set()
        """Names of what the save has."""

    def fit(self, where: str, world_size: int, source: ChunkSource) -> dict[str, Tensor]:
        """Those tensors of the state that the save has; UsageError where it is another state."""
        every = source.manifest.tensors
        stored = {
            name for name in every if name.startswith(self._only) and not name.startswith(("rng.", "hpcrun."))
        }
        told = self._told(world_size, source, stored)
        ties = {name: owner for one in told for name, owner in one["ties"].items()}
        self._tied = {name: ties[name] for name in self._names - stored if ties.get(name) in self._names}
        found, other = dict[str, Tensor](), list[str]()
        for name, tensor in self._tree.tensors.items():
            if name in stored:
                same = (every[name].shape, every[name].dtype) == (tuple(tensor.shape), dtype_name(tensor))
                if same:
                    found[name] = tensor.detach()
                else:
                    other.append(name)
        if self._strict:
            _refuse(where, "has another shape or type of", other)
            _refuse(where, "lacks", sorted(self._names - stored - self._tied.keys()))
            _refuse(where, "also holds", sorted(stored - self._names))
        self._values = {} if self._only or not told else told[0]["values"]
        random, mine = checkpoint.rng_state(), f"rng.{self._control.rank}"
        self.filled = {*found, *self._tied, *self._values}
        is_alike = world_size == self._control.size and mine in every and every[mine].shape == random.shape
        if is_alike and not self._only:
            found[mine] = random
        return found

    def finish(self) -> None:
        """What is not tied here any more gets its own copy, and plain values get theirs."""
        tensors = self._tree.tensors
        with torch.no_grad():
            for name, owner in self._tied.items():
                if name in tensors and owner in tensors and tensors[name] is not tensors[owner]:
                    tensors[name].copy_(tensors[owner])
        put_back(self._tree, self._values)

    def _told(self, world_size: int, source: ChunkSource, stored: set[str]) -> list[dict[str, Any]]:
        """What the ranks had besides tensors: this one's, or the first's; all, where names are missing."""
        mine = self._control.rank if world_size == self._control.size else 0
        others = range(world_size) if self._names - stored else ()
        names = [f"hpcrun.{rank}" for rank in dict.fromkeys((mine, *others))]
        found = []
        for name in names:
            if name in source.manifest.tensors:
                tensor = source.manifest.tensors[name]
                data = torch.empty(tensor.shape, dtype=torch.uint8)
                begin = 0
                for piece, place in sorted(tensor.chunks, key=lambda one: one[0].offsets):
                    end = begin + piece.size_bytes
                    source.read(piece, place, raw_bytes(data[begin:end]))
                    begin = end
                found.append(unpack(bytes(raw_bytes(data))))
        return found


def _refuse(where: str, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UsageError(
            f"{where}: {verb} {names[0]}{more}; load with strict=False, or into the state that was saved (an"
            " optimizer that has not stepped yet has none: give the optimizer, not its state_dict())"
        )
