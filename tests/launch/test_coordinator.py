"""What the supervisor makes of what nodes hold; their workers say what files tell them to."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from hpcrun.checkpoint.commit import quarantine_generation
from hpcrun.checkpoint.format import Part
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.restore_plan import RestorePlan, parse_restore_plan
from hpcrun.checkpoint.tier import CheckpointId, HeldParity, HeldPart, InventoryEntry, SetMember
from hpcrun.checkpoint.worker_messages import GenerationSealed, WorkerOrder
from hpcrun.errors import SiteError, UsageError
from hpcrun.launch.agents import worker_process as hosts
from hpcrun.launch.agents.local_workers import LocalWorkers
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.checkpointing import worker_client
from hpcrun.launch.checkpointing.coordinator import CheckpointCoordinator
from hpcrun.launch.checkpointing.durability_watchdog import DurabilityWatchdog
from hpcrun.launch.checkpointing.suspect_saves import implicates_save, read_suspect_saves, record_load_failure
from hpcrun.launch.checkpointing.tier_tracker import TierTracker
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.events.checkpoint import (
    CheckpointFailedEvent,
    CheckpointStoredEvent,
    CheckpointWorkerDiedEvent,
    ErasureSetsEvent,
    RestoreEvent,
    SuspectSaveEvent,
)
from hpcrun.specs.events.event import Event, EventStamp
from hpcrun.specs.events.log import EventRecord
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt, RunDir
from tests.checkpoint.generations import save
from tests.launch.pretended import PretendedNodes

NODES = ("a", "b", "c")
PROGRAM = Path(__file__).with_name("worker_program.py")


def stamp(step: int) -> CheckpointId:
    return CheckpointId(f"{step:032x}", step, 8 * step, 3, 1)


def part(step: int, number: int) -> Part:
    return Part(number, 0, 4096, 3000, 900, f"{step:08x}{number:08x}")


def held(step: int, number: int, tier: Any = "memory") -> InventoryEntry:
    one = HeldPart(number, f"/arena/{NODES[number]}", 0, part(step, number))
    return InventoryEntry(stamp(step), tier, NODES[number], (one,))


def parity(step: int, number: int) -> InventoryEntry:
    members = tuple(SetMember(node, ((n, part(step, n)),)) for n, node in enumerate(NODES))
    return InventoryEntry(
        stamp(step), "parity", NODES[number], (), HeldParity("/p", members, 1, number, ("0" * 16,))
    )


class Site:
    """A run on three nodes and a spare, and its coordinator."""

    def __init__(self, path: Path, **section: Any) -> None:
        self.path = path
        self.run = RunDir(path / "run")
        self.run.path.mkdir()
        self.nodes = PretendedNodes([*NODES, "spare"])
        self.nodes._hosts = LocalWorkers(self.run)
        self.notes: list[str] = []
        self.events: list[EventRecord] = []
        checkpoint = CheckpointSpec.model_validate({"memory": 2, **section})
        spec = JobSpec.model_construct(checkpoint=checkpoint)
        self.coordinator = CheckpointCoordinator(self.run, spec, self.nodes, self.tell, self.notes.append)

    def tell(self, attempt: Attempt, event: Event) -> None:
        self.events.append(EventRecord(EventStamp.now(attempt.number), event))

    def holds(self, *holdings: InventoryEntry) -> None:
        """From now on these are in the memory of the nodes that they name."""
        for node in self.nodes.names:
            own = [one.as_json() for one in holdings if one.node == node]
            (self.path / f"{node}.json").write_text(json.dumps(own))

    def prepare(self, number: int = 1, nodes: tuple[str, ...] = NODES) -> RestorePlan | None:
        attempt = self.run.attempt(number).create()
        self.environ = self.coordinator.prepare(attempt, Placement(nodes), {})
        told = json.loads(attempt.restore.read_text()) if attempt.restore.exists() else None
        return None if told is None else parse_restore_plan(told)

    def orders(self, node: str, verb: str) -> list[dict[str, Any]]:
        self.coordinator._workers.inventory([node])  # the answer comes after all that was ordered before
        lines = (self.path / f"{node}.log").read_text().splitlines()
        return [one for line in lines if (one := json.loads(line))["kind"] == verb]

    def say(self, node: str, **message: Any) -> None:
        """Have a node's worker say something, and the coordinator hear it."""
        self.command(node, kind="say", message=message)
        self.coordinator._workers.inventory([node])
        self.coordinator.look()

    def command(self, node: str, **order: Any) -> None:
        """Have the program that stands for a node's worker do what no real one is ordered."""
        self.nodes.send_to_worker(node, cast(WorkerOrder, order))

    def named(self, name: str) -> list[dict[str, Any]]:
        """The events of this name, as their lines say them."""
        lines = [json.dumps(record.as_json()) for record in self.events if record.name == name]
        return [json.loads(line) for line in lines]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(hosts, "WORKER_COMMAND", (sys.executable, str(PROGRAM), str(tmp_path)))
    monkeypatch.setattr(hosts, "_FIRST_PAUSE_S", 0.05)
    made = Site(tmp_path)
    yield made
    made.nodes.close()


def test_the_first_attempt_has_workers_and_nothing_to_go_on_from(site: Site) -> None:
    assert site.prepare() is None
    assert site.environ["HPCRUN_WORKER_SOCKET"].endswith(f"/{site.run.run_id}/{{node}}/worker.sock")
    peers = json.loads(site.run.attempt(1).peers.read_text())
    assert set(peers["nodes"]) == {*NODES, "spare"}
    last = site.orders("b", "configure_worker")[-1]
    assert (last["attempt"], last["set"], last["parity"]) == (1, ["a", "b", "c"], 1)
    assert last["peers"] == peers["nodes"]
    assert site.orders("spare", "configure_worker")[-1]["set"] is None
    assert "any one node" in site.named("erasure_sets")[0]["message"]
    assert site.named("restore") == []


def test_memory_is_gone_on_from_and_all_else_is_let_go(site: Site) -> None:
    site.holds(*(held(20, n) for n in range(3)), held(25, 0))
    plan = site.prepare(2)
    assert plan is not None
    assert (plan.stamp, plan.tiers, plan.lost_steps) == (stamp(20), ("memory",), 5)
    (event,) = site.named("restore")
    assert (event["step"], event["tiers"], event["lost_steps"], event["rebuilt"]) == (20, ["memory"], 5, 0)
    assert site.orders("a", "release_generations")[-1]["keep"] == [stamp(20).generation]
    assert site.coordinator.step() == 20


def test_a_lost_node_is_rebuilt_on_the_spare(site: Site) -> None:
    site.holds(*(one(20, n) for n in (0, 2) for one in (held, parity)))
    (site.path / "rebuilt.json").write_text(json.dumps(held(20, 1, "memory").as_json()))
    site.nodes._gone.add("b")
    plan = site.prepare(2, ("a", "spare", "c"))
    assert plan is not None
    assert (plan.tiers, plan.rebuilds) == (("memory", "parity"), ())
    assert [one.node for one in plan.sources] == ["a", "spare", "c"]
    assert site.named("restore")[0]["rebuilt"] == 1
    (order,) = site.orders("spare", "rebuild_parts")
    assert order["order"]["lost"] == [1]


def test_what_cannot_be_rebuilt_is_done_without(site: Site) -> None:
    site.holds(*(one(20, n) for n in (0, 2) for one in (held, parity)), *(held(10, n) for n in (0, 2)))
    (site.path / "spare.cannot").touch()
    save(site.run.checkpoints, 5)
    site.nodes._gone.add("b")
    plan = site.prepare(2, ("a", "spare", "c"))
    assert plan is not None
    assert (plan.save, plan.lost_steps) == (str(site.run.checkpoints / "step-00000005"), 15)
    assert "step 20 cannot be rebuilt on spare: it has no room" in site.notes
    assert len(site.orders("spare", "rebuild_parts")) == 1


def test_a_node_that_is_silent_has_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client.WorkerClient.inventory, "__defaults__", (0.5,))
    monkeypatch.setattr(worker_client.WorkerClient.open, "__defaults__", (1.5,))
    site.holds(*(held(20, n) for n in range(3)))
    (site.path / "b.silent").touch()
    (site.path / "c.late").touch()
    assert site.prepare(2) is None
    assert any("no checkpoint worker has come up on c" in note for note in site.notes)
    assert any(note.startswith("b did not say in time") for note in site.notes)
    assert "nothing that was saved is whole: starting from the beginning" in site.notes


def test_a_node_whose_worker_refuses_is_not_waited_for_and_says_why(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client.WorkerClient.open, "__defaults__", (600.0,))
    (site.path / "c.refuses").touch()
    site.prepare()
    site.coordinator.look()
    assert site.notes.count("c: its checkpoint worker: no room for it") == 1
    assert any("no checkpoint worker has come up on c" in note for note in site.notes)


def test_where_every_save_is_damaged_nothing_starts(site: Site) -> None:
    saved = save(site.run.checkpoints, 5)
    (saved.path / "data-00000.bin").write_bytes(b"")
    with pytest.raises(SiteError, match=r"no save can be resumed from: .*step-00000005: is damaged"):
        site.prepare()


def test_a_loss_that_must_be_survived_is_refused_at_first_and_made_do_without_later(tmp_path: Path) -> None:
    site = Site(tmp_path, parity={"survive": "leaf"})
    with pytest.raises(UsageError, match="survive"):
        site.coordinator._sets(site.run.attempt(1), Placement(NODES), {})
    assert site.coordinator._sets(site.run.attempt(2), Placement(NODES), {}).sets == (NODES,)
    assert site.notes[0].endswith("this attempt continues without that")


def test_a_tier_has_a_generation_when_all_nodes_have_stored_it(site: Site) -> None:
    site.prepare()
    told = asdict(stamp(5))
    for node in NODES:
        assert site.coordinator.step() == 0
        site.say(node, kind="generation_sealed", stamp=told)
    assert site.coordinator.step() == 5
    assert site.coordinator.step(is_node_lost=True) == 0
    for node, seconds in zip(NODES, (1.0, 3.0, 2.0), strict=True):
        site.say(
            node,
            kind="store_result",
            stamp=told,
            tier="parity",
            seconds=seconds,
            size_bytes=10,
            problem=None,
        )
    assert site.coordinator.step(is_node_lost=True) == 5
    found = [
        (one["tier"], one["step"], one["seconds"], one["size_bytes"])
        for one in site.named("checkpoint_stored")
    ]
    assert found == [("memory", 5, None, None), ("parity", 5, 3.0, 30)]


def test_a_worker_that_dies_takes_down_what_it_had_not_stored(site: Site) -> None:
    site.prepare()
    told = asdict(stamp(5))
    site.say("a", kind="generation_sealed", stamp=told)
    configured = len(site.orders("c", "configure_worker"))
    site.command("b", kind="die")
    deadline = time.monotonic() + 20
    while len(site.orders("c", "configure_worker")) == configured and time.monotonic() < deadline:
        site.nodes.rest(0.05)
        site.coordinator.look()
    (died,) = site.named("checkpoint_worker_died")
    assert (died["node"], died["wait_status"]) == ("b", 3)
    (failed,) = site.named("checkpoint_failed")
    assert failed["problem"] == "b: its checkpoint worker died: something went wrong"
    # The others have been told where the new one listens.
    new = site.orders("c", "configure_worker")[-1]["peers"]["b"]
    assert new != site.orders("c", "configure_worker")[configured - 1]["peers"]["b"]


def test_what_failed_is_counted_and_what_proved_damaged_is_done_with(site: Site) -> None:
    site.holds(*(held(20, n) for n in range(3)))
    site.prepare(2)

    def ended(number: int, step: int | None, **more: Any) -> AttemptOutcome:
        return AttemptOutcome(site.run, number, "failed", 5, "it fell", step, **more)

    site.coordinator.after(ended(2, 21))
    assert read_suspect_saves(site.run) == {stamp(20).generation: 1}
    site.prepare(3)
    site.coordinator.after(ended(3, 20, lost=("a",)))
    site.coordinator.after(ended(3, 24))
    assert read_suspect_saves(site.run) == {stamp(20).generation: 1}
    site.coordinator.after(ended(3, None))
    assert [one["count"] for one in site.named("suspect_save")] == [1, 2]
    site.holds(*(held(20, n) for n in range(3)), *(held(15, n) for n in range(3)))
    plan = site.prepare(4)
    assert plan is not None
    assert plan.stamp == stamp(15)
    unrestored = site.run.attempt(4).restore_failure
    unrestored.write_text(json.dumps({"generation": stamp(15).generation, "why": "a byte"}))
    site.coordinator.after(ended(4, None))
    # It is given up when it fails again although nodes have read what they hold of it.
    assert read_suspect_saves(site.run)[f"near:{stamp(15).generation}"] == 1
    site.prepare(5)
    assert site.orders("b", "take_inventory")[-2]["prove"] == [stamp(15).generation]
    site.run.attempt(5).restore_failure.write_text(unrestored.read_text())
    site.coordinator.after(ended(5, None))
    assert read_suspect_saves(site.run)[f"near:{stamp(15).generation}"] == 2


def test_a_damaged_part_costs_no_generation_that_parity_or_another_tier_has(site: Site) -> None:
    site.holds(*(one(20, n) for n in range(3) for one in (held, parity)))
    (site.path / "damaged.json").write_text(json.dumps([part(20, 1).tail_hash]))
    (site.path / "rebuilt.json").write_text(json.dumps(held(20, 1, "memory").as_json()))
    plan = site.prepare(2)
    assert plan is not None
    assert [one.node for one in plan.sources] == list(NODES)
    site.run.attempt(2).restore_failure.write_text(
        json.dumps({"generation": stamp(20).generation, "why": "a byte"})
    )
    site.coordinator.after(AttemptOutcome(site.run, 2, "failed", 5, "it fell", None))
    plan = site.prepare(3)
    assert plan is not None
    assert (plan.stamp, plan.tiers, plan.poisoned) == (stamp(20), ("memory", "parity"), ())
    (order,) = site.orders("spare", "rebuild_parts")
    assert order["order"]["lost"] == [1]


def test_what_a_node_holds_and_parts_of_a_damaged_save_are_gone_on_from_together(site: Site) -> None:
    saved = save(site.run.checkpoints, 20, files=3, ranks=3)
    with GenerationReader(saved) as generation:
        parts = generation.manifest.parts
    owner = CheckpointId(saved.generation, 20, saved.position, 3, 1)

    def kept(number: int) -> InventoryEntry:
        one = HeldPart(number, f"/arena/{NODES[number]}", 0, parts[number])
        return InventoryEntry(owner, "memory", NODES[number], (one,))

    site.holds(kept(0), kept(1))
    plan = site.prepare(2)
    assert plan is not None
    assert (plan.save, plan.is_mendable) == (str(saved.path), True)
    (saved.path / "data-00001.bin").unlink()
    plan = site.prepare(3)
    assert plan is not None
    assert (plan.tiers, plan.save) == (("memory", "durable"), None)
    assert [one.path for one in plan.sources][2] == str(saved.path / "data-00002.bin")
    # A changed byte is only found by ranks; then what is asked for is read before it counts.
    path = saved.path / "data-00002.bin"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    plan = site.prepare(4)
    assert plan is not None
    assert plan.stamp == owner
    unrestored = {"generation": saved.generation, "why": "a byte"}
    site.run.attempt(4).restore_failure.write_text(json.dumps(unrestored))
    site.coordinator.after(AttemptOutcome(site.run, 4, "failed", 5, "it fell", None))
    with pytest.raises(SiteError, match="part 2 of 3 is on no node that answers"):
        site.prepare(5)


def test_a_damaged_save_tells_nothing_against_what_nodes_hold_of_it(site: Site) -> None:
    saved = save(site.run.checkpoints, 20, files=3, ranks=3)
    with GenerationReader(saved) as generation:
        parts = generation.manifest.parts
    owner = CheckpointId(saved.generation, 20, saved.position, 3, 1)
    held_parts = [HeldPart(n, f"/arena/{NODES[n]}", 0, parts[n]) for n in (0, 1)]
    site.holds(*(InventoryEntry(owner, "memory", NODES[one.number], (one,)) for one in held_parts))
    record_load_failure(site.run, saved.generation)  # a third part was in memory, and damaged
    plan = site.prepare(2)
    assert plan is not None
    assert plan.is_mendable
    unrestored = {"generation": saved.generation, "why": "a byte"}
    site.run.attempt(2).restore_failure.write_text(json.dumps(unrestored))
    site.coordinator.after(AttemptOutcome(site.run, 2, "failed", 5, "it fell", None))
    quarantine_generation(saved.path)
    plan = site.prepare(3)
    assert plan is not None
    assert (plan.stamp, plan.tiers) == (owner, ("memory", "durable"))
    # What then fails again is given up.
    site.run.attempt(3).restore_failure.write_text(json.dumps(unrestored))
    site.coordinator.after(AttemptOutcome(site.run, 3, "failed", 5, "it fell", None))
    assert read_suspect_saves(site.run)[f"near:{saved.generation}"] == 2


def test_what_tells_against_a_state(tmp_path: Path) -> None:
    def failed(step: int | None, status: Any = "failed") -> AttemptOutcome:
        return AttemptOutcome(RunDir(tmp_path), 1, status, 5, "", step)

    assert [implicates_save(failed(step), 20, 20) for step in (None, 20, 23, 24)] == [True, True, True, False]
    assert not implicates_save(failed(22), 20, 22)
    assert not implicates_save(failed(22, "interrupted"), 20, 20)


def test_a_run_without_durable_saves_is_told_once_and_again_after_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    run = RunDir(tmp_path)
    watch = DurabilityWatchdog(run, CheckpointSpec(max_durable_age="10m"), lambda: now[0])
    watch.begin()
    now[0] += 599
    assert watch.look() is None
    now[0] += 2
    told = watch.look()
    assert told is not None
    assert told.endswith("for more than 10m no save has reached the run directory; there is none yet")
    now[0] += 60
    assert watch.look() is None
    # The clock of the host that saves is hours from ours, either way.
    for step, ahead_s in ((5, -7200.0), (6, 7200.0)):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: 1e9 + ahead_s)
        save(run.checkpoints, step)
        now[0] += 6
        assert watch.look() is None
        now[0] += 599
        assert watch.look() is None
        now[0] += 10
        assert f"the newest is of step {step}" in str(watch.look())
    watch.begin()
    now[0] += 601
    assert "the newest is of step 6" in str(watch.look()), "it was there before"
    assert DurabilityWatchdog(run, CheckpointSpec(), lambda: now[0] + 1e9).look() is None


def test_only_so_many_generations_are_followed() -> None:
    story = TierTracker(["a"])
    for step in range(1, 100):
        assert [one.step for one in story.handle("a", GenerationSealed(stamp(step)))] == [step]
    assert len(story._shares) == 16
    assert list(story.handle("stranger", GenerationSealed(stamp(200)))) == []


def test_a_done_run_leaves_nothing_on_the_nodes_disks_but_what_is_nowhere_else(site: Site) -> None:
    site.holds(*(held(20, n, "local") for n in range(3)))
    site.prepare(2)
    before = len(site.orders("a", "release_generations"))
    site.coordinator.after(AttemptOutcome(site.run, 2, "failed", 5, "it fell", 40, lost=("b",)))
    site.coordinator.after(AttemptOutcome(site.run, 2, "done", 0, "", 40))
    assert len(site.orders("a", "release_generations")) == before
    save(site.run.checkpoints, 40)
    site.coordinator.after(AttemptOutcome(site.run, 2, "done", 0, "", 40))
    assert site.orders("a", "release_generations")[before:] == [{"kind": "release_generations", "keep": []}]


def test_events_of_checkpoints_in_words() -> None:
    restored = RestoreEvent(20, "ab", ("memory", "parity"), 5, ("x", "y"), 1, 0, (), 0.5)
    assert str(restored) == (
        "resumes from step 20 (memory, parity); 1 part rebuilt from parity; 5 saved steps lost: x and 1 more"
    )
    assert str(RestoreEvent(0, None, (), 0, (), 0, 0, (), 0.5)) == "starts from scratch"
    assert str(CheckpointStoredEvent(5, "ab", "memory")) == ""
    assert str(CheckpointStoredEvent(5, "ab", "durable")) == "step 5: saved"
    failed = CheckpointFailedEvent(5, "ab", "parity", "a: no room")
    assert str(failed) == "step 5: parity save failed: a: no room"
    assert str(SuspectSaveEvent(5, "ab", 2)).endswith("(generation ab) failed 2 times")
    assert str(ErasureSetsEvent((), "one\ntwo")) == "one; two"
    died = CheckpointWorkerDiedEvent("a", 3)
    assert str(died) == "checkpoint worker on a died; restarting it"
