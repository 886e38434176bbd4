"""Sealing in place gives what writing gives, whatever lay in the slot before."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.checkpoint.format import CHUNK_BYTES, ChunkSpec
from hpcrun.checkpoint.part_writer import write_part
from hpcrun.checkpoint.seal import plan_slot, seal_part
from tests.checkpoint.generations import content_of, pieces_of
from tests.checkpoint.loads import fill

GENERATION = bytes(range(16))


def many(count: int, items: int) -> list[ChunkSpec]:
    return [ChunkSpec(f"t.{n}", "float32", (items,), (0,), (items,)) for n in range(count)]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(pieces_of(0, 2), id="odd sizes, a scalar, and nothing"),
        pytest.param([], id="no piece at all"),
        pytest.param(many(1030, 5), id="more pieces than one write takes"),
        pytest.param(many(1, CHUNK_BYTES // 4), id="the largest piece"),
        pytest.param(
            [ChunkSpec('wörd"\\ "0123456789abcdef"]', "int8", (3,), (0,), (3,))], id="a strange name"
        ),
    ],
)
def test_a_sealed_slot_is_what_would_have_been_written(tmp_path: Path, pieces: list[ChunkSpec]) -> None:
    contents = [content_of(piece, 1) for piece in pieces]
    path = tmp_path / "part"
    written = write_part(path, GENERATION, 3, pieces, contents, file=1)
    plan = plan_slot(3, pieces, 1, 0)
    image = memoryview(bytearray(b"\xff" * plan.layout.size_bytes))
    fill(image, plan, contents)
    assert seal_part(image, GENERATION, plan) == written
    assert bytes(image) == path.read_bytes()


def test_the_bytes_of_the_chunks_are_left_alone() -> None:
    pieces = many(3, 100)
    plan = plan_slot(0, pieces, 0, 0)
    memory = bytearray(plan.layout.size_bytes)
    fill(memoryview(memory), plan, [content_of(piece, 1) for piece in pieces])
    whole = bytes(memory)
    seal_part(memoryview(memory), GENERATION, plan)
    begin = plan.layout.at[1] + 64
    assert bytes(memory[begin : begin + 400]) == whole[begin : begin + 400]
    assert bytes(memory) != whole
