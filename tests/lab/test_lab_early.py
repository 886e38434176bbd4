"""A signal that comes while the job's setup still runs ends no batch shell: the supervisor gets it."""

from __future__ import annotations

from tests.lab.desk import Desk, records, story
from tests.lab.test_lab_requeue import outcomes, signal


def test_a_stop_during_the_setup_is_the_supervisor_s(desk: Desk) -> None:
    desk.profile(
        f'setup: [\'touch "{desk.path}/preparing"; until [ -e "{desk.path}/go" ]; do sleep 0.1; done\']\n'
    )
    run = desk.submit("name=early", "resources.nodes=1", "--", "sleep", "600")
    desk.until((desk.path / "preparing").exists, run)
    signal(desk, run, "TERM")
    (desk.path / "go").touch()
    ended = desk.ended(run)
    assert ended["exit_code"] != 0
    assert len(records(run, "attempts/*/supervisor.json")) == 1, story(run)
    assert [requeued for _, requeued in outcomes(run)] == [None], story(run)
