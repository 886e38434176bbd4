"""Whose modules our processes load: never those that lie where a job is submitted or runs."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrun.process import python_path
from hpcrun.specs.run_lookup import find_run

PACKAGE = Path(__file__).parents[2] / "hpcrun"
NAMES = (
    "hpcrun",
    "yaml",
    "torch",
    "json",
    "submitit",
    "pydantic",
    "typing",
    "numpy",
    "jinja2",
    "cloudpickle",
)


def _started(tree: ast.AST) -> list[list[Any]]:
    """Every list or tuple of words that starts a module of ours or of submitit's."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            words: list[Any] = [one.value if isinstance(one, ast.Constant) else one for one in node.elts]
            if "-m" in words:
                found.append(words)
    return found


def test_whatever_we_start_looks_not_into_the_working_directory() -> None:
    found = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for words in _started(ast.parse(path.read_text())):
            module = words[words.index("-m") + 1 :][:1]
            if module and str(module[0]).startswith(("hpcrun", "submitit")) and "fixture" not in str(words):
                place = f"{path.name}: {[word for word in words if isinstance(word, str)]}"
                if path.name in ("injector.py", "script_context.py"):  # recognizes a command; invents one
                    continue
                found += 1
                assert "-P" in words[: words.index("-m")], place
    assert found >= 10


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with files that are called like modules, and leave a mark when imported."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"import os\nos.close(os.open({str(tmp_path / 'mark')!r}, os.O_CREAT))\nraise SystemExit(9)\n"
        )
    (folder / "beside.py").write_text("WORD = 'beside'\n")
    (folder / "own.py").write_text(
        f"import os, pathlib, subprocess, sys, beside\n"
        f"child = subprocess.run([sys.executable, '-c', 'import sys; print(sys.flags.safe_path)'],\n"
        f"                       capture_output=True, text=True)\n"
        f"pathlib.Path({str(tmp_path / 'said')!r}).write_text(beside.WORD + ' ' + child.stdout)\n"
    )
    monkeypatch.chdir(folder)
    return folder


def _hpcrun(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "hpcrun", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_run_here_loads_our_modules_and_its_program_those_beside_it(
    hostile: Path, tmp_path: Path, runs_root: Path
) -> None:
    """The background process, supervisor and rank script all start in that directory."""
    (hostile / "job.yaml").write_text("name: local\ncluster: local\n")
    done = _hpcrun("submit", "job.yaml", "--", sys.executable, "own.py")
    assert done.returncode == 0, done.stderr
    waited = _hpcrun("wait", "local")
    log = "".join(one.read_text() for one in find_run("local").path.rglob("*log*") if one.is_file())
    assert waited.returncode == 0, waited.stderr + log
    assert (tmp_path / "said").read_text().split() == ["beside", "False"]
    assert not (tmp_path / "mark").exists()


def test_a_batch_script_starts_the_supervisor_so(hostile: Path, tmp_path: Path, runs_root: Path) -> None:
    (hostile / "job.yaml").write_text("name: batch\nenv: {PYTHONPATH: ':/opt/theirs:'}\n")
    shown = _hpcrun("submit", "job.yaml", "--dry-run", "--", "python", "own.py")
    assert shown.returncode == 0, shown.stderr
    (line,) = [one for one in shown.stdout.splitlines() if "_task" in one]
    words = shlex.split(line.removesuffix("&"))
    assert words[1:5] == ["-P", "-u", "-m", "hpcrun"]
    (path,) = [one for one in shown.stdout.splitlines() if one.startswith("export PYTHONPATH=")]
    assert "" not in shlex.split(path)[1].partition("=")[2].split(":")
    done = subprocess.run(
        [sys.executable, *words[1:5], "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith("hpcrun "), done.stderr
    assert not (tmp_path / "mark").exists()


def test_no_empty_entry_of_a_path_is_passed_on() -> None:
    assert python_path("/a", ":/b::/c:", None, "", "/a") == "/a:/b:/c"
    assert python_path(":", None) == ""
