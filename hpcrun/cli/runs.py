"""`hpcrun list`, `status`, `describe`, `wait`, `logs`, `cancel`: runs, seen through their directories."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcrun.cli.display import LineDisplay, format_short_duration
from hpcrun.cli.terminal import escape_to_one_line, write_log
from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, HpcrunError, UsageError
from hpcrun.runs import run_state
from hpcrun.specs.run_lookup import all_runs, find_run, find_runs, runs_roots
from hpcrun.specs.rundir import RunDir

SCHEMA_VERSION = 1
_MAX_QUICK_LEDGER_BYTES = 32 * 2**20
"""Metrics of more than this, some eighty thousand steps, take seconds to read."""

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

_NAMES = "A run's id or its beginning, a run directory, a Slurm job id; RUN/3 is an element of a sweep."
_Run = Annotated[str, typer.Argument(metavar="RUN", help=_NAMES)]
_Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help=_NAMES)]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def list_runs(
    states: Annotated[list[str] | None, typer.Option("--state", help="Only runs in this state.")] = None,
    as_json: _Json = False,
) -> None:
    """The runs under the root (HPCRUN_ROOT, the profile's, ./runs), oldest first."""
    for state in states or ():
        if state not in run_state.RUN_STATES:
            raise UsageError(f"--state: {state!r} is no state; there are {', '.join(run_state.RUN_STATES)}")
    found = [one for one in run_state.read_run_states(list(all_runs())) if not states or one.state in states]
    root = ", ".join(map(str, runs_roots()))
    if as_json:
        _print_json(root=root, runs=[one.as_json() for one in found])
    elif found:
        _print_table(
            ("RUN", "STATE", "JOB", "ATTEMPT", "STEP", "LOSS", "AGE"), [_list_row(one) for one in found]
        )
    else:
        print(f"no runs {'in this state ' if states else ''}under {root}")


def _list_row(state: run_state.RunState) -> tuple[str, ...]:
    return (
        state.run.id,
        _format_element_counts(state) or state.shown,
        state.job or "-",
        _or_dash(state.attempt),
        _format_step(state),
        _format_loss(state.loss),
        _format_age(state),
    )


@app.command()
def status(
    names: Annotated[list[str] | None, typer.Argument(metavar="RUN...", help=_NAMES)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run that is not over.")] = False,
    as_json: _Json = False,
) -> None:
    """What runs are doing, or how they ended; of a sweep, the results of its elements."""
    if bool(names) == everything:
        raise UsageError("status: name a run, or several, or give --all; `hpcrun list` shows the runs")
    chosen = list(all_runs()) if everything else find_runs(names or ())
    if len(chosen) == 1 and not everything:
        _show_one(chosen[0], as_json)
        return
    found = [one for one in run_state.read_run_states(chosen) if not (everything and one.is_over)]
    if as_json:
        _print_json(runs=[one.as_json() for one in found])
    elif found:
        rows = [
            (
                one.run.id,
                _format_element_counts(one) or one.shown,
                one.job or "-",
                _format_step(one),
                one.message.partition("\n")[0],
            )
            for one in found
        ]
        _print_table(("RUN", "STATE", "JOB", "STEP", "WHY"), rows)
    else:
        print("every run is over")


def _show_one(run: RunDir, as_json: bool) -> None:
    if run.sweep.is_file():
        _show_sweep(run, as_json)
        return
    state = run_state.with_slurm_state(run_state.read_run_states([run])[0])
    if as_json:
        from hpcrun.runs.describe import compute_run_ledger

        _print_json(**state.as_json(), ledger=compute_run_ledger(state).as_json())
        return
    _print_facts(
        run=run.path,
        state=_format_message(state),
        exit=state.exit_code,
        job=_format_job(state),
        nodes=state.nodes,
        host=f"{state.host} (pid {state.pid})" if state.host else None,
        attempt=state.attempt,
        replicas=f"{state.replicas} of {state.whole_replicas}" if state.replicas else None,
        step=None if state.step is None else _format_step(state).replace("/", " of "),
        loss=None if state.loss is None else _format_loss(state.loss),
        eval=None if state.eval_loss is None else _format_loss(state.eval_loss),
        **_quick_ledger_facts(state),
        changed=f"{_format_age(state)} ago",
    )


def _quick_ledger_facts(state: run_state.RunState) -> dict[str, str]:
    """Faults, spares and goodput, where reading every step is a matter of a moment."""
    if _file_size(state.run.metrics) > _MAX_QUICK_LEDGER_BYTES:
        return {"goodput": f"of so many steps takes a while to add up; see hpcrun describe {state.run.id}"}
    from hpcrun.runs.describe import compute_run_ledger, read_checkpoint_stats

    ledger = compute_run_ledger(state)
    told = {"saves": "; ".join(read_checkpoint_stats(state.run).lines())}
    told |= {"faults": ", ".join(f"{count} {cause}" for cause, count in ledger.causes.items())}
    if ledger.spares_left is not None:
        told["spares"] = f"{ledger.spares_left} left"
    if ledger.goodput is not None:
        lost = ", ".join(f"{name} {_format_seconds(seconds)}" for name, seconds in ledger.losses())
        told["goodput"] = f"{ledger.goodput:.1%}" + (f"; lost to {lost}" if lost else "")
    return told


def _format_seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else format_short_duration(value)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _show_sweep(run: RunDir, as_json: bool) -> None:
    from hpcrun.runs.describe import read_sweep_results

    table = read_sweep_results(run)
    whole = run_state.summarize_sweep(run, [state for _, state in table])
    if as_json:
        results = [{"overrides": changes, **state.as_json()} for changes, state in table]
        _print_json(**whole.as_json(), results=results)
        return
    _print_facts(run=run.path, state=whole.message, job=_format_job(whole))
    rows = [
        (
            state.run.path.name,
            " ".join(f"{key}={value}" for key, value in changes.items()),
            state.shown,
            _format_step(state),
            _format_loss(state.loss),
            _format_loss(state.eval_loss),
            state.message.partition("\n")[0],
        )
        for changes, state in table
    ]
    print()
    _print_table(("ELEMENT", "OVERRIDES", "STATE", "STEP", "LOSS", "EVAL LOSS", "WHY"), rows)


@app.command()
def describe(name: _Run, as_json: _Json = False) -> None:
    """Everything that is known of a run: its origin, files, jobs, attempts and saves."""
    from hpcrun.runs.describe import describe_run

    told, ledger = describe_run(find_run(name))
    if as_json:
        _print_json(**told, ledger=ledger.as_json())
        return
    _print_facts(**_description_rows(told))
    for one in told["attempts"]:
        print(_format_attempt(one))
    for line in ledger.lines() if ledger.attempts else ():
        print(line)


def _format_attempt(one: dict[str, Any]) -> str:
    where = f" on {one['host']}" if one["host"] else ""
    job = f", job {one['slurm_job']} (restart {one['restarts']})" if one["slurm_job"] else ""
    few = f", {one['replicas']['there']} of {one['replicas']['whole']} replicas" if one["replicas"] else ""
    again = f", queued again ({one['requeued']})" if one["requeued"] else ""
    again = f", relaunched ({one['relaunched']})" if one["relaunched"] else again
    why = f": {one['message']}" if one["message"] else ""
    return f"attempt {one['attempt']}{where}{job}{few}: {one['status']}{why}{again}; {one['logs']}"


def _description_rows(told: dict[str, Any]) -> dict[str, Any]:
    """What there is to tell, under the words that people read."""
    origin = told["origin"] or {}
    slurm = f" (Slurm says {told['slurm_state']})" if told["slurm_state"] else ""
    state = f"{told['state']}{slurm}" + (f": {told['message']}" if told["message"] else "")
    facts = {"run": told["path"], "state": state, "exit": told["exit_code"], "nodes": told["nodes"]}
    facts |= {
        "start": told["start"],
        "after": ", ".join(told["after"]),
        "overrides": _format_pairs(told["overrides"]),
    }
    if origin:
        dirty = " and changes of its own, see code difference" if origin["is_dirty"] else ""
        facts |= {
            "kind": f"{origin['kind']} of {origin['ranks']} rank{'s' * (origin['ranks'] != 1)}",
            "made": f"{_format_time(origin['created'])} by {origin['user']} on {origin['host']}",
            "directory": origin["directory"],
            "command": shlex.join(origin["argv"]),
            "code": f"commit {origin['commit']}{dirty}" if origin["commit"] else "not in a git repository",
            "versions": f"hpcrun {origin['hpcrun']}, python {origin['python']}",
            "cluster": origin["cluster"],
            "template": origin["template"],
            "environment": _format_pairs(origin["inputs"]),
            "submitted": "; ".join(_format_submission(one) for one in origin["submissions"]),
        }
    files = {
        name: value if isinstance(value, str) else ", ".join(value) for name, value in told["files"].items()
    }
    saved = ", ".join(f"step {step}" for step in told["saved_steps"])
    return facts | files | {"saved": saved, "levels": "; ".join(told["save_lines"])}


def _format_submission(one: dict[str, Any]) -> str:
    what = f"job {one['job']}" if one["job"] is not None else f"pid {one['pid']} on {one['host']}"
    cluster = f" on {one['cluster']}" if one["cluster"] else ""
    array = f" as array {one['array']}" if one["array"] else ""
    return f"{what}{cluster}{array}, {_format_time(one['time'])}"


@app.command()
def wait(
    names: _Runs,
    timeout: Annotated[
        str | None, typer.Option(help="Give up after this time, such as 90m or 2h; the exit code is 1.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Wait until runs are over; the exit code is the run's, of several the worst."""
    from hpcrun.runs import follow
    from hpcrun.units import parse_time

    seconds = None if timeout is None else parse_time(timeout, "--timeout").seconds
    found = follow.wait_for_runs(find_runs(names), _note, timeout_s=seconds)
    if as_json:
        _print_json(runs=[one.as_json() for one in found])
    if ahead := [one.run.id for one in found if not one.is_over]:
        _note(f"not over after {timeout}: {', '.join(ahead)}")
        raise typer.Exit(EXIT_CHECK_FAILED)
    raise typer.Exit(run_state.worst_exit_code(one.code for one in found))


@app.command()
def logs(
    name: _Run,
    rank: Annotated[int | None, typer.Option(min=0, help="Which rank; default 0.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt; default the newest.")] = None,
    element: Annotated[int | None, typer.Option(min=0, help="Which element of a sweep.")] = None,
    batch: Annotated[bool, typer.Option("--batch", help="What the batch shell has printed.")] = False,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Wait for it to start, go on until the run is over.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """What a rank has printed."""
    from hpcrun.runs import follow as following

    if follow and as_json:
        raise UsageError("logs: --json prints what there is now, as one object; leave out --follow or --json")
    run = find_run(name if element is None else f"{name.rstrip('/')}/{element}")
    if run.sweep.is_file():
        raise UsageError(
            f"{run.id} is a sweep: say which element with --element (see hpcrun status {run.id})"
        )
    if follow:
        show_run_output(run, rank=rank, attempt=attempt, batch=batch)
        return
    paths = following.find_batch_logs(run) if batch else following.find_rank_logs(run, rank, attempt)
    if not paths:
        raise UsageError(f"{run.id}: no batch shell has printed anything yet")
    if as_json:
        files = [{"path": str(path), "text": "".join(following.read_file_chunks([path]))} for path in paths]
        _print_json(id=run.id, files=files)
        return
    for text in following.read_file_chunks(paths):
        write_log(text)


def show_run_output(
    run: RunDir, *, rank: int | None = None, attempt: int | None = None, batch: bool = False
) -> int:
    """Show what a run prints until it is over, and on stderr how it comes along; its exit code."""
    from hpcrun.runs.follow import follow_logs

    lines = LineDisplay(run_state.read_run_state(run).steps or 0, sys.stderr)
    return follow_logs(run, write_log, lines.note, rank=rank, attempt=attempt, batch=batch, step=lines.step)


@app.command()
def cancel(
    names: _Runs,
    now: Annotated[bool, typer.Option("--now", help="End it at once, without a save.")] = False,
    as_json: _Json = False,
) -> None:
    """Ask runs to save and stop; what waits in the queue is taken out of it."""
    from hpcrun.runs import cancel as stopping

    code, told = EXIT_DONE, []
    for run in find_runs(names, use="act"):
        lines, trouble = [], None
        try:
            lines = stopping.cancel_run(run, now=now)
        except HpcrunError as error:
            # The others are still to be stopped.
            trouble, code = str(error), max(code, error.exit_code)
            _note(trouble)
        told.append({"id": run.id, "done": lines, "error": trouble})
        for line in () if as_json else lines:
            print(line)
    if as_json:
        _print_json(runs=told)
    raise typer.Exit(code)


def _print_json(**values: Any) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}))


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = [head, *([escape_to_one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_facts(**facts: Any) -> None:
    told = {name: value for name, value in facts.items() if value not in (None, "")}
    width = max(7, *map(len, told))
    for name, value in told.items():
        # Further lines stand below the value, where none can pass for a fact of its own.
        text = str(value).replace("\n", "\n" + " " * (width + 2))
        print(f"{name:{width}}  {text}")


def _note(text: str) -> None:
    sys.stderr.write(f"hpcrun: {text}\n")
    sys.stderr.flush()


def _format_age(state: run_state.RunState) -> str:
    """Since it last wrote something; the stamp may be of a clock that is ahead of this one."""
    return format_short_duration(max(0.0, time.time() - state.changed))


def _format_message(state: run_state.RunState) -> str:
    return state.shown + (f": {state.message}" if state.message else "")


def _format_job(state: run_state.RunState) -> str | None:
    return f"{state.job} on {state.cluster}" if state.job and state.cluster else state.job


def _format_element_counts(state: run_state.RunState) -> str:
    return ", ".join(f"{count} {name}" for name, count in (state.elements or {}).items())


def _format_step(state: run_state.RunState) -> str:
    return _or_dash(state.step) + (f"/{state.steps}" if state.step is not None and state.steps else "")


def _format_loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _format_pairs(values: dict[str, Any] | None) -> str:
    return " ".join(f"{key}={value}" for key, value in (values or {}).items())


def _format_time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return f"time {seconds}"
