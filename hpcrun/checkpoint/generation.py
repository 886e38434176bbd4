"""Reading a committed generation: nothing leaves here that was not proved to be what was written."""

from __future__ import annotations

import os
from pathlib import Path

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from hpcrun.checkpoint.chunk_reader import Buffers, ChunkReader
from hpcrun.checkpoint.format import (
    END_FRAME,
    HEADER_BYTES,
    MANIFEST_NAME,
    PART_FRAME,
    TAIL_FRAME,
    ChunkLocation,
    ChunkSpec,
    DamagedError,
    MissingFileError,
    Part,
    compute_structure_digest,
    data_file_name,
    parse_manifest,
    parse_tail,
    unpack_header,
)
from hpcrun.files import UntrustedFileError, open_own, open_regular
from hpcrun.specs.saves import SavedCheckpoint

MAX_MANIFEST_BYTES = 4 << 30
"""No list of tensors is longer."""


class GenerationReader(ChunkReader):
    """A committed step that is opened for reading; opening it makes the cheap checks."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        """DamagedError unless record, manifest, sizes and the beginnings of all parts belong together."""
        self.saved = saved
        check_file_sizes(saved)
        data = _read_bounded(saved.path / MANIFEST_NAME, saved.manifest_bytes)
        if len(data) != saved.manifest_bytes or xxh3_64_hexdigest(data) != saved.manifest_hash:
            raise DamagedError(f"{saved.path / MANIFEST_NAME}: does not match the hash in the commit record")
        try:
            manifest = parse_manifest(data)
            if manifest.generation.hex() != saved.generation:
                raise DamagedError(f"it belongs to generation {manifest.generation.hex()}")
            if compute_structure_digest(manifest.tensors) != saved.structure:
                raise DamagedError("its tensors are not those of the commit record")
        except DamagedError as error:
            raise DamagedError(f"{saved.path / MANIFEST_NAME}: {error}") from None
        super().__init__(str(saved.path / MANIFEST_NAME), manifest, _GenerationFiles(saved.path))
        try:
            for number in range(len(manifest.parts)):
                self.header(PART_FRAME, ChunkLocation(number, 0))
        except BaseException:
            self.close()
            raise


class OpenFileCache:
    """Descriptors of files, each opened once."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def read(self, path: Path, at: int, buffers: Buffers, *, is_own: bool = False) -> int:
        """Fill the buffers from a place in a file; how many bytes there were. MissingFileError: no such file.

        `is_own`: another user may have put it there; DamagedError where it is not ours.
        """
        if path not in self._descriptors:
            try:
                self._descriptors[path] = open_own(path) if is_own else open_regular(path)
            except FileNotFoundError:
                raise MissingFileError(f"{path}: is missing") from None
            except UntrustedFileError as error:
                raise DamagedError(str(error)) from None
        descriptor, needed = self._descriptors[path], sum(map(len, buffers))
        count = os.preadv(descriptor, buffers, at)
        while 0 < count < needed:  # one call gives 2 GiB at most, and some file systems less
            rest = [memoryview(buffer) for buffer in buffers]
            skip = count
            while skip >= len(rest[0]):
                skip -= len(rest.pop(0))
            rest[0] = rest[0][skip:]
            count_read = os.preadv(descriptor, rest, at + count)
            if not count_read:
                break
            count += count_read
        return count

    def close(self) -> None:
        """Close them."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class _GenerationFiles(OpenFileCache):
    """The data files of a committed generation."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def fetch(self, number: int, part: Part, at: int, buffers: Buffers) -> int:
        return self.read(self._folder / data_file_name(part.file), part.start + at, buffers)

    def where(self, number: int, part: Part, at: int) -> str:
        return f"{self._folder / data_file_name(part.file)} at {part.start + at}"


def check_file_sizes(saved: SavedCheckpoint) -> None:
    """MissingFileError unless the files of a generation are there in the sizes that its record has."""
    expected = {MANIFEST_NAME: saved.manifest_bytes}
    expected |= {data_file_name(number): size for number, size in enumerate(saved.file_bytes)}
    for name, size in expected.items():
        try:
            found = os.stat(saved.path / name).st_size  # noqa: PTH116 - a thousand generations of many files
        except FileNotFoundError:
            raise MissingFileError(f"{saved.path / name}: is missing") from None
        except OSError as error:
            raise MissingFileError(f"{saved.path / name}: cannot be looked at: {error.strerror}") from None
        if found != size:
            raise MissingFileError(f"{saved.path / name}: has {found} bytes instead of {size}")


def read_part_tail(
    path: Path, part: Part, number: int, generation: bytes
) -> list[tuple[ChunkSpec, ChunkLocation]]:
    """The chunks of a part that was just written, from its file alone; DamagedError if it is not there."""
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        file.seek(part.start + part.size_bytes - HEADER_BYTES)
        end = ChunkLocation(number, part.size_bytes - HEADER_BYTES)
        at, _ = unpack_header(file.read(HEADER_BYTES), END_FRAME, end, generation)
        file.seek(part.start + at)
        length, digest = unpack_header(
            file.read(HEADER_BYTES), TAIL_FRAME, ChunkLocation(number, at), generation
        )
        data = file.read(length)
    if xxh3_64_intdigest(data) != digest or f"{digest:016x}" != part.tail_hash:
        raise DamagedError(f"{path}: the tail of part {number} does not match its hash")
    return [(piece, place) for piece, place, _ in parse_tail(data, number)]


def _read_bounded(path: Path, size_bytes: int) -> bytes:
    """What a file holds, and at most a byte more than it should."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read(size_bytes + 1)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: is missing") from None
    except UntrustedFileError as error:
        raise DamagedError(str(error)) from None
