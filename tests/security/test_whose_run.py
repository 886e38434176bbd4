"""Whose run it is: verbs act on the user's own runs alone, and no word leads to another user's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun import errors
from hpcrun.cli.main import main
from hpcrun.errors import UsageError
from hpcrun.specs.identity import RUN_SCHEMA_VERSION, RunIdentity
from hpcrun.specs.owner import is_private_directory
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import all_runs, create_run, find_run
from hpcrun.specs.rundir import RunDir
from tests.security.users import ATTACKER, ROOT, VICTIM, as_user, in_namespace, needs_root

Capture = pytest.CaptureFixture[str]
SHARED = Path("/tmp/shared")


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def make_run(name: str, root: Path, command: str = "true") -> RunDir:
    run = create_run(name, root)
    run.spec.write_text(f"name: {name}\ncommand: ['{command}']\ncluster: local\n")
    return run


def claim(run: RunDir, job: int) -> None:
    """The run says that it was submitted as this job."""
    record = json.loads(run.job.read_text())
    write_json(run.job, record | {"submissions": [{"time": 9e9, "job": job}]})


def test_only_a_directory_that_nobody_else_can_write_is_mine(tmp_path: Path) -> None:
    folder, link, file = tmp_path / "run", tmp_path / "link", tmp_path / "file"
    folder.mkdir(mode=0o755)
    link.symlink_to(folder)
    file.touch()
    assert is_private_directory(folder)
    assert not any(
        map(
            is_private_directory,
            (link, file, tmp_path / "absent", tmp_path / "nul\0", tmp_path / ("x" * 300)),
        )
    )
    for mode in (0o775, 0o757, 0o777, 0o2775):
        folder.chmod(mode)
        assert not is_private_directory(folder), oct(mode)
    folder.chmod(0o2755)
    assert is_private_directory(folder)


def test_of_two_runs_that_claim_a_job_the_private_one_is_meant(runs_root: Path) -> None:
    mine = make_run("mine", runs_root)
    loose = make_run("loose", runs_root)
    for run in (mine, loose):
        claim(run, 4242)
    loose.path.chmod(0o777)
    os.utime(loose.spec, (9e9, 9e9))
    assert find_run("4242") == mine
    assert find_run("4242", use="act") == mine
    assert find_run("loose") == loose


def test_an_older_run_that_others_can_write_is_read_and_not_acted_on(
    runs_root: Path, capsys: Capture
) -> None:
    run = make_run("r", runs_root)
    (runs_root / "complete.json").touch()
    run.path.chmod(0o775)
    assert call("status", "r") == 0
    assert run.id in capsys.readouterr().out
    refused = (
        f"hpcrun: {run.path}: other users can write it (mode 775), so it can only be read;"
        f" run: chmod go-w {run.path}\n"
    )
    for words in (
        ("train", "--resume", "r"),
        ("train", "--resume", "r", "--print-spec"),
        ("submit", "--resume", "r"),
        ("submit", "--resume", "r", "--dry-run"),
        ("cancel", "r"),
        ("save", str(run.path)),
        ("stop", "r"),
        ("chaos", "kill-rank", "r", "--rank", "0"),
        ("chaos", "kill-rank", "r", "--rank", "0", "--dry-run"),
        ("ckpt", "gc", "r"),
        ("ckpt", "repair", "r"),
        ("ckpt", "upload", "r", "--url", "file:///tmp/x"),
        ("ckpt", "download", "r", "--from", "file:///tmp/x"),
        ("ckpt", "import", str(runs_root), "--run", "r"),
    ):
        capsys.readouterr()
        assert call(*words) == 2, words
        assert capsys.readouterr() == ("", refused), words
    subprocess.run(refused.strip().rpartition("run: ")[2].split(), check=True)
    assert find_run("r", use="act") == run


def test_elements_and_sweep_are_held_to_the_same(runs_root: Path) -> None:
    sweep = make_run("s", runs_root)
    write_json(sweep.sweep, [{}, {}])
    element = sweep.element(0)
    element.checkpoints.mkdir(parents=True)
    (element.path / "spec.yaml").write_text("name: s\n")
    assert find_run("s/0", use="act") == element
    assert find_run(str(element.path), use="act") == element
    for path in (element.path, element.path.parent, sweep.path):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(UsageError, match=f"run: chmod go-w {path}$"):
            find_run("s/0", use="act")
        path.chmod(mode)
    planted = runs_root.parent / "planted"
    planted.mkdir()
    sweep.element(1).path.symlink_to(planted)
    for word in ("s/1", f"{sweep.path}/1"):
        with pytest.raises(UsageError, match="element's directory is gone"):
            find_run(word, use="act")


def test_a_link_is_no_run_unless_a_path_leads_there(runs_root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    run = make_run("far", elsewhere)
    link = runs_root / "latest"
    runs_root.mkdir()
    link.symlink_to(run.path)
    assert list(all_runs()) == []
    with pytest.raises(UsageError, match="no such run"):
        find_run("latest")
    assert find_run(str(link), use="act") == run


def test_a_bare_word_is_a_run_below_the_root_before_it_is_a_directory_here(
    runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run("mine", runs_root)
    claim(run, 4242)
    here = make_run("here", tmp_path)
    here.path.rename(tmp_path / "4242")
    assert find_run("4242") == run
    assert find_run("./4242").path == find_run("4242/").path == tmp_path / "4242"
    (tmp_path / "4242").rename(tmp_path / "other")
    assert find_run("other", use="act").path == tmp_path / "other"
    (tmp_path / "other").chmod(0o777)
    with pytest.raises(
        UsageError, match=r"no such run .*; to read the directory of that name write \./other"
    ):
        find_run("other")


def test_a_root_that_others_can_write_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    root = tmp_path / "open"
    root.mkdir()
    monkeypatch.setenv("HPCRUN_ROOT", str(root))
    monkeypatch.setattr(errors, "_warned", set())
    for mode, told in ((0o755, 0), (0o1777, 0), (0o777, 1), (0o2775, 1)):
        root.chmod(mode)
        make_run("r", root)
        list(all_runs())
        assert capsys.readouterr().err.count("have its owner run: chmod +t") == told, oct(mode)


def test_a_run_without_an_identity_is_read_and_not_acted_on(runs_root: Path, capsys: Capture) -> None:
    run = make_run("old", runs_root)
    records: tuple[dict[str, object], ...] = (
        {},
        {"submissions": []},
        {"run_id": 7},
        {"run_id": "a" * 32},
        {"run_id": "A" * 32, "made_at": {}},
    )
    for record in records:
        write_json(run.job, record | {"schema_version": RUN_SCHEMA_VERSION})
        for words in (("train", "--resume", "old"), ("cancel", "old"), ("ckpt", "gc", "old")):
            assert call(*words) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith(f"hpcrun: {run.path}")
            assert err.count("\n") == 1
            assert "run_id" in err or "made_at" in err
        assert call("status", "old") == 0
        assert run.id in capsys.readouterr().out


def _walk(path: Path) -> list[Path]:
    return [path, *path.rglob("*")]


def test_no_umask_and_no_setgid_directory_opens_a_run(tmp_path: Path) -> None:
    root = tmp_path / "team"
    root.mkdir()
    root.chmod(0o2775)
    job = tmp_path / "job.yaml"
    job.write_text("name: open\ncommand: ['true']\ncluster: local\nsweep: {list: [{env.A: x}, {env.A: y}]}\n")
    single = tmp_path / "single.yaml"
    single.write_text("name: single\ncommand: ['true']\ncluster: local\n")
    environ = os.environ | {"HPCRUN_ROOT": str(root / "made/below")}
    for words in (["submit", str(job)], ["train", str(single)]):
        code = "import os, sys; os.umask(0); from hpcrun.cli.main import main; main(sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env=environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    sweep = next((root / "made/below").glob("open-*"))
    waited = [sys.executable, "-m", "hpcrun", "wait", str(sweep)]
    subprocess.run(waited, env=environ, cwd=ROOT, check=True, capture_output=True)
    found = [path for path in _walk(root / "made") if not path.is_symlink()]
    assert any(path.name == "rank-0.log" and "elements" in path.parts for path in found)
    assert [path for path in found if path.lstat().st_mode & 0o022] == []


@needs_root
def test_an_attackers_run_is_never_taken_for_mine() -> None:
    """He claims my job, my run's name, and the directory that I stand in."""

    def set_up() -> None:
        os.umask(0)
        SHARED.mkdir(mode=0o1777)
        Path("/tmp/cwd").mkdir(mode=0o777)

    def own() -> None:
        os.environ["HPCRUN_ROOT"] = str(SHARED)
        claim(make_run("nightly", SHARED), 4242)

    def attack() -> None:
        os.umask(0)
        nightly = next(SHARED.glob("nightly-*"))
        for path in (
            SHARED / "nightly",
            SHARED / "4242",
            Path("/tmp/cwd/4242"),
            Path("/tmp/cwd") / nightly.name,
        ):
            path.mkdir(mode=0o777)
            run = RunDir(path)
            run.spec.write_text("name: evil\ncommand: ['touch', '/tmp/pwned']\ncluster: local\n")
            run.identify(RunIdentity.new(path), submissions=[{"time": 9e9, "job": 4242}])
            run.element(0).path.mkdir(parents=True)
            (run.element(0).path / "spec.yaml").write_text("name: evil\n")
        Path("/tmp/cwd/nightly").symlink_to(nightly)
        os.mkfifo(SHARED / "4242/exit.json")
        stuck = SHARED / "stuck"
        stuck.mkdir(mode=0o755)
        for name in ("spec.yaml", "job.json", "exit.json"):
            os.mkfifo(stuck / name)

    def be_attacked() -> None:
        os.environ["HPCRUN_ROOT"] = str(SHARED)
        os.chdir("/tmp/cwd")
        mine = next(path for path in SHARED.glob("nightly-*") if path.stat().st_uid == VICTIM)
        for word in ("4242", "nightly", mine.name, mine.name[:10], str(mine)):
            assert find_run(word).path == find_run(word, use="act").path == mine, word
        assert [run.path for run in all_runs()] == [mine]
        for word in ("./4242", "4242/", f"./{mine.name}", "/tmp/cwd/4242", "4242/elements/0", "4242/0"):
            with pytest.raises(
                UsageError, match=f"belongs to user {ATTACKER}, not to you|no such|is not a sweep"
            ):
                find_run(word, use="act")
        assert find_run("./4242").path == Path("/tmp/cwd/4242")
        for words in (["list"], ["status", "--all"], ["status", "4242"], ["status", str(SHARED / "stuck")]):
            done = subprocess.run(
                [sys.executable, "-P", "-m", "hpcrun", *words],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert "evil" not in done.stdout
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hpcrun", "train", "--resume", "./4242"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert not Path("/tmp/pwned").exists()

    def be_root() -> None:
        os.environ["HPCRUN_ROOT"] = str(SHARED)
        mine = next(SHARED.glob("nightly-*"))
        for word in ("4242", "nightly", mine.name):
            with pytest.raises(UsageError, match="no such run"):
                find_run(word)
        assert find_run(str(mine), use="act").path == mine
        with pytest.raises(UsageError, match="chmod go-w"):
            find_run("/tmp/cwd/4242", use="act")

    def body() -> None:
        os.environ["PYTHONPATH"] = str(ROOT)
        set_up()
        as_user(VICTIM, own)
        as_user(ATTACKER, attack)
        as_user(VICTIM, be_attacked)
        be_root()

    in_namespace(body)
