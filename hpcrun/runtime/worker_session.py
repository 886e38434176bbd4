"""A rank's session with its node's checkpoint worker: the connection, the slots, and the current plan."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from hpcrun.checkpoint.tier import TierName
from hpcrun.messages.lines import VersionMismatchError
from hpcrun.runtime.control import Control
from hpcrun.runtime.resharding import WritePlan, plan_write
from hpcrun.runtime.snapshot import StateSnapshot
from hpcrun.runtime.worker_client import WORKER_STUCK_S, RankWorkerClient, WorkerEndpoint, WorkerGoneError

QUICK_ANSWER_S = 5.0
"""For an answer of a worker that was there before, where training must not wait."""
_CONNECT_POLL_S = 0.05


class WorkerSession:
    """A session with the worker of this node, for one structure of the state."""

    def __init__(self, control: Control, home: WorkerEndpoint) -> None:
        self._control, self._home = control, home
        self.link: RankWorkerClient | None = None
        self.snapshot: StateSnapshot | None = None
        self.plan: WritePlan | None = None
        self.key = 0
        """The worker's number for the plan."""
        self.offered: list[TierName] = []
        """The tiers that the worker offers."""
        self.node = ""
        self._is_planned = False

    def connect(self, *, may_wait: bool) -> None:
        """Connect unless connected; WorkerGoneError where no worker answers."""
        if self.link is not None:
            return
        # A worker that was there before may be stopped, or hang in the kernel.
        was_there = bool(self.node) and not may_wait
        deadline = time.monotonic() + (QUICK_ANSWER_S if was_there else self._home.patience_s)
        while self.link is None:
            try:
                socket = self._home.socket()
                sign_s = QUICK_ANSWER_S if was_there else WORKER_STUCK_S
                self.link, self._is_planned = RankWorkerClient(socket, self._control.rank, sign_s), False
            except WorkerGoneError as error:
                is_refused = isinstance(error.__cause__, VersionMismatchError)
                if is_refused or time.monotonic() > deadline:
                    raise
                time.sleep(_CONNECT_POLL_S)
        # Pretended nodes share a host, but not a worker.
        self.node = f"{self._control.node} {socket}"

    def has_plan(self, key: tuple[object, ...]) -> bool:
        """Whether the worker knows a plan for a state of this structure."""
        return self._is_planned and self.plan is not None and self.plan.key == key

    def plan_state(self, entries: dict[str, Tensor], key: tuple[object, ...]) -> None:
        """Make a plan together with all ranks; `reserve` passes it to the worker."""
        self.plan, self._is_planned = plan_write(entries, self._control, key, self.node), False

    def reserve(self, slots: int, local_ranks: Sequence[int]) -> int:
        """Have the worker reserve slots for the plan; return their number, 0 without a worker."""
        plan = self.plan
        if self.link is None or plan is None:
            return 0
        if self.snapshot is not None:
            self.snapshot.close()
            self.snapshot = None
        paths, self.offered = self.link.reserve(plan.part_bytes, slots, list(local_ranks))
        self.snapshot = StateSnapshot(paths, plan.part_bytes, self._control.rank)
        self.key += 1
        self.link.plan(self.key, plan.pieces, plan.file, plan.start)
        self._is_planned = True
        return len(paths)

    def disconnect(self) -> None:
        """Hang up; the slots stay mapped."""
        if self.link is not None:
            self.link.close()
        self.link = None

    def close(self) -> None:
        """Release worker and memory; the worker still stores what was filled."""
        self.disconnect()
        if self.snapshot is not None:
            self.snapshot.close()
        self.snapshot = None

    def reset(self) -> None:
        """Close, and forget the plan: all ranks must agree on one again."""
        self.close()
        self.plan, self._is_planned = None, False
