"""What a node is looked at for before an attempt: the rules, the probes, and the time that they may take."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from hpcrun.fabric.ports import RdmaPort
from hpcrun.health import preflight, probes
from hpcrun.health.check_result import (
    CheckResult,
    judge_clock,
    judge_interface,
    judge_limits,
    judge_ports,
    judge_program,
    judge_space,
    parse_check_result,
)
from hpcrun.health.gpu_health import check_gpu_health, judge_gpus, parse_gpu_health, with_remapped_rows
from hpcrun.health.preflight import PreflightRequest, answer_preflight, run_probes
from hpcrun.health.probes import CheckTarget
from hpcrun.shm_segments import stale_segments
from hpcrun.specs.preflight import PREFLIGHT_CHECKS, selected_preflight_checks
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir

GPUS = Path(__file__).parents[1] / "data" / "gpu"
MIB, GIB = 2**20, 2**30
USUAL = {"nofile": 1024.0, "nproc": 4096.0, "stack": 8.0 * MIB, "memlock": 65536.0}


def verdicts(found: list[CheckResult]) -> list[str]:
    return [one.verdict for one in found]


@pytest.mark.parametrize(
    ("changed", "is_infiniband", "verdict", "text"),
    [
        ({}, False, "ok", ""),
        (dict.fromkeys(USUAL, math.inf), True, "ok", ""),
        ({"nofile": 256.0}, False, "warn", "256 open files are allowed (ulimit, nofile); 1024 are usual"),
        ({"nofile": 64.0}, False, "fail", "64 open files are allowed"),
        ({"nproc": 32.0}, False, "fail", "32 processes and threads"),
        ({"stack": 1024.0}, False, "fail", "1024 bytes of stack"),
        ({}, True, "warn", "65536 bytes of locked memory are allowed (ulimit, memlock), and RDMA"),
    ],
)
def test_limits(changed: dict[str, float], is_infiniband: bool, verdict: str, text: str) -> None:
    (found,) = judge_limits({**USUAL, **changed}, is_infiniband=is_infiniband)
    assert found.verdict == verdict
    assert text in found.text


@pytest.mark.parametrize(
    ("free", "inodes", "is_memory", "verdict"),
    [
        (2 * GIB, 10**6, False, "ok"),
        (2 * GIB, None, False, "ok"),
        (100 * MIB, 10**6, False, "warn"),
        (100 * MIB, None, True, "ok"),
        (10 * MIB, None, True, "warn"),
        (0, None, True, "fail"),
        (MIB, 10**6, False, "fail"),
        (2 * GIB, 500, False, "warn"),
        (2 * GIB, 3, False, "fail"),
    ],
)
def test_space(free: int, inodes: int | None, is_memory: bool, verdict: str) -> None:
    found = judge_space("/scratch", free, inodes, is_memory=is_memory)
    assert found.verdict == verdict
    assert (found.text == "") == (verdict == "ok")
    assert "inodes" not in found.text or inodes is not None


@pytest.mark.parametrize(
    ("state", "flags", "verdict"),
    [
        ("up", 0x1003, "ok"),
        ("unknown", 0x9, "ok"),
        ("unknown", 0x8, "fail"),
        ("down", 0x1003, "fail"),
        ("lowerlayerdown", 0x1003, "fail"),
        ("dormant", 0x1003, "unknown"),
        (None, 1, "fail"),
    ],
)
def test_interfaces(state: str | None, flags: int, verdict: str) -> None:
    assert judge_interface("ib0", state, flags).verdict == verdict


@pytest.mark.parametrize(
    ("ports", "wanted", "expected"),
    [
        ({}, [], ["ok"]),
        ({"mlx5_0": ["ACTIVE"]}, [], ["ok"]),
        ({"mlx5_0": ["DOWN"]}, [], ["warn"]),
        ({"mlx5_0": ["INIT", "ACTIVE"]}, ["mlx5_0"], ["ok"]),
        ({"mlx5_0": ["INIT"], "mlx5_1": ["DOWN"]}, ["mlx5_0"], ["fail"]),
        ({"mlx5_0": ["ACTIVE"], "mlx5_1": ["DOWN"]}, ["mlx5_0"], ["ok"]),
        ({"mlx5_0": [""]}, ["mlx5_0"], ["fail"]),
        ({"mlx5_0": ["ACTIVE"]}, ["mlx5_0", "mlx5_3"], ["fail"]),
    ],
)
def test_ports(ports: dict[str, list[str]], wanted: list[str], expected: list[str]) -> None:
    found = [
        RdmaPort(device, at, one) for device, states in ports.items() for at, one in enumerate(states, 1)
    ]
    assert verdicts(judge_ports(found, wanted)) == expected


@pytest.mark.parametrize(
    ("told", "received", "took", "verdict"),
    [
        (100.1, 100.2, 0.1, "ok"),
        (101.9, 100.2, 0.1, "ok"),
        (102.3, 100.2, 0.1, "warn"),
        (97.5, 100.2, 0.1, "warn"),
        (106.0, 112.0, 0.0, "ok"),
        (108.5, 112.0, 0.0, "ok"),
        (106.0, 112.0, 11.9, "warn"),
        (500.0, 100.2, 0.1, "fail"),
        (-500.0, 100.2, 0.1, "fail"),
    ],
)
def test_clocks_count_only_beyond_what_the_way_may_have_taken(
    told: float, received: float, took: float, verdict: str
) -> None:
    assert judge_clock(100.0, received, told, took).verdict == verdict
    assert ("ahead of" in judge_clock(100.0, 100.2, 500.0, 0.1).text) is True
    assert ("behind" in judge_clock(100.0, 100.2, -500.0, 0.1).text) is True


@pytest.mark.parametrize(
    ("code", "printed", "verdict", "text"),
    [
        (0, "OK - fine | a=1", "ok", ""),
        (1, "\nWARNING - warm | t=80", "warn", "/etc/x: WARNING - warm"),
        (2, "CRITICAL\nmore", "fail", "/etc/x: CRITICAL"),
        (3, "", "unknown", "/etc/x: it printed nothing"),
        (127, "x\x1b[2J", "unknown", "/etc/x (exit code 127): x[2J"),
        (-9, "", "unknown", "/etc/x (exit code -9): it printed nothing"),
    ],
)
def test_programs_of_the_site(code: int, printed: str, verdict: str, text: str) -> None:
    found = judge_program("/etc/x", code, printed)
    assert (found.verdict, found.text) == (verdict, text)


def test_verdicts_travel() -> None:
    one = CheckResult("space", "fail", "/tmp: 0 MiB are free", common=True)
    assert parse_check_result(one.as_json()) == one
    assert CheckResult("gpu").as_json() == {"check": "gpu", "verdict": "ok"}
    odds: list[object] = [None, [], {}, {"check": "gpu", "verdict": "dead"}, {"verdict": 3}]
    for odd in odds:
        assert parse_check_result(odd) is None


def test_gpus_that_are_well() -> None:
    gpus = with_remapped_rows(
        parse_gpu_health((GPUS / "gpus-well.csv").read_text()), (GPUS / "rows-well.csv").read_text()
    )
    assert [gpu.index for gpu in gpus] == ["0", "1", "2", "3"]
    assert (gpus[2].rows_pending, gpus[3].rows_pending, gpus[0].retired_pending) == (False, None, None)
    assert judge_gpus(gpus, 4) == [CheckResult("gpu")]
    assert judge_gpus(gpus, 2) == [CheckResult("gpu")]
    (few,) = judge_gpus(gpus[:3], 4)
    assert (few.verdict, few.text) == ("fail", "3 GPUs answer, and 4 were asked for")
    assert verdicts(judge_gpus([], 4)) == ["unknown"]


def test_what_the_driver_asks_for_goes_before_counters() -> None:
    found = judge_gpus(parse_gpu_health((GPUS / "gpus-ill.csv").read_text()), 4)
    assert verdicts(found) == ["warn", "fail", "fail", "unknown"]
    assert found[0].text.endswith("6a10): 2 uncorrected memory errors since boot")
    assert found[1].text == ("GPU 1 (GPU-8a1d2b77-12c4-4f55-8c5e-5f1b7a7f6a11): the driver asks for: Reset")


def test_memory_that_waits_for_a_reset_or_cannot_be_mended() -> None:
    gpus = with_remapped_rows(
        parse_gpu_health((GPUS / "gpus-well.csv").read_text()), (GPUS / "rows-ill.csv").read_text()
    )
    found = judge_gpus(gpus, 4)
    assert verdicts(found) == ["fail", "fail"]
    assert "are remapped at its next reset" in found[0].text
    assert "could not be remapped" in found[1].text
    old = judge_gpus(parse_gpu_health((GPUS / "gpus-old.csv").read_text()), 3)
    assert [(one.verdict, one.text[:5]) for one in old] == [("fail", "GPU 1")]


def test_text_that_is_no_table_names_no_gpu() -> None:
    for text in ("", "No devices were found\n", "a, b, c\n", "0, GPU-1, 2, 3, 4, 5, 6\n", "\x00"):
        assert parse_gpu_health(text) == []


TOOL = """#!/bin/sh
case "$1" in
    *recovery*) {first} ;;
    --query-gpu*) cat {data}/gpus-old.csv ;;
    *) cat {data}/rows-well.csv ;;
esac
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin" / "nvidia-smi"


def write_tool(tool: Path, text: str) -> None:
    tool.write_text(text)
    tool.chmod(0o755)


def test_an_older_driver_is_asked_for_what_it_knows(tool: Path) -> None:
    refuses = "echo 'Field \"gpu_recovery_action\" is not a valid field to query.'; exit 2"
    write_tool(tool, TOOL.format(first=refuses, data=GPUS))
    assert verdicts(check_gpu_health(3, 5.0)) == ["fail"]
    write_tool(tool, TOOL.format(first=f"cat {GPUS}/gpus-well.csv", data=GPUS))
    assert check_gpu_health(4, 5.0) == [CheckResult("gpu")]


@pytest.mark.parametrize(
    ("script", "verdict", "text"),
    [
        (
            "echo 'Unable to determine the device handle for GPU 0000:17:00.0: GPU is lost.  Reboot the"
            " system to recover this GPU'; exit 15",
            "fail",
            "GPU is lost",
        ),
        ("echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9", "unknown", "exit code 9"),
        ("echo 'No devices were found'", "unknown", "no GPU"),
    ],
)
def test_a_tool_that_does_not_work_proves_nothing_and_a_lost_gpu_does(
    tool: Path, script: str, verdict: str, text: str
) -> None:
    write_tool(tool, f"#!/bin/sh\n{script}\n")
    (found,) = check_gpu_health(1, 5.0)
    assert found.verdict == verdict
    assert text in found.text


@pytest.fixture
def place(tmp_path: Path) -> CheckTarget:
    """A node of a few files that is well."""
    root = tmp_path / "root"
    for folder in ("tmp", "dev/shm", "sys/class/net/ib0", "sys/class/infiniband/mlx5_0/ports/1"):
        (root / folder).mkdir(parents=True)
    (root / "sys/class/net/ib0/operstate").write_text("up\n")
    (root / "sys/class/net/ib0/flags").write_text("0x1003\n")
    (root / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    run = RunDir(tmp_path / "runs" / "t-1129-120000-abcdef")
    run.path.mkdir(parents=True)
    return CheckTarget(run, attempt=2, interface="ib0", hcas=("mlx5_0",), root=root)


def test_interfaces_and_ports_are_read_from_sysfs(place: CheckTarget) -> None:
    assert probes.probe_interface(place) == [CheckResult("interface")]
    assert probes.probe_nics(place) == [CheckResult("nic")]
    sysfs = place.root / "sys/class"
    (sysfs / "net/ib0/operstate").write_text("down\n")
    (sysfs / "infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    (down,), (idle,) = probes.probe_interface(place), probes.probe_nics(place)
    assert (down.verdict, idle.verdict) == ("fail", "fail")
    assert "port 1 is DOWN" in idle.text
    other = CheckTarget(place.run, interface="eth9", root=place.root)
    assert "eth9: there is no such network interface" in probes.probe_interface(other)[0].text
    assert probes.probe_interface(CheckTarget(place.run, root=place.root)) == [CheckResult("interface")]


def test_files_are_written_and_read_back_where_the_run_writes(place: CheckTarget, tmp_path: Path) -> None:
    assert probes.probe_write(place) == [CheckResult("write")]
    assert [*place.run.path.iterdir(), *(place.root / "tmp").iterdir()] == []
    full = CheckTarget(RunDir(tmp_path / "file" / "run"), root=place.root)
    (tmp_path / "file").touch()
    (found,) = probes.probe_write(full)
    assert (found.verdict, found.common) == ("fail", True)
    assert "a small file cannot be written: Not a directory" in found.text


def test_a_file_that_reads_back_differently_is_a_failure(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pread", lambda descriptor, size, at: b"\0" * (size - 1))
    found = probes.probe_write(place)
    assert verdicts(found) == ["fail", "fail"]
    assert "reads back differently" in found[0].text


def test_places_of_the_profile_that_are_not_there_are_told(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH_OF_ME", str(place.root / "local"))
    more = CheckTarget(place.run, scratch=("$SCRATCH_OF_ME",), root=place.root)
    assert f"{place.root / 'local'}: is not on this node" in [one.text for one in probes.probe_space(more)]
    assert "write" not in [one.check for one in probes.probe_write(more) if one.verdict != "ok"]


def test_a_calculation_comes_out_the_same_everywhere(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probes.probe_arithmetic(place) == [CheckResult("sums")]
    seed, numbers = 20261129, []
    for _ in range(2 * 32 * 32):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        numbers.append(seed >> 3)
    whole = Fraction(0)
    for row in range(32):
        for column in range(32):
            pairs = ((numbers[32 * row + k], numbers[1024 + 32 * k + column]) for k in range(32))
            whole = (whole * 31 + sum(Fraction(a) * b for a, b in pairs)) % (2**61 - 1)
    assert probes.matrix_checksums()[0] == whole
    monkeypatch.setattr(probes, "matrix_checksums", lambda: (1, 2))
    assert verdicts(probes.probe_arithmetic(place)) == ["fail"]


def start(**marks: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, **marks})
    while not Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(b"sleep"):
        time.sleep(0.005)
    return child


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def test_processes_that_an_earlier_attempt_left_are_ended_and_others_are_not(
    place: CheckTarget, children: list[subprocess.Popen[bytes]]
) -> None:
    ours = {"HPCRUN_RUN_ID": place.run.run_id}
    children += [
        start(**ours, HPCRUN_ATTEMPT="1"),
        start(**ours, HPCRUN_ATTEMPT="2"),
        start(**ours),
        start(HPCRUN_RUN_ID="someone-else", HPCRUN_ATTEMPT="1"),
    ]
    # Somebody has to wait for it, or it stays as a zombie; that is not alive any more.
    (found,) = probes.probe_leftovers(place)
    assert (found.verdict, found.text) == ("warn", "ended what an earlier attempt had left: 1 process")
    assert children[0].wait(5) == -signal.SIGKILL
    assert [child.poll() for child in children[1:]] == [None] * 3
    assert probes.probe_leftovers(place) == [CheckResult("leftovers")]


def test_processes_of_a_run_that_has_ended_are_told_and_let_live(
    place: CheckTarget, children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunDir(place.run.path.parent / "old-1128-120000-abcdef")
    other.path.mkdir()
    children.append(start(HPCRUN_RUN_ID=other.run_id, HPCRUN_RUN_DIR=str(other.path)))
    assert probes.probe_leftovers(place) == [CheckResult("leftovers")], "nobody knows that it has ended"
    write_json(other.exit, {"status": "done"})
    assert probes.probe_leftovers(place) == [CheckResult("leftovers")], "they may be about to end"
    os.utime(other.exit, (time.time() - 3600,) * 2)
    (found,) = probes.probe_leftovers(place)
    text = f"{other.id} has ended, and left processes here (1): {children[0].pid}"
    assert (found.verdict, found.text) == ("warn", text)
    other.exit.unlink()
    (other.path / "lease").touch()
    assert probes.probe_leftovers(place) == [CheckResult("leftovers")]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    assert probes.probe_leftovers(place) == [CheckResult("leftovers")], (
        "this host's clock is not the file system's"
    )
    os.utime(other.path / "lease", (now - 3600,) * 2)
    assert verdicts(probes.probe_leftovers(place)) == ["warn"]
    assert children[0].poll() is None


def test_shared_memory_that_nobody_uses_is_told(place: CheckTarget) -> None:
    folder = place.root / "dev/shm"
    for name in ("mpich_shm_old", "mpich_shm_new", "data_set"):
        (folder / name).write_bytes(b"x" * 1000)
    past = time.time() - 7200
    for name in ("mpich_shm_old", "data_set"):
        os.utime(folder / name, (past, past))
    # The time of the last change of an inode cannot be set back, so nothing here is old yet.
    assert probes.probe_shared_memory(place) == [CheckResult("shm")]
    assert set(stale_segments(folder, older_s=-1.0)) == {
        folder / "mpich_shm_old",
        folder / "mpich_shm_new",
    }
    assert probes.probe_shared_memory(CheckTarget(place.run, root=place.root / "nowhere")) == [
        CheckResult("shm")
    ]


def test_a_node_that_is_well_has_nothing_to_tell(place: CheckTarget) -> None:
    found = run_probes(place, PreflightRequest(PREFLIGHT_CHECKS, interface="ib0"))
    assert {one.check for one in found} >= {"limits", "sums", "nic", "write", "leftovers"}
    known = [one for one in found if one.verdict == "fail"]
    assert known == []


def test_only_what_is_asked_for_is_looked_at(place: CheckTarget) -> None:
    assert [one.check for one in run_probes(place, PreflightRequest(["sums", "clock"]))] == ["sums"]
    assert run_probes(place, PreflightRequest(["site"])) == []
    assert selected_preflight_checks(True) == PREFLIGHT_CHECKS
    assert selected_preflight_checks(False) == ()
    assert selected_preflight_checks(["gpu", "nic"]) == tuple(
        one for one in PREFLIGHT_CHECKS if one not in ("gpu", "nic")
    )


def test_a_probe_that_hangs_is_unknown_and_holds_up_no_other(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hang(place: CheckTarget) -> list[CheckResult]:
        goes_on.wait(20)
        return [CheckResult("space", "fail", "too late")]

    def break_down(place: CheckTarget) -> list[CheckResult]:
        raise OSError(5, "Input/output error")

    monkeypatch.setitem(preflight._PROBES, "space", hang)
    monkeypatch.setitem(preflight._PROBES, "nic", break_down)
    monkeypatch.setattr(preflight, "_PROBE_S", 0.4)
    found = {one.check: one for one in run_probes(place, PreflightRequest(["space", "nic", "sums"]))}
    goes_on.set()
    assert found["space"] == CheckResult("space", "unknown", "gave no answer within 0.4 s")
    assert found["nic"] == CheckResult("nic", "unknown", "[Errno 5] Input/output error")
    assert found["sums"].verdict in ("ok", "unknown")


def test_the_site_s_checks_are_run_and_one_that_hangs_is_ended(place: CheckTarget, tmp_path: Path) -> None:
    bad, slow = tmp_path / "bad", tmp_path / "slow"
    bad.write_text("#!/bin/sh\necho 'CRITICAL - fan 3 stands still'\nexit 2\n")
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    bad.chmod(0o755)
    slow.chmod(0o755)
    programs = [str(bad), str(slow), str(tmp_path / "gone")]
    found = run_probes(place, PreflightRequest(["site"], programs=programs, program_s=0.5))
    assert [(one.verdict, one.text.partition(":")[0]) for one in found] == [
        ("fail", str(bad)),
        ("unknown", f"`{slow}` gave no answer in 0.5 s; it was ended"),
        ("unknown", str(tmp_path / "gone")),
    ]
    assert found[0].text == f"{bad}: CRITICAL - fan 3 stands still"


def test_an_answer_holds_the_clock_and_what_is_not_well(place: CheckTarget) -> None:
    order = {"do": "preflight", **PreflightRequest(["interface"], interface="no-such-if0").as_json()}
    before = time.time()
    said = answer_preflight(place.run, order)
    assert said["kind"] == "preflight"
    assert before <= said["time"] <= time.time()
    assert 0 <= said["seconds"] < 60
    (one,) = said["checks"]
    assert (one["check"], one["verdict"]) == ("interface", "fail")


def test_shared_memory_that_is_old_is_counted_and_named(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.root / "dev/shm/torch_42").write_bytes(b"x" * MIB)
    monkeypatch.setattr(probes, "_STALE_SEGMENT_S", -1.0)
    (found,) = probes.probe_shared_memory(place)
    text = "1 file of yours in /dev/shm, 1 MiB, that no process uses any more: torch_42"
    assert (found.verdict, found.text) == ("warn", text)
