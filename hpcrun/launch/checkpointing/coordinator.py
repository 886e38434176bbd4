"""The supervisor's side of saves in memory: what an attempt goes on from, and how far its own saves come."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from hpcrun.checkpoint import worker_messages as wire
from hpcrun.checkpoint.commit import find_save_problem
from hpcrun.checkpoint.flush.arena import SHM, SOCKET_NAME, default_arena_folder
from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.parity.sets import ErasureSets, FailureDomains, choose_erasure_sets
from hpcrun.checkpoint.restore.decide import decide_restore, describe_plan_tiers, node_failure_key
from hpcrun.checkpoint.restore.intact_parts import find_intact_parts
from hpcrun.checkpoint.restore_plan import RestorePlan
from hpcrun.checkpoint.tier import CheckpointId, InventoryEntry, StoreResult
from hpcrun.errors import SiteError, UsageError
from hpcrun.launch.agents.nodes import NodeWorkers
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.checkpointing.durability_watchdog import DurabilityWatchdog
from hpcrun.launch.checkpointing.object_restore import ObjectStoreSource
from hpcrun.launch.checkpointing.pumping import run_while_pumping
from hpcrun.launch.checkpointing.spare_replicas import SpareReplicaScheduler, count_spare_replicas
from hpcrun.launch.checkpointing.suspect_saves import (
    generations_to_verify,
    implicates_save,
    read_suspect_saves,
    record_failed_restart,
    record_load_failure,
)
from hpcrun.launch.checkpointing.tier_tracker import TierEvent, TierTracker
from hpcrun.launch.checkpointing.worker_client import WorkerClient
from hpcrun.specs.cluster import NetworkSpec
from hpcrun.specs.events.checkpoint import (
    CheckpointWorkerDiedEvent,
    DurabilityOverdueEvent,
    ErasureSetsEvent,
    RestoreEvent,
    SuspectSaveEvent,
)
from hpcrun.specs.events.event import Event
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.run_variables import NODE_MARK, WORKER_SOCKET_VARIABLE
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.specs.saves import (
    SavedCheckpoint,
    read_saved_checkpoints,
    refuse_foreign_checkpoints,
    resumable_checkpoints,
    sort_checkpoints,
)

_TRIES = 3
_MAX_NAMED = 8

EventCallback = Callable[[Attempt, Event], None]
"""Writes an event of an attempt."""


class CheckpointCoordinator:
    """One a run, for all its attempts."""

    def __init__(
        self,
        run: RunDir,
        spec: JobSpec,
        nodes: NodeWorkers,
        tell: EventCallback,
        note: Callable[[str], None],
        network: NetworkSpec | None = None,
    ) -> None:
        """`network`: what the profile says of the way over which nodes reach each other."""
        self._network = network or NetworkSpec()
        self._run, self._spec, self._nodes = run, spec, nodes
        self._tell, self._note = tell, note
        self._workers = WorkerClient(nodes)
        self._replica_scheduler = SpareReplicaScheduler(self._workers, nodes, spec.checkpoint, note)
        self._secret = secrets.token_hex(32)
        self._tier_tracker = TierTracker(())
        self._attempt: Attempt | None = None
        self._restored: CheckpointId | None = None
        self._restored_from_nodes = False
        """Whether something of it came from nodes."""
        self._statement = ""
        self._proved: set[str] = set()
        """Generations of which nodes have told only what had proved itself."""
        self._intact_parts: dict[tuple[CheckpointId, frozenset[int]], InventoryEntry | None] = {}
        """What was found in the run directory, so that it is read once a decision."""
        self._durability_watchdog = DurabilityWatchdog(run, spec.checkpoint)
        object_spec = spec.checkpoint.object
        self._far = ObjectStoreSource(run, object_spec, nodes.rest, note) if object_spec is not None else None

    @property
    def has_tiers(self) -> bool:
        """Whether saves go through the memory of nodes."""
        return self._spec.checkpoint.memory > 0

    @property
    def has_decided(self) -> bool:
        """Whether it has looked at what there is, for an attempt."""
        return self._attempt is not None

    def step(self, *, is_node_lost: bool = False) -> int:
        """The newest step that can be gone on from, as far as is known without asking."""
        steps = resumable_checkpoints(self._run.checkpoints)
        restored = self._restored.step if self._restored else 0
        near = self._tier_tracker.complete.get("parity" if is_node_lost else "memory", 0)
        if is_node_lost:
            near = max(near, self._replica_scheduler.covered_step())
        return max(steps[-1].step if steps else 0, restored, near)

    def prepare(self, attempt: Attempt, placement: Placement, domains: FailureDomains) -> dict[str, str]:
        """Before ranks start: workers are there, and it is written down what ranks go on from.

        Gives what the ranks' environment has to say of it. SiteError where everything that was saved is
        damaged; UsageError where the job wants a loss survived that these nodes cannot.
        """
        self._attempt, self._restored = attempt, None
        self._tier_tracker = TierTracker(placement.nodes)
        self._durability_watchdog.begin()
        if self._spec.checkpoint.object is not None and not self.has_tiers and attempt.number == 1:
            self._note(
                "checkpoint.object: only saves that go through memory are copied, and checkpoint.memory is 0;"
                " `hpcrun ckpt upload` copies others"
            )
        silent = self._open(attempt, placement, domains) if self.has_tiers else []
        begin = time.monotonic()
        plan = self._settle(placement) if self.has_tiers else self._look_around([], placement)
        if self._far is not None and attempt.number > 1 and (plan.stamp is None or plan.passed_over):
            plan = self._far.find_newer(plan, placement.nodes)
        self._restored, self._restored_from_nodes = plan.stamp, bool(plan.sources)
        is_told = self.has_tiers or plan.poisoned or plan.copy
        if is_told and (plan.stamp is not None or plan.passed_over):
            self._report_restore(attempt, plan, silent, time.monotonic() - begin)
        self._write(attempt, plan)
        if self.has_tiers:
            # All else would only stand in the way of new saves.
            self._workers.release([plan.stamp.generation] if plan.stamp else [])
            self._replica_scheduler.begin(attempt.number, placement, domains, plan)
        return {WORKER_SOCKET_VARIABLE: worker_socket_template(self._run)} if self._workers.ready else {}

    def _open(self, attempt: Attempt, placement: Placement, domains: FailureDomains) -> list[str]:
        """Have a worker on every node that lives; those that have none."""
        there = [*placement.nodes, *(node for node in self._nodes.alive if node not in placement.nodes)]
        sets = self._sets(attempt, placement, domains)
        if sets.statement != self._statement:
            self._statement = sets.statement
            for line in self._statement.splitlines():
                self._note(line)
            self._tell(attempt, ErasureSetsEvent(tuple(map(tuple, sets.sets)), sets.statement))
        common = wire.ConfigureWorker(
            str(self._run.path),
            "",
            attempt.number,
            self._spec.checkpoint.model_dump(mode="json"),
            interface=self._network.interface,
            suffix=self._network.fabric_suffix,
            nodes=tuple(there),
            secret=self._secret,
        )
        orders = {}
        for node in there:
            members, parity = sets.of(node) or (None, 0)
            orders[node] = replace(common, node=node, set=members and tuple(members), parity=parity)
        silent = self._workers.open(orders)
        if silent:
            self._note(f"no checkpoint worker has come up on {', '.join(silent)}: what they hold is not used")
        return silent

    def _sets(self, attempt: Attempt, placement: Placement, domains: FailureDomains) -> ErasureSets:
        parity = self._spec.checkpoint.parity
        has_rs = find_spec("pyeclib") is not None
        survive = parity.survive
        try:
            return choose_erasure_sets(
                placement.nodes,
                domains,
                scheme=parity.scheme,
                set_size=parity.set_size,
                survive=survive,
                with_rs=has_rs,
            )
        except UsageError as error:
            if attempt.number == 1:
                raise
            # The nodes that are left are what there is: better than to end a run that was promised more.
            self._note(f"{error}; this attempt continues without that")
            return choose_erasure_sets(
                placement.nodes, domains, scheme=parity.scheme, set_size=parity.set_size, with_rs=has_rs
            )

    def _settle(self, placement: Placement) -> RestorePlan:
        """Decide, and have rebuilt what has to be; where that fails, decide again without it."""
        self._proved, self._intact_parts = generations_to_verify(self._run), {}
        holdings, mute = self._workers.inventory(self._workers.ready, self._proved)
        if mute:
            self._note(f"{', '.join(mute)} did not say in time what they hold: it is not used")
        for _ in range(_TRIES):
            plan = self._look_around(holdings, placement)
            if not plan.rebuilds:
                return plan
            for order, outcome in self._workers.rebuild(plan.rebuilds):
                if isinstance(outcome, InventoryEntry):
                    holdings.append(replace(outcome, tier="parity"))
                    continue
                self._note(f"step {order.stamp.step} cannot be rebuilt on {order.node}: {outcome}")
                holdings = [entry for entry in holdings if not _is_in_set(entry, order.stamp, order.members)]
        return self._look_around([entry for entry in holdings if entry.parity is None], placement)

    def _look_around(self, holdings: Sequence[InventoryEntry], placement: Placement) -> RestorePlan:
        saves, unreadable = read_saved_checkpoints(self._run.checkpoints)
        sorted_saves = sort_checkpoints(self._run.checkpoints, saves)
        there = [node for node in self._nodes.alive if node not in placement.nodes]
        nodes = [node for node in [*placement.nodes, *there] if node in self._nodes.alive]
        check = _check_metadata if self.has_tiers else find_save_problem
        poison = read_suspect_saves(self._run)
        plan = decide_restore(
            holdings, sorted_saves.own, unreadable, [], poison, nodes, check, self._find_intact_parts
        )
        # Where there is no other attempt, ranks had better take an older save than end.
        return plan if self._spec.retries is not None else replace(plan, is_mendable=False)

    def _find_intact_parts(self, stamp: CheckpointId, missing: Collection[int]) -> InventoryEntry | None:
        """What the run directory has of what no node has; all of it is read where that is in doubt."""
        key = stamp, frozenset(missing)
        if key not in self._intact_parts:
            # Without another attempt there is none to find out what is damaged, either.
            prove = stamp.generation in self._proved or self._spec.retries is None
            search = partial(find_intact_parts, self._run.checkpoints, stamp, key[1], prove=prove)
            self._intact_parts[key] = run_while_pumping(self._nodes.rest, search)
        return self._intact_parts[key]

    def _report_restore(
        self, attempt: Attempt, plan: RestorePlan, silent: Sequence[str], seconds: float
    ) -> None:
        step = plan.stamp.step if plan.stamp else 0
        rebuilt = sum(source.tier == "parity" for source in plan.sources)
        event = RestoreEvent(
            step,
            plan.stamp.generation if plan.stamp else None,
            tuple(plan.tiers),
            plan.lost_steps,
            plan.passed_over[:_MAX_NAMED],
            rebuilt,
            count_spare_replicas(plan),
            tuple(silent),
            seconds,
        )
        self._tell(attempt, event)
        for text in plan.passed_over[:_MAX_NAMED]:
            self._note(f"passed over: {text}")
        if plan.stamp is None:
            self._note("nothing that was saved is whole: starting from the beginning")
        elif plan.save is None or plan.copy is not None:
            self._note(f"going on from step {step}, out of {describe_plan_tiers(plan)}")

    def _write(self, attempt: Attempt, plan: RestorePlan) -> None:
        # What is damaged ranks see for themselves, but not what has failed.
        saves, unreadable = read_saved_checkpoints(self._run.checkpoints)
        sorted_saves = sort_checkpoints(self._run.checkpoints, saves)
        if plan.stamp is None:
            refuse_foreign_checkpoints(self._run.checkpoints, sorted_saves)
        has_saves = bool(sorted_saves.own or unreadable) and (self.has_tiers or plan.poisoned)
        if plan.stamp is None and has_saves:
            raise SiteError(
                f"{self._run.checkpoints}: no save can be resumed from: {plan.passed_over[0]}; restore one,"
                f" remove {self._run.poison.name} to try those again that failed, or remove them all to start"
                " from the beginning"
            )
        if plan.stamp is not None and (self.has_tiers or plan.poisoned):
            write_json(attempt.restore, plan.as_json())
        if self._workers.peers:
            write_json(attempt.peers, {"secret": self._secret, "nodes": self._workers.peers})

    def look(self) -> str | None:
        """Take in what workers say; why the run is to save and stop, where it is."""
        self._workers.look()
        news, self._workers.news = self._workers.news, []
        for node, message in news:
            self._handle(node, message)
        warning = self._durability_watchdog.look()
        if warning is None or self._attempt is None:
            return None
        self._tell(self._attempt, DurabilityOverdueEvent(warning))
        self._note(warning)
        return warning if self._spec.checkpoint.durability_action == "stop" else None

    def _handle(self, node: str, message: wire.WorkerMessage) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        events: Iterable[TierEvent] = ()
        match message:
            case wire.WorkerDied(status, _, why):
                why = why and f": {why}"
                self._note(f"checkpoint worker of {node} died{why}; restarting it")
                self._tell(attempt, CheckpointWorkerDiedEvent(node, status))
                events = self._tier_tracker.died(node, why)
            case wire.WorkerReady():
                self._workers.refresh()
            case wire.WorkerLog(text):
                self._note(f"{node}: {text}")
            case wire.WritesProbed(problems):
                for tier, why in problems.items():
                    self._note(f"{node}: saves will fail ({tier}): {why}")
            case wire.WorkerError(why):
                self._note(f"{node}: its checkpoint worker: {why}")
            case wire.GenerationSealed() | StoreResult() | wire.SaveFailed():
                events = self._tier_tracker.handle(node, message)
        for event in events:
            self._tell(attempt, event)
        for replica in self._replica_scheduler.handle(node, message, self._tier_tracker.whole):
            self._tell(attempt, replica)

    def after(self, outcome: AttemptOutcome) -> None:
        """When an attempt is over: whether its end tells against the state that it began with."""
        self.look()
        if outcome.status == "done" and self.has_tiers:
            self._clean_up()
            return
        failed = read_json(outcome.files.restore_failure)
        if isinstance(failed, dict) and failed.get("generation"):
            self._failed_to_load(str(failed["generation"]))
            return
        began = self._restored
        if began is None or not implicates_save(outcome, began.step, self.step()):
            return
        count = record_failed_restart(self._run, began.generation or f"step-{began.step:08d}")
        self._tell(outcome.files, SuspectSaveEvent(began.step, began.generation, count))

    def _clean_up(self) -> None:
        """The run is done: what it has on nodes' own disks nobody needs, unless it is newer than all else."""
        steps = resumable_checkpoints(self._run.checkpoints)
        if steps and steps[-1].step >= self.step():
            self._workers.release([])
        elif self._spec.checkpoint.local is not None:
            self._note(f"checkpoint.local: kept, as step {self.step()} is not in the run directory")

    def _failed_to_load(self, generation: str) -> None:
        """Parts that are damaged are left out next time; where none was, or others are, it is given up.

        It was in memory: what the run directory has of it may still be whole. And where that was the one that
        is damaged, nothing tells against what nodes hold.
        """
        if generation in self._proved and self._restored_from_nodes:
            record_failed_restart(self._run, node_failure_key(generation), is_proved=True)
        else:
            record_load_failure(self._run, generation)


def worker_socket_template(run: RunDir) -> str:
    """The socket of a node's checkpoint worker, NODE_MARK for the node."""
    return str(default_arena_folder(SHM, run.run_id, NODE_MARK) / SOCKET_NAME)


def _is_in_set(holding: InventoryEntry, stamp: CheckpointId, members: object) -> bool:
    return holding.stamp == stamp and holding.parity is not None and holding.parity.members == members


def _check_metadata(saved: SavedCheckpoint) -> str | None:
    """All that can be seen without reading the data."""
    try:
        GenerationReader(saved).close()
    except DamagedError as error:
        return str(error).removeprefix(f"{saved.path}{os.sep}")
    except OSError as error:
        return f"it cannot be read: {error}"
    return None
