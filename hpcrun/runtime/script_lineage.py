"""Decides whether a script may save in a directory, and what its saves descend from.

A directory gets its identity at its first save, from one rank. A start that loads continues from the save
that it has loaded. In a directory that has saves, one that trains without loading is refused unless it says
`start="new"`, which begins a line of its own, or `start="resume"`, which continues from the newest save
without loading it. A lease shows whether another process saves there at the same time.
"""

from __future__ import annotations

import atexit
import operator
import os
import weakref
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcrun.checkpoint.os_errors import explain_os_error
from hpcrun.checkpoint.writer_lease import WriterLease, find_restart_identity
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.runtime.control import Control
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
from hpcrun.specs.branch import make_copy_independent
from hpcrun.specs.descent import descent_after
from hpcrun.specs.identity import RunIdentity, new_run_id, read_run_identity
from hpcrun.specs.records import read_json
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import MAX_COUNT, read_saved_checkpoints, resumable_checkpoints, sort_checkpoints

StartMode = Literal["resume", "new"]
_saved_by_this_process: set[Path] = set()
"""Directories that this process has saved in: its next Checkpointer there continues from that."""


@dataclass(frozen=True)
class StartState:
    """What a start finds in its directory, the same on every rank."""

    run_ids: list[str]
    """The identity that its saves will have, and those of the runs that it was copied from."""
    attempt: int
    """One more than any that has saved; inside a run the run's own."""
    used: str = ""
    """What is saved there, for messages; empty where nothing is."""
    newest: int = -1
    """The newest step of the line that it may continue."""
    descent: str = ""
    """The descent of saves that continue from that step."""


def read_start_state(run: RunDir, attempt: int | None) -> StartState:
    """Read the state of a directory, without writing. `attempt`: of the run that the directory belongs to."""
    identity = read_run_identity(run.path) if run.sweep_of_element is None else None
    if identity is not None and not identity.is_at(
        run.path
    ):  # a copy, which gets its own identity when it saves
        run_ids = [new_run_id(), identity.run_id, *identity.copied_from]
    elif identity is not None or attempt is not None:
        run_ids = [*run.run_ids]
    else:
        run_ids = [new_run_id()]
    if run.sweep_of_element is None:
        run.assume(run_ids[0], run_ids[1:])
    saves, unreadable = read_saved_checkpoints(run.checkpoints)
    number = attempt or max((saved.attempt for saved in saves), default=0) + 1
    if not saves and not unreadable:
        return StartState(run_ids, number)
    line = sort_checkpoints(run.checkpoints, saves).line
    if not line:
        count = len(saves) + len(unreadable)
        return StartState(run_ids, number, f"{count} saves that are not this run's or damaged")
    used = f"saves up to step {line[-1].step}"
    return StartState(run_ids, number, used, line[-1].step, descent_after(line[-1], number))


class ScriptLineage:
    """The line of saves that a script's Checkpointer is on; all ranks call each method alike."""

    def __init__(
        self,
        run: RunDir,
        control: Control,
        *,
        start: StartMode | None,
        attempt: int | None,
    ) -> None:
        """`attempt`: of the run that this script belongs to, if this is that run's directory."""
        if start not in (None, "resume", "new"):
            raise UsageError(f'Checkpointer: start: {start!r} is not known; use "resume" or "new"')
        self._run, self._control = run, control
        self._is_inside = attempt is not None
        fields = control.everywhere(lambda: asdict(read_start_state(run, attempt)))
        self.found = state = StartState(**fields)
        if run.sweep_of_element is None:
            run.assume(state.run_ids[0], state.run_ids[1:])
        # A run restarts its script: what an earlier attempt has saved is this start's own.
        self._start = None if start == "new" and attempt is not None and attempt > 1 else start
        if start is None and run.path in _saved_by_this_process:
            self._start = "resume"
        starter = os.environ.get(RUN_DIR_VARIABLE)
        number = int(os.environ.get(ATTEMPT_VARIABLE) or 1)
        self._restart_identity = find_restart_identity(os.environ, (starter, number) if starter else None)
        self._lease: WriterLease | None = None
        self._newest = state.newest if self._start == "resume" else -1
        self._may_save = not state.used or self._start is not None
        self._is_claimed = False
        self._watch = None if self._may_save else _TrainingStartGuard(self._refusal)

    @property
    def starts_fresh(self) -> bool:
        """Whether this start begins anew, whatever is saved already."""
        return self._start == "new"

    def serve(self, direct: DirectCheckpointer) -> None:
        """Take the checkpointer that writes the saves of this line."""
        if self._start == "resume":
            direct.descent = self.found.descent

    def begin_load(self) -> None:
        """Note that a load begins: training need not be refused any more."""
        self._stop_guard()

    def record_loaded(self, step: int | None) -> None:
        """Note the step that was loaded; None where nothing was saved."""
        self._newest = -1 if step is None else step
        if step is not None or not self.found.used:
            self._may_save = True

    @property
    def _refusal(self) -> str:
        return (
            f"{self._run.path}: has {self.found.used}, and this start has not loaded any; call load() first,"
            ' or say Checkpointer(…, start="new") to begin anew, or give another directory'
        )

    def claim(self) -> None:
        """Take the lease and the identity, before the first save; UsageError where another has them."""
        self._control.everywhere(self._claim_once)

    def agree(self, step: int) -> None:
        """Check that all ranks save this step, and adopt rank 0's newest step.

        Where an earlier save was interrupted, ranks may have got to different places in it.
        """
        if not self._may_save:
            raise UsageError(self._refusal)
        first, self._newest = self._control.everywhere(lambda: self._begin_save(step))
        if first != step:
            mine = f"rank {self._control.rank} on {self._control.node} saves step {step}"
            raise UsageError(f"Checkpointer.save: {mine}, rank 0 step {first}; all ranks save the same")

    def may_save(self, step: int, *, replace: bool) -> bool:
        """Whether to save this step: False where its save exists already, unless `replace`.

        UsageError for a step before one that this start has saved or loaded.
        """
        if step > self._newest:
            return True
        exists = self._control.everywhere(lambda: self._exists(step))
        if exists and replace:
            return True
        if step == self._newest:
            return not exists
        raise UsageError(
            f"Checkpointer.save: step {step} is not after step {self._newest}, which was saved or loaded"
            " before; count steps on over the whole training"
            + ("; replace=True replaces the save of this step" if exists else "")
        )

    def _begin_save(self, step: int) -> list[int]:
        """Check on rank 0 that this process may save; return its step, and the newest one so far."""
        self._claim_once()
        if self._lease is not None:
            self._lease.check()
        return [step, self._newest]

    def _claim_once(self) -> None:
        if not self._is_claimed:
            self._claim()
            self._is_claimed = True

    def might_exist(self, step: int) -> bool:
        """Whether a save of this step may exist, so that `may_save` looks for it."""
        return step <= self._newest

    def record_begun(self, step: int) -> None:
        """Note that a save of this step has begun."""
        _saved_by_this_process.add(self._run.path)
        self._newest = max(self._newest, step)

    def close(self) -> None:
        """Release the lease; nothing more will be saved."""
        self._stop_guard()
        if self._lease is not None:
            self._lease.release()
            atexit.unregister(self._lease.release)
            self._lease = None
        self._is_claimed = False

    def _stop_guard(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _exists(self, step: int) -> bool:
        """Whether the line of this start has a save of this step, on rank 0."""
        return any(
            saved.step == step and (not self.starts_fresh or saved.attempt == self.found.attempt)
            for saved in resumable_checkpoints(self._run.checkpoints)
        )

    def _claim(self) -> None:
        run = self._run
        if run.spec.exists() and not self._is_inside:
            raise UsageError(
                f"{run.path}: is the directory of a run of hpcrun, which saves there itself: only load from"
                " it here, and give a directory of its own for saves"
            )
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True, mode=0o700)
            lease = WriterLease(run.checkpoints, self._restart_identity)
            try:
                self._refuse_if_overtaken()
                if not self._is_inside:
                    self._identify()
            except (HpcrunError, OSError):
                lease.release()
                raise
        except OSError as error:
            raise SiteError(f"no save can be begun: {explain_os_error(error, run.checkpoints)}") from None
        self._lease = lease
        atexit.register(lease.release)

    def _refuse_if_overtaken(self) -> None:
        """UsageError where another start has saved since this one began: both have one attempt number."""
        saves = sort_checkpoints(self._run.checkpoints, read_saved_checkpoints(self._run.checkpoints)[0]).own
        others = [saved for saved in saves if saved.attempt >= self.found.attempt]
        if others and not self._is_inside:
            raise UsageError(
                f"{others[-1].path}: was saved by another start since this one began; start again to go on"
                " from there"
            )

    def _identify(self) -> None:
        """Give the directory its identity; of two starts at the same time, one is refused."""
        run, run_id = self._run, self.found.run_ids[0]
        identity = read_run_identity(run.path)
        if identity is None:
            record = read_json(run.job)
            run.identify(RunIdentity.new(run.path, run_id), **(record if isinstance(record, dict) else {}))
        elif identity.run_id != run_id and identity.run_id not in self.found.run_ids[1:]:
            raise UsageError(
                f"{run.path}: has become that of another start (run_id {identity.run_id}) since this one"
                " began; start again"
            )
        else:
            make_copy_independent(run, run_id)


@dataclass
class _TrainingStartGuard:
    """Refuses to let training begin, at the second step of an optimizer.

    The first step may be one that only makes the optimizer's state, for a load to fill.
    """

    refusal: str
    _seen: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._step)

    def end(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._seen:
            self.end()
            raise UsageError(self.refusal)
        self._seen.add(optimizer)


def parse_count(value: Any, what: str) -> int:
    """Return a step or another count, given as any integer type, as an int; UsageError for other values."""
    number: int | None = None
    is_truth = isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    is_many = isinstance(value, Tensor | np.ndarray) and value.ndim > 0
    if not is_truth and not is_many:
        try:
            number = operator.index(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
    if number is None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise UsageError(f"Checkpointer.save: {what}: {value!r} is of type {kind}; give an integer")
    if not 0 <= number < MAX_COUNT:
        wrong, allowed = "negative" if number < 0 else "too large", f"give one from 0 to {MAX_COUNT - 1}"
        raise UsageError(f"Checkpointer.save: {what}: {number} is {wrong}; {allowed}")
    return number
