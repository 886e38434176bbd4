"""One directory, one line of descent: which saves are gone on from, kept, replaced, and who may save."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")

import numpy as np  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import hpcrun  # noqa: E402
import hpcrun.runtime.checkpointer  # noqa: E402 - each start is forked, and need not import it
from hpcrun.checkpoint import commit, writer_lease  # noqa: E402
from hpcrun.checkpoint.writer_lease import WriterLease  # noqa: E402
from hpcrun.cli.ckpt import app  # noqa: E402
from hpcrun.errors import SiteError, UsageError  # noqa: E402
from hpcrun.specs.descent import select_lineage  # noqa: E402
from hpcrun.specs.identity import read_run_identity  # noqa: E402
from hpcrun.specs.records import sync_directory  # noqa: E402
from hpcrun.specs.saves import (  # noqa: E402
    COMMIT_RECORD,
    SavedCheckpoint,
    read_saved_checkpoints,
    render_commit_record,
    resumable_checkpoints,
)
from tests.runtime.starts import running, start  # noqa: E402


def state_of(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((4,), value)}


def saving(place: Path, *steps: int, load: bool = False, value: float = 1.0, **options: Any) -> Any:
    """A start that saves these steps, each with the step times `value` in it; what it has loaded."""

    def script() -> Any:
        with hpcrun.Checkpointer(place, memory=0, **options) as saves:
            state = state_of(-1.0)
            loaded = saves.load(state) if load else None
            for step in steps:
                assert saves.save(step, state_of(step * value))
            return loaded, state["w"][0].item()

    return start(script)


def loading(place: Path) -> Any:
    return saving(place, load=True)


def steps_in(place: Path) -> list[int]:
    return [one.step for one in resumable_checkpoints(place / "checkpoints")]


def test_a_fresh_start_in_a_used_directory_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    saving(place, 1, 2, 3)

    def trained() -> Any:
        with hpcrun.Checkpointer(place, memory=0):
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for count in range(9):
                try:
                    optimizer.step()
                except UsageError as error:
                    return count, str(error)
        return "trained"

    before = sorted(place.rglob("*"))
    for told in (saving(place, 1), saving(place, 4), start(trained)[1]):
        assert "has saves up to step 3" in told
        assert "load()" in told
        assert 'start="new"' in told
        assert "\n" not in told
    assert start(trained)[0] <= 1, "before it trains"
    assert sorted(place.rglob("*")) == before
    assert loading(place) == (3, 3.0)


def test_a_start_that_loads_goes_on_and_one_that_says_new_begins_anew(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    assert saving(place, 1, 2, load=True) == (None, -1.0)
    assert saving(place, 3, 4, load=True) == (2, 2.0)
    assert steps_in(place) == [3, 4]
    assert saving(place, 5, start="resume") == (None, -1.0)
    assert steps_in(place) == [4, 5]
    assert saving(place, 1, 4, load=True, start="new", value=10.0) == (None, -1.0)
    assert loading(place) == (4, 40.0)
    assert steps_in(place) == [1, 4]
    left = [one.step for one in read_saved_checkpoints(place / "checkpoints")[0] if one.step not in (1, 4)]
    assert left == [5], "what was saved before is there still"
    assert [path.name.split(".")[0] for path in (place / "checkpoints").glob("left-*")] == [
        "left-step-00000004"
    ]


def test_a_restart_from_an_older_step_leaves_what_came_later(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    saving(place, 10, 20, 30, 40, keep=9)
    hidden = [place / "checkpoints" / f"step-000000{step}" for step in (30, 40)]
    for path in hidden:  # as a file system that loses sight of them
        path.rename(tmp_path / path.name)
    assert saving(place, 25, load=True, keep=9, value=10.0) == (20, 20.0)
    for path in hidden:
        (tmp_path / path.name).rename(path)
    assert steps_in(place) == [10, 20, 25]
    assert saving(place, 30, load=True, keep=2, value=10.0) == (25, 250.0)
    assert steps_in(place) == [25, 30], "what was left neither counts nor goes"
    assert loading(place) == (30, 300.0)
    told = CliRunner().invoke(app, ["ls", str(place), "--json"])
    standing = {one["step"]: one["standing"] for one in json.loads(told.stdout)["steps"]}
    assert standing[40].startswith("left")
    assert (standing[25], standing[30]) == (None, None)
    CliRunner().invoke(app, ["gc", str(place)])
    assert [one.step for one in read_saved_checkpoints(place / "checkpoints")[0]] == [25, 30]


def test_lines_of_any_forks() -> None:
    def saved(attempt: int, step: int, descent: str) -> SavedCheckpoint:
        return SavedCheckpoint(Path(f"{attempt}-{step}"), step, 0, 1, attempt, "", descent=descent)

    first = [saved(1, step, "") for step in (1, 2, 3, 9)]
    second = [saved(2, step, "1@2") for step in (3, 4, 8)]
    third = [saved(5, step, "1@2 2@4") for step in (5, 6)]
    assert select_lineage(first) == first
    assert select_lineage([*second, *first]) == [*first[:2], *second]
    assert select_lineage([*third, *first, *second]) == [*first[:2], *second[:2], *third]
    assert select_lineage([]) == []


def test_a_copy_goes_on_by_itself(tmp_path: Path) -> None:
    place, copy = tmp_path / "mine", tmp_path / "copy"
    saving(place, 1, 2)
    shutil.copytree(place, copy)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert saving(copy, 3, load=True, value=10.0) == (2, 2.0)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    assert saving(place, 5, load=True) == (2, 2.0)
    assert saving(copy, 4, load=True) == (3, 30.0)
    assert (steps_in(place), steps_in(copy)) == ([2, 5], [3, 4])
    ours, theirs = read_run_identity(place), read_run_identity(copy)
    assert ours is not None
    assert theirs is not None
    assert theirs.copied_from == (ours.run_id,)
    moved = tmp_path / "moved"
    place.rename(moved)
    assert loading(moved) == (5, 5.0)


@pytest.mark.parametrize("whose", ["of another run", "of no known run"])
def test_saves_of_others_are_read_and_imported_but_not_gone_on_from(tmp_path: Path, whose: str) -> None:
    place, other = tmp_path / "mine", tmp_path / "other"
    saving(other, 7)
    (saved,) = resumable_checkpoints(other / "checkpoints")
    if whose == "of no known run":
        (saved.path / COMMIT_RECORD).write_text(
            render_commit_record(SavedCheckpoint(**{**vars(saved), "run_id": ""}))
        )
    shutil.copytree(saved.path, place / "checkpoints" / saved.path.name)
    for told in (loading(place), saving(place, 8)):
        assert told.startswith("UsageError"), told
    told = loading(place)
    assert whose in told
    assert "\n" not in told
    assert "step 7: whole" in CliRunner().invoke(app, ["verify", str(place)]).stdout
    move, then = told.partition("type: ")[2].split(" && ")
    _, old, new = move.split()
    shutil.move(old, new)
    done = CliRunner().invoke(app, then.split()[2:])
    assert done.exit_code == 0, done.output
    assert loading(place) == (7, 7.0)


def test_a_second_writer_is_refused_with_who_and_where_and_a_dead_one_is_followed(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    saving(place, 1)

    def trains() -> Any:
        saves = hpcrun.Checkpointer(place, memory=0)
        saves.load(state_of())
        saves.save(2, state_of(2.0))
        return saves

    def begins() -> Any:
        saves = hpcrun.Checkpointer(place, memory=0)
        step = saves.load(state_of())
        try:
            saves.fence_before(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
        except UsageError as error:
            return step, str(error)
        return step, ""

    with running(trains) as pid:
        step, told = start(begins)
        assert step == 2, "it may look"
        assert f"process {pid} of" in told
        assert f"on {os.uname().nodename} is saving there" in told
        assert "is saving there" in saving(place, 3, load=True)
        gc = CliRunner().invoke(app, ["repair", str(place)])
        assert f"process {pid}" in str(gc.exception)
        shutil.copytree(place, tmp_path / "copy")
        assert saving(tmp_path / "copy", 3, load=True) == (2, 2.0), "nobody saves in a copy"
    assert start(begins) == (2, "")


def foreign(place: Path, **changes: Any) -> None:
    """A record of a writer on another host."""
    path = place / writer_lease.WRITER_RECORD_NAME
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"host": "elsewhere", "boot": "another"} | changes))


def test_a_writer_on_another_host_is_judged_by_its_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_lease, "HEARTBEAT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(writer_lease, "_RECORD_POLL_S", 0.05)
    monkeypatch.setattr(writer_lease, "HEARTBEAT_S", 0.05)
    ours = WriterLease(tmp_path, ("run x", 1))
    try:
        WriterLease(tmp_path, ("run x", 2)).release()
        for _ in range(200):  # its thread has to look first
            if ours.lost_to:
                break
            time.sleep(0.05)
        with pytest.raises(SiteError, match="saves there now"):
            ours.check()
    finally:
        ours.release()
    silent = WriterLease(tmp_path)
    silent._end.set()  # as if it was killed
    silent._thread.join()
    foreign(tmp_path)
    WriterLease(tmp_path).release()  # it was watched for a while
    beating = WriterLease(tmp_path)
    foreign(tmp_path, token=beating._own.token)
    with pytest.raises(UsageError, match="is saving there"):
        WriterLease(tmp_path)
    beating.release()


def test_of_two_that_start_at_once_one_saves(tmp_path: Path) -> None:
    place = tmp_path / "mine"

    def script() -> Any:
        saves = hpcrun.Checkpointer(place, memory=0)
        saves.load(state_of())
        return saves

    def first() -> Any:
        early = script()
        told = saving(place, 1, load=True)  # another one comes and goes
        try:
            early.save(1, state_of())
        except UsageError as error:
            return told, str(error)
        return told, ""

    told, refused = start(first)
    assert told == (None, -1.0)
    assert "since this one began" in refused
    assert loading(place) == (1, 1.0)


@pytest.mark.parametrize("memory", [0, 2])
def test_a_step_that_exists_is_left_out_or_replaced_as_asked(
    tmp_path: Path, memory: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with hpcrun.Checkpointer(tmp_path, memory=memory) as saves:
        assert saves.save(1, state_of(1.0))
        assert saves.save(np.int64(2), state_of(2.0))
        saves.fence()
        assert not saves.save(2, state_of(3.0))
        assert "step 2 is skipped: it is saved already" in capfd.readouterr().err
        assert not saves.save(2, state_of(3.0), wait=True)
        state = state_of()
        assert (saves.load(state), state["w"][0].item()) == (2, 2.0)
        assert saves.save(torch.tensor(2), state_of(4.0), replace=True)
        saves.fence()
        with pytest.raises(UsageError, match="step 1 is not after step 2"):
            saves.save(1, state_of(5.0))
        assert (saves.load(state), state["w"][0].item()) == (2, 4.0)
        assert saves.save(3, state_of(3.0), position=np.uint8(9), wait=True)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (True, "is of type bool; give an integer"),
        (np.True_, "give an integer"),
        (torch.tensor(True), "give an integer"),
        (1.0, "1.0 is of type float; give an integer"),
        (np.float32(1), "give an integer"),
        (torch.tensor(1.0), "give an integer"),
        (torch.tensor([1]), "give an integer"),
        ("1", "'1' is of type str"),
        (None, "give an integer"),
        (-1, "-1 is negative"),
        (1 << 62, "is too large; give one from 0 to"),
    ],
)
def test_a_step_is_a_count(tmp_path: Path, step: Any, words: str) -> None:
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves:
        with pytest.raises(UsageError, match=rf"step: .*{words}"):
            saves.save(step, state_of())
        with pytest.raises(UsageError, match=rf"position: .*{words}"):
            saves.save(1, state_of(), step)
    assert not (tmp_path / "checkpoints").exists()


def failing(error: int, path: Path | None = None) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error), *([str(path)] if path else []))

    return fail


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO"])
def test_an_error_names_the_file_the_file_system_and_what_to_do(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = getattr(__import__("errno"), name)
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves:
        for where in ("write", "mkdir", "record"):
            with monkeypatch.context() as patch:
                if where == "write":
                    patch.setattr("hpcrun.checkpoint.part_writer.os.pwritev", failing(number))
                elif where == "mkdir":
                    patch.setattr(
                        "hpcrun.runtime.direct_checkpoint.begin_generation", failing(number, tmp_path / "x")
                    )
                else:
                    patch.setattr("hpcrun.checkpoint.commit.write_synced_file", failing(number))
                with pytest.raises(SiteError, match=rf"{name}\) on /.* \(.+\); .+") as caught:
                    saves.save(1, state_of())
            assert str(tmp_path) in str(caught.value)
            assert "step 1" in str(caught.value)
            assert "Errno" not in str(caught.value)
        assert saves.save(1, state_of(1.0)), "none of that was a save"
    assert steps_in(tmp_path) == [1]


def test_what_fails_after_a_commit_is_not_the_failure_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sync = sync_directory

    def unsynced(path: Path) -> None:
        if path == tmp_path / "checkpoints":
            raise OSError(5, "Input/output error")
        sync(path)

    with hpcrun.Checkpointer(tmp_path, memory=0, keep=1) as saves:
        saves.save(1, state_of(1.0))
        monkeypatch.setattr(commit, "delete_generation", failing(13))
        assert saves.save(2, state_of(2.0))
        assert "step-00000001: is no longer wanted, but cannot be deleted" in capfd.readouterr().err
        monkeypatch.setattr(commit, "sync_directory", unsynced)
        assert saves.save(3, state_of(3.0))
        assert "step-00000003: is saved, but a crash" in capfd.readouterr().err
        monkeypatch.setattr("hpcrun.checkpoint.commit.resumable_checkpoints", failing(5))
        assert saves.save(4, state_of(4.0))
        assert "older saves stay" in capfd.readouterr().err
    monkeypatch.undo()
    assert loading(tmp_path) == (4, 4.0)


def test_the_verbs_take_a_directory_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving(tmp_path / "mine", 1, 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")

    def call(*words: str) -> Any:
        done = CliRunner().invoke(app, [*words])
        return done.output or str(done.exception)

    for word in ("mine", "./mine", "mine/", "mine/checkpoints", str(tmp_path / "mine" / "checkpoints")):
        assert "step 2" in call("ls", word)
    assert "step 2: whole" in call("verify", "mine")
    assert "w  float32" in call("inspect", "mine", "--step", "1")
    assert "tensors differ" in call("diff", "mine", "1", "2")
    assert "2 of 2 saves are whole" in call("repair", "mine")
    assert "removed 0 items" in call("gc", "mine")
    assert "removed 1 items" in call("gc", "mine", "--keep", "1")
    assert "(dcp" in call("export", "mine", "--format", "dcp", "--out", "dcp")
    assert "(hpcrun" in call("export", "mine", "--format", "hpcrun", "--out", "out")
    assert "use --format dcp or hpcrun" in call("export", "mine", "--out", "hf")
    for word, words in (("empty", "holds no saves"), ("file", "is a file"), ("nothing", "no such run")):
        assert words in call("ls", word)
