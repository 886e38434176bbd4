"""What is checked before any rank starts."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.lustre import storage
from hpcrun.checkpoint.policy.capacity import plan_save_storage_in_time
from hpcrun.errors import SiteError, SpecError, UsageError
from hpcrun.mounts import MountEntry, find_mount
from hpcrun.specs.load import render_job
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.prepare import prepare_job
from tests.checkpoint.lustre_stand_in import Emulated, ost
from tests.launch.supervised import Site


def test_a_job_becomes_a_spec_and_a_plan(site: Site) -> None:
    prepared = prepare_job(site.job, ["parallel.dp_shard=2", "parallel.tp=2"])
    assert prepared.ranks == 4
    assert prepared.spec.parallel.zero == 3
    assert not (site.path / "runs").exists(), "looking is not launching"


def test_data_is_looked_at_before_the_launch_and_not_for_a_plan(site: Site) -> None:
    (site.path / "corpus.txt").unlink()
    prepare_job(site.job, until="plan")
    with pytest.raises(UsageError, match=r"corpus.txt: does not exist"):
        prepare_job(site.job)


def test_a_vocabulary_that_the_model_lacks(site: Site) -> None:
    with pytest.raises(SpecError, match=r"model.vocab: 128 is less than the 256 of .*corpus.txt; use 256"):
        prepare_job(site.job, ["model.vocab=128"])


def test_weights_must_be_there(site: Site) -> None:
    weights = site.path / "weights"
    with pytest.raises(SpecError, match=r"model.weights: .* is not a directory"):
        prepare_job(site.job, [f"model.weights={weights}"])
    weights.mkdir()
    with pytest.raises(SpecError, match=r"model.weights: .* has neither model.safetensors nor"):
        prepare_job(site.job, [f"model.weights={weights}"])
    whole = (2).to_bytes(8, "little") + b"{}"
    (weights / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(SpecError, match=r"model.weights: .* truncated or damaged"):
        prepare_job(site.job, [f"model.weights={weights}"])
    (weights / "model.safetensors").write_bytes(whole)
    prepare_job(site.job, [f"model.weights={weights}"])


def test_the_disk_must_hold_the_saves(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs_result((1000, 1000, 1000, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    with pytest.raises(SiteError, match=r"97\.66 KiB are free, but .* need .*B; set HPCRUN_ROOT"):
        prepare_job(site.job)
    prepare_job(site.job, ["checkpoint.at_end=false", "checkpoint.every=0"])


@pytest.fixture
def lustre(site: Site, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    """One below the runs of the site."""
    emulated = Emulated(site.path)
    monkeypatch.setenv("PATH", emulated.path)
    monkeypatch.setenv("HPCRUN_ROOT", str(emulated.mount / "runs"))
    monkeypatch.setattr(storage, "find_mount", lambda path, _: find_mount(path, emulated.mountinfo))
    return emulated


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"osts": [ost(0, free=1000)]}, r"no save can be kept here: space: .* one save needs .* make room"),
        ({"inodes": 3}, "no save can be kept here: inodes: 3 free, one save needs 5"),
        (
            {"quotas": {"-u": {"row": [1 << 20, 0, (1 << 20) + 4, 10, 0, 0]}}},
            "no save can be kept here: quota of the user, space: 4 KiB free",
        ),
    ],
)
def test_the_file_system_must_hold_one_save(
    lustre: Emulated, site: Site, state: dict[str, Any], words: str
) -> None:
    prepare_job(site.job)
    lustre.set(**state)
    with pytest.raises(SiteError, match=words):
        prepare_job(site.job)
    prepare_job(site.job, ["checkpoint.at_end=false", "checkpoint.every=0"])


def test_a_file_system_that_does_not_answer_does_not_hold_a_job_up(
    lustre: Emulated, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()

    def hang(path: Path, _: Path) -> MountEntry:
        never.wait(60)
        raise OSError(5, "gone")

    monkeypatch.setattr(storage, "find_mount", hang)
    prepared = prepare_job(site.job, until="plan")
    told = plan_save_storage_in_time(prepared.spec, prepared.plan, lustre.mount, most_s=0.01)
    never.set()
    assert told is not None
    assert told.refusal is None
    assert "whether saves fit there is not known: it has not answered in 0.01 s" in told.findings[0].text


def saved_run(site: Site, *overrides: str) -> RunDir:
    run = create_run("t")
    run.spec.write_text(render_job(prepare_job(site.job, overrides).spec))
    return run


def test_a_resumed_run_takes_its_own_spec(site: Site) -> None:
    run = saved_run(site, "train.lr=0.5")
    prepared = prepare_job(None, ["train.steps=7"], resume=run)
    assert (prepared.spec.train.lr, prepared.spec.train.steps, prepared.resume) == (0.5, 7, run)


def test_a_new_layout_keeps_the_batch_and_finds_the_rest_anew(site: Site) -> None:
    run = saved_run(site, "parallel.dp_replicate=2", "train.gbs=8")
    assert "microbatches: 4" in run.spec.read_text()
    prepared = prepare_job(None, ["parallel.dp_replicate=1", "parallel.dp_shard=4"], resume=run)
    assert (prepared.training_plan.gbs, prepared.training_plan.grad_accum, prepared.training_plan.zero) == (
        8,
        2,
        3,
    )


def test_a_run_with_nothing_left_to_do(site: Site) -> None:
    run = saved_run(site)
    write_json(run.exit, {"status": "done", "step": 3})
    with pytest.raises(
        UsageError, match=r"is done \(3 of 3 steps\); to go on, give it more: .* train.steps=6"
    ):
        prepare_job(None, resume=run)
    assert prepare_job(None, ["train.steps=4"], resume=run).spec.train.steps == 4


def test_neither_job_nor_run() -> None:
    with pytest.raises(UsageError, match="no job file given"):
        prepare_job(None)
