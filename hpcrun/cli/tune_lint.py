"""`hpcrun tune lint` and `tune explain`: what is wrong in an environment, and what a variable means."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.findings import print_findings
from hpcrun.errors import EXIT_CHECK_FAILED, UsageError
from hpcrun.finding import Severity, count_severities

if TYPE_CHECKING:
    from hpcrun.tuning.lint.inputs import LintInput, LintSources
    from hpcrun.tuning.lint.lint import LintReport

SCHEMA_VERSION = 2

_Job = Annotated[
    Path | None,
    typer.Option("--job", metavar="JOB", help="A job file: its env, its profile's, and what hpcrun sets."),
]
_Cluster = Annotated[str | None, typer.Option(metavar="NAME", help="Which profile; default: the job's.")]
_Script = Annotated[Path | None, typer.Option(metavar="FILE", help="A batch script: what it exports.")]
_Conf = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="nccl.conf instead of NCCL_CONF_FILE, ~/.nccl.conf, /etc/nccl.conf."),
]
_Env = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Output of `env` or `env -0` instead of this shell's; several are ranks, and are compared.",
    ),
]
_Container = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The image's environment: lines, or JSON of `docker inspect`."),
]
_Nccl = Annotated[
    str | None, typer.Option(metavar="X", help="For this NCCL, such as 2.27.5; default: the installed one.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def lint(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB [key=value]...]",
            help="A job file: its env, its profile's, and what hpcrun sets for it.",
        ),
    ] = None,
    cluster: _Cluster = None,
    script: _Script = None,
    nccl_conf: _Conf = None,
    env: _Env = None,
    container_env: _Container = None,
    nccl_version: _Nccl = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also list all that is set, and where.")] = False,
    as_json: _Json = False,
) -> None:
    """What is wrong in an environment; exit code 1 when something in it does not do what it says."""
    from hpcrun.tuning.lint.inputs import LintSources
    from hpcrun.tuning.variable_findings import escape_unprintable

    job, overrides = (Path(words[0]), tuple(words[1:])) if words else (None, ())
    gathered, report = _run_lint(
        LintSources(job, overrides, cluster, script, nccl_conf or (), env or (), container_env, nccl_version)
    )
    if as_json:
        _print_json({"nccl": _describe_library(gathered), **report.as_json()})
    else:
        _print_report(gathered, report)
        print_findings(report.findings)
        for line in report.origins() if show_all else ():
            print(escape_unprintable(line))
        print(_format_summary(report))
    if report.has_errors:
        raise typer.Exit(EXIT_CHECK_FAILED)


def explain(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Such as NCCL_IB_TC, or ib_tc.")],
    job: _Job = None,
    cluster: _Cluster = None,
    script: _Script = None,
    nccl_conf: _Conf = None,
    env: _Env = None,
    container_env: _Container = None,
    nccl_version: _Nccl = None,
    as_json: _Json = False,
) -> None:
    """What a variable does, whether this NCCL reads it, its default, effect and risk, and who set it."""
    from hpcrun.tuning.lint.explain import explain_variable as explain_one
    from hpcrun.tuning.lint.inputs import LintSources
    from hpcrun.tuning.variable_findings import escape_unprintable

    gathered, report = _run_lint(
        LintSources(job, (), cluster, script, nccl_conf or (), env or (), container_env, nccl_version)
    )
    found = [explain_one(name, report, gathered.library.version) for name in names]
    if as_json:
        _print_json({"nccl": _describe_library(gathered), "variables": [one.as_json() for one in found]})
        return
    _print_report(gathered, report)
    print("\n\n".join("\n".join(map(escape_unprintable, one.lines())) for one in found))


def _run_lint(sources: LintSources) -> tuple[LintInput, LintReport]:
    from hpcrun.tuning.lint.inputs import gather_lint_input, lint_gathered

    if sources.job is None and sources.cluster is not None:
        raise UsageError("--cluster: says which profile a job has; name the JOB too")
    gathered = gather_lint_input(sources, os.environ)
    return gathered, lint_gathered(gathered)


def _print_report(gathered: LintInput, report: LintReport) -> None:
    library = gathered.library
    if library.library is None:
        typer.echo("hpcrun: which NCCL is used is not known; --nccl-version X says it", err=True)
    else:
        typer.echo(f"hpcrun: {library.library}", err=True)
    for other in library.others:
        typer.echo(f"hpcrun: there is also {other}; NCCL_DEBUG=VERSION prints which is loaded", err=True)
    for line in report.notes:
        typer.echo(f"hpcrun: {line}", err=True)


def _format_summary(report: LintReport) -> str:
    counts = count_severities(report.findings)
    severities: tuple[Severity, ...] = ("error", "warning", "note")
    told = ", ".join(f"{counts[name]} {name}{'' if counts[name] == 1 else 's'}" for name in severities)
    count = len(report.chains)
    return "; ".join([told, f"{count} variable{'' if count == 1 else 's'} looked at", *report.read])


def _describe_library(gathered: LintInput) -> dict[str, Any]:
    from hpcrun.tuning.registry.registry import format_version

    found = gathered.library
    return {
        "version": format_version(found.version) if found.version else None,
        "how": found.library.how if found.library else "",
        "others": [str(one) for one in found.others],
    }


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
