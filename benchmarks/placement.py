"""How good placement is, against an exhaustive search and against plain orders, and how quick, by size.

The oracle here shares no code with hpcrun: it deals out the messages of every group by itself, adds up every
link's load after the model's definition in words, and tries every choice and order of nodes (nodes below one
leaf are alike). Both search the same space: neighbouring ranks share a node.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import harness

from hpcrun.errors import HpcrunError
from hpcrun.fabric import search
from hpcrun.fabric.cost import compute_placement_cost
from hpcrun.fabric.graph import Fabric, FabricLevel
from hpcrun.fabric.place import order_granted_nodes, place_job
from hpcrun.fabric.traffic import Traffic, TrafficFlow, TrafficPattern
from hpcrun.mesh import ParallelDegrees
from hpcrun.specs.placement import place_in_blocks

CLUSTERS, QUICK_CLUSTERS, CHOSEN, RANDOM_ORDERS = 500, 100, 6, 5
PLANTED, QUICK_PLANTED = 100, 20
WITHIN, SAME = 0.02, 1e-9
LEAF, LEAVES_A_SPINE, LARGE, WANTED, UNDER_S = 32, 16, 16_384, 2048, 1.0
SIZES, QUICK_SIZES = (64, 256, 1024, 4096, 16_384, 65_536), (64, 256, 1024, 4096, 16_384)
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Network:
    """A small cluster: for every node its leaf, for every leaf its spine; a core above two spines."""

    leaf_of: dict[str, str]
    spine_of: dict[str, str]
    bandwidth: tuple[float, ...]
    """Bytes a second of a node's link into the leaf, the spine, the core."""
    oversubscription: tuple[float, ...]
    latency: tuple[float, ...]

    def units(self, leaf: str) -> tuple[str, ...]:
        """From the leaf upwards, as many as there are levels."""
        return (leaf, self.spine_of[leaf], "core")[: len(self.bandwidth)]

    def fabric(self, *, timed: bool = True) -> Fabric:
        """The same in hpcrun's terms; not `timed`: with no figures at all."""
        figures = zip(
            ("leaf", "spine", "core"), self.bandwidth, self.oversubscription, self.latency, strict=False
        )
        levels = tuple(
            FabricLevel(name, *values) if timed else FabricLevel(name) for name, *values in figures
        )
        nodes = tuple(self.leaf_of)
        return Fabric(nodes, levels, tuple(self.units(self.leaf_of[node]) for node in nodes))


@dataclass(frozen=True)
class Case:
    """A small cluster, what is free there, and a job that wants some of it."""

    network: Network
    free: tuple[str, ...]
    granted: tuple[str, ...]
    per_node: int
    sizes: tuple[int, ...]
    """Of the axes of the mesh, outermost first."""
    flows: tuple[TrafficFlow, ...]

    @property
    def ranks(self) -> int:
        """All of them."""
        return math.prod(self.sizes)

    @property
    def degrees(self) -> ParallelDegrees:
        """The mesh in hpcrun's terms."""
        return ParallelDegrees(*self.sizes)


def random_case(seed: random.Random) -> Case:
    """At most 10 nodes below 1 to 4 leaves below 1 or 2 spines, and a job for 6 of them."""
    count, leaves = seed.randint(CHOSEN, 10), seed.choice((1, 2, 2, 3, 3, 4, 4))
    spines = seed.randint(1, min(2, leaves))
    names = [f"n{number}" for number in seed.sample(range(1, 100), count)]
    spine_of = {f"leaf{leaf}": f"spine{leaf % spines}" for leaf in range(leaves)}
    leaf_of = {name: seed.choice(list(spine_of)) for name in names}
    levels = spines + 1
    network = Network(
        leaf_of,
        spine_of,
        tuple(seed.choice((12.5e9, 25e9, 50e9)) for _ in range(levels)),
        (1.0, *(seed.choice((1.0, 2.0, 4.0, 8.0, 20.0)) for _ in range(spines))),
        tuple(seed.choice((0.0, 1e-6, 5e-6)) for _ in range(levels)),
    )
    free = tuple(sorted(seed.sample(names, seed.randint(CHOSEN, count)), key=names.index))
    granted = tuple(sorted(seed.sample(free, CHOSEN), key=names.index))
    per_node = seed.choice((1, 2, 4))
    sizes = random_sizes(seed, CHOSEN * per_node, per_node)
    return Case(network, free, granted, per_node, sizes, random_flows(seed, sizes))


def random_sizes(seed: random.Random, ranks: int, per_node: int) -> tuple[int, ...]:
    """A mesh over so many ranks, with tp inside the node."""
    tp = seed.choice([size for size in (1, 2, 4) if per_node % size == 0])
    outer, rest = [], ranks // tp
    for _ in range(3):
        outer.append(seed.choice([size for size in range(1, rest + 1) if rest % size == 0]))
        rest //= outer[-1]
    outer.append(rest)
    seed.shuffle(outer)
    return (*outer, tp)


def random_flows(seed: random.Random, sizes: Sequence[int]) -> tuple[TrafficFlow, ...]:
    """Traffic of any strength along every axis, and now and then of experts."""

    def size_bytes(size: int) -> int:
        return (size - 1) * round(10 ** seed.uniform(6, 9))

    flows = []
    for axis, size in zip(AXES, sizes, strict=True):
        if size > 1:
            closed = axis == "pp" and size > 2 and seed.random() < 0.3
            pattern: TrafficPattern = "loop" if closed else "chain" if axis == "pp" else "ring"
            flows.append(TrafficFlow(axis, pattern, size, size_bytes(size), seed.choice((0, 10, 1000))))
    data = math.prod(sizes[1:4])
    experts = [size for size in range(2, data + 1) if data % size == 0]
    if experts and seed.random() < 0.3:
        size = seed.choice(experts)
        flows.append(TrafficFlow("ep", "all_to_all", size, size_bytes(size), size - 1))
    return tuple(flows)


def planted_case(seed: random.Random) -> tuple[Case, tuple[str, ...]]:
    """A job whose heaviest groups each fill a leaf, among half-free ones; and those leaves in order."""
    size, groups = seed.choice((4, 8)), seed.choice((4, 8, 16))
    planted = [f"leaf{number}" for number in range(groups)]
    others = [f"half{number}" for number in range(groups // 2)]
    places = [leaf for leaf in planted for _ in range(size)] + [
        leaf for leaf in others for _ in range(size // 2)
    ]
    seed.shuffle(places)
    names = [f"n{number}" for number in seed.sample(range(10 * len(places)), len(places))]
    spine_of = {leaf: f"spine{number * 2 // groups}" for number, leaf in enumerate(planted)}
    spine_of |= dict.fromkeys(others, "spine2")
    network = Network(
        dict(zip(names, places, strict=True)), spine_of, (50e9,) * 3, (1.0, 4.0, 8.0), (1e-6, 2e-6, 3e-6)
    )
    light = 10_000_000 * seed.randint(1, 9)
    heavy = light * seed.choice((10, 100, 1000))
    if seed.random() < 0.5:  # the leaves hold neighbours of the inner axis, or of the outer one
        sizes, sent = (groups, 1, size, 1, 8), (light, heavy)
        order_of = [planted[slot // size] for slot in range(size * groups)]
    else:
        sizes, sent = (size, 1, groups, 1, 8), (heavy, light)
        order_of = [planted[slot % groups] for slot in range(size * groups)]
    flows = (
        TrafficFlow("pp", "chain", sizes[0], sent[0], 64),
        TrafficFlow("dp_shard", "ring", sizes[2], sent[1], 100),
    )
    return Case(network, tuple(names), (), 8, sizes, flows), tuple(order_of)


class Oracle:
    """The model's cost of a case, worked out anew for every order, and the best of all orders."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.streams = [(self._between_slots(flow), flow.messages) for flow in case.flows]
        self.members = Counter(
            (level, unit)
            for leaf in case.network.leaf_of.values()
            for level, unit in enumerate(case.network.units(leaf))
        )

    def _groups(self, axis: str) -> Iterator[list[int]]:
        """The ranks of every group of an axis, in the order of the mesh."""
        sizes = dict(zip(AXES, self.case.sizes, strict=True))
        if axis == "ep":
            (size,) = (flow.size for flow in self.case.flows if flow.axis == "ep")
            data = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"]
            for stage, begin, last in itertools.product(
                range(sizes["pp"]), range(0, data, size), range(sizes["tp"])
            ):
                yield [(stage * data + at) * sizes["tp"] + last for at in range(begin, begin + size)]
            return
        groups = defaultdict(list)
        for rank, at in enumerate(itertools.product(*map(range, self.case.sizes))):
            others = tuple(part for name, part in zip(AXES, at, strict=True) if name != axis)
            groups[others].append(rank)
        yield from groups.values()

    def _between_slots(self, flow: TrafficFlow) -> dict[tuple[int, int], float]:
        """Bytes from a node's place in the order to another one's."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        for group in self._groups(flow.axis):
            for sender, receiver, size in messages(group, flow):
                pair = sender // self.case.per_node, receiver // self.case.per_node
                if pair[0] != pair[1]:
                    found[pair] += size
        return dict(found)

    def seconds(self, leaves: Sequence[str]) -> float:
        """Of a step, with the nodes in order below these leaves."""
        return sum(self._flow_seconds(pairs, count, leaves) for pairs, count in self.streams)

    def _flow_seconds(self, pairs: dict[tuple[int, int], float], count: int, leaves: Sequence[str]) -> float:
        network = self.case.network
        above = [network.units(leaf) for leaf in leaves]
        load: dict[tuple[str, int, str | int], float] = defaultdict(float)
        highest = -1
        for (sender, receiver), size in pairs.items():
            ways = above[sender], above[receiver]
            meet = next(level for level, (one, other) in enumerate(zip(*ways, strict=True)) if one == other)
            highest = max(highest, meet)
            for level in range(meet + 1):
                load["node sends", level, sender] += size
                load["node receives", level, receiver] += size
            for level in range(meet):
                load["unit sends", level, ways[0][level]] += size
                load["unit receives", level, ways[1][level]] += size
        busiest = max((size / self._speed(*link) for link, size in load.items()), default=0.0)
        return busiest + count * sum(network.latency[: highest + 1])

    def _speed(self, kind: str, level: int, where: str | int) -> float:
        network = self.case.network
        if kind.startswith("node"):
            return network.bandwidth[level] / (network.oversubscription[0] if level == 0 else 1.0)
        members = self.members[level, str(where)]
        return network.bandwidth[level + 1] * members / network.oversubscription[level + 1]

    def crossing(self, leaves: Sequence[str]) -> tuple[float, ...]:
        """Bytes that meet at each level, from the outermost inwards."""
        above = [self.case.network.units(leaf) for leaf in leaves]
        levels = [0.0] * len(self.case.network.bandwidth)
        for pairs, _ in self.streams:
            for (sender, receiver), size in pairs.items():
                ways = zip(above[sender], above[receiver], strict=True)
                levels[next(level for level, (one, other) in enumerate(ways) if one == other)] += size
        return tuple(reversed(levels))

    def orders(self, nodes: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """The leaves below which the nodes of the job may stand in order: every choice, every order."""
        left = Counter(self.case.network.leaf_of[node] for node in nodes)

        def extend(so_far: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
            if len(so_far) == CHOSEN:
                yield so_far
                return
            for leaf in left:
                if left[leaf]:
                    left[leaf] -= 1
                    yield from extend((*so_far, leaf))
                    left[leaf] += 1

        return extend(())

    def leaves(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Of nodes in order."""
        return tuple(self.case.network.leaf_of[node] for node in nodes)


def messages(group: Sequence[int], flow: TrafficFlow) -> Iterator[tuple[int, int, float]]:
    """Sender, receiver and bytes inside one group."""
    if flow.pattern == "all_to_all":
        for sender, receiver in itertools.permutations(group, 2):
            yield sender, receiver, flow.bytes / (len(group) - 1)
        return
    closing = [] if flow.pattern == "chain" else [(group[-1], group[0])]
    for first, second in [*itertools.pairwise(group), *closing]:
        yield first, second, flow.bytes
        if flow.pattern != "ring":
            yield second, first, flow.bytes


@dataclass
class Tally:
    """What the small clusters have shown."""

    gaps: list[float]
    """Of place() over the exhaustive best, as shares of it."""
    granted_gaps: list[float]
    """Of order() over the exhaustive best of the granted nodes."""
    heuristic_gaps: list[float]
    """Of place() without its exact search over the exhaustive best."""
    matters: int = 0
    """Cases in which the median of all orders costs more than the best."""
    above: int = 0
    """Cases in which a plain order of the free nodes would have been better."""
    disagree: int = 0
    """Placements that cost() values otherwise than the oracle."""
    untimed_worse: int = 0
    """Cases without bandwidths in which other nodes or orders would have sent fewer bytes far."""


def measure_small(report: harness.Report, clusters: int) -> None:
    """Random small clusters against the oracle and against plain orders."""
    seed, tally, methods = random.Random(2048), Tally([], [], []), Counter[str]()
    gains: dict[str, list[float]] = defaultdict(list)
    for number in range(clusters):
        case = random_case(seed)
        methods[examine(case, seed, tally, gains, number)] += 1
    for what, gaps in (
        ("place()", tally.gaps),
        ("order() of granted nodes", tally.granted_gaps),
        ("place() without its exact search", tally.heuristic_gaps),
    ):
        shown = harness.spread([100 * gap for gap in gaps])
        report.row(what=f"{what} over the exhaustive best, %", figure=shown, cases=len(gaps))
    for name, ratios in gains.items():
        report.row(what=f"{name} over place(), times", figure=harness.spread(ratios), cases=len(ratios))
    told = ", ".join(f"{method} {count}" for method, count in sorted(methods.items()))
    report.row(what="method", figure=told, cases=clusters)
    report.row(what="the median of all orders is over 2 % worse", figure=tally.matters, cases=clusters)
    short = sum(gap > WITHIN for gap in tally.heuristic_gaps)
    report.row(what="without the exact search over 2 % worse", figure=short, cases=clusters)
    for what, gaps in (("placement", tally.gaps), ("order of granted nodes", tally.granted_gaps)):
        worst, median = 100 * max(gaps), 100 * statistics.median(gaps)
        report.claim(
            f"modelled cost of the {what} over the best of {clusters} small clusters, worst and median in %",
            f"{worst:.3g} and {median:.3g}",
            "2 and 0",
            worst <= 100 * WITHIN and median <= SAME,
        )
    for what, count in (
        ("clusters in which node-table, name or random order is better", tally.above),
        ("clusters without bandwidths in which fewer bytes could go far", tally.untimed_worse),
        ("placements that the oracle values otherwise than `cost()`", tally.disagree),
    ):
        report.claim(what, count, "0", count == 0)


def examine(case: Case, seed: random.Random, tally: Tally, gains: dict[str, list[float]], number: int) -> str:
    """One small cluster; the method that place() says it used."""
    oracle, fabric, traffic = Oracle(case), case.network.fabric(), Traffic(case.flows)
    asked = case.ranks, case.per_node, case.degrees, traffic
    placed = place_job(fabric, case.free, *asked)
    nodes = placed.placement.nodes
    found, every = oracle.seconds(oracle.leaves(nodes)), [*map(oracle.seconds, oracle.orders(case.free))]
    best = min(every)
    tally.gaps.append(over(found, best))
    tally.matters += over(statistics.median(every), best) > WITHIN
    with heuristic_only():
        nodes_then = place_job(fabric, case.free, *asked).placement.nodes
    tally.heuristic_gaps.append(over(oracle.seconds(oracle.leaves(nodes_then)), best))
    plain = {
        "node-table order": list(case.free[:CHOSEN]),
        "name order": sorted(case.free)[:CHOSEN],
        "random order": seed.sample(case.free, CHOSEN),
    }
    orders = [*plain.values(), *(seed.sample(case.free, CHOSEN) for _ in range(RANDOM_ORDERS))]
    values = [oracle.seconds(oracle.leaves(one)) for one in orders]
    tally.above += any(value < found * (1 - SAME) for value in values)
    for name, value in zip(plain, values, strict=False):
        gains[name].append(value / found if found else 1.0)
    for one, value in zip([nodes, *orders], [found, *values], strict=True):
        theirs = compute_placement_cost(
            fabric, place_in_blocks(one, case.ranks, case.per_node), case.degrees, traffic
        ).seconds
        if theirs is None or not math.isclose(theirs, value, rel_tol=SAME, abs_tol=1e-15):
            tally.disagree += 1
            sys.stderr.write(f"case {number}: cost() {theirs}, oracle {value}: {','.join(one)} of {case}\n")
    granted = order_granted_nodes(fabric, case.granted, *asked).placement.nodes
    best = min(map(oracle.seconds, oracle.orders(case.granted)))
    tally.granted_gaps.append(over(oracle.seconds(oracle.leaves(granted)), best))
    untimed = place_job(case.network.fabric(timed=False), case.free, *asked).placement.nodes
    fewest = min(map(oracle.crossing, oracle.orders(case.free)))
    tally.untimed_worse += oracle.crossing(oracle.leaves(untimed)) > fewest
    return placed.method


@contextmanager
def heuristic_only() -> Iterator[None]:
    """Without the exact search, which all small clusters are small enough for."""
    before, search.EXACT_SLOTS = search.EXACT_SLOTS, 0
    try:
        yield
    finally:
        search.EXACT_SLOTS = before


def over(found: float, best: float) -> float:
    """By which share one is above the other."""
    return found / best - 1 if best else float(found > 0)


def large_case(
    nodes: int, wanted: int, busy: float
) -> tuple[Fabric, list[str], int, int, ParallelDegrees, Traffic]:
    """A cluster of full leaves, spines and a core, of which a part is free, and a job for some of it."""
    seed = random.Random(nodes)
    names = tuple(f"n{number:05}" for number in range(nodes))
    units = tuple(
        (f"leaf{at // LEAF}", f"spine{at // LEAF // LEAVES_A_SPINE}", "core") for at in range(nodes)
    )
    levels = (
        FabricLevel("leaf", 50e9, 1.0, 1e-6),
        FabricLevel("spine", 50e9, 2.0, 2e-6),
        FabricLevel("core", 50e9, 4.0, 3e-6),
    )
    free = [name for name in names if seed.random() >= busy]
    tp, pp = 8, min(8, wanted)
    degrees = ParallelDegrees(pp=pp, dp_shard=wanted // pp, tp=tp)
    flows = (
        TrafficFlow("pp", "chain", pp, 200_000_000, 64),
        TrafficFlow("dp_shard", "ring", wanted // pp, 3_000_000_000, 1000),
        TrafficFlow("tp", "ring", tp, 9_000_000_000, 1000),
    )
    return Fabric(names, levels, units), free, wanted * tp, tp, degrees, Traffic(flows)


def timed(runs: int, call: Callable[..., object], fabric: Fabric, *others: object) -> list[float]:
    """Seconds of every run, each on a fabric of which nothing has been worked out yet."""
    found = []
    for _ in range(runs):
        fresh = replace(fabric)
        begin = time.perf_counter()
        call(fresh, *others)
        found.append(time.perf_counter() - begin)
    return found


def measure_planted(report: harness.Report, cases: int) -> None:
    """Jobs of 16 to 128 nodes, too large to try every order, of which a good one is known."""
    seed, gaps = random.Random(128), []
    for _ in range(cases):
        case, leaves = planted_case(seed)
        oracle = Oracle(case)
        asked = case.ranks, case.per_node, case.degrees, Traffic(case.flows)
        nodes = place_job(case.network.fabric(), case.free, *asked).placement.nodes
        gaps.append(100 * over(oracle.seconds(oracle.leaves(nodes)), oracle.seconds(leaves)))
    report.row(what="place() over a planted order, %", figure=harness.spread(gaps), cases=cases)
    report.claim(
        f"modelled cost of the placement over an order planted in {cases} clusters, worst in %",
        max(gaps),
        "2",
        max(gaps) <= 100 * WITHIN,
    )


def measure_large(report: harness.Report, quick: bool) -> None:
    """How long one large job takes, and how the time grows with the cluster."""
    slowest = 0.0
    for busy in (0.0, 0.3, 0.7):
        fabric, free, *asked = large_case(LARGE, WANTED, busy)
        spent = timed(3 if quick else 9, place_job, fabric, free, *asked)
        what = f"place() of {WANTED:,} of {LARGE:,} nodes in {LARGE // LEAF} leaves, {len(free):,} free, s"
        report.row(what=what, figure=harness.spread(spent), cases=len(spent))
        slowest = max(slowest, statistics.median(spent))
    report.claim(
        f"`place()` of {WANTED:,} of {LARGE:,} nodes in {LARGE // LEAF} leaves on one core in s",
        slowest,
        f"{UNDER_S:g}",
        slowest < UNDER_S,
    )
    for nodes in QUICK_SIZES if quick else SIZES:
        wanted, runs = nodes // 8, 1 if quick else 3
        fabric, free, ranks, per_node, degrees, traffic = large_case(nodes, wanted, 0.3)
        asked = [ranks, per_node, degrees, traffic]
        placed = place_job(fabric, free, ranks, per_node, degrees, traffic)
        granted = random.Random(nodes).sample(free, wanted)
        times = {
            "place()": timed(runs, place_job, fabric, free, *asked),
            "order()": timed(runs, order_granted_nodes, fabric, granted, *asked),
            "cost()": timed(runs, compute_placement_cost, fabric, placed.placement, degrees, traffic),
        }
        table = compute_placement_cost(
            fabric, place_in_blocks(free[:wanted], ranks, per_node), degrees, traffic
        )
        gain = (table.seconds or 0.0) / (placed.cost.seconds or 1.0)
        what = f"node-table order over place() of {wanted:,} of {nodes:,} nodes, times"
        report.row(what=what, figure=gain, cases=1)
        for name, seconds in times.items():
            what = f"{name} of {wanted:,} of {nodes:,} nodes, s"
            report.row(what=what, figure=harness.spread(seconds), cases=runs)


def main() -> int:
    """Print the table and one line a claim."""
    arguments = harness.options(__doc__).parse_args()
    report = harness.Report("placement")
    report.header()
    try:
        measure_small(report, QUICK_CLUSTERS if arguments.quick else CLUSTERS)
        measure_planted(report, QUICK_PLANTED if arguments.quick else PLANTED)
        measure_large(report, arguments.quick)
    except HpcrunError as error:
        return harness.fail(str(error))
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
