"""Ranks compare where they are, what they are bound to and which GPU they have with what was decided."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrun.errors import SiteError
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.mesh import ParallelDegrees
from hpcrun.runtime import device as devices
from hpcrun.runtime.control import Control
from hpcrun.runtime.device import Device, bare_uuid, choose_device
from hpcrun.runtime.placement_check import check_rank_placement
from hpcrun.specs.placement import Binding, BoundBy, Placement, write_placement
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.submission.prepare import prepare_job
from tests.launch.supervised import Recorder

HERE = os.uname().nodename
MINE = sorted(os.sched_getaffinity(0))
EVERY = ",".join(map(str, MINE))
CPU = Device(torch.device("cpu"), "gloo", "cpu", "asked for")


class Alike(Control):
    """Two ranks of one node: this process is the first, and the second sees the same but for what is said."""

    def __init__(self, **other: Any) -> None:
        super().__init__(0, 2)
        self.local_rank, self.local_size, self.other = 0, 2, other

    def allgather(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [value, value | {"local_rank": 1} | self.other]
        return [value, self.other.get("answer", lambda mine: mine)(value)]

    def broadcast(self, value: Any) -> Any:
        return value

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        return lambda: flags

    def store(self) -> Any:
        raise AssertionError

    def abort(self, code: int) -> None:
        raise AssertionError


def placed(tmp_path: Path, *bindings: Binding, bound_by: BoundBy = "rank", **record: str) -> Attempt:
    """An attempt of two ranks with these bindings; `record`: what this rank has written of its own."""
    attempt = RunDir(tmp_path / "run").attempt(1).create()
    placement = replace(Placement((HERE, HERE), bindings=bindings), bound_by=bound_by)
    write_placement(attempt.placement, placement, ParallelDegrees(dp_shard=2))
    write_json(attempt.rank_record(0), {"binding": {"before": EVERY, "cpus": EVERY, **record}})
    return attempt


def both(**keys: Any) -> tuple[Binding, Binding]:
    return Binding(0, **keys), Binding(1, **keys)


def test_ranks_that_keep_to_their_cpus_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_rank_placement(Alike(), placed(tmp_path, *both(cpus=EVERY)), {}, CPU)
    # Whoever uses fewer by its own will, as OpenMP does, is where it was to be.
    check_rank_placement(Alike(now=str(MINE[0])), placed(tmp_path, *both(cpus=EVERY)), {}, CPU)
    assert capsys.readouterr().err == ""


def test_a_rank_that_came_up_bound_stops_the_job(tmp_path: Path) -> None:
    attempt = placed(tmp_path, *both(cpus=EVERY))
    with pytest.raises(SiteError, match=f"rank 1: cpus should be {EVERY}, is 97;"):
        check_rank_placement(Alike(cpus={"before": "97"}, now="97"), attempt, {}, CPU)


def test_a_rank_that_has_left_its_cpus_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=f"rank 1: cpus should be {EVERY}, is 0-999"):
        check_rank_placement(Alike(now="0-999"), placed(tmp_path, *both(cpus=EVERY)), {}, CPU)


def test_what_others_may_have_bound_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = placed(tmp_path, *both(cpus=EVERY), bound_by="either")
    check_rank_placement(Alike(cpus={"before": "97"}, now="97"), attempt, {}, CPU)
    assert capsys.readouterr().err == f"hpcrun: rank 1: cpus should be {EVERY}, is 97\n"
    refused = {"before": "0-999", "refused": "Operation not permitted"}
    check_rank_placement(Alike(cpus=refused, now="0-999"), placed(tmp_path, *both(cpus=EVERY)), {}, CPU)
    assert capsys.readouterr().err == f"hpcrun: rank 1: cpus should be {EVERY}, is 0-999\n"


def test_nothing_decided_is_nothing_to_differ_from(tmp_path: Path) -> None:
    check_rank_placement(Alike(cpus={"before": "97"}, now="97"), placed(tmp_path), {}, CPU)
    check_rank_placement(Alike(cpus={"before": "97"}, now="97"), placed(tmp_path, *both()), {}, CPU)


def test_gpus_are_compared_by_their_uuids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = placed(tmp_path, Binding(0, 0, "GPU-aa"), Binding(1, 1, "GPU-bb"))
    mine = replace(CPU, uuid="aa", visible=("aa", "bb"))
    check_rank_placement(Alike(uuid="bb"), attempt, {}, mine)
    with pytest.raises(SiteError, match="rank 1: GPU should be bb, is aa;"):
        check_rank_placement(Alike(), attempt, {}, mine)
    # Where a container or the launcher hides a rank's own, they are given out by somebody else.
    check_rank_placement(Alike(uuid="cc", uuids=["cc"]), attempt, {}, mine)
    assert capsys.readouterr().err == "hpcrun: rank 1: GPU should be bb, is cc\n"
    check_rank_placement(Alike(uuid=None, uuids=[]), attempt, {}, CPU)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seen", "other", "mine", "theirs", "index"),
    [
        (["aa", "bb"], ["aa", "bb"], "GPU-bb", "aa", 1),
        (["aa", "bb"], ["aa", "bb"], None, None, 0),
        (["aa", "bb"], ["aa", "bb"], "GPU-cc", "aa", 0),
        (["bb"], ["aa"], "GPU-bb", "aa", 0),
        (["bb"], ["cc"], "GPU-aa", "bb", 0),
        (["aa", "bb"], ["aa", "bb"], "GPU-bb", "bb", 0),
    ],
)
def test_a_rank_takes_the_gpu_that_was_decided_where_it_can_be_seen(
    monkeypatch: pytest.MonkeyPatch,
    seen: list[str],
    other: list[str],
    mine: str | None,
    theirs: str | None,
    index: int,
) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")

    def answer(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [value[0], other if isinstance(value[1], list) else theirs]

    chosen = choose_device("auto", Alike(answer=answer), mine)
    assert (chosen.torch_device, chosen.uuid) == (torch.device("cuda", index), seen[index])


def test_uuids_of_the_driver_and_of_torch_are_the_same() -> None:
    assert bare_uuid("GPU-AbCd-01\n") == bare_uuid("abcd-01") == "abcd-01"


@pytest.mark.skipif(
    len(MINE) < 2 or not shutil.which("taskset"), reason="needs two CPUs and taskset, of util-linux"
)
def test_training_stops_where_one_rank_was_bound_by_somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCRUN_ROOT", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_text("x = 1\n" * 500)
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}\n"
        "parallel: {dp_shard: 2}\n"
        f"data: {{text: {tmp_path}/text, seq_len: 32}}\ntrain: {{steps: 1, mbs: 1, gbs: 2}}\n"
        "device: cpu\nretry: {crash: 0}\n"
    )

    def command(attempt: Attempt) -> list[str]:
        second = '[ "$PMI_RANK" = 0 ] || exec taskset -c "$0" "$@"; exec "$@"'
        rank = [sys.executable, "-P", "-m", "hpcrun", "_rank", str(attempt.run.path), str(attempt.number)]
        return ["/bin/sh", "-c", second, str(MINE[0]), *rank]

    with SignalQueue() as inbox:
        outcome = Supervisor(prepare_job(job, []), inbox, Recorder(), command=command).run()
    assert outcome.exit_code == 3
    assert "rank 1: cpus should be" in outcome.message
    assert "rank 0: cpus" not in outcome.message
