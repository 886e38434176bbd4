"""Which two nodes to try next, and which node is to blame: a slow node found by trials of pairs.

What is tried may be adapters as well, as NODE:HCA: then a pair is of two nodes, of the same adapter where
it can be. Pairs of a round share no node (or adapter) and run at once. A pair that is fast clears both; those
of slow pairs are then tried with nodes that are clear. One slow node is named after two rounds, several in
O(log nodes) of them.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.finding import Finding, sort_findings
from hpcrun.tuning.policy.nccl_tests import parse_nccl_tests
from hpcrun.tuning.registry.values import parse_c_integer

_SLOW = 0.8
"""The share of the usual rate below which a pair is slow."""
_FEWEST = 3
"""Trials that are alike and fewer may all be with one slow node."""
_HALVED = (0.35, 0.65)
"""What two flows leave each other that share one link."""
_JOINT = "+"
_ADAPTER = ":"
_PERFTEST = re.compile(r"^\s*#bytes\s+#iterations\s.*BW average\[(?P<unit>Gb/sec|MB/sec|MiB/sec)\]")
_UNITS = {"Gb/sec": 1 / 8, "MB/sec": 2**20 / 1e9, "MiB/sec": 2**20 / 1e9}
"""In GB/s; what perftest calls MB are MiB."""


@dataclass(frozen=True)
class PairTrial:
    """What two nodes reached with each other."""

    nodes: tuple[str, str]
    rate_GBps: float
    """At the largest size."""
    queue_pairs: int | None = None
    """Queue pairs of a connection, where the output reports them."""
    is_wrong: bool = False
    """Whether results were wrong."""

    def partner(self, node: str) -> str:
        """The other one."""
        return self.nodes[1] if self.nodes[0] == node else self.nodes[0]


@dataclass(frozen=True)
class PairResults:
    """The state of the nodes after the trials so far."""

    nodes: tuple[str, ...]
    trials: tuple[PairTrial, ...]
    limit_GBps: float
    """Below it a pair is slow."""
    clear: frozenset[str] = frozenset()
    named: Mapping[str, tuple[PairTrial, ...]] = field(default_factory=dict)
    """The slow ones, with the trials that say so."""

    @property
    def suspects(self) -> tuple[str, ...]:
        """Nodes of which nothing is known yet, or nothing good; those of slow pairs first."""
        tried = {node for trial in self.trials for node in trial.nodes}
        left = [node for node in self.nodes if node not in self.clear and node not in self.named]
        return tuple(sorted(left, key=lambda node: node not in tried))

    def can_be_paired(self, first: str, other: str) -> bool:
        """Whether two of them say something together: two adapters of a node do not cross the network."""
        here, there = first.partition(_ADAPTER), other.partition(_ADAPTER)
        return not here[1] or here[0] != there[0]

    def is_slow(self, trial: PairTrial) -> bool:
        """Whether a pair stayed below the limit."""
        return trial.rate_GBps < self.limit_GBps


def evaluate_trials(
    nodes: Sequence[str], trials: Sequence[PairTrial], at_least_GBps: float | None = None
) -> PairResults:
    """Evaluate the trials; the default limit is 0.8 of what most pairs reach."""
    rates = sorted(trial.rate_GBps for trial in trials)
    # The upper quartile: as many as half of the trials may be slow.
    usual = rates[-(-3 * (len(rates) - 1) // 4)] if rates else 0.0
    before = PairResults(tuple(nodes), tuple(trials), at_least_GBps or _SLOW * usual)
    clear = frozenset(node for trial in trials if not before.is_slow(trial) for node in trial.nodes)
    if at_least_GBps is None and len(trials) < _FEWEST and not any(map(before.is_slow, trials)):
        clear = frozenset()  # they may all be slow
    named = {}
    for node in nodes:
        against = [trial for trial in trials if node in trial.nodes and trial.partner(node) in clear]
        if node not in clear and len({trial.partner(node) for trial in against}) > 1:
            named[node] = tuple(against)
    return PairResults(before.nodes, before.trials, before.limit_GBps, clear, named)


def choose_next_pairs(standing: PairResults) -> tuple[tuple[str, str], ...]:
    """The pairs to try at once; none: nothing more is to be learned."""
    met = {frozenset(trial.nodes) for trial in standing.trials}
    waiting = list(standing.suspects)
    helpers = [node for node in standing.nodes if node in standing.clear]
    pairs = []
    while waiting:
        node = waiting.pop(0)
        for others in (helpers, waiting):
            rail = node.partition(_ADAPTER)[2]
            left = [
                candidate
                for candidate in others
                if frozenset((node, candidate)) not in met and standing.can_be_paired(node, candidate)
            ]
            other = next(
                (candidate for candidate in left if candidate.partition(_ADAPTER)[2] == rail),
                next(iter(left), None),
            )
            if other is not None:
                others.remove(other)
                pairs.append((node, other))
                break
    return tuple(pairs)


def check_pair_trials(standing: PairResults) -> tuple[Finding, ...]:
    """The nodes that are slow, and what no node explains."""
    return sort_findings(
        [
            *_wrong_results(standing),
            *_slow_nodes(standing),
            *_slow_paths(standing),
            *_undecided_nodes(standing),
        ]
    )


def _wrong_results(standing: PairResults) -> Iterator[Finding]:
    for trial in standing.trials:
        if trial.is_wrong:
            text = "gave wrong results with each other"
            remedy = "take both out, and try each anew"
            yield Finding("error", "pair", " and ".join(trial.nodes), text, remedy)


def _slow_nodes(standing: PairResults) -> Iterator[Finding]:
    for node, trials in standing.named.items():
        rates = ", ".join(f"{trial.rate_GBps:.4g} GB/s with {trial.partner(node)}" for trial in trials)
        text = f"is slow: {rates}; those reach {standing.limit_GBps:.4g} with others"
        remedy = "`hpcrun doctor` there; leave it out until it is repaired"
        yield Finding("error", "pair", node, text, remedy)


def _slow_paths(standing: PairResults) -> Iterator[Finding]:
    """Pairs that are slow although both are fast with others: a link between them, or flows that collide."""
    good = [trial.rate_GBps for trial in standing.trials if not standing.is_slow(trial)]
    for trial in standing.trials:
        if not standing.is_slow(trial) or not set(trial.nodes) <= standing.clear:
            continue
        share = trial.rate_GBps / statistics.median(good)
        text = f"reach {trial.rate_GBps:.4g} GB/s, {share:.0%} of what both do with others"
        subject = " and ".join(trial.nodes)
        if not _HALVED[0] <= share <= _HALVED[1]:
            remedy = "try them again; then look at the links between"
            yield Finding("warning", "pair", subject, text, remedy, "low")
            continue
        count = trial.queue_pairs
        how = f"{count} queue pair{'s' * (count > 1)} a connection" if count else "1 queue pair, unless set"
        text += f": two flows may share one link of several (by {how})"
        remedy = (
            "try them again alone; measure NCCL_IB_QPS_PER_CONNECTION=4 (`tune policy add`), ask for adaptive"
            " or static routing; ib_write_bw --flow_label with other labels shows it"
        )
        yield Finding("warning", "pair", subject, text, remedy, "medium")


def _undecided_nodes(standing: PairResults) -> Iterator[Finding]:
    slow = [trial for trial in standing.trials if standing.is_slow(trial)]
    stuck = [node for node in standing.suspects if any(node in trial.nodes for trial in slow)]
    if choose_next_pairs(standing):
        return
    if standing.trials and not stuck and standing.suspects:
        text = "there is nothing to compare their trials with"
        remedy = "say with --at-least what is well"
        yield Finding("unknown", "pair", ", ".join(standing.suspects), text, remedy)
    if stuck:
        text = "were slow in all their trials, and no other node is left to tell which of them it is"
        remedy = "try them with a node that is known to be good"
        yield Finding("unknown", "pair", ", ".join(stuck), text, remedy)


def parse_pair_trials(text: str, name: str) -> tuple[PairTrial, ...]:
    """What a file tells of pairs: nccl-tests on two nodes, or the ping-pong's JSON; UsageError for others."""
    if text.lstrip().startswith("{"):
        return tuple(_parse_ping_pong(text, name))
    if rate_GBps := _parse_perftest(text):
        return (PairTrial(_endpoints_of_name(name), rate_GBps),)
    timings = parse_nccl_tests(text)
    if len(timings.nodes) != 2 or not timings.times_us:
        described = f"on {len(timings.nodes)} nodes" if timings.times_us else "that are none"
        raise UsageError(f"{name}: holds times of nccl-tests {described}; it takes one of two nodes")
    size = max(call.size_bytes for call in timings.times_us)
    rates = [timings.busbw_GBps[call] for call in timings.times_us if call.size_bytes == size]
    told_pairs = parse_c_integer(timings.env.get("NCCL_IB_QPS_PER_CONNECTION", ""))
    rate = statistics.median(rates[0])
    adapter = timings.env.get("NCCL_IB_HCA", "").strip("\"'").lstrip("=")
    alone = re.fullmatch(r"[A-Za-z]\w*(:\d+)?", adapter)
    first, second = (f"{node}:{adapter}" if alone else node for node in timings.nodes)
    if Path(name).stem.count(_JOINT) == 1 and _ADAPTER in Path(name).stem:
        first, second = _endpoints_of_name(name)
    return (PairTrial((first, second), rate, told_pairs, timings.is_wrong),)


def _parse_perftest(text: str) -> float | None:
    """GB/s at the largest size of what ib_write_bw or another of perftest printed; None for other texts."""
    unit, rates = 0.0, {}
    for line in text.splitlines():
        words = line.split()
        if match := _PERFTEST.match(line):
            unit = _UNITS[match["unit"]]
        elif unit and len(words) >= 4 and words[0].isdecimal():
            with contextlib.suppress(ValueError):
                rates[int(words[0])] = float(words[3]) * unit
    return rates[max(rates)] if rates else None


def _endpoints_of_name(name: str) -> tuple[str, str]:
    """The two ends by a file's name, such as n1:mlx5_0+n2:mlx5_0.txt."""
    first, joint, second = Path(name).stem.partition(_JOINT)
    if not (first and joint and second):
        raise UsageError(f"{name}: does not tell its two ends; call it NODE:HCA+NODE:HCA.txt, as printed")
    return first, second


def _parse_ping_pong(text: str, name: str) -> Iterator[PairTrial]:
    """Links of hpcrun.bench.pingpong whose names are NODE+NODE."""
    try:
        links: Mapping[str, Any] = json.loads(text)["links"]
        for link, result in links.items():
            first, joint, second = link.partition(_JOINT)
            if joint and first and second:
                times = {int(size): spent for size, spent in result["one"].items()}
                size = max(times)
                yield PairTrial((first, second), size / statistics.median(times[size]) / 1e9)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        raise UsageError(f"{name}: is neither nccl-tests' output nor the ping-pong's JSON") from None


def trials_of_nodes(nodes: Sequence[str], trials: Sequence[PairTrial]) -> tuple[PairTrial, ...]:
    """The trials with the nodes' names as they were given; those of other nodes are a UsageError."""
    by_short = {_short(node): node for node in nodes}
    matched = []
    for trial in trials:
        # A trial that tells its adapter is one of the nodes too, where nodes are tried.
        first, second = (
            by_short.get(_short(node)) or by_short.get(_short(node).partition(_ADAPTER)[0])
            for node in trial.nodes
        )
        if first is None or second is None or first == second:
            raise UsageError(f"{' and '.join(trial.nodes)}: are no pair of {', '.join(nodes)}")
        matched.append(PairTrial((first, second), trial.rate_GBps, trial.queue_pairs, trial.is_wrong))
    return tuple(matched)


def _short(end: str) -> str:
    """A node without its domain, with its adapter."""
    node, sign, adapter = end.partition(_ADAPTER)
    return f"{node.partition('.')[0]}{sign}{adapter.removesuffix(':1')}"


def trial_endpoints(nodes: Sequence[str], adapters: Sequence[str]) -> list[str]:
    """What is tried: nodes, or all their adapters."""
    return (
        [f"{node}{_ADAPTER}{adapter}" for adapter in adapters for node in nodes] if adapters else list(nodes)
    )
