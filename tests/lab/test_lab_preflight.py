"""A node whose own disk is full: left out before the ranks start, and by the next submission."""

from __future__ import annotations

from hpcrun.specs.records import read_json_lines
from tests.lab.desk import Desk, records, story

PROFILE = "file_systems: {scratch: {path: /run/scratch, kind: local, shared: false}}\n"
WORDS = ("resources={nodes: 2, spares: 1, nodelist: 'n[01-03]', placement: pin}", "--")


def test_a_node_with_a_full_disk_is_left_out_now_and_at_the_next_submission(desk: Desk) -> None:
    desk.profile(PROFILE)
    desk.lab.node("n02").fill_scratch()
    run = desk.submit("name=full", *WORDS, "sh", "-c", "echo here")
    assert desk.ended(run)["status"] == "done", story(run)
    assert records(run, "attempts/1/placement.json")[0]["nodes"] == ["n01", "n03"]
    event = next(line for line in read_json_lines(run.events) if line["event"] == "preflight")
    assert (event["nodes"], event["excluded"]) == (3, ["n02"])
    failed = [(one["where"], one["check"]) for one in event["found"] if one["severity"] == "error"]
    assert failed == [("n02", "space"), ("n02", "write")]
    shown = desk.hpcrun("fabric", "nodes").stdout
    assert shown.startswith("n02  score 1.50  avoided until 20"), shown
    again = desk.hpcrun("submit", "--dry-run", "name=again", "resources.nodes=2", "--", "true")
    assert "#SBATCH --exclude=n02\n" in again.stdout
    assert f"bad nodes: n02: preflight 1x in your runs, last in {run.id}: " in again.stderr
    assert "scontrol update NodeName=n02 State=DRAIN" in desk.hpcrun("fabric", "drain-request").stdout
    desk.hpcrun("fabric", "nodes", "--forget", "n02")
    free = desk.hpcrun("submit", "--dry-run", "name=again", "resources.nodes=2", "--", "true")
    assert "--exclude" not in free.stdout
