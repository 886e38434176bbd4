"""`hpcrun tune advise`, `checklist`, `uptake`: settings with reasons, what admins check, what took effect."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.cli.options import AsJson, Cluster, CommandWords, NcclVersion, Run, split_job_words
from hpcrun.cli.output import print_json, print_lines, print_table
from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, UsageError

if TYPE_CHECKING:
    from hpcrun.specs.settings import CommSettings


def advise(
    context: typer.Context,
    words: CommandWords = None,
    cluster: Cluster = None,
    nccl_version: NcclVersion = None,
    as_json: AsJson = False,
) -> None:
    """Print the communication settings a job should have.

    Each comes with its reason; `hpcrun submit` sets the same.
    """
    from hpcrun.specs.cluster import find_cluster
    from hpcrun.specs.load import load_job
    from hpcrun.tuning.job_settings import preview_job_settings
    from hpcrun.tuning.registry.registry import parse_version

    if not words and context.obj is None:
        raise UsageError("no job file given; write `hpcrun tune advise JOB.yaml [key=value]...`")
    job, overrides = split_job_words(words)
    spec = load_job(job, overrides, command=context.obj).spec
    name = cluster or spec.cluster
    version = None if nccl_version is None else parse_version(nccl_version)
    profile = None if name == "local" else find_cluster(None if name == "default" else name)
    settings = preview_job_settings(spec, profile, os.environ, version)
    if as_json:
        print_json(**settings.as_json())
    else:
        _print_settings(settings)


def _print_settings(settings: CommSettings) -> None:
    print_lines(settings.everywhere)
    for node, own in settings.by_node.items():
        print(f"on {node} only:")
        print_lines(f"  {setting}" for setting in own)
    print_lines(f"# {line}" for line in (*settings.overruled, *settings.notes))


def checklist(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="Kind of fabric; default: list the kinds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what an admin checks on a kind of fabric.

    It covers PFC, ECN, CNP, trust and MTU; it is for review, nothing is applied.
    """
    from hpcrun.tuning.fabrics import find_fabric_kind, load_fabric_kinds, render_fabric_checklist

    if kind is None:
        titles = {name: fabric.title for name, fabric in load_fabric_kinds().items()}
        if as_json:
            print_json(kinds=titles)
        else:
            print_table([*titles.items()])
        return
    text = render_fabric_checklist(find_fabric_kind(kind))
    if as_json:
        print_json(kind=kind, text=text)
    else:
        print(text, end="")


def uptake(run: Run, as_json: AsJson = False) -> None:
    """Show which settings of a run's newest attempt took effect.

    Reads the lines of its logs. Exits with 1 if a setting was ignored.
    """
    from hpcrun.specs.run_lookup import find_run
    from hpcrun.specs.settings import read_comm_settings
    from hpcrun.tuning.log.applied_settings import check_applied_settings

    attempts = find_run(run).attempts()
    settings = read_comm_settings(attempts[-1].settings) if attempts else None
    if settings is None:
        raise UsageError(f"{run}: no attempt of it has settings on record; it may not have started yet")
    logs = sorted((attempts[-1].path / "logs").glob("rank-*.log"))
    results = check_applied_settings(
        settings, "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    )
    if as_json:
        print_json(attempt=attempts[-1].number, uptake=[result.as_json() for result in results])
    else:
        for result in results:
            node = f" on {result.node}" if result.node else ""
            print(f"{result.verdict:8} {result.name}={result.value}{node}\n         {result.line}")
        if not results:
            print("nothing was set")
    is_ignored = any(result.verdict == "ignored" for result in results)
    raise typer.Exit(EXIT_CHECK_FAILED if is_ignored else EXIT_DONE)
