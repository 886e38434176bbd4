"""What befalls runs whose saves are in memory: the supervisor's own host goes, an agent, or they are queued again."""

from __future__ import annotations

import pytest

from tests.lab.desk import Desk, records, story
from tests.lab.test_lab_levels import JOB, events, stored


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_whoever_takes_over_goes_on_from_memory(desk: Desk, launcher: str) -> None:
    desk.profile(f"mpi: {{library: mpich, launcher: {launcher}}}\n")
    (desk.path / "job.yaml").write_text(JOB)
    run = desk.submit("job.yaml", "resources.nodes=4", "resources.spares=2", "cluster=lab")
    desk.until(lambda: len(stored(run, "parity")) > 1, run)
    first = records(run, "attempts/1/placement.json")[0]["nodes"]
    desk.lab.node(first[0]).power_off()
    desk.until(lambda: bool(events(run, "takeover")), run)
    assert desk.ended(run, 200)["status"] == "done", story(run)
    (restored,) = events(run, "restore")
    assert (restored["levels"], restored["rebuilt"]) == (["memory", "parity"], 1), story(run)
    second = records(run, "attempts/2/placement.json")[0]["nodes"]
    desk.until(lambda: desk.lab.run(["squeue", "-h"]).stdout == "", run)
    for node in second:
        assert desk.lab.node(node).run(["ls", "-A", "/dev/shm"]).stdout == ""
