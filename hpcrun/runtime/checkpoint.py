"""Save and resume in the run directory: what all ranks agree on around the format of hpcrun.checkpoint.

Ranks agree through their control alone: training's process groups see nothing of a save.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrun.checkpoint.commit import Draft, begin, commit, discard, retire, set_aside
from hpcrun.checkpoint.format import DamagedError, collect, render_tensors, structure_digest
from hpcrun.checkpoint.levels import Stamp
from hpcrun.checkpoint.oserrors import explain
from hpcrun.checkpoint.read import Generation, read_tail
from hpcrun.checkpoint.reader import ChunkSource
from hpcrun.checkpoint.restore.decide import key_of
from hpcrun.checkpoint.restore.holdings import no_collection
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.runtime import torchformat
from hpcrun.runtime.control import Control
from hpcrun.runtime.datafiles import DataFiles, Written, parts_of
from hpcrun.runtime.planning import WritePlan, dtype_name, load_into, plan_write, structure_key
from hpcrun.specs.checkpoint import DurableSpec
from hpcrun.specs.descent import descent_from
from hpcrun.specs.saves import Saved, read_saves, refuse_strangers, saved_steps, sort_saves, step_of

Fit = Callable[[str, int, ChunkSource], dict[str, Tensor]]
"""Looks at a state before it is loaded (its name for people, how many ranks wrote it, its chunks) and says
what is to be filled from it; UsageError where it does not do."""


@dataclass(frozen=True)
class Restored:
    """The state that a run goes on from, and what is wrong with newer ones."""

    step: int
    position: int
    passed_over: list[str]
    lost_steps: int
    """Steps between this state and the newest one passed over."""
    saved: Saved | None = None
    """Where it came from, if that is a save in the run directory."""
    generation: str = ""


class Checkpointer:
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
        self.root, self.attempt = checkpoints, attempt
        self.descent = ""
        """What this start has gone on from; its saves say so."""
        self._files = DataFiles(checkpoints, durable or DurableSpec(), control)
        self._control, self._keep, self._keep_every = control, keep, keep_every
        self._plan: WritePlan | None = None
        self._damaged: dict[Path, _Problem] = {}
        self._opened: dict[Path, Generation] = {}
        self.avoided: frozenset[str] = frozenset()
        """Saves that are whole and yet not to be gone on from."""

    def newest(self) -> Saved | None:
        """The newest committed step, the same answer on every rank."""
        found = self._control.everywhere(lambda: [_plain(saved) for saved in saved_steps(self.root)[-1:]])
        return _saved(found[0]) if found else None

    def save(self, step: int, position: int, state: dict[str, Tensor], *, beside: bool = False) -> Path:
        """Write the state of a step; every rank returns when it is committed and durable.

        A save of that step is replaced. It fails as a whole: SiteError on every rank, and nothing is left of
        it. `beside`: after a worker has failed to, out of its way.
        """
        aside, final, generation, laid_out = self._control.everywhere(lambda: self._begin(step, beside))
        draft = Draft(Path(aside), Path(final), bytes.fromhex(generation))
        entries = self.entries(state)
        plan = self._plan_for(entries)
        written = self._files.write(draft, plan, lambda: plan.contents(entries), laid_out=laid_out)
        facts = {"step": step, "position": position}
        self._control.everywhere(lambda: self._commit(draft, plan, written, facts))
        return draft.final

    def entries(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """All that is saved: the state, and the random state of this rank as it is now."""
        return state | {f"rng.{self._control.rank}": rng_state()}

    def _begin(self, step: int, beside: bool) -> list[Any]:
        try:
            draft = begin(self.root, step, self.attempt, beside=beside)
        except OSError as error:
            raise SiteError(f"step {step} cannot be written: {explain(error, self.root)}") from None
        return [str(draft.aside), str(draft.final), draft.generation.hex(), self._files.are_laid_out()]

    def _plan_for(self, entries: dict[str, Tensor]) -> WritePlan:
        """The plan of the last save, unless some rank's structure has changed since."""
        key = structure_key(entries)
        known = self._plan is not None and self._plan.key == key
        if self._control.agree(0 if known else 1) or self._plan is None:
            self._plan = plan_write(entries, self._control, key)
        return self._plan

    def _commit(self, draft: Draft, plan: WritePlan, written: list[Written], facts: dict[str, int]) -> None:
        """On rank 0, when all have written: commit, and retire what is no longer wanted."""
        try:
            for rank, one in enumerate(written):
                if one.problem:
                    said = f"rank {rank} cannot write step {facts['step']}: {one.problem}"
                    raise SiteError(f"{self.root}: {said}")
            parts = parts_of(written)
            draft = dataclasses.replace(draft, layout=self._files.layout(written))
            if plan.tensors is None:
                tensors = collect(
                    read_tail(draft.file(part.file), part, number, draft.generation)
                    for number, part in enumerate(parts)
                )
                plan.structure, plan.tensors = structure_digest(tensors), render_tensors(tensors)
            world: dict[str, int] = {"world_size": self._control.size, "attempt": self.attempt}
            more: dict[str, Any] = {"descent": self.descent, "warn": _warn}
            commit(draft, parts, plan.tensors, plan.structure, **facts, **world, **more)
        except OSError as error:
            discard(draft)
            raise SiteError(
                f"step {facts['step']} cannot be committed: {explain(error, self.root)}"
            ) from None
        except HpcrunError:
            discard(draft)
            raise
        for problem in retire(self.root, self._keep, self._damaged, keep_every=self._keep_every):
            _warn(problem)

    def restore(
        self,
        state: dict[str, Tensor],
        expected: dict[str, tuple[int, ...]],
        fit: Fit | None = None,
        *,
        mendable: str | None = None,
    ) -> Restored | None:
        """Fill the state's tensors from the newest save that proves whole, whatever layout wrote it.

        `expected` names every tensor of the whole job with its whole shape; nothing else may be stored. A
        damaged save is passed over, by all ranks or none, and set aside once another one is loaded. Random
        state comes last. None where nothing was saved; SiteError where no save is whole. With `fit` the state
        is whatever that finds fitting in the save, and random state is among it or is not loaded. `mendable`:
        a generation of which nodes hold parts; where it is damaged, it is for the supervisor to see whether
        they make it whole, before an older one is taken: DamagedError.
        """
        while True:
            with no_collection():
                chosen = self._control.everywhere(self.choose)
            if chosen is None:
                return None
            saved = _saved(chosen)
            problem, random_state = None, None
            try:
                with no_collection():
                    random_state = self._load(saved, state, expected, fit)
            except UsageError as error:
                problem = ["usage", str(error)]
            except SiteError as error:
                problem = ["damaged" if isinstance(error, DamagedError) else "unreadable", str(error)]
            except OSError as error:
                problem = ["unreadable", f"{saved.path}: {error}"]
            problems = [one for one in self._control.allgather(problem) if one]
            if not problems:
                break
            kind, text = problems[0]
            if kind == "usage":
                raise UsageError(text)
            self._damaged[saved.path] = _Problem(text, kind == "damaged")
            if kind == "damaged" and mendable == saved.generation:
                self._control.everywhere(self._set_damaged_aside)
                raise DamagedError(text)
        self.descent = descent_from(saved, self.attempt)
        newest = max((step_of(path) for path in self._damaged), default=saved.step)
        passed_over = self._control.everywhere(self._set_damaged_aside)
        if random_state is not None:
            set_rng_state(random_state)
        lost = newest - saved.step
        return Restored(saved.step, saved.position, passed_over, lost, saved, saved.generation)

    def load_from(
        self,
        source: ChunkSource,
        stamp: Stamp,
        state: dict[str, Tensor],
        expected: dict[str, tuple[int, ...]],
        fit: Fit | None = None,
        *,
        passed_over: Sequence[str] = (),
        lost_steps: int = 0,
    ) -> Restored:
        """Fill the state from a generation that somebody else has chosen, wherever its chunks come from.

        SiteError on every rank where one cannot load it, or was told of another generation.
        """
        problem, random_state = None, None
        try:
            with no_collection():
                where = f"step {stamp.step}"
                random_state = self._fill(source, where, stamp.world_size, state, expected, fit)
        except UsageError as error:
            problem = ["usage", str(error)]
        except (SiteError, OSError) as error:
            problem = ["damaged", str(error)]
        told = self._control.allgather([stamp.step, stamp.generation, problem])
        for kind, text in [one for *_, one in told if one]:
            raise UsageError(text) if kind == "usage" else SiteError(text)
        for rank, (step, generation, _) in enumerate(told):
            if (step, generation) != (told[0][0], told[0][1]):
                raise SiteError(f"rank {rank} has loaded step {step} ({generation}), rank 0 {told[0][0]}")
        self.descent = descent_from(stamp, self.attempt)
        if random_state is not None:
            set_rng_state(random_state)
        passed_by = list(passed_over)
        return Restored(stamp.step, stamp.position, passed_by, lost_steps, None, stamp.generation)

    def choose(self) -> list[Any] | None:
        """On rank 0: the newest save (its fields) that was not found damaged, as far as cheap checks tell.

        Of the line that the run is on; UsageError where there are other runs' saves alone.
        """
        saves, unreadable = read_saves(self.root)
        sorted_saves = sort_saves(self.root, saves)
        lost = {one.path: _Problem(f"{one.path}: is damaged: {one.problem}", True) for one in unreadable}
        for one in reversed(sorted_saves.line):
            if one.path in self._damaged or key_of(one) in self.avoided:
                continue
            problem = self._problem_of(one)
            if problem is None:
                self._damaged |= {path: bad for path, bad in lost.items() if step_of(path) >= one.step}
                return _plain(one)
            self._damaged[one.path] = problem
        self._damaged |= lost
        if not self._damaged:
            refuse_strangers(self.root, sorted_saves)
            return None
        newest = next(iter(self._damaged.values()))
        raise SiteError(
            f"{self.root}: every save is damaged, the newest: {newest.text}; restore a copy, or remove them"
            " all to start from the beginning"
        )

    def _problem_of(self, saved: Saved) -> _Problem | None:
        """What the cheap checks say: record, manifest, sizes, and the beginnings of all parts."""
        if saved.format_version == 1:
            return None
        try:
            # Whoever loads it next need not read its manifest again.
            self._opened = {saved.path: Generation(saved)}
        except DamagedError as error:
            return _Problem(f"{saved.path}: is damaged: {str(error).removeprefix(f'{saved.path}/')}", True)
        except OSError as error:
            return _Problem(f"{saved.path}: cannot be read: {error}", False)
        return None

    def _set_damaged_aside(self) -> list[str]:
        """On rank 0: take what is proved damaged out of the committed saves; returns all that was wrong."""
        passed_over = [problem.text for problem in self._damaged.values()]
        for path in [path for path, problem in self._damaged.items() if problem.is_proved]:
            with suppress(FileNotFoundError):  # somebody has cleaned up meanwhile
                set_aside(path)
            del self._damaged[path]
        return passed_over

    def _load(
        self,
        saved: Saved,
        state: dict[str, Tensor],
        expected: dict[str, tuple[int, ...]],
        fit: Fit | None,
    ) -> Any:
        """Fill the state from one save; returns this rank's random state, if that save has one that fits."""
        if saved.format_version == 1:
            if fit is not None:
                raise UsageError(f"{saved.path}: was written by an hpcrun before this one; export it")
            stored = torchformat.stored_shapes(saved)
            entries = self._wanted(str(saved.path), saved.world_size, stored, state, expected)
            torchformat.load(saved, entries)
            return entries.get(f"rng.{self._control.rank}")
        with self._opened.pop(saved.path, None) or Generation(saved) as generation:
            return self._fill(generation, str(saved.path), saved.world_size, state, expected, fit)

    def _fill(
        self,
        source: ChunkSource,
        where: str,
        world_size: int,
        state: dict[str, Tensor],
        expected: dict[str, tuple[int, ...]],
        fit: Fit | None,
    ) -> Any:
        if fit is not None:
            entries = fit(where, world_size, source)
        else:
            stored = {name: tensor.shape for name, tensor in source.manifest.tensors.items()}
            entries = self._wanted(where, world_size, stored, state, expected)
            _check_types(source, where, entries)
        load_into(source, entries)
        return entries.get(f"rng.{self._control.rank}")

    def _wanted(
        self,
        where: str,
        world_size: int,
        stored: dict[str, tuple[int, ...]],
        state: dict[str, Tensor],
        expected: dict[str, tuple[int, ...]],
    ) -> dict[str, Tensor]:
        """The state, if it is what is stored, and memory for this rank's random state, if there is some."""
        _check_entries(where, stored, expected)
        entries, mine, random_state = dict(state), f"rng.{self._control.rank}", rng_state()
        # Another kind of device keeps another kind of random state.
        if world_size == self._control.size and stored.get(mine) == random_state.shape:
            entries[mine] = random_state
        return entries


def load_weights(saved: Saved) -> dict[str, Tensor]:
    """The whole weights of a saved step on one process, by canonical name; needs no process group."""
    prefix = "model."
    if saved.format_version == 1:
        state = torchformat.load_whole(saved, prefix)
    else:
        with Generation(saved) as generation:
            state = {
                name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
                for name, tensor in generation.manifest.tensors.items()
                if name.startswith(prefix)
            }
            load_into(generation, state)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


@dataclass(frozen=True)
class _Problem:
    """Why a save is passed over."""

    text: str
    is_proved: bool
    """Its bytes are wrong, and not just out of reach for now."""


def _check_entries(
    where: str, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    """Strict both ways: a tensor too many or too few means that the job is not the one that was saved."""
    there = {name: shape for name, shape in stored.items() if not name.startswith("rng.")}
    for verb, names in (
        ("lacks", sorted(expected.keys() - there.keys())),
        ("also holds", sorted(there.keys() - expected.keys())),
        ("has another shape of", sorted(n for n in expected if there.get(n, expected[n]) != expected[n])),
    ):
        _refuse(where, verb, names)


def _check_types(source: ChunkSource, where: str, entries: dict[str, Tensor]) -> None:
    stored = source.manifest.tensors
    names = [name for name, tensor in entries.items() if stored[name].dtype != dtype_name(tensor)]
    _refuse(where, "has another type of", names)


def _refuse(where: str, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UsageError(
            f"{where}: {verb} {names[0]}{more}; was the model changed?"
            " Resume with the model of the run, or start a new run with model.weights"
        )


def _warn(text: str) -> None:
    """Of what is wrong beside a save that is none the worse for it."""
    sys.stderr.write(f"hpcrun: {text}\n")
    sys.stderr.flush()


def rng_state() -> Tensor:
    """The random state of this rank, of the CPU and of its GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def set_rng_state(state: Tensor) -> None:
    """Set what `rng_state` gave."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if state.numel() > size:
        torch.cuda.set_rng_state(state[size:])


def _plain(saved: Saved) -> list[Any]:
    path, *fields = astuple(saved)
    return [str(path), *fields]


def _saved(fields: list[Any]) -> Saved:
    path, *others, file_bytes = fields
    told = dict(zip((one.name for one in dataclasses.fields(Saved)), (Path(path), *others), strict=False))
    return Saved(**told, file_bytes=tuple(file_bytes))
