"""A generation whose parts lie on several nodes, read as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.distributed_reader import DistributedReader
from hpcrun.checkpoint.format import HEADER_BYTES, ChunkSpec, DamagedError, Manifest, parse_manifest
from hpcrun.checkpoint.restore_plan import PartSource, RestorePlan
from hpcrun.checkpoint.tier import CheckpointId
from tests.checkpoint.generations import content_of, save

RANKS = 3


class Files:
    """Other nodes, whose files are below a folder of their name."""

    def __init__(self, root: Path, plan: RestorePlan) -> None:
        self.root, self.plan = root, plan
        self.asked: list[str] = []
        self.is_closed = False

    def read(self, node: str, request: dict[str, Any], into: memoryview) -> None:
        self.asked.append(node)
        source = self.plan.sources[request["number"]]
        assert (request["do"], source.node) == ("part", node)
        begin = source.at + request["at"]
        into[:] = (self.root / node / source.path).read_bytes()[begin : begin + len(into)]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def scatter(tmp_path: Path) -> Callable[..., tuple[RestorePlan, Manifest]]:
    """Make a generation and take it apart: part 0 on here, the others on n1 and n2, at odd places."""

    def made(step: int = 5, shares: list[list[ChunkSpec]] | None = None) -> tuple[RestorePlan, Manifest]:
        ranks = len(shares) if shares else RANKS
        saved = save(tmp_path / "run", step, ranks=ranks, files=ranks, shares=shares)
        manifest = parse_manifest((saved.path / "manifest.json").read_bytes())
        stamp = CheckpointId(saved.generation, saved.step, saved.position, saved.world_size, saved.attempt)
        sources = []
        for number, part in enumerate(manifest.parts):
            node, at = f"n{number}", 4096 * number
            data = (saved.path / f"data-{part.file:05d}.bin").read_bytes()
            path = tmp_path / node / f"slot-{step}.bin"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(at) + data[part.start : part.start + part.size_bytes] + b"rest")
            shown = str(path) if number == 0 else path.name
            sources.append(PartSource(number, node, shown, at, part, "memory"))
        return RestorePlan(stamp, ("memory",), tuple(sources)), manifest

    return made


Made = Callable[..., tuple[RestorePlan, Manifest]]


def read_all(generation: DistributedReader) -> dict[str, bytes]:
    found = {}
    for tensor in generation.manifest.tensors.values():
        for piece, place in tensor.chunks:
            into = bytearray(piece.size_bytes)
            generation.read(piece, place, memoryview(into))
            found[str(piece)] = bytes(into)
    return found


def test_parts_of_several_nodes_are_one_generation(scatter: Made, tmp_path: Path) -> None:
    plan, manifest = scatter()
    remote = Files(tmp_path, plan)
    with DistributedReader(plan, "n0", remote) as generation:
        assert generation.manifest == manifest
        found = read_all(generation)
        assert list(generation.damages()) == []
    pieces = [piece for tensor in manifest.tensors.values() for piece, _ in tensor.chunks]
    assert found == {str(piece): content_of(piece, 5) for piece in pieces}
    assert set(remote.asked) == {"n1", "n2"}
    assert remote.is_closed


def test_a_part_of_another_generation_is_not_taken(scatter: Made, tmp_path: Path) -> None:
    plan, _ = scatter(5)
    other, _ = scatter(6)
    mixed = replace(plan, sources=(plan.sources[0], other.sources[1], plan.sources[2]))
    with pytest.raises(DamagedError, match=r"n1: slot-6.bin at 4096: .* belongs to generation"):
        DistributedReader(mixed, "n0", Files(tmp_path, mixed))


def test_every_byte_that_is_flipped_is_noticed(scatter: Made, tmp_path: Path) -> None:
    plan, manifest = scatter()
    path = tmp_path / "n1" / "slot-5.bin"
    whole = path.read_bytes()
    for at in range(4096, 4096 + manifest.parts[1].size_bytes, 61):
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        try:
            with DistributedReader(plan, "n0", Files(tmp_path, plan)) as generation:
                damages = list(generation.damages())
        except DamagedError as error:
            damages = [str(error)]
        assert (not damages) == _is_padding(manifest, at - 4096)


def _is_padding(manifest: Manifest, at: int) -> bool:
    """Whether a place of part 1 lies behind the bytes of a chunk or of the tail, before the next header."""
    part = manifest.parts[1]
    used = [(0, 64), (part.tail_at, part.tail_at + 64 + part.tail_bytes)]
    used.append((part.size_bytes - 64, part.size_bytes))
    for tensor in manifest.tensors.values():
        used += [(p.at, p.at + 64 + piece.size_bytes) for piece, p in tensor.chunks if p.part == 1]
    return not any(begin <= at < end for begin, end in used)


def test_a_part_that_is_cut_short_or_gone(scatter: Made, tmp_path: Path) -> None:
    plan, _ = scatter()
    with pytest.raises(DamagedError, match="does not have each of its 3 parts"):
        DistributedReader(replace(plan, sources=plan.sources[1:]), "n0", Files(tmp_path, plan))
    with pytest.raises(DamagedError, match=r"n1: .* there is no way to that node"):
        DistributedReader(plan, "n0", None)
    path = Path(plan.sources[0].path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedError, match="the file ends in the header"):
        DistributedReader(plan, "n0", Files(tmp_path, plan))
    path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        DistributedReader(plan, "n0", Files(tmp_path, plan))


def test_neighbours_are_read_together_and_proved_one_by_one(scatter: Made, tmp_path: Path) -> None:
    sizes = {f"model.{n:03d}": (n % 7 * 5 + 1,) for n in range(700)}
    pieces = [ChunkSpec(name, "uint8", shape, (0,), shape) for name, shape in sizes.items()]
    plan, manifest = scatter(shares=[pieces])
    asked = list[int]()

    class Counted(Files):
        def read(self, node: str, request: dict[str, Any], into: memoryview) -> None:
            asked.append(request["at"])
            super().read(node, request, into)

    wanted = [
        (piece, place, memoryview(bytearray(piece.size_bytes)))
        for tensor in manifest.tensors.values()
        for piece, place in tensor.chunks
    ]
    order = list[str]()
    with DistributedReader(plan, "elsewhere", Counted(tmp_path, plan)) as generation:
        asked.clear()
        generation.read_all(wanted, lambda piece, _: order.append(piece.tensor))
    assert order == sorted(sizes)
    assert all(into == content_of(piece, 5) for piece, _, into in wanted)
    assert len(asked) < 10
    # Those that do not lie one behind the other are not taken for neighbours.
    some = wanted[::2]
    with DistributedReader(plan, "elsewhere", Counted(tmp_path, plan)) as generation:
        generation.read_all(some, lambda piece, into: into.__setitem__(slice(None), bytes(len(into))))
    assert not any(map(any, (into for _, _, into in some)))
    assert wanted[1][2] == content_of(wanted[1][0], 5)
    file = tmp_path / "n0" / "slot-5.bin"
    whole = file.read_bytes()
    with DistributedReader(plan, "n0", None) as generation:
        for cut, word in ((False, "match their hash"), (True, "ends after 0 of its")):
            data, begin = bytearray(whole), wanted[300][1].at + HEADER_BYTES
            data[begin] ^= 1
            file.write_bytes(data[:begin] if cut else data)
            order.clear()
            with pytest.raises(DamagedError, match=rf"model\.300.*{word}"):
                generation.read_all(wanted, lambda piece, _: order.append(piece.tensor))
            assert order == sorted(sizes)[:300]
