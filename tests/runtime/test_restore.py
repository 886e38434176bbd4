"""A rank that goes on from what the supervisor has decided."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrun.checkpoint.format import parse_manifest
from hpcrun.checkpoint.parity.peers import PartServer, PeerCredentials, PeerServer
from hpcrun.checkpoint.restore_plan import PartSource, RestorePlan
from hpcrun.checkpoint.tier import CheckpointId, HeldPart, InventoryEntry
from hpcrun.errors import RanksDiedError, SiteError, UsageError
from hpcrun.runtime.control import LoneControl
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer, RestoreResult
from hpcrun.runtime.restore import restore_from_plan
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import Attempt, RunDir

SECRET = "ab" * 16


class Place:
    """A run whose step 7 lies in memory, and whose step 5 is in the run directory."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path / "run")
        self.attempt: Attempt = self.run.attempt(2).create()
        self.control = LoneControl()
        self.whole = {"model.a": torch.arange(40.0), "model.b": torch.ones(3, 2, dtype=torch.bfloat16)}
        self.expected = {name: tuple(tensor.shape) for name, tensor in self.whole.items()}
        for step, root in ((5, self.run.checkpoints), (7, path / "aside")):
            root.mkdir(parents=True, exist_ok=True)
            DirectCheckpointer(root, self.control, attempt=1, keep=1).save(step, 8 * step, self.state(step))
        saved = path / "aside" / "step-00000007"
        manifest = parse_manifest((saved / "manifest.json").read_bytes())
        self.slot = path / "slot-0-0.bin"
        (saved / "data-00000.bin").rename(self.slot)
        self.stamp = CheckpointId(manifest.generation.hex(), 7, 56, 1, 1)
        self.source = PartSource(0, "here", str(self.slot), 0, manifest.parts[0], "memory")
        self.plan = RestorePlan(
            self.stamp, ("memory",), (self.source,), lost_steps=2, passed_over=("9: bad",)
        )

    def state(self, seed: int) -> dict[str, Tensor]:
        return {name: tensor + seed for name, tensor in self.whole.items()}

    def restore(
        self, plan: RestorePlan | None, **more: Any
    ) -> tuple[RestoreResult | None, dict[str, Tensor]]:
        if plan is not None:
            write_json(self.attempt.restore, plan.as_json() | more)
        state = {name: torch.zeros_like(tensor) for name, tensor in self.whole.items()}
        saver = DirectCheckpointer(self.run.checkpoints, self.control, attempt=2, keep=1)
        return restore_from_plan(saver, self.attempt, self.control, state, self.expected), state


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("HPCRUN_WORKER_SOCKET", str(tmp_path / "here" / "worker.sock"))
    return Place(tmp_path)


def test_without_a_plan_the_run_directory_has_it(place: Place) -> None:
    restored, state = place.restore(None)
    assert restored is not None
    assert (restored.step, restored.saved is not None) == (5, True)
    assert same(state, place.state(5))


def test_a_plan_of_parts_in_memory(place: Place) -> None:
    restored, state = place.restore(place.plan)
    assert restored == RestoreResult(7, 56, ["9: bad"], 2, None, place.stamp.generation)
    assert same(state, place.state(7))


def test_a_part_on_another_node_comes_from_its_worker(place: Place) -> None:
    server = PeerServer("127.0.0.1", PeerCredentials(place.run.id, "there", SECRET))
    held = HeldPart(0, str(place.slot), 0, place.source.part)
    PartServer(server, lambda: [InventoryEntry(place.stamp, "memory", "there", (held,))])
    peers = {"secret": SECRET, "nodes": {"there": [server.address, server.port]}}
    write_json(place.attempt.peers, peers)
    away = replace(place.plan, sources=(replace(place.source, node="there", path="/nowhere"),))
    restored, state = place.restore(away)
    assert restored is not None
    assert same(state, place.state(7))
    server.close()
    with pytest.raises(RanksDiedError, match="there"):
        place.restore(away)


def test_a_planned_generation_that_is_damaged_ends_the_attempt_and_is_told(place: Place) -> None:
    data = bytearray(place.slot.read_bytes())
    data[200] ^= 1
    place.slot.write_bytes(data)
    with pytest.raises(RanksDiedError, match="step 7 cannot be resumed from"):
        place.restore(place.plan)
    told = json.loads(place.attempt.restore_failure.read_text())
    assert told["generation"] == place.stamp.generation
    assert "do not match their hash" in told["why"]


def test_another_job_is_a_mistake_and_tells_nothing_against_the_state(place: Place) -> None:
    place.expected["model.c"] = (3,)
    with pytest.raises(UsageError, match=r"step 7: lacks model\.c"):
        place.restore(place.plan)
    assert not place.attempt.restore_failure.exists()


def test_a_plan_that_was_changed_is_refused(place: Place) -> None:
    with pytest.raises(SiteError, match="does not match its digest"):
        place.restore(place.plan, lost_steps=0)


def test_what_has_failed_is_not_found_in_the_run_directory_either(place: Place) -> None:
    saver = DirectCheckpointer(place.run.checkpoints, place.control, attempt=1, keep=5)
    saver.save(6, 48, place.state(6))
    newest = saver.newest()
    assert newest is not None
    plan = RestorePlan(None, ("durable",), save="…", poisoned=(newest.generation,))
    restored, state = place.restore(plan)
    assert restored is not None
    assert restored.step == 5
    assert same(state, place.state(5))
