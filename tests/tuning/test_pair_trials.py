"""Trials of pairs: which come next, and which node they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil, log2
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.tuning.host.pair_trials import (
    PairResults,
    PairTrial,
    check_pair_trials,
    choose_next_pairs,
    evaluate_trials,
    parse_pair_trials,
    trial_endpoints,
    trials_of_nodes,
)

OUTPUT = Path(__file__).parents[1] / "data" / "tuning" / "nccl-tests" / "all-reduce-2.17.txt"


def play(count: int, rate: Callable[[str, str], float]) -> tuple[PairResults, int]:
    """Rounds until nothing is left to try, on nodes n0, n1, ..."""
    nodes = [f"n{at}" for at in range(count)]
    trials: list[PairTrial] = []
    rounds = 0
    while pairs := choose_next_pairs(evaluate_trials(nodes, trials)):
        used = [node for pair in pairs for node in pair]
        assert len(used) == len(set(used))
        trials += [PairTrial(pair, rate(*pair)) for pair in pairs]
        rounds += 1
    return evaluate_trials(nodes, trials), rounds


@pytest.mark.parametrize("count", [3, 4, 5, 8, 9, 16, 33, 64])
@pytest.mark.parametrize("at", [0, 1, -1])
def test_one_slow_node_is_named_after_a_few_rounds(count: int, at: int) -> None:
    bad = f"n{at % count}"
    standing, rounds = play(count, lambda a, b: 12.0 if bad in (a, b) else 45.0 + hash(a) % 3)
    assert list(standing.named) == [bad]
    assert rounds <= ceil(log2(count)) + 1
    assert [(one.severity, one.subject) for one in check_pair_trials(standing)] == [("error", bad)]


@pytest.mark.parametrize("bad", [{"n0", "n1"}, {"n2", "n5", "n11"}, {"n0", "n1", "n2", "n3"}])
def test_several_slow_nodes_are_all_named(bad: set[str]) -> None:
    standing, rounds = play(16, lambda a, b: 12.0 if bad & {a, b} else 45.0)
    assert set(standing.named) == bad
    assert rounds <= ceil(log2(16)) + 1


def test_where_all_are_well_one_round_is_enough() -> None:
    standing, rounds = play(16, lambda a, b: 44.0)
    assert (rounds, check_pair_trials(standing), standing.named) == (1, (), {})
    assert play(7, lambda a, b: 44.0)[1] == 2


def test_a_path_between_two_good_nodes_accuses_none_of_them() -> None:
    standing, _ = play(8, lambda a, b: 30.0 if {a, b} == {"n2", "n3"} else 45.0)
    assert standing.named == {}
    assert [(one.severity, one.subject, one.confidence) for one in check_pair_trials(standing)] == [
        ("warning", "n2 and n3", "low")
    ]


def test_half_the_speed_between_good_nodes_is_two_flows_on_one_link() -> None:
    standing, _ = play(8, lambda a, b: 22.0 if {a, b} == {"n2", "n3"} else 45.0)
    (found,) = check_pair_trials(standing)
    assert "n2 and n3: reach 22 GB/s, 49% of what both do with others: two flows may share one link" in str(
        found
    )
    assert "by 1 queue pair, unless set" in found.text
    assert "NCCL_IB_QPS_PER_CONNECTION=4" in found.remedy
    four = [PairTrial(one.nodes, one.rate_GBps, 4) for one in standing.trials]
    assert "by 4 queue pairs a connection" in check_pair_trials(evaluate_trials(standing.nodes, four))[0].text


def test_two_nodes_alone_cannot_tell_who_it_is() -> None:
    standing = evaluate_trials(["n1", "n2"], [PairTrial(("n1", "n2"), 12.0)], at_least_GBps=40.0)
    assert choose_next_pairs(standing) == ()
    assert [(one.severity, one.subject) for one in check_pair_trials(standing)] == [("unknown", "n1, n2")]
    (found,) = check_pair_trials(evaluate_trials(["n1", "n2"], [PairTrial(("n1", "n2"), 12.0)]))
    assert found.text == "there is nothing to compare their trials with"
    assert (
        check_pair_trials(evaluate_trials(["n1", "n2"], [PairTrial(("n1", "n2"), 42.0)], at_least_GBps=40.0))
        == ()
    )


def test_outputs_of_nccl_tests_are_trials() -> None:
    text = OUTPUT.read_text()
    assert parse_pair_trials(text, "a") == (PairTrial(("n01", "n02"), 334.06),)
    log = "n01:1:1 [0] NCCL INFO NCCL_IB_QPS_PER_CONNECTION set by environment to 4.\n"
    assert parse_pair_trials(text + log, "a")[0].queue_pairs == 4
    wrong = parse_pair_trials(text.replace("values : 0 OK", "values : 9 FAILED"), "a")
    assert "wrong results" in check_pair_trials(evaluate_trials(["n01", "n02"], wrong))[0].text


def test_ping_pongs_are_trials() -> None:
    seconds = {"8": [1e-5] * 3, "4000000": [1e-3, 9e-4, 1.1e-3]}
    text = json.dumps({"links": {"n1+n2": {"one": seconds, "all": {}, "pairs": 1}, "leaf": {"one": {}}}})
    assert parse_pair_trials(text, "a") == (PairTrial(("n1", "n2"), 4.0),)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"links": {"a+b": {}}}', "nonsense", '{"links": {"a+b": {"one": {}}}}']
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"a\.txt"):
        parse_pair_trials(text, "a.txt")


def test_names_are_those_that_were_given() -> None:
    trial = PairTrial(("n1", "n2.some.domain"), 4.0)
    assert trials_of_nodes(["n1.x", "n2"], [trial])[0].nodes == ("n1.x", "n2")
    with pytest.raises(UsageError, match=r"n1 and n2\.some\.domain: are no pair of n1, n3"):
        trials_of_nodes(["n1", "n3"], [trial])


def test_slow_partners_accuse_nobody() -> None:
    slow = [PairTrial(("n1", "n2"), 12.0), PairTrial(("n1", "n3"), 12.0)]
    fast = [PairTrial(("n4", "n5"), 45.0), PairTrial(("n6", "n7"), 45.0), PairTrial(("n4", "n6"), 45.0)]
    standing = evaluate_trials([f"n{at}" for at in range(1, 8)], [*slow, *fast])
    assert standing.named == {}
    assert standing.suspects == ("n1", "n2", "n3")
    assert choose_next_pairs(standing) == (("n1", "n4"), ("n2", "n5"), ("n3", "n6"))


PERFTEST = """ Device         : mlx5_0
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      1000             196.02             190.00               0.36
 1048576    1000             392.10             {rate}               0.04
"""


def test_adapters_are_tried_between_nodes_and_the_slow_one_is_named() -> None:
    ends = trial_endpoints(["n1", "n2", "n3"], ["mlx5_0", "mlx5_1"])
    trials: list[PairTrial] = []
    while pairs := choose_next_pairs(evaluate_trials(ends, trials)):
        for pair in pairs:
            assert pair[0].partition(":")[0] != pair[1].partition(":")[0]
            rate = "196.00" if "n2:mlx5_1" in pair else "391.20"
            trials += parse_pair_trials(PERFTEST.format(rate=rate), f"out/{pair[0]}+{pair[1]}.txt")
    standing = evaluate_trials(ends, trials_of_nodes(ends, trials))
    assert list(standing.named) == ["n2:mlx5_1"]
    assert trials[0].nodes == ("n1:mlx5_0", "n2:mlx5_0")
    assert trials[0].rate_GBps == pytest.approx(48.9)
    assert "n2:mlx5_1: is slow: 24.5 GB/s with " in str(check_pair_trials(standing)[0])


def test_an_output_of_one_adapter_is_a_trial_of_it_and_of_its_nodes() -> None:
    log = "n01:1:1 [0] NCCL INFO NCCL_IB_HCA set to =mlx5_3:1\n"
    (one,) = parse_pair_trials(OUTPUT.read_text() + log, "a")
    assert one.nodes == ("n01:mlx5_3:1", "n02:mlx5_3:1")
    assert trials_of_nodes(["n01:mlx5_3", "n02:mlx5_3"], [one])[0].nodes == ("n01:mlx5_3", "n02:mlx5_3")
    assert trials_of_nodes(["n01", "n02"], [one])[0].nodes == ("n01", "n02")
    many = log.replace("=mlx5_3:1", "mlx5_0,mlx5_1")
    assert parse_pair_trials(OUTPUT.read_text() + many, "a")[0].nodes == ("n01", "n02")
    with pytest.raises(UsageError, match="does not tell its two ends; call it NODE:HCA"):
        parse_pair_trials(PERFTEST.format(rate="1.00"), "out.txt")


def test_two_adapters_of_one_node_are_no_pair() -> None:
    ends = trial_endpoints(["n1", "n2"], ["mlx5_0", "mlx5_1"])
    trials = [PairTrial(("n1:mlx5_0", "n2:mlx5_0"), 48.0), PairTrial(("n1:mlx5_1", "n2:mlx5_1"), 20.0)]
    assert choose_next_pairs(evaluate_trials(ends, trials)) == (
        ("n1:mlx5_1", "n2:mlx5_0"),
        ("n2:mlx5_1", "n1:mlx5_0"),
    )
