"""From written files to a committed generation, and from a committed one to none: always by one rename."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.format import MANIFEST_NAME, DamagedError, Part, data_file_name, render_manifest
from hpcrun.checkpoint.generation import check_file_sizes
from hpcrun.checkpoint.part_writer import write_synced_file
from hpcrun.checkpoint.policy.retention import RetentionRule, RetentionVerdict, find_linked_saves
from hpcrun.errors import UsageError
from hpcrun.specs.descent import is_in_lineage
from hpcrun.specs.records import sync_directory
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import (
    COMMIT_RECORD,
    SavedCheckpoint,
    UnreadableCheckpoint,
    read_saved_checkpoint,
    read_saved_checkpoints,
    render_commit_record,
    resumable_checkpoints,
    sort_checkpoints,
)

DAMAGED_PREFIX, LEFT_PREFIX = "damaged-", "left-"
"""What the names of generations begin with that were set aside: as damaged, or for another save of that
step."""
_UNCOMMITTED_GLOB, _DELETED_SUFFIX, _RANKS_SUFFIX = ".step-*", ".deleted", ".ranks"
_DRAFT_NAME = re.compile(rf"\.step-[0-9]+\.([0-9]+)({re.escape(_RANKS_SUFFIX)})?")


@dataclass(frozen=True)
class GenerationDraft:
    """A generation that is being written."""

    aside: Path
    final: Path
    generation: bytes
    layout: Mapping[str, Any] = field(default_factory=dict)
    """How its files lie on the file system, for the manifest."""

    def file(self, number: int) -> Path:
        """Where a data file is written."""
        return self.aside / data_file_name(number)


def locate_draft(checkpoints: Path, step: int, attempt: int, generation: bytes) -> GenerationDraft:
    """The names that everybody who writes a generation knows; nothing is made."""
    name = f"step-{step:08d}"
    return GenerationDraft(checkpoints / f".{name}.{attempt}", checkpoints / name, generation)


def begin_generation(checkpoints: Path, step: int, attempt: int, *, beside: bool = False) -> GenerationDraft:
    """An empty place for the files of a generation; what broken saves have left is removed.

    `beside`: workers may be writing, also this step, which they have failed to save: out of their way.
    """
    checkpoints.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_unfinished_saves(checkpoints, attempt, of_ranks=True, of_workers=not beside)
    draft = locate_draft(checkpoints, step, attempt, secrets.token_bytes(16))
    if beside:
        draft = dataclasses.replace(draft, aside=draft.aside.with_name(f"{draft.aside.name}{_RANKS_SUFFIX}"))
    draft.aside.mkdir(mode=0o700)
    return draft


def remove_unfinished_saves(
    checkpoints: Path, attempt: int, *, of_ranks: bool, of_workers: bool, spare: Path | None = None
) -> None:
    """Remove what broken saves have left, up to this attempt; `spare` is what the caller is writing.

    Ranks that write beside workers, and workers, know of their own alone whether it still lives: what the
    others have begun in this attempt is left, as is what a later attempt, a repair or a download has begun.
    """
    for path in checkpoints.glob(_UNCOMMITTED_GLOB):
        match = _DRAFT_NAME.fullmatch(path.name)
        if match is None:
            is_left = path.name.endswith(_DELETED_SUFFIX)
        elif of_ranks if match[2] else of_workers:
            is_left = int(match[1]) <= attempt
        else:
            is_left = bool(match[2]) and int(match[1]) < attempt
        if is_left and path != spare:
            shutil.rmtree(path, ignore_errors=True)


def commit_generation(
    draft: GenerationDraft,
    parts: Sequence[Part],
    tensors: str,
    structure: str,
    *,
    step: int,
    position: int,
    world_size: int,
    attempt: int,
    descent: str = "",
    warn: Callable[[str], None] = lambda text: None,
) -> SavedCheckpoint:
    """Make written and synced parts the generation of a step, for the run in whose directory that is.

    What stood under its name goes where it was made by the same line of starts, and is set aside elsewhere.
    DamagedError if a file is not as long as the parts say. Once it has its name it is committed: what fails
    after that is told by `warn`.
    """
    sizes: dict[int, int] = {}
    for part in parts:
        sizes[part.file] = max(sizes.get(part.file, 0), part.start + part.size_bytes)
    manifest = render_manifest(draft.generation, parts, tensors, draft.layout)
    saved = SavedCheckpoint(
        draft.aside,
        step,
        position,
        world_size,
        attempt,
        generation=draft.generation.hex(),
        structure=structure,
        run_id=RunDir(draft.final.parent.parent).run_id,
        descent=descent,
        written=time.time(),
        manifest_bytes=len(manifest),
        manifest_hash=xxh3_64_hexdigest(manifest),
        file_bytes=tuple(sizes[number] for number in range(len(sizes))),
    )
    write_synced_file(draft.aside / MANIFEST_NAME, manifest)
    check_file_sizes(saved)
    write_synced_file(draft.aside / COMMIT_RECORD, render_commit_record(saved).encode())
    sync_directory(draft.aside)
    with replacing_generation(saved, draft.final) as replaced:
        os.rename(draft.aside, draft.final)  # noqa: PTH104
    try:
        sync_directory(draft.final.parent)
    except OSError as error:
        warn(
            f"{draft.final}: is saved, but a crash of this machine may undo that: its directory could not be"
            f" synced: {error}"
        )
    for path in replaced:
        shutil.rmtree(path, ignore_errors=True)
    return SavedCheckpoint(**{**vars(saved), "path": draft.final})


@contextlib.contextmanager
def replacing_generation(saved: SavedCheckpoint, final: Path) -> Iterator[list[Path]]:
    """Set aside what stands under the name of a save that gets it in the body; put back where that fails.

    Gives what is no longer needed then: the same step of the same line, which was to be replaced.
    """
    before = read_saved_checkpoint(final)
    if before is None:
        yield []
        return
    is_whole = isinstance(before, SavedCheckpoint) and find_save_problem(before) is None
    is_ours = (
        isinstance(before, SavedCheckpoint) and before.run_id == saved.run_id and is_in_lineage(before, saved)
    )
    # What a crash leaves aside in here is found by `ckpt repair`, as damaged ones are.
    aside = quarantine_generation(final, LEFT_PREFIX if is_whole and not is_ours else DAMAGED_PREFIX)
    try:
        yield [aside] if is_whole and is_ours else []
    except OSError:
        with contextlib.suppress(OSError):
            aside.rename(final)
        raise


def discard_draft(draft: GenerationDraft) -> None:
    """Remove what was written of a generation that will not be committed; it must not fill the disk."""
    shutil.rmtree(draft.aside, ignore_errors=True)


def quarantine_generation(path: Path, what: str = DAMAGED_PREFIX) -> Path:
    """Take a generation out of the committed ones, and keep it: another tier may repair a damaged one."""
    target = path.with_name(f"{what}{path.name}.{secrets.token_hex(4)}")
    path.rename(target)
    sync_directory(path.parent)
    return target


def delete_generation(path: Path) -> None:
    """Delete a generation; renamed first, because half a deletion must not look like a committed step."""
    doomed = path
    if not path.name.startswith("."):
        doomed = path.with_name(f".{path.name}{_DELETED_SUFFIX}")
        path.rename(doomed)
    shutil.rmtree(doomed)


def apply_retention(
    checkpoints: Path, keep: int, damaged: Collection[Path] = (), keep_every: int = 0
) -> list[str]:
    """Delete the generations that the rule does not keep (see retention), none known to be damaged.

    Only the line of the newest is judged: what was left, or is a stranger's, neither counts nor goes. What
    could not be done is returned, for people: no save is the worse for it, and it is tried again next time.
    """
    problems = list[str]()
    try:
        for saved in _expired_saves(
            checkpoints, resumable_checkpoints(checkpoints), RetentionRule(keep, keep_every), damaged
        ):
            try:
                delete_generation(saved.path)
            except FileNotFoundError:
                continue  # somebody else cleans up, too
            except OSError as error:
                problems.append(f"{saved.path}: is no longer wanted, but cannot be deleted: {error}")
    except (OSError, UsageError) as error:
        problems.append(f"{checkpoints}: older saves stay, for what is there cannot be read: {error}")
    return problems


def _expired_saves(
    checkpoints: Path, line: Sequence[SavedCheckpoint], rule: RetentionRule, damaged: Collection[Path]
) -> list[SavedCheckpoint]:
    committed = {saved.path.name: saved for saved in line}
    verdicts = _apply_rule(committed, checkpoints, rule, {path.name for path in damaged})
    return [committed[verdict.key] for verdict in verdicts if not verdict.stays]


def _apply_rule(
    committed: Mapping[str, SavedCheckpoint], checkpoints: Path, rule: RetentionRule, broken: Collection[str]
) -> list[RetentionVerdict]:
    """Of saves of one line, oldest first."""
    steps = [(name, saved.step) for name, saved in committed.items()]
    return rule.judge(steps, find_linked_saves(checkpoints), broken)


@dataclass(frozen=True)
class Garbage:
    """Something that nobody needs any more, and why."""

    path: Path
    why: str
    size_bytes: int


@dataclass(frozen=True)
class SkippedGarbage:
    """Something that looks like garbage and is left, and why."""

    path: Path
    why: str


def find_garbage(
    checkpoints: Path, keep: int, *, in_flight: bool, damaged: bool, keep_every: int = 0
) -> tuple[list[Garbage], list[SkippedGarbage]]:
    """What may be deleted: leftovers, generations that the rule does not keep, damaged if asked for.

    While a run is going on, or nobody knows, what is half written may be a save in flight and is left.
    """
    garbage, kept = list[Garbage](), list[SkippedGarbage]()
    for path in sorted(checkpoints.glob(_UNCOMMITTED_GLOB)):
        if in_flight and not path.name.endswith(_DELETED_SUFFIX):
            kept.append(SkippedGarbage(path, "half written; the run may be writing it now"))
        else:
            why = (
                "a deletion that was cut short"
                if path.name.endswith(_DELETED_SUFFIX)
                else "a save that was cut short"
            )
            garbage.append(Garbage(path, why, _directory_size(path)))
    saves, unreadable = read_saved_checkpoints(checkpoints)
    broken = [(save.path, problem) for save in saves if (problem := find_save_problem(save))]
    broken += [(save.path, save.problem) for save in unreadable]
    broken += [
        (path, "it was set aside as damaged") for path in sorted(checkpoints.glob(f"{DAMAGED_PREFIX}*"))
    ]
    paths = {path for path, _ in broken}
    whole = [saved for saved in saves if saved.path not in paths]
    by_run = sort_checkpoints(checkpoints, whole)
    committed = {saved.path.name: saved for saved in by_run.line}
    for verdict in _apply_rule(committed, checkpoints, RetentionRule(keep, keep_every), ()):
        if not verdict.stays:
            path = committed[verdict.key].path
            garbage.append(Garbage(path, verdict.why, _directory_size(path)))
    left = [*(saved.path for saved in by_run.left), *sorted(checkpoints.glob(f"{LEFT_PREFIX}*"))]
    garbage += [Garbage(path, "of a branch that the run has left", _directory_size(path)) for path in left]
    why = "no save of this run: move it away, or import it"
    kept += [SkippedGarbage(saved.path, why) for saved in by_run.strangers]
    for path, problem in broken:
        if damaged and whole:
            garbage.append(Garbage(path, f"damaged: {problem}", _directory_size(path)))
        else:
            why = "no save is whole" if damaged else "--damaged removes it too"
            kept.append(SkippedGarbage(path, f"damaged: {problem}; {why}"))
    return garbage, kept


def find_save_problem(saved: SavedCheckpoint | UnreadableCheckpoint) -> str | None:
    """What its record and the sizes of its files already show to be wrong; None where that is nothing."""
    if isinstance(saved, UnreadableCheckpoint):
        return saved.problem
    try:
        check_file_sizes(saved)
    except DamagedError as error:
        return str(error).removeprefix(f"{saved.path}/")
    return None


def _directory_size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
