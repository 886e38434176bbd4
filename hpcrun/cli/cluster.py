"""`hpcrun cluster`: the site's profile: what it says, a first draft of it, whether it still holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.errors import EXIT_CHECK_FAILED, UsageError
from hpcrun.files import write_output

if TYPE_CHECKING:
    from hpcrun.specs.cluster import ClusterSpec

SCHEMA_VERSION = 1

app = typer.Typer(
    no_args_is_help=True,
    help="The cluster's profile: look at it, draft one from a live Slurm, check it.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Name = Annotated[
    str | None, typer.Argument(metavar="NAME|PATH", help="Which profile; without it the default or only one.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Given to each Slurm command.")]


@app.command()
def show(name: _Name = None, as_json: _Json = False) -> None:
    """What a profile says, defaults included; null is what it leaves unsaid."""
    from hpcrun.specs.cluster import render_cluster

    cluster = _find_profile(name)
    if as_json:
        _print_json({"cluster": cluster.model_dump(mode="json")})
    else:
        print(render_cluster(cluster), end="")


@app.command()
def draft(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; default: printed.")] = None,
    slurm_cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another cluster of the federation (-M).")
    ] = None,
    timeout: _Timeout = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: _Json = False,
) -> None:
    """Ask Slurm and write a profile, with comments for what only an admin knows."""
    from hpcrun.slurm.cluster_state import query_cluster
    from hpcrun.slurm.draft import draft_profile

    if out is not None and out.exists() and not force:
        raise UsageError(f"{out}: exists; --force replaces it, --out FILE writes elsewhere")
    live = query_cluster(slurm_cluster, timeout)
    made = draft_profile(live)
    for key, line in live.unknown.items():
        typer.echo(f"hpcrun: {key}: {line}", err=True)
    if out is not None:
        _write(out, made.text)
    if as_json:
        cluster, path = made.cluster.model_dump(mode="json"), None if out is None else str(out)
        _print_json({"cluster": cluster, "text": made.text, "path": path, "unknown": live.unknown})
    else:
        print(made.text if out is None else f"{out}\n", end="")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, text)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; --out FILE writes elsewhere"
        ) from None


@app.command()
def check(name: _Name = None, timeout: _Timeout = 30.0, as_json: _Json = False) -> None:
    """Whether the live cluster still is what the profile says; exit code 1 and a line a difference if not.

    Also whether bash can read the profile's own lines.
    """
    from hpcrun.slurm.cluster_state import query_cluster
    from hpcrun.slurm.draft import find_profile_differences, find_profile_warnings, find_unconfirmed_keys
    from hpcrun.slurm.syntax import find_profile_syntax_errors

    cluster = _find_profile(name)
    broken = [f"{key}: {words}" for key, words in find_profile_syntax_errors(cluster)]
    warnings = find_profile_warnings(cluster)
    live = query_cluster(cluster.slurm_cluster, timeout)
    found, unknown = find_profile_differences(cluster, live), find_unconfirmed_keys(cluster, live)
    wrong = [*broken, *found]
    if as_json:
        told: dict[str, Any] = {"name": cluster.name, "ok": not wrong, "differences": found}
        _print_json(told | {"broken": broken, "warnings": warnings, "unknown": unknown})
    else:
        for line in (*warnings, *(f"not compared: {line}" for line in unknown)):
            typer.echo(f"hpcrun: {line}", err=True)
        print("\n".join(wrong) if wrong else f"{cluster.name}: ok")
    if wrong:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _find_profile(name: str | None) -> ClusterSpec:
    from hpcrun.specs.cluster import find_cluster
    from hpcrun.specs.profiles import config_directories

    cluster = find_cluster(name)
    if cluster is None:
        site = config_directories()["site"] / "profiles" / "NAME.yaml"
        raise UsageError(f"there is no profile yet; `hpcrun cluster draft --out {site}` writes one")
    return cluster


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
