"""Events: each has a class with a text, and comes back from its line as it was written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hpcrun.cli.main import main
from hpcrun.specs.events import attempt, checkpoint, supervisor
from hpcrun.specs.events.event import Event
from hpcrun.specs.events.log import EVENT_CLASSES, EventWriter, UnknownEvent, parse_event, read_events
from hpcrun.specs.events.supervisor import SignalEvent
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import WrongValue
from tests.event_lines import event_line

Capture = pytest.CaptureFixture[str]
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def classes_of_events() -> set[type[Event]]:
    values = [value for module in (attempt, checkpoint, supervisor) for value in vars(module).values()]
    return {one for one in values if isinstance(one, type) and issubclass(one, Event) and one is not Event}


def test_every_class_has_a_name_a_text_and_a_place_in_the_docs() -> None:
    assert classes_of_events() == set(EVENT_CLASSES.values())
    table = ARCHITECTURE.read_text().partition("### Events")[2].partition("\n## ")[0]
    for name, cls in EVENT_CLASSES.items():
        assert "__str__" in vars(cls), "the text is its own"
        assert re.fullmatch("[a-z]+(_[a-z]+)*", name)
        assert name == "chaos" or f"`{name}`" in table, name


def test_a_class_without_a_text_cannot_be_made() -> None:
    class _Silent(Event):
        pass

    with pytest.raises(TypeError, match="abstract"):
        _Silent()  # type: ignore[abstract]


@pytest.mark.parametrize("name", EVENT_CLASSES)
def test_an_event_comes_back_from_its_line(name: str) -> None:
    line = event_line(name, 5.0, 2)
    record = parse_event(line)
    assert (type(record.event), record.name, record.attempt) == (EVENT_CLASSES[name], name, 2)
    assert json.loads(json.dumps(record.as_json())).items() >= line.items()
    assert "\n" not in str(record)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": "x"}, "rank_ended: rank: expected an integer, not 'x'"),
        ({"rank": -1}, "rank_ended: rank: "),
        ({"wait_status": 2**16}, "rank_ended: wait_status: "),
        ({"time": "now"}, "time: expected a number, not 'now'"),
        ({"attempt": None}, "attempt: expected an integer, not None"),
        ({"event": 3}, "event: expected the name of an event, not 3"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(WrongValue, match=f"^{re.escape(says)}"):
        parse_event(event_line("rank_ended", 1.0, node="n01") | change)


def test_a_missing_field_is_named() -> None:
    for name in ("time", "monotonic", "attempt", "host", "rank"):
        line = event_line("rank_ended", 1.0)
        del line[name]
        with pytest.raises(WrongValue, match=f"{name}: is missing"):
            parse_event(line)


def test_the_writer_stamps_each_event(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    writer.append(SignalEvent("SIGTERM"), 3)
    writer.close()
    (record,) = read_events(tmp_path / "events.jsonl")
    assert (record.event, record.attempt) == (SignalEvent("SIGTERM"), 3)
    assert record.stamp.host == os.uname().nodename


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    run = create_run("r")
    run.spec.write_text("name: r\n")
    return run


def told(capsys: Capture, run: RunDir, *verb: str) -> tuple[list[str], list[str]]:
    with pytest.raises(SystemExit) as ended:
        main([*verb, run.id])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    return [line.partition("attempt 1  ")[2] for line in out.splitlines()], err.splitlines()


def write(run: RunDir, *lines: dict[str, Any], torn: str = "") -> None:
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def test_what_a_newer_version_wrote_is_shown_as_it_is(run: RunDir, capsys: Capture) -> None:
    newer = event_line("signal", 2.0, signal="SIGUSR1") | {"sender": "me", "uid": 7}
    write(run, event_line("promoted", 1.0, node="n07", by={"a": 1}), newer)
    assert told(capsys, run, "events") == (
        ["promoted node=n07 by={'a': 1}", "SIGUSR1: save (sender=me, uid=7)"],
        [],
    )
    (unknown, known) = read_events(run.events)
    assert isinstance(unknown.event, UnknownEvent)
    assert unknown.as_json() == event_line("promoted", 1.0, node="n07", by={"a": 1})
    assert known.as_json() == newer


@pytest.mark.parametrize("verb", ["events", "describe"])
def test_a_wrong_line_is_told_with_its_number_and_the_rest_is_read(
    run: RunDir, capsys: Capture, verb: str
) -> None:
    missing = event_line("node_lost", 2.0, node="n02")
    del missing["why"]
    write(
        run,
        event_line("signal", 1.0, signal="SIGUSR1"),
        missing,
        event_line("launch", 3.0, ranks="many"),
        event_line("signal", 4.0, signal="SIGTERM"),
    )
    out, err = told(capsys, run, verb)
    assert [
        line.removeprefix(f"hpcrun: {run.events}").removesuffix("; the line is passed over") for line in err
    ] == [
        ":2 node_lost: why: is missing",
        ":3 launch: ranks: expected an integer, not 'many'",
    ]
    assert verb != "events" or out == ["SIGUSR1: save", "SIGTERM: save and stop"]


def test_a_torn_last_line_is_dropped(run: RunDir, capsys: Capture) -> None:
    write(run, event_line("signal", 1.0, signal="SIGUSR1"), torn='{"time": 2.0, "event": "sig')
    assert told(capsys, run, "events") == (["SIGUSR1: save"], [])
    with run.events.open("a") as file:
        file.write("\n" + json.dumps(event_line("signal", 3.0, signal="SIGTERM")) + "\n")
    assert told(capsys, run, "events") == (["SIGUSR1: save", "SIGTERM: save and stop"], [])
