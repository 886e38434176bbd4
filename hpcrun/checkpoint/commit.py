"""From written files to a committed generation, and from a committed one to none: always by one rename."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.format import MANIFEST, DamagedError, Part, file_name, render_manifest
from hpcrun.checkpoint.read import check_sizes
from hpcrun.checkpoint.write import write_file
from hpcrun.specs.records import sync_directory
from hpcrun.specs.saves import FORMAT_VERSION, RECORD, Saved, Unreadable, read_saves, render_record

DAMAGED = "damaged-"
_LEFTOVER, _DOOMED = ".step-*", ".deleted"


@dataclass(frozen=True)
class Draft:
    """A generation that is being written."""

    aside: Path
    final: Path
    generation: bytes
    layout: Mapping[str, Any] = field(default_factory=dict)
    """How its files lie on the file system, for the manifest."""

    def file(self, number: int) -> Path:
        """Where a data file is written."""
        return self.aside / file_name(number)


def draft_of(checkpoints: Path, step: int, attempt: int, generation: bytes) -> Draft:
    """The names that everybody who writes a generation knows; nothing is made."""
    name = f"step-{step:08d}"
    return Draft(checkpoints / f".{name}.{attempt}", checkpoints / name, generation)


def begin(checkpoints: Path, step: int, attempt: int, *, beside: bool = False) -> Draft:
    """An empty place for the files of a generation; what broken saves have left is removed.

    `beside`: not where a worker may be writing yet that has failed to save this step.
    """
    checkpoints.mkdir(parents=True, exist_ok=True, mode=0o700)
    for leftover in checkpoints.glob(_LEFTOVER):
        shutil.rmtree(leftover, ignore_errors=True)
    draft = draft_of(checkpoints, step, attempt, secrets.token_bytes(16))
    if beside:
        draft = dataclasses.replace(draft, aside=draft.aside.with_name(f"{draft.aside.name}.ranks"))
    draft.aside.mkdir(mode=0o700)
    return draft


def commit(
    draft: Draft,
    parts: Sequence[Part],
    tensors: str,
    structure: str,
    *,
    step: int,
    position: int,
    world_size: int,
    attempt: int,
) -> Saved:
    """Make written and synced parts the generation of a step; what stood under its name is set aside.

    DamagedError if a file is not as long as the parts say.
    """
    sizes: dict[int, int] = {}
    for part in parts:
        sizes[part.file] = max(sizes.get(part.file, 0), part.start + part.size_bytes)
    manifest = render_manifest(draft.generation, parts, tensors, draft.layout)
    saved = Saved(
        draft.aside,
        step,
        position,
        world_size,
        attempt,
        format_version=FORMAT_VERSION,
        generation=draft.generation.hex(),
        structure=structure,
        written=time.time(),
        manifest_bytes=len(manifest),
        manifest_hash=xxh3_64_hexdigest(manifest),
        file_bytes=tuple(sizes[number] for number in range(len(sizes))),
    )
    write_file(draft.aside / MANIFEST, manifest)
    check_sizes(saved)
    write_file(draft.aside / RECORD, render_record(saved).encode())
    sync_directory(draft.aside)
    if draft.final.exists():
        set_aside(draft.final)
    os.rename(draft.aside, draft.final)  # noqa: PTH104
    sync_directory(draft.final.parent)
    return Saved(**{**vars(saved), "path": draft.final})


def discard(draft: Draft) -> None:
    """Remove what was written of a generation that will not be committed; it must not fill the disk."""
    shutil.rmtree(draft.aside, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Take a damaged generation out of the committed ones, and keep it: another level may repair it."""
    target = path.with_name(f"{DAMAGED}{path.name}.{secrets.token_hex(4)}")
    path.rename(target)
    sync_directory(path.parent)
    return target


def remove(path: Path) -> None:
    """Delete a generation; renamed first, because half a deletion must not look like a committed step."""
    doomed = path
    if not path.name.startswith("."):
        doomed = path.with_name(f".{path.name}{_DOOMED}")
        path.rename(doomed)
    shutil.rmtree(doomed)


def retire(checkpoints: Path, keep: int, damaged: Collection[Path] = (), keep_every: int = 0) -> None:
    """Delete all but the newest `keep` generations, not counting those known to be damaged.

    Steps that are a multiple of `keep_every` stay. What cannot be deleted is left to the next time.
    """
    whole = [saved for saved in read_saves(checkpoints)[0] if saved.path not in damaged]
    for old in _superseded(whole, keep, keep_every):
        with contextlib.suppress(OSError):
            remove(old.path)


def _superseded(whole: Sequence[Saved], keep: int, keep_every: int) -> list[Saved]:
    """Those that newer ones make needless, of some in order; the newest never is."""
    return [old for old in whole[: -max(keep, 1)] if not keep_every or old.step % keep_every]


@dataclass(frozen=True)
class Garbage:
    """Something that nobody needs any more, and why."""

    path: Path
    why: str
    size_bytes: int


@dataclass(frozen=True)
class Kept:
    """Something that looks like garbage and is left, and why."""

    path: Path
    why: str


def find_garbage(
    checkpoints: Path, keep: int, *, in_flight: bool, damaged: bool, keep_every: int = 0
) -> tuple[list[Garbage], list[Kept]]:
    """What may be deleted: leftovers, generations beyond the newest `keep` whole ones, damaged if asked for.

    While a run is going on, or nobody knows, what is half written may be a save in flight and is left.
    """
    garbage, kept = list[Garbage](), list[Kept]()
    for path in sorted(checkpoints.glob(_LEFTOVER)):
        if in_flight and not path.name.endswith(_DOOMED):
            kept.append(Kept(path, "half written; the run may be writing it now"))
        else:
            why = (
                "a deletion that was cut short"
                if path.name.endswith(_DOOMED)
                else "a save that was cut short"
            )
            garbage.append(Garbage(path, why, _size(path)))
    saves, unreadable = read_saves(checkpoints)
    broken = [(one.path, problem) for one in saves if (problem := problem_of(one))]
    broken += [(one.path, one.problem) for one in unreadable]
    broken += [(path, "it was set aside as damaged") for path in sorted(checkpoints.glob(f"{DAMAGED}*"))]
    paths = {path for path, _ in broken}
    whole = [saved for saved in saves if saved.path not in paths]
    for old in _superseded(whole, keep, keep_every):
        garbage.append(Garbage(old.path, f"older than the newest {keep} whole saves", _size(old.path)))
    for path, problem in broken:
        if damaged and whole:
            garbage.append(Garbage(path, f"damaged: {problem}", _size(path)))
        else:
            why = "no save is whole" if damaged else "--damaged removes it too"
            kept.append(Kept(path, f"damaged: {problem}; {why}"))
    return garbage, kept


def problem_of(saved: Saved | Unreadable) -> str | None:
    """What its record and the sizes of its files already show to be wrong; None where that is nothing."""
    if isinstance(saved, Unreadable):
        return saved.problem
    if saved.format_version < FORMAT_VERSION:
        return None
    try:
        check_sizes(saved)
    except DamagedError as error:
        return str(error).removeprefix(f"{saved.path}/")
    return None


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
