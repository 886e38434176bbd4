"""MPICH's allreduce algorithms over two emulated racks: the predicted order against the measured one.

Used by `predict.py --lab`. A ping-pong measures latency and bandwidth of each level of the lab of tests/lab
(in a node, in a rack, across racks), from which the α-β model predicts; then every algorithm is measured in
worlds of its own, in turns. Eight ranks that spin on a few cores would time the scheduler: they nap between
polls, in the ping-pong and in the allreduce alike (MPI_Iallreduce, which has the same algorithms). Latencies
are taken with all pairs at work, as in a round of a collective. Of the calls in a world the lower quartile
counts, since other work on the machine only adds to a time; of the worlds the median.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

from hpcrun.bench.pingpong import MessageCostModel, fit_message_cost, lower_quartile
from hpcrun.fabric.graph import Fabric, FabricLevel
from hpcrun.fabric.rounds import CollectiveAlgorithm
from hpcrun.tuning.model.predict import AlphaBetaInput

if TYPE_CHECKING:
    from tests.lab.cluster import Lab

ROOT = Path(__file__).parents[1]
NODES, RACK = 8, 4
KIB = 1024
CALLS = {
    KIB: 12,
    4 * KIB: 12,
    16 * KIB: 12,
    64 * KIB: 8,
    256 * KIB: 5,
    1024 * KIB: 3,
    4096 * KIB: 2,
}
"""Calls of each of the seven sizes in one world."""
ROUNDS, QUICK_ROUNDS = 7, 3
WITHIN = 0.25
"""How much slower than the best the predicted winner may be."""
ALGORITHMS: Mapping[str, CollectiveAlgorithm] = {
    "sched_recursive_doubling": "recursive_doubling",
    "tsp_ring": "ring",
    "sched_reduce_scatter_allgather": "rabenseifner",
    "tsp_tree": "preorder_tree",
}
"""MPIR_CVAR_IALLREDUCE_INTRA_ALGORITHM, and ours; the tree is made MPI_Allreduce's, knomial_1 of 2."""


class Racks:
    """The lab, and programs in it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder

    def run(self, mode: str, words: Sequence[str], size: Sequence[str], env: Mapping[str, str]) -> Any:
        """The ping-pong program on so many nodes; what it has written."""
        out = self._folder / "out.json"
        program = [sys.executable, "-m", "hpcrun.bench.pingpong", mode, str(out), *words]
        environ = {"PYTHONPATH": str(ROOT), "MPIR_CVAR_COLLECTIVE_FALLBACK": "error", **env}
        self._lab.run(["srun", "--mpi=pmi2", *size, *program], env=environ, timeout_s=240).require_success()
        return json.loads(out.read_text())


@dataclass(frozen=True)
class Levels:
    """What the ping-pong has found: pairs alone, and all pairs both ways at once."""

    node: MessageCostModel
    rack: MessageCostModel
    rack_all: MessageCostModel
    across: MessageCostModel
    across_all: MessageCostModel
    reduce_s_per_byte: float

    def ground(self) -> AlphaBetaInput:
        """A rank on each node of two racks."""
        large, small = self._fabric("large"), self._fabric("small")
        return AlphaBetaInput(
            large, large.nodes, None, self.reduce_s_per_byte, small, self.across_all.up_to_bytes
        )

    def _fabric(self, which: str) -> Fabric:
        """Levels of small or of large messages; an uplink carries what all pairs together got across."""
        rack, single, together = (
            line.small if which == "small" else line.large
            for line in (self.rack_all, self.across, self.across_all)
        )
        most = max(single.bandwidth_Bps, together.bandwidth_Bps)
        leaf = FabricLevel("leaf", rack.bandwidth_Bps, 1.0, rack.latency_s)
        above = max(0.0, together.latency_s - rack.latency_s)
        spine = FabricLevel("spine", most, most / together.bandwidth_Bps, above)
        names = tuple(f"n{number:02}" for number in range(1, NODES + 1))
        units = tuple((f"leaf{at // RACK + 1}", "spine") for at in range(NODES))
        return Fabric(names, (leaf, spine), units)


Times = dict[str, dict[int, list[float]]]


class Links:
    """Ping-pong times of several worlds together, so that one bad moment does not count."""

    def __init__(self) -> None:
        self._times: Times = {}
        self._reduce: list[float] = []

    def measure(self, site: Racks) -> None:
        """One world of a rank a node for the racks, one of two ranks for the inside of a node."""
        near = ",".join(f"{at}-{at + 1}" for at in range(0, NODES, 2))
        far = ",".join(f"{at}-{at + RACK}" for at in range(RACK))
        inside = site.run("links", ["node:0-1"], ["--nodes=1", "--ntasks-per-node=2"], {})
        found = site.run("links", [f"rack:{near}", f"across:{far}"], WORLD, {})
        self._reduce.append(found["reduce_s_per_byte"])
        for name, which in (inside["links"] | found["links"]).items():
            for mode in ("one", "all"):
                kept = self._times.setdefault(f"{name} {mode}", {})
                for size, times in which[mode].items():
                    kept.setdefault(int(size), []).extend(times)

    def levels(self) -> Levels:
        """What they say together."""
        node, rack, rack_all, across, across_all = (
            fit_message_cost(self._times[name])
            for name in ("node one", "rack one", "rack all", "across one", "across all")
        )
        return Levels(node, rack, rack_all, across, across_all, statistics.median(self._reduce))


WORLD = (f"--nodes={NODES}", "--ntasks-per-node=1")


def measure_order(site: Racks, links: Links, rounds: int) -> Times:
    """By algorithm and size: a quartile of each world; the algorithms and the ping-pong take turns."""
    found: Times = {name: {size: [] for size in CALLS} for name in ALGORITHMS}
    calls = [f"{size}:{times}" for size, times in CALLS.items()]
    names = list(ALGORITHMS)
    for number in range(rounds):
        links.measure(site)
        for name in names if number % 2 == 0 else reversed(names):
            env = {
                "MPIR_CVAR_IALLREDUCE_INTRA_ALGORITHM": name,
                "MPIR_CVAR_IALLREDUCE_TREE_TYPE": "knomial_1",
                "MPIR_CVAR_DEVICE_COLLECTIVES": "none",
            }
            for size, times in site.run("allreduce", calls, WORLD, env).items():
                found[name][int(size)].append(lower_quartile(times))
    return found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; no ties are expected of times."""
    ranks = [[sorted(one).index(value) for value in one] for one in (first, second)]
    count = len(first)
    apart: int = sum((a - b) * (a - b) for a, b in zip(*ranks, strict=True))
    return 1.0 - 6.0 * apart / (count * (count * count - 1))


def spread(values: Sequence[float]) -> float:
    """Between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


@dataclass
class Tally:
    """What all sizes together have shown."""

    correlations: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Logarithms of predicted over measured."""
    ratios: list[float] = field(default_factory=list)
    """The same of the ratio of two algorithms."""
    scored: int = 0
    good: int = 0
    mistaken: float = 0.0
    """The largest predicted margin of a winner that was slower than the second."""


def tell(report: harness.Report, levels: Levels, found: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    """A row for each size and algorithm, and the claims."""
    tally = Tally()
    for size in CALLS:
        tell_size(report, levels, {name: times[size] for name, times in found.items()}, size, tally)
    report.row(
        what="rank correlation by size, smallest first",
        stated="",
        model=", ".join(f"{one:.1f}" for one in tally.correlations),
        error=f"mean {statistics.mean(tally.correlations):.2f}",
    )
    for what, logs in (("time", tally.times), ("ratio of two algorithms", tally.ratios)):
        deciles = statistics.quantiles(logs, n=10)
        report.row(
            what=f"{what}, predicted over measured: median and ninth decile of the factor off",
            stated="",
            model=f"{math.exp(deciles[4]):.2f} {math.exp(deciles[8]):.2f}",
            error="",
        )
    what = "the largest predicted margin of a winner that was slower than the second, %"
    report.row(what=what, stated="", model=100 * tally.mistaken, error="")
    report.claim(
        f"sizes where the predicted allreduce over two racks is within {100 * WITHIN:.0f} % of the best",
        f"{tally.good} of {tally.scored} scored, of {len(CALLS)}",
        "all that are scored",
        tally.good == tally.scored > 0,
    )


def tell_size(
    report: harness.Report, levels: Levels, found: Mapping[str, Sequence[float]], size: int, tally: Tally
) -> None:
    """One size of the allreduce, by algorithm."""
    measured = {name: statistics.median(times) for name, times in found.items()}
    ground = levels.ground()
    predicted = {name: ground.clock("all_reduce", ours)(size) for name, ours in ALGORITHMS.items()}
    for name in ALGORITHMS:
        report.row(
            what=f"allreduce of {size // KIB} KiB by {name}, ms",
            stated=harness.spread([1e3 * one for one in found[name]]),
            model=1e3 * predicted[name],
            error=predicted[name] / measured[name] - 1,
        )
        tally.times.append(abs(math.log(predicted[name] / measured[name])))
    for one, other in itertools.combinations(ALGORITHMS, 2):
        apart_by = predicted[one] / predicted[other] * measured[other] / measured[one]
        tally.ratios.append(abs(math.log(apart_by)))
    tally.correlations.append(rank_correlation([*measured.values()], [*predicted.values()]))
    best, second = sorted(measured, key=lambda name: measured[name])[:2]
    gap = measured[second] - measured[best]
    apart = gap > max(spread(found[best]), spread(found[second]))
    winner, runner_up = sorted(predicted, key=lambda name: predicted[name])[:2]
    if measured[runner_up] < measured[winner]:
        tally.mistaken = max(tally.mistaken, predicted[runner_up] / predicted[winner] - 1)
    loss = measured[winner] / measured[best] - 1
    tally.scored += apart
    tally.good += apart and loss <= WITHIN
    report.row(
        what=f"allreduce of {size // KIB} KiB: measured best, predicted winner",
        stated=best,
        model=winner,
        error=f"{100 * loss:.0f} % slower, {'scored' if apart else 'not scored: the best two overlap'}",
    )


def measure(report: harness.Report, quick: bool) -> None:
    """Start the lab, measure, and tell."""
    sys.path.append(str(ROOT))
    from tests.lab.cluster import Lab, Shape

    folder = Path(tempfile.mkdtemp(prefix="hpcrun-predict-"))
    try:
        with Lab(Shape((RACK, NODES - RACK))) as lab:
            site = Racks(lab, folder)
            links = Links()
            found = measure_order(site, links, QUICK_ROUNDS if quick else ROUNDS)
    finally:
        shutil.rmtree(folder)
    levels = links.levels()
    for name, found_line in itertools.islice(vars(levels).items(), 5):
        report.row(
            what=f"ping-pong {name.replace('_', ', pairs: ')}",
            stated="",
            model="; ".join(
                f"{one} {1e6 * line.latency_s:.0f} us, {line.bandwidth_Bps / 1e6:.1f} MB/s a pair"
                for one, line in zip(("small", "large"), found_line[:2], strict=True)
            ),
            error="",
        )
    tell(report, levels, found)
