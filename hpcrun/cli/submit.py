"""`hpcrun submit`: submit a job to the cluster, or show the script that would be submitted."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from hpcrun.cli.options import (
    AsJson,
    Cluster,
    CommandWords,
    DryRun,
    SlurmVersion,
    make_app,
    split_job_words,
)
from hpcrun.cli.output import note, print_json
from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_INTERRUPTED, UsageError
from hpcrun.specs.run_lookup import find_run
from hpcrun.specs.rundir import RunDir

TAKES_COMMAND = True
"""What follows `--` is the user's command."""

app = make_app()

_Template = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="Template; see `hpcrun template list`.")
]
_After = Annotated[
    str | None, typer.Option(metavar="RUN[,RUN]", help="Start after these runs have ended well.")
]
_AfterAny = Annotated[str | None, typer.Option(metavar="RUN[,RUN]", help="Start after these have ended.")]
_Resume = Annotated[
    str | None, typer.Option(metavar="RUN", help="Submit a run again, from its newest checkpoint.")
]
_OnlyFailed = Annotated[
    bool, typer.Option("--only-failed", help="With --resume on a sweep: rerun only failed elements.")
]
_Follow = Annotated[
    bool, typer.Option("--follow", help="Then follow its log to the end; exit with its code.")
]
_Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Print more, such as what its environment leaves out.")
]


@app.command()
def submit(
    context: typer.Context,
    words: CommandWords = None,
    dry_run: DryRun = False,
    slurm_version: SlurmVersion = None,
    template: _Template = None,
    cluster: Cluster = None,
    after: _After = None,
    after_any: _AfterAny = None,
    resume: _Resume = None,
    only_failed: _OnlyFailed = False,
    follow: _Follow = False,
    verbose: _Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job: hpcrun submit job.yaml train.steps=50

    With a command: hpcrun submit resources.nodes=2 -- python my.py. Prints the run id, which `hpcrun status`,
    `logs` and `cancel` take. Without Slurm (cluster=local, or no sbatch and no profile) the job runs on this
    machine, in the background. --dry-run prints the script, needs no Slurm, and exits with 1 if the job would
    be refused.
    """
    if slurm_version is not None and not dry_run:
        raise UsageError("--slurm-version goes with --dry-run: a job is submitted to the Slurm that is here")
    from hpcrun.submission import submit
    from hpcrun.submission.request import SubmissionRequest

    job, overrides = split_job_words(words)
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
    detail = note if verbose else lambda _: None
    if dry_run:
        shown = submit.dry_run(request, note, detail)
        if as_json:
            print_json(**shown.as_json())
        else:
            print(shown.script, end="")
        raise typer.Exit(EXIT_CHECK_FAILED if shown.refused else EXIT_DONE)
    result = submit.submit_job(request, note, detail)
    if as_json:
        print_json(**result.as_json())
    else:
        print(result.run.id, flush=True)
    note(result.describe())
    if follow:
        # A reader of the JSON object must not get the job's log.
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            code = _follow_run(result.run)
        raise typer.Exit(code)


def _with_cluster(overrides: list[str], cluster: str | None) -> tuple[str, ...]:
    if cluster is None:
        return tuple(overrides)
    others = [word for word in overrides if word.startswith("cluster=") and word != f"cluster={cluster}"]
    if others:
        raise UsageError(f"--cluster {cluster}: contradicts {others[0]}; give one of the two")
    return (*overrides, f"cluster={cluster}")


def _find_runs(names: str | None) -> tuple[RunDir, ...]:
    if names is None:
        return ()
    runs = tuple(find_run(name.strip()) for name in names.split(",") if name.strip())
    if not runs:
        raise UsageError("--after and --after-any take runs, RUN[,RUN]; see `hpcrun list`")
    return runs


def _follow_run(run: RunDir) -> int:
    from hpcrun.cli.runs import show_run_output

    try:
        return show_run_output(run)
    except KeyboardInterrupt:
        note(f"the job continues; `hpcrun logs -f {run.id}` follows it, `hpcrun cancel {run.id}` stops it")
        return EXIT_INTERRUPTED
