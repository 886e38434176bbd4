"""The checkpoint worker as a process: what ranks and host hear of it, and what is left when it dies."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpcrun import __version__
from hpcrun.checkpoint.flush.arena import SOCKET_NAME
from hpcrun.checkpoint.format import HEADER_BYTES
from hpcrun.checkpoint.tier import parse_inventory_entry
from hpcrun.errors import SiteError
from hpcrun.messages import lines
from hpcrun.mounts import find_mount
from hpcrun.runtime.worker_client import RankWorkerClient, WorkerGoneError
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import resumable_checkpoints
from tests.checkpoint.killed_writer import whole_steps
from tests.checkpoint.loads import stamp_of
from tests.checkpoint.workers import PATIENCE_S, ROOT, Host, Rank, ranks_of

MakeHost = Callable[..., Host]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "some-run"
    (path / "checkpoints").mkdir(parents=True)
    return RunDir(path)


@pytest.fixture
def start(tmp_path: Path, run: RunDir) -> Iterator[MakeHost]:
    hosts: list[Host] = []

    def start(node: str = "n1", attempt: int = 1, **spec: Any) -> Host:
        host = Host(tmp_path, run, node)
        hosts.append(host)
        host.configure(attempt, **spec)
        return host

    yield start
    for host in hosts:
        host.kill()


def prove(holding: dict[str, Any], step: int) -> None:
    """Every part that is told of is there, with the right bytes at the right places."""
    held = parse_inventory_entry(json.loads(json.dumps(holding)))
    assert held.stamp.step == step
    for one in held.parts:
        data = Path(one.path).read_bytes()[one.at :][: one.part.size_bytes]
        assert len(data) == one.part.size_bytes
        assert data[-HEADER_BYTES:][:4] == b"HPCK"


def test_a_save_goes_through_the_tiers(start: MakeHost, run: RunDir, tmp_path: Path) -> None:
    host = start(local=str(tmp_path / "disk"), keep=1)
    ranks = ranks_of(host, (0, 1), 2)
    stamps = [rank.save(2, ["local", "durable"]) for rank in ranks]
    for rank in ranks:
        assert rank.wait("part_sealed")["stamp"]["generation"] == stamps[0].generation
        assert [rank.wait("store_result")["tier"] for _ in range(2)] == ["local", "durable"]
    assert host.wait("generation_sealed")["stamp"]["step"] == 2
    told = [host.wait("store_result") for _ in range(2)]
    assert [one["problem"] for one in told] == [None, None]
    assert told[1]["facts"]["path"] == str(run.checkpoints / "step-00000002")
    assert whole_steps(run.checkpoints) == ([2], [])
    memory, local = host.holdings()
    assert (memory["tier"], local["tier"]) == ("memory", "local")
    for holding in (memory, local):
        assert [one["number"] for one in holding["parts"]] == [0, 1]
        prove(holding, 2)
    images = [Path(part["path"]).read_bytes()[part["at"] :] for part in local["parts"]]
    for part, image in zip(memory["parts"], images, strict=True):
        size = part["part"]["size_bytes"]
        assert Path(part["path"]).read_bytes()[:size] == image[:size]
    assert host.end() == 0
    assert not (host.arena / "worker.sock").exists()


def test_two_nodes_commit_one_generation(start: MakeHost, run: RunDir) -> None:
    hosts = [start("n1"), start("n2")]
    nodes = [ranks_of(hosts[0], (0, 1), 4, 0), ranks_of(hosts[1], (2, 3), 4, 1)]
    published = None
    for step in (2, 4, 6):
        for rank in (*nodes[0], *nodes[1]):
            rank.save(step, ["durable"], published)
        for rank in (*nodes[0], *nodes[1]):
            rank.wait("part_sealed")
            rank.wait("store_result", tier="durable")
        published = step
    assert [host.end() for host in hosts] == [0, 0]
    assert whole_steps(run.checkpoints) == ([4, 6], [])
    assert [one.world_size for one in resumable_checkpoints(run.checkpoints)] == [4, 4]


def test_a_node_that_may_not_write_fails_the_save_and_training_goes_on(
    start: MakeHost, run: RunDir, tmp_path: Path
) -> None:
    hosts = [start("n1"), start("n2")]
    nodes = [ranks_of(hosts[0], (0, 1), 4, 0), ranks_of(hosts[1], (2, 3), 4, 1)]
    everyone = [*nodes[0], *nodes[1]]
    limits = resource.prlimit(hosts[1].process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(hosts[1].process.pid, resource.RLIMIT_FSIZE, (2048, limits[1]))
    for rank in everyone:
        rank.save(2, ["durable"])
    for rank in everyone:
        assert "File too large" in rank.wait("save_failed", tier="durable")["why"]
    assert resumable_checkpoints(run.checkpoints) == []
    assert list(run.checkpoints.rglob("data-*.bin")) == []
    resource.prlimit(hosts[1].process.pid, resource.RLIMIT_FSIZE, limits)
    for rank in everyone:
        rank.save(4, ["durable"], 2)
    for rank in everyone:
        rank.wait("store_result", tier="durable")
    assert whole_steps(run.checkpoints) == ([4], [])


def test_a_worker_waits_for_the_one_before_it(start: MakeHost, run: RunDir, tmp_path: Path) -> None:
    before, after = start(), Host(tmp_path, run, "n1")
    (rank,) = ranks_of(before, (0,), 1)
    rank.save(2, ["durable"])
    after.say(kind="configure_worker", run=str(run.path), node="n1", attempt=1, spec={})
    before.wait("store_result")
    assert before.end() == 0
    after.wait("worker_ready")
    assert [one["stamp"]["step"] for one in after.holdings()] == [2]
    after.kill()


def test_an_arena_that_is_taken_away_is_made_anew_by_the_next_worker(start: MakeHost, run: RunDir) -> None:
    host = start()
    (rank,) = ranks_of(host, (0,), 1)
    claimed = rank.claim(2)
    shutil.rmtree(host.arena)
    rank.tell_filled(claimed["slot"], 2, ["durable"])
    # Nobody would find it there any more: its host starts another one.
    assert host.process.wait(PATIENCE_S) == 3
    host.end()
    other = start()
    (rank,) = ranks_of(other, (0,), 1)
    rank.save(4, ["durable"])
    assert rank.wait("store_result")["tier"] == "durable"


def test_long_names_of_runs_and_nodes(start: MakeHost) -> None:
    host = start("node-" + "x" * 120)
    (rank,) = ranks_of(host, (0,), 1)
    rank.save(2, ["durable"])
    assert rank.wait("store_result")["tier"] == "durable"


def test_a_worker_that_is_killed_leaves_what_it_had_sealed(start: MakeHost, run: RunDir) -> None:
    host = start()
    ranks = ranks_of(host, (0, 1), 2)
    for rank in ranks:
        rank.save(2, [])
    for rank in ranks:
        rank.wait("part_sealed")
    claimed = ranks[0].claim(4, 2)
    ranks[0].copy(claimed["slot"], 4)
    host.kill()
    (host.arena / "slot-0-0.json.garbage").write_text("{}")
    again = start()
    (held,) = again.holdings()
    prove(held, 2)
    assert [one["number"] for one in held["parts"]] == [0, 1]
    new = ranks_of(again, (0, 1), 2)
    assert [rank.slots for rank in new] == [rank.slots for rank in ranks], "mapped by ranks that live on"
    stale = new[0].tell_filled(claimed["slot"], 4, ["durable"])
    failed = new[0].wait("save_failed")
    assert (failed["stamp"]["generation"], failed["tier"]) == (stale.generation, "memory")
    assert "is not claimed" in failed["why"]
    for rank in new:
        assert rank.save(6, ["durable"], 2)
    for rank in new:
        rank.wait("store_result", tier="durable")
    assert {one["stamp"]["step"] for one in again.holdings()} == {2, 6}, "the published one was spared"
    assert whole_steps(run.checkpoints)[0][-1:] == [6]


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.01, 0.03, 0.1])
def test_killed_at_any_moment_nothing_wrong_is_told_of(
    start: MakeHost, run: RunDir, tmp_path: Path, delay: float
) -> None:
    local = str(tmp_path / "disk")
    host = start(local=local)
    ranks = ranks_of(host, (0, 1), 2)
    for rank in ranks:
        rank.save(2, ["local", "durable"])
    for rank in ranks:
        rank.wait("store_result", tier="durable")
    for rank in ranks:
        rank.save(4, ["local", "durable"], 2)
    signal.sigtimedwait([], delay)
    host.kill()
    whole, problems = whole_steps(run.checkpoints)
    assert whole in ([2], [2, 4])
    assert problems == []
    again = start(local=local)
    for holding in again.holdings():
        prove(holding, holding["stamp"]["step"])
    for rank in ranks_of(again, (0, 1), 2):
        rank.save(6, ["local", "durable"], 2)
    again.wait("store_result", tier="durable", problem=None)
    assert whole_steps(run.checkpoints)[0][-1] == 6


def test_another_node_does_not_wait_for_a_worker_that_was_lost(start: MakeHost, run: RunDir) -> None:
    hosts = [start("n1"), start("n2")]
    nodes = [ranks_of(hosts[0], (0, 1), 4, 0), ranks_of(hosts[1], (2, 3), 4, 1)]
    for rank in nodes[0]:
        rank.save(2, ["durable"])
    for rank in nodes[1]:
        rank.save(2, [])
        rank.wait("part_sealed")
    hosts[1].kill()
    start("n2")
    assert "the checkpoint worker was lost" in nodes[0][0].wait("save_failed", tier="durable")["why"]
    assert resumable_checkpoints(run.checkpoints) == []


def test_a_rank_that_dies_leaves_garbage_that_is_used_again(start: MakeHost) -> None:
    host = start()
    ranks = ranks_of(host, (0, 1), 2)
    ranks[0].save(2, ["durable"])
    ranks[0].wait("part_sealed")
    ranks[1].claim(2)
    ranks[1].close()
    failed = ranks[0].wait("save_failed", tier="memory")
    assert "rank 1 is gone" in failed["why"]
    assert host.wait("save_failed")["stamp"]["step"] == 2
    host.configure(2)
    for rank in ranks_of(host, (0, 1), 2):
        rank.save(4, ["durable"], attempt=2)
    assert host.wait("store_result")["problem"] is None


def test_a_rank_that_comes_again_takes_its_own_place(start: MakeHost) -> None:
    host = start()
    (before,) = ranks_of(host, (0,), 1, slots=1)
    assert before.claim(2)["kind"] == "slot_claimed"
    again = Rank(host, 0, (0,), 1)
    assert again.claim(2)["kind"] == "slot_claimed", "its predecessor fills nothing any more"
    before.close()
    again.say(kind="plan_slot", key=1, pieces=[list(piece) for piece in again.pieces], file=0, start=0)
    again.wait("slot_planned")
    again.slots = before.slots
    again.copy(0, 2)
    again.tell_filled(0, 2, ["durable"])
    assert again.wait("store_result")["tier"] == "durable"


def test_the_tiers_that_cannot_be_had_are_named(start: MakeHost, run: RunDir) -> None:
    host = Host(run.path.parent, run, "n1")
    try:
        ready = host.configure(local="$NOWHERE_AT_ALL/x")
        assert ready["tiers"] == ["memory", "durable"]
        assert "NOWHERE_AT_ALL" in host.wait("worker_log")["text"]
        for rank in ranks_of(host, (0,), 1):
            rank.save(2, ["local", "parity", "durable"])
            assert "is not set" in rank.wait("save_failed", tier="local")["why"]
            assert rank.wait("save_failed", tier="parity")["why"] == "this worker has no tier parity"
            rank.wait("store_result", tier="durable")
    finally:
        host.kill()


def test_a_full_disk_of_the_node_does_not_keep_a_save_from_the_run_directory(
    start: MakeHost, run: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "disk").write_text("no directory")
    host = start(local=str(tmp_path / "disk"))
    (rank,) = ranks_of(host, (0,), 1)
    rank.save(2, ["local", "durable"])
    assert host.wait("store_result", tier="local")["problem"]
    assert host.wait("store_result", tier="durable")["problem"] is None


def test_the_page_cache_is_passed_by_where_that_pays_or_the_job_says_so(start: MakeHost, run: RunDir) -> None:
    host = start()
    (rank,) = ranks_of(host, (0,), 1)
    pays = find_mount(run.checkpoints).kind in ("ext4", "xfs")
    for attempt, asked, expected in ((1, None, pays), (2, False, False), (3, True, True)):
        host.configure(attempt, durable={"direct": asked})
        rank.save(attempt, ["durable"], attempt=attempt)
        layout = (
            host.wait("store_result", tier="durable")["facts"].get("layout", {}).get("data-00000.bin", {})
        )
        assert ("direct_bytes" in layout) == expected


def test_nonsense_is_answered(start: MakeHost) -> None:
    host = start()
    host.say(kind="dance")
    assert "kind: expected one of configure_worker, " in host.wait("worker_error")["why"]
    host.say(what=1)
    assert host.wait("worker_error")
    order: dict[str, Any] = {
        "stamp": asdict(stamp_of(2, 1)),
        "node": "n",
        "members": [],
        "parity": 1,
        "lost": [],
    }
    host.say(kind="rebuild_parts", id=4, order=order | {"survivors": []})
    assert "this worker talks to no other nodes" in host.wait("parts_rebuilt", id=4)["problem"]
    rank = Rank(host, 0, (0,), 1)
    for request in ({"kind": "sing"}, {"kind": "plan_slot", "key": 1}, {"kind": "claim_slot"}):
        rank.say(**request)
        assert rank.wait("request_refused")
    rank.say(kind="claim_slot", generation="00", published=None)
    assert rank.wait("slots_busy")["why"] == "rank 0 has reserved no slot"
    host.process.send_signal(signal.SIGTERM)
    assert host.holdings() == [], "Slurm's signals are not meant for the worker"


def test_one_slot_is_not_taken_from_the_only_copy(start: MakeHost) -> None:
    host = start()
    (rank,) = ranks_of(host, (0,), 1, slots=1)
    rank.save(2, [])
    rank.wait("part_sealed")
    busy = rank.claim(4, 2)
    assert busy["kind"] == "slots_busy"
    assert "slot-0-0.bin holds the only copy of step 2" in busy["why"]
    host.say(kind="release_generations", keep=[])
    host.holdings()
    assert rank.claim(4, 2)["kind"] == "slot_claimed"


def test_it_gives_signs_of_life(start: MakeHost) -> None:
    host = start("a")
    host.configure()
    host.say(kind="ping_worker")
    host.wait("worker_pong")
    rank = Rank(host, 0, [0], 1)
    rank.say(kind="ping_from_rank")
    rank.wait("worker_pong")


def test_the_end_of_its_host_is_the_end_of_it(start: MakeHost) -> None:
    first, second = start("n1"), start("n2")
    assert first.end() == 0
    second.say(kind="end_worker")
    assert second.process.wait(20) == 0
    assert os.path.isdir(first.arena)  # noqa: PTH112


def test_a_rank_of_another_version_is_refused_and_both_ends_name_both(
    start: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start()
    monkeypatch.setattr(lines, "__version__", "0.0.9")
    words = f"the checkpoint worker runs hpcrun {__version__}, rank 3 0.0.9; install one version on all nodes"
    for _ in range(2):
        with pytest.raises(WorkerGoneError, match=re.escape(words)):
            RankWorkerClient(host.arena / SOCKET_NAME, 3)
    assert host.wait("worker_log")["text"] == (
        f"a rank of this node runs hpcrun 0.0.9, its checkpoint worker {__version__};"
        " install one version on all nodes"
    )
    host.holdings()
    assert [one for one in host.heard if one["kind"] == "worker_log"] == [], "it is told once"


def test_a_worker_whose_host_is_of_another_version_ends_and_names_both(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "hpcrun", "_checkpoint_worker", str(tmp_path)],
        input=b'{"hpcrun": "0.0.9"}\n{"kind": "ping_worker"}\n',
        capture_output=True,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    words = f"runs hpcrun 0.0.9, the checkpoint worker {__version__}; install one version on all nodes"
    assert (ended.returncode, ended.stderr.decode().count(words)) == (SiteError.exit_code, 1)
    assert len(ended.stderr.splitlines()) == 1
