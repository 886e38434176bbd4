"""How often a run fails, by what is lost with it: from what the user's runs saw and what others published.

A failure is known by the nearest tier that survives it, because that tier is what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hpcrun.checkpoint.tier import TierName
from hpcrun.units import format_duration

FailureKind = Literal["process", "node", "site", "storage"]
FAILURE_KINDS: Mapping[FailureKind, str] = {
    "process": "ranks died or hung, and their nodes live",
    "node": "a node is gone, with its memory and its disk",
    "site": "several nodes at once, or the whole allocation",
    "storage": "the file system has lost or spoiled what was saved",
}
"""From the mildest on: what survives one survives those before it."""
SURVIVED_FAILURES: Mapping[TierName, tuple[FailureKind, ...]] = {
    "memory": ("process",),
    "local": ("process",),
    "parity": ("process", "node"),
    "durable": ("process", "node", "site"),
    "object": ("process", "node", "site", "storage"),
}
_DAY_S = 86400.0


@dataclass(frozen=True)
class FailurePrior:
    """What is believed of a kind before anything was seen."""

    per_node_day: float
    source: str
    weight: float = 2.0
    """It counts as much as this many observed failures."""


_STOPS_PER_NODE_DAY = 419 / 54 / (16384 / 8)
_LLAMA_SOURCE = "Llama 3 report: 419 stops in 54 days on 16,384 GPUs, taken as nodes of 8"
_SCR_SOURCE = "SCR: its near tiers were enough for 85 % of failures"
_DLROVER_SOURCE = "DLRover: 75 % of faults end with a restart of the processes on the same nodes"
FAILURE_PRIORS: Mapping[FailureKind, FailurePrior] = {
    "process": FailurePrior(0.75 * _STOPS_PER_NODE_DAY, f"{_LLAMA_SOURCE}; {_DLROVER_SOURCE}"),
    "node": FailurePrior(
        0.10 * _STOPS_PER_NODE_DAY,
        f"{_LLAMA_SOURCE}; what is left of 85 % ({_SCR_SOURCE}) without the 75 % of processes",
    ),
    "site": FailurePrior(0.15 * _STOPS_PER_NODE_DAY, f"{_LLAMA_SOURCE}; {_SCR_SOURCE}"),
}
"""None for the file system: no published figures say how often one loses a save."""


@dataclass(frozen=True)
class FailureHistory:
    """What the user's own runs went through."""

    node_s: float = 0.0
    """Nodes times the seconds that they worked."""
    counts: Mapping[FailureKind, int] = field(default_factory=dict)
    runs: int = 0
    left_out: int = 0
    """Faults that say nothing of the machine: of the program itself, or of slow nodes."""

    def __add__(self, other: FailureHistory) -> FailureHistory:
        """Both together."""
        counts = {kind: self.counts.get(kind, 0) + other.counts.get(kind, 0) for kind in FAILURE_KINDS}
        return FailureHistory(
            self.node_s + other.node_s,
            {kind: count for kind, count in counts.items() if count},
            self.runs + other.runs,
            self.left_out + other.left_out,
        )


@dataclass(frozen=True)
class FailureRate:
    """How often a job of this many nodes meets a kind of failure."""

    kind: FailureKind
    per_s: float | None
    """None where it is not known."""
    source: str

    @property
    def frequency_text(self) -> str:
        """In words, without the source."""
        return "unknown" if self.per_s is None else f"one in {format_duration(1 / self.per_s)}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def estimate_failure_rates(
    seen: FailureHistory, nodes: int, given: Mapping[FailureKind, float] | None = None
) -> list[FailureRate]:
    """Estimate the rate of each kind for a job of this many nodes; `given` rates are a second, of the job.

    The mean of the Gamma distribution of a prior (shape: its weight, rate: weight over its mean) and n
    failures in a number of node-seconds: (weight + n) / (weight / prior + node-seconds).
    """
    rates = given or {}
    return [
        FailureRate(kind, rates[kind], "as given") if kind in rates else _estimate_rate(kind, seen, nodes)
        for kind in FAILURE_KINDS
    ]


def _estimate_rate(kind: FailureKind, seen: FailureHistory, nodes: int) -> FailureRate:
    prior, count, days = FAILURE_PRIORS.get(kind), seen.counts.get(kind, 0), seen.node_s / _DAY_S
    own = f"{count} in {days:.3g} node-days of {seen.runs} run{'s' * (seen.runs != 1)} of yours"
    if prior is None:
        if not count:
            return FailureRate(kind, None, f"{own}, and no published figure")
        return FailureRate(kind, count / seen.node_s * nodes, own)
    per_day = (prior.weight + count) / (prior.weight / prior.per_node_day + days)
    source = f"{own}, and with the weight of {prior.weight:g} more: {prior.source}" if days else prior.source
    return FailureRate(kind, per_day / _DAY_S * nodes, source)
