"""`hpcrun data`: what its verbs print, and where."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.data import app
from hpcrun.errors import UsageError


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_prepare_then_inspect(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "t.bin"
    text.mkdir()
    (text / "a.txt").write_text("hello world, " * 50)
    (text / "b.bin").write_bytes(b"\0")
    made = run("prepare", text, "--out", out)
    assert made.exit_code == 0
    assert made.stdout == f"{out}: 651 tokens of 1 documents, uint16, vocab 256, tokenizer bytes\n"
    assert made.stderr == f"hpcrun: left out: {text / 'b.bin'} has NUL bytes, which separate documents\n"
    found = run("inspect", out, "--seq-len", "10", "--show", "2")
    lines = dict(line.split(maxsplit=1) for line in found.stdout.splitlines() if "  " in line)
    assert lines["kind"] == "tokens"
    assert lines["sequences"] == "65"
    assert lines["train_sequences"] == "62"
    assert "sequence 0:\nhello worl\n" in found.stdout


def test_json_of_both_verbs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world, " * 50)
    out = tmp_path / "t.bin"
    made = json.loads(run("prepare", tmp_path / "a.txt", "--out", out, "--dtype", "uint32", "--json").stdout)
    assert (made["schema_version"], made["dtype"], made["tokens"], made["documents"]) == (2, "uint32", 651, 1)
    found = json.loads(
        run("inspect", tmp_path, "--pattern", "*.txt", "--seq-len", "40", "--json", "--show", "1").stdout
    )
    assert (found["schema_version"], found["kind"], found["tokens"], found["vocab"]) == (2, "text", 651, 256)
    assert found["sequences"] == 16
    assert found["samples"][0]["text"].startswith("hello")


def test_a_bare_token_file_needs_its_dtype_and_shows_ids(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(range(100)))
    result = run("inspect", path)
    assert isinstance(result.exception, UsageError)
    found = run("inspect", path, "--dtype", "uint16", "--seq-len", "3", "--holdout", "0", "--show", "1")
    assert "vocab            unknown" in found.stdout
    assert "[256, 770, 1284]" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "missing"], "missing: does not exist"),
        (["inspect", ".", "--holdout", "1.5"], "holdout: Input should be less than 1"),
        (["inspect", "x.bin", "--pattern", "*.c"], "pattern is for text directories"),
        (["inspect", "x.bin", "--dtype", "int8"], "dtype: Input should be 'uint16' or 'uint32'"),
        (["prepare", "missing", "--out", "t.bin"], "missing: does not exist"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world, " * 50)
    code = (
        "import sys; from hpcrun.cli.data import app\n"
        f"app(['inspect', {str(tmp_path)!r}, '--seq-len', '40'], standalone_mode=False)\n"
        "heavy = {'rich', 'torch', 'numpy', 'tokenizers', 'mpi4py'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
