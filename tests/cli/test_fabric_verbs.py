"""`hpcrun fabric show` and `place` from a captured topology of a thousand nodes, as Slurm folds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrun.cli.main import main


def fabric(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["fabric", *words])
    return int(ended.value.code or 0)


NAMES = [f"cn{number:03}" for number in range(1, 1025)]


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """1,024 nodes below 32 leaves, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    leaf = "SwitchName=leaf{} Level=0 LinkSpeed=1 Nodes=cn[{:03}-{:03}]\n"
    text = "".join(leaf.format(rack + 1, rack * 32 + 1, rack * 32 + 32) for rack in range(32))
    path = tmp_path / "captured.txt"
    path.write_text(f"{text}SwitchName=spine Level=1 LinkSpeed=1 Nodes=cn[001-1024] Switches=leaf[1-32]\n")
    return path


def test_all_nodes_are_shown(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fabric("show", "--topology", str(captured), "--json") == 0
    shown = json.loads(capsys.readouterr().out)["fabric"]
    assert shown["nodes"] == NAMES
    assert [level["name"] for level in shown["levels"]] == ["leaf", "spine"]
    assert shown["is_unread"] is False


def test_a_job_stands_under_as_few_leaves_as_can_be(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text("command: [a]\nresources: {nodes: 1024}\n")
    for count, leaves in ((32, 1), (33, 2), (1024, 32)):
        words = ["job.yaml", f"resources.nodes={count}", "--topology", str(captured), "--json"]
        assert fabric("place", *words) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["leaves"] == leaves
        assert len(set(found["placement"]["ranks"])) == count


def test_a_job_over_two_trees_is_refused(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees = captured.with_name("topology.conf")
    trees.write_text(
        "SwitchName=east Switches=e[1-2]\nSwitchName=e1 Nodes=n[1-8]\nSwitchName=e2 Nodes=n[9-16]\n"
        "SwitchName=west Nodes=n[17-32]\n"
    )
    Path("job.yaml").write_text("command: [python, x.py]\nresources: {nodes: 20, gpus_per_node: 8}\n")
    assert fabric("place", "job.yaml", "--topology", str(trees)) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "no tree has the 20 nodes" in told.err
    assert fabric("place", "job.yaml", "resources.nodes=16", "--topology", str(trees), "--json") == 0
    nodes = json.loads(capsys.readouterr().out)["placement"]["nodes"]
    assert set(nodes) in (
        {f"n{number}" for number in range(1, 17)},
        {f"n{number}" for number in range(17, 33)},
    )
