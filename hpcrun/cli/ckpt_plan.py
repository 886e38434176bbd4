"""`hpcrun ckpt plan`: size, cost and frequency of a job's checkpoints, and the losses they survive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.cli.options import AsJson, Cluster, Topology
from hpcrun.cli.output import note, print_json, print_lines

if TYPE_CHECKING:
    from hpcrun.specs.cluster import ClusterSpec
    from hpcrun.submission.placement_preview import NetworkState


def plan(
    words: Annotated[
        list[str], typer.Argument(metavar="JOB [KEY=VALUE]...", help="Job file, and keys to override.")
    ],
    cluster: Cluster = None,
    topology: Topology = None,
    sample: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN", help="Use the times of this run, even of another job."),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TIME",
            help="Assumed times: stall, step, restart; local, parity, durable, object (to store a checkpoint"
            " there); process, node, site, storage (between two failures of the job).",
        ),
    ] = None,
    bound: Annotated[
        float, typer.Option(metavar="PERCENT", min=0.01, max=90, help="Time that checkpoints may cost.")
    ] = 3.0,
    check: Annotated[bool, typer.Option("--check", help="Test the advice on a simulated run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan checkpoints: size, cost, losses survived, intervals.

    Each figure says where it comes from: given, measured in earlier runs, declared in the profile, unknown.
    """
    from hpcrun.specs.cluster import find_cluster
    from hpcrun.specs.load import load_job
    from hpcrun.specs.run_lookup import all_runs, find_run
    from hpcrun.submission.checkpoint_cost import parse_assumed_costs
    from hpcrun.submission.checkpoint_plan import CheckpointPlanRequest, plan_checkpoints
    from hpcrun.submission.checkpoint_plan_text import format_checkpoint_plan

    request = CheckpointPlanRequest(
        parse_assumed_costs(assume or ()), bound / 100, check, find_run(sample) if sample else None
    )
    resolved = load_job(Path(words[0]), words[1:])
    name = cluster or resolved.spec.cluster
    profile = None if name == "local" else find_cluster(name)
    network, why = _load_network_or_reason(topology, name, resolved.spec.resources.partition, profile)
    result = plan_checkpoints(resolved, profile, network, list(all_runs()), request)
    if why:
        note(why)
    if as_json:
        print_json(**result.as_json())
    else:
        print_lines(format_checkpoint_plan(result))


def _load_network_or_reason(
    topology: Path | None, cluster: str | None, partition: str | None, profile: ClusterSpec | None
) -> tuple[NetworkState | None, str]:
    """The network, or why there is none."""
    from hpcrun.errors import SiteError
    from hpcrun.submission.placement_preview import load_network, require_network

    if cluster == "local" and topology is None:
        return None, ""
    try:
        return require_network(topology, cluster, partition), ""
    except SiteError as error:
        if profile is not None and profile.topology.source in ("table", "file"):
            return load_network(profile, None), ""
        return None, str(error)
