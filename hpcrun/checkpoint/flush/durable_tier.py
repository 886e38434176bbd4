"""The durable tier: the run directory, committed by workers that agree through its files alone.

    .step-00000016.ATTEMPT/
        data-00002.bin      a node's parts, at the places that the plan gave them
        parts-00008.json    which parts these are, synced after the data; named after the first of them
        failed-00008.json   or why there are none, so that nobody waits for them
    step-00000016/          all of it, once the worker that holds part 0 has seen the records of all parts

A worker returns when the generation has its final name, or cannot get it any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from hpcrun.checkpoint.commit import (
    GenerationDraft,
    apply_retention,
    commit_generation,
    locate_draft,
    remove_unfinished_saves,
)
from hpcrun.checkpoint.flush.stall_watch import StallWatch
from hpcrun.checkpoint.format import (
    HEADER_BYTES,
    Part,
    collect_tensors,
    compute_structure_digest,
    data_file_name,
    render_tensors,
)
from hpcrun.checkpoint.generation import read_part_tail
from hpcrun.checkpoint.lustre.direct import write_file_direct
from hpcrun.checkpoint.part_record import parse_checksummed, render_checksummed
from hpcrun.checkpoint.part_writer import open_shared_file, write_image
from hpcrun.checkpoint.tier import CheckpointId, InventoryEntry, NodeShards, SealedPart, TierName
from hpcrun.errors import SiteError
from hpcrun.specs.records import write_atomically
from hpcrun.specs.saves import SavedCheckpoint, read_saved_checkpoint

_LEADER_FAILED = "failed-00000.json"
"""Once it is there the worker that holds part 0 will not commit any more."""
_HASH_PATTERN = re.compile(rb',"[0-9a-f]{16}"\]')

PrepareFile = Callable[[Path, int, int], dict[str, Any]]
"""(path, size_bytes, nodes that write at once), before a file's first byte.

What it says goes into the manifest. It may make the file, and must not fail for want of something that only
makes it quicker.
"""


RetryFile = Callable[[Path, int, int], dict[str, Any] | None]
"""After ENOSPC: the file anew, empty, at another place; None, and it stays, where there is none."""


def no_preparation(path: Path, size_bytes: int, writers: int) -> dict[str, Any]:
    """For file systems that need to be told nothing."""
    return {}


def no_retry(path: Path, size_bytes: int, writers: int) -> dict[str, Any] | None:
    """For file systems that are full as a whole."""
    return None


def no_layout_facts(path: Path) -> dict[str, Any]:
    """For file systems that tell nothing of a file that was written."""
    return {}


@dataclass(frozen=True)
class CommitTimeouts:
    """How long a worker waits for others, and how often it looks."""

    peer_timeout_s: float = 900.0
    """For the parts of all nodes, or for the commit."""
    visibility_timeout_s: float = 120.0
    """For what others are known to have done: a network file system shows names and sizes late."""
    first_poll_s: float = 0.02
    most_s: float = 1.0


class _WaitTimeoutError(SiteError):
    """Others have not done their share in time; nothing is wrong with what was written here."""


@dataclass
class _PartRecords:
    """What workers say of their shares."""

    parts: dict[int, Part]
    shapes: dict[int, str]
    """Of each part, a digest of what its tail lists but for the hashes."""
    layout: dict[str, Any]

    def add(self, told: dict[str, Any] | None, stamp: CheckpointId) -> bool:
        """Take in a record; False where it is none of this generation."""
        if told is None or told.get("stamp") != asdict(stamp):
            return False
        for number, shape, *fields in told["parts"]:
            self.parts[number], self.shapes[number] = Part(*fields), shape
        self.layout.update(told["layout"])
        return True


class DurableTier:
    """Writes a node's share of a generation to the run directory, and has a part in committing it."""

    name: TierName = "durable"

    def __init__(
        self,
        checkpoints: Path,
        *,
        keep: int,
        keep_every: int = 0,
        direct: bool = False,
        prepare_file: PrepareFile = no_preparation,
        retry_file: RetryFile = no_retry,
        layout_facts: Callable[[Path], dict[str, Any]] = no_layout_facts,
        patience: CommitTimeouts = CommitTimeouts(),
        hurry: threading.Event | None = None,
        written: Callable[[int], None] = lambda count: None,
        say: Callable[[str], None] = lambda text: None,
        watch: StallWatch | None = None,
        file_system: str = "",
    ) -> None:
        """`hurry`: once it is set, nobody is waited for any more. `written` gets the bytes of each write.

        `say`: what went wrong after a commit, and is none of its failure. `watch` is told what this is at,
        and on which file system.
        """
        self._watch, self._on = watch or StallWatch(), f" on {file_system}" if file_system else ""
        self._checkpoints, self._keep, self._keep_every = checkpoints, keep, keep_every
        self._direct, self._prepare, self._patience = direct, prepare_file, patience
        self._retry, self._layout_facts = retry_file, layout_facts
        self._hurry, self._written, self._say = hurry or threading.Event(), written, say
        self._has_committed = False
        self._known: tuple[dict[int, str], str, str] | None = None
        """Shapes of all parts, with the manifest's tensors and the digest that came of them."""

    def store(self, load: NodeShards) -> dict[str, Any]:
        """Write, and wait until the generation is committed; SiteError or OSError where it will not be."""
        draft, stamp = self._draft(load.stamp), load.stamp
        self._watch.at(f"{draft.aside}{self._on}")
        numbers = [one.number for one in load.parts]
        if self._is_committed(draft):
            return {"path": str(draft.final)}
        leads = numbers[0] == 0
        is_told = False
        try:
            if leads:
                # Its leader is here, and goes on.
                remove_unfinished_saves(
                    self._checkpoints, stamp.attempt, of_ranks=False, of_workers=True, spare=draft.aside
                )
            for folder in (self._checkpoints, draft.aside):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            facts = self._write(draft, load)
            is_told = True
            if leads:
                self._commit(draft, stamp)
            else:
                self._await_commit(draft, stamp)
        except (OSError, SiteError) as error:
            self._give_up(draft, stamp, numbers, error)
            if is_told and isinstance(error, _WaitTimeoutError):
                # Together with what nodes hold, what was written may be all there is of this generation; the
                # next save here makes room.
                raise
            if leads:
                _clear_draft(draft.aside)
            elif not is_told or (draft.aside / _LEADER_FAILED).exists():
                # Else the leader may be committing these very files now.
                for file in {one.part.file for one in load.parts}:
                    _unlink(draft.file(file))
            raise
        return {"path": str(draft.final)} | facts

    def prove(self) -> None:
        """Write and remove a file in the run directory; OSError where that cannot be."""
        check_writable(self._checkpoints)

    def abandon(self, stamp: CheckpointId, numbers: Sequence[int], why: str) -> None:
        """Tell the others that these parts will not come."""
        draft = self._draft(stamp)
        if not self._is_committed(draft):
            with contextlib.suppress(OSError):
                draft.aside.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._give_up(draft, stamp, numbers, SiteError(why))

    def holdings(self) -> Sequence[InventoryEntry]:
        """Nothing: all nodes see the run directory alike."""
        return ()

    def retain(self, generations: Collection[str]) -> None:
        """Delete what is not to be kept, if a commit was made here; which that is the job says, not these."""
        if self._has_committed:
            self._has_committed = False
            for problem in apply_retention(self._checkpoints, self._keep, keep_every=self._keep_every):
                self._say(problem)

    def _draft(self, stamp: CheckpointId) -> GenerationDraft:
        return locate_draft(self._checkpoints, stamp.step, stamp.attempt, bytes.fromhex(stamp.generation))

    def _write(self, draft: GenerationDraft, load: NodeShards) -> dict[str, Any]:
        """This node's parts at their places, synced, and then the record of them."""
        layout: dict[str, Any] = {}
        writers = -(-load.stamp.world_size // len(load.parts))
        seconds = 0.0
        for file in sorted({one.part.file for one in load.parts}):
            parts = [one for one in load.parts if one.part.file == file]
            path = draft.file(file)
            size = max(one.part.start + one.part.size_bytes for one in parts)
            facts = {} if path.exists() else self._prepare(path, size, writers)
            began = time.monotonic()
            self._watch.at(f"{path}{self._on}")
            try:
                written = self._write_file(path, parts)
            except OSError as error:
                again = self._retry(path, size, writers) if error.errno == errno.ENOSPC else None
                if again is None:
                    raise
                facts, written = facts | again, self._write_file(path, parts)
            seconds += time.monotonic() - began
            if facts := facts | written | self._layout_facts(path):
                layout[data_file_name(file)] = facts
        told = {
            "stamp": asdict(load.stamp),
            "parts": [[one.number, _tail_digest(one), *astuple(one.part)] for one in load.parts],
            "layout": layout,
        }
        self._watch.at(f"{draft.aside}{self._on}")
        write_atomically(draft.aside / f"parts-{load.parts[0].number:05d}.json", render_checksummed(told))
        return {"written_s": round(seconds, 6)} | ({"layout": layout} if layout else {})

    def _write_file(self, path: Path, parts: Sequence[SealedPart]) -> dict[str, Any]:
        """A file's parts, synced; what is to be said of how."""
        descriptor = open_shared_file(path)
        try:
            if self._direct:
                done = write_file_direct(
                    path, [(one.part.start, one.image) for one in parts], written=self._written
                )
                return {"direct_bytes": done.direct_bytes} | (
                    {"why_buffered": done.why_buffered} if done.why_buffered else {}
                )
            for one in parts:
                write_image(descriptor, one.image, one.part.start, self._written)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return {}

    def _commit(self, draft: GenerationDraft, stamp: CheckpointId) -> None:
        """When the records of all parts are there; the records themselves do not stay."""
        told = self._await_parts(draft, stamp)
        parts = [told.parts[number] for number in range(stamp.world_size)]
        self._await_files(draft, parts)
        if self._known is None or self._known[0] != told.shapes:
            tensors = collect_tensors(
                read_part_tail(draft.file(part.file), part, number, draft.generation)
                for number, part in enumerate(parts)
            )
            self._known = (told.shapes, render_tensors(tensors), compute_structure_digest(tensors))
        self._watch.at(f"{draft.final}{self._on}")
        newer = read_saved_checkpoint(draft.final)
        if isinstance(newer, SavedCheckpoint) and newer.attempt > stamp.attempt:
            raise SiteError(f"{draft.final}: was saved by attempt {newer.attempt}; this is {stamp.attempt}")
        for path in [*draft.aside.glob("parts-*.json"), *draft.aside.glob("failed-*.json")]:
            path.unlink(missing_ok=True)
        facts: dict[str, int] = {key: getattr(stamp, key) for key in ("step", "position", "world_size")}
        commit_generation(
            replace(draft, layout=told.layout),
            parts,
            *self._known[1:],
            step=facts["step"],
            position=facts["position"],
            world_size=facts["world_size"],
            attempt=stamp.attempt,
            descent=stamp.descent,
            warn=self._say,
        )
        self._has_committed = True

    def _await_parts(self, draft: GenerationDraft, stamp: CheckpointId) -> _PartRecords:
        """Of all nodes together."""
        read, whole = set[str](), _PartRecords({}, {}, {})
        for _ in self._poll_until_timeout(f"the parts of all {stamp.world_size} ranks of step {stamp.step}"):
            names = _list_names(draft.aside)
            for name in names - read:
                if name.startswith("parts-") and whole.add(_read_share_record(draft.aside / name), stamp):
                    read.add(name)
            if whole.parts.keys() == set(range(stamp.world_size)):
                break
            for name in names:
                if name.startswith("failed-"):
                    _raise_if_failed(draft.aside / name, stamp)
        return whole

    def _await_files(self, draft: GenerationDraft, parts: Sequence[Part]) -> None:
        """In their full sizes; opening a file is what makes a network file system ask its server."""
        wanted = dict[int, int]()
        for part in parts:
            wanted[part.file] = max(wanted.get(part.file, 0), part.start + part.size_bytes)
        for _ in self._poll_until_timeout(f"all bytes in {draft.aside}", self._patience.visibility_timeout_s):
            wanted = {file: size for file, size in wanted.items() if _file_size(draft.file(file)) != size}
            if not wanted:
                break

    def _await_commit(self, draft: GenerationDraft, stamp: CheckpointId) -> None:
        vanished: float | None = None
        for _ in self._poll_until_timeout(f"step {stamp.step} to be committed by the node of rank 0"):
            if self._is_committed(draft):
                break
            _raise_if_failed(draft.aside / _LEADER_FAILED, stamp)
            if draft.aside.exists():
                vanished = None
                continue
            vanished = time.monotonic() if vanished is None else vanished
            if time.monotonic() - vanished > self._patience.visibility_timeout_s:
                raise SiteError(f"{draft.aside}: was removed before it was committed")

    def _poll_until_timeout(self, what: str, most_s: float | None = None) -> Iterator[None]:
        """A turn for each look at what others have done; SiteError when it has been too long."""
        most_s = self._patience.peer_timeout_s if most_s is None else most_s
        deadline = time.monotonic() + most_s
        pause = self._patience.first_poll_s
        self._watch.at(what)
        while True:
            yield
            if time.monotonic() > deadline:
                raise _WaitTimeoutError(f"waited {most_s:g} s in vain for {what}")
            if self._hurry.wait(pause):
                yield
                raise _WaitTimeoutError(f"no longer waiting for {what}: the attempt is over")
            pause = min(2 * pause, self._patience.most_s)

    def _is_committed(self, draft: GenerationDraft) -> bool:
        saved = read_saved_checkpoint(draft.final)
        return isinstance(saved, SavedCheckpoint) and saved.generation == draft.generation.hex()

    def _give_up(
        self, draft: GenerationDraft, stamp: CheckpointId, numbers: Sequence[int], error: Exception
    ) -> None:
        """Publish the failure so that waiting peers stop early; if that write fails too, they time out."""
        if self._is_committed(draft):
            return
        node, why = os.uname().nodename, str(error)
        told = {
            "generation": stamp.generation,
            "why": why if why.startswith("node ") else f"node {node}: {why}",
            "in_vain": isinstance(error, _WaitTimeoutError),
        }
        with contextlib.suppress(OSError):
            write_atomically(draft.aside / f"failed-{numbers[0]:05d}.json", render_checksummed(told))


def check_writable(checkpoints: Path) -> None:
    """Write and remove a small file where saves will lie; OSError where that cannot be."""
    checkpoints.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=checkpoints, prefix=".prove-") as file:
        file.write(b"\0")
        file.flush()
        os.fsync(file.fileno())


def _tail_digest(one: SealedPart) -> str:
    """A digest of what a part's tail lists but for the hashes: equal as long as the structure is."""
    begin = one.part.tail_at + HEADER_BYTES
    return xxh3_128_hexdigest(_HASH_PATTERN.sub(b"]", one.image[begin : begin + one.part.tail_bytes]))


def _file_size(path: Path) -> int | None:
    """Of a file, as its server has it; None where it is not there (yet)."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None


def _list_names(folder: Path) -> set[str]:
    """What is in a folder; nothing where a network file system cannot say now."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return set()


def _read_share_record(path: Path) -> dict[str, Any] | None:
    """A record that proves itself; None where there is none (yet)."""
    with contextlib.suppress(OSError, ValueError):
        return parse_checksummed(json.loads(path.read_text(encoding="utf-8")))
    return None


def _raise_if_failed(path: Path, stamp: CheckpointId) -> None:
    """SiteError where a worker says that a generation is lost."""
    told = _read_share_record(path)
    if told is not None and told.get("generation") == stamp.generation:
        raise (_WaitTimeoutError if told.get("in_vain") else SiteError)(str(told.get("why")))


def _clear_draft(aside: Path) -> None:
    """Remove all but the words about what failed."""
    for name in _list_names(aside):
        if not name.startswith("failed-"):
            _unlink(aside / name)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
