"""Who may lead a run, and when an agent may take it over: rules by a false clock, and real files."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from hpcrun.launch.agents import supervisor_client
from hpcrun.launch.agents.connection import is_host_reachable
from hpcrun.launch.failover import lease_monitor
from hpcrun.launch.failover.heartbeat import CLOCK_TICK_S, AwakeClock
from hpcrun.launch.failover.lease_monitor import CONFIRM_S, HOST_TIMEOUT_S, QUIET_S, STAGGER_S, LeaseMonitor
from hpcrun.runs.lease import (
    LEADER_TIMEOUT_S,
    FencedError,
    LeaderEventWriter,
    LeaderRecord,
    Leadership,
    claim_epoch,
    leader_fingerprint,
    newest_epoch,
    read_leader,
    read_lease,
)
from hpcrun.runs.run_lock import RunOwnedError, lock_run, take_over_run_lock
from hpcrun.specs.events.supervisor import SignalEvent
from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def moves(
    vigil: LeaseMonitor, clock: Clock, signs: Iterable[str], every_s: float = 0.5
) -> list[tuple[float, str]]:
    """What the agent does, and when, as it looks at one sign after the other; it bids when it should."""
    found: list[tuple[float, str]] = []
    for sign in signs:
        clock.now += every_s
        move = vigil.look(sign)
        if move != "wait":
            found.append((clock.now - 1000.0, move))
        if move == "bid":
            vigil.probe_written()
        if move == "claim":
            break
    return found


def test_silence_and_a_lease_that_stands_still_make_a_claim() -> None:
    clock = Clock()
    found = moves(LeaseMonitor(0, clock), clock, ["a"] * 100)
    assert [move for _, move in found] == ["bid", "claim"]
    assert LEADER_TIMEOUT_S <= found[0][0] <= LEADER_TIMEOUT_S + 1.5
    assert CONFIRM_S <= found[1][0] - found[0][0] <= CONFIRM_S + 1


def test_a_host_that_takes_no_connection_is_waited_for_half_as_long() -> None:
    clock = Clock()
    vigil = LeaseMonitor(0, clock)
    clock.now += QUIET_S
    vigil.tried(answers=False)
    found = moves(vigil, clock, ["a"] * 100)
    assert [move for _, move in found] == ["bid", "claim"]
    assert HOST_TIMEOUT_S <= found[0][0] <= HOST_TIMEOUT_S + 2.5
    assert CONFIRM_S <= found[1][0] - found[0][0] <= CONFIRM_S + 1


def test_a_host_that_answers_again_has_all_its_time() -> None:
    clock = Clock()
    vigil = LeaseMonitor(0, clock)
    vigil.tried(answers=False)
    assert moves(vigil, clock, ["a"] * 4) == []
    vigil.tried(answers=True)
    assert moves(vigil, clock, ["a"] * 100)[0][0] >= LEADER_TIMEOUT_S


def test_a_lease_that_moves_holds_back_where_the_host_does_not_answer() -> None:
    clock = Clock()
    vigil = LeaseMonitor(0, clock)
    vigil.tried(answers=False)
    assert moves(vigil, clock, [str(number // 4) for number in range(400)]) == []


def test_a_kernel_that_refuses_is_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free = taken.getsockname()
        assert is_host_reachable(free)  # nobody listens
        taken.listen()
        assert is_host_reachable(free)


def test_the_first_node_of_the_allocation_goes_first() -> None:
    times = []
    for position in (0, 1, 4):
        clock = Clock()
        times.append(moves(LeaseMonitor(position, clock), clock, ["a"] * 200, 0.1)[0][0])
    assert times[1] - times[0] == pytest.approx(STAGGER_S, abs=0.11)
    assert times[2] - times[0] == pytest.approx(4 * STAGGER_S, abs=0.11)


def test_a_lease_that_moves_holds_everybody_back() -> None:
    clock = Clock()
    vigil = LeaseMonitor(0, clock)
    assert moves(vigil, clock, [str(number // 4) for number in range(400)]) == []
    # The connection is gone all the same: by then others may have gone on without the ranks here.
    assert vigil.is_orphaned


def test_whoever_hears_the_supervisor_never_claims() -> None:
    clock = Clock()
    vigil = LeaseMonitor(0, clock)
    for _ in range(50):
        vigil.heard()
        assert moves(vigil, clock, ["a"] * 3) == []
        assert not vigil.is_orphaned
    assert not vigil.is_quiet or vigil.quiet_s <= QUIET_S


def test_a_file_system_that_stalled_gives_no_reason() -> None:
    clock = Clock()
    vigil = LeaseMonitor(0, clock)
    assert moves(vigil, clock, ["a"] * 3) == []
    clock.now += 60  # the look hangs; the supervisor's renewals do too
    assert moves(vigil, clock, ["a"] * 2)[0][1] == "bid"
    assert [move for _, move in moves(vigil, clock, ["b"])] == ["withdraw"]
    assert moves(vigil, clock, ["c", "d", "e", "f"] * 10) == []


def test_whoever_was_stopped_himself_takes_nobody_for_lost() -> None:
    clock = Clock()
    awake = AwakeClock(clock)
    vigil = LeaseMonitor(0, awake)
    clock.now += 3600.0
    assert vigil.quiet_s <= QUIET_S  # it has just been woken, and has not ticked yet
    awake.tick()
    assert vigil.quiet_s <= QUIET_S
    while vigil.quiet_s < LEADER_TIMEOUT_S:
        clock.now += CLOCK_TICK_S
        awake.tick()
    # From then on time passes as ever.
    assert LEADER_TIMEOUT_S - QUIET_S <= clock.now - 4600.0 <= LEADER_TIMEOUT_S


def test_a_refusal_begins_the_wait_anew() -> None:
    clock = Clock()
    vigil = LeaseMonitor(0, clock)
    moves(vigil, clock, ["a"] * 100)
    began = clock.now
    vigil.refused()
    found = moves(vigil, clock, ["a"] * 100)
    assert found[0][0] - (began - 1000.0) >= LEADER_TIMEOUT_S


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_an_epoch_is_given_once(run: RunDir) -> None:
    assert newest_epoch(run) == 0
    assert claim_epoch(run, 1)
    assert not claim_epoch(run, 1)
    assert newest_epoch(run) == 1
    assert Leadership(run).epoch == 2
    assert Leadership(run).epoch == 3


def test_the_lease_moves_with_every_renewal_and_rests_in_doubt(run: RunDir) -> None:
    leadership = Leadership(run)
    signs = [leader_fingerprint(run)]
    leadership.renew()
    signs.append(leader_fingerprint(run))
    leadership.is_paused = True
    leadership.renew()
    assert leader_fingerprint(run) == signs[1] != signs[0]
    leadership.verify()


def test_a_newer_epoch_ends_the_older_one_s_acts(run: RunDir, tmp_path: Path) -> None:
    old = Leadership(run)
    events = LeaderEventWriter(run.events, old.verify)
    events.append(SignalEvent("SIGUSR1"), 1)
    assert claim_epoch(run, old.epoch + 1)
    with pytest.raises(FencedError, match="another supervisor has taken over"):
        events.append(SignalEvent("SIGTERM"), 1)
    before = read_lease(run)
    old.renew()
    assert read_lease(run) == before
    with pytest.raises(FencedError):
        old.check()
    assert [line["event"] for line in read_json_lines(run.events)] == ["signal"]
    assert "host" in next(read_json_lines(run.events))
    with pytest.raises(FencedError):
        LeaderEventWriter(run.events, old.verify)


def test_a_newer_lease_fences_where_the_names_are_not_seen_yet(run: RunDir) -> None:
    old = Leadership(run)
    (run.path / "lease").write_text(json.dumps({"epoch": old.epoch + 1, "count": 1}))
    old.renew()
    with pytest.raises(FencedError):
        old.check()


def test_a_supervisor_that_stood_still_looks_before_it_acts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Leadership(run)
    claim_epoch(run, old.epoch + 1)
    old.check()  # it has just looked, and the renewals will
    monkeypatch.setattr("hpcrun.runs.lease.time.monotonic", lambda: 1e9)
    with pytest.raises(FencedError):
        old.check()


def test_the_leader_s_file_is_ours_alone_to_read(run: RunDir) -> None:
    assert read_leader(run) is None
    leader = LeaderRecord(2, "10.0.0.1", 1234, "secret", "n01")
    leader.publish(run)
    assert read_leader(run) == leader
    assert (run.path / "leader.json").stat().st_mode & 0o777 == 0o600


def test_a_successor_holds_the_run_against_the_lock_of_a_dead_host(run: RunDir) -> None:
    # Whoever comes when the successor is there meets the successor.
    with lock_run(run), take_over_run_lock(run), pytest.raises(RunOwnedError), lock_run(run):
        pass
    with lock_run(run):
        pass


def test_whoever_asks_slurm_for_long_claims_nothing_that_is_another_s_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (
        ("QUIET_S", 0.05),
        ("LEADER_TIMEOUT_S", 0.2),
        ("HOST_TIMEOUT_S", 0.2),
        ("CONFIRM_S", 0.1),
    ):
        monkeypatch.setattr(lease_monitor, name, seconds)
    monkeypatch.setattr(supervisor_client, "_POLL_S", 0.02)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    assert claim_epoch(run, 1)
    asked: list[int] = []

    def slowly() -> bool:
        """Meanwhile another agent has taken over; asked once more, there is nothing to lead any more."""
        asked.append(newest_epoch(run))
        return len(asked) == 1 and claim_epoch(run, 2)

    link = supervisor_client.SupervisorClient(run, "a", 0, slowly)
    try:
        end = time.monotonic() + 20
        while len(asked) < 2 and time.monotonic() < end:
            link.receive()
            time.sleep(0.02)
    finally:
        link.close()
    assert asked == [1, 2]
    assert link.won_epoch is None
    assert newest_epoch(run) == 2
