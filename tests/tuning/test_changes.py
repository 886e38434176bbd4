"""What has changed between two logs of one job."""

from __future__ import annotations

from pathlib import Path

from hpcrun.tuning.log.changes import AlgorithmChange, compare_algorithms
from hpcrun.tuning.log.nccl_log import NcclLog, parse_nccl_log

DATA = Path(__file__).parents[1] / "data" / "tuning"
NEW = (DATA / "nccl-2.29-sockets.log").read_text(encoding="utf-8")


def old(line: str) -> NcclLog:
    return parse_nccl_log(f"NCCL version 2.22.3+cuda12.6\na:1:1 [0] NCCL INFO {line}\n")


def test_a_call_that_goes_another_way_is_told_with_what_the_table_has() -> None:
    before = old("Broadcast: 1048576 Bytes -> Algo 1 proto 0 time 9.3")
    assert compare_algorithms(before, parse_nccl_log(NEW)) == (
        AlgorithmChange("Broadcast", 1048576, ("Ring/LL",), ("Ring/Simple",), None, "Ring/Simple"),
    )


def test_what_is_the_same_or_in_one_log_alone_is_no_change() -> None:
    new = parse_nccl_log(NEW)
    assert compare_algorithms(new, new) == ()
    assert compare_algorithms(old("Broadcast: 77 Bytes -> Algo 1 proto 0 time 9.3"), new) == ()
    assert compare_algorithms(NcclLog(), new) == ()
