"""`hpcrun fabric`: the network's shape, free nodes, where a job would run, bad nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.cli import lemon_nodes
from hpcrun.cli.options import AsJson, Cluster, CommandWords, Topology, make_app, split_job_words
from hpcrun.cli.output import note, print_json, print_lines, write_file
from hpcrun.errors import UsageError
from hpcrun.local_identity import user_name

if TYPE_CHECKING:
    from hpcrun.submission.placement_preview import NetworkState, PlacementPreview

TAKES_COMMAND = True
"""What follows `--` is the user's command."""

app = make_app("Show the network, free nodes, the placement of a job, and bad nodes.")

_Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it into an SVG file.")]


@app.command()
def show(topology: Topology = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Show the network as a tree, with free nodes."""
    from hpcrun.fabric.draw import render_fabric_tree
    from hpcrun.submission.placement_preview import require_network

    network = require_network(topology, cluster)
    if as_json:
        notes = [*network.notes, *network.damaged]
        states, bad = dict(network.states), dict(network.bad)
        print_json(fabric=network.fabric.as_json(), states=states, bad=bad, notes=notes)
        return
    _print_notes(network)
    print(render_fabric_tree(network.fabric, network.states), end="")


@app.command()
def free(topology: Topology = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """List the free nodes under each leaf switch."""
    from hpcrun.hostlist import fold_hosts
    from hpcrun.submission.placement_preview import require_network

    network = require_network(topology, cluster)
    by_leaf: dict[str, list[str]] = {}
    for node in network.free:
        leaf = network.fabric.unit(node, 0) if network.fabric.levels else None
        by_leaf.setdefault(leaf or "(no switch known)", []).append(node)
    if as_json:
        print_json(free=by_leaf)
        return
    _print_notes(network)
    lines = (f"{leaf}  {len(nodes)} free: {fold_hosts(nodes)}" for leaf, nodes in by_leaf.items())
    print_lines(lines, "no node is free")


@app.command()
def place(
    context: typer.Context,
    words: CommandWords = None,
    topology: Topology = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
    svg: _Svg = None,
    axis: Annotated[
        str | None, typer.Option(metavar="AXIS", help="With --svg: colour the groups of this axis.")
    ] = None,
) -> None:
    """Show the nodes and rank order that a job would get.

    Also the modelled cost of communication, and the reasons for the order.
    """
    from hpcrun.fabric.draw import render_placement_svg
    from hpcrun.specs.load import load_job
    from hpcrun.submission.placement_preview import preview_placement, require_network

    job, overrides = split_job_words(words)
    resolved = load_job(job, overrides, command=context.obj)
    spec = resolved.spec
    network = require_network(
        topology, cluster or spec.cluster, spec.resources.partition, spec.resources.reservation
    )
    preview = preview_placement(spec, resolved.plan, network)
    if svg is not None:
        placed = preview.placed
        colour = axis or placed.cost.costliest_axis
        write_file(
            svg,
            render_placement_svg(network.fabric, placed.placement, spec.degrees, colour),
            "--svg FILE writes elsewhere",
        )
        note(f"drawn in {svg}")
    if as_json:
        print_json(**preview.as_json())
        return
    _print_notes(network)
    _print_preview(preview)


@app.command()
def avoid(
    nodes: Annotated[str | None, typer.Argument(metavar="[NODES]", help="Nodes, such as n[03-04].")] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why to avoid them.")] = None,
    until: Annotated[str, typer.Option(metavar="TIME", help="Date, or 12h, 7d from now; UNLIMITED.")] = "7d",
    site: Annotated[bool, typer.Option("--site", help="Use the site's list instead of your own.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep jobs away from nodes.

    Without NODES, avoided nodes are listed.
    """
    import time

    from hpcrun.specs.badnodes import add_bad_node, bad_node_files, load_bad_nodes, parse_expiry

    files, now = bad_node_files(), time.time()
    if nodes is not None:
        if not reason:
            raise UsageError("--reason is missing; say why, for those who read the list")
        path = files["site" if site else "user"]
        add_bad_node(path, nodes, reason, parse_expiry(until, now), now=now, by=user_name())
        print(path)
        return
    bad_nodes = load_bad_nodes(files.values())
    for line in bad_nodes.notes:
        note(line)
    active = bad_nodes.active(now)
    if as_json:
        print_json(bad=active)
    else:
        print_lines(f"{node}  {why}" for node, why in active.items())


def _print_notes(network: NetworkState) -> None:
    for line in (*network.notes, *network.damaged):
        note(line)


def _print_preview(preview: PlacementPreview) -> None:
    from hpcrun.fabric.draw import render_fabric_tree

    placed, network = preview.placed, preview.network
    print(render_fabric_tree(network.fabric, network.states, placed.placement, placed.spares))
    print_lines(preview.notes)
    print(f"order   {', '.join(placed.placement.nodes)}")
    print(f"method  {placed.method}")
    print_lines(f"why     {line}" for line in placed.why)
    if placed.cost.seconds is not None:
        print(f"cost    {placed.cost.seconds * 1e3:.3g} ms of communication a step, modelled")


app.command("nodes")(lemon_nodes.show_lemon_nodes)
app.command("drain-request")(lemon_nodes.write_drain_request)
