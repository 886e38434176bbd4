"""A profile drafted from a live cluster, and what changes there later."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.lab.cluster import Lab


def test_a_draft_matches_the_cluster_until_that_changes(lab: Lab, tmp_path: Path) -> None:
    profile = tmp_path / "lab.yaml"
    hpcrun = [sys.executable, "-m", "hpcrun", "cluster"]
    lab.run([*hpcrun, "draft", "--out", str(profile)], cwd=tmp_path).require_success()
    same = lab.run([*hpcrun, "check", str(profile)], cwd=tmp_path)
    assert same.exit_code == 0, same.stdout + same.stderr
    (partition,) = set(lab.run(["sinfo", "-h", "-o", "%R"]).stdout.split())
    lab.run(["scontrol", "update", f"PartitionName={partition}", "MaxTime=7"]).require_success()
    try:
        changed = lab.run([*hpcrun, "check", str(profile)], cwd=tmp_path)
    finally:
        lab.run(["scontrol", "update", f"PartitionName={partition}", "MaxTime=UNLIMITED"]).require_success()
    assert changed.exit_code == 1
    (line,) = changed.stdout.splitlines()
    assert partition in line
    assert "7" in line
