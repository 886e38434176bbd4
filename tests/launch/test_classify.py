"""Kinds of faults, and how long to wait after them."""

from __future__ import annotations

import signal

import pytest

from hpcrun.launch.classify import kind_of_crash, kind_of_hang
from hpcrun.launch.recover import back_off_s
from hpcrun.launch.watch.stacks import RankStack, group, odd_ones


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "infrastructure"),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:3690, ncclRemoteError: remote process exited",
            "infrastructure",
        ),
        ("[Errno 5] Input/output error: '/lustre/tokens.bin'", "infrastructure"),
        ("[Errno 28] No space left on device", "infrastructure"),
        ("DataLoader worker (pid 12) is killed by signal: Segmentation fault.", "data"),
        ("no such layer", "unknown"),
    ],
)
def test_by_what_a_rank_has_written_down(message: str, kind: str) -> None:
    assert kind_of_crash({"message": message, "traceback": ""}) == kind


def test_by_the_place_of_an_error() -> None:
    place = '  File "/opt/x/hpcrun/runtime/data.py", line 88, in __next__\n'
    assert kind_of_crash({"message": "index 9 is out of bounds", "traceback": place}) == "data"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (signal.SIGKILL, "infrastructure"),
        (signal.SIGBUS | 0x80, "infrastructure"),
        (signal.SIGSEGV, "unknown"),
        (3 << 8, "unknown"),
        (None, "unknown"),
    ],
)
def test_by_how_a_process_ended(status: int | None, kind: str) -> None:
    assert kind_of_crash(None, status) == kind


def test_of_a_hang() -> None:
    many = [RankStack(rank, "a", "S", "", (("x.py", "reduce"),)) for rank in range(3)]
    for state, kind in (("T", "infrastructure"), ("D", "infrastructure"), ("", "infrastructure")):
        assert kind_of_hang(odd_ones(group([*many, RankStack(3, "b", state)]))) == kind
    reading = RankStack(3, "b", "R", "", (("x.py", "read"),))
    assert kind_of_hang(odd_ones(group([*many, reading]))) == "unknown"
    assert kind_of_hang(None) == "unknown"


def test_the_pause_grows_with_attempts_that_save_nothing() -> None:
    assert [back_off_s(count) for count in range(7)] == [0, 0, 2, 8, 32, 60, 60]
