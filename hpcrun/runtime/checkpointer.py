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
from hpcrun.runtime.async_checkpoint import SavesBehind
from hpcrun.runtime.collective_verbs import is_alike, leave, opened, opening, together, warn_of_part
from hpcrun.runtime.quiet_exit import end_quietly
from hpcrun.runtime.restore import restore
from hpcrun.runtime.script_context import attempt_of, open_control, run_of, section_of, spec_of
from hpcrun.runtime.script_lineage import ScriptLine, Start, count_of
from hpcrun.runtime.state_loading import StateLoading
from hpcrun.runtime.state_tree import flatten, pack
from hpcrun.runtime.stderr_notes import say
from hpcrun.runtime.stop_requests import StopRequests
from hpcrun.runtime.worker_endpoint import AgentHome, OwnHome, make_way


class Checkpointer:
    """Saves and loads a state of all ranks together."""

    _behind: SavesBehind | None = None
    _stops: StopRequests | None = None

    @opened
    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        start: Start | None = None,
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
        behind; where nothing is given, that section of the run's own job holds. `memory`: slots a rank, 2
        where neither says otherwise; 0: every save is written at once, and waited for. `on_record` is given
        on rank 0 what a run's metrics.jsonl would get.
        """
        end_quietly()
        self._control = opening(open_control(os.environ))
        run, agent = run_of(directory, os.environ)
        self._run, section = run, section_of(run, os.environ)
        slots = {} if memory is None else {"memory": memory}
        self._spec = spec_of({"memory": 2} | section | slots, options)
        if not agent:
            make_way(run, self._control)
        line = ScriptLine(run, self._control, start=start, attempt=attempt_of(run, os.environ))
        self._line, attempt = line, line.found.attempt
        keep: dict[str, int] = {"keep": self._spec.keep, "keep_every": self._spec.keep_every}
        self._direct = direct_checkpoint.Checkpointer(
            run.checkpoints, self._control, attempt=attempt, durable=self._spec.durable, **keep
        )
        line.serve(self._direct)
        self._on_record = on_record
        self._direct.tell = self._tell
        if self._spec.memory:
            home: AgentHome | OwnHome
            if agent:
                home = AgentHome(os.environ)
            else:
                home = OwnHome(run.path, self._spec, self._control, attempt)
                self._say_what_is_missing()
            home.begin(self._control)
            self._behind = SavesBehind(self._spec, self._direct, self._control, home, self._tell)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The others may never come to a common end; but they are told, and nothing of ours stays.
        leave(self._control, error)
        self._let_go()

    def _failed(self, error: BaseException) -> None:
        if self._behind is not None and not is_alike(error):
            self._behind.begin_anew()
        if self._direct.is_partly_filled:
            self._direct.is_partly_filled = False
            warn_of_part(error)

    def _let_go(self) -> None:
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.let_go()
        if self._stops is not None:
            self._stops.close()
        if hasattr(self, "_line"):  # what fails to open may have none yet
            self._line.close()

    @together("save")
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
        step, position = count_of(step, "step"), count_of(position, "position")
        if not self._may_save(step, replace):
            return False
        flat = flatten(state)
        entries = flat.tensors | {self._own: pack(flat.tree)}
        self._line.has_begun(step)
        if self._behind is None:
            self._direct.save(step, position, entries)
            return True
        if wait:
            self._behind.save_lasting(step, position, entries)
            return True
        return self._behind.save(step, position, entries)

    @together("fence", agrees=False)
    def fence(self) -> None:
        """Wait until what is being saved may be changed again: call it before the optimizer's step."""
        if self._behind is not None:
            self._behind.fence()

    @together("fence")
    def fence_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `fence` before every step of an optimizer.

        It says that training begins: who may not save in this directory hears so here.
        """
        self._line.claim()
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    @together("load")
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
        if self._line.begins_anew:
            return None
        if self._behind is not None:
            self._behind.settle()
        loading = StateLoading(self._control, state, strict=strict, only=only)
        attempt = self._run.attempt(self._direct.attempt)
        restored = restore(self._direct, attempt, self._control, {}, {}, loading.fit)
        if restored is None:
            self._line.has_loaded(None)
            return None
        # What objects do with their state may draw numbers, which is not to be seen afterwards.
        random_state = direct_checkpoint.rng_state()
        for note in loading.finish():
            say(note)
        direct_checkpoint.set_rng_state(random_state)
        self._line.has_loaded(restored.step)
        if self._behind is not None and not only:
            self._behind.has_restored(restored.generation)
        self._direct.is_partly_filled = False
        for problem in restored.passed_over if self._control.rank == 0 else ():
            say(f"passed over: {problem}")
        return restored.step

    @together("should_stop", meets=False)
    def should_stop(self) -> bool:
        """Whether any rank was sent SIGTERM or SIGUSR2; all ranks call it alike, and hear the same.

        Call it once a step: True asks to save, with `wait`, and to leave with exit code 75, which tells
        hpcrun that the run is to be gone on with. From the first call on these signals do not end the script.
        """
        if self._stops is None:
            self._stops = StopRequests()
        return bool(self._control.union(1 if self._stops.arrived else 0))

    @together("close")
    def close(self) -> None:
        """Wait until everything is stored that was begun, and end what was started for it."""
        if self._behind is not None:
            self._behind.settle()
            self._behind.close()
            self._behind = None
        if self._stops is not None:
            self._stops.close()
        self._line.close()
        leave(self._control)

    def _may_save(self, step: int, replace: bool) -> bool:
        """Whether this save is begun; one that is on its way is waited for before it is said to exist."""
        if self._line.may_exist(step) and self._behind is not None:
            self._behind.settle()
        if self._line.may_save(step, replace=replace):
            return True
        why = "it is saved already; replace=True replaces it"
        self._tell({"kind": "save_skipped", "step": step, "why": why})
        return False

    @property
    def _own(self) -> str:
        return f"hpcrun.{self._control.rank}"

    def _say_what_is_missing(self) -> None:
        if self._control.rank == 0:
            levels = [
                "memory",
                *(["local"] if self._spec.local else []),
                "durable",
                *(["object"] if self._spec.object else []),
            ]
            say(
                f"saves go to {', '.join(levels)}; there is no parity on other nodes, and memory ends"
                " with the ranks: a job of `hpcrun train` or `hpcrun submit` with checkpoint.memory has both"
            )

    def _tell(self, record: dict[str, Any]) -> None:
        if self._on_record is not None:
            self._on_record(record)
        if record["kind"] in ("save_failed", "save_skipped", "save_unchanged"):
            what = record["kind"].removeprefix("save_")
            level = f" ({record['level']})" if "level" in record else ""
            say(f"the save of step {record['step']} is {what}{level}: {record['why']}")
