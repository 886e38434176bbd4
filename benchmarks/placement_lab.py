"""What the order of the nodes is worth in the lab of tests/lab: the demo's step traffic over emulated racks.

On four nodes of a grant every class of equivalent orders is measured in turn in one world, with real MPI and
gloo: orders are of one class when renaming the nodes of a rack, and racks of as many nodes, makes them equal.
Ours is what `fabric.place.order` chooses with the lab's true rates; its class is also measured on other
nodes, which shows the noise. `ratio` is to our step in the same round of all orders. `axes_ms` lasts until
the last rank is through with an axis. `crossed` is MB a step over the uplinks: modelled, then counted there.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

from hpcrun.errors import HpcrunError
from hpcrun.fabric.cost import PlacementCost, compute_placement_cost
from hpcrun.fabric.graph import Fabric, FabricLevel
from hpcrun.fabric.place import order_granted_nodes
from hpcrun.fabric.topology_reader import parse_fabric
from hpcrun.fabric.traffic import Traffic, TrafficFlow, estimate_traffic
from hpcrun.specs.placement import place_in_blocks
from hpcrun.specs.records import write_atomically
from hpcrun.specs.shipped import shipped_file
from hpcrun.submission.prepare import PreparedJob, prepare_job

if TYPE_CHECKING:
    from tests.lab.cluster import Lab, Shape

ROOT = Path(__file__).parents[1]
PER_NODE = 2
ROUNDS, QUICK_ROUNDS, TIMED, COUNTED = 12, 2, 4, 2
"""Turns of each order, the steps timed in each, and those whose bytes are counted beforehand."""
SLOWER = 1.15
"""How much slower than the best class ours may be."""


@dataclass(frozen=True)
class Grant:
    """Four nodes that Slurm might have given, in its order, by the places of their racks."""

    name: str
    racks: tuple[int, ...]
    """How many nodes each rack of the lab has."""
    nodes: tuple[str, ...]


GRANTS = (
    Grant("2x4", (4, 4), ("n01", "n02", "n05", "n06")),
    Grant("4x2, 2 racks", (2, 2, 2, 2), ("n01", "n02", "n03", "n04")),
    Grant("4x2, 3 racks", (2, 2, 2, 2), ("n01", "n03", "n04", "n05")),
)


class Job:
    """The demo and what it sends."""

    def __init__(self) -> None:
        self._prepared: PreparedJob = prepare_job(shipped_file("jobs/demo.yaml"), until="plan")
        self.degrees = self._prepared.spec.degrees
        self.traffic: Traffic = estimate_traffic(self._prepared.spec.model, self.plan, self._prepared.spec)

    @property
    def plan(self) -> Any:
        """Its layout."""
        return self._prepared.training_plan

    def exchange(self) -> dict[str, int]:
        """The same bytes as messages, each axis of two ranks, as traffic_rank.py replays them."""
        shards, tensor, hops = (self._flow(axis) for axis in ("dp_shard", "tp", "pp"))
        # ZeRO 1 gathers and scatters once a step each, in fp32 both: half of the messages and of the bytes.
        assert self.plan.zero == 1
        return {
            "pieces": shards.messages // 2,
            "piece_bytes": _whole(2 * shards.bytes // shards.messages),
            "layers": tensor.messages,
            "layer_bytes": _whole(2 * tensor.bytes // tensor.messages),
            "microbatches": self.plan.grad_accum,
            "hop_bytes": _whole(hops.bytes // self.plan.grad_accum),
        }

    def _flow(self, axis: str) -> TrafficFlow:
        flow = self.traffic.flow(axis)
        assert flow is not None
        assert flow.size == 2
        return flow


def _whole(size_bytes: int) -> int:
    """Of two equal halves of floats."""
    return size_bytes // 8 * 8


def known(fabric: Fabric, shape: Shape) -> Fabric:
    """With the rates that the lab's links have; a node's link into the spine is the one into its leaf."""
    link, uplink = (mbit * 1e6 / 8 for mbit in (shape.link_mbit, shape.uplink_mbit))
    levels = FabricLevel("leaf", link, 1.0), FabricLevel("spine", link, shape.racks[0] * link / uplink)
    assert [level.name for level in fabric.levels] == [level.name for level in levels]
    return replace(fabric, levels=levels)


@dataclass(frozen=True)
class Order:
    """A way to stand on the nodes, and who would choose it."""

    name: str
    """Racks in the order of the nodes, the fullest is A."""
    nodes: tuple[str, ...]
    chosen: str
    modelled: PlacementCost

    @property
    def crossing_MB(self) -> float:
        """What the model sends over the uplinks in a step."""
        return self.modelled.bytes[2] / 1e6


def orders_of(grant: Grant, fabric: Fabric, job: Job) -> list[Order]:
    """Ours first, then another order of its class, then one of every other class."""
    leaf_of = {node: fabric.unit(node, 0) for node in grant.nodes}
    ranks = len(grant.nodes) * PER_NODE

    def named(nodes: Sequence[str]) -> str:
        leaves = [leaf_of[node] for node in nodes]
        letters = [leaf for leaf, _ in Counter(leaves).most_common()]
        return "".join("ABCD"[letters.index(leaf)] for leaf in leaves)

    def ours(fabric: Fabric) -> tuple[str, ...]:
        return order_granted_nodes(
            fabric, grant.nodes, ranks, PER_NODE, job.degrees, job.traffic
        ).placement.nodes

    best = ours(fabric)
    chosen = {
        "ours": best,
        "ours without rates": ours(
            replace(fabric, levels=tuple(FabricLevel(one.name) for one in fabric.levels))
        ),
        "Slurm's": grant.nodes,
        "alternating": _alternating([leaf_of[node] for node in grant.nodes], grant.nodes),
    }
    classes: dict[str, list[tuple[str, ...]]] = {named(best): [best]}
    for nodes in itertools.permutations(grant.nodes):
        classes.setdefault(named(nodes), []).append(nodes)
    again = classes[named(best)][-1]
    picks = [best, again, *(found[0] for name, found in classes.items() if name != named(best))]
    return [
        Order(
            named(nodes) + "'" * (nodes is again),
            nodes,
            "; ".join(who for who, whose in chosen.items() if named(whose) == named(nodes))
            if nodes is not again
            else "ours with other nodes",
            compute_placement_cost(fabric, place_in_blocks(nodes, ranks, PER_NODE), job.degrees, job.traffic),
        )
        for nodes in picks
    ]


def _alternating(leaves: Sequence[str | None], nodes: Sequence[str]) -> tuple[str, ...]:
    """Dealt from the racks in turns."""
    turn: Counter[str | None] = Counter()
    places = []
    for leaf in leaves:
        places.append(turn[leaf])
        turn[leaf] += 1
    return tuple(node for _, node in sorted(zip(places, nodes, strict=True), key=lambda one: one[0]))


class Racks:
    """A lab of one shape, and worlds of ranks in it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder

    def fabric(self) -> Fabric:
        """As Slurm tells it, with the true rates."""
        text = self._lab.run(["scontrol", "show", "topology"]).require_success().stdout
        return known(parse_fabric(text, name="scontrol show topology"), self._lab.shape)

    def measure(self, orders: Sequence[Order], job: Job, rounds: int) -> dict[str, list[dict[str, Any]]]:
        """One world over all the nodes: what it has measured by transport, for each order."""
        nodes = sorted({node for one in orders for node in one.nodes})
        task = {
            "nodes": nodes,
            "per_node": PER_NODE,
            "degrees": asdict(job.degrees),
            "exchange": job.exchange(),
            "orders": [
                [nodes.index(node) * PER_NODE + local for node in one.nodes for local in range(PER_NODE)]
                for one in orders
            ],
            "rounds": rounds,
            "timed": TIMED,
            "counted": COUNTED,
        }
        (self._folder / "task.json").write_text(json.dumps(task))
        size = f"--nodes={len(nodes)}", f"--ntasks-per-node={PER_NODE}", f"--nodelist={','.join(nodes)}"
        program = [sys.executable, str(ROOT / "benchmarks" / "traffic_rank.py"), str(self._folder)]
        with ThreadPoolExecutor(1) as aside:
            world = aside.submit(self._lab.run, ["srun", "--mpi=pmi2", *size, *program], timeout_s=900)
            try:
                self._answer(world)
            finally:
                # Nobody else would end ranks that wait for an answer.
                if not world.done():
                    self._lab.close()
            world.result().require_success()
        found: dict[str, list[dict[str, Any]]] = json.loads((self._folder / "result.json").read_text())
        return found

    def _answer(self, world: Future[Any]) -> None:
        """Tell the ranks what has crossed, as often as they ask, until they have ended."""
        for number in itertools.count(1):
            ask = self._folder / f"ask-{number}"
            while not ask.exists():
                if world.done():
                    return
                time.sleep(0.02)
            # What crosses leaves one rack and enters another.
            both_ways = sum(self._lab.uplink_bytes(rack) for rack in range(1, len(self._lab.racks) + 1))
            write_atomically(self._folder / f"told-{number}", str(both_ways // 2))


def tell(
    report: harness.Report, grant: Grant, transport: str, orders: Sequence[Order], found: Sequence[Any]
) -> None:
    """The rows of one grant over one transport, and what is claimed of them; ours comes first."""
    ours = found[0]["steps"]
    ratios = [[step / own for step, own in zip(figures["steps"], ours, strict=True)] for figures in found]
    for one, figures, ratio in zip(orders, found, ratios, strict=True):
        report.row(
            nodes=grant.name,
            transport=transport,
            order=one.name,
            chosen=one.chosen,
            ms=_spread([1e3 * step for step in figures["steps"]], 1),
            ratio=_spread(ratio),
            modelled=seconds(one) / seconds(orders[0]),
            axes_ms=", ".join(_axes(figures["phases"])),
            crossed=f"{one.crossing_MB:.2f} {figures['crossed'] / 1e6:.2f}",
        )
    medians = [statistics.median(ratio) for ratio in ratios]
    others = [place for place, one in enumerate(orders) if one.name.rstrip("'") != orders[0].name]
    claims = {"the best other class": min(others, key=lambda place: medians[place])}
    claims |= {f"{who} order": place for place in others for who in orders[place].chosen.split("; ") if who}
    for who, place in claims.items():
        report.claim(
            f"a step in {who} ({orders[place].name}) over one in ours ({orders[0].name}),"
            f" {transport}, {grant.name}",
            _spread(ratios[place]),
            f"at least {1 / SLOWER:.2f}",
            medians[place] >= 1 / SLOWER,
        )


def seconds(one: Order) -> float:
    """The model's; all rates are known here."""
    assert one.modelled.seconds is not None
    return one.modelled.seconds


def _axes(phases: dict[str, list[float]]) -> Iterator[str]:
    """Medians by axis: gathers and scatters together."""
    by_axis: dict[str, float] = {}
    for phase, times in phases.items():
        axis = phase.partition(" ")[0]
        by_axis[axis] = by_axis.get(axis, 0.0) + statistics.median(times)
    return (f"{axis} {1e3 * spent:.0f}" for axis, spent in by_axis.items())


def _spread(values: Sequence[float], digits: int = 2) -> str:
    low, middle, high = (
        f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} [{low}, {high}]"


def main() -> int:
    """Print the table and one line a claim."""
    arguments = harness.options(__doc__).parse_args()
    sys.path.append(str(ROOT))
    from tests.lab.cluster import Lab, Shape
    from tests.lab.packages import NoLabError

    report = harness.Report("placement_lab")
    report.header()
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    # Two racks of a shape are like those of the other.
    wanted = [grant for grant in GRANTS if not arguments.quick or grant.name != "4x2, 2 racks"]
    try:
        job = Job()
        for racks, grants in itertools.groupby(wanted, key=lambda grant: grant.racks):
            folder = Path(tempfile.mkdtemp(prefix="hpcrun-placement-"))
            try:
                with Lab(Shape(racks)) as lab:
                    site = Racks(lab, folder)
                    fabric = site.fabric()
                    orders = {grant: orders_of(grant, fabric, job) for grant in grants}
                    found = site.measure([one for each in orders.values() for one in each], job, rounds)
            finally:
                shutil.rmtree(folder)
            for transport, figures in found.items():
                left = iter(figures)
                for grant, each in orders.items():
                    tell(report, grant, transport, each, list(itertools.islice(left, len(each))))
    except (NoLabError, HpcrunError) as error:
        return harness.fail(str(error))
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
