"""A copy of a run directory is noticed, and becomes a run of its own that leaves the other alone."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcrun import process
from hpcrun.checkpoint.flush.arena import locate_arena
from hpcrun.checkpoint.flush.local_tier import LocalTier
from hpcrun.checkpoint.objects.catalogue import generation_key_prefix
from hpcrun.errors import UsageError
from hpcrun.runs.run_state import read_run_state, read_run_states
from hpcrun.specs.identity import DirectoryLocation, read_run_identity
from hpcrun.specs.provenance import Provenance, SubmissionRecord, read_provenance, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run, find_run
from hpcrun.specs.rundir import RunDir

HERE = os.uname().nodename
ORIGIN = Provenance("command", "r", 1, 10, 1.0, "me", "login", "/", ["hpcrun"], "0.1", "3.11")


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def make_run(name: str = "r", root: Path | None = None) -> RunDir:
    """A run that goes on, as job 4242 and as this very process."""
    run = create_run(name, root)
    run.spec.write_text("name: r\ncommand: ['true']\n")
    write_provenance(run, ORIGIN.submitted(SubmissionRecord(2.0, job=4242)))
    attempt = run.attempt(1).create()
    ticks = process.start_ticks(os.getpid())
    record = {"pid": os.getpid(), "start_ticks": ticks, "host": HERE, "started": 3.0}
    write_json(attempt.supervisor, record)
    write_json(attempt.rank_record(0), record | {"node": HERE, "shm": ["/dev/shm/of-the-original"]})
    for path in (attempt.peers, run.leader, run.wish):
        write_json(path, {"secret": "of the original"})
    for path in (run.lease, run.lock):
        path.touch()
    run.epochs.mkdir()
    (run.epochs / "1").touch()
    run.events.write_text('{"event": "launch", "attempt": 1, "time": 3.0}\n')
    return run


def copy(run: RunDir, *options: str, to: str = "copy", root: Path | None = None) -> RunDir:
    made = (root or run.path.parent) / to
    subprocess.run(["cp", *(options or ("-r",)), str(run.path), str(made)], check=True)
    return RunDir(made)


@pytest.mark.parametrize("option", ["-r", "-a", "-al"])
def test_a_copy_becomes_a_run_of_its_own(
    option: str, runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    made = copy(run, option)
    assert made.run_id == run.run_id
    assert find_run("4242") == run, "a copy tells of the jobs of the other"
    assert (read_run_state(run).state, read_run_state(made).state) == ("running", "interrupted")
    assert f"a copy of {run.path}, not started yet" in read_run_state(made).message
    assert find_run("copy", use="plan") == made
    assert capsys.readouterr().err == ""
    assert find_run("copy", use="act") == made
    line = f"hpcrun: {made.path}: is a copy of {run.path}; from here on it is a run of its own, with run_id "
    assert capsys.readouterr().err == f"{line}{made.run_id}\n"
    assert made.run_id != run.run_id
    assert find_run("copy", use="act").run_id == made.run_id
    assert capsys.readouterr().err == ""
    origin = read_provenance(made)
    assert origin is not None
    assert origin.submissions == []
    assert [
        path for path in made.path.rglob("*") if path.is_file() and b"original" in path.read_bytes()
    ] == []
    assert not any(path.exists() for path in (made.leader, made.lease, made.lock, made.wish, made.epochs))
    assert (read_run_state(run).state, read_run_state(made).state) == ("running", "interrupted")
    with made.events.open("a") as events:
        events.write("more\n")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert find_run("r", use="act").run_id == run.run_id


def test_nothing_is_shared_by_runs_of_one_name(tmp_path: Path) -> None:
    run = make_run(root=tmp_path / "a")
    (tmp_path / "b").mkdir()
    made = copy(run, to=run.id, root=tmp_path / "b")
    find_run(str(made.path), use="act")
    assert made.id == run.id
    for one, other in (
        (locate_arena(tmp_path, run.run_id, "n"), locate_arena(tmp_path, made.run_id, "n")),
        (LocalTier("/x", run.run_id, "n").folder, LocalTier("/x", made.run_id, "n").folder),
        (generation_key_prefix(run.run_id, 1, "0"), generation_key_prefix(made.run_id, 1, "0")),
    ):
        assert one != other
    assert RunDir(tmp_path / "c/saves").run_id != RunDir(tmp_path / "d/saves").run_id, (
        "directories of scripts"
    )


def test_a_run_that_was_moved_is_still_itself(
    tmp_path: Path, runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    known = run.run_id
    moved = RunDir(run.path.rename(runs_root / "moved"))
    assert find_run("moved", use="act").run_id == known
    root = runs_root.rename(tmp_path / "other")
    moved = find_run(str(root / "moved"), use="act")
    assert moved.run_id == known
    copied = copy(moved, to="copied", root=root)
    # Put back where the first was made, the copy is none of it.
    (tmp_path / "runs").mkdir()
    back = RunDir(copied.path.rename(run.path))
    assert find_run(str(moved.path), use="act").run_id == known
    assert capsys.readouterr().err == ""
    find_run(str(back.path), use="act")
    assert capsys.readouterr().err.count("is a copy of") == 1


def test_of_a_run_and_what_took_its_place_one_is_the_run(runs_root: Path) -> None:
    run = make_run()
    aside = RunDir(run.path.rename(runs_root / "aside"))
    shutil.copytree(aside.path, run.path)
    ids = {find_run(name, use="act").run_id for name in ("aside", run.id)}
    assert len(ids) == 2


def test_a_run_that_was_restored_where_it_was_is_still_itself(runs_root: Path, tmp_path: Path) -> None:
    run = make_run()
    known = run.run_id
    shutil.copytree(run.path, tmp_path / "backup")
    shutil.rmtree(run.path)
    shutil.copytree(tmp_path / "backup", run.path)
    assert find_run("r", use="act").run_id == known


def test_an_inode_says_nothing_on_another_device() -> None:
    here = DirectoryLocation("h", "/b", 1, 7)
    assert here.is_same_inode(DirectoryLocation("h", "/a", 1, 7))
    assert here.is_same_inode(DirectoryLocation("other", "/a", 2, 7)), (
        "NFS has other numbers of devices elsewhere"
    )
    assert not here.is_same_inode(DirectoryLocation("h", "/a", 2, 7))
    assert not here.is_same_inode(DirectoryLocation("h", "/a", 1, 8))


def test_a_copied_sweep_has_elements_of_its_own(runs_root: Path) -> None:
    sweep = make_run("s")
    write_json(sweep.sweep, [{}, {}])
    for number in (0, 1):
        sweep.element(number).checkpoints.mkdir(parents=True)
        sweep.element(number).spec.write_text("name: s\n")
    made = copy(sweep)
    assert {state.state for state in read_run_states([made])} == {"interrupted"}
    element = find_run("copy/1", use="act")
    assert element.run_id == f"{made.run_id}/1"
    assert made.run_id != sweep.run_id
    assert {read_run_state(made.element(number)).state for number in (0, 1)} == {"interrupted"}
    torn = copy(RunDir(sweep.element(0).path), to="torn", root=runs_root)
    with pytest.raises(UsageError, match=f"^{torn.path}: has no schema version"):
        find_run("torn", use="act")


def test_copies_that_would_share_their_saves_are_refused(runs_root: Path, tmp_path: Path) -> None:
    run = make_run()
    run.checkpoints.rename(tmp_path / "saves")
    run.checkpoints.symlink_to(tmp_path / "saves")
    made = copy(run)
    with pytest.raises(UsageError, match="would share their saves; copy the run with cp -rL"):
        find_run("copy", use="act")
    identity = read_run_identity(made.path)
    assert identity is not None
    assert not identity.is_at(made.path)


@contextmanager
def training(job: Path, environ: dict[str, str], *words: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-P", "-m", "hpcrun", "train", *words]
    child = subprocess.Popen(argv, cwd=job.parent, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.terminate()
        child.communicate()


def test_a_copy_of_a_live_run_goes_on_beside_it(tmp_path: Path) -> None:
    root, job = tmp_path / "runs", tmp_path / "job.yaml"
    job.write_text(
        "name: live\ncluster: local\ncommand: [sh, -c, 'echo $HPCRUN_RUN_ID;"
        ' until test -e "$HPCRUN_RUN_DIR/release"; do sleep 0.1; done\']\n'
    )
    environ = os.environ | {"HPCRUN_ROOT": str(root)}

    def hpcrun(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-P", "-m", "hpcrun", *words]
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120, check=False)

    with training(job, environ, str(job)) as child:
        until(lambda: any(root.glob("live-*/attempts/1/ranks/rank-0.json")))
        run = RunDir(next(root.glob("live-*")))
        made = copy(run)
        rank = json.loads(run.attempt(1).rank_record(0).read_text())
        for words in (["cancel"], ["stop"], ["save", "--force"]):
            refused = hpcrun(*words, "copy")
            assert refused.returncode == 2
            assert "copy is interrupted" in refused.stderr
        (made.path / "release").touch()
        done = hpcrun("train", "--resume", "copy")
        assert done.returncode == 0, done.stderr
        assert child.poll() is None
        assert process.is_alive(process.ProcessId(rank["pid"], rank["start_ticks"]))
        assert read_run_state(run).state == "running"
        assert process.processes_with_env("HPCRUN_RUN_ID", run.run_id)
        (run.path / "release").touch()
        assert child.wait(60) == 0
    logs = [one.attempt(number).log(0).read_text().strip() for one, number in ((run, 1), (made, 2))]
    assert logs == [run.run_id, made.run_id]
