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

from hpcrun.checkpoint.format import MANIFEST, DamagedError, file_name
from hpcrun.checkpoint.generation import Generation
from hpcrun.checkpoint.objects.catalogue import (
    AT_ONCE,
    OBJECT_BYTES,
    Extent,
    ObjectCopy,
    StoredObject,
    all_of,
    copy_place,
    cut,
    index_name,
    object_name,
    read_index,
    render_index,
)
from hpcrun.checkpoint.objects.store import PIECE_BYTES, Listed, Presence, Store
from hpcrun.errors import SiteError, UsageError
from hpcrun.files import UntrustedFileError, open_regular
from hpcrun.specs.saves import FORMAT_VERSION, RECORD, Saved

Show = Callable[[int], None]
Read = Callable[[int, int], bytes]
POLL_S = 1.0
"""Between two looks at what other nodes have done."""


@dataclass(frozen=True)
class Sent:
    """What an upload has done."""

    sent_objects: int = 0
    sent_bytes: int = 0
    kept_objects: int = 0
    """They were there, with the right checksum."""
    kept_bytes: int = 0
    unproved_objects: int = 0
    """Of those sent: the store tells no checksum of them."""

    def plus(self, other: Sent) -> Sent:
        """Both together."""
        return Sent(**{name: count + getattr(other, name) for name, count in vars(self).items()})


class Source(Protocol):
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
        pieces, found = [], 0
        while found < size_bytes:
            piece = os.pread(self._descriptor, size_bytes - found, at + found)
            if not piece:
                raise DamagedError(f"{self._path}: ends at {at + found}, while it is being read")
            pieces.append(piece)
            found += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def upload(
    store: Store, run_id: str, saved: Saved, *, least: int = OBJECT_BYTES, show: Show = lambda _size: None
) -> Sent:
    """ObjectCopy a whole save of the run directory; what an earlier try has brought over is not sent again.

    It is proved first: DamagedError for one that is not whole. A failure leaves no record.
    """
    if saved.format_version != FORMAT_VERSION:
        raise UsageError(f"{saved.path}: is of format {saved.format_version}, which is not copied to a store")
    with Generation(saved) as generation:
        if damage := next(generation.damages(), None):
            raise DamagedError(f"{damage}; a damaged save is not copied")
    done = Sent()
    for number in range(len(saved.file_bytes)):
        source = FileSource(saved.path / file_name(number))
        try:
            done = done.plus(send_file(store, run_id, saved, number, source, least=least, show=show))
        finally:
            source.close()
    commit_copy(
        store, run_id, saved, (saved.path / MANIFEST).read_bytes(), (saved.path / RECORD).read_bytes()
    )
    return done


def send_file(
    store: Store,
    run_id: str,
    saved: Saved,
    number: int,
    source: Source,
    *,
    least: int = OBJECT_BYTES,
    show: Show = lambda _size: None,
) -> Sent:
    """Send the objects of a data file that are not there yet, several at a time, and then their index."""
    if source.size_bytes != saved.file_bytes[number]:
        raise DamagedError(
            f"{saved.path / file_name(number)}: {source.size_bytes} bytes are at hand, the record has"
            f" {saved.file_bytes[number]}"
        )
    place = copy_place(run_id, saved.step, saved.generation)
    there, given_up = store.list(place), threading.Event()

    def send(extent: Extent) -> tuple[StoredObject, Presence | None]:
        def read(at: int, size_bytes: int) -> bytes:
            if given_up.is_set():
                raise SiteError(f"{store.url}/{place}: the upload was given up")
            return source.read(extent.start + at, size_bytes)

        sent = _send_object(store, place, number, extent, read, there)
        show(extent.size_bytes)
        return sent

    results = all_of([partial(send, extent) for extent in cut(source.size_bytes, least)], given_up)
    index = render_index(saved.generation, number, [one for one, _ in results])
    store.write(f"{place}{index_name(number)}", index)
    sent = [one.size_bytes for one, presence in results if presence is not None]
    kept = [one.size_bytes for one, presence in results if presence is None]
    unproved = sum(presence == "unproved" for _, presence in results)
    return Sent(len(sent), sum(sent), len(kept), sum(kept), unproved)


def commit_copy(
    store: Store,
    run_id: str,
    saved: Saved,
    manifest: bytes,
    record: bytes,
    patience_s: float = 0.0,
    hurry: threading.Event | None = None,
) -> None:
    """Make what was sent a copy, once all objects of all nodes are there: the manifest, then the record.

    SiteError when nothing new has come for `patience_s`, or there is a hurry, and something is still missing.
    """
    hurry = hurry or threading.Event()
    place = copy_place(run_id, saved.step, saved.generation)
    copy = ObjectCopy(saved, place, f"{store.url}/{place}", {}, None)
    count, since = -1, time.monotonic()
    while missing := _missing(store, copy, listed := store.list(place)):
        if len(listed) != count:
            count, since = len(listed), time.monotonic()
        if hurry.is_set() or time.monotonic() - since >= patience_s:
            raise SiteError(f"{copy.url}: not committed: {missing}")
        hurry.wait(min(POLL_S, patience_s))
    for name, data in ((MANIFEST, manifest), (RECORD, record)):
        if store.presence(f"{place}{name}", len(data), zlib.crc32(data)) != "same":
            store.write(f"{place}{name}", data)
    store.forget_unfinished(place)


def _send_object(
    store: Store, place: str, number: int, extent: Extent, read: Read, there: Collection[str]
) -> tuple[StoredObject, Presence | None]:
    """Send an object unless it is there; with what the store says of it, or None when it was there."""
    digest, crc32, held = xxh3_64(), 0, b""
    for at in range(0, extent.size_bytes, PIECE_BYTES):
        held = read(at, min(PIECE_BYTES, extent.size_bytes - at))
        digest.update(held)
        crc32 = zlib.crc32(held, crc32)
    name = object_name(number, extent.number, digest.hexdigest())
    one = StoredObject(name, extent.start, extent.size_bytes, crc32, digest.hexdigest())
    key = f"{place}{name}"
    if key in there and _is_there(store, key, one):
        return one, None
    if len(held) == extent.size_bytes:
        return one, store.write(key, held)
    del held
    return one, store.send(key, read, extent.size_bytes, crc32)


def _is_there(store: Store, key: str, one: StoredObject) -> bool:
    """Whether an object is there by its checksum, or by all its bytes where the store tells none."""
    presence = store.presence(key, one.size_bytes, one.crc32)
    if presence != "unproved":
        return presence == "same"
    digest = xxh3_64()
    for piece in store.pieces(key, one.size_bytes):
        digest.update(piece)
    return digest.hexdigest() == one.xxh3


def _missing(store: Store, copy: ObjectCopy, listed: dict[str, Listed]) -> str | None:
    """What is not there yet of the data files of a copy."""
    numbers = range(len(copy.saved.file_bytes))
    for number in numbers:
        if f"{copy.place}{index_name(number)}" not in listed:
            return f"{index_name(number)} is missing; its node has not sent all of its objects"
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for objects in pool.map(lambda number: read_index(store, copy, number), numbers):
            for one in objects:
                known = listed.get(f"{copy.place}{one.name}")
                if known is None or known.size_bytes != one.size_bytes:
                    return f"{one.name} is missing"
    return None
