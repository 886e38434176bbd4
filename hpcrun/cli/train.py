"""`hpcrun train`: run a job here and now, or be a rank of it where a launcher has started many of us."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.cli.options import AsJson, CommandWords, make_app, split_job_words
from hpcrun.cli.output import note, print_json
from hpcrun.errors import UsageError
from hpcrun.launch import signal_queue as signals
from hpcrun.launcher_world import World, detect_world

if TYPE_CHECKING:
    from hpcrun.launch.attempt_monitor import AttemptOutcome, RunObserver
    from hpcrun.specs.rundir import RunDir

TAKES_COMMAND = True
"""What follows `--` is the user's command."""

app = make_app()


@app.command()
def train(
    context: typer.Context,
    words: CommandWords = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Resume a run from its newest checkpoint.")
    ] = None,
    print_spec: Annotated[
        bool, typer.Option("--print-spec", help="Print the resolved job and its layout; start nothing.")
    ] = False,
    print_schema: Annotated[
        bool, typer.Option("--print-schema", help="Print the JSON schema of job files, for editors.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a job here and now: hpcrun train job.yaml train.steps=50

    Starts one process per rank of the job's parallel layout and ends when they have; inside a Slurm
    allocation, on its nodes. SIGUSR1 saves; SIGUSR2 and SIGTERM save and stop (exit code 75), as does Ctrl-C
    (130); a second Ctrl-C ends at once. A command after `--` is started once per rank with RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and gets the same signals.
    """
    if print_schema:
        from hpcrun.specs.load import job_schema

        print(json.dumps(job_schema(), indent=2))
        return
    command: list[str] | None = context.obj
    job, overrides = _job_and_overrides(words, resume, command)
    if print_spec:
        signals.unblock_signals()
        _print_spec(job, overrides, resume, command)
        return
    world = detect_world(os.environ, stdin_is_tty=sys.stdin is not None and sys.stdin.isatty())
    if world is not None and command:
        raise UsageError("this is already a rank of a world; start the command itself, without hpcrun")
    if world is not None:
        raise typer.Exit(_run_as_rank(job, overrides, resume, world))
    outcome = _supervise(job, overrides, resume, command)
    if as_json:
        _print_outcome_json(outcome)
    else:
        _print_outcome(outcome)
    if not outcome.result:
        note(outcome.message)
    raise typer.Exit(outcome.exit_code)


def _job_and_overrides(
    words: list[str] | None, resume: str | None, command: list[str] | None
) -> tuple[Path | None, list[str]]:
    job, overrides = split_job_words(words)
    if resume is not None and job is not None:
        raise UsageError(f"{job}: --resume takes the job from the run; give overrides (key=value) only")
    if resume is not None and command:
        raise UsageError("--resume takes the command from the run; leave out what follows `--`")
    if job is None and resume is None and not command:
        raise UsageError("no job file given; write `hpcrun train JOB.yaml [key=value]...`, or --resume RUN")
    return job, overrides


def _print_spec(
    job: Path | None, overrides: list[str], resume: str | None, command: list[str] | None
) -> None:
    from hpcrun.masking import Masker
    from hpcrun.specs.load import render_job
    from hpcrun.specs.run_lookup import find_run
    from hpcrun.submission.prepare import prepare_job

    earlier = find_run(resume, use="plan") if resume is not None else None
    prepared = prepare_job(job, overrides, resume=earlier, until="plan", command=command)
    env, command = Masker().mask_record(prepared.spec.env), prepared.spec.command
    masked = None if command is None else Masker().mask_words(command)
    shown = prepared.spec.model_copy(update={"env": env, "command": masked})
    print(f"{render_job(shown).rstrip()}\n# plan: {Masker().mask(prepared.describe())}")


def _run_as_rank(job: Path | None, overrides: list[str], resume: str | None, world: World) -> int:
    from hpcrun.cli.display import make_display

    signals.unblock_signals()
    with contextlib.ExitStack() as stack:

        def display(steps: int) -> RunObserver:
            shown = make_display(steps)
            stack.callback(shown.close)
            return shown

        if world.kind != "torchrun":
            importlib.import_module("hpcrun.runtime.entry").load_mpi()
        join = importlib.import_module("hpcrun.runtime.rank").join_world
        return int(join(job, overrides, resume, world, display))


def _supervise(
    job: Path | None, overrides: list[str], resume: str | None, command: list[str] | None
) -> AttemptOutcome:
    # Opened before the rest is loaded: from here on a signal is a message.
    with signals.SignalQueue() as inbox:
        from hpcrun.cli.display import make_display
        from hpcrun.launch.run_context import find_run_context
        from hpcrun.launch.supervisor import Supervisor
        from hpcrun.specs.run_lookup import find_run
        from hpcrun.submission.prepare import prepare_job

        earlier = find_run(resume, use="act") if resume is not None else None
        if earlier is not None:
            _refuse_active_run(earlier)
        prepared = prepare_job(job, overrides, resume=earlier, command=command)
        site = find_run_context(prepared.spec.cluster)
        display = make_display(prepared.spec.train.steps if prepared.plan else 0)
        display.note(f"{prepared.spec.name}: {prepared.describe()}")
        with closing(display):
            outcome = Supervisor(prepared, inbox, display, site=site).run()
        # The outcome stands: a late signal must not change the exit code.
        signals.block_signals()
        return outcome


def _refuse_active_run(run: RunDir) -> None:
    """UsageError for a run in Slurm's queue or on its nodes, which would run twice."""
    from hpcrun.runs.run_state import read_run_states

    (state,) = read_run_states([run])
    if state.state in ("queued", "running") and state.job is not None:
        raise UsageError(
            f"{run.id} is {state.state} as job {state.job}; wait for its end, or `hpcrun cancel` it first"
        )


def _print_outcome_json(outcome: AttemptOutcome) -> None:
    print_json(
        run=outcome.run.id,
        path=str(outcome.run.path),
        attempt=outcome.attempt,
        status=outcome.status,
        exit_code=outcome.exit_code,
        message=outcome.message,
        step=outcome.step,
        result=outcome.result or None,
    )


def _print_outcome(outcome: AttemptOutcome) -> None:
    result = outcome.result
    print(f"run   {outcome.run.path}")
    print(f"ended {outcome.status}{'' if outcome.step is None else f' at step {outcome.step}'}")
    if result.get("loss") is not None:
        print(f"loss  {result['loss']:.4f}")
    before, after = result.get("eval_loss_before"), result.get("eval_loss_after")
    if after is not None:
        print(f"eval  {after:.4f}" + (f" (before: {before:.4f})" if before is not None else ""))
    if outcome.status in ("saved", "interrupted") and result:
        from hpcrun.cli.display import command_name

        print(f"resume with: {command_name()} train --resume {outcome.run.id}")
