"""`hpcrun events`, `postmortem`, `save`, `stop`: the story of a run, and what one may ask of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_SAVED, HpcrunError, UsageError
from hpcrun.specs.run_lookup import find_run, find_runs
from hpcrun.specs.rundir import RunDir

if TYPE_CHECKING:
    from hpcrun.runs.event_text import EventLine

SCHEMA_VERSION = 1

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

_NAMES = "A run's id or its beginning, a run directory, a Slurm job id; RUN/3 is an element of a sweep."
_Run = Annotated[str, typer.Argument(metavar="RUN", help=_NAMES)]
_Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help=_NAMES)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object, with -f one a line.")]
_Timeout = Annotated[
    str | None, typer.Option(help="Wait no longer than this, such as 10m; the exit code is 1.")
]


@app.command()
def events(
    name: _Run,
    as_json: _Json = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run is over.")] = False,
) -> None:
    """What happened to a run: launches, saves, signals, faults, and how each attempt ended."""
    from hpcrun.runs import event_text

    run = find_run(name)
    if run.sweep.is_file():
        raise UsageError(f"{run.id} is a sweep: name one of its elements, such as {run.id}/0")
    if follow:
        event_text.follow_events(run, _write_json if as_json else _write, _note)
        return
    found = event_text.format_events(run)
    if as_json:
        print(_dump(run=run.id, events=[vars(entry) for entry in found]))
        return
    for entry in found:
        print(entry)
    if not found:
        _note(f"nothing has happened to {run.id} yet")


def _write(entry: EventLine) -> None:
    print(entry, flush=True)


def _write_json(entry: EventLine) -> None:
    print(_dump(**vars(entry)), flush=True)


@app.command()
def postmortem(
    name: _Run,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.tar.gz", help="Default: RUN-postmortem.tar.gz here.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Put what an engineer asks for into one tar: records, logs, the story; secrets are masked."""
    from hpcrun.runs.postmortem import write_postmortem as write_bundle

    run = find_run(name)
    bundle = write_bundle(run, out)
    if as_json:
        print(_dump(run=run.id, path=str(bundle.path), files=bundle.files, left_out=bundle.left_out))
        return
    for line in bundle.left_out:
        _note(f"left out: {line}")
    print(bundle.path)


@app.command()
def save(
    names: _Runs,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has saved.")] = False,
    timeout: _Timeout = None,
    force: Annotated[
        bool, typer.Option("--force", help="Signal also a program of one's own, which may end it.")
    ] = False,
) -> None:
    """Ask runs to save at their next step and go on (SIGUSR1)."""
    from hpcrun.runs import requests

    seconds = _parse_timeout(timeout, wait)
    asked: list[requests.SaveRequest] = []

    def ask_one(run: RunDir) -> None:
        asked.append(requests.request_save(run, force=force))
        for line in asked[-1].lines:
            print(line, flush=True)

    code = _for_each_run(names, ask_one)
    if wait:
        saved = [requests.wait_for_saves(one, _note, timeout_s=seconds) for one in asked]
        code = max(code, EXIT_DONE if all(saved) else EXIT_CHECK_FAILED)
    raise typer.Exit(code)


@app.command()
def stop(
    names: _Runs,
    wait: Annotated[bool, typer.Option("--wait", help="Until it is over.")] = False,
    timeout: _Timeout = None,
) -> None:
    """Ask runs to save and stop; they are not queued again. What waits is taken out of the queue."""
    from hpcrun.runs import requests
    from hpcrun.runs.follow import wait_for_runs as wait_for

    seconds = _parse_timeout(timeout, wait)
    asked: list[RunDir] = []

    def ask_one(run: RunDir) -> None:
        for line in requests.request_stop(run):
            print(line, flush=True)
        asked.append(run)

    code = _for_each_run(names, ask_one)
    for state in wait_for(asked, _note, timeout_s=seconds) if wait and asked else ():
        if not state.is_over:
            _note(f"not over after {timeout}: {state.run.id}")
            code = max(code, EXIT_CHECK_FAILED)
        elif state.code != EXIT_SAVED:
            code = max(code, state.code)
    raise typer.Exit(code)


def _for_each_run(names: list[str], ask_one: Callable[[RunDir], None]) -> int:
    """Ask every run, whatever becomes of those before; the worst exit code."""
    code = EXIT_DONE
    for run in find_runs(names, use="act"):
        try:
            ask_one(run)
        except HpcrunError as error:
            _note(str(error))
            code = max(code, error.exit_code)
    return code


def _parse_timeout(timeout: str | None, wait: bool) -> float | None:
    if timeout is None:
        return None
    if not wait:
        raise UsageError("--timeout: is for --wait; give both, or neither")
    from hpcrun.units import parse_time

    return parse_time(timeout, "--timeout").seconds


def _dump(**values: Any) -> str:
    return json.dumps({"schema_version": SCHEMA_VERSION, **values})


def _note(text: str) -> None:
    sys.stderr.write(f"hpcrun: {text}\n")
    sys.stderr.flush()
