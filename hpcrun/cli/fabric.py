"""`hpcrun fabric`: the network's shape, what is free in it, where a job would stand, bad nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli import lemon_nodes
from hpcrun.errors import SiteError, UsageError
from hpcrun.files import write_output
from hpcrun.local_identity import user_name

if TYPE_CHECKING:
    from hpcrun.mesh import ParallelDegrees
    from hpcrun.submission.placement_preview import NetworkState, PlacementPreview

SCHEMA_VERSION = 1
TAKES_COMMAND = True
"""What stands behind `--` is the user's program."""

app = typer.Typer(
    no_args_is_help=True,
    help="The network: its shape, what is free where, where a job would stand, bad nodes.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command("nodes")(lemon_nodes.show_lemon_nodes)
app.command("drain-request")(lemon_nodes.write_drain_request)

_Topology = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A captured topology instead of the live one: `scontrol show topology`, topology.conf,"
        " topology.yaml (or topoconf), ibnetdiscover.",
    ),
]
_Cluster = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which profile; default: the default one.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it into an SVG file.")]


@app.command()
def show(
    topology: _Topology = None, cluster: _Cluster = None, as_json: _Json = False, svg: _Svg = None
) -> None:
    """The network as a tree, with what is free where."""
    network = require_network(topology, cluster)
    if as_json:
        states = {"states": dict(network.states), "bad": dict(network.bad)}
        _print_json(
            {"fabric": network.fabric.as_json(), **states, "notes": [*network.notes, *network.damaged]}
        )
        return
    from hpcrun.fabric.draw import render_fabric_tree

    _print_notes(network)
    print(render_fabric_tree(network.fabric, network.states), end="")


@app.command()
def free(topology: _Topology = None, cluster: _Cluster = None, as_json: _Json = False) -> None:
    """How many nodes are free under each leaf, and which."""
    from hpcrun.hostlist import fold_hosts

    network = require_network(topology, cluster)
    by_leaf: dict[str, list[str]] = {}
    for node in network.free:
        above = network.fabric.unit(node, 0) if network.fabric.levels else None
        by_leaf.setdefault(above or "(no switch known)", []).append(node)
    if as_json:
        _print_json({"free": by_leaf})
        return
    _print_notes(network)
    for leaf, nodes in by_leaf.items():
        print(f"{leaf}  {len(nodes)} free: {fold_hosts(nodes)}")
    if not by_leaf:
        print("no node is free")


@app.command()
def place(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB [key=value]... [-- command ...]", help="A job file, and what to change in it."
        ),
    ] = None,
    topology: _Topology = None,
    cluster: _Cluster = None,
    as_json: _Json = False,
    svg: _Svg = None,
    axis: Annotated[
        str | None, typer.Option(metavar="AXIS", help="With --svg: colour the groups of this axis.")
    ] = None,
) -> None:
    """Which nodes a job would ask for, which rank would sit where, what that costs, and why."""
    from hpcrun.specs.load import load_job
    from hpcrun.submission.placement_preview import preview_placement

    given = words or []
    names_job = bool(given) and "=" not in given[0]
    resolved = load_job(
        Path(given[0]) if names_job else None, given[1:] if names_job else given, command=context.obj
    )
    spec = resolved.spec
    network = require_network(
        topology, cluster or spec.cluster, spec.resources.partition, spec.resources.reservation
    )
    found = preview_placement(spec, resolved.plan, network)
    if svg is not None:
        _draw(svg, found, spec.degrees, axis)
    if as_json:
        _print_json(found.as_json())
        return
    _print_notes(network)
    _print_forecast(found)


@app.command()
def avoid(
    nodes: Annotated[str | None, typer.Argument(metavar="[NODES]", help="Nodes, such as n[03-04].")] = None,
    reason: Annotated[str | None, typer.Option(help="Why.")] = None,
    until: Annotated[
        str, typer.Option(metavar="TIME", help="A date, or 12h, 7d from now; UNLIMITED.")
    ] = "7d",
    site: Annotated[bool, typer.Option("--site", help="In the site's list instead of your own.")] = False,
    as_json: _Json = False,
) -> None:
    """Keep jobs away from nodes; without NODES: which are kept away from, and why."""
    import time

    from hpcrun.specs.badnodes import add_bad_node, bad_node_files, load_bad_nodes, parse_expiry

    files, now = bad_node_files(), time.time()
    if nodes is not None:
        if not reason:
            raise UsageError("--reason is missing; say why, for whoever reads the list")
        path = files["site" if site else "user"]
        add_bad_node(path, nodes, reason, parse_expiry(until, now), now=now, by=user_name())
        print(path)
        return
    found = load_bad_nodes(files.values())
    for line in found.notes:
        typer.echo(f"hpcrun: {line}", err=True)
    active = found.active(now)
    if as_json:
        _print_json({"bad": active})
        return
    for node, why in active.items():
        print(f"{node}  {why}")


def require_network(
    topology: Path | None,
    cluster: str | None,
    partition: str | None = None,
    reservation: str | None = None,
) -> NetworkState:
    """The network of a file, or of the live cluster; SiteError where there is neither."""
    from hpcrun.slurm.cluster_state import query_cluster
    from hpcrun.specs.cluster import find_cluster
    from hpcrun.submission.placement_preview import load_network

    profile = find_cluster(None if cluster in (None, "default", "local") else cluster)
    if topology is not None:
        return load_network(profile, None, file=topology)
    try:
        live = query_cluster(profile.slurm_cluster if profile else None)
    except SiteError as error:
        raise SiteError(f"{error}; --topology FILE reads a captured topology") from None
    return load_network(profile, live, partition=partition, reservation=reservation)


def _print_notes(network: NetworkState) -> None:
    for line in (*network.notes, *network.damaged):
        typer.echo(f"hpcrun: {line}", err=True)


def _print_forecast(found: PlacementPreview) -> None:
    from hpcrun.fabric.draw import render_fabric_tree

    placed = found.placed
    network = found.network
    print(render_fabric_tree(network.fabric, network.states, placed.placement, placed.spares))
    for line in found.notes:
        print(line)
    print(f"order   {', '.join(placed.placement.nodes)}")
    print(f"method  {placed.method}")
    for line in placed.why:
        print(f"why     {line}")
    if placed.cost.seconds is not None:
        print(f"cost    {placed.cost.seconds * 1e3:.3g} ms of communication a step, modelled")


def _costliest_axis(found: PlacementPreview) -> str:
    """The axis that crosses the outermost level with most bytes."""
    axes = [one for one in found.placed.cost.axes if any(one.bytes)]
    return max(axes, key=lambda one: tuple(reversed(one.bytes))).axis if axes else "pp"


def _draw(path: Path, found: PlacementPreview, degrees: ParallelDegrees, axis: str | None) -> None:
    from hpcrun.fabric.draw import render_placement_svg

    placement = found.placed.placement
    text = render_placement_svg(found.network.fabric, placement, degrees, axis or _costliest_axis(found))
    try:
        write_output(path, text)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; --svg FILE writes elsewhere"
        ) from None
    typer.echo(f"hpcrun: drawn in {path}", err=True)


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
