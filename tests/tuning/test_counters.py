"""Counters of two looks at a node: what grew, and what that means; what counts since boot means nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.tuning.host.counters import (
    CounterGrowth,
    CounterReading,
    compare_counters,
    diagnose_counters,
    parse_counters,
    parse_ethtool,
    read_host_counters,
)
from hpcrun.tuning.host.node_report import captured_command_runner, read_host_report
from tests.tuning.trees import lay_out

SECONDS = 10.0


def counters(name: str, tmp_path: Path, time: float | None) -> CounterReading:
    root = lay_out(name, tmp_path / f"{name} at {time}")
    return replace(read_host_counters(read_host_report(root), root, captured_command_runner(root)), time=time)


def grown(name: str, tmp_path: Path, seconds: float | None = SECONDS) -> CounterGrowth:
    before = counters("counters-before", tmp_path, None if seconds is None else 0.0)
    return compare_counters(before, counters(name, tmp_path / "after", seconds))


def found(one: CounterGrowth) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.check, finding.subject) for finding in diagnose_counters(one)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("counters-before", []),
        ("counters-healthy", [("note", "congestion seen", "mlx5_0:1"), ("note", "throttled", "mlx5_0:1")]),
        (
            "counters-slow-receiver",
            [
                ("error", "slow receiver", "ens1"),
                ("warning", "discards", "ens1"),
                ("note", "pci stall", "ens1"),
            ],
        ),
        ("counters-pauses-alone", [("warning", "paused", "ens1"), ("warning", "ecn", "ens1")]),
        (
            "counters-flap",
            [
                ("error", "link down", "mlx5_0:1"),
                ("error", "silence", "mlx5_0:1"),
                ("unknown", "counters", "gpu-01"),
            ],
        ),
    ],
)
def test_cases(name: str, expected: list[tuple[str, str, str]], tmp_path: Path) -> None:
    assert found(grown(name, tmp_path)) == expected


def test_the_share_of_the_time_is_told(tmp_path: Path) -> None:
    text = next(one.text for one in diagnose_counters(grown("counters-slow-receiver", tmp_path)))
    assert text == (
        "tx_prio3_pause_duration +2170000 us, 21.7% of the time: this node held the network back: it takes"
        " data slower than it comes"
    )


def test_without_a_clock_the_time_is_unknown(tmp_path: Path) -> None:
    texts = [one.text for one in diagnose_counters(grown("counters-slow-receiver", tmp_path, None))]
    assert texts[0].startswith("tx_prio3_pause_duration +2170000 us in an unknown time")


def test_marks_that_nobody_answers() -> None:
    prefix = "rdma.mlx5_0.1"
    one = CounterGrowth("n1", 1.0, {f"{prefix}.np_ecn_marked_roce_packets": 5, f"{prefix}.np_cnp_sent": 0})
    assert ("warning", "cnp", "mlx5_0:1") in found(one)
    # An adapter that has no such counter says nothing about it.
    assert [
        check for _, check, _ in found(CounterGrowth("n1", 1.0, {f"{prefix}.np_ecn_marked_roce_packets": 5}))
    ] == ["congestion seen"]
    alone = found(CounterGrowth("n1", 1.0, {"net.ens1.rx_prio3_pause": 500}))
    assert [check for _, check, _ in alone] == ["paused"]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("rx_prio3_pause", "paused"),
        ("tx_prio3_pause", "slow receiver"),
        ("rx_pause_prio_3", "paused"),
        ("rx_pfc_ena_frames_pri3", "paused"),
        ("tx_pfc_ena_frames_pri5", "slow receiver"),
        ("tx_priority_3_xoff", "slow receiver"),
        ("rx_pb_3_pxoff", "paused"),
        ("rx_ppp3", "paused"),
        ("frames_tx_pripause", "slow receiver"),
    ],
)
def test_pause_frames_are_judged_by_the_time_that_they_hold_a_link_at_most(name: str, check: str) -> None:
    fast = {"ens1": 400.0}
    (one,) = diagnose_counters(CounterGrowth("n1", 10.0, {f"net.ens1.{name}": 119300}, speeds_Gbps=fast))
    assert (one.check, one.confidence) == (check, "low")
    assert one.text.startswith(f"{name} +119300 frames, 100.0% of the time at most: ")
    assert diagnose_counters(CounterGrowth("n1", 10.0, {f"net.ens1.{name}": 1000}, speeds_Gbps=fast)) == ()
    assert (
        "10.1% of the time"
        in diagnose_counters(CounterGrowth("n1", 10.0, {f"net.ens1.{name}": 300}, speeds_Gbps={"ens1": 10}))[
            0
        ].text
    )
    assert (
        "frames in an unknown time"
        in diagnose_counters(CounterGrowth("n1", None, {f"net.ens1.{name}": 7}))[0].text
    )
    assert (
        "100 a second; the link's speed"
        in diagnose_counters(CounterGrowth("n1", 10.0, {f"net.ens1.{name}": 1000}))[0].text
    )
    assert diagnose_counters(CounterGrowth("n1", 10.0, {f"net.ens1.{name}": 9})) == ()


def test_where_durations_are_told_frames_say_nothing_of_their_own() -> None:
    values = {"net.ens1.rx_prio3_pause": 90000, "net.ens1.rx_prio3_pause_duration": 0}
    assert found(CounterGrowth("n1", 1.0, values)) == []
    for name in ("pfc_pri3_rx_duration_us", "rx_global_pause_duration", "rx_pause_duration_prio_3"):
        assert [check for _, check, _ in found(CounterGrowth("n1", 1.0, {f"net.ens1.{name}": 20000}))] == [
            "paused"
        ]


@pytest.mark.parametrize(
    "name", ["rx_pause_ctrl_phy", "tx_pause_frames", "link_xoff_rx", "rx_flow_control_xoff"]
)
def test_pauses_of_a_whole_link(name: str) -> None:
    assert found(CounterGrowth("n1", 1.0, {f"net.ens1.{name}": 5})) == [("warning", "global pause", "ens1")]


def test_counters_of_intel_have_dots_in_their_names(tmp_path: Path) -> None:
    root = lay_out("counters-before", tmp_path)
    text = "NIC statistics:\n     rx_priority_3_xoff.nic: 7\n     port.link_xoff_rx: 9\n"
    (root / "commands/ethtool -S ens1").write_text(text)
    look_at = read_host_counters(read_host_report(root), root, captured_command_runner(root))
    assert {"net.ens1.rx_priority_3_xoff", "net.ens1.link_xoff_rx"} <= look_at.values.keys()
    assert look_at.speeds_Gbps["ens1"] == 400.0
    assert parse_counters(look_at.as_json(), "f.json") == look_at


def test_what_went_back_or_came_is_no_growth() -> None:
    before = CounterReading("n1", 1.0, {"net.a.x": 5, "net.a.y": 7, "net.a.gone": 1})
    after = CounterReading("n1", 3.0, {"net.a.x": 9, "net.a.y": 2, "net.a.new": 1})
    one = compare_counters(before, after)
    assert (one.seconds, one.values, one.restarted) == (2.0, {"net.a.x": 4}, ("net.a.y",))
    assert one.missing == ("net.a.gone", "net.a.new")
    assert compare_counters(after, replace(after, time=2.0)).seconds is None
    with pytest.raises(UsageError, match="counters of n1 and of n2"):
        compare_counters(before, replace(after, node="n2"))


def test_dots_in_a_vlan_s_name() -> None:
    (one,) = diagnose_counters(CounterGrowth("n1", 1.0, {"net.bond0.209.rx_crc_errors_phy": 1}))
    assert one.subject == "bond0.209"


def test_ethtool() -> None:
    assert parse_ethtool("NIC statistics:\n     rx[0]_packets: 7\n     x: -\n   y: 3 \n") == {
        "rx[0]_packets": 7,
        "y": 3,
    }
    assert parse_ethtool("no stats available") == {}


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"node": "a", "time": "x", "values": {}},
        {"values": {"a": "b"}},
        {"node": "a", "time": None, "values": {"x": float("inf")}},
    ],
)
def test_what_is_no_look(values: object) -> None:
    with pytest.raises(UsageError, match=r"f\.json: holds no counters"):
        parse_counters(values, "f.json")


def test_a_look_comes_back(tmp_path: Path) -> None:
    one = counters("counters-before", tmp_path, 5.0)
    assert parse_counters(one.as_json(), "f") == one
