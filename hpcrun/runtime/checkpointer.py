"""`hpcrun.Checkpointer`: saves for anybody's training script, under whatever has started it.

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

Saves go to the memory of the node and from there, beside training, to the node's disk, to DIRECTORY and to an
object store. All ranks call each method alike; what one of them raises there all raise, with its words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import torch

from hpcrun.runtime import direct_checkpoint
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
from hpcrun.runtime.quiet_exit import await_idle_threads_at_exit
from hpcrun.runtime.random_state import rng_state, set_rng_state
from hpcrun.runtime.restore import restore_from_plan
from hpcrun.runtime.script_lineage import ScriptLineage, StartMode, parse_count
from hpcrun.runtime.script_setup import (
    build_checkpoint_spec,
    find_own_attempt,
    read_run_checkpoint_options,
    resolve_run_directory,
)
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
    """Saves and loads a state of all ranks together."""

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
        """`directory`: where saves go, in `checkpoints/` there; inside a run of hpcrun by default that run's.

        Where there are saves, load() goes on from the newest, and a start that trains or saves without having
        loaded is refused. Unless `start` is "new": load() gives None, and a line of saves of its own begins,
        beside which the others stay until `hpcrun ckpt gc`; or "resume": it goes on from the newest by means
        of its own. Only one world of ranks at a time may save in a directory.

        The options are those of a job's `checkpoint` section: keep, keep_every, local, durable, object,
        on_backlog; where nothing is given, that section of the run's own job holds. `memory`: slots a rank, 2
        where neither says otherwise; 0: every save is written at once, and waited for. `on_record` is given
        on rank 0 what a run's metrics.jsonl would get.
        """
        await_idle_threads_at_exit()
        self._control = begin_collective_init(open_control(os.environ))
        run, agent = resolve_run_directory(directory, os.environ)
        self._run, section = run, read_run_checkpoint_options(run, os.environ)
        slots = {} if memory is None else {"memory": memory}
        self._spec = build_checkpoint_spec({"memory": 2} | section | slots, options)
        if not agent:
            await_earlier_workers(run, self._control)
        line = ScriptLineage(run, self._control, start=start, attempt=find_own_attempt(run, os.environ))
        self._line, attempt = line, line.found.attempt
        keep: dict[str, int] = {"keep": self._spec.keep, "keep_every": self._spec.keep_every}
        self._direct = direct_checkpoint.DirectCheckpointer(
            run.checkpoints, self._control, attempt=attempt, durable=self._spec.durable, **keep
        )
        line.serve(self._direct)
        self._on_record = on_record
        self._direct.tell = self._tell
        if self._spec.memory:
            home: AgentWorker | OwnWorker
            if agent:
                home = AgentWorker(os.environ)
            else:
                home = OwnWorker(run.path, self._spec, self._control, attempt)
                self._warn_of_missing_levels()
            home.begin(self._control)
            self._async_checkpointer = AsyncCheckpointer(
                self._spec, self._direct, self._control, home, self._tell
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The others may never come to a common end; but they are told, and nothing of ours stays.
        leave_collectives(self._control, error)
        self._let_go()

    def _failed(self, error: BaseException) -> None:
        if is_raised_on_all(error):
            self._is_closing = False  # a close that was refused has not begun
        elif self._async_checkpointer is not None:
            if self._is_closing:  # others may have come further, and have nothing left
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
        """Begin to save a state, which must not change until `fence`; False where this save was left out.

        Steps grow: the one that was saved or loaded last is left out, and that is said, unless `replace`: its
        save is then replaced, once the new one is whole. A smaller step is a UsageError.

        A name stands for one tensor: what several ranks have under it is taken to be equal, and stored once.
        `wait`: return when it is in the directory, SiteError on all ranks if it does not get there. Plain
        values in the state are kept as each rank has them now. `position`: any count of yours, such as of
        samples.
        """
        step, position = parse_count(step, "step"), parse_count(position, "position")
        if not self._may_save(step, replace):
            return False
        flat = flatten_state(state)
        entries = flat.tensors | {self._own: pack_tree(flat.tree)}
        self._line.has_begun(step)
        if self._async_checkpointer is None:
            self._direct.save(step, position, entries)
            return True
        if wait:
            self._async_checkpointer.save_durably(step, position, entries)
            return True
        return self._async_checkpointer.save(step, position, entries)

    @collective_method("fence", agrees=False)
    def fence(self) -> None:
        """Wait until what is being saved may be changed again: call it before the optimizer's step."""
        if self._async_checkpointer is not None:
            self._async_checkpointer.fence()

    @collective_method("fence")
    def fence_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `fence` before every step of an optimizer.

        It says that training begins: who may not save in this directory hears so here.
        """
        self._line.claim()
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    @collective_method("load")
    def load(self, state: Mapping[str, Any], *, strict: bool = True, only: str = "") -> int | None:
        """Fill a state from the newest save that proves whole, whatever layout wrote it; gives its step.

        A state is nested dicts and lists of tensors and plain values, and of what has state_dict() and
        load_state_dict(): such an object is handed what was saved of it, new tensors where it has none yet.
        Other tensors are filled where they are, plain values set, random state last; UsageError, with names,
        where something is in one of state and save alone, or cannot be what it was. `only`: a beginning of
        names, such as "model."; nothing else is touched. Without `strict`, what is in one of them alone, or
        has another shape or type there, stays as it is. None where nothing was saved. Every byte
        is proved before the first is filled: after an error the state is as it was, unless that says no.
        """
        self._line.loads()
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
        # What objects do with their state may draw numbers, which is not to be seen afterwards.
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
        """Whether any rank was sent SIGTERM or SIGUSR2; all ranks call it alike, and hear the same.

        Call it once a step: True asks to save, with `wait`, and to leave with exit code 75, which tells
        hpcrun that the run is to be gone on with. From the first call on these signals do not end the script.
        """
        if self._stops is None:
            self._stops = StopRequests()
        return bool(self._control.union(1 if self._stops.arrived else 0))

    @collective_method("close")
    def close(self) -> None:
        """Wait until everything is stored that was begun, and end what was started for it."""
        self._is_closing = True
        self._control.union(0)  # nothing is given up where another rank calls something else
        if self._async_checkpointer is not None:
            self._async_checkpointer.settle()
            self._async_checkpointer.close()
            self._async_checkpointer = None
        if self._stops is not None:
            self._stops.close()
        self._line.close()
        leave_collectives(self._control)

    def _may_save(self, step: int, replace: bool) -> bool:
        """Whether this save is begun; one that is on its way is waited for before it is said to exist."""
        self._line.agree(step)
        if self._line.might_exist(step) and self._async_checkpointer is not None:
            self._async_checkpointer.settle()
        if self._line.may_save(step, replace=replace):
            return True
        why = "it is saved already; replace=True replaces it"
        self._tell(SaveSkippedMetric(step, why))
        return False

    @property
    def _own(self) -> str:
        return f"hpcrun.{self._control.rank}"

    def _warn_of_missing_levels(self) -> None:
        if self._control.rank == 0:
            levels = [
                "memory",
                *(["local"] if self._spec.local else []),
                "durable",
                *(["object"] if self._spec.object else []),
            ]
            write_stderr_line(
                f"saves go to {', '.join(levels)}; there is no parity on other nodes, and memory ends"
                " with the ranks: a job of `hpcrun train` or `hpcrun submit` with checkpoint.memory has both"
            )

    def _tell(self, metric: Metric) -> None:
        if self._on_record is not None:
            self._on_record(metric_as_json(metric))
        if isinstance(metric, SaveFailedMetric | SaveSkippedMetric | SaveUnchangedMetric):
            outcome = metric_kind(metric).removeprefix("save_")
            level = f" ({metric.level})" if isinstance(metric, SaveFailedMetric) else ""
            write_stderr_line(f"the save of step {metric.step} is {outcome}{level}: {metric.why}")
