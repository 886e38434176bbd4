"""Saves and restores in the run directory: what all ranks agree on around the format of hpcrun.checkpoint.

Ranks agree through their control alone: a save does not use training's process groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from hpcrun.checkpoint.chunk_reader import ChunkSource
from hpcrun.checkpoint.commit import (
    GenerationDraft,
    apply_retention,
    begin_generation,
    commit_generation,
    discard_draft,
    quarantine_generation,
)
from hpcrun.checkpoint.format import (
    ChunkLocation,
    ChunkSpec,
    DamagedError,
    MissingFileError,
    collect_tensors,
    compute_structure_digest,
    render_tensors,
)
from hpcrun.checkpoint.generation import GenerationReader, read_part_tail
from hpcrun.checkpoint.os_errors import explain_os_error
from hpcrun.checkpoint.restore.inventory import gc_paused
from hpcrun.checkpoint.tier import CheckpointId
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.mounts import find_mount
from hpcrun.runtime.control import Control
from hpcrun.runtime.data_files import DataFileWriter, PartResult
from hpcrun.runtime.pending_save import MetricWriter
from hpcrun.runtime.random_state import rng_state, set_rng_state
from hpcrun.runtime.rank_alarm import mark_raised_on_all
from hpcrun.runtime.resharding import WritePlan, fill_from_chunks, plan_write, structure_key
from hpcrun.runtime.save_opening import EntrySelector, select_whole_state
from hpcrun.runtime.stderr_notes import write_stderr_line
from hpcrun.runtime.storage_wait import wait_for_storage
from hpcrun.specs.checkpoint import DurableSpec
from hpcrun.specs.descent import descent_after
from hpcrun.specs.metrics import SaveStalledMetric
from hpcrun.specs.saves import (
    SavedCheckpoint,
    UnreadableCheckpoint,
    parse_commit_record,
    read_saved_checkpoint,
    read_saved_checkpoints,
    refuse_foreign_checkpoints,
    render_commit_record,
    resumable_checkpoints,
    sort_checkpoints,
    step_of_directory,
)

_T = TypeVar("_T")
_READ_TRIES, _OPEN_TRIES, _PAUSE_S = 3, 25, 0.2
"""A network file system may show a new file late, and later on one node than on another."""
_MAX_CONFIRMED_DAMAGES = 8
"""Damages reported by other ranks that rank 0 checks itself, until it finds one."""


@dataclass(frozen=True)
class RestoreResult:
    """The state that a run resumes from, and what is wrong with newer ones."""

    step: int
    position: int
    passed_over: list[str]
    lost_steps: int
    """Steps between this state and the newest one passed over."""
    saved: SavedCheckpoint | None = None
    """The save that it came from, if that is in the run directory."""
    generation: str = ""


class DirectCheckpointer:
    """Saves and restores the training state of all ranks together."""

    def __init__(
        self,
        checkpoints: Path,
        control: Control,
        *,
        attempt: int,
        keep: int,
        keep_every: int = 0,
        durable: DurableSpec | None = None,
        record: MetricWriter = lambda _metric: None,
    ) -> None:
        """`durable`: the layout of files, where it can be set; `record`: writes metrics, on rank 0."""
        # `descent` says what this start resumed from; its saves record it.
        self.root, self.attempt, self.descent = checkpoints, attempt, ""
        self._files = DataFileWriter(checkpoints, durable or DurableSpec(), control)
        self._control, self._keep, self._keep_every = control, keep, keep_every
        self._plan: WritePlan | None = None
        self._damaged: dict[Path, _RestoreProblem] = {}
        self._opened: dict[Path, GenerationReader] = {}
        self._mount, self._step = find_mount(checkpoints).words, 0
        self._record = record
        self.is_partly_filled = False
        """Whether a load has begun to fill the state and has not finished."""
        self.avoided: frozenset[str] = frozenset()
        """Generations that are whole and must yet not be resumed from."""

    def newest(self) -> SavedCheckpoint | None:
        """Return the newest committed step, the same on every rank."""
        newest = self._control.everywhere(
            lambda: [_encode_saved(saved) for saved in resumable_checkpoints(self.root)[-1:]]
        )
        return _decode_saved(newest[0]) if newest else None

    def patiently(self, path: Path, action: Callable[[], _T], limit_s: float | None = None) -> _T:
        """Run an action on storage, which may hang, and report that; SiteError after `limit_s`."""
        return wait_for_storage(f"{path} on {self._mount}", action, self._report_slow, limit_s)

    def _report_slow(self, path: str, seconds: float) -> None:
        where = f"rank {self._control.rank} on {self._control.node}"
        why = f"{where} waits for {path}: no answer for {seconds:.0f} s"
        write_stderr_line(why)
        if self._control.rank == 0:
            self._record(SaveStalledMetric(self._step, "durable", seconds, why))

    def save(
        self,
        step: int,
        position: int,
        state: dict[str, Tensor],
        *,
        beside: bool = False,
        limit_s: float | None = None,
    ) -> Path:
        """Write the state of a step; every rank returns when it is committed and durable.

        Replaces an earlier save of that step. It fails as a whole: SiteError on every rank, and nothing is
        left of it. `beside`: the checkpoint worker has failed to write this step and may still be trying;
        stay out of its way. `limit_s`: for each request to storage.
        """
        self._step = step
        aside, final, generation, laid_out = self._control.everywhere(
            lambda: self.patiently(self.root, lambda: self._begin(step, beside), limit_s)
        )
        draft = GenerationDraft(Path(aside), Path(final), bytes.fromhex(generation))
        entries = self.entries(state)
        plan = self._plan_for(entries)
        written = self._files.write(
            draft,
            plan,
            lambda: plan.contents(entries),
            laid_out=laid_out,
            patiently=lambda path, action: self.patiently(path, action, limit_s),
        )
        facts = {"step": step, "position": position}
        self._control.everywhere(
            lambda: self.patiently(draft.final, lambda: self._commit(draft, plan, written, facts), limit_s)
        )
        return draft.final

    def entries(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return all that is saved: the state, and this rank's random state as it is now."""
        return state | {f"rng.{self._control.rank}": rng_state()}

    def _begin(self, step: int, beside: bool) -> list[Any]:
        try:
            draft = begin_generation(self.root, step, self.attempt, beside=beside)
        except OSError as error:
            raise SiteError(f"step {step} cannot be written: {explain_os_error(error, self.root)}") from None
        return [str(draft.aside), str(draft.final), draft.generation.hex(), self._files.can_set_layout()]

    def _plan_for(self, entries: dict[str, Tensor]) -> WritePlan:
        """Return the plan of the last save, unless the structure has changed on some rank since."""
        key = structure_key(entries)
        is_current = self._plan is not None and self._plan.key == key
        if self._control.agree(0 if is_current else 1) or self._plan is None:
            self._plan = plan_write(entries, self._control, key)
        return self._plan

    def _commit(
        self, draft: GenerationDraft, plan: WritePlan, written: list[PartResult], facts: dict[str, int]
    ) -> None:
        """Commit, on rank 0 when all ranks have written, and apply the job's retention."""
        try:
            for rank, result in enumerate(written):
                if result.problem:
                    raise SiteError(
                        f"{self.root}: rank {rank} cannot write step {facts['step']}: {result.problem}"
                    )
            parts = [result.part for result in written if result.part is not None]
            draft = dataclasses.replace(draft, layout=self._files.layout(written))
            if plan.tensors is None:
                tensors = collect_tensors(
                    read_part_tail(draft.file(part.file), part, number, draft.generation)
                    for number, part in enumerate(parts)
                )
                plan.structure, plan.tensors = compute_structure_digest(tensors), render_tensors(tensors)
            commit_generation(
                draft,
                parts,
                plan.tensors,
                plan.structure,
                **facts,
                world_size=self._control.size,
                attempt=self.attempt,
                descent=self.descent,
                warn=write_stderr_line,
            )
        except OSError as error:
            discard_draft(draft)
            raise SiteError(
                f"step {facts['step']} cannot be committed: {explain_os_error(error, self.root)}"
            ) from None
        except HpcrunError:
            discard_draft(draft)
            raise
        for problem in apply_retention(self.root, self._keep, self._damaged, keep_every=self._keep_every):
            write_stderr_line(problem)

    def restore(
        self,
        state: dict[str, Tensor],
        expected: dict[str, tuple[int, ...]],
        fit: EntrySelector | None = None,
        *,
        mendable: str | None = None,
    ) -> RestoreResult | None:
        """Fill the state's tensors from the newest save that proves whole, whatever layout wrote it.

        `expected` names every tensor of the whole job with its whole shape; nothing else may be stored.
        `fit` selects what of the save is filled instead; then every byte is proved before the first is
        filled, as the caller may continue after an error. A damaged save is passed over by all ranks, and
        set aside once another one is loaded. Random state is loaded last. `mendable`: a generation of which
        nodes hold parts; where that is damaged, DamagedError lets the supervisor try to complete it before
        an older one is taken. None where nothing was saved; SiteError where no save is whole.
        """
        self.is_partly_filled = False
        select = fit or select_whole_state(state, expected, self._control)
        while True:
            with gc_paused():
                chosen = self._control.everywhere(lambda: self.patiently(self.root, self.choose))
            if chosen is None:
                return None
            saved = _decode_saved(chosen)
            filled = self._fill_from(saved, select, prove_first=fit is not None)
            if not isinstance(filled, _RestoreProblem):
                break
            self._damaged[saved.path] = filled
            if filled.is_damage and mendable == saved.generation:
                self._control.everywhere(self._quarantine_damaged)
                raise mark_raised_on_all(DamagedError(filled.text))
        newest = max((step_of_directory(path) for path in self._damaged), default=saved.step)
        passed_over = self._control.everywhere(self._quarantine_damaged)
        self._finish_restore(saved, filled)
        lost = newest - saved.step
        return RestoreResult(saved.step, saved.position, passed_over, lost, saved, saved.generation)

    def _fill_from(
        self, saved: SavedCheckpoint, select: EntrySelector, *, prove_first: bool
    ) -> dict[str, Tensor] | _RestoreProblem:
        """Fill from a save on all ranks; return what was filled, or what is wrong, the same on all."""
        with contextlib.ExitStack() as opened:

            def look() -> tuple[GenerationReader, dict[str, Tensor]]:
                source = opened.enter_context(self._open(saved))
                entries = select(str(saved.path), saved.world_size, source)
                if prove_first:
                    fill_from_chunks(source, entries, only_verify=True)
                return source, entries

            ready = self._attempt(saved, look)
            if isinstance(ready, _RestoreProblem):
                return ready
            self.is_partly_filled = True
            return self._attempt(saved, lambda: fill_from_chunks(*ready)) or ready[1]

    def _finish_restore(self, origin: SavedCheckpoint | CheckpointId, filled: dict[str, Tensor]) -> None:
        self.descent = descent_after(origin, self.attempt)
        if (random_state := filled.get(f"rng.{self._control.rank}")) is not None:
            set_rng_state(random_state)

    def _attempt(self, saved: SavedCheckpoint, action: Callable[[], _T]) -> _T | _RestoreProblem:
        """Run an action on a save on every rank; where it fails on one, return the problem on all."""
        value, problem = None, None
        try:
            with gc_paused():
                value = self.patiently(saved.path, action)
        except (UsageError, SiteError, OSError) as error:
            problem = _describe_error(error, saved.path)
        ranks = enumerate(self._control.allgather(problem))
        problems = [(rank, *problem) for rank, problem in ranks if problem]
        if not problems:
            return cast(_T, value)
        rank, kind, text, _ = next((problem for problem in problems if problem[1] == "usage"), problems[0])
        if kind == "usage":
            raise mark_raised_on_all(UsageError(text))
        damages = [problem for problem in problems if problem[1] == "damaged"]
        for _, _, text, chunk in damages[:_MAX_CONFIRMED_DAMAGES]:
            if self._control.everywhere(functools.partial(self._is_damaged, saved, chunk)):
                return _RestoreProblem(text, is_confirmed=True)
        where = f"rank {rank}: " if rank else ""
        note = "; rank 0 finds nothing wrong with it there" if damages else ""
        return _RestoreProblem(f"{where}{text}{note}", is_confirmed=False, is_damage=kind != "unreadable")

    def _is_damaged(self, saved: SavedCheckpoint, chunk: list[Any] | None) -> bool:
        """Whether rank 0 sees the damage that another rank has reported, of a chunk or of the whole."""
        try:
            with GenerationReader(saved) as generation:
                if chunk is not None:
                    (name, dtype, *boxes), place = chunk
                    piece = ChunkSpec(name, dtype, *map(tuple, boxes))
                    generation.read(piece, ChunkLocation(*place), memoryview(bytearray(piece.size_bytes)))
        except MissingFileError:
            return False
        except DamagedError:
            return True
        return False

    def load_from(
        self,
        source: ChunkSource,
        stamp: CheckpointId,
        state: dict[str, Tensor],
        expected: dict[str, tuple[int, ...]],
        fit: EntrySelector | None = None,
        *,
        passed_over: Sequence[str] = (),
        lost_steps: int = 0,
    ) -> RestoreResult:
        """Fill the state from a chosen generation, wherever its chunks come from; see `restore`.

        SiteError on every rank where one cannot load it, or has loaded another generation.
        """
        problem, entries = None, dict[str, Tensor]()
        self.is_partly_filled = False
        select = fit or select_whole_state(state, expected, self._control)
        try:
            with gc_paused():
                entries = select(f"step {stamp.step}", stamp.world_size, source)
                self.is_partly_filled = True
                fill_from_chunks(source, entries)
        except (UsageError, SiteError, OSError) as error:
            problem = ["usage" if isinstance(error, UsageError) else "damaged", str(error)]
        ranks = self._control.allgather([stamp.step, stamp.generation, problem])
        for kind, text in [problem for *_, problem in ranks if problem]:
            raise mark_raised_on_all(UsageError(text) if kind == "usage" else SiteError(text))
        for rank, (step, generation, _) in enumerate(ranks):
            if (step, generation) != (ranks[0][0], ranks[0][1]):
                words = f"rank {rank} has loaded step {step} ({generation}), rank 0 {ranks[0][0]}"
                raise mark_raised_on_all(SiteError(words))
        self._finish_restore(stamp, entries)
        return RestoreResult(
            stamp.step, stamp.position, list(passed_over), lost_steps, None, stamp.generation
        )

    def choose(self) -> list[Any] | None:
        """Choose, on rank 0, the newest save of the run's line that cheap checks do not find damaged.

        UsageError where there are only other runs' saves.
        """
        saves, unreadable = self._read_saves()
        sorted_saves = sort_checkpoints(self.root, saves)
        lost = {save.path: problem for save in unreadable if (problem := self._problem_of(save))}
        for saved in reversed(sorted_saves.line):
            if saved.path in self._damaged or saved.generation in self.avoided:
                continue
            problem = self._confirmed_problem(saved)
            if problem is None:
                self._damaged |= {
                    path: bad for path, bad in lost.items() if step_of_directory(path) >= saved.step
                }
                return _encode_saved(saved)
            self._damaged[saved.path] = problem
        self._damaged |= lost
        if not self._damaged:
            refuse_foreign_checkpoints(self.root, sorted_saves)
            return None
        newest = next(iter(self._damaged.values()))
        raise SiteError(
            f"{self.root}: every save is damaged, the newest: {newest.text}; restore a copy, or remove them"
            " all to start from the beginning"
        )

    def _read_saves(self) -> tuple[list[SavedCheckpoint], list[UnreadableCheckpoint]]:
        """Return what is committed, reading up to three times where a record is not visible yet."""
        for _ in range(_READ_TRIES - 1):
            saves, unreadable = read_saved_checkpoints(self.root)
            if all(save.is_seen for save in unreadable):
                return saves, unreadable
            time.sleep(_PAUSE_S)
        return read_saved_checkpoints(self.root)

    def _confirmed_problem(self, saved: SavedCheckpoint | UnreadableCheckpoint) -> _RestoreProblem | None:
        """Apply the cheap checks, up to three times where something is not visible yet."""
        for _ in range(_READ_TRIES):
            problem = self._problem_of(saved)
            if problem is None or problem.is_confirmed or not saved.path.exists():
                return problem
            time.sleep(_PAUSE_S)
            saved = read_saved_checkpoint(saved.path) or saved
        return problem

    def _problem_of(self, saved: SavedCheckpoint | UnreadableCheckpoint) -> _RestoreProblem | None:
        """Check record, manifest, sizes, and the beginnings of all parts."""
        if isinstance(saved, UnreadableCheckpoint):
            return _RestoreProblem(f"{saved.path}: is damaged: {saved.problem}", is_confirmed=saved.is_seen)
        try:
            # A load that follows need not read the manifest again.
            self._opened = {saved.path: GenerationReader(saved)}
        except DamagedError as error:
            words = f"{saved.path}: is damaged: {str(error).removeprefix(f'{saved.path}/')}"
            return _RestoreProblem(words, is_confirmed=not isinstance(error, MissingFileError))
        except OSError as error:
            return _RestoreProblem(
                f"{saved.path}: cannot be read: {error}", is_confirmed=False, is_damage=False
            )
        return None

    def _quarantine_damaged(self) -> list[str]:
        """Set aside, on rank 0, the saves that are proved damaged; return all problems found.

        A save stays where it is in a directory that is read-only or another user's.
        """
        passed_over = []
        for path, problem in list(self._damaged.items()):
            stays = ""
            if problem.is_confirmed:
                try:
                    if self.root.stat().st_uid != os.geteuid():
                        raise PermissionError(errno.EPERM, "the directory is another user's")
                    quarantine_generation(path)
                    del self._damaged[path]
                except FileNotFoundError:  # it was removed meanwhile
                    del self._damaged[path]
                except OSError as error:
                    stays = f"; it stays where it is: {error.strerror}"
            passed_over.append(problem.text + stays)
        return passed_over

    def _open(self, saved: SavedCheckpoint) -> GenerationReader:
        """Open a save on this rank, which may see it later than rank 0 does."""
        if (opened := self._opened.pop(saved.path, None)) is not None:
            return opened
        for _ in range(_OPEN_TRIES - 1):
            with contextlib.suppress(MissingFileError, OSError):
                return GenerationReader(saved)
            time.sleep(_PAUSE_S)
        return GenerationReader(saved)


@dataclass(frozen=True)
class _RestoreProblem:
    """Why a save is passed over."""

    text: str
    is_confirmed: bool
    """Whether its bytes are wrong, as rank 0 sees too, and not only unreachable for now."""
    is_damage: bool = True
    """Whether parts on other nodes might complete it."""


def _describe_error(error: Exception, path: Path) -> list[Any]:
    """What is wrong with a save, for other ranks: the kind, a message, and the damaged chunk if any."""
    if isinstance(error, MissingFileError):
        return ["missing", str(error), None]
    if isinstance(error, DamagedError):
        return ["damaged", str(error), error.chunk]
    if isinstance(error, OSError):
        return ["unreadable", f"{path}: {error}", None]
    return ["usage" if isinstance(error, UsageError) else "unreadable", str(error), None]


def _encode_saved(saved: SavedCheckpoint) -> list[str]:
    return [str(saved.path), render_commit_record(saved)]


def _decode_saved(encoded: list[str]) -> SavedCheckpoint:
    saved = parse_commit_record(Path(encoded[0]), encoded[1])
    assert isinstance(saved, SavedCheckpoint)
    return saved
