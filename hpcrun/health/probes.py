"""The probes behind the checks of a node: each tests one thing and returns its results.

They run in agents, where neither numpy nor torch is loaded.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.fabric.ports import read_rdma_ports
from hpcrun.files import OwnedDirectory, read_filesystem_clock, temporary_name
from hpcrun.finding import Finding
from hpcrun.health.gpu_health import check_gpu_health
from hpcrun.health.node_checks import (
    judge_interface,
    judge_limits,
    judge_ports,
    judge_program,
    judge_space,
)
from hpcrun.health.xids import XidAction, read_recent_xids
from hpcrun.local_identity import expand_path
from hpcrun.process import ProcessId
from hpcrun.runs.lease import LEADER_TIMEOUT_S, has_active_leader
from hpcrun.shm_segments import stale_segments
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import RunDir
from hpcrun.units import format_bytes

_BLOCK = bytes(range(256)) * 256
_KILL_WAIT_S = 1.0
_STALE_SEGMENT_S = 600.0
_MAX_SHOWN = 8
_MATRIX_SIZE = 32
_EXPECTED_CHECKSUMS = (627323699524028846, 4224595839)
"""What sums() gives on every sound machine."""


@dataclass(frozen=True)
class CheckTarget:
    """The node that is probed: its files, and what the run uses of it."""

    run: RunDir
    attempt: int = 1
    scratch: tuple[str, ...] = ()
    """Further directories of the node's own, besides /tmp."""
    interface: str | None = None
    hcas: tuple[str, ...] = ()
    gpus: int = 0
    """How many were requested."""
    xids: Mapping[int, XidAction] = field(default_factory=dict)
    """What the site makes of numbers in the kernel's log."""
    root: Path = Path("/")

    @property
    def own(self) -> Iterator[Path]:
        """Where the node keeps files of its own; those that the profile names may hold variables."""
        named = map(expand_path, self.scratch)
        yield from dict.fromkeys([self.root / "tmp", *map(Path, named)])


def probe_limits(place: CheckTarget) -> list[Finding]:
    """The soft limits of this process, which the ranks inherit."""
    soft = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
        for name in ("nofile", "nproc", "stack", "memlock")
    }
    limits = {name: math.inf if value == resource.RLIM_INFINITY else value for name, value in soft.items()}
    return judge_limits(limits, is_infiniband=bool(read_rdma_ports(place.root, with_gids=False)))


def probe_space(place: CheckTarget) -> list[Finding]:
    """Bytes and inodes that are free where the run writes."""
    findings = _check_path_space(place.run.path, is_shared=True)
    findings += _check_path_space(place.root / "dev/shm", is_memory=True)
    return findings + [
        _excuse_foreign_path(path, finding) for path in place.own for finding in _check_path_space(path)
    ]


def _check_path_space(path: Path, *, is_shared: bool = False, is_memory: bool = False) -> list[Finding]:
    try:
        free = os.statvfs(path)
    except FileNotFoundError:
        return [Finding("warning", "space", str(path), "is not on this node", is_shared=is_shared)]
    except OSError as error:
        return [Finding("error", "space", str(path), str(error.strerror), is_shared=is_shared)]
    inodes = free.f_favail if free.f_files else None
    return judge_space(
        str(path), free.f_bavail * free.f_frsize, inodes, is_shared=is_shared, is_memory=is_memory
    )


def probe_write(place: CheckTarget) -> list[Finding]:
    """A small file, written, synced, and read back, in the run directory and in the node's own places."""
    return _check_folder_write(place.run.path, is_shared=True) + [
        _excuse_foreign_path(path, finding)
        for path in place.own
        if path.exists()
        for finding in _check_folder_write(path)
    ]


def _excuse_foreign_path(path: Path, finding: Finding) -> Finding:
    """Make a failure in a directory that another user owns a warning: it is not the node's fault."""
    if finding.severity != "error":
        return finding
    for level in (*reversed(path.parents), path):
        with contextlib.suppress(OSError):
            if level.lstat().st_uid not in (0, os.geteuid()):
                text = f"{finding.text}; {level} belongs to another user"
                return replace(finding, severity="warning", text=text)
    return finding


def _check_folder_write(folder: Path, *, is_shared: bool = False) -> list[Finding]:
    # Under a name that nobody can have taken, and made anew: what stands there says nothing about the node.
    name = temporary_name("preflight")
    try:
        with OwnedDirectory.below(folder) as files, _new_file(files, name) as descriptor:
            written = os.write(descriptor, _BLOCK)
            os.fsync(descriptor)
            # Not from memory, as far as the file system lets go of it.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            is_same = os.pread(descriptor, len(_BLOCK) + 1, 0) == _BLOCK
    except OSError as error:
        text = f"a small file cannot be written: {error.strerror}"
        return [Finding("error", "write", str(folder), text, is_shared=is_shared)]
    if written < len(_BLOCK):
        text = f"only {written} of {len(_BLOCK)} bytes could be written"
        return [Finding("error", "write", str(folder), text, is_shared=is_shared)]
    wrong = Finding("error", "write", str(folder), "a file reads back differently from what was written")
    return [] if is_same else [wrong]


@contextlib.contextmanager
def _new_file(files: OwnedDirectory, name: str) -> Iterator[int]:
    descriptor = files.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        files.unlink(name)


def probe_interface(place: CheckTarget) -> list[Finding]:
    """The network interface that the profile names."""
    if place.interface is None:
        return []
    folder = place.root / "sys/class/net" / place.interface
    state, flags = _read_kernel_file(folder / "operstate"), _read_kernel_file(folder / "flags") or "0x1"
    return judge_interface(place.interface, state, int(flags, 16))


def probe_nics(place: CheckTarget) -> list[Finding]:
    """The ports of the RDMA devices."""
    return judge_ports(read_rdma_ports(place.root, with_gids=False), place.hcas)


def probe_gpus(place: CheckTarget) -> list[Finding]:
    """What nvidia-smi says, where GPUs were asked for."""
    if not place.gpus:
        return []
    if shutil.which("nvidia-smi") is None:
        return [Finding("unknown", "gpu", "", "there is no nvidia-smi to query the GPUs with")]
    return check_gpu_health(place.gpus, 1.8, read_recent_xids(1.0), place.xids)


def probe_leftovers(place: CheckTarget) -> list[Finding]:
    """Processes that this run's earlier attempts, or runs that have ended, have left here.

    Those of this run are killed; those of others are reported.
    """
    ours: list[ProcessId] = []
    others: dict[str, list[ProcessId]] = {}
    kept = {os.getpid(), *process.ancestors()}
    for pid in _own_pids():
        environ = process.read_initial_environment(pid)
        identity = process.identify_process(pid) if RUN_ID_VARIABLE in environ and pid not in kept else None
        if identity is None:
            continue
        if environ[RUN_ID_VARIABLE] != place.run.run_id:
            others.setdefault(environ.get(RUN_DIR_VARIABLE, ""), []).append(identity)
        elif environ.get(ATTEMPT_VARIABLE, "").isdigit() and int(environ[ATTEMPT_VARIABLE]) < place.attempt:
            ours.append(identity)
    findings = [_kill_leftovers(ours)] if ours else []
    for path, processes in sorted(others.items()):
        if path and _is_run_dead(place.run, run := RunDir(Path(path))):
            pids = " ".join(str(leftover.pid) for leftover in processes[:_MAX_SHOWN])
            text = f"{run.id} has ended, and left processes here ({len(processes)}): {pids}"
            findings.append(Finding("warning", "leftovers", "", text))
    return findings


def _kill_leftovers(left: list[ProcessId]) -> Finding:
    process.kill_processes(left)
    deadline = time.monotonic() + _KILL_WAIT_S
    while (
        alive := [leftover for leftover in left if process.is_alive(leftover)]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    if alive:
        pids = " ".join(str(leftover.pid) for leftover in alive[:_MAX_SHOWN])
        return Finding("error", "leftovers", "", f"processes of an earlier attempt cannot be ended: {pids}")
    text = f"ended what an earlier attempt had left: {len(left)} process{'es' * (len(left) > 1)}"
    return Finding("warning", "leftovers", "", text)


def _own_pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == os.getuid():
                    yield int(entry.name)


def _is_run_dead(here: RunDir, run: RunDir) -> bool:
    """Whether another run has ended, or its supervisor has been silent for long."""
    with contextlib.suppress(OSError):
        now = read_filesystem_clock(here.path)
        if run.exit.exists():
            return now - run.exit.stat().st_mtime > LEADER_TIMEOUT_S
        return now - run.lease.stat().st_mtime > 10 * LEADER_TIMEOUT_S and not has_active_leader(run)
    return False


def probe_shared_memory(place: CheckTarget) -> list[Finding]:
    """Shared memory of ours that no process maps any more; it takes the node's memory."""
    left = stale_segments(place.root / "dev/shm", older_s=_STALE_SEGMENT_S)
    if not left:
        return []
    names = " ".join(sorted(path.name for path in left)[:_MAX_SHOWN])
    size = format_bytes(sum(left.values()))
    count = f"{len(left)} file{'s' * (len(left) > 1)}"
    text = f"{count} of yours in /dev/shm, {size}, that no process uses any more: {names}"
    return [Finding("warning", "shm", "", text)]


def probe_arithmetic(place: CheckTarget) -> list[Finding]:
    """Whether a fixed product of matrices comes out as it must, in whole and in real numbers."""
    if matrix_checksums() == _EXPECTED_CHECKSUMS:
        return []
    return [Finding("error", "sums", "", "a fixed calculation gives a wrong result on this processor")]


def matrix_checksums() -> tuple[int, int]:
    """Checksums of two products of matrices from a fixed seed.

    Written out, because numpy's BLAS adds in an order that differs between processors.
    """
    seed, numbers = 20261129, []
    for _ in range(2 * _MATRIX_SIZE * _MATRIX_SIZE):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        numbers.append(seed >> 3)
    half = _MATRIX_SIZE * _MATRIX_SIZE
    rows = [numbers[at : at + _MATRIX_SIZE] for at in range(0, half, _MATRIX_SIZE)]
    columns = [numbers[half + at :: _MATRIX_SIZE] for at in range(_MATRIX_SIZE)]
    whole = 0
    reals = []
    for row in rows:
        for column in columns:
            whole = (whole * 31 + sum(a * b for a, b in zip(row, column, strict=True))) % (2**61 - 1)
            real = 0.0
            for a, b in zip(row, column, strict=True):
                real += (a * 2.0**-61) * (b * 2.0**-61)
            reals.append(real)
    return whole, zlib.crc32(struct.pack(f"<{len(reals)}d", *reals))


def run_site_check(path: str, timeout_s: float) -> list[Finding]:
    """A site's own check."""
    words = expand_path(path)
    try:
        done = process.run([words], timeout_s=timeout_s)
    except SiteError as error:
        return [Finding("unknown", "site", "", str(error))]
    return judge_program(path, done.exit_code, done.stdout or done.stderr)


def _read_kernel_file(path: Path) -> str | None:
    """Return the text of a kernel file; None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
