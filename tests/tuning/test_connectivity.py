"""Who is to blame for connections that fail."""

from __future__ import annotations

from hpcrun.tuning.host.connectivity import check_connectivity

NODES = ["n1", "n2", "n3", "n4"]
LATE = "no answer in 3 s"


def told(failed: dict[str, dict[str, str]], nodes: list[str] = NODES) -> list[str]:
    return [f"{one.subject} {one.text}" for one in check_connectivity(failed, nodes, "ib0")]


def test_nobody() -> None:
    assert told({node: {} for node in NODES}) == []


def test_one_that_nobody_reaches_is_named_once() -> None:
    failed = {node: {"n3": LATE} for node in ("n1", "n2", "n4")}
    assert told(failed) == [f"n3 3 of its 6 connections over ib0 fail: {LATE}"]
    both = failed | {"n3": dict.fromkeys(("n1", "n2", "n4"), "Network is unreachable")}
    assert told(both) == ["n3 6 of its 6 connections over ib0 fail: Network is unreachable"]


def test_a_pair_is_told_as_a_pair() -> None:
    assert told({"n1": {"n2": LATE}}) == [f"n1 does not reach n2 over ib0: {LATE}"]
    assert told({"n1": {"n2": LATE}, "n2": {"n1": LATE}}, ["n1", "n2"]) == [
        f"n1 does not reach n2 over ib0: {LATE}",
        f"n2 does not reach n1 over ib0: {LATE}",
    ]


def test_one_node_and_another_pair() -> None:
    failed = {"n1": {"n3": LATE, "n2": LATE}, "n2": {"n3": LATE}, "n4": {"n3": LATE}}
    assert told(failed) == [
        f"n3 3 of its 6 connections over ib0 fail: {LATE}",
        f"n1 does not reach n2 over ib0: {LATE}",
    ]
