"""What a node is looked at for before an attempt: the rules, the probes, and the time that they may take."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from hpcrun.fabric.ports import RdmaPort
from hpcrun.finding import Finding
from hpcrun.health import preflight, probes
from hpcrun.health.gpu_health import check_gpu_health, judge_gpus, parse_gpu_health, with_remapped_rows
from hpcrun.health.node_checks import (
    judge_clock,
    judge_interface,
    judge_limits,
    judge_ports,
    judge_program,
    judge_space,
)
from hpcrun.health.preflight import PreflightReport, PreflightRequest, answer_preflight, run_probes
from hpcrun.health.probes import CheckTarget
from hpcrun.launch.admission import evaluate_preflight
from hpcrun.shm_segments import stale_segments
from hpcrun.specs.preflight import PREFLIGHT_CHECKS, selected_preflight_checks
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir

GPUS = Path(__file__).parents[1] / "data" / "gpu"
MIB, GIB = 2**20, 2**30
USUAL = {"nofile": 1024.0, "nproc": 4096.0, "stack": 8.0 * MIB, "memlock": 65536.0}


def severities(found: list[Finding]) -> list[str]:
    """Of all findings; `ok` where there is none."""
    return [finding.severity for finding in found] or ["ok"]


@pytest.mark.parametrize(
    ("changed", "is_infiniband", "verdict", "text"),
    [
        ({}, False, "ok", ""),
        (dict.fromkeys(USUAL, math.inf), True, "ok", ""),
        ({"nofile": 256.0}, False, "warning", "256 open files are allowed (ulimit, nofile); 1024 are usual"),
        ({"nofile": 64.0}, False, "error", "64 open files are allowed"),
        ({"nproc": 32.0}, False, "error", "32 processes and threads"),
        ({"stack": 1024.0}, False, "error", "1024 bytes of stack"),
        ({}, True, "warning", "65536 bytes of locked memory are allowed (ulimit, memlock), and RDMA"),
    ],
)
def test_limits(changed: dict[str, float], is_infiniband: bool, verdict: str, text: str) -> None:
    found = judge_limits({**USUAL, **changed}, is_infiniband=is_infiniband)
    assert severities(found) == [verdict]
    assert text in "".join(map(str, found))


@pytest.mark.parametrize(
    ("free", "inodes", "is_memory", "verdict"),
    [
        (2 * GIB, 10**6, False, "ok"),
        (2 * GIB, None, False, "ok"),
        (100 * MIB, 10**6, False, "warning"),
        (100 * MIB, None, True, "ok"),
        (10 * MIB, None, True, "warning"),
        (0, None, True, "error"),
        (MIB, 10**6, False, "error"),
        (2 * GIB, 500, False, "warning"),
        (2 * GIB, 3, False, "error"),
    ],
)
def test_space(free: int, inodes: int | None, is_memory: bool, verdict: str) -> None:
    found = judge_space("/scratch", free, inodes, is_memory=is_memory)
    assert severities(found) == [verdict]
    assert "inodes" not in str(found) or inodes is not None


@pytest.mark.parametrize(
    ("state", "flags", "verdict"),
    [
        ("up", 0x1003, "ok"),
        ("unknown", 0x9, "ok"),
        ("unknown", 0x8, "error"),
        ("down", 0x1003, "error"),
        ("lowerlayerdown", 0x1003, "error"),
        ("dormant", 0x1003, "unknown"),
        (None, 1, "error"),
    ],
)
def test_interfaces(state: str | None, flags: int, verdict: str) -> None:
    assert severities(judge_interface("ib0", state, flags)) == [verdict]


@pytest.mark.parametrize(
    ("ports", "wanted", "expected"),
    [
        ({}, [], ["ok"]),
        ({"mlx5_0": ["ACTIVE"]}, [], ["ok"]),
        ({"mlx5_0": ["DOWN"]}, [], ["warning"]),
        ({"mlx5_0": ["INIT", "ACTIVE"]}, ["mlx5_0"], ["ok"]),
        ({"mlx5_0": ["INIT"], "mlx5_1": ["DOWN"]}, ["mlx5_0"], ["error"]),
        ({"mlx5_0": ["ACTIVE"], "mlx5_1": ["DOWN"]}, ["mlx5_0"], ["ok"]),
        ({"mlx5_0": [""]}, ["mlx5_0"], ["error"]),
        ({"mlx5_0": ["ACTIVE"]}, ["mlx5_0", "mlx5_3"], ["error"]),
    ],
)
def test_ports(ports: dict[str, list[str]], wanted: list[str], expected: list[str]) -> None:
    found = [
        RdmaPort(device, at, one) for device, states in ports.items() for at, one in enumerate(states, 1)
    ]
    assert severities(judge_ports(found, wanted)) == expected


@pytest.mark.parametrize(
    ("told", "received", "took", "verdict"),
    [
        (100.1, 100.2, 0.1, "ok"),
        (101.9, 100.2, 0.1, "ok"),
        (102.3, 100.2, 0.1, "warning"),
        (97.5, 100.2, 0.1, "warning"),
        (106.0, 112.0, 0.0, "ok"),
        (108.5, 112.0, 0.0, "ok"),
        (106.0, 112.0, 11.9, "warning"),
        (500.0, 100.2, 0.1, "error"),
        (-500.0, 100.2, 0.1, "error"),
    ],
)
def test_clocks_count_only_beyond_what_the_way_may_have_taken(
    told: float, received: float, took: float, verdict: str
) -> None:
    assert severities(judge_clock(100.0, received, told, took)) == [verdict]
    assert "ahead of" in judge_clock(100.0, 100.2, 500.0, 0.1)[0].text
    assert "behind" in judge_clock(100.0, 100.2, -500.0, 0.1)[0].text


@pytest.mark.parametrize(
    ("code", "printed", "verdict", "text"),
    [
        (0, "OK - fine | a=1", "ok", ""),
        (1, "\nWARNING - warm | t=80", "warning", "/etc/x: WARNING - warm"),
        (2, "CRITICAL\nmore", "error", "/etc/x: CRITICAL"),
        (3, "", "unknown", "/etc/x: it printed nothing"),
        (127, "x\x1b[2J", "unknown", "/etc/x (exit code 127): x[2J"),
        (-9, "", "unknown", "/etc/x (exit code -9): it printed nothing"),
    ],
)
def test_programs_of_the_site(code: int, printed: str, verdict: str, text: str) -> None:
    found = judge_program("/etc/x", code, printed)
    assert severities(found) == [verdict]
    assert "".join(map(str, found)) == text


def test_gpus_that_are_well() -> None:
    gpus = with_remapped_rows(
        parse_gpu_health((GPUS / "gpus-well.csv").read_text()), (GPUS / "rows-well.csv").read_text()
    )
    assert [gpu.index for gpu in gpus] == ["0", "1", "2", "3"]
    assert (gpus[2].rows_pending, gpus[3].rows_pending, gpus[0].retired_pending) == (False, None, None)
    assert judge_gpus(gpus, 4) == []
    assert judge_gpus(gpus, 2) == []
    (few,) = judge_gpus(gpus[:3], 4)
    assert (few.severity, few.text) == ("error", "3 GPUs answer, and 4 were asked for")
    assert severities(judge_gpus([], 4)) == ["unknown"]


def test_what_the_driver_asks_for_goes_before_counters() -> None:
    found = judge_gpus(parse_gpu_health((GPUS / "gpus-ill.csv").read_text()), 4)
    assert severities(found) == ["warning", "error", "error", "unknown"]
    assert str(found[0]).endswith("6a10): 2 uncorrected memory errors since boot")
    assert str(found[1]) == ("GPU 1 (GPU-8a1d2b77-12c4-4f55-8c5e-5f1b7a7f6a11): the driver asks for: Reset")


def test_memory_that_waits_for_a_reset_or_cannot_be_mended() -> None:
    gpus = with_remapped_rows(
        parse_gpu_health((GPUS / "gpus-well.csv").read_text()), (GPUS / "rows-ill.csv").read_text()
    )
    found = judge_gpus(gpus, 4)
    assert severities(found) == ["error", "error"]
    assert "are remapped at its next reset" in found[0].text
    assert "could not be remapped" in found[1].text
    old = judge_gpus(parse_gpu_health((GPUS / "gpus-old.csv").read_text()), 3)
    assert [(one.severity, one.subject[:5]) for one in old] == [("error", "GPU 1")]


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


@pytest.mark.process
def test_an_older_driver_is_asked_for_what_it_knows(tool: Path) -> None:
    refuses = "echo 'Field \"gpu_recovery_action\" is not a valid field to query.'; exit 2"
    write_tool(tool, TOOL.format(first=refuses, data=GPUS))
    assert severities(check_gpu_health(3, 5.0)) == ["error"]
    write_tool(tool, TOOL.format(first=f"cat {GPUS}/gpus-well.csv", data=GPUS))
    assert check_gpu_health(4, 5.0) == []


@pytest.mark.parametrize(
    ("script", "verdict", "text"),
    [
        (
            "echo 'Unable to determine the device handle for GPU 0000:17:00.0: GPU is lost.  Reboot the"
            " system to recover this GPU'; exit 15",
            "error",
            "GPU is lost",
        ),
        ("echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9", "unknown", "exit code 9"),
        ("echo 'No devices were found'", "unknown", "no GPU"),
    ],
)
@pytest.mark.process
def test_a_tool_that_does_not_work_proves_nothing_and_a_lost_gpu_does(
    tool: Path, script: str, verdict: str, text: str
) -> None:
    write_tool(tool, f"#!/bin/sh\n{script}\n")
    (found,) = check_gpu_health(1, 5.0)
    assert found.severity == verdict
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
    assert probes.probe_interface(place) == []
    assert probes.probe_nics(place) == []
    sysfs = place.root / "sys/class"
    (sysfs / "net/ib0/operstate").write_text("down\n")
    (sysfs / "infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    (down,), (idle,) = probes.probe_interface(place), probes.probe_nics(place)
    assert (down.severity, idle.severity) == ("error", "error")
    assert "port 1 is DOWN" in idle.text
    other = CheckTarget(place.run, interface="eth9", root=place.root)
    assert "eth9: there is no such network interface" in str(probes.probe_interface(other)[0])
    assert probes.probe_interface(CheckTarget(place.run, root=place.root)) == []


def test_files_are_written_and_read_back_where_the_run_writes(place: CheckTarget, tmp_path: Path) -> None:
    assert probes.probe_write(place) == []
    assert [*place.run.path.iterdir(), *(place.root / "tmp").iterdir()] == []
    full = CheckTarget(RunDir(tmp_path / "file" / "run"), root=place.root)
    (tmp_path / "file").touch()
    (found,) = probes.probe_write(full)
    assert (found.severity, found.is_shared) == ("error", True)
    assert "a small file cannot be written: Not a directory" in found.text


def test_a_file_that_reads_back_differently_is_a_failure(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pread", lambda descriptor, size, at: b"\0" * (size - 1))
    found = probes.probe_write(place)
    assert severities(found) == ["error", "error"]
    assert "reads back differently" in found[0].text


def test_places_of_the_profile_that_are_not_there_are_told(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH_OF_ME", str(place.root / "local"))
    more = CheckTarget(place.run, scratch=("$SCRATCH_OF_ME",), root=place.root)
    assert f"{place.root / 'local'}: is not on this node" in [str(one) for one in probes.probe_space(more)]
    assert "write" not in [one.check for one in probes.probe_write(more)]


def test_a_calculation_comes_out_the_same_everywhere(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probes.probe_arithmetic(place) == []
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
    assert severities(probes.probe_arithmetic(place)) == ["error"]


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


@pytest.mark.process
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
    assert (found.severity, found.text) == ("warning", "ended what an earlier attempt had left: 1 process")
    assert children[0].wait(5) == -signal.SIGKILL
    assert [child.poll() for child in children[1:]] == [None] * 3
    assert probes.probe_leftovers(place) == []


@pytest.mark.process
def test_processes_of_a_run_that_has_ended_are_told_and_let_live(
    place: CheckTarget, children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunDir(place.run.path.parent / "old-1128-120000-abcdef")
    other.path.mkdir()
    children.append(start(HPCRUN_RUN_ID=other.run_id, HPCRUN_RUN_DIR=str(other.path)))
    assert probes.probe_leftovers(place) == [], "nobody knows that it has ended"
    write_json(other.exit, {"status": "done"})
    assert probes.probe_leftovers(place) == [], "they may be about to end"
    os.utime(other.exit, (time.time() - 3600,) * 2)
    (found,) = probes.probe_leftovers(place)
    text = f"{other.id} has ended, and left processes here (1): {children[0].pid}"
    assert (found.severity, found.text) == ("warning", text)
    other.exit.unlink()
    (other.path / "lease").touch()
    assert probes.probe_leftovers(place) == []
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    assert probes.probe_leftovers(place) == [], "this host's clock is not the file system's"
    os.utime(other.path / "lease", (now - 3600,) * 2)
    assert severities(probes.probe_leftovers(place)) == ["warning"]
    assert children[0].poll() is None


def test_shared_memory_that_nobody_uses_is_told(place: CheckTarget) -> None:
    folder = place.root / "dev/shm"
    for name in ("mpich_shm_old", "mpich_shm_new", "data_set"):
        (folder / name).write_bytes(b"x" * 1000)
    past = time.time() - 7200
    for name in ("mpich_shm_old", "data_set"):
        os.utime(folder / name, (past, past))
    # The time of the last change of an inode cannot be set back, so nothing here is old yet.
    assert probes.probe_shared_memory(place) == []
    assert set(stale_segments(folder, older_s=-1.0)) == {
        folder / "mpich_shm_old",
        folder / "mpich_shm_new",
    }
    assert probes.probe_shared_memory(CheckTarget(place.run, root=place.root / "nowhere")) == []


def test_a_node_that_is_well_has_nothing_to_tell(place: CheckTarget) -> None:
    found = run_probes(place, PreflightRequest(PREFLIGHT_CHECKS, interface="ib0"))
    known = [one for one in found if one.severity == "error"]
    assert known == []


@pytest.mark.process
def test_every_check_is_made_by_somebody(
    place: CheckTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reporter(check: str) -> Callable[[CheckTarget], list[Finding]]:
        return lambda place: [Finding("warning", check, "", "seen")]

    for check, probe in preflight._PROBES.items():
        monkeypatch.setitem(preflight._PROBES, check, probe and reporter(check))
    program = tmp_path / "site-check"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    request = PreflightRequest(PREFLIGHT_CHECKS, programs=[str(program)])
    made = {finding.check for finding in run_probes(place, request)}
    now = time.time()
    answer = PreflightReport(1, now - 3600, 0.0, ())
    judged = evaluate_preflight(request, ["n1"], {"n1": answer}, now, now).found
    assert made | {finding.check for _, finding in judged} == set(PREFLIGHT_CHECKS)
    with pytest.raises(KeyError):
        run_probes(place, PreflightRequest(["moon phase"]))  # type: ignore[list-item]


def test_only_what_is_asked_for_is_looked_at(place: CheckTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "matrix_checksums", lambda: (1, 2))
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

    def hang(place: CheckTarget) -> list[Finding]:
        goes_on.wait(20)
        return [Finding("error", "space", "", "too late")]

    def break_down(place: CheckTarget) -> list[Finding]:
        raise OSError(5, "Input/output error")

    monkeypatch.setitem(preflight._PROBES, "space", hang)
    monkeypatch.setitem(preflight._PROBES, "nic", break_down)
    monkeypatch.setattr(preflight, "_PROBE_S", 0.4)
    found = {one.check: one for one in run_probes(place, PreflightRequest(["space", "nic", "sums"]))}
    goes_on.set()
    assert found["space"] == Finding("unknown", "space", "", "gave no answer within 0.4 s")
    assert found["nic"] == Finding("unknown", "nic", "", "[Errno 5] Input/output error")
    assert "sums" not in found


@pytest.mark.process
def test_the_site_s_checks_are_run_and_one_that_hangs_is_ended(place: CheckTarget, tmp_path: Path) -> None:
    bad, slow = tmp_path / "bad", tmp_path / "slow"
    bad.write_text("#!/bin/sh\necho 'CRITICAL - fan 3 stands still'\nexit 2\n")
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    bad.chmod(0o755)
    slow.chmod(0o755)
    programs = [str(bad), str(slow), str(tmp_path / "gone")]
    found = run_probes(place, PreflightRequest(["site"], programs=programs, program_s=4))
    assert [(one.severity, str(one).partition(":")[0]) for one in found] == [
        ("error", str(bad)),
        ("unknown", f"`{slow}` gave no answer in 4 s; it was ended"),
        ("unknown", str(tmp_path / "gone")),
    ]
    assert str(found[0]) == f"{bad}: CRITICAL - fan 3 stands still"


def test_an_answer_holds_the_clock_and_what_is_not_well(place: CheckTarget) -> None:
    before = time.time()
    report = answer_preflight(place.run, PreflightRequest(["interface"], interface="no-such-if0"))
    assert before <= report.time <= time.time()
    assert 0 <= report.seconds < 60
    (finding,) = report.checks
    assert (finding.check, finding.severity) == ("interface", "error")


def test_shared_memory_that_is_old_is_counted_and_named(
    place: CheckTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.root / "dev/shm/torch_42").write_bytes(b"x" * MIB)
    monkeypatch.setattr(probes, "_STALE_SEGMENT_S", -1.0)
    (found,) = probes.probe_shared_memory(place)
    text = "1 file of yours in /dev/shm, 1 MiB, that no process uses any more: torch_42"
    assert (found.severity, found.text) == ("warning", text)
