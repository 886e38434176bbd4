"""NCCL's logs of three generations: what is found in them, and what their warnings mean."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from hpcrun.errors import UsageError
from hpcrun.tuning.log.diagnosis import MeaningLevel, diagnose_nccl_log, log_patterns
from hpcrun.tuning.log.nccl_log import AlgorithmChoice, NcclLog, machine_from_log, parse_nccl_log
from hpcrun.tuning.model.nccl_model import ExpectedPerformance, NcclGraph, predict_nccl_performance

DATA = Path(__file__).parents[1] / "data" / "tuning"


def log(name: str) -> NcclLog:
    return parse_nccl_log((DATA / f"nccl-{name}.log").read_text(encoding="utf-8"))


def test_a_log_with_blocks_of_three() -> None:
    found = log("2.29-sockets")
    assert (found.library, found.version, found.release) == ("NCCL", "2.29.7", (2, 29))
    assert (found.ranks, found.nodes, found.per_node, found.channels) == (2, 2, 1, 4)
    assert (found.network, found.nics) == ("Socket", ("eth0:192.0.2.11<0>",))
    assert found.ways == {"NET/Socket/0": 3}
    assert found.env == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_P2P_DISABLE": "1"}
    assert found.tuner is None
    assert found.graphs["tree"] == NcclGraph(2, 2.4, 1.2, "LOC", "PHB", balanced=False)
    assert found.table["allgather", "PAT", "Simple"] == ExpectedPerformance(17.6, 3.6)
    assert ("allreduce", "Ring", "LL128") not in found.table, "without bandwidth it is not taken"
    assert found.chosen[AlgorithmChoice("Broadcast", 1048576, "Ring", "Simple", 4)] == 2


def test_graphs_of_a_log_give_the_table_of_the_same_log() -> None:
    found = log("2.29-sockets")
    machine, _ = machine_from_log(found, "log", None, None, 120)
    for collective in ("broadcast", "reduce", "allgather", "reducescatter", "allreduce"):
        ours = predict_nccl_performance(machine, collective)
        printed = found.expectations(collective)
        assert {key: (round(one.latency_us, 1), round(one.bw_GBps, 1)) for key, one in ours.items()} == {
            key: (one.latency_us, one.bw_GBps) for key, one in printed.items()
        }


def test_a_log_with_one_row_of_algorithms() -> None:
    found = log("2.18")
    assert found.version == "2.18.5"
    assert (found.ranks, found.nodes) == (16, None)
    assert found.table["allreduce", "Ring", "Simple"] == ExpectedPerformance(141.6, 25.6)
    assert found.table["allreduce", "Tree", "LL"] == ExpectedPerformance(25.2, 5.9)
    assert found.ways == {"NET/IB/0/GDRDMA": 1, "P2P/IPC/read": 1}
    assert found.chosen == Counter()


def test_lists_of_devices_are_read_as_well() -> None:
    found = parse_nccl_log("n1:1:1 [0] NCCL INFO NCCL_IB_HCA set to =mlx5_0\n")
    assert found.env == {"NCCL_IB_HCA": "=mlx5_0"}


def test_numbers_stand_for_names() -> None:
    assert set(log("2.22").chosen) == {
        AlgorithmChoice("unknown", 16384, "Ring", "LL", None, 31.200001),
        AlgorithmChoice("AllGather", 37756928, "Ring", "Simple", None, 2860.208008),
        AlgorithmChoice("AllReduce", 8388608, "NVLSTree", "Simple", None, 97.099998),
        AlgorithmChoice("AllReduce", 64, "9", "7", None, 1.0),
    }


def test_the_newest_says_it_in_two_lines() -> None:
    found = log("2.31")
    assert set(found.chosen) == {AlgorithmChoice("AllReduce", 67108864, "NVLSTree", "Simple", 8, 465.799988)}
    assert found.tuner == "libnccl-ofi-tuner.so"


def test_harmless_lines_do_not_alarm() -> None:
    quiet = """\
a:1:1 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared
a:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
a:1:1 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.
a:1:1 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.
a:1:1 [0] NCCL INFO TUNER/Plugin: Failed to find ncclTunerPlugin_v4 symbol.
a:1:1 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so. Using internal tuner plugin.
a:1:1 [0] NCCL INFO NVLS multicast support is not available on dev 0
a:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 8 cudaDev 0 busId 1000 - Init COMPLETE
"""
    found = diagnose_nccl_log(parse_nccl_log(quiet))
    assert {one.meaning.level for one in found.found} == {"harmless"}


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        ("Bootstrap : no socket interface found", "no-interface"),
        (
            "NET/IB : Got completion from peer 1.2.3.4<5> with error 12, opcode 0, len 0, vendor err 129",
            "status-12",
        ),
        (
            "NET/IB : Got completion from peer 1.2.3.4<5> with status=12 opcode=1 len=0 vendor err 129",
            "status-12",
        ),
        (
            "NET/IB : Got completion from peer 1.2.3.4<5> with status=5 opcode=1 len=0 vendor err 249",
            "status-5",
        ),
        ("NET/IB : Got completion from peer 1.2.3.4<5> with error 3, opcode 0", "status-other"),
        ("NET/IB : Got completion from peer 1.2.3.4<5> with error 4, opcode 0, vendor err 81", "status-4"),
        ("NET/IB : Got async event : port error", "port-event"),
        ("NET/IB : mlx5_0:1 Got async error event: port active", "port-event"),
        ("Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1", "modify-qp"),
        ("Call to ibv_reg_mr failed with error Cannot allocate memory", "memlock"),
        ("Call to posix_fallocate failed : No space left on device", "shm-full"),
        ("Error while creating shared memory segment /dev/shm/nccl-gEb2 (size 9637888)", "shm-full"),
        ("Error : no algorithm/protocol available", "no-algorithm"),
        ("Mismatched NCCL version detected : rank 0 version 21805", "version-mismatch"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "duplicate-gpu"),
        ("Message truncated : received 1024 bytes instead of 256", "truncated"),
        ("socketFinalizeAccept: wrong type 4 != 3", "stranger"),
        ("GPU Direct RDMA Disabled for GPU 0 / HCA 0 (distance 8 > 4)", "gdr-off"),
        ("P2P is disabled between NVLINK connected GPUs 1 and 0.", "p2p-off"),
        ('Missing "iommu=pt" from kernel command line', "iommu"),
        ("NUMA auto balancing enabled which can lead to variability", "numa-balancing"),
        ("Cuda failure 802 'system not yet initialized'", "fabric-manager"),
        ("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152", "nvls-bind"),
        ("Cuda failure 2 'out of memory'", "cuda-oom"),
        ("Cuda failure 700 'an illegal memory access was encountered'", "cuda-other"),
        ("socketProgress: Connection closed by remote peer b2<52111>", "peer-gone"),
        ("a text that nobody has seen", "unknown"),
    ],
)
def test_every_warning_has_its_meaning(text: str, id_: str) -> None:
    info = id_ == "gdr-off"
    line = f"h:1:2 [3] {'' if info else 'some/file.cc:12 '}NCCL {'INFO' if info else 'WARN'} {text}\n"
    (found,) = diagnose_nccl_log(parse_nccl_log(line * 3)).found
    assert (found.meaning.id, found.times, found.line) == (id_, 3, 1)
    assert found.text == text


def test_the_worst_comes_first() -> None:
    levels = [one.meaning.level for one in diagnose_nccl_log(log("2.18")).found]
    assert levels == ["error", "unknown", "follows", "harmless", "harmless", "harmless"]


def test_the_table_is_whole() -> None:
    ids = [one.meaning.id for one in log_patterns()]
    assert len(ids) == len({*ids})
    for one in log_patterns():
        meaning = one.meaning
        assert meaning.level in get_args(MeaningLevel)
        assert meaning.confidence in ("high", "medium", "low")
        assert meaning.meaning
        assert meaning.remedy
        assert meaning.source


@pytest.mark.parametrize(
    "text", ["", "\n\n", "no line of it", "NCCL INFO", "a NCCL INFO  | | |", "\0\ufffd NCCL WARN "]
)
def test_odd_texts_give_little_and_no_error(text: str) -> None:
    found = parse_nccl_log(text)
    assert found.version is None
    assert found.table == {}
    assert found.release is None


def test_what_a_log_does_not_tell_is_asked_for() -> None:
    with pytest.raises(UsageError, match="x: does not tell nodes and ranks; add --nodes"):
        machine_from_log(log("2.18"), "x", None, None, 80)
    with pytest.raises(UsageError, match="x: has neither NCCL's table nor its graphs"):
        machine_from_log(log("2.22"), "x", 2, 8, 80)
    with pytest.raises(UsageError, match="x: its table is of 16 ranks, not of 32"):
        machine_from_log(log("2.18"), "x", 4, 8, 80)
    bare = log("2.29-sockets")
    bare.table.clear()
    with pytest.raises(UsageError, match="x: does not tell which GPUs these are"):
        machine_from_log(bare, "x", None, None, None)
    machine, notes = machine_from_log(log("2.18"), "x", 2, None, None)
    assert (machine.nodes, machine.per_node) == (2, 8)
    assert notes == ["the GPUs are not known: taken as sm80 or newer"]
