"""A plan for the saves of a job: what they hold and take, what they survive, how often they should come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrun.checkpoint.lustre.storage import StoragePlan
from hpcrun.checkpoint.parity.sets import ErasureSets, choose_erasure_sets
from hpcrun.checkpoint.policy.capacity import MemoryBudget, compute_memory_budget, plan_save_storage
from hpcrun.checkpoint.policy.failure_rates import (
    FailureHistory,
    FailureRate,
    estimate_failure_rates,
)
from hpcrun.checkpoint.policy.interval import (
    DEFAULT_OVERHEAD_BOUND,
    IntervalAdvice,
    SaveGroup,
    expected_waste,
    recommend_intervals,
)
from hpcrun.checkpoint.policy.simulation import AdviceCheck, check_advice
from hpcrun.checkpoint.policy.size import (
    SaveSizes,
    SourcedValue,
    compute_save_sizes,
    max_kept_saves,
)
from hpcrun.errors import UsageError
from hpcrun.fabric.domains import failure_domains
from hpcrun.runs.history import MeasuredCosts, count_run_failures, find_similar_runs, measure_runs
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import ResolvedJob
from hpcrun.specs.run_lookup import runs_root
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.timing import FINAL_SAVE_MARGIN
from hpcrun.submission.checkpoint_cost import (
    CheckpointCosts,
    CostSources,
    assumed_failure_rates,
    group_tiers,
)
from hpcrun.submission.placement_preview import NetworkState, preview_placement
from hpcrun.units import format_duration, parse_time

_OBJECT_BYTES = (64 << 20, 512 << 20)
_MAX_MEASURED_RUNS = 3
"""This many of the newest runs of a job are read line by line."""


@dataclass(frozen=True)
class ObjectStoreUse:
    """The load that a job puts on the object store."""

    copies: int
    """Over the whole job."""
    kept_bytes: SourcedValue
    requests: tuple[int, int] | None
    """PUTs of one copy: with the largest objects, and with the smallest."""


@dataclass(frozen=True)
class CheckpointPlan:
    """What is known about the saves of a job before it runs."""

    spec: JobSpec
    sizes: SaveSizes
    room: MemoryBudget
    costs: CheckpointCosts
    seen: FailureHistory
    rates: tuple[FailureRate, ...]
    sets: ErasureSets | None
    kept: int
    """Saves in the run directory at most."""
    storage: StoragePlan | None
    """The check of the directory for runs; None if the size of a save is not known."""
    objects: ObjectStoreUse | None
    groups: tuple[SaveGroup, ...]
    advice: IntervalAdvice | None
    """None where something that it needs is not known."""
    checked: AdviceCheck | None = None
    notes: tuple[str, ...] = ()
    bound: float = DEFAULT_OVERHEAD_BOUND

    @property
    def known_rates(self) -> dict[Any, float]:
        """Failures a second, without those that are not known."""
        return {rate.kind: rate.per_s for rate in self.rates if rate.per_s is not None}

    @property
    def kept_bytes(self) -> float | None:
        """What the run directory holds at most."""
        whole = self.sizes.whole.value
        return None if whole is None else self.kept * whole

    @property
    def steps(self) -> dict[str, int]:
        """The keys of the job file that the advice comes to; empty where steps or costs are not known."""
        if self.advice is None or self.costs.step.value is None:
            return {}
        unit = self.costs.step.value
        every = [max(1, round(interval.every_s / unit)) for interval in self.advice.intervals]
        keys = {"checkpoint.every": every[0]}
        for interval, count in zip(self.advice.intervals[1:], every[1:], strict=True):
            keys[f"checkpoint.{interval.group.costs[0].tier}.every"] = count
        return keys

    @property
    def configured_overhead(self) -> float | None:
        """The share of time that the intervals in the job file are expected to cost; None: not known."""
        step, every = self.costs.step.value, [cost.every for cost in self.costs.tiers]
        if step is None or not all(every) or self.advice is None:
            return None
        by_tier = {cost.tier: cost.every * step for cost in self.costs.tiers}
        return expected_waste(
            self.groups, [by_tier[group.costs[0].tier] for group in self.groups], self.known_rates
        )

    @property
    def lead_s(self) -> float | None:
        """How long before the end of the allocation the last save is started; None if not known."""
        costs = [cost for cost in self.costs.tiers if cost.tier != "object"]
        if any(cost.flush.value is None or cost.stall.value is None for cost in costs):
            return None
        total = math.fsum((cost.flush.value or 0.0) + (cost.stall.value or 0.0) for cost in costs)
        return FINAL_SAVE_MARGIN * total + (self.costs.step.value or 0.0)

    @property
    def losses(self) -> list[str] | None:
        """Which losses are survived without the run directory, in words; None where no save is in memory."""
        if self.sets is None:
            return None
        lines = self.sets.statement.splitlines()
        if self.spec.resources.spares and self.spec.checkpoint.replicate_to_spares is not False:
            lines.append(
                "spares copy the newest save out of memory, as far as half of their own holds it: nodes of"
                " which they have copies are lost without harm, with parity or without"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        advice = self.advice
        return {
            "sizes": asdict(self.sizes),
            "memory": asdict(self.room) | {"left": self.room.left},
            "tiers": [asdict(cost) for cost in self.costs.tiers],
            "step": asdict(self.costs.step),
            "restart": asdict(self.costs.restart),
            "rates": [rate.as_json() for rate in self.rates],
            "losses": self.losses,
            "kept": {"saves": self.kept, "bytes": self.kept_bytes},
            "storage": self.storage.as_json() if self.storage else None,
            "objects": asdict(self.objects) if self.objects else None,
            "missing": self.costs.missing,
            "advice": None if advice is None else self._advice_json(advice),
            "own_waste": self.configured_overhead,
            "lead_s": self.lead_s,
            "check": asdict(self.checked) if self.checked else None,
            "notes": list(self.notes),
        }

    def _advice_json(self, advice: IntervalAdvice) -> dict[str, Any]:
        intervals = [
            {
                "tiers": [cost.tier for cost in interval.group.costs],
                "every_s": interval.every_s,
                "times": interval.times,
                "reasons": list(interval.reasons),
            }
            for interval in advice.intervals
        ]
        costs = {"bound": self.bound, "overhead": advice.overhead, "waste": advice.waste}
        return {"keys": self.steps, "intervals": intervals, **costs}


@dataclass(frozen=True)
class CheckpointPlanRequest:
    """The options of a plan, and what the user already knows."""

    assumed: Mapping[str, float] = field(default_factory=dict)
    bound: float = DEFAULT_OVERHEAD_BOUND
    is_checked: bool = False
    sample: RunDir | None = None
    """The run to measure saves in, instead of earlier runs of the same job."""


def plan_checkpoints(
    resolved: ResolvedJob,
    cluster: ClusterSpec | None,
    network: NetworkState | None,
    runs: Sequence[RunDir],
    wish: CheckpointPlanRequest,
) -> CheckpointPlan:
    """Plan the saves of a job before it runs; UsageError if it asks to survive what it cannot."""
    spec = resolved.spec
    nodes, notes = spec.resources.nodes, list[str]()
    sizes = compute_save_sizes(spec, resolved.plan)
    sets = _plan_erasure_sets(resolved, network, notes)
    history = _measure_similar_runs(spec, runs, wish)
    sources = CostSources(spec.checkpoint, cluster, nodes, sizes, history, wish.assumed)
    costs = sources.costs()
    past = count_run_failures(runs, cluster.name if cluster else None)
    rates = tuple(estimate_failure_rates(past, nodes, assumed_failure_rates(wish.assumed)))
    groups = tuple(group_tiers(costs))
    rate_of = {rate.kind: rate.per_s for rate in rates if rate.per_s is not None}
    advice, checked = None, None
    if not costs.missing:
        backlog = spec.checkpoint.on_backlog
        how: dict[str, Any] = {"slots": max(1, spec.checkpoint.memory), "on_backlog": backlog}
        advice = recommend_intervals(groups, rate_of, bound=wish.bound, step_s=costs.step.value, **how)
        checked = check_advice(groups, advice, rate_of, **how) if wish.is_checked else None
    elif wish.is_checked:
        notes.append("nothing to check: there is no advice")
    return CheckpointPlan(
        spec,
        sizes,
        compute_memory_budget(spec, cluster, sizes, sets),
        costs,
        past,
        rates,
        sets,
        max_kept_saves(spec),
        plan_save_storage(spec, sizes, runs_root().absolute()),
        _object_store_use(spec, sizes),
        groups,
        advice,
        checked,
        (*notes, *_find_warnings(spec, costs)),
        wish.bound,
    )


def _measure_similar_runs(
    spec: JobSpec, runs: Iterable[RunDir], wish: CheckpointPlanRequest
) -> MeasuredCosts:
    return measure_runs([wish.sample] if wish.sample else find_similar_runs(spec, runs)[:_MAX_MEASURED_RUNS])


def _plan_erasure_sets(
    resolved: ResolvedJob, network: NetworkState | None, notes: list[str]
) -> ErasureSets | None:
    """The erasure sets over the nodes that the job would get now; without a network, over as many others."""
    spec = resolved.spec
    parity, nodes = spec.checkpoint.parity, tuple(f"node{n + 1}" for n in range(spec.resources.nodes))
    if not spec.checkpoint.memory:
        return None
    domains: Mapping[str, Mapping[str, str | None]] = {}
    if network is None:
        notes.append(
            "no network is known here (--topology FILE reads a captured one): only failures of single nodes"
            " are considered"
        )
    else:
        try:
            nodes = preview_placement(spec, resolved.plan, network).placed.placement.nodes
            domains = failure_domains(network.fabric, nodes)
        except UsageError as error:
            notes.append(f"the job's placement is not known: {error}")
    return choose_erasure_sets(
        nodes, domains, scheme=parity.scheme, set_size=parity.set_size, survive=parity.survive
    )


def _object_store_use(spec: JobSpec, sizes: SaveSizes) -> ObjectStoreUse | None:
    spec_of_copies, checkpoint = spec.checkpoint.object, spec.checkpoint
    if spec_of_copies is None:
        return None
    every = spec_of_copies.every or checkpoint.durable.every or checkpoint.every_steps
    # By the clock there may be one of any step.
    copies = spec.train.steps // every if every else spec.train.steps if checkpoint.every else 1
    whole, node = sizes.whole.value, sizes.node.value
    held = min(copies, spec_of_copies.keep)
    kept = SourcedValue(
        None if whole is None else held * whole, f"checkpoint.object.keep: {spec_of_copies.keep}"
    )
    if whole is None or node is None:
        return ObjectStoreUse(copies, kept, None)
    # Besides a file's objects its index; and of a copy the manifest and the record.
    files = spec.resources.nodes
    few, most = (files * (math.ceil(node / size) + 1) + 2 for size in reversed(_OBJECT_BYTES))
    return ObjectStoreUse(copies, kept, (few, most))


def _find_warnings(spec: JobSpec, costs: CheckpointCosts) -> list[str]:
    """What in the job does not go together with what saves take."""
    warnings = []
    limit, step = spec.checkpoint.max_durable_age, costs.step.value
    durable = next(cost for cost in costs.tiers if cost.tier == "durable")
    if limit is not None and step is not None and durable.every:
        longest = durable.every * step + (durable.flush.value or 0.0)
        if longest > parse_time(limit).seconds:
            between = format_duration(longest)
            warnings.append(
                f"checkpoint.max_durable_age: {limit} is less than {between} between durable saves"
            )
    return warnings
