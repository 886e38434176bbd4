"""The story of a run in plain lines, from records in order, in pieces, and damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.runs.event_text import EventFormatter, EventLine, follow_events, format_events
from hpcrun.runs.follow import PollIntervals
from hpcrun.specs.events.log import parse_event
from hpcrun.specs.metrics import parse_metric
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.metric_lines import metric_line

Record = dict[str, Any]
T0 = 1_800_000_000.0


def event(at: float, name: str, attempt: int = 1, **values: Any) -> Record:
    return event_line(name, T0 + at, attempt, monotonic=at, **values)


def line(at: float, kind: str, step: int, attempt: int = 1, **more: Any) -> Record:
    return metric_line(kind, step, attempt=attempt, time=T0 + at, **more)


def ended(at: float, rank: int, status: int | None, attempt: int = 1) -> Record:
    return event(at, "rank_ended", attempt, rank=rank, node=f"n0{rank // 2 + 1}", pid=9, wait_status=status)


FIRST = [
    event(0, "launch", ranks=8, command=["x"]),
    *(event(1, "rank_started", rank=rank, node="n01", pid=rank) for rank in range(8)),
    event(7.1, "ranks_connected", seconds=7.1),
    event(20, "signal", signal="SIGUSR1"),
    ended(30, 3, 9),
    *(ended(30.1, rank, 256) for rank in (0, 1, 2, 4, 6, 7)),
    event(30.2, "launcher_ended", wait_status=2304),
    event(30.5, "processes_ended", stuck=["rank 5 on n03"]),
    event(31, "exit", status="failed", exit_code=5, message="rank 3 on node n02 was killed\nmore of it"),
    event(31.1, "fault", cause="node", nodes=["n02"], rank=3, message="no answer"),
]
THEN = [
    event(32, "relaunch", 2, excluded=["n02", "n03"], spares_left=1),
    event(33, "launch", 2, ranks=8),
    event(40, "ranks_connected", 2, seconds=7.0),
    event(50, "promoted", 2, node="n07"),
    event(55, "signal", 2, signal="SIGTERM"),
    event(60, "result", 2, status="done", step=60),
    *(ended(61, rank, 0, 2) for rank in range(8)),
    event(61, "launcher_ended", 2, wait_status=2560),
    event(62, "processes_ended", 2, stuck=[]),
    event(62, "exit", 2, status="done", exit_code=0, message="done at step 60"),
    event(63, "requeue", 2, cause="time_limit"),
]
METRICS = [
    line(8, "start", 0, device="cpu"),
    line(9, "step", 1, step_time_s=1, loss=2.0),
    line(21, "save", 20, seconds=0.24),
    line(41, "start", 20, 2),
    line(59, "eval", 60, 2, eval_loss=2.5, seconds=1),
]
BEFORE = "before the run was done"
TOLD = [
    (1, "launch of 8 ranks on n[01-04]"),
    (1, "ranks connected after 7.1 s"),
    (1, "starts at step 1"),
    (1, "SIGUSR1: save"),
    (1, "step 20: saved in 0.2 s"),
    (1, f"rank 3 on n02 was killed by signal 9 (SIGKILL) {BEFORE}; ranks 0-2,4,6-7 ended afterwards"),
    (1, "could not kill: rank 5 on n03"),
    (1, "failed: rank 3 on node n02 was killed"),
    (1, "fault: node of rank 3 on node n02: no answer"),
    (2, "relaunch in the same allocation without n[02-03]; 1 spare left"),
    (2, "launch of 8 ranks on n[01-04]"),
    (2, "ranks connected after 7.0 s"),
    (2, "resumes after step 20"),
    (2, "promoted node=n07"),
    (2, "SIGTERM: save and stop"),
    (2, "step 60: eval loss 2.5000"),
    (2, "done at step 60"),
    (2, "requeued (time limit)"),
]


def tell(
    formatter: EventFormatter, events: Iterable[Record], metrics: Iterable[Record] = ()
) -> list[EventLine]:
    return formatter.tell(map(parse_event, events), map(parse_metric, metrics))


def nodes(attempt: int) -> list[str]:
    return ["n01", "n02", "n03", "n04"]


def texts(entries: list[EventLine]) -> list[tuple[int, str]]:
    return [(one.attempt, one.text) for one in entries]


def test_the_story_is_told_in_the_order_of_things_with_ranks_folded() -> None:
    assert texts(tell(EventFormatter(nodes), FIRST + THEN, METRICS)) == TOLD


def test_ranks_of_a_command_end_one_by_one_before_it_is_known_to_be_done() -> None:
    ends = [event(5, "rank_ended", rank=rank, node="n01", pid=7, wait_status=0) for rank in (1, 0)]
    told = texts(tell(EventFormatter(nodes), [*ends, event(6, "exit", status="done", message="done")], []))
    assert told == [(1, "rank 1 on n01 ended with exit code 0; rank 0 ended afterwards"), (1, "done")]


def test_told_piece_by_piece_it_says_the_same() -> None:
    teller = EventFormatter(nodes)
    found: list[EventLine] = []
    marks = [*range(0, 70, 5), 100]
    for low, high in pairwise(marks):
        now = [[r for r in records if low <= r["time"] - T0 < high] for records in (FIRST + THEN, METRICS)]
        found += tell(teller, *now)
    assert texts(found) == TOLD


def test_ranks_that_fall_one_after_another_are_told_as_they_come() -> None:
    teller = EventFormatter()
    assert texts(tell(teller, [ended(1, 3, 9)]))[0][1].startswith("rank 3 on n02 was killed")
    assert texts(tell(teller, [ended(2, 2, None)])) == [(1, "rank 2 ended afterwards")]
    assert tell(teller, [event(2, "rank_failed", rank=2)]) == []
    assert texts(tell(EventFormatter(), [event(1, "rank_failed", rank=rank) for rank in (5, 6, 7)])) == [
        (1, "rank 5 failed; ranks 6-7 failed afterwards")
    ]


def test_a_fault_names_its_nodes_and_what_was_said_already_is_not_said_again() -> None:
    exit_event = event(1, "exit", status="failed", message="nodes are lost")
    fault = event(2, "fault", cause="node_lost", nodes=["n02", "n03"], message="nodes are lost")
    told = [(1, "failed: nodes are lost"), (1, "fault: node lost of nodes n[02-03]")]
    assert texts(tell(EventFormatter(), [exit_event, fault])) == told
    found = tell(
        EventFormatter(), [fault, event(2, "fault", 2, cause="hang", nodes=[], message="nodes are lost")]
    )
    assert texts(found) == [
        (1, "fault: node lost of nodes n[02-03]: nodes are lost"),
        (2, "fault: hang: nodes are lost"),
    ]


def test_a_launcher_that_ends_before_any_rank_is_told() -> None:
    assert texts(tell(EventFormatter(), [event(1, "launcher_ended", wait_status=256)])) == [
        (1, "the launcher ended with exit code 1")
    ]
    assert tell(EventFormatter(), [event(1, "launcher_ended", wait_status=0)]) == []


def set_back(records: list[Record], since: float) -> list[Record]:
    return [{**one, "time": one["time"] - 3600 * (one["time"] > T0 + since)} for one in records]


def test_a_clock_that_was_set_back_between_two_attempts_changes_no_order() -> None:
    assert texts(tell(EventFormatter(nodes), set_back(FIRST + THEN, 31.5), set_back(METRICS, 31.5))) == TOLD


def test_a_clock_that_was_set_back_in_an_attempt_changes_no_order_of_what_its_supervisor_saw() -> None:
    events = texts(tell(EventFormatter(nodes), FIRST + THEN))
    found = texts(tell(EventFormatter(nodes), set_back(FIRST + THEN, 10), set_back(METRICS, 10)))
    assert [one for one in found if one in events] == events
    assert sorted(found) == sorted(TOLD)


def test_a_restart_that_passes_over_a_damaged_save_says_so() -> None:
    whole = line(8, "restore", 16, seconds=0.1, passed_over=[], lost_steps=0)
    damaged = line(9, "restore", 8, 2, passed_over=["step-00000016: is damaged: x"], lost_steps=8)
    told = [entry.text for entry in tell(EventFormatter(), [], [whole, damaged])]
    assert told == ["falls back to step 8: step-00000016: is damaged: x"]


def write(run: RunDir, events: list[Record], metrics: list[Record] = METRICS) -> None:
    run.events.write_text("".join(json.dumps(one) + "\n" for one in events) + '{"torn": ')
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in metrics))


def test_damaged_records_are_passed_over() -> None:
    rng, run = random.Random(1), create_run("r")
    odd: list[Any] = [None, "x", -1, 2**40, 1e300, float("nan"), True, [], {}, "?" * 500]
    for _ in range(100):
        broken = [dict(one) for one in FIRST + THEN + METRICS]
        for one in broken:
            if rng.random() < 0.3:
                one[rng.choice(list(one))] = rng.choice(odd)
        write(run, [one for one in broken if "event" in one], broken)
        for entry in format_events(run):
            assert "\n" not in str(entry)


def test_a_run_directory_tells_its_story() -> None:
    run = create_run("r")
    assert format_events(run) == []
    write(run, FIRST + THEN)
    run.attempt(1).create()
    placed = {"ranks": ["n01", "n02"], "spares": [], "method": "as given", "why": [], "mesh": None}
    write_json(run.attempt(1).placement, placed)
    run.attempt(2).create().placement.write_text("{}")
    found = texts(format_events(run))
    assert found[0] == (1, "launch of 8 ranks on n[01-02]")
    assert (2, "launch of 8 ranks") in found
    assert str(format_events(run)[1]).endswith("  attempt 1  ranks connected after 7.1 s")


def test_following_goes_on_until_the_run_is_over() -> None:
    run = create_run("r")
    write(run, FIRST)
    pace = PollIntervals(records=0.01)
    record = {"pid": 1, "start_ticks": 1, "host": "n99", "started": 1.0}
    write_json(run.attempt(1).create().supervisor, record)
    found: list[EventLine] = []

    def take(entry: EventLine) -> None:
        found.append(entry)
        if len(found) == 9:
            write(run, FIRST + THEN)
            exit_record = {"status": "failed", "exit_code": 5, "message": "", "attempt": 1}
            write_json(run.exit, exit_record)

    assert follow_events(run, take, lambda text: None, pace) == 5
    assert [one.text for one in found if one.what == "exit"] == [TOLD[7][1], "done at step 60"]
    with pytest.raises(UsageError, match="nothing to wait for"):
        follow_events(create_run("s"), take, lambda text: None, pace)


def test_a_save_is_told_once_whoever_writes_it_down_first() -> None:
    """Rank 0 and the supervisor both record that a tier has a save, or does not get it."""
    facts: dict[str, Any] = {"seconds": 1.5, "size_bytes": 7, "lag_s": 2.0}
    metrics = [
        line(61, "stored", 60, tier="durable", **facts),
        line(62, "stored", 60, tier="object", **facts),
        line(71, "save_failed", 70, tier="durable", why="rank 0 on n01: disk full"),
    ]
    events = [
        event(60.5, "checkpoint_stored", step=60, tier="durable"),
        event(60.6, "checkpoint_stored", step=60, tier="parity"),
        event(62.5, "checkpoint_stored", step=60, tier="object"),
        event(71.5, "checkpoint_failed", step=70, tier="durable", problem="n01: disk full"),
    ]
    assert texts(tell(EventFormatter(), events, metrics)) == [
        (1, "step 60: saved in the background after 2.0 s"),
        (1, "step 60: saved (object) in the background after 2.0 s"),
        (1, "step 70: durable save failed: rank 0 on n01: disk full"),
    ]
    told = [
        (1, "step 60: saved"),
        (1, "step 60: saved (object)"),
        (1, "step 70: durable save failed: n01: disk full"),
    ]
    assert texts(tell(EventFormatter(), events)) == told
    formatter = EventFormatter()
    assert texts(tell(formatter, events)) == told
    assert tell(formatter, [], metrics) == []
    again = event(90, "checkpoint_stored", 2, step=60, tier="durable")
    assert texts(tell(formatter, [again])) == [(2, "step 60: saved")], "a later attempt saves it anew"
