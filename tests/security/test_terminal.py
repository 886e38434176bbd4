"""Names and messages from elsewhere are shown by every verb, and no terminal obeys them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrun.cli.main import main
from hpcrun.cli.terminal import escape_control_characters, escape_log_text, escape_to_one_line
from hpcrun.specs.identity import RUN_SCHEMA_VERSION
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.metric_lines import metric_line

NASTY = (
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]52;c;aGk=\x07",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31m", "\x9d0;x\x9c", "\x1bP+q\x1b\\", "\x1b[8mhidden", "\x1b[31mred", "\x07\x08\x08\x7f", "a\rb",
    "\x0b\x0c",
    "\u202egnp.exe", "\u2066x\u2069", "\u200f", "\u2028", "\udc9b31m", "\ud800", "\x1bc", "\x1b(0", "\x00",
)  # fmt: skip
HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
ALL = "".join(NASTY)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main(list(words))
    out, err = capsys.readouterr()
    return out + err


@pytest.fixture
def hostile(runs_root: Path) -> RunDir:
    """A run of which every word is hostile."""
    run = create_run("r")
    words: dict[str, Any] = dict.fromkeys(
        ("user", "host", "directory", "hpcrun", "python", "commit", "cluster", "template"), ALL
    )
    record = {
        **words,
        "schema_version": RUN_SCHEMA_VERSION,
        "kind": "train",
        "name": ALL,
        "ranks": 1,
        "steps": None,
        "created": 1.0,
        "argv": [ALL],
    }
    write_json(run.job, record)
    run.spec.write_text("name: r\ncommand: [./a]\n")
    attempt = run.attempt(1).create()
    write_json(attempt.supervisor, {"host": ALL, "started": 1.0, "slurm_job": None})
    write_json(attempt.outcome, {"status": "failed", "message": ALL})
    write_json(run.exit, {"status": "failed", "exit_code": 5, "message": f"a\n{ALL}", "attempt": 1})
    attempt.log(0).write_bytes(f"\x1b[32mgreen {ALL}\n10 %\r20 %\n".encode(errors="replace") + b"\x9b\n")
    events = [
        event_line("launch", time.time(), ranks=1),
        event_line("fault", time.time(), message=ALL, nodes=[ALL]),
        event_line(ALL, time.time()),
    ]
    run.events.write_text("".join(json.dumps(one) + "\n" for one in events))
    run.metrics.write_text(json.dumps(metric_line("start", device_name=ALL, reason=ALL)) + "\n")
    for name in (*NASTY[:15], "line\nbreak"):
        other = RunDir(run.path.parent / name.replace("/", "_"))
        other.path.mkdir()
        other.job.write_text(json.dumps(record))
        other.spec.write_text("name: r\ncommand: [./a]\n")
    return run


@pytest.mark.process
def test_no_verb_passes_on_what_a_terminal_obeys(
    hostile: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text('name: "a\\e[2J"\nmodel: "\\e]0;x\\a"\n"\\e[31mkey": "\\u202e"\n')
    name = hostile.id
    for words in (
        ("list",), ("list", "--all"), ("status", name), ("describe", name), ("events", name), ("wait",
        name),
        ("status", ALL), ("cancel", ALL), ("ckpt", "ls", name), ("ckpt", "ls", ALL),
        ("train", str(job)), ("submit", str(job), "--dry-run"), (ALL,), ("status", name, ALL), ("logs",
        ALL),
        ("train", f"{ALL}.yaml"), ("template", "show", ALL), ("postmortem", name, "--out",
        str(tmp_path / ALL[:9])),
        ("status", f"--{ALL}"),
    ):  # fmt: skip
        text = said(capsys, *words)
        assert not HARMFUL.search(text), (words, text)
    assert "\\x1b[2J" in said(capsys, "status", name)


def test_a_message_makes_no_row_of_its_own(hostile: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(hostile.exit, {"status": "failed", "exit_code": 5, "message": "x\nexit     0", "attempt": 1})
    lines = said(capsys, "status", hostile.id).splitlines()
    assert len([line for line in lines if line.startswith("exit")]) == 1
    listed = said(capsys, "list").splitlines()
    assert not [line for line in listed if line.startswith("break")]


def test_json_stays_as_it_is(hostile: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "status", hostile.id, "--json")
    assert json.loads(text)["message"] == f"a\n{ALL}"
    assert text.isascii()


def test_a_log_keeps_its_colours(hostile: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "logs", hostile.id)
    assert text.startswith("\x1b[32mgreen ")
    assert "10 %\r20 %\n" in text
    rest = re.sub("\x1b\\[[0-9;]*m|\r", "", text)
    assert not HARMFUL.search(rest)
    assert text.endswith("\x1b[0m"), "what it has left on is ended"


def test_what_is_shown_says_what_it_was() -> None:
    assert escape_control_characters("a\x1b[2Jb\x9bc\u202ed\udc9be\tf\ng\r\nh\ri") == (
        "a\\x1b[2Jb\\x9bc\\u202ed\\x9be\tf\ng\r\nh\\x0di"
    )
    assert escape_to_one_line("a\nb\r\nc\t") == "a\\nb\\r\\nc\t"
    assert (
        escape_log_text("\x1b[1;31mx\x1b[0m\x1b[2J\r\x1b]0;t\x07")
        == "\x1b[1;31mx\x1b[0m\\x1b[2J\r\\x1b]0;t\\x07"
    )
    for text in ("ünïcode 𝄞 日本 é\u200d", "tabs\tand\nlines"):
        assert escape_control_characters(text) == text
