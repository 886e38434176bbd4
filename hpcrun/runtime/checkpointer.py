"""`hpcrun.Checkpointer`: saves for anybody's training script, under whatever has started it.

    with hpcrun.Checkpointer("runs/mine") as saves:
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        step = saves.load(state) or 0
        saves.fence_before(optimizer)
        ...
            saves.save(step, state)

Saves go to the memory of the node and from there, beside training, to the node's disk, to DIRECTORY and to an
object store. All ranks call each method alike.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from hpcrun.checkpoint.reader import ChunkSource
from hpcrun.errors import UsageError
from hpcrun.launch.shim import ATTEMPT_VARIABLE, DRAIN_VARIABLE, RUN_DIR_VARIABLE
from hpcrun.launch.world import World, detect_world
from hpcrun.runtime import checkpoint
from hpcrun.runtime.behind import SavesBehind
from hpcrun.runtime.control import Control, LoneControl, MPIControl, StoreControl
from hpcrun.runtime.drainhome import AgentHome, OwnHome
from hpcrun.runtime.planned import restore
from hpcrun.runtime.planning import dtype_name, raw_bytes
from hpcrun.runtime.trees import (
    Tree,
    begin_optimizers,
    forget_unfilled,
    hand_back,
    pack,
    put_back,
    take_apart,
    unpack,
)
from hpcrun.specs.checkpoint import CheckpointSpec, check_checkpoint
from hpcrun.specs.load import load_job_of
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import saved_steps

_count = itertools.count()


class Checkpointer:
    """Saves and loads a state of all ranks together."""

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        memory: int | None = None,
        on_record: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> None:
        """`directory`: where saves go, in `checkpoints/` there; inside a run of hpcrun by default that run's.

        The options are those of a job's `checkpoint` section: keep, keep_every, local, durable, object,
        behind; where nothing is given, that section of the run's own job holds. `memory`: slots a rank, 2
        where neither says otherwise; 0: every save is written at once, and waited for. `on_record` is given
        on rank 0 what a run's metrics.jsonl would get.
        """
        self._control = _control(os.environ)
        run, agent = _run_of(directory, os.environ)
        self._run, section = run, _section_of(run, os.environ)
        slots = {} if memory is None else {"memory": memory}
        self._spec = _spec({"memory": 2} | section | slots, options)
        attempt = self._control.everywhere(lambda: _attempt(run, agent))
        keep: dict[str, int] = {"keep": self._spec.keep, "keep_every": self._spec.keep_every}
        self._direct = checkpoint.Checkpointer(
            run.checkpoints, self._control, attempt=attempt, durable=self._spec.durable, **keep
        )
        self._on_record = on_record
        self._behind: SavesBehind | None = None
        if self._spec.memory:
            home: AgentHome | OwnHome
            if agent:
                home = AgentHome(os.environ)
            else:
                home = OwnHome(run.path, self._spec, self._control, attempt)
                self._say_what_is_missing()
            self._behind = SavesBehind(self._spec, self._direct, self._control, home, self._tell)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the others may never come to a common end.
        if error is None:
            self.close()

    def save(self, step: int, state: Mapping[str, Any], position: int = 0, *, wait: bool = False) -> bool:
        """Begin to save a state, which must not change until `fence`; False where this save was left out.

        A name stands for one tensor: what several ranks have under it is taken to be equal, and stored once.
        `wait`: return when it is in the directory, SiteError on all ranks if it does not get there. Plain
        values in the state are kept as each rank has them now. `position`: any count of yours, such as of
        samples.
        """
        tree = take_apart(state)
        ties = tree.ties()
        entries = {name: tensor.detach() for name, tensor in tree.tensors.items() if name not in ties}
        entries[self._own] = pack({"values": tree.values, "ties": ties})
        if self._behind is None:
            self._direct.save(step, position, entries)
            return True
        if wait:
            self._behind.save_lasting(step, position, entries)
            return True
        return self._behind.save(step, position, entries)

    def fence(self) -> None:
        """Wait until what is being saved may be changed again: call it before the optimizer's step."""
        if self._behind is not None:
            self._behind.fence()

    def fence_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `fence` before every step of an optimizer."""
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def load(self, state: Mapping[str, Any], *, strict: bool = True, only: str = "") -> int | None:
        """Fill a state from the newest save that proves whole, whatever layout wrote it; gives its step.

        A state is nested dicts and lists of tensors and plain values, and of what has state_dict() and
        load_state_dict(): give the optimizer itself, which before its first step has no tensors to fill.
        Tensors are filled where they are, plain values replaced, random state set last. `only`: a beginning
        of names, such as "model."; nothing else is touched. Without `strict`, what is in one of state and
        save alone, or has another shape or type there, stays as it is. None where nothing was saved.
        """
        if self._behind is not None:
            self._behind.settle()
        begun = begin_optimizers(state)
        tree = take_apart(state)
        tree.tensors = {name: tensor for name, tensor in tree.tensors.items() if name.startswith(only)}
        loading = _Loading(self._control, tree, strict=strict, only=only)
        attempt = self._run.attempt(self._direct.attempt)
        filled: set[str] = set()
        try:
            restored = restore(self._direct, attempt, self._control, {}, {}, loading.fit)
            if restored is None:
                return None
            loading.finish()
            filled = loading.filled
        finally:
            forget_unfilled(begun, filled)
        hand_back(tree, filled)
        if self._behind is not None and not only:
            self._behind.has_restored(restored.generation)
        for problem in restored.passed_over if self._control.rank == 0 else ():
            _say(f"passed over: {problem}")
        return restored.step

    def close(self) -> None:
        """Wait until everything is stored that was begun, and end what was started for it."""
        if self._behind is not None:
            self._behind.settle()
            self._behind.close()
            self._behind = None

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
            _say(
                f"saves go to {', '.join(levels)}; there is no parity on other nodes, and memory ends"
                " with the ranks: a job of `hpcrun train` or `hpcrun submit` with checkpoint.memory has both"
            )

    def _tell(self, record: dict[str, Any]) -> None:
        if self._on_record is not None:
            self._on_record(record)
        if record["kind"] in ("save_failed", "save_skipped", "save_unchanged"):
            what = record["kind"].removeprefix("save_")
            level = f" ({record['level']})" if "level" in record else ""
            _say(f"the save of step {record['step']} is {what}{level}: {record['why']}")


class _Loading:
    """What of a state is filled from a save."""

    def __init__(self, control: Control, tree: Tree, *, strict: bool, only: str) -> None:
        self._control, self._tree, self._strict, self._only = control, tree, strict, only
        mine = {name: list(tensor.shape) for name, tensor in tree.tensors.items()}
        self._names = {name for told in control.allgather(list(mine)) for name in told}
        self._values: dict[str, Any] = {}
        self._tied: dict[str, str] = {}
        self.filled: set[str] = set()
        """Names of what the save has."""

    def fit(self, where: str, world_size: int, source: ChunkSource) -> dict[str, Tensor]:
        """Those tensors of the state that the save has; UsageError where it is another state."""
        every = source.manifest.tensors
        stored = {
            name for name in every if name.startswith(self._only) and not name.startswith(("rng.", "hpcrun."))
        }
        told = self._told(world_size, source, stored)
        ties = {name: owner for one in told for name, owner in one["ties"].items()}
        self._tied = {name: ties[name] for name in self._names - stored if ties.get(name) in self._names}
        found, other = dict[str, Tensor](), list[str]()
        for name, tensor in self._tree.tensors.items():
            if name in stored:
                same = (every[name].shape, every[name].dtype) == (tuple(tensor.shape), dtype_name(tensor))
                if same:
                    found[name] = tensor.detach()
                else:
                    other.append(name)
        if self._strict:
            _refuse(where, "has another shape or type of", other)
            _refuse(where, "lacks", sorted(self._names - stored - self._tied.keys()))
            _refuse(where, "also holds", sorted(stored - self._names))
        self._values = {} if self._only or not told else told[0]["values"]
        random, mine = checkpoint.rng_state(), f"rng.{self._control.rank}"
        self.filled = {*found, *self._tied, *self._values}
        is_alike = world_size == self._control.size and mine in every and every[mine].shape == random.shape
        if is_alike and not self._only:
            found[mine] = random
        return found

    def finish(self) -> None:
        """What is not tied here any more gets its own copy, and plain values get theirs."""
        tensors = self._tree.tensors
        with torch.no_grad():
            for name, owner in self._tied.items():
                if name in tensors and owner in tensors and tensors[name] is not tensors[owner]:
                    tensors[name].copy_(tensors[owner])
        put_back(self._tree, self._values)

    def _told(self, world_size: int, source: ChunkSource, stored: set[str]) -> list[dict[str, Any]]:
        """What the ranks had besides tensors: this one's, or the first's; all, where names are missing."""
        mine = self._control.rank if world_size == self._control.size else 0
        others = range(world_size) if self._names - stored else ()
        names = [f"hpcrun.{rank}" for rank in dict.fromkeys((mine, *others))]
        found = []
        for name in names:
            if name in source.manifest.tensors:
                tensor = source.manifest.tensors[name]
                data = torch.empty(tensor.shape, dtype=torch.uint8)
                begin = 0
                for piece, place in sorted(tensor.chunks, key=lambda one: one[0].offsets):
                    end = begin + piece.size_bytes
                    source.read(piece, place, raw_bytes(data[begin:end]))
                    begin = end
                found.append(unpack(bytes(raw_bytes(data))))
        return found


def _refuse(where: str, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UsageError(
            f"{where}: {verb} {names[0]}{more}; load with strict=False, or into the state that was saved (an"
            " optimizer that has not stepped yet has none: give the optimizer, not its state_dict())"
        )


def _section_of(run: RunDir, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the job of this very run says of saves, but for its memory where it has none; else nothing."""
    if str(run.path) != environ.get(RUN_DIR_VARIABLE) or not run.spec.exists():
        return {}
    section = load_job_of(run).spec.checkpoint
    # When to save is the script's own affair.
    return section.model_dump(mode="json", exclude={"every"} if section.memory else {"every", "memory"})


def _spec(values: Mapping[str, Any], options: Mapping[str, Any]) -> CheckpointSpec:
    try:
        spec = CheckpointSpec.model_validate({**values, **options})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        known = ", ".join(CheckpointSpec.model_fields)
        raise UsageError(f"Checkpointer: {where}: {first['msg']}; options: {known}") from None
    for wrong in check_checkpoint(spec):
        raise UsageError(f"Checkpointer: {wrong.key.removeprefix('checkpoint.')}: {wrong.text}")
    return spec


def _run_of(directory: str | Path | None, environ: Mapping[str, str]) -> tuple[RunDir, bool]:
    """The directory as a run's, and whether an agent's worker is there that writes to just that one."""
    told = environ.get(RUN_DIR_VARIABLE)
    own = RunDir(Path(told)) if told else None
    if directory is None:
        if own is None:
            raise UsageError("Checkpointer: a directory is needed outside a run of hpcrun")
        run = own
    else:
        run = RunDir(Path(directory).resolve())
    return run, own is not None and own.path == run.path and DRAIN_VARIABLE in environ


def _attempt(run: RunDir, agent: bool) -> int:
    """The run's own attempt; elsewhere one more than any that has saved."""
    if agent and ATTEMPT_VARIABLE in os.environ:
        return int(os.environ[ATTEMPT_VARIABLE])
    return max((saved.attempt for saved in saved_steps(run.checkpoints)), default=0) + 1


def _control(environ: Mapping[str, str]) -> Control:
    """How these ranks agree: over MPI, over torch's store, or there is one alone."""
    number = next(_count)
    world = detect_world(environ)
    # Whoever sets an address for torch's ranks may have started them without MPI.
    by_mpi = world is not None and world.kind != "torchrun" and "MASTER_ADDR" not in environ
    if world is not None and by_mpi and world.size > 1 and importlib.util.find_spec("mpi4py"):
        return MPIControl(world, private=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        size, rank = dist.get_world_size(), dist.get_rank()
        group = World("torchrun", rank, size, None, None)
        return StoreControl(group, store=_get_default_store(), prefix=f"hpcrun-saves-{number}")
    if world is not None and world.size > 1:
        return StoreControl(world, prefix=f"hpcrun-saves-{number}")
    return LoneControl()


def _say(text: str) -> None:
    sys.stderr.write(f"hpcrun: {text}\n")
    sys.stderr.flush()
