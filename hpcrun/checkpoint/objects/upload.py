"""Copying a generation to an object store: each node its own data file; then manifest, and record last."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_64

from hpcrun.checkpoint.format import MANIFEST_NAME, DamagedError, data_file_name
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.objects.catalogue import (
    MAX_PARALLEL_CALLS,
    MIN_OBJECT_BYTES,
    FileExtent,
    ObjectCopy,
    StoredObject,
    data_object_name,
    generation_key_prefix,
    object_index_name,
    read_object_index,
    render_object_index,
    run_in_parallel,
    split_into_objects,
)
from hpcrun.checkpoint.objects.store import TRANSFER_BYTES, ListedObject, ObjectPresence, ObjectStore
from hpcrun.errors import SiteError
from hpcrun.files import UntrustedFileError, open_regular
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint

UploadProgress = Callable[[int], None]
ReadBytes = Callable[[int, int], bytes]
COMMIT_POLL_S = 1.0
"""Between two looks at what other nodes have done."""


@dataclass(frozen=True)
class UploadResult:
    """What an upload has done."""

    sent_objects: int = 0
    sent_bytes: int = 0
    kept_objects: int = 0
    """They were there, with the right checksum."""
    kept_bytes: int = 0
    unproved_objects: int = 0
    """Of those sent: the store tells no checksum of them."""

    def plus(self, other: UploadResult) -> UploadResult:
        """Both together."""
        return UploadResult(**{name: count + getattr(other, name) for name, count in vars(self).items()})


class DataSource(Protocol):
    """The bytes of a data file, wherever they are."""

    size_bytes: int

    def read(self, at: int, size_bytes: int) -> bytes:
        """Exactly so many bytes from a position on; DamagedError when they are not there."""


class FileSource:
    """A data file of the run directory; it stays readable when the save is removed meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = open_regular(path, follow=True)
        except FileNotFoundError:
            raise DamagedError(f"{path}: is missing") from None
        except UntrustedFileError as error:
            raise DamagedError(str(error)) from None
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read(self, at: int, size_bytes: int) -> bytes:
        """Exactly so many bytes from a position on; DamagedError when they are not there."""
        pieces, found_bytes = [], 0
        while found_bytes < size_bytes:
            piece = os.pread(self._descriptor, size_bytes - found_bytes, at + found_bytes)
            if not piece:
                raise DamagedError(f"{self._path}: ends at {at + found_bytes}, while it is being read")
            pieces.append(piece)
            found_bytes += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def upload_save(
    store: ObjectStore,
    run_id: str,
    saved: SavedCheckpoint,
    *,
    least: int = MIN_OBJECT_BYTES,
    show: UploadProgress = lambda _size: None,
) -> UploadResult:
    """ObjectCopy a whole save of the run directory; what an earlier try has brought over is not sent again.

    It is proved first: DamagedError for one that is not whole. A failure leaves no record.
    """
    with GenerationReader(saved) as generation:
        if damage := next(generation.damages(), None):
            raise DamagedError(f"{damage}; a damaged save is not copied")
    done = UploadResult()
    for number in range(len(saved.file_bytes)):
        source = FileSource(saved.path / data_file_name(number))
        try:
            done = done.plus(upload_file(store, run_id, saved, number, source, least=least, show=show))
        finally:
            source.close()
    commit_object_copy(
        store,
        run_id,
        saved,
        (saved.path / MANIFEST_NAME).read_bytes(),
        (saved.path / COMMIT_RECORD).read_bytes(),
    )
    return done


def upload_file(
    store: ObjectStore,
    run_id: str,
    saved: SavedCheckpoint,
    number: int,
    source: DataSource,
    *,
    least: int = MIN_OBJECT_BYTES,
    show: UploadProgress = lambda _size: None,
) -> UploadResult:
    """Send the objects of a data file that are not there yet, several at a time, and then their index."""
    if source.size_bytes != saved.file_bytes[number]:
        raise DamagedError(
            f"{saved.path / data_file_name(number)}: {source.size_bytes} bytes are at hand, the record has"
            f" {saved.file_bytes[number]}"
        )
    place = generation_key_prefix(run_id, saved.step, saved.generation)
    there, given_up = store.list(place), threading.Event()

    def send(extent: FileExtent) -> tuple[StoredObject, ObjectPresence | None]:
        def read(at: int, size_bytes: int) -> bytes:
            if given_up.is_set():
                raise SiteError(f"{store.url}/{place}: the upload was given up")
            return source.read(extent.start + at, size_bytes)

        sent = _upload_object(store, place, number, extent, read, there)
        show(extent.size_bytes)
        return sent

    results = run_in_parallel(
        [partial(send, extent) for extent in split_into_objects(source.size_bytes, least)], given_up
    )
    index = render_object_index(saved.generation, number, [stored for stored, _ in results])
    store.write(f"{place}{object_index_name(number)}", index)
    sent = [stored.size_bytes for stored, presence in results if presence is not None]
    kept = [stored.size_bytes for stored, presence in results if presence is None]
    unproved = sum(presence == "unproved" for _, presence in results)
    return UploadResult(len(sent), sum(sent), len(kept), sum(kept), unproved)


def commit_object_copy(
    store: ObjectStore,
    run_id: str,
    saved: SavedCheckpoint,
    manifest: bytes,
    record: bytes,
    patience_s: float = 0.0,
    hurry: threading.Event | None = None,
) -> None:
    """Make what was sent a copy, once all objects of all nodes are there: the manifest, then the record.

    SiteError when nothing new has come for `patience_s`, or there is a hurry, and something is still missing.
    """
    hurry = hurry or threading.Event()
    place = generation_key_prefix(run_id, saved.step, saved.generation)
    copy = ObjectCopy(saved, place, f"{store.url}/{place}", {}, None)
    count, since = -1, time.monotonic()
    while missing := _find_missing(store, copy, listed := store.list(place)):
        if len(listed) != count:
            count, since = len(listed), time.monotonic()
        if hurry.is_set() or time.monotonic() - since >= patience_s:
            raise SiteError(f"{copy.url}: not committed: {missing}")
        hurry.wait(min(COMMIT_POLL_S, patience_s))
    for name, data in ((MANIFEST_NAME, manifest), (COMMIT_RECORD, record)):
        if store.presence(f"{place}{name}", len(data), zlib.crc32(data)) != "same":
            store.write(f"{place}{name}", data)
    store.abort_incomplete_uploads(place)


def _upload_object(
    store: ObjectStore, place: str, number: int, extent: FileExtent, read: ReadBytes, there: Collection[str]
) -> tuple[StoredObject, ObjectPresence | None]:
    """Send an object unless it is there; with what the store says of it, or None when it was there."""
    digest, crc32, held = xxh3_64(), 0, b""
    for at in range(0, extent.size_bytes, TRANSFER_BYTES):
        held = read(at, min(TRANSFER_BYTES, extent.size_bytes - at))
        digest.update(held)
        crc32 = zlib.crc32(held, crc32)
    name = data_object_name(number, extent.number, digest.hexdigest())
    stored = StoredObject(name, extent.start, extent.size_bytes, crc32, digest.hexdigest())
    key = f"{place}{name}"
    if key in there and _is_stored(store, key, stored):
        return stored, None
    if len(held) == extent.size_bytes:
        return stored, store.write(key, held)
    del held
    return stored, store.send(key, read, extent.size_bytes, crc32)


def _is_stored(store: ObjectStore, key: str, stored: StoredObject) -> bool:
    """Whether an object is there by its checksum, or by all its bytes where the store tells none."""
    presence = store.presence(key, stored.size_bytes, stored.crc32)
    if presence != "unproved":
        return presence == "same"
    digest = xxh3_64()
    for piece in store.pieces(key, stored.size_bytes):
        digest.update(piece)
    return digest.hexdigest() == stored.xxh3


def _find_missing(store: ObjectStore, copy: ObjectCopy, listed: dict[str, ListedObject]) -> str | None:
    """What is not there yet of the data files of a copy."""
    numbers = range(len(copy.saved.file_bytes))
    for number in numbers:
        if f"{copy.place}{object_index_name(number)}" not in listed:
            return f"{object_index_name(number)} is missing; its node has not sent all of its objects"
    with ThreadPoolExecutor(MAX_PARALLEL_CALLS) as pool:
        for objects in pool.map(lambda number: read_object_index(store, copy, number), numbers):
            for stored in objects:
                present = listed.get(f"{copy.place}{stored.name}")
                if present is None or present.size_bytes != stored.size_bytes:
                    return f"{stored.name} is missing"
    return None
