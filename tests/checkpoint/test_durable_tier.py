"""Workers of several nodes commit one generation together, or none of them does."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.commit import delete_generation, find_garbage
from hpcrun.checkpoint.flush.durable_tier import CommitTimeouts, DurableTier, PrepareFile, no_preparation
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.tier import NodeShards
from hpcrun.errors import SiteError
from hpcrun.specs.saves import COMMIT_RECORD, resumable_checkpoints
from tests.checkpoint.generations import save
from tests.checkpoint.killed_writer import whole_steps
from tests.checkpoint.loads import load_of, with_attempt

QUICK = CommitTimeouts(peer_timeout_s=20, visibility_timeout_s=0.2, first_poll_s=0.005, most_s=0.02)
RANKS = ((0, 1), (2, 3))


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def tier(root: Path, patience: CommitTimeouts = QUICK, **options: Any) -> DurableTier:
    told: dict[str, Any] = {"keep": 2, "patience": patience} | options
    return DurableTier(root, **told)


def loads(step: int, attempt: int = 1) -> list[NodeShards]:
    return [load_of(step, ranks, 4, file, attempt) for file, ranks in enumerate(RANKS)]


def store_all(
    beside: ThreadPoolExecutor, tiers: list[DurableTier], shares: list[NodeShards]
) -> list[Future[dict[str, Any]]]:
    pairs = zip(tiers, shares, strict=True)
    return [beside.submit(tier.store, load) for tier, load in pairs]


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


@pytest.mark.parametrize("direct", [False, True])
def test_two_nodes_commit_together(tmp_path: Path, beside: ThreadPoolExecutor, direct: bool) -> None:
    tiers = [tier(tmp_path, direct=direct) for _ in RANKS]
    for step in (2, 4):
        for done in store_all(beside, tiers, loads(step)):
            assert done.result()["path"] == str(tmp_path / f"step-{step:08d}")
    assert whole_steps(tmp_path) == ([2, 4], [])
    newest = resumable_checkpoints(tmp_path)[-1]
    assert (newest.position, newest.world_size, newest.attempt) == (32, 4, 1)
    assert newest.structure == save(tmp_path / "other", 4, ranks=4).structure
    assert names(newest.path) == [COMMIT_RECORD, "data-00000.bin", "data-00001.bin", "manifest.json"]
    assert names(tmp_path) == ["other", "step-00000002", "step-00000004"]


def test_what_is_committed_is_what_the_ranks_themselves_would_have_written(
    tmp_path: Path, beside: ThreadPoolExecutor
) -> None:
    load = load_of(2, range(2), 2, 0)
    tier(tmp_path / "worker").store(load)
    written = save(tmp_path / "ranks", 2)
    ours = (tmp_path / "worker" / "step-00000002" / "data-00000.bin").read_bytes()
    theirs = (written.path / "data-00000.bin").read_bytes()
    # The generations differ, and so all headers; nothing else does.
    assert len(ours) == len(theirs)
    changed = [n for n in range(0, len(ours), 64) if ours[n : n + 64] != theirs[n : n + 64]]
    assert all(ours[n : n + 4] == b"HPCK" for n in changed)


def test_a_structure_that_changes_is_collected_anew(tmp_path: Path) -> None:
    one = tier(tmp_path, keep=9)
    one.store(load_of(2, range(2), 2, 0))
    one.store(load_of(4, range(3), 3, 0))
    one.store(load_of(6, range(3), 3, 0))
    assert whole_steps(tmp_path) == ([2, 4, 6], [])


def test_without_its_space_a_node_fails_the_save_of_all(
    tmp_path: Path, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    true = os.pwrite

    def full(descriptor: int, data: bytes, position: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "data-00001.bin":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(descriptor, data, position)

    tiers = [tier(tmp_path) for _ in RANKS]
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        leader, other = store_all(beside, tiers, loads(4))
        with pytest.raises(OSError, match="No space left"):
            other.result()
        with pytest.raises(SiteError, match=r"^node .*: .*No space left"):
            leader.result()
    assert whole_steps(tmp_path) == ([2], [])
    left = [path.name for path in (tmp_path / ".step-00000004.1").iterdir()]
    assert sorted(left) == ["failed-00000.json", "failed-00002.json"]
    for done in store_all(beside, tiers, loads(6)):
        done.result()
    assert names(tmp_path) == ["step-00000002", "step-00000006"]


def test_a_node_that_gives_up_is_not_waited_for(tmp_path: Path, beside: ThreadPoolExecutor) -> None:
    tiers = [
        tier(tmp_path, CommitTimeouts(peer_timeout_s=60, first_poll_s=0.005, most_s=0.02)) for _ in RANKS
    ]
    leader, other = loads(2)
    waiting = beside.submit(tiers[0].store, leader)
    tiers[1].abandon(other.stamp, [2, 3], "it was left behind")
    with pytest.raises(SiteError, match="it was left behind"):
        waiting.result(30)
    leader, other = loads(4)
    waiting = beside.submit(tiers[1].store, other)
    tiers[0].abandon(leader.stamp, [0, 1], "it was left behind")
    with pytest.raises(SiteError, match="it was left behind"):
        waiting.result(30)
    assert not list(tmp_path.rglob("data-*.bin"))


@pytest.mark.parametrize("here", [0, 1])
def test_a_node_that_never_comes_is_waited_for_in_vain(tmp_path: Path, here: int) -> None:
    one = tier(tmp_path, replace(QUICK, peer_timeout_s=0.05))
    with pytest.raises(SiteError, match=r"waited 0\.05 s in vain"):
        one.store(loads(2)[here])
    assert resumable_checkpoints(tmp_path) == []


def test_who_is_late_may_still_be_part_of_what_others_commit(tmp_path: Path) -> None:
    """A worker that has lost patience must not take its files away from a leader that has not."""
    leader, other = loads(2)
    impatient = tier(tmp_path, replace(QUICK, peer_timeout_s=0.02))
    with pytest.raises(SiteError, match="in vain"):
        impatient.store(other)
    tier(tmp_path).store(leader)
    assert whole_steps(tmp_path) == ([2], [])


def test_bytes_of_others_that_show_late_are_waited_for(tmp_path: Path, beside: ThreadPoolExecutor) -> None:
    """A network file system may know a file by the size that it had a moment ago."""
    leader, other = loads(2)
    with pytest.raises(SiteError, match="in vain"):
        tier(tmp_path, replace(QUICK, peer_timeout_s=0.02)).store(other)
    data = tmp_path / ".step-00000002.1" / "data-00001.bin"
    whole = data.read_bytes()
    data.write_bytes(whole[:-4096])
    late = threading.Timer(0.1, data.write_bytes, [whole])
    late.start()
    tier(tmp_path, replace(QUICK, visibility_timeout_s=20)).store(leader)
    late.join()
    assert whole_steps(tmp_path) == ([2], [])


def test_bytes_of_others_that_never_show_fail_the_save(tmp_path: Path) -> None:
    leader, other = loads(2)
    with pytest.raises(SiteError, match="in vain"):
        tier(tmp_path, replace(QUICK, peer_timeout_s=0.02)).store(other)
    os.truncate(tmp_path / ".step-00000002.1" / "data-00001.bin", 4096)
    with pytest.raises(SiteError, match=r"waited 0\.2 s in vain for all bytes in"):
        tier(tmp_path).store(leader)
    assert resumable_checkpoints(tmp_path) == []


def test_when_the_attempt_is_over_nobody_is_waited_for(tmp_path: Path, beside: ThreadPoolExecutor) -> None:
    hurry = threading.Event()
    waiting = beside.submit(tier(tmp_path, hurry=hurry).store, loads(2)[0])
    hurry.set()
    with pytest.raises(SiteError, match="the attempt is over"):
        waiting.result(10)


def test_a_leader_that_vanishes_with_everything(tmp_path: Path, beside: ThreadPoolExecutor) -> None:
    """Somebody has cleaned up, or the next attempt has."""
    waiting = beside.submit(tier(tmp_path).store, loads(2)[1])
    record = tmp_path / ".step-00000002.1" / "parts-00002.json"
    deadline = time.monotonic() + 10
    while not record.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    tier(tmp_path).store(load_of(2, range(2), 2, 0, attempt=2))
    with pytest.raises(SiteError, match="was removed before it was committed"):
        waiting.result(10)


def test_an_older_attempt_does_not_take_the_place_of_a_newer_one(tmp_path: Path) -> None:
    one = tier(tmp_path)
    one.store(load_of(2, range(2), 2, 0, attempt=3))
    with pytest.raises(SiteError, match="was saved by attempt 3; this is 2"):
        one.store(load_of(2, range(2), 2, 0, attempt=2))
    assert [one.attempt for one in resumable_checkpoints(tmp_path)] == [3]


def test_records_of_other_generations_and_torn_ones_are_not_counted(
    tmp_path: Path, beside: ThreadPoolExecutor
) -> None:
    leader, other = loads(2)
    aside = tmp_path / ".step-00000002.1"
    aside.mkdir()
    with pytest.raises(SiteError):
        tier(tmp_path / "elsewhere", replace(QUICK, peer_timeout_s=0.01)).store(with_attempt(other, 2))
    (strange,) = (tmp_path / "elsewhere").rglob("parts-*.json")
    (aside / "parts-00002.json").write_bytes(strange.read_bytes())
    (aside / "parts-00003.json").write_bytes(strange.read_bytes()[:50])
    (aside / "failed-00009.json").write_text(json.dumps({"generation": "0" * 32, "why": "of before"}))
    with pytest.raises(SiteError, match="in vain"):
        tier(tmp_path, replace(QUICK, peer_timeout_s=0.05)).store(leader)
    for done in store_all(beside, [tier(tmp_path) for _ in RANKS], loads(4)):
        done.result()
    assert whole_steps(tmp_path) == ([4], [])


def test_only_leftovers_of_this_attempt_and_before_are_removed(tmp_path: Path) -> None:
    for name in ("1.1", "3.2", "1.deleted", "1.1.ranks", "1.9", "5.2.ranks"):
        (tmp_path / f".step-0000000{name}").mkdir()
    tier(tmp_path).store(load_of(4, range(2), 2, 0, attempt=2))
    # Ranks of this attempt may be writing beside the worker.
    assert names(tmp_path) == [".step-00000001.9", ".step-00000005.2.ranks", "step-00000004"]


def test_what_is_kept(tmp_path: Path) -> None:
    one = tier(tmp_path, keep=1, keep_every=4)
    for step in range(1, 11):
        one.store(load_of(step, range(2), 2, 0))
        one.retain(())
    assert [saved.step for saved in resumable_checkpoints(tmp_path)] == [4, 8, 10]


def test_storing_again_is_harmless(tmp_path: Path) -> None:
    one = tier(tmp_path)
    load = load_of(2, range(2), 2, 0)
    assert one.store(load)["path"] == one.store(load)["path"]
    assert names(tmp_path) == ["step-00000002"]


def test_files_are_prepared_before_their_first_byte_and_the_facts_are_kept(
    tmp_path: Path, beside: ThreadPoolExecutor
) -> None:
    asked = []

    def prepare(path: Path, size_bytes: int, writers: int) -> dict[str, Any]:
        assert not path.exists()
        path.touch(mode=0o600)
        asked.append((path.name, size_bytes, writers))
        return {"stripes": 4}

    hooks: list[PrepareFile] = [prepare, no_preparation]
    tiers = [tier(tmp_path, prepare_file=hook) for hook in hooks]
    for done in store_all(beside, tiers, loads(2)):
        done.result()
    (saved,) = resumable_checkpoints(tmp_path)
    assert asked == [("data-00000.bin", saved.file_bytes[0], 2)]
    with GenerationReader(saved) as generation:
        assert generation.manifest.layout == {"data-00000.bin": {"stripes": 4}}
    with GenerationReader(save(tmp_path / "other", 2)) as generation:
        assert generation.manifest.layout == {}


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small file system needs root; run as root")
@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_a_file_system_that_takes_nothing(tmp_path: Path, options: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(small)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        shares = [load_of(step, range(2), 2, 0) for step in range(2, 40)]
        one = tier(small, keep=99)
        with pytest.raises(OSError, match=r"No space left|Read-only file system"):
            list(map(one.store, shares))
        assert whole_steps(small)[1] == []
        left = {path.name for folder in small.glob(".step-*") for path in folder.iterdir()}
        assert left <= {"failed-00000.json"}
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_deletion_of_old_saves_beside_it(tmp_path: Path, beside: ThreadPoolExecutor) -> None:
    over = threading.Event()

    def collect_garbage() -> None:
        while not over.wait(0.001):
            for garbage in find_garbage(tmp_path, 1, in_flight=True, damaged=False)[0]:
                try:
                    delete_generation(garbage.path)
                except FileNotFoundError:
                    continue

    collecting = beside.submit(collect_garbage)
    tiers = [tier(tmp_path) for _ in RANKS]
    try:
        for step in range(1, 12):
            for done in store_all(beside, tiers, loads(step)):
                done.result()
    finally:
        over.set()
    collecting.result()
    whole, problems = whole_steps(tmp_path)
    assert whole[-1:] == [11]
    assert problems == []
