"""`hpcrun tune advise`, `checklist`, `uptake`: settings with reasons, what admins check, what came of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, UsageError

if TYPE_CHECKING:
    from hpcrun.specs.settings import CommSettings

SCHEMA_VERSION = 1

_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB [key=value]... [-- command ...]", help="A job file, and what to change in it."
    ),
]
_Cluster = Annotated[str | None, typer.Option(metavar="NAME", help="Which profile; default: the job's.")]
_Nccl = Annotated[
    str | None, typer.Option(metavar="X", help="For this NCCL, such as 2.19.3; default: the installed one.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def advise(
    context: typer.Context,
    words: _Words = None,
    cluster: _Cluster = None,
    nccl_version: _Nccl = None,
    as_json: _Json = False,
) -> None:
    """The few communication settings that a job should have, each with its reason; submit sets the same."""
    from hpcrun.specs.cluster import find_cluster
    from hpcrun.specs.load import load_job
    from hpcrun.tuning.job_settings import preview_job_settings
    from hpcrun.tuning.registry.registry import parse_version

    given = words or []
    names_job = bool(given) and "=" not in given[0]
    if not names_job and not given and context.obj is None:
        raise UsageError("no job file given; write `hpcrun tune advise JOB.yaml [key=value]...`")
    path, overrides = (Path(given[0]), given[1:]) if names_job else (None, given)
    spec = load_job(path, overrides, command=context.obj).spec
    name = cluster or spec.cluster
    version = None if nccl_version is None else parse_version(nccl_version)
    profile = None if name == "local" else find_cluster(None if name == "default" else name)
    settings = preview_job_settings(spec, profile, os.environ, version)
    if as_json:
        _print_json(settings.as_json())
    else:
        _print_settings(settings)


def _print_settings(settings: CommSettings) -> None:
    for one in settings.everywhere:
        print(one)
    for node, of in settings.by_node.items():
        print(f"on {node} alone:")
        for one in of:
            print(f"  {one}")
    for lost in settings.overruled:
        print(f"# {lost}")
    for note in settings.notes:
        print(f"# {note}")


def checklist(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="A kind of fabric; without one: which there are.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """What an admin checks on a kind of fabric: PFC, ECN, CNP, trust, MTU; to review, never applied."""
    from hpcrun.tuning.fabrics import find_fabric_kind, load_fabric_kinds, render_fabric_checklist

    if kind is None:
        if as_json:
            _print_json({"kinds": {name: one.title for name, one in load_fabric_kinds().items()}})
            return
        width = max(map(len, load_fabric_kinds()))
        for name, one in load_fabric_kinds().items():
            print(f"{name:{width}}  {one.title}")
        return
    text = render_fabric_checklist(find_fabric_kind(kind))
    if as_json:
        _print_json({"kind": kind, "text": text})
    else:
        print(text, end="")


def uptake(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run; its newest attempt is looked at.")],
    as_json: _Json = False,
) -> None:
    """Which of a run's settings were taken up, by the lines of its logs; 1 where one was ignored."""
    from hpcrun.specs.run_lookup import find_run
    from hpcrun.specs.settings import read_comm_settings
    from hpcrun.tuning.log.applied_settings import check_applied_settings

    attempts = find_run(run).attempts()
    settings = read_comm_settings(attempts[-1].settings) if attempts else None
    if settings is None:
        raise UsageError(f"{run}: no attempt of it has settings on record; it may not have started yet")
    logs = sorted((attempts[-1].path / "logs").glob("rank-*.log"))
    found = check_applied_settings(
        settings, "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    )
    if as_json:
        _print_json({"attempt": attempts[-1].number, "uptake": [one.as_json() for one in found]})
    else:
        for one in found:
            where = f" on {one.node}" if one.node else ""
            print(f"{one.verdict:8} {one.name}={one.value}{where}\n         {one.line}")
        if not found:
            print("nothing was set")
    raise typer.Exit(EXIT_CHECK_FAILED if any(one.verdict == "ignored" for one in found) else EXIT_DONE)


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
