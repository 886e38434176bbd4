"""Which algorithm of a collective wins at which size, by how much, and whether the model can tell.

Two models stand behind one table: NCCL's own (`nccl_model`), for its choice, and α-β times on the fabric tree
(`fabric.collectives`), for MPI and gloo. Each knows how far it may be off (platforms.yaml). Bandwidths are as
nccl-tests defines them; its sizes too: allgather's is what a rank receives, reducescatter's what it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hpcrun.errors import UsageError
from hpcrun.fabric.collectives import IntraNodeLink, RoundCost, round_costs
from hpcrun.fabric.graph import Fabric
from hpcrun.fabric.rounds import NESTED_ALGORITHMS, Collective, CollectiveAlgorithm, collective_rounds
from hpcrun.tuning.model.nccl_constants import MODEL_SOURCE, Algo, Proto
from hpcrun.tuning.model.nccl_model import (
    ExpectedPerformance,
    NcclCollective,
    NcclMachine,
    expected_time_us,
    predict_nccl_performance,
)
from hpcrun.tuning.model.platforms import CollectiveLibrary, ModelErrorSpec

PredictedCollective = Literal["allreduce", "allgather", "reducescatter", "broadcast", "reduce", "alltoall"]
PREDICTED_COLLECTIVES: tuple[PredictedCollective, ...] = get_args(PredictedCollective)
NEGLIGIBLE_MARGIN = 0.15
"""A margin below this is lost in what else differs between two runs."""

_FABRIC_NAMES: Mapping[PredictedCollective, Collective] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
}
_TREES: dict[str, CollectiveAlgorithm] = {
    "binomial": "tree",
    "pipelined_tree": "pipelined_tree",
    "double_binary_tree": "double_binary_tree",
}
_MPI: Mapping[PredictedCollective, Mapping[str, CollectiveAlgorithm]] = {
    "allreduce": {
        "recursive_doubling": "recursive_doubling",
        "ring": "ring",
        "rabenseifner": "rabenseifner",
        **_TREES,
        "two_level": "two_level",
        "torus": "torus",
    },
    "allgather": {"ring": "ring", "recursive_doubling": "recursive_doubling", "bruck": "bruck"},
    "reducescatter": {"ring": "ring", "recursive_halving": "halving_doubling"},
    "broadcast": _TREES,
    "reduce": _TREES,
    "alltoall": {"pairwise": "pairwise", "bruck": "bruck"},
}
_GLOO: Mapping[PredictedCollective, Mapping[str, CollectiveAlgorithm]] = {
    "allreduce": {"ring": "whole_ring", "ring_chunked": "segmented_ring", "halving_doubling": "rabenseifner"},
    "allgather": {"ring": "ring"},
    "reducescatter": {"halving_doubling": "halving_doubling"},
    "broadcast": {"binomial": "tree"},
    "reduce": {"binomial": "tree"},
    "alltoall": {"pairwise": "pairwise"},
}
_LIKE_NCCL: Mapping[PredictedCollective, Mapping[str, CollectiveAlgorithm]] = {
    "allreduce": {"ring": "ring", "double_binary_tree": "double_binary_tree", "two_level": "two_level"},
    "allgather": {"ring": "ring", "bruck": "bruck"},
    "reducescatter": {"ring": "ring", "recursive_halving": "halving_doubling"},
    "broadcast": {"pipelined_tree": "pipelined_tree", "binomial": "tree"},
    "reduce": {"pipelined_tree": "pipelined_tree", "binomial": "tree"},
    "alltoall": {"pairwise": "pairwise"},
}


@dataclass(frozen=True)
class PredictionRow:
    """One size: the algorithms with their seconds, the fastest first."""

    size_bytes: int
    times: tuple[tuple[str, float], ...]
    error: ModelErrorSpec | None
    """The error of the model; None: unknown."""
    bus_factor: float

    @property
    def winner(self) -> str:
        """The fastest."""
        return self.times[0][0]

    @property
    def seconds(self) -> float:
        """The winner's."""
        return self.times[0][1]

    @property
    def margin(self) -> float | None:
        """By which share the second takes longer; None where there is no second."""
        return self.times[1][1] / self.seconds - 1 if len(self.times) > 1 else None

    @property
    def algbw_GBps(self) -> float:
        """Size over time."""
        return self.size_bytes / self.seconds / 1e9

    @property
    def busbw_GBps(self) -> float:
        """As nccl-tests has it."""
        return self.algbw_GBps * self.bus_factor

    @property
    def verdict(self) -> str:
        """What the margin is worth."""
        return margin_verdict(self.margin, self.error)

    def as_json(self, *, timed: bool) -> dict[str, Any]:
        """Plain values; without times where only the order is known."""
        figures = {
            "time_us": self.seconds * 1e6,
            "algbw_GBps": self.algbw_GBps,
            "busbw_GBps": self.busbw_GBps,
            "margin": self.margin,
            "model_error": self.error.share if self.error else None,
            "times_us": {name: seconds * 1e6 for name, seconds in self.times},
        }
        return {
            "size_bytes": self.size_bytes,
            "winner": self.winner,
            "order": [name for name, _ in self.times],
            "verdict": self.verdict,
            **(figures if timed else {}),
        }


@dataclass(frozen=True)
class Prediction:
    """The whole table, and what it rests on."""

    collective: PredictedCollective
    library: CollectiveLibrary
    nodes: int
    per_node: int
    basis: str
    """The model, and where its figures are from."""
    rows: tuple[PredictionRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether times may be shown: somewhere the model has been compared with measured ones."""
        return any(row.error is not None for row in self.rows)

    @property
    def switches(self) -> list[tuple[int, str]]:
        """From which of the sizes on which algorithm wins."""
        switches: list[tuple[int, str]] = []
        for row in self.rows:
            if not switches or switches[-1][1] != row.winner:
                switches.append((row.size_bytes, row.winner))
        return switches

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "collective": self.collective,
            "library": self.library,
            "nodes": self.nodes,
            "ranks_per_node": self.per_node,
            "ranks": self.nodes * self.per_node,
            "basis": self.basis,
            "order_only": not self.timed,
            "rows": [row.as_json(timed=self.timed) for row in self.rows],
            "notes": list(self.notes),
        }


def margin_verdict(margin: float | None, error: ModelErrorSpec | None) -> str:
    """In words what a margin is worth to a model that may be off by so much."""
    if margin is None:
        return "the only one"
    if error is None:
        return "order only, the model's error here is unknown"
    # Where the error is small, two that are near each other are so in truth.
    if margin < error.share and margin + error.share > NEGLIGIBLE_MARGIN:
        return "undecided, sweep it"
    if margin < NEGLIGIBLE_MARGIN:
        return "within 15 %, does not matter"
    return f"by {100 * margin:.0f} %"


def bus_factor(collective: PredictedCollective, ranks: int) -> float:
    """busbw over algbw, as nccl-tests defines it: what a ring would send over its links for this size."""
    if collective == "allreduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if collective in ("broadcast", "reduce") else (ranks - 1) / ranks


def predict_nccl(
    machine: NcclMachine,
    collective: PredictedCollective,
    sizes: Sequence[int],
    error_of: Callable[[int], ModelErrorSpec | None],
    source: str,
    table: Mapping[tuple[Algo, Proto], ExpectedPerformance] | None = None,
    notes: Sequence[str] = (),
) -> Prediction:
    """What NCCL will choose; `table` is what its log has printed, in place of the reimplemented model."""
    if collective == "alltoall":
        raise UsageError(
            f"--collective {collective}: NCCL has no algorithms to choose from there; use"
            f" {', '.join(get_args(NcclCollective))}"
        )
    expectations = predict_nccl_performance(machine, collective) if table is None else dict(table)
    if not expectations:
        raise UsageError(
            f"--collective {collective}: nothing is known of it on {machine.nodes} nodes with"
            f" {machine.per_node} ranks; there must be two ranks, and a ring or a tree"
        )
    rows = []
    for size in sizes:
        times = {
            f"{algo}/{proto}": expected_time_us(machine, collective, (algo, proto), expected, size) / 1e6
            for (algo, proto), expected in expectations.items()
        }
        rows.append(_row(size, times, error_of(size), bus_factor(collective, machine.ranks)))
    model = "the table that NCCL has printed" if table is not None else f"NCCL's cost model ({MODEL_SOURCE})"
    basis = f"{model}; {source}"
    return Prediction(collective, "nccl", machine.nodes, machine.per_node, basis, tuple(rows), tuple(notes))


@dataclass(frozen=True)
class AlphaBetaInput:
    """Where the ranks of an α-β prediction stand, and what carries their bytes."""

    fabric: Fabric
    ranks: tuple[str, ...]
    """The node of every rank."""
    inside: IntraNodeLink | None = None
    reduce_s_per_byte: float = 0.0
    small: Fabric | None = None
    """What messages up to `small_bytes` find there, where that differs."""
    small_bytes: int = 0

    def clock(
        self, collective: Collective, algorithm: CollectiveAlgorithm, inner: int = 1
    ) -> Callable[[float], float]:
        """Seconds by size; all levels must be known. Every round goes by the size of its messages."""

        def of(fabric: Fabric) -> tuple[RoundCost, ...]:
            costs = round_costs(fabric, [self.ranks], collective, algorithm, inner=inner, inside=self.inside)
            assert costs is not None
            return costs

        large = of(self.fabric)
        small = of(self.small) if self.small else large
        shares = [step.share for step in collective_rounds(collective, algorithm, len(self.ranks), inner)]

        def seconds(size_bytes: float) -> float:
            return sum(
                (few if share * size_bytes <= self.small_bytes else large_cost).seconds(
                    size_bytes, self.reduce_s_per_byte
                )
                for share, few, large_cost in zip(shares, small, large, strict=True)
            )

        return seconds

    @property
    def per_node(self) -> int:
        """Ranks of the first node."""
        return self.ranks.count(self.ranks[0])

    @property
    def inner(self) -> int | None:
        """The number of neighbouring ranks of a node, else of a leaf; None: they differ."""
        for key in (
            lambda node: node,
            lambda node: self.fabric.unit(node, 0) if self.fabric.levels else None,
        ):
            units = [key(node) for node in self.ranks]
            size = units.count(units[0])
            rows = [units[at : at + size] for at in range(0, len(units), size)]
            if None not in units and 1 < size < len(units) and all(len({*row}) == 1 for row in rows):
                return size if len(units) % size == 0 else None
        return None


def predict_alpha_beta(
    ground: AlphaBetaInput,
    library: CollectiveLibrary,
    collective: PredictedCollective,
    sizes: Sequence[int],
    error_of: Callable[[int], ModelErrorSpec | None],
    source: str,
    notes: Sequence[str] = (),
) -> Prediction:
    """α-β times of the algorithms that a library has for this collective."""
    _require_known_levels(ground.fabric)
    clocks, remarks = {}, list(notes)
    menu = {"mpi": _MPI, "gloo": _GLOO, "nccl": _LIKE_NCCL}[library]
    inner = ground.inner
    for name, algorithm in menu[collective].items():
        if algorithm in NESTED_ALGORITHMS and inner is None:
            continue
        is_power_of_two = len(ground.ranks).bit_count() == 1
        if algorithm == "recursive_doubling" and collective == "allgather" and not is_power_of_two:
            continue
        clocks[name] = ground.clock(_FABRIC_NAMES[collective], algorithm, inner or 1)
    if ground.per_node > 1 and ground.inside is None:
        remarks.append("what stays inside a node counts as free: the platform does not say what it carries")
    factor = bus_factor(collective, len(ground.ranks))
    rows = [
        _row(size, {name: clock(size) for name, clock in clocks.items()}, error_of(size), factor)
        for size in sizes
    ]
    nodes = len({*ground.ranks})
    basis = f"α-β times on the fabric tree; {source}"
    return Prediction(collective, library, nodes, ground.per_node, basis, tuple(rows), tuple(remarks))


def _require_known_levels(fabric: Fabric) -> None:
    if not fabric.levels:
        text = "no network is known here: --platform with `levels`, or a cluster profile with topology.levels"
        raise UsageError(text)
    for level in fabric.levels:
        missing = [
            key
            for key, value in (
                ("bandwidth_GBps", level.bandwidth_Bps),
                ("oversubscription", level.oversubscription),
                ("latency_us", level.latency_s),
            )
            if value is None
        ]
        if missing:
            raise UsageError(
                f"topology.levels {level.name}: {' and '.join(missing)} not known, so nothing can be said of"
                " the order; add it to the profile (a ping-pong measures it), or use --platform"
            )


def _row(size: int, times: Mapping[str, float], error: ModelErrorSpec | None, factor: float) -> PredictionRow:
    ordered = sorted(times.items(), key=lambda item: item[1])
    return PredictionRow(size, tuple(ordered), error, factor)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_SIZES = 200


def parse_message_sizes(text: str) -> list[int]:
    """`1K..1G` (powers of two between), `64K,3M`, `4096`; units are powers of 1024, as in nccl-tests."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low = _parse_message_size(first, text)
        high = _parse_message_size(last, text) if dots else low
        if high < low:
            raise UsageError(f"--sizes {text}: {part} goes down; write the smaller size first")
        sizes += [low << shift for shift in range(int(math.log2(high / low)) + 1)]
    if len(sizes) > _MOST_SIZES:
        raise UsageError(f"--sizes {text}: {len(sizes)} sizes, at most {_MOST_SIZES}")
    return sorted({*sizes})


def _parse_message_size(word: str, text: str) -> int:
    word = word.strip().upper().removesuffix("IB").removesuffix("B")
    number, unit = (word[:-1], word[-1]) if word and not word[-1].isdigit() else (word, "")
    if not number.isascii() or not number.isdigit() or unit not in _UNITS or not 0 < int(number) < 1 << 50:
        raise UsageError(f"--sizes {text}: write 1K..1G, or 64K,3M, with K, M, G, T as powers of 1024")
    return int(number) * _UNITS[unit]
