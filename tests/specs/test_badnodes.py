"""Lists of bad nodes: what stands in them, how long it holds, what becomes of it in --exclude."""

from __future__ import annotations

import json
import random
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import SiteError, UsageError
from hpcrun.specs.badnodes import (
    BadNodeList,
    add_bad_node,
    bad_node_files,
    load_bad_nodes,
    merge_excluded_nodes,
    parse_expiry,
)

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "bad-nodes.jsonl"


def add(path: Path, node: str, reason: str = "ECC errors", until: float | None = None) -> None:
    add_bad_node(path, node, reason, until, now=NOW, by="ada")


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    path.write_text(text)
    return path


def test_without_a_list_no_node_is_bad(path: Path) -> None:
    assert load_bad_nodes([path]) == BadNodeList()
    assert BadNodeList().active(NOW) == {}


def test_what_is_added_is_read_back_and_ends(path: Path) -> None:
    add(path, "n03", until=NOW + HOUR)
    add(path, "n[07-08]", "slow link")
    found = load_bad_nodes([path])
    assert found.notes == ()
    first, second = found.entries
    assert (first.nodes, first.reason, first.since, first.until, first.by) == (
        ("n03",), "ECC errors", NOW, NOW + HOUR, "ada"
    )  # fmt: skip
    assert second.until is None
    assert found.active(NOW + HOUR - 1) == {"n03": "ECC errors", "n07": "slow link", "n08": "slow link"}
    assert set(found.active(NOW + HOUR)) == {"n07", "n08"}


def test_an_entry_is_one_line_that_people_can_read(path: Path) -> None:
    add(path, "n03", "Lüfter laut", until=NOW + HOUR)
    assert path.read_text() == (
        '{"node": "n03", "reason": "Lüfter laut", "since": "2026-11-29T12:00:00+00:00",'
        ' "until": "2026-11-29T13:00:00+00:00", "by": "ada"}\n'
    )


def test_lists_of_the_site_and_of_the_user_count_together(tmp_path: Path) -> None:
    site = write(tmp_path / "site", {"node": "n01", "reason": "fan"})
    user = write(tmp_path / "user", {"node": "n[01-02]", "reason": "slow"}, {"node": "n01", "reason": "fan"})
    assert load_bad_nodes([site, user]).active(NOW) == {"n01": "fan; slow", "n02": "slow"}


def test_they_lie_beside_the_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    assert bad_node_files() == {
        "site": tmp_path / "site" / "bad-nodes.jsonl",
        "user": tmp_path / "home" / "hpcrun" / "bad-nodes.jsonl",
    }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("n03 is slow", 'is not an entry; write {"node": "n01", "reason": "ECC errors"}'),
        ("[" * 100_000, "is not an entry"),
        ('["n03"]', "is not an entry"),
        ('{"node": "n03", "reas', "is not an entry"),
        ('{"reason": "slow"}', "node: is missing"),
        ('{"node": 3, "reason": "slow"}', "node: 3 is not one line of text"),
        ('{"node": "n03"}', "reason: is missing"),
        ('{"node": "n03", "reason": "a\\nb"}', "is not one line of text"),
        ('{"node": "n03", "reason": "\\ud800"}', "is not one line of text"),
        ('{"node": "n03", "reason": "  "}', "is not one line of text"),
        ('{"node": "switch{a}", "reason": "x"}', "node: 'switch{a}' names a switch"),
        ('{"node": "@all", "reason": "x"}', "node: '@all' is not a host list"),
        ('{"node": "_n1", "reason": "x"}', "'_n1' is not a host name"),
        ('{"node": "(null)", "reason": "x"}', "node: names no node"),
        ('{"node": "n03", "reason": "x", "until": "7d"}', "until: '7d' is not a time; write 2026-12-01 or"),
        ('{"node": "n03", "reason": "x", "until": 5}', "until: 5 is not one line of text"),
        ('{"node": "n03", "reason": "x", "since": "0001-01-01"}', "since: '0001-01-01' is not a time"),
    ],
)
def test_a_damaged_line_is_told_and_costs_no_other(path: Path, line: str, told: str) -> None:
    good = {"node": "n01", "reason": "fan"}
    found = load_bad_nodes([write(path, "# racks of room 2", "", good, line, {"node": "n02", "reason": "x"})])
    assert set(found.active(NOW)) == {"n01", "n02"}
    (note,) = found.notes
    assert note.startswith(f"{path}:4: ")
    assert told in note
    assert note.endswith("the line is skipped")


def test_keys_of_a_later_version_do_not_cost_the_entry(path: Path) -> None:
    found = load_bad_nodes([write(path, {"node": "n01", "reason": "fan", "ticket": 7, "since": None})])
    assert (found.active(NOW), found.notes) == ({"n01": "fan"}, ())


def test_a_list_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    found = load_bad_nodes([tmp_path])
    assert found.notes == (f"{tmp_path}: cannot be read (Is a directory), so its nodes are not avoided",)


def test_garbage_never_raises(path: Path) -> None:
    seed = random.Random(0)
    text = b'{"node": "n[01-02]", "reason": "fan", "until": "2026-12-01T00:00:00Z"}\n' * 3
    path.parent.mkdir()
    for _ in range(300):
        data = bytearray(text)
        for _ in range(seed.randint(1, 6)):
            data[seed.randrange(len(data))] = seed.randrange(256)
        path.write_bytes(data)
        merge_excluded_nodes("n09", load_bad_nodes([path]).active(NOW), None)


def test_a_line_without_an_end_does_not_swallow_the_next(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"node": "n01", "reason": "fan"}')
    add(path, "n02")
    found = load_bad_nodes([path])
    assert (set(found.active(NOW)), found.notes) == ({"n01", "n02"}, ())


def test_many_writers_lose_nothing(path: Path) -> None:
    def write_many(writer: int) -> None:
        for number in range(20):
            add(path, f"n{writer}-{number}")

    writers = [threading.Thread(target=write_many, args=(writer,)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = load_bad_nodes([path])
    assert (len(found.active(NOW)), found.notes) == (80, ())


@pytest.mark.parametrize(("node", "reason"), [("@all", "x"), ("", "x"), ("n01", ""), ("n01", "a\nb")])
def test_what_could_not_be_read_back_is_not_written(path: Path, node: str, reason: str) -> None:
    with pytest.raises(UsageError):
        add(path, node, reason)
    assert not path.exists()


def test_a_list_that_cannot_be_written_is_the_sites_matter(tmp_path: Path) -> None:
    with pytest.raises(SiteError) as caught:
        add(tmp_path, "n01")
    assert str(caught.value) == f"{tmp_path}: cannot be written: Is a directory"


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("12h", NOW + 12 * HOUR),
        ("7d", NOW + 168 * HOUR),
        ("1-00:00:00", NOW + 24 * HOUR),
        ("UNLIMITED", None),
        ("2026-11-30T00:00:00+02:00", NOW + 10 * HOUR),
    ],
)
def test_an_end_is_a_date_or_a_time_from_now(text: str, until: float | None) -> None:
    assert parse_expiry(text, NOW) == until


def test_a_date_counts_whole() -> None:
    until = parse_expiry("2026-12-01", NOW)
    assert until == datetime(2026, 12, 2).timestamp()
    assert parse_expiry("2026-11-30", NOW) == datetime(2026, 12, 1).timestamp()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("soon", "--until: 'soon' is not a time; write 90m, 2h"),
        ("2026-13-01", "--until: '2026-13-01' is not a time; write 2026-12-01 or"),
        ("2026-11-01", "--until: 2026-11-01 does not lie ahead; write 12h, 7d, or a date to come"),
        ("0", "--until: Slurm takes 0 for no limit"),
        ("4:00", "--until: 4:00 is 4 minutes; write 4:00:00"),
        ("99999999d", "--until: 99999999d does not lie ahead"),
    ],
)
def test_another_end_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_expiry(text, NOW)
    assert str(caught.value).startswith(told)


def test_bad_nodes_join_those_that_the_job_excludes() -> None:
    bad = {"n05": "ECC errors", "n03": "slow link", "n04": "slow link"}
    hosts, notes = merge_excluded_nodes("n[01,03]", bad, {f"n{k:02}" for k in range(1, 9)})
    assert hosts == "n[01,03-05]"
    assert notes == ("bad nodes: n05: ECC errors", "bad nodes: n[03-04]: slow link")


def test_names_that_vanished_are_left_out_and_told() -> None:
    hosts, notes = merge_excluded_nodes("n01,old1", {"old2": "fan", "n02": "fan"}, {"n01", "n02", "n03"})
    assert hosts == "n[01-02]"
    assert notes == (
        "exclude: old1: no such node (any more); left out",
        "bad nodes: old2: no such node (any more); left out",
        "bad nodes: n02: fan",
    )
    assert merge_excluded_nodes("old1", {}, {"n01"})[0] == ""
    assert merge_excluded_nodes("old1", {"old2": "fan"}, None)[0] == "old[1-2]"
    assert merge_excluded_nodes(None, {}, {"n01"}) == ("", ())


def test_no_list_has_text_behind_a_bracket() -> None:
    assert merge_excluded_nodes("n1-ib,n2-ib", {}, None)[0] == "n1-ib,n2-ib"
