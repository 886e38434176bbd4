"""The predictor against figures that are known: NCCL's model by worked and by printed ones, MPI in the lab.

The worked figures are sizes at which NCCL's choice changes, as the first of the sizes 2**(k/8) at which the
next algorithm is the fastest, and bus bandwidths, for 8 H100 a node with 8 NICs of 400 Gb/s (h100-ib400).
The printed table is that of NCCL 2.29.7 for two ranks over sockets. `measured` rows compare the model with
published measurements: these errors are what `tune predict` states. --lab adds the order of MPICH's allreduce
algorithms over two emulated racks, predicted from a ping-pong and measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace

import harness

from hpcrun.errors import HpcrunError
from hpcrun.tuning.model.nccl_constants import Algo, Proto
from hpcrun.tuning.model.nccl_model import (
    NcclCollective,
    NcclGraph,
    NcclMachine,
    expected_time_us,
    predict_nccl_performance,
)
from hpcrun.tuning.model.platforms import find_platform
from hpcrun.tuning.model.predict import bus_factor

STEP = 1 / 8
"""Of the grid of sizes, in powers of two."""
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Choice = tuple[Algo, Proto]
LL: Choice = ("Tree", "LL")
LL128: Choice = ("Tree", "LL128")
NVLSTREE: Choice = ("NVLSTree", "Simple")
RING: Choice = ("Ring", "Simple")
SWITCHES: tuple[tuple[str, int, Choice, float], ...] = (
    ("h100-ib400", 4, LL128, 166 * KIB),
    ("h100-ib400", 4, NVLSTREE, 10 * MIB),
    ("h100-ib400", 4, RING, 1.0 * GIB),
    ("h100-ib400", 16, LL128, 256 * KIB),
    ("h100-ib400", 16, NVLSTREE, 22.6 * MIB),
    ("h100-ib400", 16, RING, 5.2 * GIB),
    ("h100-ib400", 64, LL128, 279 * KIB),
    ("h100-ib400", 64, NVLSTREE, 35 * MIB),
    ("h100-ib400", 64, RING, 23 * GIB),
    ("h100-ib400", 2, NVLSTREE, 2.6 * MIB),
    ("p5en-efa", 4, LL128, 166 * KIB),
    ("p5en-efa", 4, NVLSTREE, 41 * MIB),
    ("p5en-efa", 4, RING, 2.2 * GIB),
    ("h100-ib400", 1, ("NVLS", "Simple"), 1.3 * MIB),
)
"""Platform, nodes, and from which size on (two or three digits) which choice is the fastest to the end."""
BUS: tuple[tuple[int, float, float], ...] = (
    (4, 16 * MIB, 164),
    (4, 1 * GIB, 358),
    (4, 8 * GIB, 381),
    (2, 16 * GIB, 461),
    (1, 16 * GIB, 384),
)
"""Nodes, size, GB/s of allreduce."""
PRINTED = NcclMachine(
    2,
    1,
    120,
    {
        "ring": NcclGraph(2, 1.2, 1.2, "LOC", "PHB"),
        "tree": NcclGraph(2, 2.4, 1.2, "LOC", "PHB", balanced=False),
    },
)
TABLE: dict[NcclCollective, dict[Choice, tuple[float, float]]] = {
    "broadcast": {("Ring", "LL"): (9.3, 1.2), RING: (22.4, 2.4)},
    "reduce": {("Ring", "LL"): (9.3, 1.2), RING: (22.4, 2.4)},
    "allgather": {("Ring", "LL"): (11.6, 2.4), RING: (22.4, 4.8), ("PAT", "Simple"): (17.6, 3.6)},
    "reducescatter": {("Ring", "LL"): (11.6, 2.4), RING: (22.4, 4.8), ("PAT", "Simple"): (17.6, 3.6)},
    "allreduce": {
        LL: (16.8, 0.5),
        ("Tree", "Simple"): (36.4, 1.9),
        ("Ring", "LL"): (16.6, 1.2),
        RING: (36.4, 2.4),
    },
}
"""Latency in us and bandwidth in GB/s, printed by NCCL 2.29.7 (two ranks on two nodes over sockets)."""
MEASURED: tuple[tuple[str, str, int, float, float], ...] = (
    ("8 H100, 4 nodes, 400 Gb/s, middle of 377 to 391", "h100-ib400", 4, 8 * GIB, 384),
    ("8 H100, 4 nodes, RoCE, NCCL 2.19.3", "h100-ib400", 4, 16 * GIB, 391),
    ("8 H100, 8 nodes, 400 Gb/s", "h100-ib400", 8, 8 * GIB, 387),
    ("8 H100, 8 nodes, 400 Gb/s", "h100-ib400", 8, GIB // 2, 356),
    ("8 H100, 2 nodes, NVIDIA's expectation", "h100-ib400", 2, 8 * GIB, 470),
    ("p5en, 4 nodes", "p5en-efa", 4, 4 * GIB, 365),
    ("8 H100, 1 node", "h100-ib400", 1, 16 * GIB, 480),
)
"""What, platform, nodes, size, published GB/s."""
FORCED_NVLSTREE = 310
"""GB/s on 4 nodes of p5en at 4 GiB."""


def machine(platform: str, nodes: int) -> NcclMachine:
    """Of the platform table, with all the GPUs of a node."""
    found = find_platform(platform).machine(nodes, 8, (2, 30))
    assert found is not None
    return found


def times(of: NcclMachine, size: float) -> dict[Choice, float]:
    """Microseconds of an allreduce by choice."""
    known = predict_nccl_performance(of, "allreduce")
    return {one: expected_time_us(of, "allreduce", one, expected, size) for one, expected in known.items()}


def best(of: NcclMachine, size: float) -> Choice:
    """The fastest."""
    found = times(of, size)
    return min(found, key=lambda one: found[one])


def grid() -> Iterator[float]:
    """Sizes from 1 KiB to 64 GiB, eight to a doubling."""
    return (2.0 ** (step * STEP) for step in range(80, 8 * 36 + 1))


def switch(of: NcclMachine, to: Choice) -> float:
    """The first size from which on this choice, or one that follows it, is always the fastest."""
    order = [LL, ("Ring", "LL"), LL128, ("NVLS", "Simple"), NVLSTREE, RING]
    last = math.nan
    for size in grid():
        if order.index(best(of, size)) >= order.index(to):
            last = size if math.isnan(last) else last
        else:
            last = math.nan
    return last


def bus_GBps(of: NcclMachine, size: float) -> float:
    """Of the fastest."""
    return size / min(times(of, size).values()) / 1e3 * bus_factor("allreduce", of.ranks)


def last_digit(stated: float) -> float:
    """The worth of the last digit of a size as it is stated."""
    unit = next(unit for unit in (GIB, MIB, KIB, 1) if stated >= unit)
    decimals = len(f"{stated / unit:.4g}".partition(".")[2]) or (1 if stated == unit else 0)
    return unit * 10.0**-decimals


def measure_worked(report: harness.Report) -> None:
    """Every worked figure, ours, and the error."""
    wrong = exact = 0
    for platform, nodes, to, stated in SWITCHES:
        found = switch(machine(platform, nodes), to)
        half = last_digit(stated) / 2
        exact += abs(found - stated) <= half
        wrong += not (stated - half) / 2**STEP <= found <= (stated + half) * 2**STEP
        report.row(
            what=f"{platform}, {nodes} nodes: from here {to[0]}/{to[1]}, MiB",
            stated=stated / MIB,
            model=found / MIB,
            error=found / stated - 1,
        )
    for nodes, size, stated in BUS:
        found = bus_GBps(machine("h100-ib400", nodes), size)
        exact += round(found) == stated
        wrong += abs(found - stated) > 1
        report.row(
            what=f"h100-ib400, {nodes} nodes: busbw of {size / MIB:.0f} MiB, GB/s",
            stated=stated,
            model=found,
            error=found / stated - 1,
        )
    count = len(SWITCHES) + len(BUS)
    report.row(what="of these to the very digits stated", stated=count, model=exact, error="")
    report.claim(
        "worked figures of NCCL's cost model that come out within their precision (2**(1/8), 1 GB/s)",
        f"{count - wrong} of {count}",
        f"{count}",
        wrong == 0,
    )


def measure_printed(report: harness.Report) -> None:
    """A table that NCCL itself has printed."""
    wrong = count = 0
    for collective, row in TABLE.items():
        found = predict_nccl_performance(PRINTED, collective)
        wrong += len(found.keys() ^ row.keys())
        for choice, (latency, bandwidth) in row.items():
            ours = found[choice]
            count += 2
            wrong += (round(ours.latency_us, 1) != latency) + (round(ours.bw_GBps, 1) != bandwidth)
            report.row(
                what=f"printed by NCCL 2.29.7: {collective} {choice[0]}/{choice[1]}, us and GB/s",
                stated=f"{latency} {bandwidth}",
                model=f"{ours.latency_us:.1f} {ours.bw_GBps:.1f}",
                error=ours.latency_us / latency - 1,
            )
    report.claim(
        "latencies and bandwidths printed by NCCL 2.29.7 that come out to the digit",
        f"{count - wrong} of {count}",
        f"{count}",
        wrong == 0,
    )


def measure_chosen(report: harness.Report) -> None:
    """The choices that NCCL 2.29.7 has printed for a broadcast of 1 KiB to 128 MiB: LL up to 16 KiB."""
    known = predict_nccl_performance(PRINTED, "broadcast")
    right = 0
    for power in range(10, 28):
        took = [
            expected_time_us(PRINTED, "broadcast", one, expected, 1 << power)
            for one, expected in known.items()
        ]
        winner = list(known)[took.index(min(took))][1]
        right += winner == ("LL" if power <= 14 else "Simple")
    report.claim(
        "choices that NCCL 2.29.7 has printed and the model makes", f"{right} of 18", "18", right == 18
    )


def measure_published(report: harness.Report) -> None:
    """What is published as measured: the errors that are stated by the platform table."""
    several = []
    for what, platform, nodes, size, stated in MEASURED:
        found = bus_GBps(machine(platform, nodes), size)
        error = found / stated - 1
        if nodes > 1 and size >= GIB:
            several.append(abs(error))
        report.row(
            what=f"measured: {what}, {size / GIB:g} GiB, GB/s", stated=stated, model=found, error=error
        )
    efa = times(machine("p5en-efa", 4), 280 * MIB)
    between = efa[LL128] / efa[NVLSTREE] - 1
    report.row(
        what="p5en, 4 nodes, 280 MiB: Tree/LL128 over NVLSTree, measured as equal",
        stated=1.0,
        model=1 + between,
        error=between,
    )
    forced = 4 * GIB / times(machine("p5en-efa", 4), 4 * GIB)[NVLSTREE] / 1e3 * bus_factor("allreduce", 32)
    report.row(
        what="measured: p5en, 4 nodes, forced NVLSTree, 4 GiB, GB/s",
        stated=FORCED_NVLSTREE,
        model=forced,
        error=forced / FORCED_NVLSTREE - 1,
    )
    report.claim(
        "bus bandwidth of large allreduces on several nodes, worst error against published ones in %",
        100 * max(several),
        "5",
        max(several) <= 0.05,
    )
    newer = replace(machine("h100-ib400", 4), version=(2, 31))
    report.row(
        what="2.31 over 2.30 on 4 nodes: busbw of 8 GiB",
        stated=1.0,
        model=bus_GBps(newer, 8 * GIB) / bus_GBps(machine("h100-ib400", 4), 8 * GIB),
        error="",
    )


def main() -> int:
    """Print the table and one line a claim."""
    parser = harness.options(__doc__)
    parser.add_argument(
        "--lab", action="store_true", help="also measure in the lab: minutes, root, quiet cores"
    )
    arguments = parser.parse_args()
    report = harness.Report("predict")
    report.header()
    measure_worked(report)
    measure_printed(report)
    measure_chosen(report)
    measure_published(report)
    if arguments.lab:
        import predict_lab

        sys.path.append(str(predict_lab.ROOT))
        from tests.lab.packages import NoLabError

        try:
            predict_lab.measure(report, arguments.quick)
        except (NoLabError, HpcrunError) as error:
            return harness.fail(str(error))
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
