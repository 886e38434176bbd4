"""The probes behind the checks of a node: each looks at one thing, and gives its verdicts.

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
from hpcrun.fabric.ports import ports
from hpcrun.files import Folder, aside_name, clock_of
from hpcrun.health.check_result import (
    Checked,
    judge_interface,
    judge_limits,
    judge_ports,
    judge_program,
    judge_space,
)
from hpcrun.health.gpu_health import gpu_health
from hpcrun.health.xids import XidAction, recent_xids
from hpcrun.local_identity import expand_path
from hpcrun.process import ProcessId
from hpcrun.runs.lease import LEADER_TIMEOUT_S, has_active_leader
from hpcrun.shm_segments import stale_segments
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import RunDir

_BLOCK = bytes(range(256)) * 256
_END_S = 1.0
_OLD_S = 600.0
_SHOWN = 8
_SIZE = 32
_SUMS = (627323699524028846, 4224595839)
"""What sums() gives on every sound machine."""


@dataclass(frozen=True)
class Place:
    """The node that is looked at: its files, and what of it the run uses."""

    run: RunDir
    attempt: int = 1
    scratch: tuple[str, ...] = ()
    """Further directories of the node's own, besides /tmp."""
    interface: str | None = None
    hcas: tuple[str, ...] = ()
    gpus: int = 0
    """How many were asked for."""
    xids: Mapping[int, XidAction] = field(default_factory=dict)
    """What the site makes of numbers in the kernel's log."""
    root: Path = Path("/")

    @property
    def own(self) -> Iterator[Path]:
        """Where the node keeps files of its own; those that the profile names may hold variables."""
        named = map(expand_path, self.scratch)
        yield from dict.fromkeys([self.root / "tmp", *map(Path, named)])


def limits(place: Place) -> list[Checked]:
    """The soft limits of this process, which the ranks inherit."""
    soft = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
        for name in ("nofile", "nproc", "stack", "memlock")
    }
    known = {name: math.inf if value == resource.RLIM_INFINITY else value for name, value in soft.items()}
    return judge_limits(known, is_infiniband=bool(ports(place.root, with_gids=False)))


def space(place: Place) -> list[Checked]:
    """Bytes and inodes that are free where the run writes."""
    found = [_space(place.run.path, common=True), _space(place.root / "dev/shm", is_memory=True)]
    return _troubles("space", [*found, *(_excused(path, _space(path)) for path in place.own)])


def _space(path: Path, *, common: bool = False, is_memory: bool = False) -> Checked:
    try:
        free = os.statvfs(path)
    except FileNotFoundError:
        return Checked("space", "warn", f"{path}: is not on this node", common)
    except OSError as error:
        return Checked("space", "fail", f"{path}: {error.strerror}", common)
    inodes = free.f_favail if free.f_files else None
    return judge_space(str(path), free.f_bavail * free.f_frsize, inodes, common=common, is_memory=is_memory)


def write(place: Place) -> list[Checked]:
    """A small file, written, synced, and read back, in the run directory and in the node's own places."""
    own = (_excused(path, _write(path)) for path in place.own if path.exists())
    return _troubles("write", [_write(place.run.path, common=True), *own])


def _excused(path: Path, found: Checked) -> Checked:
    """A failure in a place that another user has made tells nothing against the node."""
    if found.verdict != "fail":
        return found
    for level in (*reversed(path.parents), path):
        with contextlib.suppress(OSError):
            if level.lstat().st_uid not in (0, os.geteuid()):
                text = f"{found.text}; {level} belongs to another user"
                return replace(found, verdict="warn", text=text)
    return found


def _write(folder: Path, *, common: bool = False) -> Checked:
    # Under a name that nobody can have taken, and made anew: what stands there says nothing about the node.
    name = aside_name("preflight")
    try:
        with Folder.below(folder) as files, _new_file(files, name) as descriptor:
            written = os.write(descriptor, _BLOCK)
            os.fsync(descriptor)
            # Not from memory, as far as the file system lets go of it.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            is_same = os.pread(descriptor, len(_BLOCK) + 1, 0) == _BLOCK
    except OSError as error:
        return Checked("write", "fail", f"{folder}: a small file cannot be written: {error.strerror}", common)
    if written == len(_BLOCK) and not is_same:
        return Checked("write", "fail", f"{folder}: a file reads back differently from what was written")
    full = f"{folder}: only {written} of {len(_BLOCK)} bytes could be written"
    return Checked("write") if written == len(_BLOCK) else Checked("write", "fail", full, common)


@contextlib.contextmanager
def _new_file(files: Folder, name: str) -> Iterator[int]:
    descriptor = files.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        files.unlink(name)


def interface(place: Place) -> list[Checked]:
    """The network interface that the profile names."""
    if place.interface is None:
        return [Checked("interface")]
    folder = place.root / "sys/class/net" / place.interface
    state, flags = _line(folder / "operstate"), _line(folder / "flags") or "0x1"
    return [judge_interface(place.interface, state, int(flags, 16))]


def nic(place: Place) -> list[Checked]:
    """The ports of the RDMA devices."""
    return judge_ports(ports(place.root, with_gids=False), place.hcas)


def gpu(place: Place) -> list[Checked]:
    """What nvidia-smi says, where GPUs were asked for."""
    if not place.gpus:
        return [Checked("gpu")]
    if shutil.which("nvidia-smi") is None:
        return [Checked("gpu", "unknown", "there is no nvidia-smi that could tell how the GPUs are")]
    return gpu_health(place.gpus, 1.8, recent_xids(1.0), place.xids)


def leftovers(place: Place) -> list[Checked]:
    """Processes that this run's earlier attempts, or runs that have ended, have left here.

    Those of this run are ended; those of others are told.
    """
    ours: list[ProcessId] = []
    others: dict[str, list[ProcessId]] = {}
    kept = {one.pid for one in _ancestors()}
    for pid in _own_pids():
        environ = process.environment_of(pid)
        found = process.identify(pid) if RUN_ID_VARIABLE in environ and pid not in kept else None
        if found is None:
            continue
        if environ[RUN_ID_VARIABLE] != place.run.run_id:
            others.setdefault(environ.get(RUN_DIR_VARIABLE, ""), []).append(found)
        elif environ.get(ATTEMPT_VARIABLE, "").isdigit() and int(environ[ATTEMPT_VARIABLE]) < place.attempt:
            ours.append(found)
    told = [_ended(ours)] if ours else []
    for path, processes in sorted(others.items()):
        if path and _is_dead(place.run, run := RunDir(Path(path))):
            pids = " ".join(str(one.pid) for one in processes[:_SHOWN])
            text = f"{run.id} has ended, and left processes here ({len(processes)}): {pids}"
            told.append(Checked("leftovers", "warn", text))
    return told or [Checked("leftovers")]


def _ended(left: list[ProcessId]) -> Checked:
    process.kill_all(left)
    deadline = time.monotonic() + _END_S
    while (alive := [one for one in left if process.is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    if alive:
        pids = " ".join(str(one.pid) for one in alive[:_SHOWN])
        return Checked("leftovers", "fail", f"processes of an earlier attempt cannot be ended: {pids}")
    return Checked(
        "leftovers",
        "warn",
        f"ended what an earlier attempt had left: {len(left)} process{'es' * (len(left) > 1)}",
    )


def _ancestors() -> Iterator[ProcessId]:
    """This process, and those that it comes from."""
    found = process.identify(os.getpid())
    while found is not None:
        yield found
        text = _line(Path(f"/proc/{found.pid}/stat")) or ")"
        fields = text[text.rindex(")") + 1 :].split()
        found = process.identify(int(fields[1])) if len(fields) > 1 and fields[1] != "0" else None


def _own_pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == os.getuid():
                    yield int(entry.name)


def _is_dead(here: RunDir, run: RunDir) -> bool:
    """Whether another run has ended, or its supervisor has been silent for long."""
    with contextlib.suppress(OSError):
        now = clock_of(here.path)
        if run.exit.exists():
            return now - run.exit.stat().st_mtime > LEADER_TIMEOUT_S
        return now - run.lease.stat().st_mtime > 10 * LEADER_TIMEOUT_S and not has_active_leader(run)
    return False


def shm(place: Place) -> list[Checked]:
    """Shared memory of ours that no process maps any more; it takes the node's memory."""
    left = stale_segments(place.root / "dev/shm", older_s=_OLD_S)
    if not left:
        return [Checked("shm")]
    names = " ".join(sorted(path.name for path in left)[:_SHOWN])
    size = sum(left.values()) / 2**20
    count = f"{len(left)} file{'s' * (len(left) > 1)}"
    text = f"{count} of yours in /dev/shm, {size:.0f} MiB, that no process uses any more: {names}"
    return [Checked("shm", "warn", text)]


def arithmetic(place: Place) -> list[Checked]:
    """Whether a fixed product of matrices comes out as it must, in whole and in real numbers."""
    if sums() != _SUMS:
        return [Checked("sums", "fail", "a fixed calculation gives a wrong result on this processor")]
    return [Checked("sums")]


def sums() -> tuple[int, int]:
    """Checksums of two products of matrices from a fixed seed.

    Written out, because numpy's BLAS adds in an order that differs between processors.
    """
    seed, numbers = 20261129, []
    for _ in range(2 * _SIZE * _SIZE):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        numbers.append(seed >> 3)
    half = _SIZE * _SIZE
    rows = [numbers[at : at + _SIZE] for at in range(0, half, _SIZE)]
    columns = [numbers[half + at :: _SIZE] for at in range(_SIZE)]
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


def program(path: str, timeout_s: float) -> list[Checked]:
    """A site's own check."""
    words = expand_path(path)
    try:
        done = process.run([words], timeout_s=timeout_s)
    except SiteError as error:
        return [Checked("site", "unknown", str(error))]
    return [judge_program(path, done.exit_code, done.stdout or done.stderr)]


def _troubles(check: str, found: list[Checked]) -> list[Checked]:
    return [one for one in found if one.verdict != "ok"] or [Checked(check)]


def _line(path: Path) -> str | None:
    """What a file of the kernel's says; None where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
