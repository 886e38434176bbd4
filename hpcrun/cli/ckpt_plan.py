"""`hpcrun ckpt plan`: what the saves of a job hold, take and survive, and how often they should come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.units import render_bytes

if TYPE_CHECKING:
    from hpcrun.checkpoint.policy.simulation import AdviceCheck
    from hpcrun.checkpoint.policy.size import SourcedValue
    from hpcrun.specs.cluster import ClusterSpec
    from hpcrun.submission.checkpoint_plan import CheckpointPlan
    from hpcrun.submission.placement_preview import NetworkState

SCHEMA_VERSION = 1


def plan(
    words: Annotated[
        list[str], typer.Argument(metavar="JOB [key=value]...", help="a job file, and what to change in it")
    ],
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="which profile; default as in the job")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a captured topology instead of the live one")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN", help="take this run's times, whatever job it was of"),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TIME",
            help="what is known: stall, step, restart; local, parity, durable, object (to store one there);"
            " process, node, site, storage (between two such failures of the job)",
        ),
    ] = None,
    bound: Annotated[
        float, typer.Option(min=0.01, max=90, help="most time that saves may cost, in percent")
    ] = 3.0,
    check: Annotated[bool, typer.Option("--check", help="try the advice on a simulated run")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Show what the saves of a job hold and take, which losses they survive, and how often they should come.

    Every figure says where it comes from: given, measured in earlier runs, declared in the profile, unknown.
    """
    from hpcrun.specs.cluster import find_cluster
    from hpcrun.specs.load import load_job
    from hpcrun.specs.run_lookup import all_runs, find_run
    from hpcrun.submission.checkpoint_cost import parse_assumed_costs
    from hpcrun.submission.checkpoint_plan import CheckpointPlanRequest, plan_checkpoints

    wish = CheckpointPlanRequest(
        parse_assumed_costs(assume or ()), bound / 100, check, find_run(sample) if sample else None
    )
    resolved = load_job(Path(words[0]), words[1:])
    name = cluster or resolved.spec.cluster
    profile = None if name == "local" else find_cluster(name)
    network, why = _load_network_or_reason(topology, name, resolved.spec.resources.partition, profile)
    found = plan_checkpoints(resolved, profile, network, list(all_runs()), wish)
    if why:
        typer.echo(f"hpcrun: {why}", err=True)
    if as_json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, **found.as_json()}, default=str))
        return
    for line in format_checkpoint_plan(found):
        print(line)


def _load_network_or_reason(
    topology: Path | None, cluster: str | None, partition: str | None, profile: ClusterSpec | None
) -> tuple[NetworkState | None, str]:
    """The network, or why there is none."""
    from hpcrun.cli.fabric import require_network
    from hpcrun.errors import SiteError
    from hpcrun.submission.placement_preview import load_network

    if cluster == "local" and topology is None:
        return None, ""
    try:
        return require_network(topology, cluster, partition), ""
    except SiteError as error:
        if profile is not None and profile.topology.source in ("table", "file"):
            return load_network(profile, None), ""
        return None, str(error)


def format_checkpoint_plan(found: CheckpointPlan) -> list[str]:
    """The plan in plain text."""
    return [
        *_format_contents(found),
        *_format_costs(found),
        *_format_losses(found),
        *_format_advice(found),
        *_format_storage(found),
    ]


def _format_contents(found: CheckpointPlan) -> list[str]:
    told = ["one save"]
    told += [
        _format_bytes_line("whole", found.sizes.whole),
        _format_bytes_line("largest node", found.sizes.node),
    ]
    room = found.room
    told += [
        "memory of a node",
        _format_bytes_line("there", room.there),
        _format_bytes_line("slots", room.slots),
        _format_bytes_line("parity", room.parity),
    ]
    left = room.left
    if left is None:
        return [*told, "  left          unknown"]
    what = (
        "for training and all else"
        if left > 0
        else "MISSING: the slots do not fit; lower checkpoint.memory, or ask for more"
    )
    return [*told, f"  left          {render_bytes(abs(left))}  {what}"]


def _format_costs(found: CheckpointPlan) -> list[str]:
    from hpcrun.checkpoint.policy.auto_interval import AUTO_DESCRIPTION

    otherwise = AUTO_DESCRIPTION if found.spec.checkpoint.every == "auto" else "at a signal and at the end"
    told = ["levels"]
    for one in found.costs.levels:
        every = f"every {one.every} steps" if one.every else otherwise
        told.append(f"  {one.level}: {every}")
        told += [_format_time_line("training waits", one.stall), _format_time_line("flushed in", one.flush)]
    return [
        *told,
        "times",
        _format_time_line("a step", found.costs.step),
        _format_time_line("a restart", found.costs.restart),
    ]


def _format_losses(found: CheckpointPlan) -> list[str]:
    from hpcrun.checkpoint.policy.failure_rates import FAILURE_KINDS

    losses = found.losses
    if losses is None:
        told = [
            "losses",
            "  checkpoint.memory is 0: whatever is lost, the run goes on from the run directory",
        ]
    else:
        told = ["losses", *(f"  {line}" for line in losses)]
    left_out = (
        f"; {found.seen.left_out} faults of programs or slow nodes left out" if found.seen.left_out else ""
    )
    told.append(f"failures of this job{left_out}")
    for one in found.rates:
        told += [f"  {one.kind}: {one.frequency_text} ({FAILURE_KINDS[one.kind]})", f"    {one.source}"]
    return told


def _format_advice(found: CheckpointPlan) -> list[str]:
    from hpcrun.checkpoint.policy.failure_rates import format_time_span

    advice = found.advice
    if advice is None:
        missing = ", ".join(found.costs.missing)
        return [
            "how often",
            f"  not known: {missing}; run the job for a few saves, or say --assume stall=0.5 and the like",
        ]
    told = ["how often"]
    for one in advice.intervals:
        told.append(f"  {one.tier.name}: every {format_time_span(one.every_s)}")
        told += [f"    {reason}" for reason in one.reasons]
    told += [f"  {key}={value}" for key, value in found.steps.items()]
    if not found.steps:
        told.append("  in steps: unknown, as the time of a step is; --assume step=2.5")
    costs = f"saves cost {advice.overhead:.2%} of the time (bound {found.bound:.1%})"
    told.append(f"  {costs}; with failures {advice.waste:.2%} is lost, as far as their rates are known")
    if found.configured_overhead is not None:
        told.append(f"  with the intervals of the job file {found.configured_overhead:.2%} is lost")
    return told + (_format_simulation(found.checked) if found.checked else [])


def _format_simulation(checked: AdviceCheck) -> list[str]:
    from hpcrun.checkpoint.policy.failure_rates import format_time_span

    told = [f"checked on a simulated run with {checked.failures} failures"]
    named = [(f"{factor:g} T", one) for factor, one in checked.at.items()] + [("best tried", checked.best)]
    for name, one in named:
        every = ", ".join(format_time_span(each) for each in one.every_s)
        told.append(f"  {name:10}  efficiency {one.efficiency:.5f}  every {every}")
    return told


def _format_storage(found: CheckpointPlan) -> list[str]:
    from hpcrun.checkpoint.policy.failure_rates import format_time_span

    checkpoint = found.spec.checkpoint
    milestones = f" and each multiple of {checkpoint.keep_every} steps" if checkpoint.keep_every else ""
    size = "size unknown" if found.kept_bytes is None else render_bytes(found.kept_bytes)
    told = [
        "kept",
        f"  run directory: at most {found.kept} saves, {size}: the newest {checkpoint.keep}{milestones}",
    ]
    if (storage := found.storage) is not None:
        told.append(
            f"  {storage.directory}: {storage.kind}" + (f", {storage.layout}" if storage.layout else "")
        )
        told += [f"    {reason}" for reason in storage.reasons]
        told += [f"    {one.level}: {one.text}" for one in storage.findings]
    if (objects := found.objects) is not None:
        held = "size unknown" if objects.kept_bytes.value is None else render_bytes(objects.kept_bytes.value)
        puts = "unknown" if objects.requests is None else f"{objects.requests[0]} to {objects.requests[1]}"
        told.append(f"  object store: {held} ({objects.kept_bytes.source}), {objects.copies} copies in all,")
        told.append(f"    {puts} PUT requests each (objects of 64 to 512 MiB)")
    lead = found.lead_s
    told.append("last save")
    if lead is None:
        told.append("  how long before the end it is asked for: unknown before the first durable save")
    else:
        told.append(
            f"  asked for {format_time_span(lead)} before the end, or with Slurm's signal if that is earlier"
        )
    return told + [f"note: {text}" for text in found.notes]


def _format_bytes_line(name: str, figure: SourcedValue) -> str:
    return (
        f"  {name:12}  {'unknown' if figure.value is None else render_bytes(figure.value)}  {figure.source}"
    )


def _format_time_line(name: str, figure: SourcedValue) -> str:
    from hpcrun.checkpoint.policy.failure_rates import format_time_span

    value = "unknown" if figure.value is None else format_time_span(figure.value)
    return f"    {name:14}  {value}  {figure.source}"
