"""Copies of generations in an object store: where their objects lie, which are whole, and which go.

    PREFIX/RUN/step-00000016.GENERATION/
        data-00000.bin.00000.HASH    the data file of a node, cut into objects of 64 to 512 MiB
        data-00000.json              the index of that file: each object's size, CRC-32 and xxh3
        manifest.json                the bytes that the run directory has
        complete.json                the commit record, the bytes that the run directory has; written last

An object is named by the hash of its bytes: whoever finds one of the right name and checksum need not send
it again, and two who send the same generation write the same objects. A generation without its record does
not exist. What a store tells is never taken as a path: only names of this form count.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from xxhash import xxh3_64, xxh3_64_hexdigest

from hpcrun.checkpoint.format import MANIFEST_NAME, PART_ALIGN, DamagedError, data_file_name
from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.store import ListedObject, ObjectStore
from hpcrun.checkpoint.tier import CheckpointId
from hpcrun.errors import UsageError
from hpcrun.specs.descent import lineage_order, select_lineage
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, UnreadableCheckpoint, parse_commit_record

MIN_OBJECT_BYTES = 64 << 20
"""The least size of an object, but for files that are smaller; the largest is eight times this."""
MAX_PARALLEL_CALLS = 8
_T = TypeVar("_T")
"""Objects under way together, each with one piece in memory."""
_TARGET_OBJECT_COUNT = 256
_STALE_S = 24 * 3600.0
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_KEY = re.compile(
    r"step-(?P<step>[0-9]{8,12})\.(?P<generation>[0-9a-f]{32})/(?P<name>"
    r"data-(?P<file>[0-9]{5,7})(?:\.json|\.bin\.(?P<number>[0-9]{5})\.[0-9a-f]{16})|manifest\.json|complete\.json)"
)


class FileExtent(NamedTuple):
    """A stretch of a data file that is one object."""

    number: int
    start: int
    size_bytes: int


class StoredObject(NamedTuple):
    """An object as the index of its file has it."""

    name: str
    start: int
    size_bytes: int
    crc32: int
    xxh3: str


@dataclass(frozen=True)
class ObjectCopy:
    """A committed generation in a store."""

    saved: SavedCheckpoint
    """Its record, with tier `object`."""
    place: str
    """What the keys of its objects begin with."""
    url: str
    listed: dict[str, ListedObject]
    """Its objects by name."""
    problem: str | None
    """What the listing already shows to be wrong with it."""

    @property
    def stamp(self) -> CheckpointId:
        """Which state it is of."""
        saved = self.saved
        return CheckpointId(
            saved.generation, saved.step, saved.position, saved.world_size, saved.attempt, saved.descent
        )


class BrokenObjectCopy(NamedTuple):
    """What looks like a committed generation, but has a record that proves nothing."""

    url: str
    problem: str


def split_into_objects(size_bytes: int, least: int = MIN_OBJECT_BYTES) -> list[FileExtent]:
    """The objects of a file, about equal: none below `least` unless the file is, none above 8 times that.

    Always the same for a size, so that an upload that was interrupted finds its own objects.
    """
    target = min(4 * least, max(least, size_bytes // _TARGET_OBJECT_COUNT))
    count = max(1, size_bytes // target)
    each = size_bytes // count // PART_ALIGN * PART_ALIGN
    ends = [each * number for number in range(1, count)] + [size_bytes]
    return [FileExtent(number, each * number, end - each * number) for number, end in enumerate(ends)]


def run_key_prefix(run_id: str) -> str:
    """What the keys of a run begin with; UsageError for an id that is no name."""
    name = run_id.replace("/", "+")
    if not _RUN.fullmatch(name):
        raise UsageError(
            f"{run_id!r}: is not a run's id that can be part of a key; allowed: letters, digits and . _ + -"
        )
    return f"{name}/"


def generation_key_prefix(run_id: str, step: int, generation: str) -> str:
    """What the keys of a generation begin with."""
    return f"{run_key_prefix(run_id)}step-{step:08d}.{generation}/"


def object_index_name(number: int) -> str:
    """The name of a data file's index."""
    return data_file_name(number).replace(".bin", ".json")


def data_object_name(number: int, extent: int, xxh3: str) -> str:
    """The name of an object of a data file."""
    return f"{data_file_name(number)}.{extent:05d}.{xxh3}"


def render_object_index(generation: str, number: int, objects: list[StoredObject]) -> bytes:
    """The index of a data file, with a hash of itself."""
    index = {"generation": generation, "file": number, "objects": [list(stored) for stored in objects]}
    return (json.dumps(index | {"check": _index_hash(index)}) + "\n").encode()


def parse_object_index(data: bytes, generation: str, number: int) -> list[StoredObject]:
    """The objects of a data file in order; DamagedError where they do not make it up."""
    try:
        values = json.loads(data)
        check = values.pop("check")
        objects = [StoredObject(*row) for row in values["objects"]]
        if check != _index_hash(values) or (values["generation"], values["file"]) != (generation, number):
            raise DamagedError("is not the index of this file, or is damaged")
        end = 0
        for at, stored in enumerate(objects):
            if (
                stored.name != data_object_name(number, at, stored.xxh3)
                or stored.start != end
                or stored.size_bytes < 0
            ):
                raise DamagedError(f"names {stored.name!r} at {stored.start}, which does not belong there")
            end += stored.size_bytes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"is not an index ({error})") from None
    return objects


def list_generation_copies(
    store: ObjectStore, run_id: str, newest: int | None = None
) -> tuple[list[ObjectCopy], list[BrokenObjectCopy]]:
    """The committed generations of a run in a store, oldest first, and those whose record proves nothing.

    One listing, and their small records; only those of the `newest` steps where that is given.
    """
    place = run_key_prefix(run_id)
    by_generation = _group_by_generation(store, place)
    committed = [(key, names) for key, names in by_generation.items() if COMMIT_RECORD in names]
    if newest is not None:
        committed = sorted(committed, key=lambda item: _parse_key_step(item[0]))[-newest:]
    with ThreadPoolExecutor(2 * MAX_PARALLEL_CALLS) as pool:
        texts = list(
            pool.map(lambda item: _read_record_text(store, f"{place}{item[0]}/{COMMIT_RECORD}"), committed)
        )
    copies, unreadable = list[ObjectCopy](), list[BrokenObjectCopy]()
    for (key, names), text in zip(committed, texts, strict=True):
        if text is not None:  # else it was removed meanwhile
            copy = _parse_copy(store, place, key, names, text)
            (copies if isinstance(copy, ObjectCopy) else unreadable).append(copy)  # type: ignore[arg-type]
    return sorted(
        copies, key=lambda copy: (copy.saved.step, copy.saved.attempt, copy.saved.written or 0.0)
    ), unreadable


def list_whole_copies(
    url: str, run_id: str, endpoint: str | None = None, newest: int | None = None
) -> list[ObjectCopy]:
    """The copies of a run that the listing shows whole, oldest first; SiteError for a store that is away."""
    with open_object_store(url, endpoint) as store:
        store.check()
        return [copy for copy in list_generation_copies(store, run_id, newest)[0] if copy.problem is None]


def prune_object_copies(store: ObjectStore, run_id: str, keep: int) -> list[ObjectCopy]:
    """Remove all but the newest `keep` whole copies of the line that the run is on; what was removed.

    A generation without a record may be on its way and stays, unless it is older than the newest whole copy
    and nothing has been added to it for a day. The record goes first.
    """
    assert keep >= 1, "the only copy is never removed"
    place = run_key_prefix(run_id)
    copies, _ = list_generation_copies(store, run_id)
    whole = [copy for copy in copies if copy.problem is None]
    line = {saved.generation for saved in select_lineage(copy.saved for copy in whole)}
    on_line = sorted(
        (copy for copy in whole if copy.saved.generation in line), key=lambda copy: lineage_order(copy.saved)
    )
    removed = on_line[:-keep]
    for copy in removed:
        store.delete(f"{copy.place}{COMMIT_RECORD}")
        store.delete_prefix(copy.place)
    if whole:
        listed = _group_by_generation(store, place)
        # What is newest there was written just now, and stamped by the store, whose clock is not ours.
        now = max(
            (listed_object.changed or 0.0 for names in listed.values() for listed_object in names.values()),
            default=0.0,
        )
        for key, names in listed.items():
            if (
                COMMIT_RECORD not in names
                and _parse_key_step(key) < on_line[-1].saved.step
                and _is_stale(names, now)
            ):
                store.delete_prefix(f"{place}{key}/")
    return removed


def read_object_index(store: ObjectStore, copy: ObjectCopy, number: int) -> list[StoredObject]:
    """The index of a data file of a copy; DamagedError when it is missing or wrong."""
    key = f"{copy.place}{object_index_name(number)}"
    try:
        objects = parse_object_index(store.read(key), copy.saved.generation, number)
        if sum(stored.size_bytes for stored in objects) != copy.saved.file_bytes[number]:
            raise DamagedError(f"its objects are not the {copy.saved.file_bytes[number]} bytes of the record")
    except FileNotFoundError:
        raise DamagedError(f"{store.url}/{key}: is missing") from None
    except DamagedError as error:
        raise DamagedError(f"{store.url}/{key}: {error}") from None
    return objects


def read_object_manifest(store: ObjectStore, copy: ObjectCopy) -> bytes:
    """The manifest of a copy, proved by its record."""
    key = f"{copy.place}{MANIFEST_NAME}"
    try:
        data = store.read(key)
    except FileNotFoundError:
        raise DamagedError(f"{store.url}/{key}: is missing") from None
    if len(data) != copy.saved.manifest_bytes or xxh3_64_hexdigest(data) != copy.saved.manifest_hash:
        raise DamagedError(f"{store.url}/{key}: does not match the hash in the commit record")
    return data


def stream_object(store: ObjectStore, copy: ObjectCopy, stored: StoredObject) -> Iterator[bytes]:
    """The bytes of an object; DamagedError at the end, or before, when they are not those of the index."""
    key, digest = f"{copy.place}{stored.name}", xxh3_64()
    try:
        for piece in store.pieces(key, stored.size_bytes):
            digest.update(piece)
            yield piece
    except FileNotFoundError:
        raise DamagedError(f"{store.url}/{key}: is missing") from None
    if digest.hexdigest() != stored.xxh3:
        raise DamagedError(f"{store.url}/{key}: its bytes do not match their hash")


def _group_by_generation(store: ObjectStore, place: str) -> dict[str, dict[str, ListedObject]]:
    """What is there, by generation and name; keys of any other form are not ours."""
    by_generation: dict[str, dict[str, ListedObject]] = {}
    for key, listed in store.list(place).items():
        if match := _KEY.fullmatch(key.removeprefix(place)):
            by_generation.setdefault(f"step-{match['step']}.{match['generation']}", {})[match["name"]] = (
                listed
            )
    return by_generation


def _parse_copy(
    store: ObjectStore, place: str, key: str, names: dict[str, ListedObject], text: str
) -> ObjectCopy | BrokenObjectCopy:
    """A copy from its record, which must be of what its key says."""
    url = f"{store.url}/{place}{key}"
    saved = parse_commit_record(Path(url), text)
    if isinstance(saved, UnreadableCheckpoint):
        return BrokenObjectCopy(url, saved.problem)
    numbers = (saved.step, saved.position, saved.world_size, saved.manifest_bytes, *saved.file_bytes)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return BrokenObjectCopy(url, f"{COMMIT_RECORD} is not a record of a save")
    if key != f"step-{saved.step:08d}.{saved.generation}":
        return BrokenObjectCopy(url, f"{COMMIT_RECORD} is the record of another generation")
    return ObjectCopy(
        replace(saved, tier="object"), f"{place}{key}/", url, names, _find_listing_problem(saved, names)
    )


def _find_listing_problem(saved: SavedCheckpoint, names: dict[str, ListedObject]) -> str | None:
    """What the sizes of a listing show to be wrong."""
    if MANIFEST_NAME not in names:
        return f"{MANIFEST_NAME} is missing"
    sizes: dict[int, dict[str, int]] = {}
    for name, listed in names.items():
        match = _KEY.fullmatch(f"step-00000000.{'0' * 32}/{name}")
        if match and match["number"]:
            # Of one stretch there may be several, where a damaged source was sent before a whole one.
            of_file = sizes.setdefault(int(match["file"]), {})
            of_file[match["number"]] = max(listed.size_bytes, of_file.get(match["number"], 0))
    for number, expected in enumerate(saved.file_bytes):
        if object_index_name(number) not in names:
            return f"{object_index_name(number)} is missing"
        if (size := sum(sizes.get(number, {}).values())) != expected:
            return f"the objects of {data_file_name(number)} have {size} bytes instead of {expected}"
    return None


def _read_record_text(store: ObjectStore, key: str) -> str | None:
    try:
        return store.read(key).decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _is_stale(names: dict[str, ListedObject], now: float) -> bool:
    changed = [listed.changed for listed in names.values()]
    return all(changed_at is not None and changed_at < now - _STALE_S for changed_at in changed)


def _parse_key_step(key: str) -> int:
    return int(key.removeprefix("step-").partition(".")[0])


def _index_hash(values: dict[str, object]) -> str:
    return xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def run_in_parallel(calls: Sequence[Callable[[], _T]], given_up: threading.Event) -> list[_T]:
    """What the calls give, several of them at a time; with the first that fails the others are given up."""
    with ThreadPoolExecutor(MAX_PARALLEL_CALLS) as pool:
        under_way = [pool.submit(call) for call in calls]
        try:
            for future in as_completed(under_way):
                future.result()
        except BaseException:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in under_way]
