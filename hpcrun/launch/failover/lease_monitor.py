"""Detects a dead supervisor: missed heartbeats, and a lease that stands still by the agent's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from hpcrun.runs.lease import LEADER_TIMEOUT_S, LEASE_RENEW_S

QUIET_S = 1.5
"""Time without a message after which an agent watches the lease."""
HOST_TIMEOUT_S = 4.0
"""Replaces LEADER_TIMEOUT_S when the supervisor's host has accepted no connection for half of this time."""
CONFIRM_S = 2 * LEASE_RENEW_S
"""How long an agent watches the lease again after its own write has reached the file system."""
STAGGER_S = 0.5
"""Head start of each node over the next one in the allocation."""
_MAX_STAGGERED = 16

LeaseAction = Literal["wait", "bid", "claim", "withdraw"]


class LeaseMonitor:
    """Detects a dead supervisor from missed heartbeats, using the agent's monotonic clock only."""

    def __init__(self, position: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stagger_s = STAGGER_S * min(position, _MAX_STAGGERED)
        self._heard = clock()
        self._sign: str | None = None
        self._still_since = self._heard
        self._bid_at: float | None = None
        self._dead_since: float | None = None

    def heard(self) -> None:
        """Note a message from the supervisor."""
        self._heard, self._sign, self._bid_at = self._clock(), None, None
        self._dead_since = None

    def tried(self, answers: bool) -> None:
        """Note whether the supervisor's host answered a connection, even by refusing it."""
        if answers:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = self._clock()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last message."""
        return self._clock() - self._heard

    @property
    def is_quiet(self) -> bool:
        """Whether to watch the lease."""
        return self.quiet_s > QUIET_S

    @property
    def is_orphaned(self) -> bool:
        """Whether the ranks on this node must end: others may have continued without them."""
        return self.quiet_s > LEADER_TIMEOUT_S

    def look(self, sign: str) -> LeaseAction:
        """Decide what to do, given the current fingerprint of the leader.

        `bid`: write a probe to the run directory and keep watching; `claim`: claim the next epoch;
        `withdraw`: the supervisor is alive after all.
        """
        now = self._clock()
        if sign != self._sign:
            moved = self._sign is not None
            self._sign, self._still_since = sign, now
            if moved and self._bid_at is not None:
                self._bid_at = None
                return "withdraw"
            return "wait"
        is_dead = self._dead_since is not None and now - self._dead_since > HOST_TIMEOUT_S / 2
        limit = HOST_TIMEOUT_S if is_dead else LEADER_TIMEOUT_S
        if self.quiet_s < limit or now - self._still_since < limit + self._stagger_s:
            return "wait"
        if self._bid_at is None:
            return "bid"
        return "claim" if now - self._bid_at > CONFIRM_S else "wait"

    def probe_written(self) -> None:
        """The probe was written: watch the lease for CONFIRM_S more."""
        self._bid_at = self._clock()

    def refused(self) -> None:
        """A claim was refused: start over."""
        self._bid_at, self._still_since = None, self._clock()
