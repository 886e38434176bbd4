"""Outputs of nccl-tests, as its releases print them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.tuning.policy.nccl_tests import NcclTestTimings, TimedCall, parse_nccl_tests, version_from_code

OUTPUTS = Path(__file__).parents[1] / "data" / "tuning" / "nccl-tests"


def read(name: str) -> NcclTestTimings:
    return parse_nccl_tests((OUTPUTS / f"{name}.txt").read_text(encoding="utf-8"))


def test_a_new_output_tells_everything() -> None:
    found = read("all-reduce-2.17")
    assert found.nccl == (2, 28, 9)
    assert (found.nodes, found.ranks, found.ranks_per_node) == (("n01", "n02"), 8, 4)
    assert {call.size_bytes for call in found.times_us} == {2**20, 2**24, 2**28}
    assert found.times_us[TimedCall("all_reduce", 2**28, False)] == (1406.2,)
    assert found.times_us[TimedCall("all_reduce", 2**28, True)] == (1404.8,)
    assert found.busbw_GBps[TimedCall("all_reduce", 2**28, False)] == (334.06,)
    assert (found.is_wrong, found.unchecked, found.mixed) == (False, False, "")


def test_alltoall_in_place_is_not_a_time_that_means_something() -> None:
    found = read("alltoall-2.13")
    assert found.nccl == (2, 19, 3)
    assert set(found.times_us) == {TimedCall("", size, False) for size in (2**20, 2**23, 2**26)}


def test_an_old_output_has_errors_that_are_not_wrong() -> None:
    found = read("reduce-scatter-2.0")
    assert (found.nccl, found.nodes, found.ranks) == ((2, 8, 4), ("n01", "n02"), 4)
    assert found.times_us[TimedCall("", 2**26, True)] == (2388.0,)
    assert not found.is_wrong
    text = (OUTPUTS / "reduce-scatter-2.0.txt").read_text(encoding="utf-8")
    assert parse_nccl_tests(text.replace("values : 0 OK", "values : 7 FAILED")).is_wrong
    assert not found.unchecked
    assert parse_nccl_tests(text.partition("# Out of bounds")[0]).unchecked


def test_further_columns_cycles_and_wrong_values() -> None:
    found = read("reduce-scatter-wrong-2.18")
    call = TimedCall("reduce_scatter", 2**22, False)
    assert found.times_us[call] == (71.2, 71.6, 75.0)
    assert found.median_us(call) == 71.6
    assert found.times_us[call._replace(in_place=True)] == (70.8, 71.0, 71.2)
    assert found.wrong == (call,)
    assert found.is_wrong


def test_unchecked_results_are_told_and_both_halves_kept() -> None:
    text = (OUTPUTS / "all-reduce-2.17.txt").read_text(encoding="utf-8").replace("      0  ", "    N/A  ")
    found = parse_nccl_tests(text.replace("      0\n", "    N/A\n"))
    assert found.unchecked
    assert len(found.times_us) == 6


def test_sizes_of_several_types_cannot_be_told_apart() -> None:
    text = (OUTPUTS / "all-reduce-2.17.txt").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if " 16777216 " in line)
    assert parse_nccl_tests(f"{text}\n{row.replace('float', ' half')}").mixed.startswith("16777216 bytes")


def test_rows_that_cannot_be_read_are_told() -> None:
    text = (OUTPUTS / "all-reduce-2.17.txt").read_text(encoding="utf-8")
    assert parse_nccl_tests(text).not_read == ()
    row = next(line for line in text.splitlines() if " 16777216 " in line)
    for broken in (
        row[: len(row) // 2],
        row.replace(row.split()[5], "x"),
        row.replace(row.split()[5], "nan"),
    ):
        found = parse_nccl_tests(text.replace(row, broken))
        assert found.not_read == (broken.strip(),)
        assert {call.size_bytes for call in found.times_us} >= {2**20, 2**28}
    without_head = "\n".join(line for line in text.splitlines() if "algbw" not in line)
    assert len(parse_nccl_tests(without_head).not_read) == 3


@pytest.mark.parametrize("text", ["", "nonsense\n1 2 3", "# size count time\n8 x y", "\0\n# size count\n1 2"])
def test_no_output_is_an_empty_run(text: str) -> None:
    found = parse_nccl_tests(text)
    assert (found.times_us, found.nccl, found.ranks_per_node) == ({}, None, None)


@pytest.mark.parametrize(
    ("code", "release"), [(22809, (2, 28, 9)), (23007, (2, 30, 7)), (2804, (2, 8, 4)), (21903, (2, 19, 3))]
)
def test_releases_by_their_number(code: int, release: tuple[int, ...]) -> None:
    assert version_from_code(code) == release
