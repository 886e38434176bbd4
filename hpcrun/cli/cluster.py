"""`hpcrun cluster`: show a cluster profile, draft one, compare it with the live Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.cli.options import AsJson, Force, make_app
from hpcrun.cli.output import note, print_json, print_lines, write_file
from hpcrun.errors import EXIT_CHECK_FAILED, UsageError

if TYPE_CHECKING:
    from hpcrun.specs.cluster import ClusterSpec

app = make_app("Show a cluster profile, draft one from a live Slurm, check it.")

_Name = Annotated[
    str | None, typer.Argument(metavar="NAME|PATH", help="Profile; default: the default or only one.")
]
_Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Time limit of a Slurm command.")]


@app.command()
def show(name: _Name = None, as_json: AsJson = False) -> None:
    """Print a profile with its defaults; null means unset."""
    from hpcrun.specs.cluster import render_cluster

    cluster = _find_profile(name)
    if as_json:
        print_json(cluster=cluster.model_dump(mode="json"))
    else:
        print(render_cluster(cluster), end="")


@app.command()
def draft(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: standard output.")
    ] = None,
    slurm_cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another cluster of the federation (-M).")
    ] = None,
    timeout: _Timeout = 30.0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a profile from what Slurm reports.

    Comments mark what only an administrator knows.
    """
    from hpcrun.slurm.cluster_state import query_cluster
    from hpcrun.slurm.draft import draft_profile

    if out is not None and out.exists() and not force:
        raise UsageError(f"{out}: exists; --force replaces it, --out FILE writes elsewhere")
    state = query_cluster(slurm_cluster, timeout)
    profile = draft_profile(state)
    for key, line in state.unknown.items():
        note(f"{key}: {line}")
    if out is not None:
        write_file(out, profile.text, "--out FILE writes elsewhere", parents=True)
    if as_json:
        cluster, path = profile.cluster.model_dump(mode="json"), None if out is None else str(out)
        print_json(cluster=cluster, text=profile.text, path=path, unknown=state.unknown)
    else:
        print(profile.text if out is None else f"{out}\n", end="")


@app.command()
def check(name: _Name = None, timeout: _Timeout = 30.0, as_json: AsJson = False) -> None:
    """Compare a profile with the live cluster.

    Prints a line per difference and exits with 1 if there is one. Also checks that bash can parse the
    profile's shell lines.
    """
    from hpcrun.slurm.cluster_state import query_cluster
    from hpcrun.slurm.draft import find_profile_differences, find_profile_warnings, find_unconfirmed_keys
    from hpcrun.slurm.syntax import find_profile_syntax_errors

    cluster = _find_profile(name)
    broken = [f"{key}: {text}" for key, text in find_profile_syntax_errors(cluster)]
    warnings = find_profile_warnings(cluster)
    state = query_cluster(cluster.slurm_cluster, timeout)
    differences, unknown = find_profile_differences(cluster, state), find_unconfirmed_keys(cluster, state)
    is_ok = not (broken or differences)
    if as_json:
        print_json(
            name=cluster.name,
            ok=is_ok,
            differences=differences,
            broken=broken,
            warnings=warnings,
            unknown=unknown,
        )
    else:
        for line in (*warnings, *(f"not compared: {line}" for line in unknown)):
            note(line)
        print_lines([*broken, *differences], f"{cluster.name}: ok")
    if not is_ok:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _find_profile(name: str | None) -> ClusterSpec:
    from hpcrun.specs.cluster import find_cluster
    from hpcrun.specs.profiles import config_directories

    cluster = find_cluster(name)
    if cluster is None:
        site = config_directories()["site"] / "profiles" / "NAME.yaml"
        raise UsageError(f"there is no profile yet; `hpcrun cluster draft --out {site}` writes one")
    return cluster
