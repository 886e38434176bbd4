"""`hpcrun submit`: hand a job over to the cluster, or show the script that would be."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_INTERRUPTED, UsageError
from hpcrun.specs.run_lookup import find_run
from hpcrun.specs.rundir import RunDir

SCHEMA_VERSION = 1
TAKES_COMMAND = True
"""What stands behind `--` is the user's program."""

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


_METAVAR = "JOB [key=value]... [-- command ...]"
_Words = Annotated[
    list[str] | None,
    typer.Argument(metavar=_METAVAR, help="A job file, and what to change in it; a program."),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the script; make and submit nothing. Needs no Slurm.")
]
_Version = Annotated[
    str | None, typer.Option(metavar="X", help="With --dry-run: for this release of Slurm, such as 24.05.")
]
_Template = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="Which template; see `hpcrun template list`.")
]
_Cluster = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which profile; the same as cluster=NAME.")
]
_After = Annotated[str | None, typer.Option(metavar="RUN[,RUN]", help="Start when these have ended well.")]
_AfterAny = Annotated[
    str | None, typer.Option(metavar="RUN[,RUN]", help="Start when these have ended, well or not.")
]
_Resume = Annotated[
    str | None, typer.Option(metavar="RUN", help="Submit a run again; it goes on from its newest save.")
]
_OnlyFailed = Annotated[
    bool, typer.Option("--only-failed", help="With --resume of a sweep: what did not end well.")
]
_Follow = Annotated[
    bool, typer.Option("--follow", help="Then follow its log to the end; exit with its code.")
]
_Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Say more, such as what is left out of its environment.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def submit(
    context: typer.Context,
    words: _Words = None,
    dry_run: _DryRun = False,
    slurm_version: _Version = None,
    template: _Template = None,
    cluster: _Cluster = None,
    after: _After = None,
    after_any: _AfterAny = None,
    resume: _Resume = None,
    only_failed: _OnlyFailed = False,
    follow: _Follow = False,
    verbose: _Verbose = False,
    as_json: _Json = False,
) -> None:
    """Submit a job: hpcrun submit job.yaml train.steps=50, or hpcrun submit resources.nodes=2 -- python my.py

    Prints the run's id, which `hpcrun status`, `logs` and `cancel` take. Without Slurm (cluster=local, or no
    sbatch and no profile) the job runs on this machine, in the background. A dry run of what would be
    refused ends with 1.
    """
    if slurm_version is not None and not dry_run:
        raise UsageError("--slurm-version goes with --dry-run: a job is submitted to the Slurm that is here")
    from hpcrun.submission import submit
    from hpcrun.submission.request import SubmissionRequest

    job, overrides = _job_and_overrides(words or [])
    request = SubmissionRequest(
        job=job,
        overrides=_with_cluster(overrides, cluster),
        command=None if context.obj is None else tuple(context.obj),
        resume=None if resume is None else find_run(resume, use="plan" if dry_run else "act"),
        only_failed=only_failed,
        after=_find_runs(after),
        after_any=_find_runs(after_any),
        template=template,
        slurm_version=slurm_version,
    )
    detail = _note if verbose else lambda _: None
    if dry_run:
        shown = submit.dry_run(request, _note, detail)
        if as_json:
            _print_json(shown.as_json())
        else:
            print(shown.script, end="")
        raise typer.Exit(EXIT_CHECK_FAILED if shown.refused else EXIT_DONE)
    done = submit.submit_job(request, _note, detail)
    if as_json:
        _print_json(done.as_json())
    else:
        print(done.run.id, flush=True)
    _note(done.describe())
    if follow:
        # What reads the one JSON object is not to meet the job's log.
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            code = _follow_run(done.run)
        raise typer.Exit(code)


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}), flush=True)


def _with_cluster(overrides: list[str], cluster: str | None) -> tuple[str, ...]:
    if cluster is None:
        return tuple(overrides)
    others = [one for one in overrides if one.startswith("cluster=") and one != f"cluster={cluster}"]
    if others:
        raise UsageError(f"--cluster {cluster}: stands beside {others[0]}; give one of the two")
    return (*overrides, f"cluster={cluster}")


def _job_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    # os.path's look-up says no where pathlib's raises, for instance on a name that is too long.
    names_job = bool(words) and ("=" not in words[0] or os.path.isfile(words[0]))  # noqa: PTH113
    return (Path(words[0]), words[1:]) if names_job else (None, words)


def _find_runs(names: str | None) -> tuple[RunDir, ...]:
    if names is None:
        return ()
    found = tuple(find_run(name.strip()) for name in names.split(",") if name.strip())
    if not found:
        raise UsageError("--after and --after-any take runs, RUN[,RUN]; see `hpcrun list`")
    return found


def _note(text: str) -> None:
    sys.stderr.write("".join(f"hpcrun: {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def _follow_run(run: RunDir) -> int:
    from hpcrun.cli.runs import show_run_output

    try:
        return show_run_output(run)
    except KeyboardInterrupt:
        _note(
            f"the job goes on; `hpcrun logs -f {run.id}` follows it again, `hpcrun cancel {run.id}` stops it"
        )
        return EXIT_INTERRUPTED
