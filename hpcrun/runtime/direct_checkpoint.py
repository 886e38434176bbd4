"""Save and resume in the run directory: what all ranks agree on around the format of hpcrun.checkpoint.

Ranks agree through their control alone: training's process groups see nothing of a save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
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
from hpcrun.checkpoint.levels import GenerationId
from hpcrun.checkpoint.lustre.storage import find_mount
from hpcrun.checkpoint.os_errors import explain_os_error
from hpcrun.checkpoint.restore.inventory import gc_paused
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.runtime.control import Control
from hpcrun.runtime.data_files import DataFileWriter, PartResult, parts_by_rank
from hpcrun.runtime.random_state import rng_state, set_rng_state
from hpcrun.runtime.rank_alarm import mark_raised_on_all
from hpcrun.runtime.resharding import WritePlan, fill_from_chunks, plan_write, structure_key
from hpcrun.runtime.save_opening import EntrySelector, RestoreCandidate, RestoreTarget
from hpcrun.runtime.stderr_notes import write_stderr_line
from hpcrun.runtime.storage_wait import wait_for_storage
from hpcrun.specs.checkpoint import DurableSpec
from hpcrun.specs.descent import descent_after
from hpcrun.specs.saves import (
    SavedCheckpoint,
    UnreadableCheckpoint,
    read_saved_checkpoint,
    read_saved_checkpoints,
    refuse_foreign_checkpoints,
    resumable_checkpoints,
    sort_checkpoints,
    step_of_directory,
)

_T = TypeVar("_T")
_READ_TRIES, _OPEN_TRIES, _PAUSE_S = 3, 25, 0.2
"""A network file system may show a file a little later than it is there, and on one node than on another."""
_MAX_CONFIRMED_DAMAGES = 8
"""Damages that rank 0 looks at itself, until it has found one."""


@dataclass(frozen=True)
class RestoreResult:
    """The state that a run goes on from, and what is wrong with newer ones."""

    step: int
    position: int
    passed_over: list[str]
    lost_steps: int
    """Steps between this state and the newest one passed over."""
    saved: SavedCheckpoint | None = None
    """Where it came from, if that is a save in the run directory."""
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
    ) -> None:
        """`durable`: how files are to lie on a file system where one can say it."""
        # What this start has gone on from is in `descent`; its saves say so.
        self.root, self.attempt, self.descent = checkpoints, attempt, ""
        self._files = DataFileWriter(checkpoints, durable or DurableSpec(), control)
        self._control, self._keep, self._keep_every = control, keep, keep_every
        self._plan: WritePlan | None = None
        self._damaged: dict[Path, _RestoreProblem] = {}
        self._opened: dict[Path, GenerationReader] = {}
        self._on, self._step = find_mount(checkpoints).words, 0
        self.tell: Callable[[dict[str, Any]], None] | None = None
        """Takes, on rank 0, lines for metrics.jsonl."""
        self.is_partly_filled = False
        """By a load that has not come to its end."""
        self.avoided: frozenset[str] = frozenset()
        """Saves that are whole and yet not to be gone on from."""

    def newest(self) -> SavedCheckpoint | None:
        """The newest committed step, the same answer on every rank."""
        found = self._control.everywhere(
            lambda: [_saved_to_fields(saved) for saved in resumable_checkpoints(self.root)[-1:]]
        )
        return _saved_from_fields(found[0]) if found else None

    def patiently(self, path: Path, action: Callable[[], _T], limit_s: float | None = None) -> _T:
        """Do something with storage that may hang, and tell of it; SiteError after too long."""
        return wait_for_storage(f"{path} on {self._on}", action, self._report_slow, limit_s)

    def _report_slow(self, what: str, seconds: float) -> None:
        where = f"rank {self._control.rank} on {self._control.node}"
        why = f"{where} waits for {what}: no answer for {seconds:.0f} s"
        write_stderr_line(why)
        if self._control.rank == 0 and self.tell is not None:
            step = self._step
            record = {"kind": "save_stalled", "step": step, "level": "durable", "seconds": seconds}
            self.tell(record | {"why": why})

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

        A save of that step is replaced. It fails as a whole: SiteError on every rank, and nothing is left of
        it. `beside`: after a worker has failed to, out of its way. `limit_s`: for what storage is asked for
        at once.
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
        """All that is saved: the state, and the random state of this rank as it is now."""
        return state | {f"rng.{self._control.rank}": rng_state()}

    def _begin(self, step: int, beside: bool) -> list[Any]:
        try:
            draft = begin_generation(self.root, step, self.attempt, beside=beside)
        except OSError as error:
            raise SiteError(f"step {step} cannot be written: {explain_os_error(error, self.root)}") from None
        return [str(draft.aside), str(draft.final), draft.generation.hex(), self._files.can_set_layout()]

    def _plan_for(self, entries: dict[str, Tensor]) -> WritePlan:
        """The plan of the last save, unless some rank's structure has changed since."""
        key = structure_key(entries)
        known = self._plan is not None and self._plan.key == key
        if self._control.agree(0 if known else 1) or self._plan is None:
            self._plan = plan_write(entries, self._control, key)
        return self._plan

    def _commit(
        self, draft: GenerationDraft, plan: WritePlan, written: list[PartResult], facts: dict[str, int]
    ) -> None:
        """On rank 0, when all have written: commit, and retire what is no longer wanted."""
        try:
            for rank, one in enumerate(written):
                if one.problem:
                    said = f"rank {rank} cannot write step {facts['step']}: {one.problem}"
                    raise SiteError(f"{self.root}: {said}")
            parts = parts_by_rank(written)
            draft = dataclasses.replace(draft, layout=self._files.layout(written))
            if plan.tensors is None:
                tensors = collect_tensors(
                    read_part_tail(draft.file(part.file), part, number, draft.generation)
                    for number, part in enumerate(parts)
                )
                plan.structure, plan.tensors = compute_structure_digest(tensors), render_tensors(tensors)
            world: dict[str, Any] = {"world_size": self._control.size, "attempt": self.attempt, **facts}
            more: dict[str, Any] = {"descent": self.descent, "warn": write_stderr_line}
            commit_generation(draft, parts, plan.tensors, plan.structure, **world, **more)
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

        `expected` names every tensor of the whole job with its whole shape; nothing else may be stored. A
        damaged save is passed over, by all ranks or none, and set aside once another one is loaded. Random
        state comes last. None where nothing was saved; SiteError where no save is whole. With `fit` the state
        is whatever that finds fitting in the save, and random state is among it or is not loaded. `mendable`:
        a generation of which nodes hold parts; where it is damaged, it is for the supervisor to see whether
        they make it whole, before an older one is taken: DamagedError.
        """
        self.is_partly_filled = False
        while True:
            with gc_paused():
                chosen = self._control.everywhere(lambda: self.patiently(self.root, self.choose))
            if chosen is None:
                return None
            saved = _saved_from_fields(chosen)
            wanted = RestoreTarget(state, expected, self._control, rng_state(), fit)
            with contextlib.ExitStack() as opened:
                opening = RestoreCandidate(saved, wanted)
                found = self._attempt(saved, functools.partial(opening.look, self._open, opened))
                if found is None:
                    self.is_partly_filled = True
                    found = self._attempt(saved, opening.fill)
            if found is None:
                break
            self._damaged[saved.path] = found
            if found.is_damage and mendable == saved.generation:
                self._control.everywhere(self._quarantine_damaged)
                raise mark_raised_on_all(DamagedError(found.text))
        self.descent = descent_after(saved, self.attempt)
        newest = max((step_of_directory(path) for path in self._damaged), default=saved.step)
        passed_over = self._control.everywhere(self._quarantine_damaged)
        if opening.random_state is not None:
            set_rng_state(opening.random_state)
        lost = newest - saved.step
        return RestoreResult(saved.step, saved.position, passed_over, lost, saved, saved.generation)

    def _attempt(self, saved: SavedCheckpoint, action: Callable[[], None]) -> _RestoreProblem | None:
        """Do something with a save on every rank; what is wrong with it, the same on all."""
        problem: list[Any] | None = None
        try:
            with gc_paused():
                self.patiently(saved.path, action)
        except UsageError as error:
            problem = ["usage", str(error), None]
        except MissingFileError as error:
            problem = ["missing", str(error), None]
        except DamagedError as error:
            problem = ["damaged", str(error), error.chunk]
        except SiteError as error:
            problem = ["unreadable", str(error), None]
        except OSError as error:
            problem = ["unreadable", f"{saved.path}: {error}", None]
        told = self._control.allgather(problem)
        problems = [(rank, *one) for rank, one in enumerate(told) if one]
        if not problems:
            return None
        rank, kind, text, _ = next((one for one in problems if one[1] == "usage"), problems[0])
        if kind == "usage":
            raise mark_raised_on_all(UsageError(text))
        damages = [one for one in problems if one[1] == "damaged"]
        for _, _, text, chunk in damages[:_MAX_CONFIRMED_DAMAGES]:
            if self._control.everywhere(functools.partial(self._is_damaged, saved, chunk)):
                return _RestoreProblem(text, is_proved=True)
        where = f"rank {rank}: " if rank else ""
        more = "; rank 0 finds nothing wrong with it there" if damages else ""
        return _RestoreProblem(f"{where}{text}{more}", is_proved=False, is_damage=kind != "unreadable")

    def _is_damaged(self, saved: SavedCheckpoint, chunk: list[Any] | None) -> bool:
        """On rank 0: whether it sees the damage as well that another rank has told of."""
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
        stamp: GenerationId,
        state: dict[str, Tensor],
        expected: dict[str, tuple[int, ...]],
        fit: EntrySelector | None = None,
        *,
        passed_over: Sequence[str] = (),
        lost_steps: int = 0,
    ) -> RestoreResult:
        """Fill the state from a generation that somebody else has chosen, wherever its chunks come from.

        SiteError on every rank where one cannot load it, or was told of another generation.
        """
        problem, random_state = None, None
        self.is_partly_filled = False
        try:
            with gc_paused():
                where = f"step {stamp.step}"
                wanted = RestoreTarget(state, expected, self._control, rng_state(), fit)
                entries = wanted.select_entries(source, where, stamp.world_size)
                self.is_partly_filled = True
                fill_from_chunks(source, entries)
                random_state = entries.get(f"rng.{self._control.rank}")
        except UsageError as error:
            problem = ["usage", str(error)]
        except (SiteError, OSError) as error:
            problem = ["damaged", str(error)]
        told = self._control.allgather([stamp.step, stamp.generation, problem])
        for kind, text in [one for *_, one in told if one]:
            raise mark_raised_on_all(UsageError(text) if kind == "usage" else SiteError(text))
        for rank, (step, generation, _) in enumerate(told):
            if (step, generation) != (told[0][0], told[0][1]):
                words = f"rank {rank} has loaded step {step} ({generation}), rank 0 {told[0][0]}"
                raise mark_raised_on_all(SiteError(words))
        self.descent = descent_after(stamp, self.attempt)
        if random_state is not None:
            set_rng_state(random_state)
        passed_by = list(passed_over)
        return RestoreResult(stamp.step, stamp.position, passed_by, lost_steps, None, stamp.generation)

    def choose(self) -> list[Any] | None:
        """On rank 0: the newest save (its fields) that was not found damaged, as far as cheap checks tell.

        Of the line that the run is on; UsageError where there are other runs' saves alone.
        """
        saves, unreadable = self._read_saves()
        sorted_saves = sort_checkpoints(self.root, saves)
        lost = {one.path: problem for one in unreadable if (problem := self._problem_of(one))}
        for one in reversed(sorted_saves.line):
            if one.path in self._damaged or one.generation in self.avoided:
                continue
            problem = self._confirmed_problem(one)
            if problem is None:
                self._damaged |= {
                    path: bad for path, bad in lost.items() if step_of_directory(path) >= one.step
                }
                return _saved_to_fields(one)
            self._damaged[one.path] = problem
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
        """What is committed, on a second and third look where a record is not there yet."""
        for _ in range(_READ_TRIES - 1):
            saves, unreadable = read_saved_checkpoints(self.root)
            if all(one.is_seen for one in unreadable):
                return saves, unreadable
            time.sleep(_PAUSE_S)
        return read_saved_checkpoints(self.root)

    def _confirmed_problem(self, found: SavedCheckpoint | UnreadableCheckpoint) -> _RestoreProblem | None:
        """What the cheap checks say, also on a second and third look where something is not there."""
        for _ in range(_READ_TRIES):
            problem = self._problem_of(found)
            if problem is None or problem.is_proved or not found.path.exists():
                return problem
            time.sleep(_PAUSE_S)
            found = read_saved_checkpoint(found.path) or found
        return problem

    def _problem_of(self, saved: SavedCheckpoint | UnreadableCheckpoint) -> _RestoreProblem | None:
        """What the cheap checks say: record, manifest, sizes, and the beginnings of all parts."""
        if isinstance(saved, UnreadableCheckpoint):
            return _RestoreProblem(f"{saved.path}: is damaged: {saved.problem}", is_proved=saved.is_seen)
        try:
            # Whoever loads it next need not read its manifest again.
            self._opened = {saved.path: GenerationReader(saved)}
        except DamagedError as error:
            words = f"{saved.path}: is damaged: {str(error).removeprefix(f'{saved.path}/')}"
            return _RestoreProblem(words, is_proved=not isinstance(error, MissingFileError))
        except OSError as error:
            return _RestoreProblem(f"{saved.path}: cannot be read: {error}", is_proved=False, is_damage=False)
        return None

    def _quarantine_damaged(self) -> list[str]:
        """On rank 0: take what is proved damaged out of the committed saves; returns all that was wrong.

        It stays where it is in a directory that is read-only, or somebody else's.
        """
        passed_over = []
        for path, problem in list(self._damaged.items()):
            stays = ""
            if problem.is_proved:
                try:
                    if self.root.stat().st_uid != os.geteuid():
                        raise PermissionError(errno.EPERM, "the directory is another user's")
                    quarantine_generation(path)
                    del self._damaged[path]
                except FileNotFoundError:  # somebody has cleaned up meanwhile
                    del self._damaged[path]
                except OSError as error:
                    stays = f"; it stays where it is: {error.strerror}"
            passed_over.append(problem.text + stays)
        return passed_over

    def _open(self, saved: SavedCheckpoint) -> GenerationReader:
        """A save for reading, on this rank; it may be seen here a little later than rank 0 has seen it."""
        known = self._opened.pop(saved.path, None)
        for left in reversed(range(_OPEN_TRIES) if known is None else ()):
            try:
                return GenerationReader(saved)
            except (MissingFileError, OSError):
                if not left:
                    raise
            time.sleep(_PAUSE_S)
        assert known is not None
        return known


def load_weights(saved: SavedCheckpoint) -> dict[str, Tensor]:
    """The whole weights of a saved step on one process, by canonical name; needs no process group."""
    prefix = "model."
    with GenerationReader(saved) as generation:
        state = {
            name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for name, tensor in generation.manifest.tensors.items()
            if name.startswith(prefix)
        }
        fill_from_chunks(generation, state)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


@dataclass(frozen=True)
class _RestoreProblem:
    """Why a save is passed over."""

    text: str
    is_proved: bool
    """Its bytes are wrong, as rank 0 sees them too, and not just out of reach for now."""
    is_damage: bool = True
    """It may be for want of something that is there elsewhere."""


def _saved_to_fields(saved: SavedCheckpoint) -> list[Any]:
    path, *fields = astuple(saved)
    return [str(path), *fields]


def _saved_from_fields(fields: list[Any]) -> SavedCheckpoint:
    path, *others, file_bytes = fields
    told = dict(
        zip((one.name for one in dataclasses.fields(SavedCheckpoint)), (Path(path), *others), strict=False)
    )
    return SavedCheckpoint(**told, file_bytes=tuple(file_bytes))
