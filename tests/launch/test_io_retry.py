"""A run directory that is full for a moment, and a log that takes no more lines."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrun.launch import batch_task, outcome
from hpcrun.launch import supervisor as supervisors
from hpcrun.runs import lease
from hpcrun.specs import io_retry
from hpcrun.specs.events.supervisor import SignalEvent
from hpcrun.specs.io_retry import retry_while_full
from hpcrun.specs.records import JsonLineWriter, read_json, read_json_lines, write_json
from tests.launch.supervised import Site


class Full:
    """Does what it is to do only from the third time on."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        self.number, self.left = number, 2

    def pass_through(self) -> None:
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), "place")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_retry, "_RETRY_INTERVAL_S", 0.01)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_what_passes_is_waited_for(number: int) -> None:
    retry_while_full(Full(number).pass_through)


def test_what_stays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Permission denied"):
        retry_while_full(Full(errno.EACCES).pass_through)
    monkeypatch.setattr(io_retry, "RETRY_WHILE_FULL_S", -1.0)
    with pytest.raises(OSError, match="No space left"):
        retry_while_full(Full().pass_through)


def test_a_run_directory_that_is_full_for_a_moment_costs_neither_the_run_nor_its_record(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: dict[str, Full] = {}

    def write(path: Path, value: Any) -> None:
        full.setdefault(path.name, Full()).pass_through()
        write_json(path, value)

    def append(writer: JsonLineWriter, record: dict[str, Any]) -> None:
        full.setdefault(record["event"], Full()).pass_through()
        whole(writer, record)

    whole = JsonLineWriter.write
    monkeypatch.setattr(supervisors, "write_json", write)
    monkeypatch.setattr(outcome, "write_json", write)
    monkeypatch.setattr(JsonLineWriter, "write", append)
    result = site.run("done", "preflight=false")
    assert result.status == "done"
    run = result.run
    assert {"supervisor.json", "outcome.json", "exit.json", "launch", "exit"} <= full.keys()
    assert [one.number for one in run.attempts()] == [1]
    assert read_json(run.exit)["status"] == "done"
    told = [one["event"] for one in read_json_lines(run.events)]
    assert (told[0], told[-1], told.count("ranks_connected")) == ("launch", "exit", 1)


def test_a_job_whose_result_submitit_cannot_write_ends_as_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    def process_job(folder: str) -> None:
        if folder == "ran":
            batch_task._exit_codes.append(75)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(batch_task, "_exit_codes", [])  # of jobs that other tests have run in this process
    monkeypatch.setitem(sys.modules, "submitit.core.submission", SimpleNamespace(process_job=process_job))
    for check in ("why_foreign_job", "_await_private_pickle"):  # as in a job that hpcrun has submitted
        monkeypatch.setattr(batch_task, check, lambda _: None)
    assert batch_task.run_submitted("ran") == 75
    with pytest.raises(OSError, match="No space"):
        batch_task.run_submitted("did not run")


def test_a_log_that_is_full_does_not_change_the_exit_code() -> None:
    words = [sys.executable, "-c", "from hpcrun.launch.batch_task import BatchLog; BatchLog().note('x')"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(words, stderr=full, env=environ, check=False).returncode == 0


def test_a_leader_s_line_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, whole = Full(), JsonLineWriter.write

    def append(writer: JsonLineWriter, record: dict[str, Any]) -> None:
        full.pass_through()
        whole(writer, record)

    monkeypatch.setattr(JsonLineWriter, "write", append)
    writer = lease.LeaderEventWriter(tmp_path / "events.jsonl", lambda: None)
    writer.append(SignalEvent("SIGUSR1"), 1)
    assert [one["event"] for one in read_json_lines(tmp_path / "events.jsonl")] == ["signal"]
    writer.close()
