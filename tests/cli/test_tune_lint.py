"""`hpcrun tune`: what lint and explain print, say and exit with."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.tune import app
from hpcrun.errors import EXIT_CHECK_FAILED, HpcrunError, UsageError
from hpcrun.tuning.lint import environment

DATA = Path(__file__).parents[1] / "data" / "tuning"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell without settings, a home and an /etc of the test's own."""
    for name in list(os.environ):
        if name.startswith(("NCCL_", "UCX_", "TORCH_NCCL_", "GLOO_", "FI_", "CUDA_", "LD_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(folder)))
    monkeypatch.setattr(environment, "NCCL_SITE_CONF", tmp_path / "nccl.conf")
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: str | Path) -> str:
    """The one line of an error that a person can act on."""
    result = call(*words)
    assert isinstance(result.exception, HpcrunError)
    line = str(result.exception)
    assert "\n" not in line
    return line


def test_a_clean_shell() -> None:
    result = call("lint", "--nccl-version", "2.27.5")
    assert result.exit_code == 0
    assert result.stdout == "0 errors, 0 warnings, 0 notes; 0 variables looked at\n"
    assert result.stderr == "hpcrun: NCCL 2.27.5 (--nccl-version)\n"


def test_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_TIMOUT", "22")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    result = call("lint")
    assert result.exit_code == EXIT_CHECK_FAILED
    first, second, last = result.stdout.splitlines()
    assert first.startswith("error    shell NCCL_IB_TIMOUT: is not known")
    assert second.startswith("warning  shell NCCL_IB_HCA: 'mlx5_1' also takes")
    assert last == "1 error, 1 warning, 0 notes; 2 variables looked at"


def test_all_that_is_set() -> None:
    result = call("lint", "--all", "--env", DATA / "spectrum-x.env", "--nccl-version", "2.27.5")
    told = [line for line in result.stdout.splitlines() if line.startswith("set ")]
    assert len(told) == 9
    assert told[0] == f"set      {DATA}/spectrum-x.env:1 NCCL_IB_ADAPTIVE_ROUTING: '1'"


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_BUFFSIZE", "4M")
    result = call("lint", "--json", "--nccl-version", "2.27.5")
    found = json.loads(result.stdout)
    assert result.exit_code == EXIT_CHECK_FAILED
    assert found["schema_version"] == 2
    assert found["nccl"] == {"version": "2.27.5", "how": "--nccl-version", "others": []}
    assert [(one["severity"], one["subject"], one["where"]) for one in found["findings"]] == [
        ("error", "NCCL_BUFFSIZE", "shell")
    ]
    assert found["settings"]["NCCL_BUFFSIZE"] == {
        "value": "4M",
        "is_set": True,
        "where": "shell",
        "steps": [{"value": "4M", "origin": "shell", "where": "shell", "fate": "counts"}],
    }


def test_the_files_that_nccl_finds(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_IB_TC=104\nNCCL_IB_SL=1\n")
    (home / ".nccl.conf").write_text("NCCL_IB_TC=106\n")
    own = tmp_path / "own.conf"
    own.write_text("NCCL_IB_TC=96\n")

    def traffic_class(*words: str) -> dict[str, Any]:
        found = json.loads(call("explain", "IB_TC", "--json", *words).stdout)
        setting: dict[str, Any] = found["variables"][0]["setting"]
        return setting

    chain = traffic_class()
    assert (chain["value"], chain["where"]) == ("106", f"{home}/.nccl.conf:1")
    assert [step["fate"] for step in chain["steps"]] == [
        "counts",
        f"not looked at: {home}/.nccl.conf:1 sets it",
    ]
    monkeypatch.setenv("NCCL_CONF_FILE", str(own))
    assert traffic_class()["where"] == f"{own}:1"
    assert traffic_class("--nccl-version", "2.22.3")["where"] == f"{home}/.nccl.conf:1"
    monkeypatch.setenv("NCCL_IB_TC", "41")
    assert traffic_class()["where"] == "shell"
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "gone"))
    assert "is not a file here, and NCCL passes over that in silence" in call("lint").stdout
    monkeypatch.setenv("NCCL_TOPO_FILE", str(tmp_path / "gone.xml"))
    monkeypatch.setenv("NCCL_CONF_FILE", str(own))
    own.write_text(f"NCCL_TUNER_PLUGIN={tmp_path}/libnccl-tuner-x.so\nNCCL_DEBUG_FILE={tmp_path}/%p\n")
    lines = [one for one in call("lint").stdout.splitlines() if " is not a file here, and " in one]
    assert lines[0].startswith(
        f"warning  shell NCCL_TOPO_FILE: '{tmp_path}/gone.xml' is not a file here, and NCCL"
    )
    assert lines[1].startswith(
        f"warning  {own}:1 NCCL_TUNER_PLUGIN: '{tmp_path}/libnccl-tuner-x.so' is not a file"
    )
    assert len(lines) == 2
    monkeypatch.delenv("NCCL_TOPO_FILE")
    named = call("lint", "--nccl-conf", DATA / "nccl-broken.conf")
    assert named.exit_code == EXIT_CHECK_FAILED
    assert "nccl-broken.conf:2 NCCL_DEBUG: this is not a shell" in named.stdout


def test_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    result = call("lint", "--script", DATA / "job.sbatch", "--nccl-version", "2.27.5")
    assert "job.sbatch:10 NCCL_IB_TIMEOUT: is set without `export`" in result.stdout
    assert "'WARN' wins over 'INFO' (shell)" in result.stdout
    assert "job.sbatch:7: what `source /opt/site/env.sh` sets is not known here" in result.stderr
    alone = tmp_path / "alone.sbatch"
    alone.write_text("#!/bin/bash\n#SBATCH --export=NONE\nexport NCCL_IB_TC=106\n")
    result = call("lint", "--script", alone)
    assert "NCCL_DEBUG" not in result.stdout
    assert "its --export keeps this shell's environment out" in result.stderr


def test_an_image() -> None:
    result = call("lint", "--container-env", DATA / "image.json")
    assert "warning  " in result.stdout
    assert "image.json NCCL_DEBUG: 'INFO': left over" in result.stdout
    assert "hpcrun: NCCL 2.26.5 (NCCL_VERSION, as the image says)" in result.stderr
    assert "taken to win over what comes from outside" in result.stderr


def test_a_job_and_its_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = tmp_path / "site" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "site.yaml").write_text(
        "name: site\nsetup: ['export NCCL_IB_SL=1']\nenv: {NCCL_IB_TC: '106', NCCL_IB_TIMEOUT: '22'}\n"
    )
    job = tmp_path / "job.yaml"
    job.write_text("command: [./a]\nmodules: [nccl/2.27]\nenv:\n  NCCL_IB_TIMEOUT: '40'\n")
    image = tmp_path / "image.env"
    image.write_text("NCCL_IB_TIMEOUT=18\nNCCL_IB_SL=2\n")
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "14")
    result = call(
        "explain", "ib_timeout", "ib_sl", "NCCL_IB_TC", "--job", job, "--container-env", image, "--json"
    )
    steps = {
        one["name"]: [(step["where"].rpartition("/")[2], step["fate"]) for step in one["setting"]["steps"]]
        for one in json.loads(result.stdout)["variables"]
    }
    assert [where for where, _ in steps["NCCL_IB_TIMEOUT"]] == [
        "shell",
        "image.env:1",
        "profile site env",
        "job.yaml:4",
    ]
    assert [fate for _, fate in steps["NCCL_IB_TIMEOUT"]][-1] == "counts"
    assert [where for where, _ in steps["NCCL_IB_SL"]] == ["profile site setup:1", "image.env:2"]
    assert steps["NCCL_IB_TC"] == [("profile site env", "counts")]
    result = call("lint", job)
    assert result.exit_code == EXIT_CHECK_FAILED
    assert "job.yaml:4 NCCL_IB_TIMEOUT: '40' is out of range; allowed: 0 to 31" in result.stdout
    assert "what the job's modules set is not known here" in result.stderr


def test_what_hpcrun_adds_to_a_job_is_looked_at_too(tmp_path: Path) -> None:
    profiles = tmp_path / "site" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "site.yaml").write_text(
        "name: site\nnetwork: {hcas: [mlx5_0], traffic_class: 106}\nenv: {NCCL_IB_TC: '96'}\n"
    )
    job = tmp_path / "job.yaml"
    job.write_text("command: [./a]\ncluster: site\nresources: {nodes: 2}\nenv: {NCCL_IB_DISABLE: '1'}\n")
    result = call("explain", "NCCL_IB_HCA", "NCCL_IB_TC", "--job", job)
    assert "set       hpcrun, profile: network.hcas: =mlx5_0: counts" in result.stdout
    assert "set       profile site env: 96: counts" in result.stdout
    assert "hpcrun, profile: network.traffic_class: 106: not looked at: profile site env" in result.stdout
    assert "NCCL_IB_DISABLE" not in call("lint", job, "env={}").stdout
    (profiles / "site.yaml").write_text(
        "name: site\nnetwork: {traffic_class: 106}\nenv: {NCCL_IB_TC: '96'}\n"
        "mpi: {library: openmpi, launcher: srun, pmi: pmix}\n"
    )
    assert "0 warnings" in call("lint", job, "env={}").stdout, "MPI goes along"
    (profiles / "other.yaml").write_text("name: other\nnetwork: {service_level: 1}\n")
    other = call("lint", job, "env={}", "--cluster", "other", "--all").stdout
    assert "hpcrun, profile: network.service_level NCCL_IB_SL: '1'" in other
    assert "--cluster: says which profile a job has" in str(call("lint", "--cluster", "other").exception)
    (profiles / "site.yaml").write_text("name: site\nnetwork: {hcas: [mlx5_0]}\n")
    result = call("lint", job)
    assert "hpcrun, profile: network.hcas NCCL_IB_HCA: does nothing: NCCL_IB_DISABLE=1" in result.stdout
    (profiles / "site.yaml").write_text("name: site\nnetwork: {fabric: infinband}\n")
    result = call("lint", job)
    assert "hpcrun sets nothing: profile site: network.fabric: infinband: no such fabric" in result.stderr


def test_ranks() -> None:
    good = [word for rank in range(4) for word in ("--env", DATA / f"rank-{rank}.env")]
    result = call("lint", *good)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "0 errors, 0 warnings, 1 note; 4 variables looked at"
    result = call("lint", *good, "--env", DATA / "rank-odd.env")
    assert result.exit_code == EXIT_CHECK_FAILED
    assert "error    NCCL_IB_TC: must be equal on all ranks and is not" in result.stdout


def test_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_TC", "106")
    lines = call("explain", "ib_tc", "--nccl-version", "2.24.3").stdout.splitlines()
    told = {line[2:11].strip(): line[12:] for line in lines[1:]}
    assert lines[0] == "NCCL_IB_TC"
    assert told["read"] == "yes, by 2.24.3 (from 2.3 on)"
    assert told["default"] == "0 in 2.24.3 (0; -1 from 2.26 on)"
    assert told["value"] == "TC 106 = DSCP 26, ECT(0), priority 3"
    assert told["set"] == "shell: 106: counts"
    assert told["source"] == "NVIDIA's NCCL user guide"
    assert told["kind"].endswith("equal on all ranks")
    assert told["risk"]


@pytest.mark.parametrize(
    ("name", "release", "words"),
    [
        ("NCCL_IB_TIMOUT", "2.27.5", "not known up to NCCL 2.32.3; did you mean NCCL_IB_TIMEOUT?"),
        ("NCCL_QWERTY", "2.27.5", "not known up to NCCL 2.32.3"),
        (
            "NCCL_MIN_CHANNELS",
            "2.27.5",
            "no variable of NCCL; not read by anything we know; use NCCL_MIN_CTAS",
        ),
        ("NCCL_FASTRAK_X", "2.27.5", "no variable of NCCL; read by Google's TCPXO plugin"),
        ("NCCL_TUNING", "2.27.5", "no variable: a subsystem"),
        ("NCCL_TREE_THRESHOLD", "2.27.5", "no, not by 2.27.5 (from 2.4 on, no longer from 2.5 on)"),
        ("NCCL_MIN_NCHANNELS", "2.27.5", "yes, by 2.27.5 (from 2.5 on, deprecated since 2.17)"),
        ("NCCL_IB_PKEY_VALUE", "2.27.5", "no, not by 2.27.5 (from 2.31 on)"),
        ("NCCL_LSA_TEAM_SIZE", "2.32.3", "yes, by 2.32.3 (by 2.32.3; other releases are not known)"),
        ("NCCL_LSA_TEAM_SIZE", "2.27.5", "not known for 2.27.5"),
        ("NCCL_LSA_TEAM_SIZE", "2.27.5", "Documented nowhere we know; internal or undocumented."),
        ("NCCL_PSK", "2.32.3", "no, not by 2.32.3 (not yet by 2.32.3; its documentation names it)"),
        ("UCX_TLS", "2.27.5", "by ucx, not by NCCL"),
        ("NCCL_IB_SPLIT_DATA_ON_QPS", "2.19.3", "1 in 2.19.3 (1; 0 from 2.20 on)"),
        ("NCCL_IB_ADDR_FAMILY", "2.27.5", "fails with error 12"),
    ],
)
def test_explanations_of_all_kinds(name: str, release: str, words: str) -> None:
    result = call("explain", name, "--nccl-version", release)
    assert result.exit_code == 0
    assert words in result.stdout
    found = json.loads(call("explain", name, "--nccl-version", release, "--json").stdout)
    assert found["schema_version"] == 2
    assert found["variables"][0]["name"] == name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--nccl-version", "newest"),
            "--nccl-version: 'newest' is not a release of NCCL; write it as 2.27.5",
        ),
        (("--script", "gone.sbatch"), "gone.sbatch: no such file"),
        (("--nccl-conf", "gone.conf"), "gone.conf: no such file"),
        (("--env", "gone.env"), "gone.env: no such file"),
        (("--container-env", "/proc/self/mem"), "cannot be read"),
        (("--env", DATA / "job.sbatch"), "is not a NAME=VALUE"),
        (("gone.yaml",), "gone.yaml: no such file"),
    ],
)
def test_what_cannot_be_read_is_one_line(words: tuple[str | Path, ...], told: str) -> None:
    assert told in refused("lint", *words)


@pytest.mark.parametrize("name", ["", "a b", "x\ny", "é", "NCCL-IB", "NCCL_IB_TC=106"])
def test_what_is_no_name_is_one_line(name: str) -> None:
    assert "is not a name of a variable; write letters, digits and _" in refused("explain", name)


@pytest.mark.process
def test_odd_bytes_in_the_environment_are_escaped(tmp_path: Path) -> None:
    environ = {b"NCCL_\xff": b"1", b"NCCL_IB_HCA": b"=mlx5_0,\xfe", b"PATH": os.environb[b"PATH"]}
    environ[b"PYTHONPATH"] = os.fsencode(Path(__file__).parents[2])
    for words in (["lint", "--all"], ["lint", "--json"], ["explain", "NCCL_IB_HCA"]):
        command = [sys.executable, "-m", "hpcrun", "tune", *words]
        done = subprocess.run(
            command, env=environ, capture_output=True, check=False, cwd=tmp_path, timeout=60
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode == 0
        assert b"mlx5_0,\\udcfe" in done.stdout


def test_binary_files_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)))
    for option in ("--script", "--nccl-conf", "--env", "--container-env"):
        assert "is not text in UTF-8" in refused("lint", option, path)
    with pytest.raises(UsageError, match="is not text"):
        raise call("explain", "IB_TC", "--env", path).exception or AssertionError


def test_the_summary_says_how_much_of_a_script_was_read(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/bash\nsrun bash -c "export NCCL_IB_RETRY_CNT=32; x"\nsrun bash run.sh\n')
    result = call("lint", "--script", script)
    assert result.exit_code == EXIT_CHECK_FAILED
    assert result.stdout.splitlines()[-1].endswith(f"; {script}: 4 commands read, 1 not looked into")
    assert f"{script}:3: what the script `run.sh` sets is not known here" in result.stderr
    assert json.loads(call("lint", "--script", script, "--json").stdout)["read"]
