"""`hpcrun tune policy`, and what its rows become in advice, in an attempt and in its uptake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.tune import app
from hpcrun.errors import HpcrunError, UsageError
from hpcrun.specs.settings import parse_comm_settings
from hpcrun.tuning.log.applied_settings import check_applied_settings

OUTPUT = Path(__file__).parents[1] / "data" / "tuning" / "nccl-tests" / "all-reduce-2.17.txt"
QPS = "NCCL_IB_QPS_PER_CONNECTION"
JOB = "name: j\ncommand: [date]\nresources: {nodes: 2, ranks_per_node: 4}\n"
PROFILE = "name: c\nnetwork: {fabric: infiniband, policy: POLICY}\n"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "site" / "profiles").mkdir(parents=True)
    profile = PROFILE.replace("POLICY", str(tmp_path / "policy.yaml"))
    (tmp_path / "site" / "profiles" / "c.yaml").write_text(profile)
    (tmp_path / "job.yaml").write_text(JOB)
    for at in range(6):
        text = OUTPUT.read_text()
        (tmp_path / f"off-{at}.txt").write_text(text.replace("1406.2", f"140{at}.2"))
        (tmp_path / f"on-{at}.txt").write_text(text.replace("1406.2", f"111{5 - at}.2"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, HpcrunError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def add(*more: str) -> Result:
    on, off = ([f"{side}-{at}.txt" for at in range(6)] for side in ("on", "off"))
    words = ["policy", "add", "policy.yaml", "--set", f"{QPS}=4", "--with", *on, "--without", *off]
    return run(*words, "--by", "anna", "--when", "2026-11-30", *more)


def test_outputs_become_a_row_that_says_what_it_supports() -> None:
    lines = add().stdout.splitlines()
    assert lines[0] == f"{QPS}=4  2 nodes x 4 ranks, NCCL 2.28.9, 2026-11-30 by anna"
    assert (
        "faster        1.26 times as fast in all_reduce of 256 MiB on 2 nodes (95 %: 1.26 to 1.27" in lines[5]
    )
    assert lines[-1] == f"supports {QPS}=4 for such jobs"
    shown = run("policy", "show", "policy.yaml").stdout.splitlines()
    assert [line.strip() for line in shown] == ["row 1", *lines]
    found = json.loads(run("policy", "show", "policy.yaml", "--json").stdout)
    assert (found["rows"][0]["set"], found["rows"][0]["is_supported"]) == ({QPS: "4"}, True)


def test_results_that_nobody_checked_are_told(site: Path) -> None:
    assert "right" not in add("--dry-run").stderr
    for path in site.glob("on-*.txt"):
        path.write_text(path.read_text().replace("      0  ", "    N/A  ").replace("      0\n", "    N/A\n"))
    assert "6 outputs, such as on-0.txt, do not tell whether results were right" in add("--dry-run").stderr


def test_a_dry_run_writes_nothing(site: Path) -> None:
    assert json.loads(add("--dry-run", "--json").stdout)["row"]["is_supported"]
    assert not (site / "policy.yaml").exists()


def test_the_job_gets_what_is_measured_and_its_log_proves_it() -> None:
    add()
    told = run("advise", "job.yaml", "--nccl-version", "2.28.3").stdout
    assert told.startswith(f"{QPS}=4  # 1.26 times as fast in all_reduce of 256 MiB on 2 nodes (95 %:")
    assert "nothing to set" not in told
    assert "policy.yaml, row 1: 2026-11-30 by anna, 2 nodes x 4 ranks, NCCL 2.28.9, needs NCCL 2.28)" in told
    settings = parse_comm_settings(
        json.loads(run("advise", "job.yaml", "--nccl-version", "2.28.3", "--json").stdout)
    )
    log = f"n1:1:1 [0] NCCL INFO {QPS} set by environment to 4."
    assert [(one.name, one.verdict) for one in check_applied_settings(settings, log)] == [(QPS, "applied")]
    assert [
        one.verdict for one in check_applied_settings(settings, f"{log}\nNCCL version 2.27.5+cuda12.4")
    ] == ["ignored"]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--nccl-version", "2.27.5"], "it was measured with NCCL 2.28, this is 2.27.5"),
        (["resources.nodes=3", "--nccl-version", "2.28.3"], "it was measured on 2 nodes, the job has 3"),
        (
            ["resources.ranks_per_node=8", "--nccl-version", "2.28.3"],
            "measured with 4 ranks a node, the job has 8",
        ),
    ],
)
def test_what_the_policy_does_not_support_is_a_note(words: list[str], note: str) -> None:
    add()
    told = run("advise", "job.yaml", *words).stdout
    assert not told.startswith(QPS)
    assert note in told


def test_a_policy_that_is_damaged_or_missing_costs_no_job(site: Path) -> None:
    assert "network.policy of the profile is not there (yet)" in run("advise", "job.yaml").stdout
    (site / "policy.yaml").write_text("rows:\n  - gain: 3\n    set: 4\n")
    lines = [line for line in run("advise", "job.yaml").stdout.splitlines() if "not used" in line]
    assert len(lines) == 1
    assert "gain" in lines[0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["on-0.txt"], "on-0.txt: write FILE.yaml --set NAME=VALUE --with"),
        (["--wiht", "on-0.txt"], "--wiht: write"),
        (["--with", "none.txt", "--without", "off-0.txt"], "none.txt: cannot be read: No such file"),
        (["--with", "on-0.txt"], "1 outputs with the settings and 0 without"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        run("policy", "add", "policy.yaml", "--set", f"{QPS}=4", *words)
    with pytest.raises(UsageError, match="--set QPS: write NAME=VALUE"):
        run("policy", "add", "policy.yaml", "--set", "QPS", "--with", "on-0.txt")
