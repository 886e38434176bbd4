"""Saves that training does not wait for: copied into the node's memory, and stored from there by its worker.

All ranks decide alike on every save, by the union of a few bits of each. A failure is recorded and costs that
save alone. Only a save that must not be lost raises an error, after the ranks have tried to write it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Literal

from torch import Tensor
from xxhash import xxh3_128_hexdigest

from hpcrun.checkpoint.commit import locate_draft
from hpcrun.checkpoint.tier import TIER_NAMES, CheckpointId, StoreResult, TierName
from hpcrun.checkpoint.worker_messages import PartSealed, RankNews, SaveFailed, SaveStalled, WorkerPong
from hpcrun.errors import SiteError
from hpcrun.runtime.control import Control
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
from hpcrun.runtime.pending_save import (
    MetricWriter,
    PendingSave,
    PendingSaves,
    SaveProgressReporter,
    SaveReports,
    target_tiers,
)
from hpcrun.runtime.resharding import structure_key
from hpcrun.runtime.snapshot import CopyResult
from hpcrun.runtime.worker_client import WorkerEndpoint, WorkerGoneError
from hpcrun.runtime.worker_session import QUICK_ANSWER_S, WorkerSession
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.metrics import SaveMetric, SaveSkippedMetric, SaveUnchangedMetric, StoredMetric
from hpcrun.specs.saves import SavedCheckpoint, read_saved_checkpoint

_NEW, _GONE, _BUSY, _UNREPORTED, _REFUSED, _SLOT_EXPECTED, _SINGLE, _LATE = (1 << bit for bit in range(8))
_FLAGS = 8
"""The number of flags in a rank's bits; above them are those of `PendingSaves.missing_bits`."""
_SLOT_POLL_S = 0.05
_DEGRADE_S = 5.0
"""For the worker to finish the tier that it is at, when further ones are skipped."""
_WRITE_S = 60.0
"""For storage to take a save that memory does not have room for, where training must not wait."""
_MAX_FRUITLESS_POLLS = 20
"""Polls for a slot while no save is on its way to any tier."""


class AsyncCheckpointer:
    """Saves through the memory of the nodes, all ranks together."""

    def __init__(
        self,
        spec: CheckpointSpec,
        direct: DirectCheckpointer,
        control: Control,
        home: WorkerEndpoint,
        record: MetricWriter,
    ) -> None:
        self._spec, self._direct, self._control, self._home = spec, direct, control, home
        self._session = WorkerSession(control, home)
        self._reports = SaveReports(control, record)
        self._saves = PendingSaves()
        self._current: PendingSave | None = None
        self._is_single = False
        """Whether a node has memory for one state only, which must be stored before the next replaces it."""
        self._seed = ""
        self._progress_reporter = SaveProgressReporter(direct.root, record)
        self._saves_to_skip = self._skipped_saves = 0
        self._may_wait = spec.on_backlog == "wait"
        """Whether training may wait as long as a save takes."""

    def save(self, step: int, position: int, state: dict[str, Tensor], *, lasting: bool = False) -> bool:
        """Begin to save a state, which must not change until the fence; False where it is skipped.

        `lasting`: save to the run directory whatever the step. Where there is no memory, the ranks write
        directly what is due in the run directory.
        """
        begun = self._begin(step, position, state, lasting=lasting, may_wait=self._may_wait)
        is_due = lasting or not self._spec.durable.every or step % self._spec.durable.every == 0
        if begun == "refused" and is_due:
            return self._save_directly(step, position, state)
        return begun == "begun"

    def _begin(
        self, step: int, position: int, state: dict[str, Tensor], *, lasting: bool, may_wait: bool = True
    ) -> Literal["begun", "refused", "skipped"]:
        self.fence()
        begin, at = time.monotonic(), time.time()
        entries = self._direct.entries(state)
        serial, session = self._saves.next_serial(), self._session
        is_ready = self._prepare_worker(step, entries, may_wait=may_wait)
        if not is_ready or session.plan is None or session.snapshot is None:
            return "refused"
        generation = xxh3_128_hexdigest(f"{self._seed} {step} {serial}".encode())
        slot = self._claim(step, generation, wait=lasting, may_wait=may_wait)
        if not isinstance(slot, int):
            return slot
        owner = (self._control.size, self._direct.attempt, self._direct.descent)
        stamp = CheckpointId(generation, step, position, *owner)
        tiers, size = self._tiers(step, lasting=lasting), session.plan.whole_bytes
        self._current = save = PendingSave(serial, stamp, slot, session.key, tiers, size, at, 0.0)
        self._saves.add(save)
        session.snapshot.start(slot, session.key, session.plan, entries)
        save.stall_s = time.monotonic() - begin
        return "begun"

    def _save_directly(self, step: int, position: int, state: dict[str, Tensor]) -> bool:
        """Write a state directly and wait for it; a failure is recorded.

        Where training must not wait, storage that has failed is tried again after two saves, then four, and
        so on.
        """
        if not self._may_wait and self._skipped_saves < self._saves_to_skip:
            self._skipped_saves += 1
            why = "memory does not take it, and storage has not taken the last one either"
            self._reports.record(SaveSkippedMetric(step, why))
            return False
        try:
            self._write(step, position, state)
        except SiteError as error:
            self._saves_to_skip, self._skipped_saves = max(2, 2 * self._saves_to_skip), 0
            if self._control.rank == 0:
                self._reports.fail(step, "durable", str(error))
            return False
        self._saves_to_skip = 0
        return True

    def _write(self, step: int, position: int, state: dict[str, Tensor]) -> None:
        begin = time.monotonic()
        limit_s = None if self._may_wait else _WRITE_S
        self._direct.save(step, position, state, beside=True, limit_s=limit_s)
        self._reports.record(SaveMetric(step, time.monotonic() - begin))

    def record_restored(self, generation: str) -> None:
        """Note that all ranks continue from this generation: older ones are not needed any more."""
        self._saves.published = generation or None

    def fence(self) -> None:
        """Wait until the state may change again; a failed copy is recorded and not raised."""
        self._listen()
        save, self._current = self._current, None
        session = self._session
        if save is None or session.snapshot is None:
            return
        try:
            copied = session.snapshot.fence()
            if session.link is None:
                return  # recorded when the worker was lost
            session.link.filled(save.slot, save.key, save.stamp, list(save.tiers))
        except WorkerGoneError as error:
            self._disconnect_worker(str(error))
        except SiteError as error:
            why = str(error)
            self._fail(save, "memory", why)
            if (link := session.link) is not None:
                self._try(lambda: link.lost(save.stamp, why))
        else:
            self._record_copy(save, copied)

    def _record_copy(self, save: PendingSave, copied: CopyResult) -> None:
        self._reports.record(
            SaveMetric(
                save.stamp.step,
                seconds=save.stall_s + copied.wait_s,
                tier="memory",
                copy_s=copied.copy_s,
                fence_wait_s=copied.wait_s,
                size_bytes=save.size_bytes,
            )
        )

    def save_durably(self, step: int, position: int, state: dict[str, Tensor]) -> None:
        """Save to the run directory and wait for it; SiteError on every rank if it fails.

        Where it cannot go through memory, the ranks write it directly.
        """
        self._begin(step, position, state, lasting=True)
        self.fence()
        self._listen(_SLOT_POLL_S)  # only rank 0 waits below, but every worker must hasten
        save = self._saves.newest
        # A save that failed on one rank is lost on all.
        lost = save is None or "memory" in save.outcomes
        is_lost = bool(self._meet(_REFUSED if lost else 0) & _REFUSED)
        if not self._control.everywhere(lambda: self._await_durable(None if is_lost else save)):
            self._write(step, position, state)

    def settle(self, *tiers: TierName) -> None:
        """Wait until every save has an outcome at these tiers; by default at all tiers."""
        self.fence()
        for save in self._saves:
            while set(save.pending_tiers) & set(tiers or TIER_NAMES) and self._session.link is not None:
                self._progress_reporter.report(save)
                self._listen(_SLOT_POLL_S)
        self._meet(0)

    def close(self) -> None:
        """Release worker and memory; the worker still stores what was filled."""
        self.fence()
        self._session.close()
        # The worker of a node serves all of its ranks.
        self._control.barrier()
        self._home.close()

    def reset_after_failure(self) -> None:
        """Start over after ranks have lost each other; the worker still stores what was filled."""
        self._session.reset()
        self._current, self._seed = None, ""
        self._saves.clear()
        self._reports.clear()

    def release_locally(self) -> None:
        """Close after an error, without the other ranks."""
        self.reset_after_failure()
        self._home.close()

    def _tiers(self, step: int, *, lasting: bool) -> list[TierName]:
        tiers = target_tiers(self._spec, step, lasting=lasting, is_single=self._is_single)
        return [tier for tier in tiers if tier in self._session.offered]

    def _prepare_worker(self, step: int, entries: dict[str, Tensor], *, may_wait: bool) -> bool:
        """Whether every rank has a worker with slots and a plan for this state."""
        self._listen()
        key, session = structure_key(entries), self._session
        bits, why = self._try(lambda: session.connect(may_wait=may_wait))
        union = self._meet(bits | (0 if session.has_plan(key) else _NEW))
        if union & _GONE:
            return self._give_up(step, why)
        if not self._seed:
            self._seed = self._control.everywhere(lambda: secrets.token_hex(16))
            nodes = self._control.allgather(session.node)
            self._reports.local_ranks = [rank for rank, node in enumerate(nodes) if node == session.node]
        if not union & _NEW:
            return True
        # A worker answers when all ranks of its node have asked.
        session.plan_state(entries, key)
        bits, why = self._try(self._reserve)
        union = self._meet(bits)
        self._is_single = bool(union & _SINGLE)
        return not union & (_GONE | _REFUSED) or self._give_up(step, why)

    def _reserve(self) -> int:
        slots = self._session.reserve(self._spec.memory, self._reports.local_ranks)
        return _SINGLE if slots == 1 else 0

    def _try(self, action: Callable[[], int | None]) -> tuple[int, str]:
        """Talk to the worker; return flags for the other ranks, and a problem if any."""
        try:
            return action() or 0, ""
        except WorkerGoneError as error:
            self._disconnect_worker(str(error))
            return _GONE, str(error)
        except SiteError as error:
            return _REFUSED, str(error)

    def _give_up(self, step: int, why: str) -> bool:
        """Report why this rank cannot take part in a save, if it cannot; every rank calls it."""
        if why:
            self._reports.fail(step, "memory", why)
        self._meet(0)
        return False

    def _claim(
        self, step: int, generation: str, *, wait: bool, may_wait: bool
    ) -> int | Literal["refused", "skipped"]:
        """Claim a slot on every rank or on none; whether to wait for busy ones is the job's choice."""
        slot: int | None = None
        busy = ""
        behind = "wait" if wait and self._spec.on_backlog == "skip" else self._spec.on_backlog

        def claim() -> int:
            nonlocal slot, busy
            link = self._session.link
            if slot is None and link is not None:
                answer_s = None if may_wait else QUICK_ANSWER_S
                answer = link.claim(generation, self._saves.published, answer_s)
                slot, busy = (answer, "") if isinstance(answer, int) else (None, answer)
            is_late = time.monotonic() - begin > _DEGRADE_S or bool(self._saves.waits_for)
            bits = (_BUSY if slot is None else 0) | (_SLOT_EXPECTED if self._saves.oldest_unfinished else 0)
            return bits | (_LATE if is_late else 0)

        begin, tries, fruitless_polls = time.monotonic(), 0, 0
        while True:
            bits, why = self._try(claim)
            union = self._meet(bits)
            fruitless_polls += not union & _SLOT_EXPECTED
            if union & _BUSY and fruitless_polls > _MAX_FRUITLESS_POLLS:
                union, why = union | _REFUSED, busy
            if union & (_GONE | _REFUSED):
                self._give_up(step, why)
                return "refused"
            if slot is not None and not union & _BUSY:
                return slot
            if (behind == "skip" and tries) or (behind == "degrade" and union & _LATE and not wait):
                why = "; ".join(filter(None, [busy or "another rank is behind", self._saves.waits_for]))
                self._reports.record(SaveSkippedMetric(step, why))
                return "skipped"
            oldest = self._saves.oldest_unfinished
            if tries and oldest is not None and self._control.rank == 0:
                self._progress_reporter.report(oldest)
            if behind == "degrade" and tries == 1 and self._session.link is not None:
                self._try(self._session.link.degrade)
            # The first try did not know what all nodes have sealed; only the next ones wait.
            self._listen(_SLOT_POLL_S if tries else 0.0, hasten=True)
            tries += 1

    def _meet(self, bits: int) -> int:
        """Return the union of all ranks' flags; learn what all nodes have sealed, and new failures."""
        if self._reports.has_unreported:
            bits |= _UNREPORTED
        union = self._control.union(bits | self._saves.missing_bits() << _FLAGS)
        unchanged = self._saves.learn(union >> _FLAGS)
        if union & _UNREPORTED:
            self._reports.exchange()
        for save in unchanged:
            why = "its bytes are those of the save before; is what trains what is saved?"
            self._reports.record(SaveUnchangedMetric(save.stamp.step, why))
        return union

    def _listen(self, wait_s: float = 0.0, *, hasten: bool = False) -> None:
        """Handle the worker's messages; `hasten` or a wait tells it that training waits."""
        link = self._session.link
        if link is None:
            return
        try:
            if hasten or wait_s:
                link.hasten()
            for message in link.news(wait_s):
                self._handle(message)
            if wait_s:  # gives up a worker that is stopped or stuck
                link.prod()
        except WorkerGoneError as error:
            self._disconnect_worker(str(error))

    def _handle(self, message: RankNews) -> None:
        save = None if isinstance(message, WorkerPong) else self._saves.find(message.stamp.generation)
        if save is None:
            return
        match message:
            case PartSealed():
                save.is_sealed = True
                self._compare(save)
            case SaveStalled(_, tier, why, seconds):
                save.waits_for = why
                self._reports.stall(save.stamp.step, tier, seconds, why)
            case SaveFailed(_, tier, why):
                # All ranks of the node hear the same.
                self._fail(save, tier, why, is_reported=self._reports.is_speaker)
            case StoreResult(_, tier, seconds, size_bytes) if tier not in save.outcomes:
                save.outcomes[tier] = None
                facts = dict(message.facts)
                self._reports.record(
                    StoredMetric(
                        save.stamp.step,
                        tier,
                        seconds=max(0.0, seconds),
                        size_bytes=size_bytes,
                        # The wall clock may have been set meanwhile.
                        lag_s=max(0.0, time.time() - save.begun),
                        stored_bytes=facts.pop("stored_bytes", None),
                        rested_s=facts.pop("rested_s", 0.0),
                        facts=facts,
                    )
                )

    def _compare(self, save: PendingSave) -> None:
        session = self._session
        if session.plan is not None and session.snapshot is not None and save.key == session.key:
            self._saves.compare(save, session.snapshot.content(save.slot, save.key, session.plan.pieces))

    def _fail(self, save: PendingSave, tier: str, why: str, *, is_reported: bool = True) -> None:
        """Mark that a save does not reach a tier; without memory it reaches none."""
        if tier in save.outcomes:
            return
        for missed in [tier, *(save.pending_tiers if tier == "memory" else [])]:
            save.outcomes[missed] = why
        if is_reported:
            self._reports.fail(save.stamp.step, tier, why)

    def _disconnect_worker(self, why: str) -> None:
        """Hang up on a lost worker, and mark what it had not stored as failed."""
        self._session.disconnect()
        for save in self._saves:
            for tier in save.pending_tiers if save.is_sealed else ["memory"]:
                if tier == "durable" and self._is_committed(save, QUICK_ANSWER_S):
                    save.outcomes[tier] = None  # the worker committed it and ended before it said so
                else:
                    self._fail(save, tier, why)

    def _await_durable(self, save: PendingSave | None) -> bool:
        """Wait on rank 0 until a save has an outcome in the run directory; return whether it is there."""
        if save is None:
            return False
        while "durable" in save.pending_tiers and self._session.link is not None:
            self._progress_reporter.report(save)
            self._listen(_SLOT_POLL_S)
        if save.outcomes.get("durable", "not asked for") is None:
            return True
        # A worker may have committed it and ended before it said so.
        return self._is_committed(save, None)

    def _is_committed(self, save: PendingSave, limit_s: float | None) -> bool:
        stamp = save.stamp
        final = locate_draft(self._direct.root, stamp.step, stamp.attempt, bytes(16)).final
        try:
            saved = self._direct.patiently(final, lambda: read_saved_checkpoint(final), limit_s)
        except SiteError:  # storage does not answer
            return False
        return isinstance(saved, SavedCheckpoint) and saved.generation == stamp.generation
