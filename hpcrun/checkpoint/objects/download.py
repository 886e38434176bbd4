"""Copies read back from an object store: proved where they are, or brought home as saves of the run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from xxhash import xxh3_64

from hpcrun.checkpoint.commit import quarantine_generation
from hpcrun.checkpoint.format import MANIFEST_NAME, DamagedError, data_file_name
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.objects.catalogue import (
    MAX_PARALLEL_CALLS,
    ObjectCopy,
    StoredObject,
    list_generation_copies,
    read_object_index,
    read_object_manifest,
    run_in_parallel,
    stream_object,
)
from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.store import TRANSFER_BYTES, ObjectStore
from hpcrun.checkpoint.part_writer import write_synced_file
from hpcrun.errors import SiteError
from hpcrun.specs.records import sync_directory
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, read_saved_checkpoints, render_commit_record

DownloadProgress = Callable[[int], None]


def download_copy(
    store: ObjectStore, copy: ObjectCopy, checkpoints: Path, show: DownloadProgress = lambda _size: None
) -> SavedCheckpoint:
    """Bring a copy home as a save of the run directory: aside, proved to the last byte, then renamed.

    What an interrupted download has brought is not fetched again. DamagedError when it is not what was saved;
    then nothing of it is kept under a name that counts. A save of the same step that is there is set aside.
    """
    name = f"step-{copy.saved.step:08d}"
    final, aside = checkpoints / name, checkpoints / f".{name}.from-{copy.saved.generation}"
    manifest = read_object_manifest(store, copy)
    indexes = [read_object_index(store, copy, number) for number in range(len(copy.saved.file_bytes))]
    checkpoints.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside.mkdir(exist_ok=True, mode=0o700)
    for number, objects in enumerate(indexes):
        _fetch_file(store, copy, objects, aside / data_file_name(number), show)
    home = replace(copy.saved, path=aside, tier="durable")
    write_synced_file(aside / MANIFEST_NAME, manifest)
    with GenerationReader(home) as generation:
        if damage := next(generation.damages(), None):
            raise DamagedError(f"{damage} (as {copy.url} has it)")
    write_synced_file(aside / COMMIT_RECORD, render_commit_record(home).encode())
    sync_directory(aside)
    if final.exists():
        quarantine_generation(final)
    aside.rename(final)
    sync_directory(checkpoints)
    return replace(home, path=final)


def download_generation(
    url: str,
    endpoint: str | None,
    run_id: str,
    generation: str,
    checkpoints: Path,
    show: DownloadProgress = lambda _size: None,
) -> SavedCheckpoint:
    """`download` of a generation, unless the run directory has it whole; DamagedError without a copy."""
    with open_object_store(url, endpoint) as store:
        store.check()
        for copy in list_generation_copies(store, run_id)[0]:
            if copy.saved.generation == generation:
                return find_whole_save(copy, checkpoints) or download_copy(store, copy, checkpoints, show)
    raise DamagedError(f"{url}: has no copy of generation {generation} of {run_id}")


def find_whole_save(copy: ObjectCopy, checkpoints: Path) -> SavedCheckpoint | None:
    """The save of the run directory that is this generation, if every byte of it is right."""
    for saved in read_saved_checkpoints(checkpoints)[0]:
        if saved.generation == copy.saved.generation:
            try:
                with GenerationReader(saved) as generation:
                    return None if any(generation.damages()) else saved
            except DamagedError:
                return None
    return None


def find_copy_damages(
    store: ObjectStore, copy: ObjectCopy, show: DownloadProgress = lambda _size: None
) -> list[str]:
    """Everything that is wrong with a copy; reads all of it back."""
    damages = [] if copy.problem is None else [f"{copy.url}: {copy.problem}"]
    objects = list[StoredObject]()
    try:
        read_object_manifest(store, copy)
    except DamagedError as error:
        damages.append(str(error))
    for number in range(len(copy.saved.file_bytes)):
        try:
            objects += read_object_index(store, copy, number)
        except DamagedError as error:
            damages.append(str(error))

    def prove(stored: StoredObject) -> str | None:
        try:
            for piece in stream_object(store, copy, stored):
                show(len(piece))
        except DamagedError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(MAX_PARALLEL_CALLS) as pool:
        damages += [problem for problem in pool.map(prove, objects) if problem]
    return list(dict.fromkeys(damages))


def _fetch_file(
    store: ObjectStore, copy: ObjectCopy, objects: list[StoredObject], path: Path, show: DownloadProgress
) -> None:
    """Fill a data file with its objects, several at a time, and sync it."""
    given_up = threading.Event()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def fetch(stored: StoredObject) -> None:
        if not _has_object(descriptor, stored):
            at = stored.start
            for piece in stream_object(store, copy, stored):
                if given_up.is_set():
                    raise SiteError(f"{copy.url}: the download was given up")
                _write_all(descriptor, piece, at)
                at += len(piece)
        show(stored.size_bytes)

    try:
        run_in_parallel([partial(fetch, stored) for stored in objects], given_up)
        os.ftruncate(descriptor, sum(stored.size_bytes for stored in objects))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _has_object(descriptor: int, stored: StoredObject) -> bool:
    """Whether an earlier try has brought these bytes."""
    digest, at, end = xxh3_64(), stored.start, stored.start + stored.size_bytes
    while at < end:
        piece = os.pread(descriptor, min(TRANSFER_BYTES, end - at), at)
        if not piece:
            return False
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest() == stored.xxh3


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count
