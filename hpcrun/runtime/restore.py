"""Restores what the supervisor has decided on: from the run directory, or from the memory of the nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcrun.checkpoint.distributed_reader import DistributedReader
from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.parity.peers import PeerClient, PeerCredentials
from hpcrun.checkpoint.restore_plan import RestorePlan, parse_restore_plan
from hpcrun.errors import RanksDiedError, SiteError, UsageError
from hpcrun.runtime.control import Control
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer, RestoreResult
from hpcrun.runtime.rank_alarm import mark_raised_on_all
from hpcrun.runtime.save_opening import EntrySelector
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.run_variables import WORKER_SOCKET_VARIABLE
from hpcrun.specs.rundir import Attempt

_TRIES, _PAUSE_S = 25, 0.2
"""A network file system may show a new file a little later on one node than on another."""


def restore_from_plan(
    checkpoints: DirectCheckpointer,
    attempt: Attempt,
    control: Control,
    state: dict[str, Tensor],
    expected: dict[str, tuple[int, ...]],
    fit: EntrySelector | None = None,
) -> RestoreResult | None:
    """Fill the state by the restore plan of this attempt; from the run directory where there is no plan.

    RanksDiedError where the planned generation is not complete after all: the next attempt passes it over, or
    finds that it can be completed.
    """
    plan = _agree_on_plan(attempt, control)
    if plan is None:
        return checkpoints.restore(state, expected, fit)
    checkpoints.avoided = frozenset(plan.poisoned)
    if not plan.sources:
        mendable = plan.stamp.generation if plan.stamp is not None and plan.is_mendable else None
        try:
            return checkpoints.restore(state, expected, fit, mendable=mendable)
        except DamagedError as error:
            raise _record_unrestored(attempt, control, plan, str(error)) from None
    assert plan.stamp is not None
    try:
        source: DistributedReader = _run_on_all_ranks(
            control, lambda: _open_planned_generation(plan, attempt)
        )
        with source:
            if len(set(control.allgather(source.structure))) > 1:
                raise mark_raised_on_all(SiteError(f"{source.name}: ranks see different tensors in it"))
            return checkpoints.load_from(
                source,
                plan.stamp,
                state,
                expected,
                fit,
                passed_over=plan.passed_over,
                lost_steps=plan.lost_steps,
            )
    except SiteError as error:
        raise _record_unrestored(attempt, control, plan, str(error)) from None


def _record_unrestored(attempt: Attempt, control: Control, plan: RestorePlan, why: str) -> RanksDiedError:
    """Record for the supervisor that the planned generation is not complete; return the error to raise."""
    assert plan.stamp is not None
    generation = plan.stamp.generation
    control.everywhere(lambda: write_json(attempt.restore_failure, {"generation": generation, "why": why}))
    return mark_raised_on_all(
        RanksDiedError(f"step {plan.stamp.step} cannot be resumed from ({generation}): {why}")
    )


def _agree_on_plan(attempt: Attempt, control: Control) -> RestorePlan | None:
    """Read the plan, the same on every rank by its digest; None where the supervisor has made none."""
    if not control.everywhere(attempt.restore.exists):
        return None
    plan: RestorePlan = _run_on_all_ranks(control, lambda: _read_plan(attempt.restore))
    digests = control.allgather(plan.digest)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise mark_raised_on_all(
                SiteError(
                    f"{attempt.restore}: rank {rank} reads another plan than rank 0 does; is it one file?"
                )
            )
    return plan


def _read_plan(path: Path) -> RestorePlan:
    for _ in range(_TRIES):
        if (content := read_json(path)) is not None:
            break
        time.sleep(_PAUSE_S)
    else:
        raise SiteError(f"{path}: cannot be seen on this node, but on others")
    try:
        return parse_restore_plan(content)
    except ValueError as error:
        raise SiteError(f"{path}: {error}") from None


def _open_planned_generation(plan: RestorePlan, attempt: Attempt) -> DistributedReader:
    """Open the planned generation on this rank."""
    socket = os.environ.get(WORKER_SOCKET_VARIABLE, "")
    here = Path(socket).parent.name if socket else os.uname().nodename
    record = read_json(attempt.peers)
    peers = None
    if isinstance(record, dict):
        addresses = {node: (str(address[0]), int(address[1])) for node, address in record["nodes"].items()}
        peers = PeerClient(PeerCredentials(attempt.run.id, here, record["secret"]), addresses)
    return DistributedReader(plan, here, peers)


def _run_on_all_ranks(control: Control, action: Callable[[], Any]) -> Any:
    """Run an action on every rank; SiteError on all where it fails on one."""
    value: Any = None
    problem = None
    try:
        value = action()
    except (UsageError, SiteError, OSError) as error:
        problem = str(error)
    for rank, text in enumerate(control.allgather(problem)):
        if text is not None:
            if hasattr(value, "close"):
                value.close()
            raise mark_raised_on_all(SiteError(f"rank {rank}: {text}"))
    return value
