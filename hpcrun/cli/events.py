"""`hpcrun events`, `postmortem`, `save`, `stop`: what happened to a run, and requests to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.cli.options import AsJson, Follow, Run, Runs, Timeout, make_app, parse_timeout
from hpcrun.cli.output import note, print_json, print_lines
from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_SAVED, HpcrunError, UsageError
from hpcrun.specs.run_lookup import find_run, find_runs
from hpcrun.specs.rundir import RunDir

if TYPE_CHECKING:
    from hpcrun.runs.event_text import EventLine

app = make_app()

_Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is done.")]


@app.command()
def events(name: Run, as_json: AsJson = False, follow: Follow = False) -> None:
    """Show a run's event log (-f to follow).

    It lists launches, checkpoints, signals, faults, and how each attempt ended. With --json and -f, each
    event is an object on its own line.
    """
    from hpcrun.runs import event_text

    run = find_run(name)
    if run.sweep.is_file():
        raise UsageError(f"{run.id} is a sweep: name one of its elements, such as {run.id}/0")
    if follow:
        event_text.follow_events(run, _write_json if as_json else _write, note)
        return
    lines = event_text.format_events(run)
    if as_json:
        print_json(run=run.id, events=[vars(line) for line in lines])
        return
    print_lines(lines)
    if not lines:
        note(f"nothing has happened to {run.id} yet")


def _write(entry: EventLine) -> None:
    print(entry, flush=True)


def _write_json(entry: EventLine) -> None:
    print_json(**vars(entry))


@app.command()
def postmortem(
    name: Run,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.tar.gz", help="Archive to write; default: RUN-postmortem.tar.gz."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Collect logs and records of a run into one archive, secrets redacted."""
    from hpcrun.runs.postmortem import write_postmortem

    run = find_run(name)
    bundle = write_postmortem(run, out)
    if as_json:
        print_json(run=run.id, path=str(bundle.path), files=bundle.files, left_out=bundle.left_out)
        return
    for line in bundle.left_out:
        note(f"left out: {line}")
    print(bundle.path)


@app.command()
def save(
    names: Runs,
    wait: _Wait = False,
    timeout: Timeout = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also signal a command that is not hpcrun's, which may end it."),
    ] = False,
) -> None:
    """Ask runs to save at their next step and continue (SIGUSR1)."""
    from hpcrun.runs import requests

    seconds = _wait_timeout(timeout, wait)
    pending: list[requests.SaveRequest] = []

    def request(run: RunDir) -> None:
        pending.append(requests.request_save(run, force=force))
        print_lines(pending[-1].lines)

    code = _for_each_run(names, request)
    if wait:
        saved = [requests.wait_for_saves(each, note, timeout_s=seconds) for each in pending]
        code = max(code, EXIT_DONE if all(saved) else EXIT_CHECK_FAILED)
    raise typer.Exit(code)


@app.command()
def stop(names: Runs, wait: _Wait = False, timeout: Timeout = None) -> None:
    """Ask runs to save and stop; they are not queued again.

    Queued runs are removed from the queue.
    """
    from hpcrun.runs.cancel import cancel_run
    from hpcrun.runs.follow import wait_for_runs

    seconds = _wait_timeout(timeout, wait)
    stopping: list[RunDir] = []

    def request(run: RunDir) -> None:
        print_lines(cancel_run(run))
        stopping.append(run)

    code = _for_each_run(names, request)
    for state in wait_for_runs(stopping, note, timeout_s=seconds) if wait and stopping else ():
        if not state.is_over:
            note(f"not over after {timeout}: {state.run.id}")
            code = max(code, EXIT_CHECK_FAILED)
        elif state.code != EXIT_SAVED:
            code = max(code, state.code)
    raise typer.Exit(code)


def _for_each_run(names: list[str], request: Callable[[RunDir], None]) -> int:
    """Send a request to every run, even after an error; returns the worst exit code."""
    code = EXIT_DONE
    for run in find_runs(names, use="act"):
        try:
            request(run)
        except HpcrunError as error:
            note(str(error))
            code = max(code, error.exit_code)
    return code


def _wait_timeout(timeout: str | None, wait: bool) -> float | None:
    if timeout is not None and not wait:
        raise UsageError("--timeout: is for --wait; give both, or neither")
    return parse_timeout(timeout)
