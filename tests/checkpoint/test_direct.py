"""Writes past the page cache: the same bytes as any others, and the usual way where they are refused."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from hpcrun.checkpoint.format import PART_ALIGN, align_size
from hpcrun.checkpoint.lustre.direct import BATCH_BYTES, write_file_direct


def aligned(size: int, seed: int) -> memoryview:
    """Bytes at the beginning of a page, as a slot has them."""
    memory = mmap.mmap(-1, max(1, size))
    memory[:size] = (bytes([seed]) + os.urandom(1021)) * (size // 1022) + bytes(size % 1022)
    return memoryview(memory)[:size]


def placed(images: list[memoryview]) -> tuple[list[tuple[int, memoryview]], int]:
    """Parts one after the other, and where the file ends."""
    at, found = 0, []
    for image in images:
        found.append((at, image))
        at += align_size(len(image), PART_ALIGN)
    start, last = found[-1]
    return found, start + len(last)


def expected(parts: list[tuple[int, memoryview]], size: int) -> bytes:
    data = bytearray(size)
    for at, image in parts:
        data[at : at + len(image)] = image
    return bytes(data)


@pytest.mark.parametrize("sizes", [[64], [4096], [4160, 100_032], [BATCH_BYTES + 192, 8192, 64]])
def test_the_file_holds_each_part_at_its_place_and_ends_where_the_last_does(
    tmp_path: Path, sizes: list[int]
) -> None:
    parts, size = placed([aligned(one, seed) for seed, one in enumerate(sizes, 1)])
    told = list[int]()
    done = write_file_direct(tmp_path / "data", parts, written=told.append)
    assert (tmp_path / "data").read_bytes() == expected(parts, size)
    assert done.direct_bytes + done.buffered_bytes == sum(told) == sum(sizes)
    if done.why_buffered is None:
        assert done.buffered_bytes == 0


def test_memory_that_is_not_aligned_is_written_too(tmp_path: Path) -> None:
    image = aligned(100_000, 7)[3:]
    done = write_file_direct(tmp_path / "data", [(0, image)])
    assert (tmp_path / "data").read_bytes() == image
    assert done.direct_bytes == len(image) or done.why_buffered


def refusing(monkeypatch: pytest.MonkeyPatch, opens: bool, most: int = 0) -> None:
    """A file system that does not open for direct writes, or takes so many bytes of them only."""
    real_open, real_write, taken = os.open, os.pwrite, [0]

    def fake_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and not opens:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    def fake_write(descriptor: int, data: memoryview, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            if taken[0] >= most:
                raise OSError(errno.EINVAL, "Invalid argument")
            taken[0] += len(data)
        return real_write(descriptor, data, position)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "pwrite", fake_write)


@pytest.mark.parametrize(("opens", "most"), [(False, 0), (True, 0), (True, 4096)])
def test_a_file_system_that_refuses_gets_the_bytes_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool, most: int
) -> None:
    parts, size = placed([aligned(4096, 1), aligned(100_032, 2), aligned(192, 3)])
    refusing(monkeypatch, opens, most)
    done = write_file_direct(tmp_path / "data", parts)
    assert (tmp_path / "data").read_bytes() == expected(parts, size)
    assert done.why_buffered is not None
    assert done.why_buffered.startswith("O_DIRECT")
    assert (done.direct_bytes, done.buffered_bytes) == (most, 4096 + 100_032 + 192 - most)


def test_a_full_disk_is_not_taken_for_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, position: int) -> int:
        tries.append(position)
        raise OSError(errno.ENOSPC, "No space left on device")

    tries = list[int]()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_file_direct(tmp_path / "data", [(0, aligned(100_032, 2))])
    assert len(tries) == 1


class Strict:
    """A file system that takes direct writes, but of whole aligned blocks only; `most` bytes at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 40) -> None:
        self.is_direct, self.writes = False, list[tuple[int, int]]()
        real_open, real_write, real_fcntl = os.open, os.pwrite, fcntl.fcntl

        def fake_open(path: str, flags: int, mode: int = 0o777) -> int:
            self.is_direct = bool(flags & os.O_DIRECT)
            return real_open(path, flags & ~os.O_DIRECT, mode)

        def fake_write(descriptor: int, data: memoryview, position: int) -> int:
            if self.is_direct:
                address = ctypes.addressof(ctypes.c_char.from_buffer(data))
                if address % 4096 or len(data) % 4096 or position % 4096:
                    raise OSError(errno.EINVAL, "Invalid argument")
            self.writes.append((position, len(data)))
            return real_write(descriptor, data[:most], position)

        def fake_fcntl(descriptor: int, command: int, value: int = 0) -> int:
            if command == fcntl.F_SETFL:
                self.is_direct = bool(value & os.O_DIRECT)
            return real_fcntl(descriptor, command, value)

        monkeypatch.setattr(os, "open", fake_open)
        monkeypatch.setattr(os, "pwrite", fake_write)
        monkeypatch.setattr(fcntl, "fcntl", fake_fcntl)


def test_all_goes_past_the_cache_in_writes_that_end_where_stripes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = Strict(monkeypatch)
    parts, size = placed([aligned(4096, 1), aligned(BATCH_BYTES + 8256, 2), aligned(9000, 3)[5:]])
    done = write_file_direct(tmp_path / "data", parts)
    assert (tmp_path / "data").read_bytes() == expected(parts, size)
    assert (done.why_buffered, done.buffered_bytes) == (None, 0)
    third = parts[2][0]
    assert strict.writes == [
        (0, 4096),
        (4096, BATCH_BYTES - 4096),
        (BATCH_BYTES, 12288),
        (BATCH_BYTES + 12288, 4096),
        (third, 12288),
    ]


def test_a_write_that_ends_inside_a_block_goes_on_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Strict(monkeypatch, most=1024)
    parts, size = placed([aligned(10_048, 5), aligned(4096, 6)])
    done = write_file_direct(tmp_path / "data", parts)
    assert (tmp_path / "data").read_bytes() == expected(parts, size)
    assert (done.direct_bytes, done.buffered_bytes) == (1024, 10_048 + 4096 - 1024)
    assert done.why_buffered == "a write ended inside a block"


def test_what_others_have_written_behind_a_part_stays(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(8192) + b"of another writer")
    write_file_direct(file, [(0, aligned(4160, 1))])
    assert file.read_bytes()[8192:] == b"of another writer"
