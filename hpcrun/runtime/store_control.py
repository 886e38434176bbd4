"""Control of ranks over a store of torch's, where there is no MPI."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hpcrun.launcher_world import World
from hpcrun.runtime.control import NAP_S, REPORT_WAIT_AFTER_S, Control
from hpcrun.runtime.rank_alarm import RankAlarm, parse_rank_alarm, report_store_failure
from hpcrun.runtime.store_rendezvous import join_environment_store

_STORE_NAP_S = 0.02
"""The longest sleep between polls of a store, in a world of up to a hundred ranks."""
_STORE_ALARM_POLL_S = 0.5
"""Between looks in a store for alarms of other ranks."""
_ARRIVALS = 1 << 20
"""Arrivals and votes share one 64-bit sum, 20 bits each: worlds below a million ranks, two flags."""


class StoreControl(Control):
    """Control over a TCPStore, for ranks that torchrun started: there is no MPI among them."""

    def __init__(self, world: World, *, store: Store | None = None, prefix: str = "hpcrun") -> None:
        """`store`: one that the ranks share already; `prefix`: of the keys, which no other user has there."""
        super().__init__(world.rank, world.size)
        self._store = store if store is not None else join_environment_store(world)
        self._prefix, self._epoch, self._round, self._alarms_heard = prefix, 0, 0, 0
        self._control = PrefixStore(prefix, self._store)
        self._longest_nap = _STORE_NAP_S * max(1.0, self.size / 100)
        self._find_neighbours()

    def _meet(self, contribution: int) -> int:
        """Add to a sum that counts arrivals in its low bits, and wait for all ranks."""
        self._arrive(contribution)
        return self._published(self._round)

    def _arrive(self, contribution: int) -> None:
        """Add to the sum of the next round; the last to arrive publishes it."""
        self._round += 1
        total = self._control.add(f"{self._round}/sum", contribution)
        if total % _ARRIVALS == self.size:
            self._control.set(f"{self._round}/done", str(total))
            if self._round > 2:
                # To arrive here every rank has read the round before the last.
                self._control.delete_key(f"{self._round - 2}/sum")
                self._control.delete_key(f"{self._round - 2}/done")

    @report_store_failure
    def _published(self, number: int) -> int:
        return int(self._get(f"{number}/done"))

    def _get(self, key: str) -> bytes:
        """Wait for a key and return its value; during the store's own wait no alarm would be heard."""
        nap, begin, report_s, listened_s = NAP_S[0], time.monotonic(), REPORT_WAIT_AFTER_S, 0.0
        while not self._control.check([key]):
            time.sleep(nap)
            nap = min(2 * nap, self._longest_nap)
            if (seconds := time.monotonic() - begin) > listened_s + _STORE_ALARM_POLL_S:
                listened_s = seconds
                self._listen()
            if seconds > report_s:
                report_s *= 2
                self._report_slow(seconds)
        return self._control.get(key)

    def broadcast_alarm(self, alarm: RankAlarm) -> None:
        """Tell the ranks that wait for this one that it does not come."""
        with contextlib.suppress(RuntimeError):  # the other ranks notice themselves that the store is gone
            number = self._control.add("alarms", 1)
            self._control.set(f"alarm/{number}", alarm.render().decode())

    def next_alarm(self) -> RankAlarm | None:
        """Return the next alarm of another rank since the last renewal, or None."""
        key = f"alarm/{self._alarms_heard + 1}"
        if not self._control.check([key]):
            return None
        self._alarms_heard += 1
        return parse_rank_alarm(self._control.get(key))

    def renew(self) -> None:
        """Start over under other keys, after an alarm."""
        self._epoch, self._round, self._alarms_heard = self._epoch + 1, 0, 0
        self._control = PrefixStore(f"{self._prefix}-{self._epoch}", self._store)

    @report_store_failure
    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        self._check_same_verb()
        self._control.set(f"{self._round + 1}/{self.rank}", json.dumps(value))
        self._meet(1)
        texts = self._control.multi_get([f"{self._round}/{rank}" for rank in range(self.size)])
        values = [json.loads(text) for text in texts]
        mine = f"{self._round}/{self.rank}"
        self._meet(1)
        self._control.delete_key(mine)
        return values

    @report_store_failure
    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        self._check_same_verb()
        if self.rank == 0:
            self._control.set(f"{self._round + 1}/value", json.dumps(value))
        self._meet(1)
        key = f"{self._round}/value"
        text = self._control.get(key)
        self._meet(1)
        if self.rank == 0:
            self._control.delete_key(key)
        return json.loads(text)

    @report_store_failure
    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags; the function returned waits for the union (bitwise or) of all ranks'."""
        self._check_same_verb()
        self._arrive(1 + sum(_ARRIVALS ** (bit + 1) for bit in range(2) if flags >> bit & 1))
        number = self._round

        def finish() -> int:
            votes = self._published(number) // _ARRIVALS
            return (1 if votes % _ARRIVALS else 0) | (2 if votes // _ARRIVALS else 0)

        return finish

    def store(self) -> Store:
        """Return the store that the ranks met in."""
        return PrefixStore("groups", self._store)
