"""What a supervisor finds out of a run whose supervisor it comes after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrun.launch.succession import left_out
from hpcrun.specs.rundir import RunDir

LOST = (1, "node lost", {"node": "n3"})
WITHOUT = (1, "relaunch", {"excluded": ["n2", "n3"]})


@pytest.mark.parametrize(
    ("events", "lost", "suspect"),
    [
        ([(1, "launch", {}), LOST], set(), set()),
        ([(1, "launch", {}), LOST, WITHOUT, (2, "preflight", {})], {"n3"}, {"n2"}),
        ([(1, "launch", {}), LOST, WITHOUT, (2, "relaunch", {"excluded": ["n3"]})], {"n3"}, set()),
        # Another allocation has nodes of its own.
        ([LOST, WITHOUT, (2, "launch", {}), (2, "requeue", {}), (3, "launch", {})], set(), set()),
        ([LOST, WITHOUT, (2, "launch", {}), (3, "launch", {}), (3, "relaunch", {})], set(), set()),
    ],
    ids=["nothing yet", "both", "back", "queued again", "resumed"],
)
def test_who_is_left_out(
    tmp_path: Path, events: list[tuple[int, str, dict[str, Any]]], lost: set[str], suspect: set[str]
) -> None:
    run = RunDir(tmp_path)
    lines = [{"attempt": attempt, "event": event} | more for attempt, event, more in events]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [*map(set, left_out(run))] == [lost, suspect]
