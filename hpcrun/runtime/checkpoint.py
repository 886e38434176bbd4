"""Save and resume in the run directory: what all ranks agree on around the format of hpcrun.checkpoint.

Ranks agree through their control alone: training's process groups see nothing of a save.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrun.checkpoint.commit import Draft, begin, commit, discard, retire, set_aside
from hpcrun.checkpoint.format import DamagedError, Part, collect, render_tensors, structure_digest
from hpcrun.checkpoint.read import Generation, read_tail
from hpcrun.checkpoint.write import write_part
from hpcrun.errors import SiteError, UsageError
from hpcrun.runtime import torchformat
from hpcrun.runtime.control import Control
from hpcrun.runtime.planning import WritePlan, dtype_name, load_into, plan_write, structure_key
from hpcrun.specs.saves import Saved, Unreadable, read_saves, saved_steps, step_of


@dataclass(frozen=True)
class Restored:
    """The save that a run goes on from, and what is wrong with newer ones."""

    saved: Saved
    passed_over: list[str]
    lost_steps: int
    """Steps between this save and the newest one passed over."""


class Checkpointer:
    """Saves and restores the training state of all ranks together."""

    def __init__(self, checkpoints: Path, control: Control, *, attempt: int, keep: int) -> None:
        self._root, self._control, self._attempt, self._keep = checkpoints, control, attempt, keep
        self._plan: WritePlan | None = None
        self._here: dict[int, Path] = {}
        self._damaged: dict[Path, _Problem] = {}
        self._opened: dict[Path, Generation] = {}

    def newest(self) -> Saved | None:
        """The newest committed step, the same answer on every rank."""
        found = self._control.everywhere(lambda: [_plain(saved) for saved in saved_steps(self._root)[-1:]])
        return _saved(found[0]) if found else None

    def save(self, step: int, position: int, state: dict[str, Tensor]) -> Path:
        """Write the state of a step; every rank returns when it is committed and durable.

        It fails as a whole: SiteError on every rank, and nothing is left of it.
        """
        if step in self._here:
            return self._here[step]
        aside, final, generation = self._control.everywhere(lambda: self._begin(step))
        draft = Draft(Path(aside), Path(final), bytes.fromhex(generation))
        entries = state | {f"rng.{self._control.rank}": _rng_state()}
        plan = self._plan_for(entries)
        outcome: list[Any]
        try:
            contents = plan.contents(entries)
            where: dict[str, int] = {"file": plan.file, "start": plan.start}
            part = write_part(
                draft.file(plan.file), draft.generation, self._control.rank, plan.pieces, contents, **where
            )
            outcome = [None, *astuple(part)]
        except OSError as error:
            outcome = [str(error)]
        outcomes = self._control.allgather(outcome)
        facts = {"step": step, "position": position}
        self._control.everywhere(lambda: self._commit(draft, plan, outcomes, facts))
        self._here[step] = draft.final
        return draft.final

    def _begin(self, step: int) -> list[str]:
        draft = begin(self._root, step, self._attempt)
        return [str(draft.aside), str(draft.final), draft.generation.hex()]

    def _plan_for(self, entries: dict[str, Tensor]) -> WritePlan:
        """The plan of the last save, unless some rank's structure has changed since."""
        key = structure_key(entries)
        known = self._plan is not None and self._plan.key == key
        if self._control.agree(0 if known else 1) or self._plan is None:
            self._plan = plan_write(entries, self._control, key)
        return self._plan

    def _commit(
        self, draft: Draft, plan: WritePlan, outcomes: list[list[Any]], facts: dict[str, int]
    ) -> None:
        """On rank 0, when all have written: commit, and retire what is no longer wanted."""
        try:
            for rank, (problem, *_) in enumerate(outcomes):
                if problem:
                    raise SiteError(f"{self._root}: rank {rank} cannot write step {facts['step']}: {problem}")
            parts = [Part(*fields) for _, *fields in outcomes]
            if plan.tensors is None:
                tensors = collect(
                    read_tail(draft.file(part.file), part, number, draft.generation)
                    for number, part in enumerate(parts)
                )
                plan.structure, plan.tensors = structure_digest(tensors), render_tensors(tensors)
            world: dict[str, int] = {"world_size": self._control.size, "attempt": self._attempt}
            commit(draft, parts, plan.tensors, plan.structure, **facts, **world)
        except (OSError, SiteError):
            discard(draft)
            raise
        retire(self._root, self._keep, self._damaged)

    def restore(self, state: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> Restored | None:
        """Fill the state's tensors from the newest save that proves whole, whatever layout wrote it.

        `expected` names every tensor of the whole job with its whole shape; nothing else may be stored. A
        damaged save is passed over, by all ranks or none, and set aside once another one is loaded. Random
        state comes last. None where nothing was saved; SiteError where no save is whole.
        """
        while True:
            with _no_collection():
                chosen = self._control.everywhere(self.choose)
            if chosen is None:
                return None
            saved = _saved(chosen)
            problem, random_state = None, None
            try:
                with _no_collection():
                    random_state = self._load(saved, state, expected)
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
        self._here[saved.step] = saved.path
        newest = max((step_of(path) for path in self._damaged), default=saved.step)
        passed_over = self._control.everywhere(self._set_damaged_aside)
        if random_state is not None:
            _set_rng_state(random_state)
        return Restored(saved, passed_over, newest - saved.step)

    def choose(self) -> list[Any] | None:
        """On rank 0: the newest save (its fields) that was not found damaged, as far as cheap checks tell."""
        saves, unreadable = read_saves(self._root)
        found: list[Saved | Unreadable] = [*saves, *unreadable]
        for one in sorted(found, key=lambda one: step_of(one.path), reverse=True):
            if one.path in self._damaged:
                continue
            problem = self._problem_of(one)
            if problem is None:
                assert isinstance(one, Saved)
                return _plain(one)
            self._damaged[one.path] = problem
        if not self._damaged:
            return None
        newest = next(iter(self._damaged.values()))
        raise SiteError(
            f"{self._root}: every save is damaged, the newest: {newest.text}; restore a copy, or remove them"
            " all to start from the beginning"
        )

    def _problem_of(self, saved: Saved | Unreadable) -> _Problem | None:
        """What the cheap checks say: record, manifest, sizes, and the beginnings of all parts."""
        if isinstance(saved, Unreadable):
            return _Problem(f"{saved.path}: is damaged: {saved.problem}", True)
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

    def _load(self, saved: Saved, state: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> Any:
        """Fill the state from one save; returns this rank's random state, if that save has one that fits."""
        entries, mine, random_state = dict(state), f"rng.{self._control.rank}", _rng_state()

        def check(stored: dict[str, tuple[int, ...]]) -> None:
            _check_entries(saved, stored, expected)
            # Another kind of device keeps another kind of random state.
            if saved.world_size == self._control.size and stored.get(mine) == random_state.shape:
                entries[mine] = random_state

        if saved.format_version == 1:
            check(torchformat.stored_shapes(saved))
            torchformat.load(saved, entries)
        else:
            with self._opened.pop(saved.path, None) or Generation(saved) as generation:
                check({name: tensor.shape for name, tensor in generation.manifest.tensors.items()})
                _check_types(generation, entries)
                load_into(generation, entries)
        return entries.get(mine)


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
    saved: Saved, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    """Strict both ways: a tensor too many or too few means that the job is not the one that was saved."""
    there = {name: shape for name, shape in stored.items() if not name.startswith("rng.")}
    for verb, names in (
        ("lacks", sorted(expected.keys() - there.keys())),
        ("also holds", sorted(there.keys() - expected.keys())),
        ("has another shape of", sorted(n for n in expected if there.get(n, expected[n]) != expected[n])),
    ):
        _refuse(saved, verb, names)


def _check_types(generation: Generation, entries: dict[str, Tensor]) -> None:
    stored = generation.manifest.tensors
    names = [name for name, tensor in entries.items() if stored[name].dtype != dtype_name(tensor)]
    _refuse(generation.saved, "has another type of", names)


def _refuse(saved: Saved, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UsageError(
            f"{saved.path}: {verb} {names[0]}{more}; was the model changed?"
            " Resume with the model of the run, or start a new run with model.weights"
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """A manifest is many small objects, none of them garbage; looking for some takes a while."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rng_state() -> Tensor:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def _set_rng_state(state: Tensor) -> None:
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
