"""How verbs are declared: their Typer app, and the arguments and options that several of them take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hpcrun.errors import UsageError


def make_app(help_text: str | None = None) -> typer.Typer:
    """A Typer app of one verb, or with a help text of several."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=help_text is not None,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
    )


_RUN_HELP = "Run id or its beginning, run directory, or Slurm job id; RUN/3 is a sweep's element."
_SAVES_HELP = "Run, or the directory of a script's checkpoints."
_JOB_HELP = "Job file, and keys to override."

Run = Annotated[str, typer.Argument(metavar="RUN", help=_RUN_HELP)]
Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help=_RUN_HELP)]
OptionalRuns = Annotated[list[str] | None, typer.Argument(metavar="RUN...", help=_RUN_HELP)]
SavesRun = Annotated[str, typer.Argument(metavar="RUN", help=_SAVES_HELP)]
JobWords = Annotated[list[str] | None, typer.Argument(metavar="JOB [KEY=VALUE]...", help=_JOB_HELP)]
CommandWords = Annotated[
    list[str] | None, typer.Argument(metavar="JOB [KEY=VALUE]... [-- COMMAND...]", help=_JOB_HELP)
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Follow until the run is over.")]
Timeout = Annotated[
    str | None, typer.Option(metavar="TIME", help="Give up after this time, such as 90m; exit code 1.")
]
IsOver = Annotated[
    bool,
    typer.Option("--is-over", help="Treat the run as finished even if its state cannot be determined."),
]
Step = Annotated[int | None, typer.Option(metavar="N", help="Step of the checkpoint; default: newest.")]
AnyStep = Annotated[int | None, typer.Option(metavar="N", help="Step of the checkpoint; default: all.")]
Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="Object store; default: the job's.")]
Endpoint = Annotated[
    str | None, typer.Option(metavar="URL", help="Endpoint of a store other than AWS; default: the job's.")
]
Cluster = Annotated[
    str | None, typer.Option(metavar="NAME", help="Cluster profile; default: the job's or the default one.")
]
Topology = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Captured topology instead of the live one: `scontrol show topology`, topology.conf,"
        " topology.yaml or ibnetdiscover.",
    ),
]
NcclVersion = Annotated[
    str | None, typer.Option(metavar="X", help="NCCL release, such as 2.27.5; default: the installed one.")
]
SlurmVersion = Annotated[str | None, typer.Option(metavar="X", help="Slurm release, such as 24.05.")]


def split_job_words(words: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """The job file, if one is named, and the overrides."""
    given = list(words or ())
    # os.path's look-up says no where pathlib's raises, for instance on a name that is too long.
    names_job = bool(given) and ("=" not in given[0] or os.path.isfile(given[0]))  # noqa: PTH113
    return (Path(given[0]), given[1:]) if names_job else (None, given)


def parse_timeout(timeout: str | None) -> float | None:
    """Seconds of --timeout."""
    from hpcrun.units import parse_time

    return None if timeout is None else parse_time(timeout, "--timeout").seconds


def parse_name(text: str, option: str, names: Sequence[str]) -> str:
    """The name among `names` that an option gives, whatever its case; UsageError for others."""
    plain = text.lower().replace("_", "").replace("-", "")
    if plain not in names:
        raise UsageError(f"{option} {text}: is not known; use {', '.join(names)}")
    return plain
