"""Job ids as they are printed, whole and cut short."""

from __future__ import annotations

import pytest

from hpcrun.slurm.ids import JobId, parse_job_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123", JobId(123)),
        ("123_4", JobId(123, (range(4, 5),))),
        ("17_[2-9%2]", JobId(17, (range(2, 10),))),
        ("123_[0-400:4%2]", JobId(123, (range(0, 401, 4),))),
        ("123_[1,3,5-7]", JobId(123, (range(1, 2), range(3, 4), range(5, 8)))),
        ("123_[1,3,...", JobId(123, (range(1, 2), range(3, 4)), truncated=True)),
        ("123_[1,3,…", JobId(123, (range(1, 2), range(3, 4)), truncated=True)),
        ("123_[1-3,31", JobId(123, (range(1, 4),), truncated=True)),
        ("123_[1,3,...]", JobId(123, (range(1, 2), range(3, 4)), truncated=True)),
        ("123_[1,3,...%2]", JobId(123, (range(1, 2), range(3, 4)), truncated=True)),
        ("18+0", JobId(18, offset=0)),
        ("12345+1", JobId(12345, offset=1)),
        ("123.batch", JobId(123)),
        ("123_4.0", JobId(123, (range(4, 5),))),
        ("18+1.extern", JobId(18, offset=1)),
        ("75168975;clustername", JobId(75168975, cluster="clustername")),
        ("17_[0-2]@south", JobId(17, (range(3),), cluster="south")),
    ],
)
def test_ids(text: str, expected: JobId) -> None:
    assert parse_job_id(text) == expected


@pytest.mark.parametrize("text", ["", "n01", "JOBID", "12 13", "1_", "+1", "1+", "-5", "9" * 40, "12;", "١"])
def test_what_is_no_id(text: str) -> None:
    assert parse_job_id(text) is None


def test_one_element_has_a_number_and_several_do_not() -> None:
    assert parse_job_id("123_4").element == 4  # type: ignore[union-attr]
    assert parse_job_id("123_[4]").element == 4  # type: ignore[union-attr]
    assert parse_job_id("123_[4-5]").element is None  # type: ignore[union-attr]
    assert parse_job_id("123_[4,...").element is None  # type: ignore[union-attr]


def test_which_elements_an_id_holds() -> None:
    whole, cut = JobId(1, (range(0, 401, 4),)), JobId(1, (range(3),), truncated=True)
    assert [whole.holds(400), whole.holds(401)] == [True, False]
    assert [cut.holds(2), cut.holds(3)] == [True, None]


def test_an_id_prints_as_slurm_takes_it() -> None:
    assert [str(JobId(5)), str(JobId(5, (range(2, 3),))), str(JobId(5, offset=1))] == ["5", "5_2", "5+1"]
    assert str(JobId(5, (range(9),))) == "5"
