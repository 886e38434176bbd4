"""What runs saw of nodes: how it is kept, what it amounts to, how it decays, what is avoided for it."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpcrun.errors import SiteError
from hpcrun.health import lemon_nodes
from hpcrun.health.lemon_nodes import (
    CAUSE_WEIGHTS,
    FAULT_HALF_LIFE_S,
    LEMON_THRESHOLD,
    NodeFault,
    append_node_faults,
    forget_node_faults,
    load_node_faults,
    max_avoided_nodes,
    node_fault_file,
    score_nodes,
    select_nodes_to_avoid,
)
from hpcrun.specs.badnodes import BadNodeList
from hpcrun.specs.cluster import parse_cluster
from hpcrun.submission.placement_preview import load_network

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
DAY = 86400.0


def saw(node: str = "n03", cause: str = "node lost", age_s: float = 0.0, **more: object) -> NodeFault:
    values = {"run": "hardy-1129-0001", "attempt": 1, "evidence": "its agent ended"} | more
    return NodeFault(node, NOW - age_s, cause, **values)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "node-faults.jsonl"


def test_without_a_file_nothing_was_seen(path: Path) -> None:
    assert load_node_faults(path) == lemon_nodes.NodeFaultHistory()
    assert score_nodes([], NOW) == {}


def test_what_is_appended_is_read_back(path: Path) -> None:
    entries = (saw(log="/runs/a/agents/n03.log", job=61, signature="x"), saw("n04", "straggler"))
    append_node_faults(path, entries[:1])
    append_node_faults(path, entries[1:])
    append_node_faults(path, [])
    assert load_node_faults(path) == lemon_nodes.NodeFaultHistory(entries)
    first = json.loads(path.read_text().splitlines()[0])
    assert first["weight"] == CAUSE_WEIGHTS["node lost"]


def test_several_jobs_append_at_once_and_no_line_is_lost(path: Path) -> None:
    def add(run: int) -> None:
        for attempt in range(20):
            append_node_faults(path, [saw(run=f"r{run}", attempt=attempt, evidence="e" * 250)])

    threads = [threading.Thread(target=add, args=(run,)) for run in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = load_node_faults(path)
    assert found.notes == ()
    assert len(set(found.entries)) == 120


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"node": "n01"}',
        '{"node": "n01", "time": "soon"}',
        '{"node": "n01", "time": -1}',
        '{"node": "n01", "time": NaN}',
        '{"node": "n01", "time": 1e400}',
        '{"node": ["n01"], "time": 1}',
        '{"node": "n[01-02]", "time": 1}',
        '{"node": "@all", "time": 1}',
        '{"node": "n01", "time": 1, "cause": 3}',
        "[" * 100000,
    ],
)
def test_damaged_lines_are_told_and_never_fatal(path: Path, line: str) -> None:
    append_node_faults(path, [saw()])
    with path.open("a") as file:
        file.write(f"{line}\n")
    append_node_faults(path, [saw("n04")])
    found = load_node_faults(path)
    assert [one.node for one in found.entries] == ["n03", "n04"]
    assert found.notes == (f"{path}: no entries, and skipped: line 2",)


def test_a_torn_line_does_not_swallow_the_next(path: Path) -> None:
    append_node_faults(path, [saw()])
    with path.open("a") as file:
        file.write('{"node": "n04"')
    append_node_faults(path, [saw("n05")])
    assert [one.node for one in load_node_faults(path).entries] == ["n03", "n05"]


def test_text_that_would_end_the_line_or_move_the_cursor_is_kept_as_one_line(path: Path) -> None:
    append_node_faults(path, [saw(evidence="a\nb\x1b[2J\u2028" + "c" * 1000)])
    (one,) = load_node_faults(path).entries
    assert one.evidence.isprintable()
    assert len(one.evidence) <= 300


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        SiteError, match=r"node-faults.jsonl: cannot be written: (Not a directory|File exists)"
    ):
        append_node_faults(tmp_path / "file" / "node-faults.jsonl", [saw()])
    assert "cannot be read" in load_node_faults(tmp_path).notes[0]


def test_a_file_system_that_stalls_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(lemon_nodes, "_append_locked", lambda path, lines: goes_on.wait(10))
    monkeypatch.setattr(lemon_nodes, "_WAIT_S", 0.02)
    with pytest.raises(SiteError, match="is not written within"):
        append_node_faults(path, [saw()])
    goes_on.set()


def test_a_lost_node_is_avoided_for_a_half_life_and_a_crash_alone_is_not() -> None:
    found = score_nodes([saw(), saw("n04", "crash")], NOW)
    assert [*found] == ["n03", "n04"]
    assert found["n03"].score == pytest.approx(2.0)
    assert found["n03"].until == pytest.approx(NOW + FAULT_HALF_LIFE_S)
    assert found["n04"].score == pytest.approx(0.6)
    assert found["n04"].until is None


def test_the_same_cause_counts_once_an_attempt() -> None:
    several = [saw("n03", "crash", signature=f"s{number}") for number in range(9)]
    assert score_nodes(several, NOW)["n03"].score == pytest.approx(0.6)
    others = [saw("n03", "crash", attempt=2), saw("n03", "crash", run="other"), saw("n03", "hang")]
    found = score_nodes([*several, *others], NOW)["n03"]
    assert found.score == pytest.approx(3 * 0.6 + 0.8)
    assert found.causes == {"crash": 3, "hang": 1}


@pytest.mark.parametrize("cause", CAUSE_WEIGHTS)
def test_what_follows_a_run_from_node_to_node_blames_no_node(cause: str) -> None:
    same = [saw(f"n0{number}", cause, signature="IndexError in train.py") for number in range(3)]
    assert set(score_nodes(same[:2], NOW)) == {"n00", "n01"}
    assert score_nodes(same, NOW) == {}


def test_a_crash_that_all_runs_have_blames_the_program() -> None:
    runs = [saw(f"n0{n}", "crash", run=f"r{n}", signature="killed by signal 11") for n in range(3)]
    assert score_nodes(runs, NOW) == {}
    assert len(score_nodes([saw(f"n0{n}", "crash", run=f"r{n}") for n in range(3)], NOW)) == 3


def test_nodes_that_are_lost_one_by_one_count_and_those_lost_together_do_not() -> None:
    one_by_one = [saw(f"n0{number}", attempt=number) for number in range(5)]
    assert len(score_nodes(one_by_one, NOW)) == 5
    assert score_nodes([saw(f"n0{number}") for number in range(5)], NOW) == {}


def test_a_node_can_be_forgotten_and_is_judged_anew(path: Path) -> None:
    append_node_faults(path, [saw(age_s=10), saw("n04", age_s=10)])
    forget_node_faults(path, ["n03"], NOW)
    append_node_faults(path, [saw("n05", attempt=2)])
    assert set(score_nodes(load_node_faults(path).entries, NOW)) == {"n04", "n05"}
    # By the order of the lines: the node's clock may be hours from the login node's.
    append_node_faults(path, [saw("n03", age_s=7200, attempt=2)])
    assert "n03" in score_nodes(load_node_faults(path).entries, NOW + 2)
    append_node_faults(path, [saw("n06", age_s=-7200, run="ahead", attempt=9)])
    assert "n06" in score_nodes(load_node_faults(path).entries, NOW)
    forget_node_faults(path, ["n03", "n06"], NOW)
    assert not {"n03", "n06"} & set(score_nodes(load_node_faults(path).entries, NOW))


def entries(rng: random.Random) -> list[NodeFault]:
    return [
        saw(
            f"n{rng.randrange(6):02}",
            rng.choice([*CAUSE_WEIGHTS, "unheard of"]),
            rng.uniform(0, 20 * DAY),
            run=f"r{rng.randrange(4)}",
            attempt=rng.randrange(3),
            signature=rng.choice(["", "a", "b", "c"]),
        )
        for _ in range(rng.randrange(30))
    ]


def cases(count: int) -> Iterator[tuple[random.Random, list[NodeFault]]]:
    rng = random.Random(8)
    for _ in range(count):
        yield rng, entries(rng)


def test_scores_only_fall_as_time_goes_by_by_half_in_a_half_life() -> None:
    for rng, seen in cases(300):
        first = score_nodes(seen, NOW)
        later = NOW + rng.uniform(0, DAY)
        second = score_nodes(seen, later)
        assert set(second) <= set(first) or not second
        for node, found in second.items():
            # What is too old to count is dropped at 2^-10 of its weight, of a few entries at most.
            factor = 0.5 ** ((later - NOW) / FAULT_HALF_LIFE_S)
            assert found.score <= first[node].score * factor + 1e-9 or len(first[node].seen) != len(
                found.seen
            )
            assert found.score == pytest.approx(first[node].score * factor, abs=0.05)


def test_the_end_is_where_the_score_falls_below_the_threshold() -> None:
    for _, seen in cases(300):
        for node, found in score_nodes(seen, NOW).items():
            assert found.score <= sum(one.weight for one in found.seen) + 1e-9
            assert (found.until is not None) == (found.score >= LEMON_THRESHOLD)
            if found.until is not None:
                assert found.until >= NOW
                assert score_nodes(found.seen, found.until)[node].score == pytest.approx(
                    LEMON_THRESHOLD, abs=0.02
                )


def test_the_order_of_the_entries_does_not_matter_and_more_of_the_same_changes_nothing() -> None:
    for rng, seen in cases(200):
        mixed = seen + rng.sample(seen, len(seen) // 2)
        rng.shuffle(mixed)
        assert {n: f.score for n, f in score_nodes(mixed, NOW).items()} == pytest.approx(
            {n: f.score for n, f in score_nodes(seen, NOW).items()}
        )


def test_a_clock_that_is_ahead_makes_nothing_heavier() -> None:
    assert score_nodes([saw(age_s=-3600)], NOW)["n03"].score == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("nodes", "needed", "most"),
    [
        (0, 0, 0),
        (1, 0, 0),
        (3, 0, 0),
        (4, 0, 1),
        (9, 0, 1),
        (20, 0, 2),
        (1000, 0, 100),
        (8, 8, 0),
        (20, 19, 1),
    ],
)
def test_no_more_than_a_share_of_a_partition_is_avoided(nodes: int, needed: int, most: int) -> None:
    assert max_avoided_nodes(nodes, needed) == most


def test_the_worst_are_avoided_and_the_others_are_told() -> None:
    scores = score_nodes(
        [saw("n03"), saw("n05"), saw("n05", "hang"), saw("n07", "crash"), saw("x1", run="r2")], NOW
    )
    nodes = [f"n{number:02}" for number in range(8)]
    found = select_nodes_to_avoid(scores, nodes)
    assert set(found.active(NOW)) == {"n05"}
    assert (
        "hang 1x, node lost 1x in your runs, last in hardy-1129-0001: its agent ended (until "
        in (found.active(NOW)["n05"])
    )
    assert found.active(NOW + 30 * DAY) == {}
    assert found.notes == (
        "seen as bad, but not avoided: n03: no more than 1 of 8 nodes are for what runs saw;"
        " see `hpcrun fabric nodes`",
    )
    assert set(select_nodes_to_avoid(scores, nodes, bad=["n05"]).active(NOW)) == {"n03"}
    assert select_nodes_to_avoid(scores, nodes, needed=8).entries == ()
    assert select_nodes_to_avoid(scores, nodes, bad=["n00"], needed=7).entries == ()
    assert select_nodes_to_avoid(score_nodes([saw(node) for node in nodes], NOW), nodes) == BadNodeList()


def test_a_submission_keeps_away_from_them_as_from_bad_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    table = "name: c\ntopology: {source: table, table: {l1: 'n[01-04]', l2: 'n[05-08]'}}\n"
    cluster = parse_cluster(table, "c.yaml")
    monkeypatch.setattr("time.time", lambda: NOW)
    append_node_faults(node_fault_file(), [saw("n03"), saw("n99")])
    with node_fault_file().open("a") as file:
        file.write("torn\n")
    network = load_network(cluster, None)
    assert set(network.bad) == {"n03"}
    assert network.states["n03"] == "bad"
    assert "n03" not in network.free
    assert network.damaged == (f"{node_fault_file()}: no entries, and skipped: line 3",)
    assert load_network(cluster, None, needed=8).bad == {}
