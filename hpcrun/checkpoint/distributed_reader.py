"""A generation whose parts lie here and there: in files of this node, and with the workers of other nodes.

There is no manifest: what the parts hold is collected from their own tails, each of which is proved by the
hash that the plan of the restore has of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from hpcrun.checkpoint.chunk_reader import Buffers, ChunkReader
from hpcrun.checkpoint.format import (
    PART_FRAME,
    ChunkLocation,
    DamagedError,
    Manifest,
    Part,
    collect_tensors,
    compute_structure_digest,
)
from hpcrun.checkpoint.generation import OpenFileCache
from hpcrun.checkpoint.restore_plan import SHARED_NODE, RestorePlan
from hpcrun.checkpoint.tier import NODE_TIERS


class RemoteReader(Protocol):
    """Reads what other nodes hold, as `hpcrun.checkpoint.parity.peers.PeerClient` does."""

    def read(self, node: str, request: dict[str, Any], into: memoryview) -> None:
        """Fill a buffer with what a node was asked for; SiteError unless it gets all of it."""

    def close(self) -> None:
        """Let go of the connections."""


class DistributedReader(ChunkReader):
    """The generation of a plan, opened for reading."""

    def __init__(self, plan: RestorePlan, here: str, remote: RemoteReader | None) -> None:
        """`here`: the node whose files are read as files. DamagedError unless the parts make up a whole."""
        assert plan.stamp is not None, "a plan of nothing"
        self.stamp = plan.stamp
        name = f"step {plan.stamp.step}, generation {plan.stamp.generation}"
        parts = [source.part for source in plan.sources]
        if [source.number for source in plan.sources] != list(range(plan.stamp.world_size)):
            raise DamagedError(f"{name}: the plan does not have each of its {plan.stamp.world_size} parts")
        generation = bytes.fromhex(plan.stamp.generation)
        fetcher = _DistributedFetcher(plan, here, remote)
        super().__init__(name, Manifest(generation, parts, {}), fetcher)
        try:
            for number, part in enumerate(parts):
                if self.header(PART_FRAME, ChunkLocation(number, 0))[0] != part.size_bytes:
                    raise DamagedError(f"{fetcher.where(number, part, 0)}: is a part of another size")
            tails = (self.tail(number) for number in range(len(parts)))
            tensors = collect_tensors([(piece, place) for piece, place, _ in tail] for tail in tails)
        except BaseException:
            self.close()
            raise
        self.manifest = Manifest(generation, parts, tensors)
        self.structure = compute_structure_digest(tensors)
        """Equal on all ranks, as the parts are."""


class _DistributedFetcher:
    """Fetches each part from where the plan has it."""

    def __init__(self, plan: RestorePlan, here: str, remote: RemoteReader | None) -> None:
        assert plan.stamp is not None
        self._generation = plan.stamp.generation
        self._sources, self._here, self._remote = plan.sources, here, remote
        self._files = OpenFileCache()

    def fetch(self, number: int, part: Part, at: int, buffers: Buffers) -> int:
        source = self._sources[number]
        if source.node in (self._here, SHARED_NODE):
            is_own = source.tier in NODE_TIERS
            return self._files.read(Path(source.path), source.at + at, buffers, is_own=is_own)
        if self._remote is None:
            raise DamagedError(f"{self.where(number, part, at)}: there is no way to that node")
        # A header and what follows it are one question, and mostly small.
        request = {"do": "part", "generation": self._generation, "number": number, "at": at}
        whole = memoryview(bytearray(sum(map(len, buffers)))) if len(buffers) > 1 else memoryview(buffers[0])
        self._remote.read(source.node, request, whole)
        begin = 0
        for buffer in buffers if len(buffers) > 1 else ():
            buffer[:] = whole[begin : begin + len(buffer)]
            begin += len(buffer)
        return len(whole)

    def where(self, number: int, part: Part, at: int) -> str:
        source = self._sources[number]
        where = f"{source.path} at {source.at + at}"
        return where if source.node in (self._here, SHARED_NODE) else f"{source.node}: {where}"

    def close(self) -> None:
        self._files.close()
        if self._remote is not None:
            self._remote.close()
