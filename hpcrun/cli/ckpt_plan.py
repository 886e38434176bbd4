"""`hpcrun ckpt plan`: what the saves of a job hold, take and survive, and how often they should come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.units import amount

if TYPE_CHECKING:
    from hpcrun.checkpoint.policy.simulation import Checked
    from hpcrun.checkpoint.policy.size import Figure
    from hpcrun.specs.cluster import ClusterSpec
    from hpcrun.submission.checkpoint_plan import SavePlan
    from hpcrun.submission.placement_preview import Network

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
    from hpcrun.specs.rundir import all_runs, find_run
    from hpcrun.submission.checkpoint_cost import parse_assumed
    from hpcrun.submission.checkpoint_plan import Wish, plan_saves

    wish = Wish(parse_assumed(assume or ()), bound / 100, check, find_run(sample) if sample else None)
    resolved = load_job(Path(words[0]), words[1:])
    name = cluster or resolved.spec.cluster
    profile = None if name == "local" else find_cluster(name)
    network, why = _network(topology, name, resolved.spec.resources.partition, profile)
    found = plan_saves(resolved, profile, network, list(all_runs()), wish)
    if why:
        typer.echo(f"hpcrun: {why}", err=True)
    if as_json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, **found.as_json()}, default=str))
        return
    for line in lines(found):
        print(line)


def _network(
    topology: Path | None, cluster: str | None, partition: str | None, profile: ClusterSpec | None
) -> tuple[Network | None, str]:
    """The network, or why there is none."""
    from hpcrun.cli.fabric import network_of
    from hpcrun.errors import SiteError
    from hpcrun.submission.placement_preview import look

    if cluster == "local" and topology is None:
        return None, ""
    try:
        return network_of(topology, cluster, partition), ""
    except SiteError as error:
        if profile is not None and profile.topology.source in ("table", "file"):
            return look(profile, None), ""
        return None, str(error)


def lines(found: SavePlan) -> list[str]:
    """The plan in plain text."""
    return [*_holds(found), *_takes(found), *_survives(found), *_advises(found), *_keeps(found)]


def _holds(found: SavePlan) -> list[str]:
    told = ["one save"]
    told += [_bytes("whole", found.sizes.whole), _bytes("largest node", found.sizes.node)]
    room = found.room
    told += [
        "memory of a node",
        _bytes("there", room.there),
        _bytes("slots", room.slots),
        _bytes("parity", room.parity),
    ]
    left = room.left
    if left is None:
        return [*told, "  left          unknown"]
    what = (
        "for training and all else"
        if left > 0
        else "MISSING: the slots do not fit; lower checkpoint.memory, or ask for more"
    )
    return [*told, f"  left          {amount(abs(left))}  {what}"]


def _takes(found: SavePlan) -> list[str]:
    from hpcrun.checkpoint.policy.auto_interval import IN_WORDS

    otherwise = IN_WORDS if found.spec.checkpoint.every == "auto" else "at a signal and at the end"
    told = ["levels"]
    for one in found.costs.levels:
        every = f"every {one.every} steps" if one.every else otherwise
        told.append(f"  {one.level}: {every}")
        told += [_time("training waits", one.stall), _time("drains for", one.drain)]
    return [*told, "times", _time("a step", found.costs.step), _time("a restart", found.costs.restart)]


def _survives(found: SavePlan) -> list[str]:
    from hpcrun.checkpoint.policy.failure_rates import KINDS

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
        told += [f"  {one.kind}: {one.often} ({KINDS[one.kind]})", f"    {one.source}"]
    return told


def _advises(found: SavePlan) -> list[str]:
    from hpcrun.checkpoint.policy.failure_rates import in_words

    advice = found.advice
    if advice is None:
        missing = ", ".join(found.costs.missing)
        return [
            "how often",
            f"  not known: {missing}; run the job for a few saves, or say --assume stall=0.5 and the like",
        ]
    told = ["how often"]
    for one in advice.intervals:
        told.append(f"  {one.tier.name}: every {in_words(one.every_s)}")
        told += [f"    {reason}" for reason in one.reasons]
    told += [f"  {key}={value}" for key, value in found.steps.items()]
    if not found.steps:
        told.append("  in steps: unknown, as the time of a step is; --assume step=2.5")
    costs = f"saves cost {advice.overhead:.2%} of the time (bound {found.bound:.1%})"
    told.append(f"  {costs}; with failures {advice.waste:.2%} is lost, as far as their rates are known")
    if found.own_waste is not None:
        told.append(f"  with the intervals of the job file {found.own_waste:.2%} is lost")
    return told + (_checks(found.checked) if found.checked else [])


def _checks(checked: Checked) -> list[str]:
    from hpcrun.checkpoint.policy.failure_rates import in_words

    told = [f"checked on a simulated run with {checked.failures} failures"]
    named = [(f"{factor:g} T", one) for factor, one in checked.at.items()] + [("best tried", checked.best)]
    for name, one in named:
        every = ", ".join(in_words(each) for each in one.every_s)
        told.append(f"  {name:10}  efficiency {one.efficiency:.5f}  every {every}")
    return told


def _keeps(found: SavePlan) -> list[str]:
    from hpcrun.checkpoint.policy.failure_rates import in_words

    checkpoint = found.spec.checkpoint
    milestones = f" and each multiple of {checkpoint.keep_every} steps" if checkpoint.keep_every else ""
    size = "size unknown" if found.kept_bytes is None else amount(found.kept_bytes)
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
        held = "size unknown" if objects.kept_bytes.value is None else amount(objects.kept_bytes.value)
        puts = "unknown" if objects.requests is None else f"{objects.requests[0]} to {objects.requests[1]}"
        told.append(f"  object store: {held} ({objects.kept_bytes.source}), {objects.copies} copies in all,")
        told.append(f"    {puts} PUT requests each (objects of 64 to 512 MiB)")
    lead = found.lead_s
    told.append("last save")
    if lead is None:
        told.append("  how long before the end it is asked for: unknown before the first durable save")
    else:
        told.append(f"  asked for {in_words(lead)} before the end, or with Slurm's signal if that is earlier")
    return told + [f"note: {text}" for text in found.notes]


def _bytes(name: str, figure: Figure) -> str:
    return f"  {name:12}  {'unknown' if figure.value is None else amount(figure.value)}  {figure.source}"


def _time(name: str, figure: Figure) -> str:
    from hpcrun.checkpoint.policy.failure_rates import in_words

    value = "unknown" if figure.value is None else in_words(figure.value)
    return f"    {name:14}  {value}  {figure.source}"
