"""NCCL's cost model against worked figures, a table that NCCL has printed, and the choices it has made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpcrun.errors import UsageError
from hpcrun.tuning.model.nccl_constants import TREE_BY_SIZE, Algo, Proto
from hpcrun.tuning.model.nccl_model import (
    CpuVendor,
    NcclCollective,
    NcclGraph,
    NcclMachine,
    expected_time_us,
    predict_nccl_performance,
)
from hpcrun.tuning.model.platforms import find_platform

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Choice = tuple[Algo, Proto]


def machine(nodes: int, platform: str = "h100-ib400") -> NcclMachine:
    found = find_platform(platform).machine(nodes, 8, (2, 30))
    assert found is not None
    return found


def best(of: NcclMachine, size: float, collective: NcclCollective = "allreduce") -> tuple[Choice, float]:
    known = predict_nccl_performance(of, collective)
    times = {one: expected_time_us(of, collective, one, expected, size) for one, expected in known.items()}
    winner = min(times, key=lambda one: times[one])
    return winner, times[winner]


def changes(of: NcclMachine) -> Iterator[tuple[str, float]]:
    """From which of the sizes 2**(k/8) on what wins; going back for less than a doubling does not count."""
    sizes = [2.0 ** (step / 8) for step in range(80, 8 * 36 + 1)]
    winners = ["/".join(best(of, size)[0]) for size in sizes]
    now = winners[0]
    for at, winner in enumerate(winners):
        if winner != now and now not in winners[at : at + 8]:
            now = winner
            yield winner, sizes[at]


@pytest.mark.parametrize(
    ("platform", "nodes", "figures"),
    [
        ("h100-ib400", 4, {"Tree/LL128": 166 * KIB, "NVLSTree/Simple": 10 * MIB, "Ring/Simple": 1.0 * GIB}),
        (
            "h100-ib400",
            16,
            {"Tree/LL128": 256 * KIB, "NVLSTree/Simple": 22.6 * MIB, "Ring/Simple": 5.2 * GIB},
        ),
        ("h100-ib400", 64, {"Tree/LL128": 279 * KIB, "NVLSTree/Simple": 35 * MIB, "Ring/Simple": 23 * GIB}),
        ("p5en-efa", 4, {"Tree/LL128": 166 * KIB, "NVLSTree/Simple": 41 * MIB, "Ring/Simple": 2.2 * GIB}),
        ("h100-ib400", 1, {"NVLS/Simple": 1.3 * MIB}),
    ],
)
def test_choices_change_where_they_were_worked_out_to_change(
    platform: str, nodes: int, figures: dict[str, float]
) -> None:
    """Worked with sizes 2**(k/8), so to a step of these and what rounding adds."""
    found = dict(changes(machine(nodes, platform)))
    assert found.keys() == figures.keys()
    for winner, size in figures.items():
        assert abs(math.log2(found[winner] / size)) <= 1.3 / 8, winner


def test_two_nodes_take_no_ring() -> None:
    found = dict(changes(machine(2)))
    assert found["NVLSTree/Simple"] == pytest.approx(2.6 * MIB, rel=0.01)
    assert "Ring/Simple" not in found


@pytest.mark.parametrize(
    ("nodes", "size", "busbw"),
    [(4, 16 * MIB, 164), (4, GIB, 358), (4, 8 * GIB, 381), (2, 64 * GIB, 461), (1, 64 * GIB, 384)],
)
def test_bus_bandwidths(nodes: int, size: int, busbw: float) -> None:
    of = machine(nodes)
    _, time = best(of, size)
    assert size / time / 1e3 * 2 * (of.ranks - 1) / of.ranks == pytest.approx(busbw, abs=0.55)


SOCKETS = NcclMachine(
    2,
    1,
    120,
    {
        "ring": NcclGraph(2, 1.2, 1.2, "LOC", "PHB"),
        "tree": NcclGraph(2, 2.4, 1.2, "LOC", "PHB", balanced=False),
    },
)


@pytest.mark.parametrize(
    ("collective", "row"),
    [
        ("broadcast", {("Ring", "LL"): (9.3, 1.2), ("Ring", "Simple"): (22.4, 2.4)}),
        ("reduce", {("Ring", "LL"): (9.3, 1.2), ("Ring", "Simple"): (22.4, 2.4)}),
        (
            "allgather",
            {("Ring", "LL"): (11.6, 2.4), ("Ring", "Simple"): (22.4, 4.8), ("PAT", "Simple"): (17.6, 3.6)},
        ),
        (
            "allreduce",
            {
                ("Tree", "LL"): (16.8, 0.5),
                ("Tree", "Simple"): (36.4, 1.9),
                ("Ring", "LL"): (16.6, 1.2),
                ("Ring", "Simple"): (36.4, 2.4),
            },
        ),
    ],
)
def test_the_table_that_nccl_2_29_has_printed(
    collective: NcclCollective, row: dict[Choice, tuple[float, float]]
) -> None:
    found = predict_nccl_performance(SOCKETS, collective)
    assert {key: (round(one.latency_us, 1), round(one.bw_GBps, 1)) for key, one in found.items()} == row


def test_the_choices_that_nccl_2_29_has_made() -> None:
    chosen = [best(SOCKETS, 1 << power, "broadcast")[0][1] for power in range(10, 28)]
    assert chosen == ["LL"] * 5 + ["Simple"] * 13


def test_what_is_not_eligible_has_no_time() -> None:
    of = machine(4)
    assert {algo for algo, _ in predict_nccl_performance(of, "broadcast")} == {"Ring"}
    assert {algo for algo, _ in predict_nccl_performance(of, "allgather")} == {"Ring"}
    assert {algo for algo, _ in predict_nccl_performance(of, "allreduce")} == {"Ring", "Tree", "NVLSTree"}
    assert {algo for algo, _ in predict_nccl_performance(machine(1), "allgather")} == {"Ring", "NVLS"}
    assert {algo for algo, _ in predict_nccl_performance(replace(of, per_node=1), "reducescatter")} == {
        "Ring",
        "PAT",
    }
    sharp = replace(of, collnet=True, graphs={**of.graphs, "collnet": NcclGraph(8, 48, 48)})
    assert {algo for algo, _ in predict_nccl_performance(sharp, "allreduce")} == {
        "Ring",
        "Tree",
        "NVLS",
        "NVLSTree",
        "CollNetDirect",
        "CollNetChain",
    }
    assert predict_nccl_performance(NcclMachine(1, 1, 90, of.graphs), "allreduce") == {}
    assert {algo for algo, _ in predict_nccl_performance(replace(of, capability=80), "allreduce")} == {
        "Ring",
        "Tree",
    }


def test_collnet_by_hand() -> None:
    """8 GPUs a node, 4 channels: factor 2 less half of what is over one, and 0.85 from Hopper on."""
    graphs = {"collnet": NcclGraph(4, 40, 45)}
    found = predict_nccl_performance(NcclMachine(4, 8, 90, graphs, collnet=True), "allreduce")
    direct, chain = found["CollNetDirect", "Simple"], found["CollNetChain", "Simple"]
    assert direct.bw_GBps == pytest.approx(160 / 1.5 * 0.85 / 2)
    assert direct.latency_us == pytest.approx(2 * (3.7 + 7 * 0.4) + 31)
    assert chain.bw_GBps == pytest.approx(80)
    assert chain.latency_us == pytest.approx(2 * 7 * 2.8 + 30)
    gather = predict_nccl_performance(NcclMachine(4, 8, 90, graphs, collnet=True), "allgather")[
        "CollNetDirect", "Simple"
    ]
    assert gather.bw_GBps == pytest.approx(8 * min(40, 0.9 * 45))


@pytest.mark.parametrize(
    ("capability", "mixed", "inside", "between", "there"),
    [
        (90, False, "NVL", "PXN", True),
        (80, False, "NVL", "PXB", True),
        (80, False, "NVL", "PXN", False),
        (90, False, "PHB", "PIX", False),
        (80, True, "NVL", "PIX", False),
        (90, True, "NVL", "PIX", True),
        (60, False, "NVL", "PIX", False),
    ],
)
def test_ll128_only_where_it_is_safe(
    capability: int, mixed: bool, inside: str, between: str, there: bool
) -> None:
    of = NcclMachine(2, 8, capability, {"ring": NcclGraph(2, 20, 20, inside, between)}, mixed=mixed)
    assert (("Ring", "LL128") in predict_nccl_performance(of, "allreduce")) is there


def test_cpus_nics_and_versions_change_what_they_should() -> None:
    of = machine(4)
    plain = predict_nccl_performance(of, "allreduce")
    amd = predict_nccl_performance(replace(of, cpu="amd"), "allreduce")
    assert amd["Tree", "LL"].bw_GBps == pytest.approx(19 / 2)
    assert plain["Tree", "LL"].bw_GBps == pytest.approx(20.4 / 2)
    far = predict_nccl_performance(replace(of, nic_latency_us=35), "allreduce")
    # Simple waits once more, for the flush; a ring of four nodes crosses six times.
    assert far["Ring", "LL"].latency_us - plain["Ring", "LL"].latency_us == pytest.approx(6 * 35)
    assert far["Ring", "Simple"].latency_us - plain["Ring", "Simple"].latency_us == pytest.approx(6 * 70)
    pair = NcclMachine(2, 8, 90, {"ring": NcclGraph(8, 40, 20)})
    new = predict_nccl_performance(replace(pair, version=(2, 31)), "allreduce")["Ring", "Simple"].bw_GBps
    assert predict_nccl_performance(pair, "allreduce")["Ring", "Simple"].bw_GBps == pytest.approx(2 * new)


@pytest.mark.parametrize(
    ("capability", "cpu", "remains"),
    [(100, "intel", 0.5), (100, "amd", 0.5), (100, "arm", 1.0), (90, "intel", 1.0)],
)
def test_nvls_trees_of_blackwell_on_x86_lose_by_size_as_trees_do(
    capability: int, cpu: CpuVendor, remains: float
) -> None:
    of = replace(machine(4), capability=capability, cpu=cpu)
    expected = predict_nccl_performance(of, "allreduce")["NVLSTree", "Simple"]
    size = 64 * 2**11
    taken = expected_time_us(of, "allreduce", ("NVLSTree", "Simple"), expected, size) - expected.latency_us
    assert taken == pytest.approx(size / 1000 / expected.bw_GBps / remains)


def test_a_plateau_of_large_rings_between_nodes() -> None:
    of = machine(4)
    expected = predict_nccl_performance(of, "allreduce")["Ring", "Simple"]
    edge = 64 * 8 * 32
    low, high = (
        expected_time_us(of, "allreduce", ("Ring", "Simple"), expected, size) - size / 1000 / expected.bw_GBps
        for size in (edge - 1, edge)
    )
    assert low == pytest.approx(expected.latency_us)
    assert high == pytest.approx(1.4 * expected.latency_us)


def test_a_way_of_no_known_kind_is_refused() -> None:
    of = NcclMachine(2, 8, 90, {"ring": NcclGraph(2, 20, 20, "XGMI", "PIX")})
    with pytest.raises(UsageError, match="XGMI: is not a kind of way"):
        predict_nccl_performance(of, "allreduce")
    assert all(len(row) == 23 for row in TREE_BY_SIZE.values())
