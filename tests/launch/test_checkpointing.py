"""Checkpoint workers and their hosts, and what a supervisor makes of what they hold."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from hpcrun import __version__, process
from hpcrun.checkpoint.worker_messages import (
    ConfigureWorker,
    TakeInventory,
    WorkerDied,
    WorkerError,
    WorkerInventory,
    WorkerLog,
    WorkerMessage,
    WorkerOrder,
    WorkerReady,
)
from hpcrun.launch.agents import worker_process as hosts
from hpcrun.launch.agents.memory_cleanup import may_have_leader
from hpcrun.launch.agents.worker_process import WorkerProcess, split_inventory
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import render_typed

CONFIGURE = ConfigureWorker("/run", "n1", 1, {})
M = TypeVar("M")
PROGRAM = Path(__file__).with_name("worker_program.py")


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


class Listener:
    """A host, and what it says."""

    def __init__(self, tmp_path: Path) -> None:
        self.said: list[WorkerMessage] = []
        run = RunDir(tmp_path / "run")
        run.path.mkdir()
        environ = os.environ | {"HPCRUN_RUN_ID": run.run_id, "HPCRUN_ATTEMPT": "1"}
        command = (sys.executable, str(PROGRAM), str(tmp_path))
        self.host = WorkerProcess(run, "n1", self.said.append, environ, command)

    def hears(self, kind: type[M]) -> list[M]:
        self.host.look()
        return [one for one in self.said if isinstance(one, kind)]

    def command(self, kind: str) -> None:
        """Have the program do what no real worker is ordered."""
        self.host.obey(cast(WorkerOrder, {"kind": kind}))


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(hosts, "_FIRST_PAUSE_S", 0.05)
    made = Listener(tmp_path)
    yield made
    made.host.close()


def test_a_worker_starts_with_the_first_word_and_ends_with_its_host(listener: Listener) -> None:
    host = listener.host
    assert host.pids == []
    host.obey(CONFIGURE)
    (ready,) = until(lambda: listener.hears(WorkerReady))
    (pid,) = host.pids
    assert ready.port == pid
    assert process.read_initial_environment(pid).keys().isdisjoint({"HPCRUN_RUN_ID", "HPCRUN_ATTEMPT"})
    host.close()
    assert process.identify_process(pid) is None


def test_a_worker_that_dies_is_told_and_comes_back_as_it_was_configured(
    listener: Listener, tmp_path: Path
) -> None:
    host = listener.host
    host.obey(replace(CONFIGURE, attempt=3))
    (first,) = host.pids
    listener.command("die")
    (died,) = until(lambda: listener.hears(WorkerDied))
    assert (died.status, died.why) == (3, "something went wrong")
    until(lambda: len(listener.hears(WorkerReady)) == 2)
    (second,) = host.pids
    assert second != first
    host.obey(TakeInventory(7))
    until(lambda: listener.hears(WorkerInventory))
    orders = [json.loads(line) for line in (tmp_path / "n1.log").read_text().splitlines()]
    assert [one["kind"] for one in orders] == [
        "configure_worker",
        "die",
        "configure_worker",
        "take_inventory",
    ]
    # The next time it takes longer.
    listener.command("die")
    until(lambda: len(listener.hears(WorkerDied)) == 2)
    assert [one.again_s for one in listener.hears(WorkerDied)] == [0.05, 0.2]


def test_a_worker_that_hangs_is_ended_and_another_one_started(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_PING_S", 0.05)
    monkeypatch.setattr(hosts, "_HANG_TIMEOUT_S", 3.0)
    host = listener.host
    host.obey(CONFIGURE)
    until(lambda: listener.hears(WorkerReady))
    log = tmp_path / "n1.log"
    until(lambda: listener.hears(WorkerReady) and log.read_text().count("ping") > 2)
    assert not listener.hears(WorkerDied)
    listener.command("stop")
    (died,) = until(lambda: listener.hears(WorkerDied))
    assert died.status == -signal.SIGKILL
    assert "hangs" in listener.hears(WorkerLog)[0].text
    until(lambda: len(listener.hears(WorkerReady)) == 2)


def test_a_long_inventory_is_told_in_pieces() -> None:
    holdings = [{"number": n, "text": "x" * 100} for n in range(50)]
    pieces = list(split_inventory(WorkerInventory(1, tuple(holdings)), most_bytes=1000))
    assert [one.has_more for one in pieces] == [True] * (len(pieces) - 1) + [False]
    assert [one for piece in pieces for one in piece.holdings] == holdings
    assert max(len(render_typed(piece)) for piece in pieces) < 1200
    assert list(split_inventory(WorkerInventory(1, ()))) == [WorkerInventory(1, ())]


def test_a_worker_of_another_version_is_ended_and_named(listener: Listener, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("0.0.9")
    listener.host.obey(CONFIGURE)
    (error, *_) = until(lambda: listener.hears(WorkerError))
    assert error.why == (
        f"the checkpoint worker runs hpcrun 0.0.9, its host on n1 {__version__};"
        " install one version on all nodes"
    )
    until(lambda: listener.hears(WorkerDied))


def test_a_run_that_is_over_or_whose_lease_stands_still_leads_no_more(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert not may_have_leader(run)
    run.path.mkdir()
    assert not may_have_leader(run)
    run.lease.write_text("{}\n")
    assert may_have_leader(run)
    os.utime(run.lease, (time.time() - 3600,) * 2)
    assert not may_have_leader(run)
    # One that was killed a moment ago has its newest saves in memory, and is perhaps gone on with.
    run.events.write_text("{}\n")
    assert may_have_leader(run)
    os.utime(run.events, (time.time() - 3600,) * 2)
    assert not may_have_leader(run)
    run.lease.touch()
    run.exit.write_text("{}")
    assert not may_have_leader(run)


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_a_lease_is_judged_by_the_clock_of_its_file_system(
    tmp_path: Path, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = RunDir(tmp_path / "run"), time.time()
    run.path.mkdir()
    run.lease.write_text("{}\n")
    monkeypatch.setattr(time, "time", lambda: now + ahead_s)
    assert may_have_leader(run), "it was written just now"
    os.utime(run.lease, (now - 3600,) * 2)
    assert not may_have_leader(run)
    assert [path.name for path in run.path.iterdir()] == ["lease"]


def test_a_lease_that_moves_is_somebody_s_whatever_its_stamp_says(tmp_path: Path) -> None:
    run, over = RunDir(tmp_path / "run"), threading.Event()
    run.path.mkdir()

    def renew() -> None:
        count = 0
        while not over.wait(0.05):
            count += 1
            run.lease.write_text(json.dumps({"count": count}))
            # As on a file system that takes the stamps of its clients, of which this one is slow.
            os.utime(run.lease, (time.time() - 7200,) * 2)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        until(run.lease.exists)
        assert may_have_leader(run)
    finally:
        over.set()
        thread.join()
