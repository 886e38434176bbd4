"""Files that several processes read: whole or not at all, and lines that may be torn."""

import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.specs.records import (
    JsonLineReader,
    JsonLineWriter,
    TypedLineReader,
    read_json,
    read_json_lines,
    write_json,
)
from hpcrun.typed_json import parse_typed


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone are wanted


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    before = open_descriptors()
    writer = JsonLineWriter(path)
    writer.write({"step": 3})
    writer.close()
    assert open_descriptors() == before
    assert [record["step"] for record in read_json_lines(path)] == [1, 3]


def test_a_reader_follows_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    reader = JsonLineReader(path)
    assert reader.read() == []
    path.write_bytes(b'{"a": 1}\n{"a"')
    assert reader.read() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert reader.read() == [{"a": 2}]
    assert reader.read() == []


@dataclass(frozen=True)
class Line:
    step: int


def read_typed(path: Path, notes: list[str], offset: int = 0) -> list[int]:
    reader = TypedLineReader(path, lambda values: parse_typed(Line, values), offset, notes.append)
    return [line.step for line in reader.read()]


def test_a_wrong_line_is_noted_with_its_number_and_the_rest_is_read(tmp_path: Path) -> None:
    path, notes = tmp_path / "m.jsonl", list[str]()
    first = b'{"step": 1}\n{"step": 2, "torn\n\n'
    path.write_bytes(first + b'{"step": "x"}\n{"step": 5}\n7\n{"step": 7}\n{"torn')
    assert read_typed(path, notes) == [1, 5, 7]
    expected = [
        f"{path}:4 step: expected an integer, not 'x'; the line is passed over",
        f"{path}:6 expected an object, not 7; the line is passed over",
    ]
    assert notes == expected
    notes.clear()
    assert read_typed(path, notes, len(first)) == [5, 7]
    assert notes == expected, "also of a reader that began in the middle"


def test_of_many_wrong_lines_only_a_few_are_noted(tmp_path: Path) -> None:
    path, notes = tmp_path / "m.jsonl", list[str]()
    path.write_text("{}\n" * 100 + '{"step": 1}\n')
    assert read_typed(path, notes) == [1]
    assert len(notes) == 3
    assert notes[2].endswith(
        ":3 step: is missing; the line is passed over; further wrong lines are passed over silently"
    )


def test_a_line_that_does_not_fit_is_an_error() -> None:
    writer = JsonLineWriter(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left") as error:
        writer.write({"step": 1})
    assert error.value.errno == errno.ENOSPC


def test_a_whole_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"old": True})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == {"old": True}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]
    assert read_json(tmp_path / "absent.json") is None


def test_a_failed_write_leaves_nothing_aside(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match=r"x\.json"):
        write_json(tmp_path / "x.json", 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("text", ['{"a": ', "[" * 100_000])
def test_a_damaged_record_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=r"x\.json: is damaged"):
        read_json(tmp_path / "x.json")


def test_a_line_that_did_not_fit_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writer = JsonLineWriter(path)
    writer.write({"n": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, limits[1]))
    try:
        with pytest.raises(OSError, match="No space"):
            writer.write({"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write({"n": 2})
    writer.close()
    assert list(read_json_lines(path)) == [{"n": 1}, {"n": 2}]
