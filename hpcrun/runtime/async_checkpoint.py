"""Saves that training does not wait for: copied into the node's memory, and stored from there by its worker.

All ranks decide alike on every save, by the union of a few bits of each. What fails is told and costs that
save alone; only one that must not be lost raises an error, after the ranks have tried to write it themselves.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from torch import Tensor
from xxhash import xxh3_128_hexdigest

from hpcrun.checkpoint.commit import locate_draft
from hpcrun.checkpoint.levels import CHECKPOINT_LEVELS, CheckpointLevel, GenerationId
from hpcrun.errors import SiteError
from hpcrun.runtime.control import Control
from hpcrun.runtime.direct_checkpoint import Checkpointer
from hpcrun.runtime.pending_save import Flight, HowFar, Tell, levels_of
from hpcrun.runtime.resharding import WritePlan, plan_write, structure_key
from hpcrun.runtime.snapshot import Copied, Snapshot
from hpcrun.runtime.worker_client import STUCK_S, DrainGoneError, DrainLink, Home
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.saves import Saved, read_save

_NEW, _GONE, _BUSY, _UNTOLD, _REFUSED, _HOPES, _SINGLE, _LATE = (1 << bit for bit in range(8))
_WINDOW, _FLAGS = 24, 8
"""A rank speaks of so many saves, and before them of so many flags, in the bits of one union."""
_LOOK_S = 0.05
_DEGRADE_S = 5.0
"""For the worker to come to the end of what it is at, when its next levels are left out."""
_CALLED_S, _WRITE_S = 5.0, 60.0
"""For a sign of life of a worker that has been there, and for storage to take a save that memory does not
have: where training is not to be stopped."""
_IN_VAIN = 20
"""Looks for a slot while no save is on its way to anywhere."""


class SavesBehind:
    """Saves through the memory of the nodes, of all ranks together."""

    def __init__(
        self, spec: CheckpointSpec, direct: Checkpointer, control: Control, home: Home, tell: Tell
    ) -> None:
        self._spec, self._direct, self._control, self._home, self._tell = spec, direct, control, home, tell
        self._link: DrainLink | None = None
        self._snapshot: Snapshot | None = None
        self._plan: WritePlan | None = None
        self._key, self._known = 0, False
        self._offered: list[str] = []
        self._is_single = False
        """Some node has memory for one state only, which must not lose its place before it has another."""
        self._reported: set[tuple[int, str]] = set()
        self._seed, self._serial = "", 0
        self._node, self._local_ranks = "", list[int]()
        self._flights: dict[int, Flight] = {}
        self._current: Flight | None = None
        self._published: str | None = None
        self._untold: list[dict[str, Any]] = []
        self._how_far = HowFar(direct.root, tell)
        self._vain = self._left_out = 0
        self._may_wait = spec.behind == "wait"
        """Whether training may be stopped for as long as it takes."""

    def save(self, step: int, position: int, state: dict[str, Tensor], *, lasting: bool = False) -> bool:
        """Begin to save the state of a step; it must stay as it is until the fence. False: left out.

        With `lasting` it goes to the run directory, whatever step it is. What is due there is written by the
        ranks at once where memory cannot be had.
        """
        begun = self._begin(step, position, state, lasting=lasting, may_wait=self._may_wait)
        is_due = lasting or not self._spec.durable.every or step % self._spec.durable.every == 0
        if begun == "refused" and is_due:
            return self._write_instead(step, position, state)
        return begun == "begun"

    def _begin(
        self, step: int, position: int, state: dict[str, Tensor], *, lasting: bool, may_wait: bool = True
    ) -> Literal["begun", "refused", "skipped"]:
        self.fence()
        begin, at = time.monotonic(), time.time()
        entries = self._direct.entries(state)
        self._serial += 1
        self._flights.pop(self._serial - _WINDOW, None)
        if (
            not self._get_ready(step, entries, may_wait=may_wait)
            or self._plan is None
            or self._snapshot is None
        ):
            return "refused"
        generation = xxh3_128_hexdigest(f"{self._seed} {step} {self._serial}".encode())
        slot = self._claim(step, generation, wait=lasting, may_wait=may_wait)
        if not isinstance(slot, int):
            return slot
        owner = (self._control.size, self._direct.attempt, self._direct.descent)
        stamp = GenerationId(generation, step, position, *owner)
        levels, size = self._levels(step, lasting=lasting), self._plan.whole_bytes
        flight = Flight(self._serial, stamp, slot, self._key, levels, size, at, 0.0)
        self._flights[self._serial] = self._current = flight
        self._snapshot.start(slot, self._key, self._plan, entries)
        flight.stall_s = time.monotonic() - begin
        return "begun"

    def _write_instead(self, step: int, position: int, state: dict[str, Tensor]) -> bool:
        """Write a state that memory does not take, and wait for it; that it fails is told.

        Where training is not to be stopped, storage that has failed to take one is asked again after two
        saves, then after four, and so on.
        """
        if not self._may_wait and self._left_out < self._vain:
            self._left_out += 1
            if self._control.rank == 0:
                why = "memory does not take it, and storage has not taken the last one either"
                self._tell({"kind": "save_skipped", "step": step, "why": why})
            return False
        try:
            self._write(step, position, state)
        except SiteError as error:
            self._vain, self._left_out = max(2, 2 * self._vain), 0
            if self._control.rank == 0:
                self._report_failure(step, "durable", str(error))
            return False
        self._vain = 0
        return True

    def _write(self, step: int, position: int, state: dict[str, Tensor]) -> None:
        begin = time.monotonic()
        limit_s = None if self._may_wait else _WRITE_S
        self._direct.save(step, position, state, beside=True, limit_s=limit_s)
        if self._control.rank == 0:
            self._tell({"kind": "save", "step": step, "seconds": time.monotonic() - begin})

    def has_restored(self, generation: str) -> None:
        """All ranks go on from this generation: what is older is needed no more."""
        self._published = generation or None

    def fence(self) -> None:
        """Wait until the state may be changed again; what went wrong with the copy is told, not raised."""
        self._listen()
        flight, self._current = self._current, None
        if flight is None or self._snapshot is None:
            return
        try:
            copied = self._snapshot.fence()
            if self._link is None:
                return  # it was told when the worker was lost
            self._link.filled(flight.slot, flight.key, asdict(flight.stamp), list(flight.levels))
        except DrainGoneError as error:
            self._hang_up(str(error))
        except SiteError as error:
            why = str(error)
            self._fail(flight, "memory", why)
            self._try(lambda: self._lose(flight, why))
        else:
            self._tell_of_copy(flight, copied)

    def _lose(self, flight: Flight, why: str) -> None:
        if self._link is not None:
            self._link.lost(asdict(flight.stamp), why)

    def _tell_of_copy(self, flight: Flight, copied: Copied) -> None:
        if self._control.rank == 0:
            self._tell(
                {
                    "kind": "save",
                    "step": flight.stamp.step,
                    "seconds": flight.stall_s + copied.wait_s,
                    "level": "memory",
                    "copy_s": copied.copy_s,
                    "fence_wait_s": copied.wait_s,
                    "bytes": flight.size_bytes,
                }
            )

    def save_lasting(self, step: int, position: int, state: dict[str, Tensor]) -> None:
        """Save the state of a step in the run directory and wait for it; SiteError on every rank if it fails.

        Where it cannot go through memory, the ranks write it themselves.
        """
        self._begin(step, position, state, lasting=True)
        self.fence()
        self._listen(_LOOK_S)  # only rank 0 waits below, but the workers of all have to hear of it
        flight = self._flights.get(self._serial)
        # What failed on one rank need not be waited for on the others.
        lost = flight is None or "memory" in flight.outcomes
        is_lost = bool(self._meet(_REFUSED if lost else 0) & _REFUSED)
        if not self._control.everywhere(lambda: self._arrives(step, None if is_lost else flight)):
            self._write(step, position, state)

    def settle(self, *levels: CheckpointLevel) -> None:
        """Wait until all that was begun has arrived at these levels, or has failed to; else at all levels."""
        self.fence()
        for flight in list(self._flights.values()):
            while set(flight.ahead) & set(levels or CHECKPOINT_LEVELS) and self._link is not None:
                self._how_far.say(flight)
                self._listen(_LOOK_S)
        self._meet(0)

    def close(self) -> None:
        """Let go of worker and memory; what was filled stays the worker's to store."""
        self.fence()
        if self._link is not None:
            self._link.close()
        if self._snapshot is not None:
            self._snapshot.close()
        self._link = self._snapshot = None
        # The worker of a node serves all of its ranks.
        self._control.barrier()
        self._home.close()

    def begin_anew(self) -> None:
        """After ranks have fallen apart: they agree on everything again; what was filled is still stored."""
        if self._link is not None:
            self._link.close()
        if self._snapshot is not None:
            self._snapshot.close()
        self._link = self._snapshot = self._plan = self._current = None
        self._known, self._seed, self._serial = False, "", 0
        self._flights.clear()
        self._untold.clear()

    def let_go(self) -> None:
        """Close without asking anybody, after an error."""
        self.begin_anew()
        self._home.close()

    def _levels(self, step: int, *, lasting: bool) -> list[CheckpointLevel]:
        levels = levels_of(self._spec, step, lasting=lasting, is_single=self._is_single)
        return [level for level in levels if level in self._offered]

    def _get_ready(self, step: int, entries: dict[str, Tensor], *, may_wait: bool) -> bool:
        """Whether every rank has a worker, slots, and a plan for this state that its worker knows."""
        self._listen()
        key = structure_key(entries)
        bits, why = self._try(lambda: self._connect(may_wait=may_wait))
        is_other = self._plan is None or self._plan.key != key
        told = self._meet(bits | (0 if self._known and not is_other else _NEW))
        if told & _GONE:
            return self._give_up(step, why)
        if not self._seed:
            self._seed = self._control.everywhere(lambda: secrets.token_hex(16))
            nodes = self._control.allgather(self._node)
            self._local_ranks = [rank for rank, node in enumerate(nodes) if node == self._node]
        if not told & _NEW:
            return True
        # A worker answers when all ranks of its node have come to it.
        self._plan, self._known = plan_write(entries, self._control, key, self._node), False
        bits, why = self._try(self._reserve)
        told = self._meet(bits)
        self._is_single = bool(told & _SINGLE)
        return not told & (_GONE | _REFUSED) or self._give_up(step, why)

    def _try(self, action: Callable[[], int | None]) -> tuple[int, str]:
        """What this rank has to tell the others of an attempt to talk to its worker: flags, and a problem."""
        try:
            return action() or 0, ""
        except DrainGoneError as error:
            self._hang_up(str(error))
            return _GONE, str(error)
        except SiteError as error:
            return _REFUSED, str(error)

    def _give_up(self, step: int, why: str) -> bool:
        """Tell why this rank cannot take part in a save, if it is this one; every rank comes here."""
        if why:
            self._report_failure(step, "memory", why)
        self._meet(0)
        return False

    def _connect(self, *, may_wait: bool) -> None:
        if self._link is not None:
            return
        # One that has been there, and is not, may be stopped, or hang where nobody can end it.
        known = bool(self._node) and not may_wait
        deadline = time.monotonic() + (_CALLED_S if known else self._home.patience_s)
        while self._link is None:
            try:
                socket = self._home.socket()
                sign_s = _CALLED_S if known else STUCK_S
                self._link, self._known = DrainLink(socket, self._control.rank, sign_s), False
            except DrainGoneError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)
        # Nodes that are only pretended share a host, but not a worker.
        self._node = f"{self._control.node} {socket}"

    def _reserve(self) -> int:
        """See to it that there are slots for the plan, and that the worker knows it."""
        plan = self._plan
        if self._link is None or plan is None:
            return 0
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
        asked = (plan.part_bytes, self._spec.memory, self._local_ranks, self._control.size)
        paths, self._offered = self._link.reserve(*asked)
        self._snapshot = Snapshot(paths, plan.part_bytes, self._control.rank)
        self._key += 1
        self._link.plan(self._key, [list(piece) for piece in plan.pieces], plan.file, plan.start)
        self._known = True
        return _SINGLE if len(paths) == 1 else 0

    def _claim(
        self, step: int, generation: str, *, wait: bool, may_wait: bool
    ) -> int | Literal["refused", "skipped"]:
        """A slot on every rank, or on none: what is busy is waited for or not, as the job has it."""
        slot: int | None = None
        busy = ""
        behind = "wait" if wait and self._spec.behind == "skip" else self._spec.behind

        def claim() -> int:
            nonlocal slot, busy
            if slot is None and self._link is not None:
                answer_s = None if may_wait else _CALLED_S
                answer = self._link.claim(generation, step, self._published, answer_s)
                slot, busy = (answer, "") if isinstance(answer, int) else (None, answer)
            hopes = any(flight.ahead for flight in self._flights.values())
            is_late = time.monotonic() - begin > _DEGRADE_S or bool(self._held_up())
            bits = (_BUSY if slot is None else 0) | (_HOPES if hopes else 0)
            return bits | (_LATE if is_late else 0)

        begin, tries, in_vain = time.monotonic(), 0, 0
        while True:
            bits, why = self._try(claim)
            told = self._meet(bits)
            in_vain += not told & _HOPES
            if told & _BUSY and in_vain > _IN_VAIN:
                told, why = told | _REFUSED, busy
            if told & (_GONE | _REFUSED):
                self._give_up(step, why)
                return "refused"
            if slot is not None and not told & _BUSY:
                return slot
            if (behind == "skip" and tries) or (behind == "degrade" and told & _LATE and not wait):
                if self._control.rank == 0:
                    why = "; ".join(filter(None, [busy or "another rank is behind", self._held_up()]))
                    self._tell({"kind": "save_skipped", "step": step, "why": why})
                return "skipped"
            oldest = next((flight for flight in self._flights.values() if flight.ahead), None)
            if tries and oldest is not None and self._control.rank == 0:
                self._how_far.say(oldest)
            if behind == "degrade" and tries == 1 and self._link is not None:
                self._try(self._link.degrade)
            # The first try did not know yet what all nodes have sealed by now; the next ones wait.
            self._listen(_LOOK_S if tries else 0.0, hasten=True)
            tries += 1

    def _meet(self, bits: int) -> int:
        """The union of all ranks' flags; learns what all nodes have sealed, and what failed elsewhere."""
        if self._untold:
            bits |= _UNTOLD
        serials = range(max(1, self._serial - _WINDOW + 1), self._serial + 1)
        for serial in serials:
            flight, place = self._flights.get(serial), self._serial - serial
            if flight is None or not flight.is_sealed:
                bits |= 1 << (_FLAGS + place)
            if flight is None or flight.is_new:
                bits |= 1 << (_FLAGS + _WINDOW + place)
        told = self._control.union(bits)
        sealed = [one for one in serials if not told >> (_FLAGS + self._serial - one) & 1]
        if sealed:
            self._published = self._flights[sealed[-1]].stamp.generation
        if told & _UNTOLD:
            untold, self._untold = self._untold, []
            for record in [one for rank in self._control.allgather(untold) for one in rank]:
                self._tell_failure(record)
        self._warn_of_same(
            [one for one in serials if not told >> (_FLAGS + _WINDOW + self._serial - one) & 1]
        )
        return told

    def _warn_of_same(self, serials: list[int]) -> None:
        """Say it once when two saves hold the same bytes: what trains may not be what is saved."""
        for serial in serials:
            flight = self._flights[serial]
            flight.is_new = True
            if self._control.rank == 0:
                why = "its bytes are those of the save before; is what trains what is saved?"
                self._tell({"kind": "save_unchanged", "step": flight.stamp.step, "why": why})

    def _listen(self, wait_s: float = 0.0, *, hasten: bool = False) -> None:
        """Take in what the worker has told; where that is waited for, it hears so."""
        if self._link is None:
            return
        try:
            if hasten or wait_s:
                self._link.hasten()
            for told in self._link.news(wait_s):
                self._hear(told)
            if wait_s:  # a worker that is stopped or stuck is not waited for
                self._link.prod()
        except DrainGoneError as error:
            self._hang_up(str(error))

    def _hear(self, told: Mapping[str, Any]) -> None:
        generation = told.get("generation") or told.get("stamp", {}).get("generation")
        flight = next((f for f in self._flights.values() if f.stamp.generation == generation), None)
        if flight is None:
            return
        kind, level = told.get("kind"), str(told.get("level", "memory"))
        if kind == "sealed":
            flight.is_sealed = True
            self._compare(flight)
        elif kind == "stalled":
            flight.held_up = str(told.get("why"))
            words = {"level": level, "seconds": told.get("seconds"), "why": self._place + flight.held_up}
            self._report({"kind": "save_stalled", "step": flight.stamp.step, **words})
        elif kind == "failed" or (kind == "stored" and told.get("problem")):
            # All ranks of the node are told the same.
            is_speaker = self._control.rank == self._local_ranks[0]
            self._fail(flight, level, str(told.get("why") or told.get("problem")), is_told=is_speaker)
        elif kind == "stored" and level not in flight.outcomes:
            flight.outcomes[level] = None
            if self._control.rank == 0:
                step, seconds = flight.stamp.step, told.get("seconds")
                record = {"kind": "stored", "step": step, "level": level, "seconds": seconds}
                size, lag = told.get("size_bytes"), time.time() - flight.begun
                self._tell({**record, "bytes": size, "lag_s": lag, "facts": told.get("facts") or {}})

    def _compare(self, flight: Flight) -> None:
        if self._plan is None or self._snapshot is None or flight.key != self._key:
            return
        flight.content = self._snapshot.content(flight.slot, flight.key, self._plan.pieces)
        before = self._flights.get(flight.serial - 1)
        flight.is_new = before is None or before.content != flight.content

    def _fail(self, flight: Flight, level: str, why: str, *, is_told: bool = True) -> None:
        """This save does not reach a level; one that memory does not have reaches none."""
        if level in flight.outcomes:
            return
        for one in [level, *(flight.ahead if level == "memory" else [])]:
            flight.outcomes[one] = why
        if is_told:
            self._report_failure(flight.stamp.step, level, why)

    def _hang_up(self, why: str) -> None:
        """The worker is gone: what it had not stored yet is marked failed at once."""
        if self._link is not None:
            self._link.close()
        self._link = None
        for flight in self._flights.values():
            for level in flight.ahead if flight.is_sealed else ["memory"]:
                if level == "durable" and self._is_committed(flight, _CALLED_S):
                    flight.outcomes[level] = None  # it only did not live to tell
                else:
                    self._fail(flight, level, why)

    def _report_failure(self, step: int, level: str, why: str) -> None:
        self._report({"kind": "save_failed", "step": step, "level": level, "why": self._place + why})

    @property
    def _place(self) -> str:
        return f"rank {self._control.rank} on {self._control.node}: "

    def _held_up(self) -> str:
        """What the oldest save on its way waits for, where that has been long."""
        return next((one.held_up for one in self._flights.values() if one.ahead and one.held_up), "")

    def _report(self, record: dict[str, Any]) -> None:
        """Rank 0 writes it; what the first rank of another node knows reaches it at the next agreement."""
        if self._control.rank == 0:
            self._tell_failure(record)
        elif record["kind"] == "save_failed" or self._control.rank == self._local_ranks[0]:
            self._untold.append(record)

    def _tell_failure(self, record: dict[str, Any]) -> None:
        """On rank 0, once for a save and a level: many ranks may have seen it fail."""
        which = (record["step"], record["level"])
        is_new = record["kind"] != "save_failed" or which not in self._reported
        if self._control.rank == 0 and is_new:
            self._reported.update([which] if record["kind"] == "save_failed" else [])
            self._tell(record)

    def _arrives(self, step: int, flight: Flight | None) -> bool:
        """On rank 0: wait until a save is in the run directory; whether it got there."""
        if flight is None:
            return False
        while "durable" in flight.ahead and self._link is not None:
            self._how_far.say(flight)
            self._listen(_LOOK_S)
        if flight.outcomes.get("durable", "not asked for") is None:
            return True
        # It may have been committed by a worker that did not live to tell.
        return self._is_committed(flight, None)

    def _is_committed(self, flight: Flight, limit_s: float | None) -> bool:
        stamp = flight.stamp
        final = locate_draft(self._direct.root, stamp.step, stamp.attempt, bytes(16)).final
        try:
            saved = self._direct.patiently(final, lambda: read_save(final), limit_s)
        except SiteError:  # storage that does not answer proves no commit
            return False
        return isinstance(saved, Saved) and saved.generation == stamp.generation
