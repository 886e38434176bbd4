"""`hpcrun doctor`: one node, a captured one, counters, reports compared, and all nodes of an allocation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.doctor import app
from hpcrun.errors import HpcrunError, SiteError, UsageError
from tests.tuning.trees import lay_out

SRUN = """\
#!/bin/sh
for word in "$@"; do case "$word" in --nodelist=*) node=${word#--nodelist=} ;; esac; done
echo "$*" >>{here}/asked
if [ "$node" = n3 ]; then echo "srun: error: Task launch failed" >&2; exit 1; fi
cat {here}/$node.json
"""


@pytest.fixture(autouse=True)
def no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    monkeypatch.setenv("HPCRUN_SITE", str(site))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return site


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, HpcrunError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def parsed(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema_version"] == 2
    return found


def test_a_captured_host(tmp_path: Path) -> None:
    root = lay_out("downtrained", tmp_path / "node")
    shown = run("--root", root, code=1).stdout
    assert "port       mlx5_0:1  ACTIVE, 400 Gb/s, Ethernet, GID 3\n" in shown
    assert "error    pci  mlx5_1: its PCIe link runs at x8, it could x16; reseat" in shown
    report = parsed(run("--root", root, "--json", code=1))
    assert (report["node"], report["gpus"], report["gid_index"]) == (
        "gpu-01",
        2,
        {"mlx5_0:1": 3, "mlx5_1:1": 3},
    )
    assert [one["severity"] for one in report["findings"]] == ["error", "error"]


def test_a_step_s_doctor_leaves_the_verdict_to_whoever_asked(tmp_path: Path) -> None:
    run("--root", lay_out("downtrained", tmp_path / "node"), "--json", "--always-0")


def test_a_healthy_one_ends_with_0(tmp_path: Path) -> None:
    assert run("--root", lay_out("roce-healthy", tmp_path / "node")).stdout.endswith(
        "gpu-01: nothing found\n"
    )


def test_this_node() -> None:
    report = parsed(CliRunner().invoke(app, ["--json"]))
    assert (report["node"], report["interfaces"] != []) == (os.uname().nodename, True)
    assert {one["severity"] for one in report["findings"]} <= {"error", "warning", "note", "unknown"}


def test_the_profile_says_what_is_used(tmp_path: Path, no_profiles: Path) -> None:
    (no_profiles / "profiles").mkdir(parents=True)
    (no_profiles / "profiles" / "c.yaml").write_text("name: c\nnetwork: {hcas: [mlx5_0, mlx5_7]}\n")
    shown = run("--root", lay_out("roce-healthy", tmp_path / "node"), code=1).stdout
    assert "error    port  mlx5_7: the profile names it, this node has mlx5_0, mlx5_1;" in shown
    (no_profiles / "profiles" / "d.yaml").write_text("name: d\n")
    doubtful = run("--root", tmp_path / "node")
    assert "no profile: " in doubtful.stderr
    with pytest.raises(UsageError, match="x: no profile of this name"):
        run("--root", tmp_path / "node", "--cluster", "x")


def test_a_clock(tmp_path: Path) -> None:
    found = parsed(CliRunner().invoke(app, ["--json", "--reference-time", "1000"]))
    assert any("ahead" in one["text"] for one in found["findings"])


def test_counters_before_and_after(tmp_path: Path) -> None:
    before, look = lay_out("counters-before", tmp_path / "before"), tmp_path / "before.json"
    taken = parsed(run("--root", before, "--counters", look, "--json"))
    assert (taken["node"], taken["file"], taken["counters"] > 0) == ("gpu-01", str(look), True)
    calm = run("--root", before, "--since", look)
    assert calm.stdout == f"gpu-01: of {taken['counters']} counters none that indicates a fault has grown\n"
    look.write_text(json.dumps(json.loads(look.read_text()) | {"values": {}}))
    nothing = run("--root", before, "--since", look).stdout
    assert nothing.startswith("unknown  counters  gpu-01: no counter is in both looks")
    run("--root", before, "--counters", look)
    slow = lay_out("counters-slow-receiver", tmp_path / "after")
    assert (
        "error    slow receiver  ens1: tx_prio3_pause_duration +2170000"
        in run("--root", slow, "--since", look, code=1).stdout
    )
    assert parsed(run("--root", slow, "--since", look, "--json", code=1))["growth"]["node"] == "gpu-01"


def write_report(path: Path, case: str, node: str, tmp_path: Path) -> Path:
    root = lay_out(case, tmp_path / f"tree-{node}")
    report = json.loads(CliRunner().invoke(app, ["--root", str(root), "--json"]).stdout)
    for interface in report["interfaces"]:
        interface["networks"] = [text.replace(".7/", f".{node[-1]}/") for text in interface["networks"]]
    path.write_text(json.dumps(report | {"node": node}))
    return path


def test_reports_compared(tmp_path: Path) -> None:
    cases = {"n1": "roce-healthy", "n2": "slow-port", "n3": "roce-healthy"}
    files = [write_report(tmp_path / f"{node}.json", case, node, tmp_path) for node, case in cases.items()]
    shown = run("compare", *files, code=1).stdout
    line = "error    rate in Gb/s  n2: mlx5_1:1: rate in Gb/s is 100, on 2 other nodes 400; the odd one out\n"
    assert shown == line
    assert parsed(run("compare", *files, "--json", code=1))["compared"] == ["n1", "n2", "n3"]
    assert run("compare", files[0], files[2]).stdout == "2 nodes are alike\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--connect"], "--connect goes with --all"),
        (["look"], "doctor look: is not known"),
        (["compare"], "0 report"),
        (["compare", "nowhere.json"], "nowhere.json: there is no such file"),
        (["--root", "/nowhere"], "--root /nowhere: is not a directory"),
        (["--nccl-version", "new"], "--nccl-version: 'new' is not a release of NCCL"),
        (["--since", "nowhere.json"], "nowhere.json: there is no such file"),
        (["--counters", "/nowhere/x.json"], "/nowhere/x.json: cannot be written"),
    ],
)
def test_mistakes(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(*words)
    assert text in str(caught.value)


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "bin"
    here.mkdir()
    (here / "srun").write_text(SRUN.replace("{here}", str(here)))
    (here / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    for node, case in (("n1", "roce-healthy"), ("n2", "slow-port"), ("n4", "roce-healthy")):
        path = write_report(here / f"{node}.json", case, node, tmp_path)
        # A host may call itself by more than Slurm does.
        path.write_text(path.read_text().replace(f'"node": "{node}"', f'"node": "{node}.some.domain"'))
    return here


def test_all_nodes_of_an_allocation(allocation: Path) -> None:
    shown = run("--all", "--nccl-version", "2.21.5", code=1).stdout
    assert shown.startswith("3 of 4 nodes have answered\n")
    assert "error    report  n3: its doctor gave no report: `srun " in shown
    assert "error    rate in Gb/s  n2: mlx5_1:1: rate in Gb/s is 100, on 2 other nodes 400" in shown
    assert "warning  port  n2 mlx5_1:1: runs at 100 Gb/s, its neighbours at 400" in shown
    asked = (allocation / "asked").read_text().splitlines()
    assert len(asked) == 4
    assert all("--overlap" in line and line.endswith("--nccl-version 2.21.5") for line in asked)
    everything = parsed(run("--all", "--json", code=1))
    assert [one["node"] for one in everything["nodes"]] == ["n1", "n2", "n4"]


def test_a_report_of_all_nodes_can_be_compared_again(allocation: Path, tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text(run("--all", "--json", code=1).stdout)
    assert "n2: mlx5_1:1" in run("compare", tmp_path / "all.json", code=1).stdout


def test_all_needs_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(SiteError, match="doctor --all needs an allocation"):
        run("--all")
