"""`hpcrun ckpt plan`: every figure with its source, and nothing that nobody knows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hpcrun.checkpoint.policy.size import count_stage_parameters
from hpcrun.cli.ckpt import app
from hpcrun.errors import UsageError
from hpcrun.formulas import model_parameters
from hpcrun.specs.load import load_job
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.shipped import shipped_file
from tests.runs.made_runs import undisturbed
from tests.runs.test_history import write

LAMA = [
    *("parallel.dp_replicate=8", "train.gbs=512", "resources.nodes=8", "checkpoint.memory=2"),
    *("checkpoint.every=100", "checkpoint.durable.every=500", "checkpoint.keep_every=5000"),
]
KNOWN = ["--assume", "stall=0.6", "--assume", "durable=45s", "--assume", "step=3.2", "--assume", "restart=5m"]
PROFILE = """
name: tiny
default: true
partitions: {gpu: {default: true, mem_per_node: 64G}}
topology:
  source: table
  table: {leaf1: "n[1-4]", leaf2: "n[5-8]"}
  levels: [{name: leaf, bandwidth_GBps: 25}]
file_systems:
  runs: {path: ROOT, node_write_GBps: 2, write_GBps: 8}
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No profile, and no Slurm."""
    for name in ("HPCRUN_SITE", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "site"))
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path / "site"


@pytest.fixture
def lama(tmp_path: Path) -> Path:
    job = tmp_path / "llama3-8b.yaml"
    job.write_text(shipped_file("jobs/llama3-8b.yaml").read_text())
    (tmp_path / "books.bin").touch()
    return job


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def told(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found.pop("schema_version") == 2
    return found


def profile(site: Path, runs_root: Path) -> None:
    (site / "profiles").mkdir(parents=True)
    text = PROFILE.replace("ROOT", str(runs_root))
    (site / "profiles" / "tiny.yaml").write_text(text)


def test_without_anything_known_nothing_is_made_up(runs_root: Path) -> None:
    found = told(shipped_file("jobs/demo.yaml"))
    assert found["sizes"]["whole"]["value"] == 853_120 * 12
    assert found["advice"] is None
    assert found["missing"] == ["the stall of durable"]
    assert found["memory"]["there"] == {
        "value": None,
        "source": "no profile, and the job asks for none (resources.mem)",
    }
    assert found["rates"][-1]["per_s"] is None
    text = run(shipped_file("jobs/demo.yaml")).stdout
    assert "not known: the stall of durable; run the job for a few saves" in text
    assert "left          unknown" in text
    assert "at most 3 saves, 29.29 MiB: the newest 2" in text


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.pp=2"],
        ["parallel.pp=4", "parallel.tp=1", "train.gbs=64"],
        ["parallel.schedule=zero_bubble"],
        ["model=tiny", "parallel.pp=1", "parallel.schedule=1f1b"],
    ],
)
def test_parameters_of_the_stages_add_up_to_the_model(layout: list[str]) -> None:
    resolved = load_job(shipped_file("jobs/demo.yaml"), layout)
    assert resolved.spec.model is not None
    stages = count_stage_parameters(resolved.spec, resolved.training_plan)
    assert len(stages) == resolved.spec.parallel.pp
    assert sum(stages) == model_parameters(resolved.spec.model)


def test_copies_on_spares_are_among_what_is_survived(lama: Path, site: Path, runs_root: Path) -> None:
    profile(site, runs_root)
    spared = [*LAMA, "parallel.dp_replicate=4", "resources.nodes=4", "resources.spares=2"]
    words = "spares copy the newest save"
    assert words in told(lama, *spared)["losses"][-1]
    assert f"  {words}" in run(lama, *spared).stdout
    assert words not in run(lama, *spared, "checkpoint.replicate_to_spares=false").stdout
    assert words not in run(lama, *LAMA).stdout


def test_a_plan_with_all_that_it_needs(lama: Path, site: Path, runs_root: Path) -> None:
    profile(site, runs_root)
    found = told(lama, *LAMA, *KNOWN, "--check")
    assert found["sizes"]["node"]["value"] > found["sizes"]["whole"]["value"] / 8
    memory = found["memory"]
    assert memory["there"] == {"value": 64 * 2**30, "source": "profile tiny: mem_per_node of gpu"}
    assert memory["slots"]["value"] == 2 * found["sizes"]["node"]["value"]
    assert memory["left"] == memory["there"]["value"] - memory["slots"]["value"] - memory["parity"]["value"]
    assert memory["left"] > 0
    tiers = {one["tier"]: one for one in found["tiers"]}
    assert {name: one["every"] for name, one in tiers.items()} == {
        "memory": 100,
        "parity": 100,
        "durable": 500,
    }
    assert tiers["durable"]["flush"] == {"value": 45.0, "source": "as given"}
    assert tiers["parity"]["flush"]["source"] == "at best: profile tiny, 25 GB/s of a node to its leaf"
    assert any("leaf" in line and "survives the loss" in line for line in found["losses"])
    keys = found["advice"]["keys"]
    assert keys["checkpoint.durable.every"] % keys["checkpoint.every"] == 0
    assert found["kept"]["saves"] == 2 + 3 + 1
    at = {factor: one["efficiency"] for factor, one in found["check"]["at"].items()}
    assert at["1.0"] >= found["check"]["best"]["efficiency"] * 0.99
    assert found["own_waste"] >= found["advice"]["waste"]
    assert found["lead_s"] == pytest.approx(1.5 * (45 + 0.6 + tiers["parity"]["flush"]["value"]) + 3.2)
    text = run(lama, *LAMA, *KNOWN, "--check").stdout
    for words in (
        f"checkpoint.every={keys['checkpoint.every']}",
        "training waits 0.6 s a save",
        "best tried",
        "the newest 3 and each multiple of 5000 steps",
        "Llama 3 report: 419 stops in 54 days on 16,384 GPUs",
    ):
        assert words in text


def test_bandwidths_of_the_profile_stand_in_for_measured_times(
    lama: Path, site: Path, runs_root: Path
) -> None:
    profile(site, runs_root)
    found = told(lama, *LAMA)
    durable = next(one for one in found["tiers"] if one["tier"] == "durable")["flush"]
    whole, node = (found["sizes"][name]["value"] for name in ("whole", "node"))
    assert durable == {
        "value": max(node / 2e9, whole / 8e9),
        "source": "at best: profile tiny, file_systems.runs",
    }
    assert found["advice"] is None, "the stall is still not known"


def test_slots_that_do_not_fit_are_said(lama: Path) -> None:
    text = run(lama, *LAMA, "resources.mem=16G").stdout
    assert "MISSING: the slots do not fit" in text


def test_times_of_earlier_runs_are_taken(runs_root: Path) -> None:
    made = write(create_run("demo"), undisturbed())
    found = told(shipped_file("jobs/demo.yaml"), "--assume", "process=6h")
    assert found["tiers"][0]["stall"] == {"value": 0.5, "source": f"median in {made.id}"}
    assert found["step"]["value"] == 1.0
    assert found["advice"]["keys"].keys() == {"checkpoint.every"}
    assert found["rates"][0] == {"kind": "process", "per_s": 1 / 21600, "source": "as given"}
    other = told(shipped_file("jobs/demo.yaml"), "parallel.tp=1")
    assert other["advice"] is None
    assert told(shipped_file("jobs/demo.yaml"), "parallel.tp=1", "--from", made.id)["advice"] is not None


def test_the_object_store_is_reckoned_with(lama: Path) -> None:
    found = told(lama, *LAMA, "checkpoint.object.url=s3://bucket/place", "checkpoint.object.every=1000")
    assert found["objects"]["copies"] == 10
    few, many = found["objects"]["requests"]
    assert 8 * 24 < few < many < 8 * 200
    assert "object" in {one["tier"] for one in found["tiers"]}


def test_a_limit_below_the_interval_is_told(lama: Path) -> None:
    found = told(lama, *LAMA, "checkpoint.max_durable_age=10m", *KNOWN)
    assert any(re.search(r"max_durable_age: 10m is less than 27 min 2\d s", note) for note in found["notes"])


@pytest.mark.parametrize("word", ["stall", "nope=3", "stall=soon", "node=0", "step=-1"])
def test_what_is_assumed_has_to_make_sense(word: str) -> None:
    with pytest.raises(UsageError, match="--assume"):
        CliRunner().invoke(
            app, ["plan", str(shipped_file("jobs/demo.yaml")), "--assume", word], catch_exceptions=False
        )


def test_a_programs_own_saves_are_not_known(tmp_path: Path) -> None:
    found = told(shipped_file("jobs/command.yaml"))
    assert found["sizes"]["whole"]["value"] is None
    assert found["kept"]["bytes"] is None
