"""What a log shows beside its warnings; healthy logs say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.tuning.log.checks import check_nccl_log
from hpcrun.tuning.log.nccl_log import parse_nccl_log

LOGS = Path(__file__).parents[1] / "data" / "tuning"


def told(text: str) -> list[str]:
    return [f"{one.severity} {one}" for one in check_nccl_log(parse_nccl_log(text))]


def read(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def test_more_channels_than_the_library_can_give_fall_to_few() -> None:
    (found,) = told(read("rccl-2.27-few-channels"))
    assert found.startswith(
        "warning NCCL_MIN_NCHANNELS: is 112, and 2 channels are used: RCCL has its ceiling; leave it out"
    )
    assert told(read("rccl-2.27-few-channels").replace("to 112", "to 2")) == []


def test_one_proxy_thread_that_sends_for_a_whole_node_is_told() -> None:
    found = told(read("nccl-2.27-one-proxy"))
    assert [line.partition(": ")[0] for line in found[:2]] == ["note rank 0", "note rank 4"]
    assert "sends for 3 other ranks (3 of 3 such connections)" in found[0]
    assert "NCCL_P2P_PXN_LEVEL=0" in found[0]


def test_proxies_that_share_the_work_are_as_they_should_be() -> None:
    text = read("nccl-2.27-one-proxy")
    for at, proxy in enumerate((1, 2, 3)):
        text = text.replace(
            f": {at + 1}[{at + 1}] -> {at + 5}[{at + 1}] [send] via NET/IB/0(0)",
            f": {at + 1}[{at + 1}] -> {at + 5}[{at + 1}] [send] via NET/IB/0({proxy})",
        )
        text = text.replace(
            f": {at + 5}[{at + 1}] -> {at + 1}[{at + 1}] [send] via NET/IB/0(4)",
            f": {at + 5}[{at + 1}] -> {at + 1}[{at + 1}] [send] via NET/IB/0({proxy + 4})",
        )
    assert not [line for line in told(text) if "other ranks" in line]


def test_queue_pairs_are_counted_where_flows_are_hashed() -> None:
    text = read("nccl-2.27-one-proxy")
    found = [line for line in told(text) if "queue pair" in line]
    assert found[0].startswith(
        "note mlx5_0:1/RoCE, mlx5_1:1/RoCE: 8 connections of 8 ranks have one queue pair each"
    )
    said = "c1:90:90 [0] NCCL INFO NAME set by environment to 4.\n"
    assert not [
        line for line in told(said.replace("NAME", "NCCL_IB_QPS_PER_CONNECTION") + text) if "queue" in line
    ]
    routed = said.replace("NAME", "NCCL_IB_ADAPTIVE_ROUTING").replace("to 4", "to 1")
    assert not [line for line in told(routed + text) if "queue" in line]
    assert not [line for line in told(text.replace("/RoCE", "/IB")) if "queue" in line]


@pytest.mark.parametrize("name", ["nccl-2.18", "nccl-2.22", "nccl-2.29-sockets", "nccl-2.31"])
def test_other_logs_say_nothing(name: str) -> None:
    assert told(read(name)) == []


def test_two_proxies_on_a_node_share_its_sends() -> None:
    start = "a:1:1 [0] NCCL INFO Channel 00/1"
    lines = [
        f"{start} : {rank}[0] -> {rank + 8}[0] [send] via NET/IB/0({rank // 4 * 4})/GDRDMA"
        for rank in range(8)
        if rank % 4
    ]
    head = "a:1:1 [0] NCCL INFO comm 0x5a rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0"
    assert told("\n".join([head, *lines])) == []
    assert len(told("\n".join([head, *lines]).replace("(4)", "(0)"))) == 1
