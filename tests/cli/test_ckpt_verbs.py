"""`hpcrun ckpt`: what its verbs say of whole, damaged and old saves."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hpcrun import process
from hpcrun.checkpoint.format import ChunkSpec
from hpcrun.checkpoint.restore import run_repair
from hpcrun.cli.ckpt import app
from hpcrun.errors import UsageError
from hpcrun.specs.load import load_job, render_job
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import COMMIT_RECORD
from hpcrun.specs.shipped import shipped_file
from tests.checkpoint import generations
from tests.checkpoint.generations import save
from tests.checkpoint.test_repair import save_with_parity


def run(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(*arguments: str | Path | int) -> dict[str, Any]:
    result = run(*arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema_version"] == 2
    return found


@pytest.fixture
def saved_run(runs_root: Path) -> RunDir:
    """A finished run with saves of steps 2 and 4, of which the job wants to keep two."""
    made = create_run("done")
    made.spec.write_text(render_job(load_job(shipped_file("jobs/demo.yaml")).spec), encoding="utf-8")
    write_json(made.exit, {"status": "done", "exit_code": 0, "attempt": 1, "step": 4})
    for step in (2, 4):
        save(made.checkpoints, step, files=2)
    return made


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_ls_tells_complete_from_damaged(saved_run: RunDir) -> None:
    (saved_run.checkpoints / "step-00000004" / "data-00001.bin").write_bytes(b"")
    broken = saved_run.checkpoints / "step-00000005"
    broken.mkdir()
    (broken / COMMIT_RECORD).write_text("{")
    found = told("ls", saved_run.path)
    assert [(one["step"], one["state"]) for one in found["steps"]] == [
        (2, "complete"),
        (4, "damaged"),
    ]
    assert found["damaged"] == [
        {"path": str(broken), "problem": f"{COMMIT_RECORD} is not a record of a save"}
    ]
    lines = run("ls", saved_run.path).stdout.splitlines()
    assert lines[0].startswith("step 2  16 samples  ")
    assert "  durable  2 ranks  complete  " in lines[0]
    assert "data-00001.bin: has 0 bytes instead of" in lines[1]


def test_inspect_lists_tensors_with_their_files(saved_run: RunDir) -> None:
    found = told("inspect", saved_run.path)
    assert found["step"] == 4
    (tensor,) = [one for one in found["tensors"] if one["name"] == "model.a"]
    assert tensor == {
        "name": "model.a",
        "dtype": "float32",
        "shape": [40, 16],
        "size_bytes": 2560,
        "chunks": 2,
        "files": ["data-00000.bin", "data-00001.bin"],
    }
    shown = run("inspect", saved_run.path, "--step", 2).stdout
    assert "model.a  float32  40x16  2.5 KiB  2 chunks  data-00000.bin, data-00001.bin" in shown
    assert "model.scalar  float32  scalar  4 B  1 chunk  data-00000.bin" in shown
    wrong = run("inspect", saved_run.path, "--step", 3)
    assert isinstance(wrong.exception, UsageError)
    assert "no saved step 3 (saved: 2, 4)" in str(wrong.exception)


def test_verify_names_the_damage_and_an_older_whole_save(saved_run: RunDir) -> None:
    whole = run("verify", saved_run.path)
    assert (whole.exit_code, whole.stdout) == (0, "step 4: whole\nstep 2: whole\n")
    assert told("verify", saved_run.path)["newest_whole_step"] == 4
    flip(saved_run.checkpoints / "step-00000004" / "data-00000.bin", 200)
    result = run("verify", saved_run.path, "--step", 4)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "step 4: damaged"
    assert "model.a[0:20, 0:16]: its bytes do not match their hash" in lines[1]
    assert lines[2:] == [
        "step 2: whole",
        "newest whole save: step 2; train --resume resumes from there",
    ]
    flip(saved_run.checkpoints / "step-00000002" / "manifest.json", 200)
    none = run("verify", saved_run.path)
    assert none.exit_code == 1
    assert none.stdout.splitlines()[-1] == "no save was found whole"


def test_diff_tells_by_how_much(saved_run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(piece: ChunkSpec, step: int) -> bytes:
        count = piece.size_bytes // 4
        first = piece.offsets[0] if piece.offsets else 0
        row = piece.shape[1] if len(piece.shape) > 1 else 1
        values = [float(first * row + index) for index in range(count)]
        if piece.tensor == "model.a" and first == 0 and step == 8:
            values[3] += 0.5
            values[5] = float("nan")
        return struct.pack(f"<{count}f", *values)

    monkeypatch.setattr(generations, "content_of", content)
    save(saved_run.checkpoints, 6, ranks=2)
    # The same state from another layout.
    save(saved_run.checkpoints, 7, ranks=1)
    save(saved_run.checkpoints, 8, ranks=2)
    same = run("diff", saved_run.path, 6, 7)
    assert (same.exit_code, same.stdout) == (0, "all 4 tensors are equal\n"), same.stdout
    other = run("diff", saved_run.path, 6, 8)
    assert other.exit_code == 1
    assert other.stdout == (
        "model.a: values differ, largest difference nan, 2 elements\n1 of 4 tensors differ\n"
    )
    (one,) = told("diff", saved_run.path, 6, 8)["differences"]
    assert one == {"name": "model.a", "what": "values", "largest": "nan", "count": 2}
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "largest difference unknown" in run("diff", saved_run.path, 6, 8).stdout


def test_diff_of_columns_puts_tensors_together(saved_run: RunDir) -> None:
    """Chunks that are no rows: the bytes of a row come from several of them."""
    shape = (3, 2, 4)
    columns = [[ChunkSpec("model.x", "uint8", shape, (0, 0, 2 * r), (3, 2, 2))] for r in range(2)]
    save(saved_run.checkpoints, 6, shares=columns)
    with pytest.MonkeyPatch.context() as patched:
        whole = bytearray(24)
        for (piece,) in columns:
            content = generations.content_of(piece, 6)
            for row in range(6):
                at = row * 4 + piece.offsets[2]
                whole[at : at + 2] = content[2 * row : 2 * row + 2]
        patched.setattr(generations, "content_of", lambda _piece, _step: bytes(whole))
        save(saved_run.checkpoints, 7, shares=[[ChunkSpec("model.x", "uint8", shape, (0, 0, 0), shape)]])
    assert run("diff", saved_run.path, 6, 7).stdout == "all 1 tensors are equal\n"
    assert [one["what"] for one in told("diff", saved_run.path, 4, 6)["differences"]] == [
        *["only in the first"] * 4,
        "only in the second",
    ]


def test_gc_says_what_it_removes_and_a_dry_run_removes_nothing(saved_run: RunDir) -> None:
    leftover = saved_run.checkpoints / ".step-00000003.1"
    leftover.mkdir()
    (leftover / "data-00000.bin").write_bytes(bytes(1000))
    dry = run("gc", saved_run.path, "--dry-run", "--keep", 1).stdout.splitlines()
    assert dry[0] == f"would remove {leftover}  1000 B  a save that was cut short"
    assert dry[1].endswith("older than the newest 1 whole saves")
    assert leftover.is_dir()
    found = told("gc", saved_run.path)
    assert [one["path"] for one in found["removed"]] == [str(leftover)]
    assert sorted(path.name for path in saved_run.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


def test_gc_leaves_what_a_run_may_be_writing(saved_run: RunDir) -> None:
    saved_run.exit.unlink()
    job = {"pid": 1, "start_ticks": 0, "host": "elsewhere", "steps": 10}
    write_json(saved_run.job, read_json(saved_run.job) | job)
    leftover = saved_run.checkpoints / ".step-00000003.1"
    leftover.mkdir()
    result = run("gc", saved_run.path)
    assert result.exit_code == 0, result.exception
    assert "the run may be writing it now" in result.stdout
    assert leftover.is_dir()


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "repair", "gc", "export"])
def test_saves_of_format_1_are_refused(verb: str, saved_run: RunDir) -> None:
    old = saved_run.checkpoints / "step-00000009"
    old.mkdir()
    write_json(
        old / COMMIT_RECORD, {"format_version": 1, "step": 9, "position": 8, "world_size": 2, "attempt": 1}
    )
    out = ["--out", str(saved_run.path / "out")] if verb == "export" else []
    refused = run(verb, saved_run.path, *out)
    assert isinstance(refused.exception, UsageError)
    assert str(refused.exception).startswith(f"{old}: save format 1 is no longer read; ")


def test_repair_says_what_it_took_from_where(saved_run: RunDir, tmp_path: Path) -> None:
    step = saved_run.checkpoints / "step-00000004"
    shutil.copytree(step, tmp_path / "copy")
    whole = (step / "data-00001.bin").read_bytes()
    flip(step / "data-00001.bin", 200)
    alone = run("repair", saved_run.path)
    assert alone.exit_code == 1
    assert alone.stdout.splitlines() == [
        f"{step}: cannot be repaired: 1 piece is whole in no copy",
        "  model.a[20:40, 0:16] (part 1, data-00001.bin): nowhere whole",
        "1 of 2 saves are whole as they are",
    ]
    dry = run("repair", saved_run.path, "--from", tmp_path / "copy", "--dry-run")
    assert dry.exit_code == 0
    assert dry.stdout.splitlines()[0] == f"{step}: can be repaired as step 4"
    found = told("repair", saved_run.path, "--from", tmp_path / "copy")
    (one,) = found["repairs"]
    assert one["repaired"] == str(step)
    assert one["mended"] == [{"what": "model.a[20:40, 0:16]", "from": str(tmp_path / "copy")}]
    assert one["missing"] == []
    assert (step / "data-00001.bin").read_bytes() == whole
    assert told("repair", saved_run.path) == {
        "schema_version": 2,
        "dry_run": False,
        "looked_at": 2,
        "repairs": [],
    }
    wrong = run("repair", saved_run.path, "--step", 3)
    assert "has no save of step 3, whole or damaged" in str(wrong.exception)


def test_repair_makes_again_from_parity_what_is_nowhere_whole(
    saved_run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, held = save_with_parity(tmp_path)
    shutil.rmtree(saved_run.checkpoints)
    saved.path.parent.rename(saved_run.checkpoints)
    monkeypatch.setattr(run_repair, "read_run_inventory", lambda _: held)
    flip(saved_run.checkpoints / saved.path.name / "data-00001.bin", 200)
    (one,) = told("repair", saved_run.path, "--dry-run")["repairs"]
    assert (one["problem"], one["repaired"]) == (None, None)
    done = run("repair", saved_run.path)
    assert done.exit_code == 0
    assert "parity of n1" in done.stdout
    assert told("repair", saved_run.path)["repairs"] == []


def test_repair_leaves_a_run_alone_that_may_go_on(saved_run: RunDir) -> None:
    saved_run.exit.unlink()
    here = process.identify_process(os.getpid())
    assert here
    supervisor = {"pid": here.pid, "start_ticks": here.start_ticks, "started": 1.0}
    attempt = saved_run.attempt(1).create()
    write_json(attempt.supervisor, supervisor | {"host": "elsewhere"})
    unknown = run("repair", saved_run.path)
    assert isinstance(unknown.exception, UsageError)
    assert "it was started on elsewhere; look there whether it still runs" in str(unknown.exception)
    assert "if it is over, repair with --is-over" in str(unknown.exception)
    assert run("repair", saved_run.path, "--dry-run").exit_code == 0
    assert run("repair", saved_run.path, "--is-over").exit_code == 0
    write_json(attempt.supervisor, supervisor | {"host": os.uname().nodename})
    for words in ((), ("--is-over",)):
        alive = run("repair", saved_run.path, *words)
        assert isinstance(alive.exception, UsageError)
        assert "is running, and manages its checkpoints itself; repair when it is over" in str(
            alive.exception
        )


def test_verify_with_several_jobs_says_the_same(saved_run: RunDir) -> None:
    flip(saved_run.checkpoints / "step-00000004" / "data-00001.bin", 200)
    one, three = (run("verify", saved_run.path, "--jobs", jobs) for jobs in (1, 3))
    assert one.exit_code == three.exit_code == 1
    assert one.stdout == three.stdout
