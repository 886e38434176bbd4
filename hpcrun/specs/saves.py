"""Which steps of a run are committed, from their small records alone; readable without torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from hpcrun.errors import UsageError
from hpcrun.files import UntrustedFileError, read_regular
from hpcrun.specs.descent import is_descent, select_lineage
from hpcrun.specs.rundir import RunDir

SAVE_FORMAT_VERSION = 2
COMMIT_RECORD = "complete.json"
"""Written last into a step's directory: without it the step does not exist."""
_CHECK = "check"
_MOST_RECORD_BYTES = 16 << 20
_GENERATION = re.compile(r"[0-9a-f]{32}")
_COUNTS = ("step", "position", "world_size", "attempt")
MAX_COUNT = 1 << 62
"""Steps, samples and sizes lie below it."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed step: where it lies and what is known of it without loading it."""

    path: Path
    step: int
    position: int
    """Training samples consumed, all ranks together."""
    world_size: int
    attempt: int
    generation: str
    """Random and in every block of its files."""
    structure: str = ""
    """Digest of all names, types and whole shapes: equal for states that load into the same job."""
    run_id: str = ""
    """The identity of the run that saved it; saves of older layouts have none, and are not gone on from."""
    descent: str = ""
    """Of what earlier saves of that run it came; see `hpcrun.specs.descent`."""
    tier: str = "durable"
    written: float | None = None
    manifest_bytes: int = 0
    manifest_hash: str = ""
    file_bytes: tuple[int, ...] = ()
    """The exact sizes of its data files, in order of their numbers."""


@dataclass(frozen=True)
class UnreadableCheckpoint:
    """A directory that looks like a committed step, but whose record proves nothing."""

    path: Path
    problem: str
    is_seen: bool = True
    """Its record is there, and wrong; else this node cannot see it, which proves nothing."""


def read_saved_checkpoints(checkpoints: Path) -> tuple[list[SavedCheckpoint], list[UnreadableCheckpoint]]:
    """All committed steps that lie there by step, and those whose record is damaged; none half-written.

    UsageError for a step in a newer or older format than this.
    """
    readable, unreadable = list[SavedCheckpoint](), list[UnreadableCheckpoint]()
    try:
        names = sorted(name for name in os.listdir(checkpoints) if name.startswith("step-"))  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        names = []
    for name in names:
        checkpoint = read_saved_checkpoint(checkpoints / name)
        if checkpoint is not None:
            (readable if isinstance(checkpoint, SavedCheckpoint) else unreadable).append(checkpoint)  # type: ignore[arg-type]
    return sorted(readable, key=lambda saved: saved.step), unreadable


def read_saved_checkpoint(path: Path) -> SavedCheckpoint | UnreadableCheckpoint | None:
    """What a directory of a committed step is; None where there is no directory.

    UsageError for a step in a newer or older format than this.
    """
    try:
        return parse_commit_record(path, read_regular(path / COMMIT_RECORD, _MOST_RECORD_BYTES).decode())
    except FileNotFoundError:
        # A generation gets its name with its record in it, and loses its name before the record.
        return UnreadableCheckpoint(path, f"{COMMIT_RECORD} is missing", False) if path.is_dir() else None
    except NotADirectoryError:
        return None
    except UntrustedFileError as error:
        return UnreadableCheckpoint(path, str(error).removeprefix(f"{path}/"))
    except (OSError, ValueError) as error:
        return UnreadableCheckpoint(
            path, f"{COMMIT_RECORD} cannot be read: {error}", not isinstance(error, OSError)
        )


def step_of_directory(path: Path) -> int:
    """The step that a directory of a save is named after; -1 for a name that is not ours."""
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def resumable_checkpoints(checkpoints: Path) -> list[SavedCheckpoint]:
    """The committed steps that a run may go on from, oldest first; see sort_saves."""
    return sort_checkpoints(checkpoints, read_saved_checkpoints(checkpoints)[0]).line


@dataclass(frozen=True)
class SortedCheckpoints:
    """The saves in a run's directory by what they are to it, each oldest first."""

    line: list[SavedCheckpoint]
    """The newest, and what it has come from."""
    left: list[SavedCheckpoint]
    """Of branches of this run that were left for an older save."""
    strangers: list[SavedCheckpoint]
    """Of another run, or of nobody knows which: copied in by hand, or of an older layout."""

    @property
    def own(self) -> list[SavedCheckpoint]:
        """All that this run has saved."""
        return [*self.left, *self.line]


def sort_checkpoints(checkpoints: Path, saves: Iterable[SavedCheckpoint]) -> SortedCheckpoints:
    """Saves that lie there, by what they are to the run whose directory that is in."""
    ordered = sorted(saves, key=lambda save: save.step)
    own_ids = RunDir(checkpoints.parent).run_ids if ordered else ()
    own = [save for save in ordered if save.run_id in own_ids]
    line = select_lineage(own)
    names = {save.path for save in line}
    return SortedCheckpoints(
        line,
        [save for save in own if save.path not in names],
        [save for save in ordered if save.run_id not in own_ids],
    )


def refuse_foreign_checkpoints(checkpoints: Path, sorted_saves: SortedCheckpoints) -> None:
    """UsageError where all that is there is other runs' saves, or of no known one: what to do with them."""
    if sorted_saves.own or not sorted_saves.strangers:
        return
    newest, run = sorted_saves.strangers[-1], checkpoints.parent
    whose = f"of another run ({newest.run_id})" if newest.run_id else "of no known run"
    raise UsageError(
        f"{newest.path}: is {whose}, and is not resumed in {run}; to have it here type:"
        f" mv {newest.path} {run}/ && hpcrun ckpt import {run / newest.path.name} --run {run}"
    )


def render_commit_record(saved: SavedCheckpoint) -> str:
    """The commit record of a step, with a hash of itself."""
    record = {
        "format_version": SAVE_FORMAT_VERSION,
        "generation": saved.generation,
        "level": saved.tier,
        "step": saved.step,
        "position": saved.position,
        "world_size": saved.world_size,
        "attempt": saved.attempt,
        "structure": saved.structure,
        "run_id": saved.run_id,
        "descent": saved.descent,
        "written": saved.written,
        "manifest": [saved.manifest_bytes, saved.manifest_hash],
        "files": list(saved.file_bytes),
    }
    return json.dumps(record | {_CHECK: _record_hash(record)}) + "\n"


def parse_commit_record(path: Path, text: str) -> SavedCheckpoint | UnreadableCheckpoint:
    """What a commit record says, wherever it was read; UsageError for one in another format than this."""
    try:
        record = json.loads(text)
        version = record.pop("format_version")
        if isinstance(version, int) and version > SAVE_FORMAT_VERSION:
            raise UsageError(
                f"{path}: written in format {version}, this hpcrun reads up to {SAVE_FORMAT_VERSION};"
                " use a newer hpcrun"
            )
        if version == 1:
            raise UsageError(
                f"{path}: save format 1 is no longer read; move it out of the run: without {COMMIT_RECORD} it"
                " is a checkpoint of torch's, which `hpcrun ckpt import` takes with --step"
            )
        check = record.pop(_CHECK)
        if version != SAVE_FORMAT_VERSION or check != _record_hash({"format_version": version, **record}):
            return UnreadableCheckpoint(path, f"{COMMIT_RECORD} does not match the hash in it")
        _check_fields(record)
        manifest_bytes, manifest_hash = record.pop("manifest")
        return SavedCheckpoint(
            path,
            file_bytes=tuple(record.pop("files")),
            manifest_bytes=manifest_bytes,
            manifest_hash=manifest_hash,
            tier=record.pop("level"),
            **record,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return UnreadableCheckpoint(path, f"{COMMIT_RECORD} is not a record of a save")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _check_fields(record: dict[str, Any]) -> None:
    """ValueError for values of other kinds than we write: some become part of a file's name."""
    if not all(_is_count(record[name]) for name in _COUNTS) or not record["world_size"]:
        raise ValueError("it counts nothing")
    manifest_bytes, manifest_hash = record["manifest"]
    texts = (record["generation"], record["structure"], record["level"], manifest_hash)
    if not all(isinstance(text, str) for text in texts) or not _GENERATION.fullmatch(record["generation"]):
        raise ValueError("it names nothing")
    if not is_descent(record.get("descent", "")) or not isinstance(record.get("run_id", ""), str):
        raise ValueError("it comes from nowhere")
    if not isinstance(record["files"], list) or not all(map(_is_count, [manifest_bytes, *record["files"]])):
        raise ValueError("its sizes are none")
    if not isinstance(record["written"], float | int | None):
        raise ValueError("its time is none")


def _record_hash(record: dict[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())
