"""`hpcrun list`, `status`, `describe`, `wait`, `logs`, `cancel`: runs, seen through their directories."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcrun.cli.display import LineDisplay
from hpcrun.cli.options import AsJson, Follow, OptionalRuns, Run, Runs, Timeout, make_app, parse_timeout
from hpcrun.cli.output import note, print_facts, print_json, print_lines, print_table
from hpcrun.cli.terminal import write_log
from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, HpcrunError, UsageError
from hpcrun.runs import run_state
from hpcrun.specs.run_lookup import all_runs, find_run, find_runs, runs_roots
from hpcrun.specs.rundir import RunDir
from hpcrun.units import format_duration

_MAX_QUICK_LEDGER_BYTES = 32 * 2**20
"""Metrics of more than this, some eighty thousand steps, take seconds to read."""

app = make_app()


@app.command("list")
def list_runs(
    states: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Only runs in this state.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs under the root, oldest first.

    The root is HPCRUN_ROOT, else the profile's, else ./runs.
    """
    for name in states or ():
        if name not in run_state.RUN_STATES:
            raise UsageError(f"--state: {name!r} is not a state; there are {', '.join(run_state.RUN_STATES)}")
    every = run_state.read_run_states(list(all_runs()))
    shown = [state for state in every if not states or state.state in states]
    root = ", ".join(map(str, runs_roots()))
    if as_json:
        print_json(root=root, runs=[state.as_json() for state in shown])
    elif shown:
        head = ("RUN", "STATE", "JOB", "ATTEMPT", "STEP", "LOSS", "AGE")
        print_table([_list_row(state) for state in shown], head)
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
    names: OptionalRuns = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs that are not over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what runs are doing, or how they ended.

    For a sweep, the results of its elements are listed.
    """
    if bool(names) == everything:
        raise UsageError("status: name a run, or several, or give --all; `hpcrun list` shows the runs")
    chosen = list(all_runs()) if everything else find_runs(names or ())
    if len(chosen) == 1 and not everything:
        _show_run(chosen[0], as_json)
        return
    states = [state for state in run_state.read_run_states(chosen) if not (everything and state.is_over)]
    if as_json:
        print_json(runs=[state.as_json() for state in states])
    elif states:
        rows = [
            (
                state.run.id,
                _format_element_counts(state) or state.shown,
                state.job or "-",
                _format_step(state),
                state.message.partition("\n")[0],
            )
            for state in states
        ]
        print_table(rows, ("RUN", "STATE", "JOB", "STEP", "WHY"))
    else:
        print("every run is over")


def _show_run(run: RunDir, as_json: bool) -> None:
    if run.sweep.is_file():
        _show_sweep(run, as_json)
        return
    state = run_state.with_slurm_state(run_state.read_run_states([run])[0])
    if as_json:
        from hpcrun.runs.describe import compute_run_ledger

        print_json(**state.as_json(), ledger=compute_run_ledger(state).as_json())
        return
    print_facts(
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
        return {"goodput": f"too many steps to sum up quickly; see hpcrun describe {state.run.id}"}
    from hpcrun.runs.describe import compute_run_ledger, read_checkpoint_stats

    ledger = compute_run_ledger(state)
    facts = {"saves": "; ".join(read_checkpoint_stats(state.run).lines())}
    facts |= {"faults": ", ".join(f"{count} {cause}" for cause, count in ledger.causes.items())}
    if ledger.spares_left is not None:
        facts["spares"] = f"{ledger.spares_left} left"
    if ledger.goodput is not None:
        lost = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in ledger.losses())
        facts["goodput"] = f"{ledger.goodput:.1%}" + (f"; lost to {lost}" if lost else "")
    return facts


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
        print_json(**whole.as_json(), results=results)
        return
    print_facts(run=run.path, state=whole.message, job=_format_job(whole))
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
    print_table(rows, ("ELEMENT", "OVERRIDES", "STATE", "STEP", "LOSS", "EVAL LOSS", "WHY"))


@app.command()
def describe(name: Run, as_json: AsJson = False) -> None:
    """Show a run's origin, files, jobs, attempts, checkpoints and goodput."""
    from hpcrun.runs.describe import describe_run

    facts, ledger = describe_run(find_run(name))
    if as_json:
        print_json(**facts, ledger=ledger.as_json())
        return
    print_facts(**_description_rows(facts))
    print_lines(map(_format_attempt, facts["attempts"]))
    print_lines(ledger.lines() if ledger.attempts else ())


def _format_attempt(record: dict[str, Any]) -> str:
    host = f" on {record['host']}" if record["host"] else ""
    job = f", job {record['slurm_job']} (restart {record['restarts']})" if record["slurm_job"] else ""
    counts = record["replicas"]
    replicas = f", {counts['there']} of {counts['whole']} replicas" if counts else ""
    again = f", queued again ({record['requeued']})" if record["requeued"] else ""
    again = f", relaunched ({record['relaunched']})" if record["relaunched"] else again
    why = f": {record['message']}" if record["message"] else ""
    status = f"{record['status']}{why}{again}; {record['logs']}"
    return f"attempt {record['attempt']}{host}{job}{replicas}: {status}"


def _description_rows(record: dict[str, Any]) -> dict[str, Any]:
    """What `describe` prints, by the names that people read."""
    origin = record["origin"] or {}
    slurm = f" (Slurm says {record['slurm_state']})" if record["slurm_state"] else ""
    state = f"{record['state']}{slurm}" + (f": {record['message']}" if record["message"] else "")
    facts = {
        "run": record["path"],
        "state": state,
        "exit": record["exit_code"],
        "nodes": record["nodes"],
        "start": record["start"],
        "after": ", ".join(record["after"]),
        "overrides": _format_pairs(record["overrides"]),
    }
    if origin:
        dirty = " with local changes, see code difference" if origin["is_dirty"] else ""
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
            "submitted": "; ".join(map(_format_submission, origin["submissions"])),
        }
    files = {
        name: value if isinstance(value, str) else ", ".join(value) for name, value in record["files"].items()
    }
    saved = ", ".join(f"step {step}" for step in record["saved_steps"])
    return facts | files | {"saved": saved, "tiers": "; ".join(record["save_lines"])}


def _format_submission(record: dict[str, Any]) -> str:
    job, host = record["job"], record["host"]
    place = f"job {job}" if job is not None else f"pid {record['pid']} on {host}"
    cluster = f" on {record['cluster']}" if record["cluster"] else ""
    array = f" as array {record['array']}" if record["array"] else ""
    return f"{place}{cluster}{array}, {_format_time(record['time'])}"


@app.command()
def wait(names: Runs, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Wait until runs are over.

    The exit code is the run's, of several the worst.
    """
    from hpcrun.runs import follow

    states = follow.wait_for_runs(find_runs(names), note, timeout_s=parse_timeout(timeout))
    if as_json:
        print_json(runs=[state.as_json() for state in states])
    if active := [state.run.id for state in states if not state.is_over]:
        note(f"not over after {timeout}: {', '.join(active)}")
        raise typer.Exit(EXIT_CHECK_FAILED)
    raise typer.Exit(run_state.worst_exit_code(state.code for state in states))


@app.command()
def logs(
    name: Run,
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="Rank; default: 0.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Attempt; default: newest.")] = None,
    element: Annotated[int | None, typer.Option(min=0, metavar="N", help="Element of a sweep.")] = None,
    batch: Annotated[bool, typer.Option("--batch", help="Print the batch script's output instead.")] = False,
    follow: Follow = False,
    as_json: AsJson = False,
) -> None:
    """Print the output of a rank (-f to follow)."""
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
        print_json(id=run.id, files=files)
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
    names: Runs,
    now: Annotated[bool, typer.Option("--now", help="End them at once, without saving.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask runs to save and stop, and remove queued ones from the queue."""
    from hpcrun.runs import cancel as stopping

    code, results = EXIT_DONE, []
    for run in find_runs(names, use="act"):
        lines, problem = [], None
        try:
            lines = stopping.cancel_run(run, now=now)
        except HpcrunError as error:
            # The others are still to be stopped.
            problem, code = str(error), max(code, error.exit_code)
            note(problem)
        results.append({"id": run.id, "done": lines, "error": problem})
        print_lines(() if as_json else lines)
    if as_json:
        print_json(runs=results)
    raise typer.Exit(code)


def _format_age(state: run_state.RunState) -> str:
    """Since it last wrote something; the stamp may be of a clock that is ahead of this one."""
    return format_duration(max(0.0, time.time() - state.changed))


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
