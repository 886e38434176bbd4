"""What a save costs at each tier: given, measured in earlier runs, by the profile, or not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from hpcrun.checkpoint.policy.failure_rates import FAILURE_KINDS, FailureKind
from hpcrun.checkpoint.policy.interval import SaveGroup, TierSaveCost
from hpcrun.checkpoint.policy.size import SaveSizes, SourcedValue
from hpcrun.checkpoint.tier import TIER_NAMES, TierName
from hpcrun.errors import UsageError
from hpcrun.local_identity import expand_path
from hpcrun.runs.history import MeasuredCosts, TierTiming
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.run_lookup import runs_root
from hpcrun.units import format_bandwidth, parse_time

_OTHER_COSTS = ("stall", "step", "restart")
COST_NAMES = (*_OTHER_COSTS, *(tier for tier in TIER_NAMES if tier != "memory"), *FAILURE_KINDS)
"""What can be given: how long training waits, a step, a restart, each tier take; times between failures."""
_GIVEN_SOURCE = "as given"


@dataclass(frozen=True)
class TierCost:
    """One tier of a job, with what a save takes there, in seconds."""

    tier: TierName
    every: int
    """Steps between its saves, as the job has it; 0: none but at a signal and at the end."""
    stall: SourcedValue
    flush: SourcedValue


@dataclass(frozen=True)
class CheckpointCosts:
    """The costs of saves, as far as they are known."""

    tiers: tuple[TierCost, ...]
    step: SourcedValue
    restart: SourcedValue

    @property
    def missing(self) -> list[str]:
        """What would have to be known to say how often to save."""
        missing = [f"the stall of {cost.tier}" for cost in self.tiers if cost.stall.value is None]
        return missing + [f"the flush of {cost.tier}" for cost in self.tiers if cost.flush.value is None]


def parse_assumed_costs(words: Sequence[str]) -> dict[str, float]:
    """Parse NAME=TIME words into seconds: 0.5, 90s, 5m, 30d; UsageError lists the names."""
    seconds = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in COST_NAMES or not equals:
            raise UsageError(
                f"--assume {word}: write NAME=TIME, with one of {', '.join(COST_NAMES)} for NAME"
            )
        try:
            seconds[name] = float(text)
        except ValueError:
            seconds[name] = parse_time(text, f"--assume {name}").seconds
        least = 0 if name not in FAILURE_KINDS else 1e-9
        if not least <= seconds[name] < 1e12:
            raise UsageError(f"--assume {word}: {text} is not a time; write seconds, or 90s, 5m, 30d")
    return seconds


def assumed_failure_rates(assumed: Mapping[str, float]) -> dict[FailureKind, float]:
    """Failures a second, of the times between failures that were given."""
    return {kind: 1.0 / assumed[kind] for kind in get_args(FailureKind) if kind in assumed}


def tier_intervals(checkpoint: CheckpointSpec, nodes: int) -> dict[TierName, int]:
    """The tiers that a job uses, and after how many steps each gets a save."""
    every = checkpoint.every_steps
    durable = checkpoint.durable.every or every
    intervals: dict[TierName, int] = {}
    if checkpoint.memory:
        intervals["memory"] = every
        if checkpoint.local is not None:
            intervals["local"] = every
        if checkpoint.parity.scheme != "none" and nodes > 1:
            intervals["parity"] = every
    intervals["durable"] = durable
    if checkpoint.object is not None:
        intervals["object"] = checkpoint.object.every or durable
    return intervals


@dataclass(frozen=True)
class CostSources:
    """What figures can come from: given goes before measured, that before declared."""

    checkpoint: CheckpointSpec
    cluster: ClusterSpec | None
    nodes: int
    sizes: SaveSizes
    measured: MeasuredCosts
    assumed: Mapping[str, float]

    def costs(self) -> CheckpointCosts:
        """The best that is known of each."""
        tiers = list[TierCost]()
        for tier, every in tier_intervals(self.checkpoint, self.nodes).items():
            waits = not tiers or tier == "memory"
            stall = self._stall(tier) if waits else self._disturbance(tier)
            tiers.append(TierCost(tier, every, stall, self._flush(tier)))
        measured, source = self.measured, self._source
        step = _best_known(self.assumed.get("step"), measured.step_s, source, "no earlier run of this job")
        restart = _best_known(
            self.assumed.get("restart"), measured.restart_s, source, "no earlier run had to; taken as none"
        )
        return CheckpointCosts(tuple(tiers), step, restart)

    @property
    def _source(self) -> str:
        runs = self.measured.runs
        if not runs:
            return "no earlier run of this job with this model and layout"
        return f"median in {runs[0]}{f' and {len(runs) - 1} more' if len(runs) > 1 else ''}"

    def _stall(self, tier: TierName) -> SourcedValue:
        timing, runs = self.measured.tiers.get(tier, TierTiming()), self.measured.runs
        if "stall" in self.assumed:
            return SourcedValue(self.assumed["stall"], _GIVEN_SOURCE)
        if timing.stall_s is None and runs:
            return SourcedValue(None, f"{runs[0]} has no save of this kind")
        return SourcedValue(timing.stall_s, self._source)

    def _disturbance(self, tier: TierName) -> SourcedValue:
        """What a tier in the background costs training."""
        longer = self.measured.tiers.get(tier, TierTiming()).stall_s
        if longer is None or self.measured.tiers[tier].flush_s is None:
            return SourcedValue(
                0.0, "in the background; its cost to training was not measured: taken as none"
            )
        return SourcedValue(longer, f"in the background; steps during it are longer by this, {self._source}")

    def _flush(self, tier: TierName) -> SourcedValue:
        timing = self.measured.tiers.get(tier, TierTiming())
        if tier == "memory":
            return SourcedValue(0.0, "the time to seal it is not recorded: taken as none")
        if tier == "durable" and not self.checkpoint.memory:
            return SourcedValue(0.0, "training waits until it is stored")
        if tier in self.assumed:
            return SourcedValue(self.assumed[tier], _GIVEN_SOURCE)
        if timing.flush_s is not None:
            return SourcedValue(timing.flush_s, self._source)
        if tier == "durable" and timing.stall_s is not None:
            return SourcedValue(timing.stall_s, f"{self._source}, of saves that ranks wrote themselves")
        declared = _cost_from_profile(tier, self.cluster, self.sizes)
        return declared or SourcedValue(None, f"{self._source}, and the profile declares no bandwidth for it")


def _best_known(given: float | None, measured: float | None, source: str, otherwise: str) -> SourcedValue:
    if given is not None:
        return SourcedValue(given, _GIVEN_SOURCE)
    return SourcedValue(measured, source if measured is not None else otherwise)


def _cost_from_profile(tier: TierName, cluster: ClusterSpec | None, sizes: SaveSizes) -> SourcedValue | None:
    """Estimate a cost by the bandwidths of the profile: a lower bound, because other jobs are ignored."""
    if cluster is None or sizes.node.value is None or sizes.whole.value is None:
        return None
    if tier == "parity" and cluster.topology.levels:
        first = cluster.topology.levels[0]
        bandwidth = format_bandwidth(first.bandwidth_GBps * 1e9)
        source = f"at best: profile {cluster.name}, {bandwidth} of a node to its {first.name}"
        return SourcedValue(sizes.node.value / (first.bandwidth_GBps * 1e9), source)
    if tier != "durable":
        return None
    root = str(runs_root().absolute())
    paths = {name: expand_path(system.path) for name, system in cluster.file_systems.items()}
    name = max(
        (name for name, path in paths.items() if root.startswith(path)),
        key=lambda candidate: len(paths[candidate]),
        default="",
    )
    place = cluster.file_systems.get(name)
    if place is None or (place.node_write_GBps is None and place.write_GBps is None):
        return None
    by_node = sizes.node.value / (place.node_write_GBps * 1e9) if place.node_write_GBps else 0.0
    by_all = sizes.whole.value / (place.write_GBps * 1e9) if place.write_GBps else 0.0
    return SourcedValue(max(by_node, by_all), f"at best: profile {cluster.name}, file_systems.{name}")


def group_tiers(costs: CheckpointCosts) -> list[SaveGroup]:
    """Tiers that are taken together; memory and what goes along with every save are one."""
    restart = costs.restart.value or 0.0
    near, groups = list[TierSaveCost](), list[SaveGroup]()
    for tier_cost in costs.tiers:
        cost = TierSaveCost(
            tier_cost.tier, tier_cost.stall.value or 0.0, tier_cost.flush.value or 0.0, restart
        )
        if tier_cost.tier in ("memory", "local", "parity"):
            near.append(cost)
        else:
            groups.append(SaveGroup((cost,)))
    return [SaveGroup(tuple(near)), *groups] if near else groups
