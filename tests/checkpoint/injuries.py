"""What can happen to the files of a save, each as a function that does it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hpcrun.checkpoint.format import HEADER_BYTES, MANIFEST_NAME
from hpcrun.specs.saves import COMMIT_RECORD

Injury = Callable[[Path, Path], None]
"""Does something to the first save; the second is another step of the same layout."""


def truncate(name: str, size: int) -> Injury:
    return lambda path, _: os.truncate(path / name, size)


def hole(path: Path, _other: Path) -> None:
    """What a crash leaves where a block was never written."""
    with (path / "data-00000.bin").open("r+b") as file:
        file.seek(HEADER_BYTES * 3)
        file.write(bytes(200))


def lost_end(path: Path, _other: Path) -> None:
    """A file of the right size whose second half was never written: a hole, which no size shows."""
    file = path / "data-00000.bin"
    size = file.stat().st_size
    os.truncate(file, size // 2)
    os.truncate(file, size)


def swap_files(path: Path, _other: Path) -> None:
    a, b, aside = path / "data-00000.bin", path / "data-00001.bin", path / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def take(name: str) -> Injury:
    """Mixed generations: one file of another save."""

    def copy(path: Path, other: Path) -> None:
        shutil.copy(other / name, path / name)

    return copy


def lose(name: str) -> Injury:
    return lambda path, _: (path / name).unlink()


def take_part(path: Path, other: Path) -> None:
    """The first half of a file of another save, as an interrupted copy over it leaves."""
    data = (other / "data-00000.bin").read_bytes()
    with (path / "data-00000.bin").open("r+b") as file:
        file.write(data[: len(data) // 2])


def garbage_record(path: Path, _other: Path) -> None:
    (path / COMMIT_RECORD).write_text('{"format_version": 2, "step": 4}\n')


INJURIES = {
    "truncated data": truncate("data-00001.bin", 1000),
    "empty data": truncate("data-00000.bin", 0),
    "truncated manifest": truncate(MANIFEST_NAME, 200),
    "truncated record": truncate(COMMIT_RECORD, 50),
    "hole": hole,
    "second half never written": lost_end,
    "swapped files": swap_files,
    "data of another generation": take("data-00001.bin"),
    "manifest of another generation": take(MANIFEST_NAME),
    "half a file of another generation": take_part,
    "missing data": lose("data-00000.bin"),
    "missing manifest": lose(MANIFEST_NAME),
    "missing record": lose(COMMIT_RECORD),
    "record of something else": garbage_record,
}


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))
