"""A run directory of another version is refused by every verb, in one line, and never half read."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcrun.cli.main import VERBS, main
from hpcrun.specs.identity import RUN_SCHEMA_VERSION
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir

OLD_RUN = Path(__file__).parents[1] / "data" / "runs" / "before-records"
REQUIRED_OPTIONS = {
    **{verb: ["--rank", "0"] for verb in ("kill-rank", "stop-rank", "resume-rank")},
    **{verb: ["--node", "n1"] for verb in ("kill-agent", "vanish")},
    "slow": ["--node", "n1", "--for", "1s"],
    "fill-disk": ["--node", "n1", "--for", "1s", "--where", "/tmp"],
    "export": ["--out", "out"],
    "download": ["--from", "local:///tmp/x"],
}
PLACEHOLDERS = {"run": "other", "source": "weights", "step": "3", "other": "6", "scenario": "scenario.yaml"}
Capture = pytest.CaptureFixture[str]


def leaves(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    """The commands below one, each with its words."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, [*words, name])
    else:
        yield words, command


def run_words(command: Any) -> Iterator[list[str]]:
    """For each way in which a command takes a run: its arguments, {RUN} for the run."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    metavars = [str(one.metavar) for one in arguments]
    values = [PLACEHOLDERS.get(one.name, "job.yaml") for one in arguments]
    if metavars and metavars[0].startswith("RUN"):
        yield ["{RUN}", *values[1:]]
    for option in command.params:
        if option.param_type_name == "option" and str(option.metavar).startswith("RUN"):
            yield [*([] if option.name == "resume" else values), option.opts[0], "{RUN}"]


def every_way_to_name_a_run() -> Iterator[list[str]]:
    for verb, where in VERBS.items():
        command: Any = typer.main.get_command(importlib.import_module(f"hpcrun.cli.{where.module}").app)
        command = getattr(command, "commands", {}).get(verb, command)
        for words, leaf in leaves(command, [verb]):
            for arguments in run_words(leaf):
                yield [*words, *arguments, *REQUIRED_OPTIONS.get(words[-1], [])]


WAYS = list(every_way_to_name_a_run())


@pytest.fixture
def old_run(runs_root: Path) -> RunDir:
    shutil.copytree(OLD_RUN, runs_root / "before-1201-130443-046b4a", copy_function=shutil.copy)
    runs_root.chmod(0o700)
    return RunDir(runs_root / "before-1201-130443-046b4a")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def call(capsys: Capture, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_the_verbs_that_take_a_run_are_found() -> None:
    assert len(WAYS) > 30
    assert {way[0] for way in WAYS} >= {"train", "submit", "status", "events", "chaos", "ckpt", "tune"}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.torch] * ("import" in way)) for way in WAYS],
    ids=map(" ".join, WAYS),
)
def test_every_verb_refuses_a_run_of_the_version_before(
    way: list[str], old_run: RunDir, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: x\ncommand: [./a]\n")
    (tmp_path / "scenario.yaml").write_text("- {at: 1s, do: kill-rank, rank: 0}\n")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    other = create_run("other")
    other.spec.write_text("name: other\n")
    shutil.copytree(OLD_RUN / "checkpoints", other.checkpoints, dirs_exist_ok=True)
    before = files(old_run.path)
    code, out, err = call(capsys, *(old_run.id if word == "{RUN}" else word for word in way))
    assert (code, out) == (2, "")
    found = "no schema version (it is of an older hpcrun, or a part of a run)"
    assert err == (
        f"hpcrun: {old_run.path}: has {found}, and this hpcrun reads version {RUN_SCHEMA_VERSION}; use the"
        " hpcrun that made it (0.1.0), or start a new run\n"
    )
    assert files(old_run.path) == before


@pytest.mark.parametrize("version", [1, RUN_SCHEMA_VERSION + 1, "x", None])
def test_so_is_any_other_version(version: Any, runs_root: Path, capsys: Capture) -> None:
    run = create_run("r")
    run.spec.write_text("name: r\n")
    assert call(capsys, "status", run.id)[0] == 0
    record = json.loads(run.job.read_text())
    assert record["schema_version"] == RUN_SCHEMA_VERSION
    run.job.write_text(json.dumps(record | {"schema_version": version}))
    shown = "no schema version" if version is None else f"schema version {json.dumps(version)}"
    assert f"{run.path}: has {shown}" in call(capsys, "status", run.id)[2]
    run.job.unlink()
    assert "has no schema version" in call(capsys, "status", run.id)[2]


@pytest.mark.parametrize("words", [("list",), ("status", "--all")])
def test_a_listing_shows_it_as_one_line_and_goes_on(
    words: tuple[str, ...], old_run: RunDir, capsys: Capture
) -> None:
    other = create_run("other")
    other.spec.write_text("name: other\n")
    code, out, _ = call(capsys, *words)
    assert code == 0
    (line,) = [line for line in out.splitlines() if old_run.id in line]
    assert "unknown" in line
    assert [line for line in out.splitlines() if line.startswith("other-")]
    if words[0] == "status":
        assert "has no schema version" in line
