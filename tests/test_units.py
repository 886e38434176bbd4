"""Times and memory: Slurm's forms, our own, what Slurm prints, and what nobody should write."""

from __future__ import annotations

import math

import pytest

from hpcrun.errors import UsageError
from hpcrun.units import (
    SlurmMemory,
    TimeLimit,
    bytes_to_mib,
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_memory,
    parse_slurm_memory,
    parse_slurm_time,
    parse_time,
    render_memory,
    render_time,
)

HOUR, DAY = 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        ("4:30:00", 4.5 * HOUR),
        ("2-0", 2 * DAY),
        ("2-12", 2.5 * DAY),
        ("1-12:30", DAY + 12.5 * HOUR),
        ("1-02:03:04", DAY + 2 * HOUR + 184),
        ("365-00:00:00", 365 * DAY),
        ("90m", 90 * 60),
        ("2h", 2 * HOUR),
        ("1d12h", 1.5 * DAY),
        ("1D2H3M4S", DAY + 2 * HOUR + 184),
        (" 30s ", 30),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        ("-1", math.inf),
    ],
)
def test_a_time_in_each_form(text: str, seconds: float) -> None:
    assert parse_time(text) == TimeLimit(seconds)


def test_minutes_and_seconds_that_look_like_hours_are_warned_about() -> None:
    limit = parse_time("4:00", "job.yaml:3 time")
    assert limit.seconds == 240
    assert limit.warning == (
        "job.yaml:3 time: 4:00 is 4 minutes; write 4:00:00 for hours and minutes, 00:04:00 to be clear"
    )
    assert "1 minute 30 seconds;" in parse_time("1:30").warning


def test_zero_is_no_limit_for_slurm_and_that_is_said() -> None:
    for text in ("0", "0:00", "0m"):
        limit = parse_time(text)
        assert limit.seconds == math.inf
        assert "no limit" in limit.warning


@pytest.mark.parametrize(
    "text", ["", "h", "1h30", "12h1d", "1:2:3:4", "1-", "-2", "1.5h", "2 h", "four", "1-2-3", "٤", "9" * 5000]
)
def test_what_is_no_time_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^time: .* is not a time; write 90m, 2h, 1d12h, H:M:S") as raised:
        parse_time(text)
    assert "\n" not in str(raised.value)


def test_minutes_round_up_as_in_slurm() -> None:
    assert parse_time("61s").minutes == 2
    assert parse_time("1d").minutes == 1440
    assert parse_time("UNLIMITED").minutes is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:00", 0),
        ("9:56", 596),
        ("00:10:00", 600),
        ("1-00:00:00", DAY),
        ("00:00.250", 0.25),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        ("Partition_Limit", None),
        ("INVALID", None),
        ("N/A", None),
        ("NONE", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_a_time_that_slurm_printed(text: str, seconds: float | None) -> None:
    assert parse_slurm_time(text) == seconds


def test_a_rendered_time_is_read_back_without_a_warning() -> None:
    assert render_time(240) == "00:04:00"
    assert render_time(1.5 * DAY) == "1-12:00:00"
    assert render_time(0.2) == "00:00:01"
    for seconds in (1, 59, 60, 3599, 86399, 86400, 10**7, math.inf):
        assert parse_time(render_time(seconds)) == TimeLimit(seconds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512M", 512),
        ("512", 512),
        ("1.5G", 1536),
        ("64GiB", 65536),
        ("64GB", 65536),
        ("2t", 2 * 2**20),
        ("1P", 2**30),
        ("1025K", 2),
        ("1048576B", 1),
        ("1048577b", 2),
        ("0.1G", 103),
        ("0", 0),
    ],
)
def test_memory_as_people_write_it_rounds_up_to_mib(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1G", "1.G", "1,5G", "lots", "1GG", "1 G", "9" * 5000])
def test_what_is_no_memory_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"^job.yaml:2 mem: .* is not an amount of memory; write 512M, 1.5G or 64GiB"
    ):
        parse_memory(text, "job.yaml:2 mem")


def test_bytes_round_up() -> None:
    assert [bytes_to_mib(0), bytes_to_mib(1), bytes_to_mib(2**20), bytes_to_mib(2**20 + 1)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8G", SlurmMemory(8192)),
        ("62.50G", SlurmMemory(64000)),
        ("64000", SlurmMemory(64000)),
        ("64000+", SlurmMemory(64000)),
        ("0n", SlurmMemory(0, "node")),
        ("4000Mc", SlurmMemory(4000, "cpu")),
        ("16Gn", SlurmMemory(16384, "node")),
        ("UNLIMITED", None),
        ("N/A", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_memory_that_slurm_printed(text: str, expected: SlurmMemory | None) -> None:
    assert parse_slurm_memory(text) == expected


def test_sbatch_gets_whole_numbers() -> None:
    assert [render_memory(amount) for amount in (0, 512, 1536, 65536)] == ["0M", "512M", "1536M", "64G"]


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 2**10, "1023 KiB"),
        (1.234 * 2**30, "1.234 GiB"),
        (5 * 2**40, "5 TiB"),
    ],
)
def test_bytes_for_people(size: float, shown: str) -> None:
    assert format_bytes(size) == shown


def test_bandwidth_for_people_is_decimal() -> None:
    assert [format_bandwidth(rate) for rate in (12.5e9, 0.25e9, 400e9)] == [
        "12.5 GB/s",
        "0.25 GB/s",
        "400 GB/s",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.0042, "4.2 ms"),
        (0.4, "0.4 s"),
        (5.25, "5.2 s"),
        (43.4, "43 s"),
        (59.7, "1 min"),
        (725, "12 min 5 s"),
        (4320, "1 h 12 min"),
        (7200, "2 h"),
        (187200, "2 d 4 h"),
        (3 * 365.25 * 86400, "3 years"),
    ],
)
def test_durations_for_people(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 mb", 500 * 10**6), ("2GiB", 2 << 30), ("1.5K", 1500), ("7", 7)],
)
def test_sizes_are_decimal_unless_there_is_an_i(text: str, size: int) -> None:
    assert parse_bytes(text, "--shard-size") == size


@pytest.mark.parametrize("text", ["", "5 gold", "0", "-1GB", "1e9"])
def test_a_size_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"--shard-size .*: is not a size; write 5GB or 500MB"):
        parse_bytes(text, "--shard-size")
