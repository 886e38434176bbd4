"""A checkpoint plan as text."""

from __future__ import annotations

from hpcrun.checkpoint.policy.auto_interval import AUTO_DESCRIPTION
from hpcrun.checkpoint.policy.failure_rates import FAILURE_KINDS
from hpcrun.checkpoint.policy.simulation import AdviceCheck
from hpcrun.checkpoint.policy.size import SourcedValue
from hpcrun.submission.checkpoint_plan import CheckpointPlan
from hpcrun.units import format_bytes, format_duration


def format_checkpoint_plan(plan: CheckpointPlan) -> list[str]:
    """The plan in plain text."""
    return [
        *_format_contents(plan),
        *_format_costs(plan),
        *_format_losses(plan),
        *_format_advice(plan),
        *_format_storage(plan),
    ]


def _format_contents(plan: CheckpointPlan) -> list[str]:
    lines = ["one save"]
    lines += [
        _format_bytes_line("whole", plan.sizes.whole),
        _format_bytes_line("largest node", plan.sizes.node),
    ]
    room = plan.room
    lines += [
        "memory of a node",
        _format_bytes_line("there", room.there),
        _format_bytes_line("slots", room.slots),
        _format_bytes_line("parity", room.parity),
    ]
    left = room.left
    if left is None:
        return [*lines, "  left          unknown"]
    what = (
        "for training and all else"
        if left > 0
        else "MISSING: the slots do not fit; lower checkpoint.memory, or ask for more"
    )
    return [*lines, f"  left          {format_bytes(abs(left))}  {what}"]


def _format_costs(plan: CheckpointPlan) -> list[str]:
    otherwise = AUTO_DESCRIPTION if plan.spec.checkpoint.every == "auto" else "at a signal and at the end"
    lines = ["tiers"]
    for cost in plan.costs.tiers:
        every = f"every {cost.every} steps" if cost.every else otherwise
        lines.append(f"  {cost.tier}: {every}")
        lines += [
            _format_time_line("training waits", cost.stall),
            _format_time_line("flushed in", cost.flush),
        ]
    return [
        *lines,
        "times",
        _format_time_line("a step", plan.costs.step),
        _format_time_line("a restart", plan.costs.restart),
    ]


def _format_losses(plan: CheckpointPlan) -> list[str]:
    losses = plan.losses
    if losses is None:
        lines = [
            "losses",
            "  checkpoint.memory is 0: whatever is lost, the run continues from the run directory",
        ]
    else:
        lines = ["losses", *(f"  {line}" for line in losses)]
    left_out = (
        f"; {plan.seen.left_out} faults of programs or slow nodes left out" if plan.seen.left_out else ""
    )
    lines.append(f"failures of this job{left_out}")
    for rate in plan.rates:
        lines += [f"  {rate.kind}: {rate.frequency_text} ({FAILURE_KINDS[rate.kind]})", f"    {rate.source}"]
    return lines


def _format_advice(plan: CheckpointPlan) -> list[str]:
    advice = plan.advice
    if advice is None:
        missing = ", ".join(plan.costs.missing)
        return [
            "how often",
            f"  not known: {missing}; run the job for a few saves, or say --assume stall=0.5 and the like",
        ]
    lines = ["how often"]
    for interval in advice.intervals:
        lines.append(f"  {interval.group.name}: every {format_duration(interval.every_s)}")
        lines += [f"    {reason}" for reason in interval.reasons]
    lines += [f"  {key}={value}" for key, value in plan.steps.items()]
    if not plan.steps:
        lines.append("  in steps: unknown, as the time of a step is; --assume step=2.5")
    costs = f"saves cost {advice.overhead:.2%} of the time (bound {plan.bound:.1%})"
    lines.append(f"  {costs}; with failures {advice.waste:.2%} is lost, as far as their rates are known")
    if plan.configured_overhead is not None:
        lines.append(f"  with the intervals of the job file {plan.configured_overhead:.2%} is lost")
    return lines + (_format_simulation(plan.checked) if plan.checked else [])


def _format_simulation(checked: AdviceCheck) -> list[str]:
    lines = [f"checked on a simulated run with {checked.failures} failures"]
    named = [(f"{factor:g} T", candidate) for factor, candidate in checked.at.items()] + [
        ("best tried", checked.best)
    ]
    for name, candidate in named:
        every = ", ".join(format_duration(each) for each in candidate.every_s)
        lines.append(f"  {name:10}  efficiency {candidate.efficiency:.5f}  every {every}")
    return lines


def _format_storage(plan: CheckpointPlan) -> list[str]:
    checkpoint = plan.spec.checkpoint
    milestones = f" and each multiple of {checkpoint.keep_every} steps" if checkpoint.keep_every else ""
    size = "size unknown" if plan.kept_bytes is None else format_bytes(plan.kept_bytes)
    lines = [
        "kept",
        f"  run directory: at most {plan.kept} saves, {size}: the newest {checkpoint.keep}{milestones}",
    ]
    if (storage := plan.storage) is not None:
        lines.append(
            f"  {storage.directory}: {storage.kind}" + (f", {storage.layout}" if storage.layout else "")
        )
        lines += [f"    {reason}" for reason in storage.reasons]
        lines += [f"    {finding.level}: {finding.text}" for finding in storage.findings]
    if (objects := plan.objects) is not None:
        held = "size unknown" if objects.kept_bytes.value is None else format_bytes(objects.kept_bytes.value)
        puts = "unknown" if objects.requests is None else f"{objects.requests[0]} to {objects.requests[1]}"
        lines.append(f"  object store: {held} ({objects.kept_bytes.source}), {objects.copies} copies in all,")
        lines.append(f"    {puts} PUT requests each (objects of 64 to 512 MiB)")
    lead = plan.lead_s
    lines.append("last save")
    if lead is None:
        lines.append("  how long before the end it is asked for: unknown before the first durable save")
    else:
        lines.append(
            f"  asked for {format_duration(lead)} before the end, or with Slurm's signal if that is earlier"
        )
    return lines + [f"note: {text}" for text in plan.notes]


def _format_bytes_line(name: str, figure: SourcedValue) -> str:
    return (
        f"  {name:12}  {'unknown' if figure.value is None else format_bytes(figure.value)}  {figure.source}"
    )


def _format_time_line(name: str, figure: SourcedValue) -> str:
    value = "unknown" if figure.value is None else format_duration(figure.value)
    return f"    {name:14}  {value}  {figure.source}"
