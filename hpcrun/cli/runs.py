"""`hpcrun list`, `status`, `logs`, `cancel`: runs, seen through their directories."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from hpcrun.cli.display import duration
from hpcrun.launch import runs
from hpcrun.specs.rundir import all_runs, find_run, runs_root

SCHEMA_VERSION = 1

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, a run's id, or its beginning.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def list_runs(as_json: _Json = False) -> None:
    """The runs under HPCRUN_ROOT, oldest first."""
    states = [runs.look_at(run) for run in all_runs()]
    if as_json:
        listed = [state.as_json() for state in states]
        print(json.dumps({"schema_version": SCHEMA_VERSION, "root": str(runs_root()), "runs": listed}))
        return
    if not states:
        print(f"no runs under {runs_root()}")
        return
    rows = [("RUN", "STATE", "ATTEMPT", "STEP", "LOSS", "AGE"), *(_row(state) for state in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(state: runs.RunState) -> tuple[str, ...]:
    step = "-" if state.step is None else str(state.step)
    return (
        state.run.id,
        state.state,
        "-" if state.attempt is None else str(state.attempt),
        step if state.steps is None else f"{step}/{state.steps}",
        "-" if state.loss is None else f"{state.loss:.4f}",
        duration(time.time() - state.changed),
    )


@app.command()
def status(run: _Run, as_json: _Json = False) -> None:
    """What a run is doing, or how it ended."""
    state = runs.look_at(find_run(run))
    if as_json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, **state.as_json()}))
        return
    print(f"run      {state.run.path}")
    print(f"state    {state.state}" + (f": {state.message}" if state.message else ""))
    if state.exit_code is not None:
        print(f"exit     {state.exit_code}")
    if state.host is not None:
        print(f"host     {state.host} (pid {state.pid})")
    if state.attempt is not None:
        print(f"attempt  {state.attempt}")
    if state.step is not None:
        print(f"step     {state.step}" + ("" if state.steps is None else f" of {state.steps}"))
    if state.loss is not None:
        print(f"loss     {state.loss:.4f}")
    if state.eval_loss is not None:
        print(f"eval     {state.eval_loss:.4f}")
    print(f"changed  {duration(time.time() - state.changed)} ago")


@app.command()
def logs(
    run: _Run,
    rank: Annotated[int | None, typer.Option(min=0, help="Which rank; default 0.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt; default the newest.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
) -> None:
    """What a rank has printed."""
    found = find_run(run)
    path = runs.log_path(found, rank, attempt)
    for text in runs.read_log(found, path, follow=follow):
        print(text, end="", flush=follow)


@app.command()
def cancel(
    run: _Run,
    now: Annotated[bool, typer.Option("--now", help="End it at once, without a save.")] = False,
) -> None:
    """Ask a run to save and stop."""
    print(runs.cancel(find_run(run), now=now))
