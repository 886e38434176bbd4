"""A signal that comes while the job's setup still runs ends no batch shell: the supervisor gets it."""

from __future__ import annotations

from tests.lab.desk import Desk, records, story
from tests.lab.test_lab_requeue import signal


def test_a_stop_during_the_setup_is_the_supervisor_s(desk: Desk) -> None:
    desk.profile(
        f'setup: [\'touch "{desk.path}/preparing"; until [ -e "{desk.path}/go" ]; do sleep 0.1; done\']\n'
    )
    run = desk.submit("name=early", "resources.nodes=1", "--", "sleep", "600")
    desk.until((desk.path / "preparing").exists, run)
    signal(desk, run, "TERM")
    (desk.path / "go").touch()
    ended = desk.ended(run)
    assert (ended["status"], ended["exit_code"]) == ("saved", 75), story(run)
    assert ended["message"].startswith("SIGTERM: stopped before the ranks were started"), story(run)
    # There was nothing to start an attempt for.
    assert records(run, "attempts/*/supervisor.json") == []
