"""`hpcrun ckpt` and an object store: upload, download, ls and verify of copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.ckpt import app
from hpcrun.errors import SiteError, UsageError
from hpcrun.specs.load import load_job, render_job
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import read_saved_checkpoints
from hpcrun.specs.shipped import shipped_file
from tests.checkpoint.generations import save


def run(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(*arguments: str | Path | int) -> str:
    result = run(*arguments)
    assert result.exception is None
    return result.stdout


def told(*arguments: str | Path | int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    assert found["schema_version"] == 2
    return found


@pytest.fixture
def store(tmp_path: Path) -> str:
    pytest.importorskip("fsspec", reason="pip install 'hpcrun-slurm[s3]'")
    return f"file://{tmp_path}/store"


@pytest.fixture
def done(runs_root: Path, store: str) -> RunDir:
    """A finished run whose job names a store, with saves of steps 2 and 4."""
    made = create_run("done")
    job = load_job(shipped_file("jobs/demo.yaml"), [f"checkpoint.object.url={store}", "checkpoint.memory=1"])
    made.spec.write_text(render_job(job.spec), encoding="utf-8")
    write_json(made.exit, {"status": "done", "exit_code": 0, "attempt": 1, "step": 4})
    for step in (2, 4):
        save(made.checkpoints, step, files=2)
    return made


def test_a_step_goes_there_and_back(done: RunDir, store: str) -> None:
    generation = read_saved_checkpoints(done.checkpoints)[0][-1].generation
    place = f"{store}/{done.run_id}/step-00000004.{generation}"
    planned = said("upload", done.path, "--dry-run")
    assert planned.startswith(f"would copy step 4 to {place}: 2 objects, ")
    assert not Path(store.removeprefix("file://")).exists()
    lines = said("upload", done.path, "--verify").splitlines()
    assert lines[0].startswith(f"step 4: {place}: 2 objects sent (")
    assert lines[1:] == ["the store has no checksum of 2 objects", "read back: whole"]
    again = told("upload", done.path)
    assert (again["sent_objects"], again["kept_objects"]) == (0, 2)
    assert "is whole in" in said("download", done.path)

    (done.checkpoints / "step-00000004" / "data-00001.bin").write_bytes(b"")
    assert said("download", done.path, "--dry-run").startswith("would fetch step 4, ")
    fetched = told("download", done.path)
    assert (fetched["fetched"], fetched["step"]) == (True, 4)
    assert said("verify", done.path) == "step 4: whole\nstep 2: whole\n"


def test_ls_shows_copies_beside_saves(done: RunDir, store: str) -> None:
    said("upload", done.path, "--step", 2)
    steps = told("ls", done.path)["steps"]
    assert [(one["step"], one["tier"], one["state"]) for one in steps] == [
        (2, "durable", "complete"),
        (2, "object", "complete"),
        (4, "durable", "complete"),
    ]
    assert steps[1]["path"].startswith(f"{store}/{done.run_id}/step-00000002.")
    (manifest,) = Path(store.removeprefix("file://")).rglob("manifest.json")
    manifest.unlink()
    assert "  object  2 ranks  damaged  " in said("ls", done.path)
    assert "manifest.json is missing" in said("ls", done.path)
    (record,) = Path(store.removeprefix("file://")).rglob("complete.json")
    record.write_text("{}")
    (broken,) = told("ls", done.path)["damaged"]
    assert broken["path"].startswith(f"{store}/")


def test_ls_without_the_store_says_what_is_unknown(done: RunDir) -> None:
    job = load_job(
        shipped_file("jobs/demo.yaml"), ["checkpoint.object.url=nonsense://x/y", "checkpoint.memory=1"]
    )
    done.spec.write_text(render_job(job.spec), encoding="utf-8")
    result = run("ls", done.path)
    assert result.exit_code == 0
    assert result.stderr.startswith(
        "hpcrun: copies in the object store are unknown: nonsense:// needs a package"
    )
    assert len(told("ls", done.path)["steps"]) == 2
    assert "nonsense://" in told("ls", done.path)["copies_unknown"]
    asked = run("ls", done.path, "--url", "nonsense://x/y")
    assert isinstance(asked.exception, SiteError)


def test_a_run_whose_job_has_no_store_is_told_where(done: RunDir, store: str) -> None:
    done.spec.write_text(render_job(load_job(shipped_file("jobs/demo.yaml")).spec), encoding="utf-8")
    for verb in ("upload", "download"):
        result = run(verb, done.path)
        assert isinstance(result.exception, UsageError)
        assert "its job has no checkpoint.object; say where with --url" in str(result.exception)
    said("upload", done.path, "--url", f"{store}/elsewhere")
    assert len(told("ls", done.path)["steps"]) == 2
    assert len(told("ls", done.path, "--url", f"{store}/elsewhere")["steps"]) == 3
    assert "is whole in" in said("download", done.path, "--from", f"{store}/elsewhere")
    missing = run("download", done.path, "--from", store)
    assert isinstance(missing.exception, UsageError)
    assert f"has no whole copy of {done.id} (copies: none)" in str(missing.exception)


def test_verify_reads_copies_back(done: RunDir, store: str) -> None:
    for step in (2, 4):
        said("upload", done.path, "--step", step)
    assert told("verify", done.path, "--object")["newest_whole_step"] == 4
    one = sorted(Path(store.removeprefix("file://")).rglob("step-00000004.*/data-00001.bin.*"))[0]
    data = bytearray(one.read_bytes())
    data[200] ^= 1
    one.write_bytes(data)
    result = run("verify", done.path, "--object")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].endswith(": damaged")
    assert lines[1] == f"  file://{one}: its bytes do not match their hash"
    assert lines[2].endswith(": whole")
    assert said("verify", done.path, "--object", "--step", 2).endswith(": whole\n")
    none = run("verify", done.path, "--object", "--step", 3)
    assert "has no copy of step 3" in str(none.exception)
    refused = run("download", done.path, "--step", 3)
    assert "has no whole copy of step 3" in str(refused.exception)


def test_a_running_run_is_left_alone(done: RunDir) -> None:
    done.exit.unlink()
    write_json(done.job, {"id": done.id})
    result = run("download", done.path)
    assert isinstance(result.exception, UsageError)


def test_repair_fetches_what_is_damaged_and_no_more(done: RunDir, store: str) -> None:
    said("upload", done.path)
    step = done.checkpoints / "step-00000004"
    whole = {path.name: path.read_bytes() for path in step.iterdir()}
    (step / "manifest.json").unlink()
    data = bytearray(whole["data-00001.bin"])
    data[200] ^= 1
    (step / "data-00001.bin").write_bytes(data)
    (one,) = told("repair", done.path)["repairs"]
    url = f"{store}/{done.run_id}/step-00000004.{one['generation']}"
    assert [what["from"].rstrip("/") for what in one["mended"]] == [url, url]
    assert {path.name: path.read_bytes() for path in step.iterdir()} == whole
    (fetched,) = [size for name, size in one["taken_bytes"].items() if name.startswith("file:")]
    assert fetched == 20 * 16 * 4, "the one chunk"
