"""However the making of a run is cut short, no half a run directory is left."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hpcrun
from hpcrun import process
from hpcrun.errors import HpcrunError
from hpcrun.launch.batch_task import BatchLog
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.runs.follow import wait_for_runs
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.prepare import prepare_job
from hpcrun.submission.request import SubmissionRequest
from hpcrun.submission.submit import submit_job

MOST = 40


class Cut:
    """The n-th directory or file that this process makes fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], BaseException]) -> None:
        self._fault, self._owner, self.left = fault, os.getpid(), 0
        for name in ("mkdir", "replace", "rename"):
            self._arm(monkeypatch, name, getattr(Path, name))
        real = os.replace

        def replace(source: object, target: object, **more: object) -> None:
            self._count()
            real(source, target, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "replace", replace)

    def _arm(self, monkeypatch: pytest.MonkeyPatch, name: str, real: Callable[..., object]) -> None:
        def act(path: Path, *args: object, **kwargs: object) -> object:
            self._count()
            return real(path, *args, **kwargs)

        monkeypatch.setattr(Path, name, act)

    def _count(self) -> None:
        if os.getpid() == self._owner and self.left > 0:
            self.left -= 1
            if self.left == 0:
                raise self._fault()


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS = [pytest.param(full, id="full"), pytest.param(KeyboardInterrupt, id="interrupt")]


def handed_over() -> None:
    submit_job(SubmissionRequest(command=("true",), overrides=("cluster=local",)), lambda _: None)


def called() -> None:
    hpcrun.submit_array(abs, [1, 2], spec={"cluster": "local"})


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("make", [handed_over, called])
def test_what_is_not_handed_over_leaves_nothing(
    make: Callable[[], None],
    fault: Callable[[], BaseException],
    monkeypatch: pytest.MonkeyPatch,
    runs_root: Path,
) -> None:
    cut = Cut(monkeypatch, fault)
    for number in range(1, MOST):
        cut.left = number
        try:
            make()
        except (HpcrunError, KeyboardInterrupt):
            assert list(runs_root.iterdir() if runs_root.exists() else []) == [], number
            continue
        cut.left = 0
        assert number > 4, "nothing was cut short"
        (path,) = runs_root.iterdir()
        assert [one.state for one in wait_for_runs([RunDir(path)], lambda _: None)] == ["done"]
        break
    else:
        pytest.fail("it never came through")
    end = time.monotonic() + 60
    while process.descendants(os.getpid()) and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_here_is_not_begun_or_says_how_it_ended(
    fault: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch, runs_root: Path
) -> None:
    cut = Cut(monkeypatch, fault)
    begun = 0
    for number in (1, 2, 3, 4, 5, 6, 8, 11):
        known = {*(runs_root.iterdir() if runs_root.exists() else ())}
        with SignalQueue() as inbox:
            prepared = prepare_job(None, command=["true"])
            cut.left = number
            try:
                Supervisor(prepared, inbox, BatchLog()).run()
            except (HpcrunError, OSError, KeyboardInterrupt):
                pass
            finally:
                cut.left = 0
        for path in {*(runs_root.iterdir() if runs_root.exists() else ())} - known:
            run, begun = RunDir(path), begun + 1
            assert (number, run.spec.exists(), run.job.exists()) == (number, True, True)
            assert run.read_exit() is not None, number
    assert 0 < begun < 8
