"""`import hpcrun`: the public names, what they load, and the handle of a run on a real run directory."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcrun
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.metric_lines import metric_line

DOCS = Path(__file__).parents[1] / "docs" / "python.md"
NAMES = [
    "Checkpointer",
    "FunctionError",
    "FunctionJob",
    "HpcrunError",
    "JobSpec",
    "Run",
    "RunState",
    "find_run",
    "list_runs",
    "load_job",
    "progress",
    "submit",
    "submit_array",
]


@pytest.fixture
def finished(runs_root: Path) -> RunDir:
    """A run of one attempt that has ended."""
    run = create_run("pretrain")
    run.spec.write_text("name: pretrain\n")
    attempt = run.attempt(1).create()
    attempt.log(0).write_text("hello\n")
    steps = [metric_line("step", step, loss=4.0 - step / 2) for step in (2, 3)]
    run.metrics.write_text("".join(f"{json.dumps(record)}\n" for record in steps))
    ended = {
        "event": "exit",
        "attempt": 1,
        "time": 1.0,
        "monotonic": 1.0,
        "host": "n1",
        "status": "done",
        "exit_code": 0,
    }
    run.events.write_text(f"{json.dumps(ended | {'message': 'trained 4 steps'})}\n")
    write_json(run.exit, {"status": "done", "exit_code": 0, "message": "", "attempt": 1, "step": 4})
    return run


def test_the_public_names() -> None:
    assert hpcrun.__all__ == NAMES
    assert hpcrun.__all__ == sorted(hpcrun.__all__)
    assert set(NAMES) <= set(dir(hpcrun))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hpcrun.nothing


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_documented(name: str) -> None:
    value = getattr(hpcrun, name)
    assert value.__doc__
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert any(re.search(rf"`{name}[`(]", row.split(" | ")[0]) for row in rows)


def test_the_documented_members_of_a_run_are_all() -> None:
    (row,) = (line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `Run` |"))
    members = {word.partition("(")[0] for word in re.findall(r"`([a-z_]+(?:\([^)]*\))?)`", row)}
    public = {name for name in dir(hpcrun.Run) if not name.startswith("_")} | {"files"}
    assert members == public


def test_importing_and_reading_runs_loads_nothing_heavy(finished: RunDir) -> None:
    code = (
        "import sys, hpcrun\nassert not [m for m in sys.modules if m.startswith('hpcrun.')]\n"
        f"run = hpcrun.find_run({finished.id!r})\nrun.state, run.events(), run.metrics(), run.checkpoints()\n"
        "assert not {'torch', 'numpy', 'typer', 'rich'} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_handle_reads_the_run(finished: RunDir) -> None:
    run = hpcrun.find_run(str(finished.path))
    assert (run.id, run.directory, run.state) == (finished.id, finished.path, "done")
    assert (run.status().exit_code, run.status().step) == (0, 4)
    assert run.stdout() == "hello\n"
    assert run.stdout(rank=7) == ""
    assert run.checkpoints() == []
    assert run == hpcrun.list_runs()[0]
    assert hpcrun.list_runs(finished.path.parent) == [run]
    run.cancel()
    assert run.state == "done", "a run that is over stays as it is"
    with pytest.raises(hpcrun.HpcrunError, match="done"):
        run.save()


def test_a_handle_waits_no_longer_than_it_is_told(finished: RunDir) -> None:
    finished.exit.unlink()
    attempt = finished.attempt(1)
    stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    ticks = int(stat.rpartition(")")[2].split()[19])
    record = {"pid": os.getpid(), "start_ticks": ticks, "host": os.uname().nodename, "started": 1.0}
    write_json(attempt.supervisor, record)
    run = hpcrun.find_run(finished.id)
    assert (run.state, run.done(), run.wait(timeout_s=0.2)) == ("running", False, False)


def test_the_examples_of_the_documentation(finished: RunDir) -> None:
    result = doctest.testfile(
        str(DOCS), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    )
    assert (result.failed, result.attempted > 5) == (0, True)
