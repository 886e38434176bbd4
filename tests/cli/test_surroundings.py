"""Every verb where descriptors are closed or full, the user has no name, the directory is gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcrun.cli.main import VERBS
from hpcrun.runs.follow import wait_for_runs
from hpcrun.specs.rundir import RunDir
from tests.cli.surroundings import STRANGER

LONG = {("demo",), ("doctor",)}
"""They would do their work."""
SLOW = {("ckpt", "import")}
"""They load torch first."""
Told = dict[str, Any]


def commands() -> Iterator[tuple[str, ...]]:
    """Every verb, with those below it."""
    for verb, where in VERBS.items():
        command = typer.main.get_command(import_module(f"hpcrun.cli.{where.module}").app)
        below = getattr(command, "commands", {})
        if not below or verb in below:
            yield (verb,)
        else:
            yield from ((verb, name) for name in below)


def tried(run: str) -> list[list[str]]:
    """Every command with its help, with nothing, and with a run that is over."""
    found = []
    for words in commands():
        found += [[*words, "--help"]] if len(words) == 1 or words in LONG else []
        found += [[*words]] if words not in LONG else []
        # All faults begin alike.
        if words not in LONG | SLOW and (words[0] != "chaos" or words[1] == "vanish"):
            found.append([*words, run])
    return [*found, [], ["--version"], ["nonsense"], ["train", "train.steps=x"], ["list", "--json"]]


def places(place: Path) -> dict[str, str]:
    return {
        "HPCRUN_ROOT": str(place / "runs"),
        "XDG_CONFIG_HOME": str(place / "config"),
        "HPCRUN_SITE": str(place / "site"),
    }


def outcomes(surroundings: str, cases: Sequence[Sequence[str]], cwd: Path) -> list[Told]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.surroundings"],
        input=json.dumps([[surroundings, [*case]] for case in cases]),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        cwd=cwd,
        env=os.environ | places(cwd) | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    found: list[Told] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one run that is over, and nothing of this machine's user."""
    place = tmp_path_factory.mktemp("place")
    words = [sys.executable, "-m", "hpcrun", "train", "name=over", "--", "true"]
    subprocess.run(words, check=True, capture_output=True, cwd=place, env=os.environ | places(place))
    (run,) = (place / "runs").iterdir()
    run.rename(run.with_name("over"))
    return place


@pytest.fixture(scope="module")
def usual(place: Path) -> dict[tuple[str, ...], Told]:
    """What becomes of each command in good surroundings."""
    cases = tried(str(place / "runs" / "over"))
    return dict(zip(map(tuple, cases), outcomes("good", cases, place), strict=True))


@pytest.mark.parametrize("surroundings", ["no output", "no error", "none", "no reader", "full"])
def test_no_verb_minds_what_becomes_of_its_descriptors(
    surroundings: str, usual: dict[tuple[str, ...], Told], place: Path
) -> None:
    found = outcomes(surroundings, [*usual], place)
    wrong = []
    for (words, before), now in zip(usual.items(), found, strict=True):
        codes = {before["code"]}
        if (
            surroundings == "full"
            and before["code"] == 0
            and "standard output: No space left" in now["error"]
        ):
            codes = {0, 3}
        if now["code"] not in codes or "Traceback" in now["error"]:
            wrong.append((words, before["code"], now))
    assert wrong == []
    assert [path.name for path in (place / "runs").iterdir()] == ["over"]


@pytest.mark.parametrize("surroundings", ["none", "no reader", "full"])
def test_a_run_is_made_whole_and_its_exit_code_is_its_own(surroundings: str, place: Path) -> None:
    cases = [
        ["train", "name=good", "--", "true"],
        ["train", "name=bad", "--", "false"],
        ["train", "--resume", str(place / "runs" / "over")],
        ["submit", "name=handed", "cluster=local", "--", "true"],
    ]
    found = outcomes(surroundings, cases, place)
    assert [one["code"] for one in found] == [0, 5, 0, 0], found
    runs = [RunDir(path) for path in (place / "runs").iterdir() if path.name != "over"]
    try:
        assert len(runs) == 3
        states = {
            state.run.path.name.partition("-")[0]: state for state in wait_for_runs(runs, lambda _: None)
        }
        assert {name: state.state for name, state in states.items()} == {
            "good": "done",
            "bad": "failed",
            "handed": "done",
        }
        assert all(run.spec.exists() and run.job.exists() for run in runs)
        log = next(run for run in runs if run.id.startswith("bad")).attempt(1).log(0)
        assert "hpcrun" not in log.read_text(encoding="utf-8"), "nothing of ours went into another's file"
    finally:
        for run in runs:
            shutil.rmtree(run.path)


def test_where_no_run_can_be_made_none_is_begun(place: Path) -> None:
    cases = [["train", "--", "true"], ["submit", "cluster=local", "--", "true"], ["demo"]]
    for one in outcomes("no directory", cases, place):
        assert one["code"] == 3
        (line,) = [line for line in one["error"].splitlines() if line and not line.startswith("==")]
        assert line.startswith("hpcrun: the working directory is gone, or closed to you")
    assert [path.name for path in (place / "runs").iterdir()] == ["over"]


def clean(words: tuple[str, ...], told: Told) -> bool:
    """Whether a command has ended well, or with lines that say why."""
    said = told["error"].splitlines()
    return (
        told["code"] in (0, 1, 2, 3, 5, 75, 130)
        and "Traceback" not in told["error"]
        and (told["code"] in (0, 1) or any(line.startswith(("hpcrun", "Usage")) for line in said))
    )


@pytest.mark.parametrize("surroundings", ["no directory", "closed directory", "no user"])
def test_no_verb_fails_without_a_word_where_the_system_does_not_know_us(
    surroundings: str, usual: dict[tuple[str, ...], Told], place: Path
) -> None:
    if os.getuid() and surroundings != "no directory":
        pytest.skip("becoming another user takes root")
    if surroundings != "no directory":
        for path in (place, *place.rglob("*")):
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        for above in place.parents:
            if above.owner() == "root" and str(above).startswith("/tmp/"):
                above.chmod(0o755)
    try:
        found = outcomes(surroundings, [*usual], place)
    finally:
        for path in (place, *place.rglob("*")):
            os.chown(path, os.getuid(), os.getgid(), follow_symlinks=False)
    assert [(words, now) for words, now in zip(usual, found, strict=True) if not clean(words, now)] == []
    assert [path.name for path in (place / "runs").iterdir()] == ["over"]
