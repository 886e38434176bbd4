"""What NVIDIA's driver says in the kernel's log: which GPU, which number, and what is to be done about it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest

from hpcrun.health.gpu_health import check_gpu_health
from hpcrun.health.preflight import PreflightRequest
from hpcrun.health.xids import Xid, judge_xids, parse_xids, read_recent_xids, xid_action
from hpcrun.launch.fault_class import classify_crash
from hpcrun.specs.preflight import SitePreflightSpec
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import parse_typed

DATA = Path(__file__).parents[1] / "data" / "gpu"
NOW = datetime.fromisoformat("2026-03-01T12:00:00+00:00")
LOST = Xid("0000:3b:00", 79)


def log() -> str:
    return (DATA / "dmesg-xids.txt").read_text()


def test_each_number_of_a_gpu_counts_once_and_old_ones_do_not() -> None:
    assert parse_xids(log(), NOW) == [Xid("0000:3b:00", 79), Xid("0000:86:00", 31), Xid("0000:86:00", 999)]
    # Without a clock all count: 94 was told a day before.
    assert Xid("0000:af:00", 94) in parse_xids(log())
    assert parse_xids("") == parse_xids("NVRM: Xid\nXid 79 in somebody's words\n") == []


def test_what_numbers_ask_for() -> None:
    found = [
        LOST,
        Xid("0000:3b:00", 48),
        Xid("0000:3b:00", 63),
        Xid("0000:3b:00", 31),
        Xid("0000:3b:00", 999),
    ]
    told = [(one.severity, str(one)) for one in judge_xids(found)]
    assert told == [
        ("warning", "GPU at 0000:3b:00: Xid 48: somebody has to look"),
        ("error", "GPU at 0000:3b:00: Xid 79: the node needs a reboot"),
        ("warning", "GPU at 0000:3b:00: Xid 999: no list knows this number"),
    ]


def test_a_site_has_the_last_word_on_a_number_and_the_driver_on_a_gpu() -> None:
    assert xid_action(79, {79: "ignore"}) == "ignore"
    assert judge_xids([LOST], {79: "ignore"}) == []
    assert [one.severity for one in judge_xids([Xid("a", 63)], {63: "reset"})] == ["error"]
    assert [one.severity for one in judge_xids([LOST], is_asked=False)] == ["warning"]


def test_a_site_s_list_reaches_the_probe(tmp_path: Path) -> None:
    spec = SitePreflightSpec(xids={79: "ignore"})
    ask = PreflightRequest(["gpu"], xids={str(code): action for code, action in spec.xids.items()})
    assert parse_typed(PreflightRequest, asdict(ask)).place(RunDir(tmp_path)).xids == {79: "ignore"}


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.process
def test_a_gpu_that_answers_may_still_have_told_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As drivers before 570 answer, which do not say what they ask for.
    tool(
        tmp_path,
        "nvidia-smi",
        f"case $* in *gpu_recovery*) exit 2 ;; *rows*) ;; *) cat {DATA}/gpus-old.csv ;; esac",
    )
    now = datetime.now().astimezone().isoformat(timespec="microseconds").replace(".", ",")
    tool(
        tmp_path, "dmesg", f"echo '{now} NVRM: Xid (PCI:0000:3b:00): 79, pid=77, GPU has fallen off the bus.'"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    seen = read_recent_xids(5.0)
    assert seen == [LOST]
    asked = len((DATA / "gpus-old.csv").read_text().splitlines())
    assert "GPU at 0000:3b:00: Xid 79: the node needs a reboot" in [
        str(one) for one in check_gpu_health(asked, 5.0, seen) if one.severity == "error"
    ]
    tool(tmp_path, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    assert read_recent_xids(5.0) == []


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: an illegal memory access; NVRM: Xid (PCI:0000:3b:00): 31, pid=7", "unknown"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", "infrastructure"),
        ("Xid 31 and then Xid 79", "infrastructure"),
        ("CUDA error: uncorrectable ECC error encountered", "infrastructure"),
    ],
)
def test_a_fault_of_the_program_is_not_the_machine_s(message: str, kind: str) -> None:
    assert classify_crash({"message": message}) == kind
