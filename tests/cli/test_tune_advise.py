"""`hpcrun tune advise`, `checklist`, `uptake`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.submit import app as submit_app
from hpcrun.cli.tune import app
from hpcrun.errors import HpcrunError, UsageError
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.settings import CommSetting, CommSettings, write_comm_settings

PROFILE = "name: c\nnetwork: {interface: ib0, hcas: [mlx5_0], fabric: roce-spectrum}\n"
JOB = "name: j\ncommand: [date]\nresources: {nodes: 2}\nenv: {NCCL_IB_TC: '96'}\n"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "site" / "profiles").mkdir(parents=True)
    (tmp_path / "site" / "profiles" / "c.yaml").write_text(PROFILE)
    return tmp_path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, HpcrunError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_advice(job: Path) -> None:
    lines = run("advise", job).stdout.splitlines()
    assert lines[:3] == [
        "NCCL_SOCKET_IFNAME==ib0  # the interface between nodes; `=` so that no longer name is taken too"
        " (profile: network.interface)",
        "GLOO_SOCKET_IFNAME=ib0  # the same for gloo (profile: network.interface)",
        "NCCL_IB_HCA==mlx5_0  # the adapters for jobs; `=` so that mlx5_1 does not take mlx5_10"
        " (profile: network.hcas)",
    ]
    assert lines[3] == "# NCCL_IB_TC=96 stands, as env of the job has it; it would be 106"


def test_advice_as_json(job: Path) -> None:
    found = json.loads(run("advise", job, "--json").stdout)
    assert found["schema_version"] == 2
    assert [one["name"] for one in found["overruled"]] == ["NCCL_IB_TC"]
    assert {"name", "value", "reason", "source", "needs"} == set(found["settings"][0])


def test_what_stands_in_the_job_s_way_is_told_before(
    job: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = "env: {NCCL_SOCKET_IFNAME: eth7}\nsetup: ['export NCCL_IB_HCA=mlx5_9']\n"
    (site / "site" / "profiles" / "c.yaml").write_text(PROFILE + profile)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    assert run("advise", job).stdout.splitlines() == [
        "# NCCL_IB_TC=96 stands, as env of the job has it; it would be 106",
        "# NCCL_SOCKET_IFNAME=eth7 stands, as env of profile c has it; it would be =ib0",
        "# NCCL_IB_HCA=mlx5_9 stands, as setup of profile c has it; it would be =mlx5_0",
        "# GLOO_SOCKET_IFNAME=eth8 stands, as this shell has it; it would be ib0",
    ]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["resources.nodes=1"], "# one node: no traffic between nodes, so nothing is set for it\n"),
        (["cluster=local"], "# there is no profile of the cluster, so nothing is known to be set\n"),
    ],
)
def test_nothing_to_say_is_said(job: Path, words: list[str], note: str) -> None:
    assert run("advise", job, *words).stdout == note


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["advise"], "no job file given"),
        (["advise", "JOB", "--nccl-version", "x"], "--nccl-version: 'x' is not a release of NCCL"),
        (
            ["checklist", "spectrum"],
            "spectrum: no such fabric; did you mean spectrum-x?; there are infiniband,",
        ),
    ],
)
def test_mistakes(job: Path, words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(*(str(job) if word == "JOB" else word for word in words))
    assert str(caught.value).startswith(text)


@pytest.mark.process
def test_a_dry_run_tells_the_same_when_asked(job: Path) -> None:
    words = [str(job), "--dry-run", "--slurm-version", "24.05"]
    told = CliRunner().invoke(submit_app, [*words, "-v"]).stderr
    advised = [line for line in run("advise", job).stdout.splitlines() if not line.startswith("#")]
    assert [line for line in told.splitlines() if "the ranks get" in line] == [
        f"hpcrun: the ranks get {line}" for line in advised
    ]
    assert "the ranks get" not in CliRunner().invoke(submit_app, words).stderr


def test_checklists() -> None:
    listed = run("checklist").stdout
    assert "roce-spectrum  RoCE on NVIDIA Spectrum" in listed
    assert "nothing of it is applied" in run("checklist", "roce-arista").stdout
    assert json.loads(run("checklist", "oci", "--json").stdout)["kind"] == "oci"
    assert "tcp" in json.loads(run("checklist", "--json").stdout)["kinds"]


@pytest.fixture
def started(runs_root: Path) -> RunDir:
    one = create_run("job")
    one.spec.write_text("name: job\n")
    attempt = one.attempt(1).create()
    write_comm_settings(attempt.settings, CommSettings((CommSetting("NCCL_IB_TC", "106", "why", "where"),)))
    return one


@pytest.mark.parametrize(
    ("said", "verdict", "code"),
    [
        ("NCCL_IB_TC set by environment to 106.", "applied", 0),
        ("NCCL_IB_TC set by environment to 0.", "ignored", 1),
        ("comm 0x1 rank 0 nranks 2 - Init COMPLETE", "unknown", 0),
    ],
)
def test_uptake(started: RunDir, said: str, verdict: str, code: int) -> None:
    started.attempt(1).log(0).write_text(f"n1:1:1 [0] NCCL INFO {said}\n")
    assert run("uptake", started.id, code=code).stdout.startswith(f"{verdict:8} NCCL_IB_TC=106\n")
    (found,) = json.loads(run("uptake", started.id, "--json", code=code).stdout)["uptake"]
    assert found["verdict"] == verdict


def test_a_run_that_has_not_started(runs_root: Path) -> None:
    one = create_run("job")
    one.spec.write_text("name: job\n")
    with pytest.raises(UsageError, match="no attempt of it has settings on record"):
        run("uptake", one.id)
