"""`hpcrun tune lint` and `tune explain`: check an environment, explain a variable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.options import AsJson, Cluster, JobWords, NcclVersion
from hpcrun.cli.output import note, print_findings, print_json, print_lines
from hpcrun.errors import EXIT_CHECK_FAILED, UsageError
from hpcrun.finding import Severity, count_severities

if TYPE_CHECKING:
    from hpcrun.tuning.lint.inputs import LintInput, LintSources
    from hpcrun.tuning.lint.lint import LintReport

_Job = Annotated[
    Path | None, typer.Option("--job", metavar="JOB", help="Job file: its env and what hpcrun sets for it.")
]
_Script = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Batch script whose exports are included.")
]
_Conf = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="nccl.conf to read instead of NCCL_CONF_FILE, ~/.nccl.conf and /etc/nccl.conf.",
    ),
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
    typer.Option(metavar="FILE", help="Environment of the image: lines, or JSON of `docker inspect`."),
]


def lint(
    words: JobWords = None,
    cluster: Cluster = None,
    script: _Script = None,
    nccl_conf: _Conf = None,
    env: _Env = None,
    container_env: _Container = None,
    nccl_version: NcclVersion = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also list all that is set, and where.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find mistakes in the variables of NCCL and MPI.

    With a JOB its env, its profile's and what hpcrun sets are checked. Exits with 1 if a variable does not
    do what it says.
    """
    from hpcrun.tuning.lint.inputs import LintSources
    from hpcrun.tuning.variable_findings import escape_unprintable

    job, overrides = (Path(words[0]), tuple(words[1:])) if words else (None, ())
    gathered, report = _run_lint(
        LintSources(job, overrides, cluster, script, nccl_conf or (), env or (), container_env, nccl_version)
    )
    if as_json:
        print_json(nccl=_describe_library(gathered), **report.as_json())
    else:
        _print_report(gathered, report)
        print_findings(report.findings)
        print_lines(map(escape_unprintable, report.origins() if show_all else ()))
        print(_format_summary(report))
    if report.has_errors:
        raise typer.Exit(EXIT_CHECK_FAILED)


def explain(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Variable, such as NCCL_IB_TC or ib_tc.")
    ],
    job: _Job = None,
    cluster: Cluster = None,
    script: _Script = None,
    nccl_conf: _Conf = None,
    env: _Env = None,
    container_env: _Container = None,
    nccl_version: NcclVersion = None,
    as_json: AsJson = False,
) -> None:
    """Explain a variable of NCCL or MPI.

    What it does, whether this NCCL reads it, its default, effect and risk, and where it is set.
    """
    from hpcrun.tuning.lint.explain import explain_variable
    from hpcrun.tuning.lint.inputs import LintSources
    from hpcrun.tuning.variable_findings import escape_unprintable

    gathered, report = _run_lint(
        LintSources(job, (), cluster, script, nccl_conf or (), env or (), container_env, nccl_version)
    )
    variables = [explain_variable(name, report, gathered.library.version) for name in names]
    if as_json:
        print_json(nccl=_describe_library(gathered), variables=[variable.as_json() for variable in variables])
        return
    _print_report(gathered, report)
    print("\n\n".join("\n".join(map(escape_unprintable, variable.lines())) for variable in variables))


def _run_lint(sources: LintSources) -> tuple[LintInput, LintReport]:
    from hpcrun.tuning.lint.inputs import gather_lint_input, lint_gathered

    if sources.job is None and sources.cluster is not None:
        raise UsageError("--cluster: says which profile a job has; name the JOB too")
    gathered = gather_lint_input(sources, os.environ)
    return gathered, lint_gathered(gathered)


def _print_report(gathered: LintInput, report: LintReport) -> None:
    library = gathered.library
    unknown = "the NCCL in use is unknown; --nccl-version X names it"
    note(unknown if library.library is None else str(library.library))
    for other in library.others:
        note(f"there is also {other}; NCCL_DEBUG=VERSION prints which is loaded")
    for line in report.notes:
        note(line)


def _format_summary(report: LintReport) -> str:
    counts = count_severities(report.findings)
    severities: tuple[Severity, ...] = ("error", "warning", "note")
    levels = ", ".join(f"{counts[name]} {name}{'' if counts[name] == 1 else 's'}" for name in severities)
    count = len(report.chains)
    return "; ".join([levels, f"{count} variable{'' if count == 1 else 's'} looked at", *report.read])


def _describe_library(gathered: LintInput) -> dict[str, Any]:
    from hpcrun.tuning.registry.registry import format_version

    choice = gathered.library
    return {
        "version": format_version(choice.version) if choice.version else None,
        "how": choice.library.how if choice.library else "",
        "others": [str(library) for library in choice.others],
    }
