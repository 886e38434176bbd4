"""`hpcrun.Checkpointer`: saves and loads the state of any training script, under any launcher.

    with hpcrun.Checkpointer("runs/mine") as saves:
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        step = saves.load(state) or 0
        saves.fence_before(optimizer)
        ...
            stops = saves.should_stop()
            saves.save(step, state, wait=stops)
            if stops:
                break
    sys.exit(75 if stops else 0)

A save goes to the memory of the node and from there, while training continues, to the node's disk, to the
directory and to an object store. All ranks call each method alike; an error of one rank is raised on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import torch

from hpcrun.runtime.async_checkpoint import AsyncCheckpointer
from hpcrun.runtime.collective_verbs import (
    add_partial_load_warning,
    begin_collective_init,
    collective_init,
    collective_method,
    is_raised_on_all,
    leave_collectives,
)
from hpcrun.runtime.connect import open_control
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
from hpcrun.runtime.quiet_exit import await_idle_threads_at_exit
from hpcrun.runtime.random_state import rng_state, set_rng_state
from hpcrun.runtime.restore import restore_from_plan
from hpcrun.runtime.script_lineage import ScriptLineage, StartMode, parse_count
from hpcrun.runtime.script_setup import build_checkpoint_spec, find_script_run
from hpcrun.runtime.state_loading import StateLoader
from hpcrun.runtime.state_tree import flatten_state, pack_tree
from hpcrun.runtime.stderr_notes import write_stderr_line
from hpcrun.runtime.stop_requests import StopRequests
from hpcrun.runtime.worker_endpoint import AgentWorker, OwnWorker, await_earlier_workers
from hpcrun.specs.metrics import (
    Metric,
    SaveFailedMetric,
    SaveSkippedMetric,
    SaveUnchangedMetric,
    metric_as_json,
    metric_kind,
)


class Checkpointer:
    """Saves and loads the state of a training script, all ranks together.

    Use it as a context manager, or call `close` at the end. All ranks call each method alike. Arguments and
    directories that are wrong raise UsageError, missing or full storage SiteError, and an error of one rank
    is raised on all others as RanksDiedError with that rank's message.
    """

    _async_checkpointer: AsyncCheckpointer | None = None
    _is_closing = False
    _stops: StopRequests | None = None

    @collective_init
    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        start: StartMode | None = None,
        memory: int | None = None,
        on_record: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> None:
        """Open a directory for saves, on all ranks together.

        Args:
            directory: Saves go to `checkpoints/` in it. Inside a run of hpcrun the default is that run's
                directory; elsewhere it is required. Only one world of ranks at a time may save in it.
            start: What to do where the directory has saves. By default `load` continues from the newest, and
                training or saving before `load` is refused. "new": `load` returns None and a new line of
                saves begins; the others stay until `hpcrun ckpt gc`. "resume": saves continue from the newest
                one, which the script restores by its own means.
            memory: Slots for states in the node's memory, for each rank; 2 where neither this nor the run's
                job says otherwise. With 0 every `save` returns only when it is stored.
            on_record: Called on rank 0 with each record that a run's metrics.jsonl would get.
            options: Keys of a job's `checkpoint` section: keep, keep_every, local, durable, object,
                on_backlog. Defaults are those of the run's own job.

        Raises:
            UsageError: An option is wrong, or the directory cannot be used like this.
            SiteError: Nothing can be saved there.
        """
        await_idle_threads_at_exit()
        self._control = begin_collective_init(open_control(os.environ))
        script = find_script_run(directory, os.environ)
        run = self._run = script.run
        slots = {} if memory is None else {"memory": memory}
        self._spec = build_checkpoint_spec({"memory": 2} | script.options | slots, options)
        if not script.has_agent:
            await_earlier_workers(run, self._control)
        line = ScriptLineage(run, self._control, start=start, attempt=script.attempt)
        self._line, attempt = line, line.found.attempt
        self._direct = DirectCheckpointer(
            run.checkpoints,
            self._control,
            attempt=attempt,
            keep=self._spec.keep,
            keep_every=self._spec.keep_every,
            durable=self._spec.durable,
            record=self._record,
        )
        line.serve(self._direct)
        self._on_record = on_record
        if self._spec.memory:
            home: AgentWorker | OwnWorker
            if script.has_agent:
                home = AgentWorker(os.environ)
            else:
                home = OwnWorker(run.path, self._spec, self._control, attempt)
                self._warn_of_missing_tiers()
            home.begin(self._control)
            self._async_checkpointer = AsyncCheckpointer(
                self._spec, self._direct, self._control, home, self._record
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The other ranks may never get here: tell them, and release everything alone.
        leave_collectives(self._control, error)
        self._let_go()

    def _failed(self, error: BaseException) -> None:
        if is_raised_on_all(error):
            self._is_closing = False  # a refused close has not begun
        elif self._async_checkpointer is not None:
            if self._is_closing:  # other ranks may have closed everything already
                self._async_checkpointer.release_locally()
                self._async_checkpointer = None
            else:
                self._async_checkpointer.reset_after_failure()
        if self._direct.is_partly_filled:
            self._direct.is_partly_filled = False
            add_partial_load_warning(error)

    def _let_go(self) -> None:
        behind, self._async_checkpointer = self._async_checkpointer, None
        if behind is not None:
            behind.release_locally()
        if self._stops is not None:
            self._stops.close()
        if hasattr(self, "_line"):  # what fails to open may have none yet
            self._line.close()

    @collective_method("save")
    def save(
        self,
        step: SupportsIndex,
        state: Mapping[str, Any],
        position: SupportsIndex = 0,
        *,
        wait: bool = False,
        replace: bool = False,
    ) -> bool:
        """Begin to save a state, which must not change until `fence`.

        Args:
            step: The training step, growing from save to save.
            state: Nested dicts and lists of tensors, plain values, and objects with state_dict() and
                load_state_dict(). A name stands for one tensor: what several ranks have under it is taken to
                be equal and stored once. Plain values are saved as each rank has them now.
            position: Any count, such as of samples; stored with the save.
            wait: Return only when the save is in the directory.
            replace: Replace an existing save of this step once the new one is complete. By default the step
                saved or loaded last is skipped with a note.

        Returns:
            Whether the save was begun; False where it was skipped.

        Raises:
            UsageError: The step is smaller than an earlier one, or the state cannot be saved.
            SiteError: With `wait`, on all ranks: the save has not reached the directory.
        """
        step, position = parse_count(step, "step"), parse_count(position, "position")
        if not self._may_save(step, replace):
            return False
        flat = flatten_state(state)
        entries = flat.tensors | {self._own: pack_tree(flat.tree)}
        self._line.record_begun(step)
        if self._async_checkpointer is None:
            self._direct.save(step, position, entries)
            return True
        if wait:
            self._async_checkpointer.save_durably(step, position, entries)
            return True
        return self._async_checkpointer.save(step, position, entries)

    @collective_method("fence", agrees=False)
    def fence(self) -> None:
        """Wait until the state being saved may change again; call it before the optimizer's step."""
        if self._async_checkpointer is not None:
            self._async_checkpointer.fence()

    @collective_method("fence")
    def fence_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `fence` before every step of an optimizer from now on.

        Raises:
            UsageError: This script may not save in the directory.
        """
        self._line.claim()
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    @collective_method("load")
    def load(self, state: Mapping[str, Any], *, strict: bool = True, only: str = "") -> int | None:
        """Fill a state from the newest complete save, whatever layout of ranks wrote it.

        Objects get their saved state by load_state_dict(), with new tensors where they have none yet; other
        tensors are filled in place, plain values are set, and random state is restored last. All bytes are
        verified before the first is changed: after an error the state is as it was, unless the message says
        otherwise.

        Args:
            state: Of the form that `save` takes.
            strict: Refuse what is only in the state or only in the save, or differs in shape or type. With
                False, that stays as it is.
            only: A prefix of names, such as "model."; nothing else is touched.

        Returns:
            The step of the save; None where nothing was saved.

        Raises:
            UsageError: The save does not fit the state; the message names what differs.
            SiteError: No save is complete.
        """
        self._line.begin_load()
        if self._line.starts_fresh:
            return None
        if self._async_checkpointer is not None:
            self._async_checkpointer.settle()
        loading = StateLoader(self._control, state, strict=strict, only=only)
        attempt = self._run.attempt(self._direct.attempt)
        restored = restore_from_plan(self._direct, attempt, self._control, {}, {}, loading.fit)
        if restored is None:
            self._line.record_loaded(None)
            return None
        # Objects may draw random numbers while they load.
        random_state = rng_state()
        for note in loading.finish():
            write_stderr_line(note)
        set_rng_state(random_state)
        self._line.record_loaded(restored.step)
        if self._async_checkpointer is not None and not only:
            self._async_checkpointer.record_restored(restored.generation)
        self._direct.is_partly_filled = False
        for problem in restored.passed_over if self._control.rank == 0 else ():
            write_stderr_line(f"passed over: {problem}")
        return restored.step

    @collective_method("should_stop", meets=False)
    def should_stop(self) -> bool:
        """Return whether any rank has received SIGTERM or SIGUSR2, the same on all ranks.

        Call it once a step. On True, save with `wait` and exit with code 75, which tells hpcrun to resume the
        run. From the first call on, these signals no longer end the script.

        Raises:
            UsageError: It is called outside the main thread.
        """
        if self._stops is None:
            self._stops = StopRequests()
        return bool(self._control.union(1 if self._stops.arrived else 0))

    @collective_method("close")
    def close(self) -> None:
        """Wait until all saves are stored, and end the processes started for them.

        Errors of saves have been reported on stderr and by `on_record`; they are not raised here.
        """
        self._is_closing = True
        self._control.union(0)  # gives nothing up if another rank calls another method
        if self._async_checkpointer is not None:
            self._async_checkpointer.settle()
            self._async_checkpointer.close()
            self._async_checkpointer = None
        if self._stops is not None:
            self._stops.close()
        self._line.close()
        leave_collectives(self._control)

    def _may_save(self, step: int, replace: bool) -> bool:
        """Whether to save this step; first waits for a pending save of the same step."""
        self._line.agree(step)
        if self._line.might_exist(step) and self._async_checkpointer is not None:
            self._async_checkpointer.settle()
        if self._line.may_save(step, replace=replace):
            return True
        why = "it is saved already; replace=True replaces it"
        self._record(SaveSkippedMetric(step, why))
        return False

    @property
    def _own(self) -> str:
        return f"hpcrun.{self._control.rank}"

    def _warn_of_missing_tiers(self) -> None:
        if self._control.rank == 0:
            tiers = [
                "memory",
                *(["local"] if self._spec.local else []),
                "durable",
                *(["object"] if self._spec.object else []),
            ]
            write_stderr_line(
                f"saves go to {', '.join(tiers)}; there is no parity on other nodes, and memory ends"
                " with the ranks: a job of `hpcrun train` or `hpcrun submit` with checkpoint.memory has both"
            )

    def _record(self, metric: Metric) -> None:
        if self._on_record is not None:
            self._on_record(metric_as_json(metric))
        if isinstance(metric, SaveFailedMetric | SaveSkippedMetric | SaveUnchangedMetric):
            outcome = metric_kind(metric).removeprefix("save_")
            tier = f" ({metric.tier})" if isinstance(metric, SaveFailedMetric) else ""
            write_stderr_line(f"the save of step {metric.step} is {outcome}{tier}: {metric.why}")
