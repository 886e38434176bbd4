"""Runs an action in a child and looks at each of its system calls, to kill it there or to let the call fail.

The calls are found by tracing (ptrace), not by a list of what a save is thought to do: whatever is not known
to leave files alone is a moment at which something can go wrong.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

How = Literal["before", "halfway", "failing"]

_TRACEME, _POKEDATA, _POKEUSER, _DETACH, _SYSCALL = 0, 5, 6, 17, 24
_SETOPTIONS, _GET_SYSCALL_INFO = 0x4200, 0x420E
_GOOD, _EXITKILL = 1, 0x100000
_ENTRY = 1
# Of x86-64: offsets of registers in the child's user area.
_RAX, _RDX, _ORIG_RAX = 80, 96, 120
_OPENAT = 257
_VECTORS = {20: "writev", 296: "pwritev", 328: "pwritev2"}
_WRITES = {1: "write", 18: "pwrite64", **_VECTORS}
_NAMES = {
    **_WRITES,
    **{2: "open", 40: "sendfile", 73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate"},
    **{77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink"},
    **{88: "symlink", 90: "chmod", 91: "fchmod", 92: "chown", 257: "openat", 258: "mkdirat", 263: "unlinkat"},
    **{264: "renameat", 265: "linkat", 277: "sync_file_range", 280: "utimensat", 285: "fallocate"},
    **{316: "renameat2", 326: "copy_file_range"},
}
_HARMLESS = {
    *(
        0,
        3,
        4,
        5,
        6,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        17,
        19,
        21,
        24,
        25,
        28,
        32,
        35,
        39,
        62,
        63,
        72,
        78,
        79,
        89,
    ),
    *(96, 97, 99, 102, 104, 107, 108, 110, 157, 186, 201, 202, 204, 217, 218, 221, 228, 230, 257, 262, 267),
    *(269, 273, 295, 302, 318, 324, 327, 332, 334, 435, 439),
}
"""What reads, maps memory, waits, asks or signals; opening counts where it may make or empty a file."""


class _SyscallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    )


@dataclass(frozen=True)
class Outcome:
    """What became of the child."""

    calls: list[str]
    """Names of the calls that could change a file, as far as it came."""
    killed: bool
    said: str
    """The error that the action ended with; empty without one."""


def why_not() -> str | None:
    """Why calls cannot be traced here; None where they can."""
    if platform.machine() != "x86_64":
        return f"the system calls of {platform.machine()} are not known by number; run on x86-64"
    try:
        run(lambda: None)
    except OSError as error:
        return f"the kernel lets no child be traced ({error.strerror}); allow ptrace"
    return None


def run(
    action: Callable[[], object], at: int | None = None, how: How = "before", error: int = errno.ENOSPC
) -> Outcome:
    """Run an action in a fork; at its call number `at`, from 1 on, it is killed, or the call fails.

    `halfway` lets a write do half of its work before the child is killed. The action must not start threads.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_traced(action, writing)
    os.close(writing)
    try:
        calls, killed = _Tracer(child, at, how, error).watch()
    finally:
        with os.fdopen(reading) as told:
            said = told.read()
    if said.startswith("untraceable"):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    return Outcome(calls, killed, said)


def _be_traced(action: Callable[[], object], writing: int) -> None:
    """In the child: stop before the action and after it, so that nothing else is counted."""
    said = ""
    try:
        _ptrace(_TRACEME, 0, 0, 0)
    except OSError:
        os.write(writing, b"untraceable")
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        action()
    except Exception as error:  # noqa: BLE001 - told to whoever has started the child
        said = f"{type(error).__name__}: {error}"
    os.kill(os.getpid(), signal.SIGSTOP)
    os.write(writing, said.encode())
    os._exit(0)


class _Tracer:
    """Follows one child from call to call."""

    def __init__(self, child: int, at: int | None, how: How, error: int) -> None:
        self._child, self._at, self._how, self._error = child, at, how, error
        self._calls: list[str] = []

    def watch(self) -> tuple[list[str], bool]:
        _, status = os.waitpid(self._child, 0)
        if not os.WIFSTOPPED(status):  # it could not be traced
            return [], False
        _ptrace(_SETOPTIONS, self._child, 0, _GOOD | _EXITKILL)
        while True:
            status = self._step()
            if not os.WIFSTOPPED(status):
                return self._calls, os.WIFSIGNALED(status)
            if os.WSTOPSIG(status) == signal.SIGSTOP:
                _ptrace(_DETACH, self._child, 0, 0)
                _, status = os.waitpid(self._child, 0)
                return self._calls, os.WIFSIGNALED(status)
            info = self._info()
            if info is None or info.op != _ENTRY or not _may_change(info):
                continue
            self._calls.append(_NAMES.get(info.number, f"call {info.number}"))
            if len(self._calls) == self._at:
                self._strike(info)
                if self._how != "failing":
                    return self._calls, os.WIFSIGNALED(os.waitpid(self._child, 0)[1])

    def _step(self) -> int:
        """Go on to the next stop; the status there."""
        _ptrace(_SYSCALL, self._child, 0, 0)
        return os.waitpid(self._child, 0)[1]

    def _info(self) -> _SyscallInfo | None:
        info = _SyscallInfo()
        _ptrace(_GET_SYSCALL_INFO, self._child, ctypes.sizeof(info), ctypes.addressof(info))
        return info

    def _strike(self, info: _SyscallInfo) -> None:
        if self._how == "failing":
            _ptrace(_POKEUSER, self._child, _ORIG_RAX, -1)  # no call at all
            self._step()
            _ptrace(_POKEUSER, self._child, _RAX, -self._error)
            return
        if self._how == "halfway":
            count = info.args[2]
            if info.number not in _VECTORS or count > 1:
                _ptrace(_POKEUSER, self._child, _RDX, count // 2)
            else:
                first = _peek(self._child, info.args[1] + 8)
                _ptrace(_POKEDATA, self._child, info.args[1] + 8, first // 2)
            self._step()
        os.kill(self._child, signal.SIGKILL)


def is_write(name: str) -> bool:
    """Whether a call can be cut in half."""
    return name in _WRITES.values()


def _may_change(info: _SyscallInfo) -> bool:
    if info.number == _OPENAT:
        return bool(info.args[2] & (os.O_CREAT | os.O_TRUNC))
    return info.number not in _HARMLESS


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    if _libc.ptrace(request, pid, address & (1 << 64) - 1, data & (1 << 64) - 1) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")


def _peek(pid: int, address: int) -> int:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return int.from_bytes(memory.read(8), "little")
