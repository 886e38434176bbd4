"""The one runner of external commands, and the tools that find, signal and end process trees."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, AnyStr, NamedTuple

import hpcrun
from hpcrun.errors import SiteError

if TYPE_CHECKING:
    import subprocess

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# struct pidfd_info, 64 bytes: what is known (bits) first, the wait status last; Linux 6.15 keeps the latter.
_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_libc = ctypes.CDLL(None, use_errno=True)
_SCRUBBED_PREFIXES = ("PYTHON", "LD_PRELOAD", "BASH_ENV", "BASH_FUNC_")


@dataclass(frozen=True)
class CompletedCommand:
    """How an external command ended."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str
    duration_s: float

    def require_success(self) -> CompletedCommand:
        """Itself when the command succeeded; else SiteError with the command's own words."""
        if self.exit_code == 0:
            return self
        words = self.stderr.strip() or self.stdout.strip() or "it printed nothing"
        raise SiteError(f"`{' '.join(self.argv)}` ended with exit code {self.exit_code}: {words}")


def scrubbed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for somebody else's command: nothing of our Python's, and messages in English."""
    return {k: v for k, v in environ.items() if not k.startswith(_SCRUBBED_PREFIXES)} | {"LC_ALL": "C"}


def python_path(*paths: str | None) -> str:
    """A PYTHONPATH of several, without empty entries: Python takes those for the working directory."""
    entries = [entry for path in paths if path for entry in path.split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys(entries))


def environment_with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a child finds this very package."""
    environment, before = dict(environ), environ.get("PYTHONPATH")
    package = Path(hpcrun.__file__).parent.parent
    if package.name not in ("site-packages", "dist-packages"):
        # Run from its source tree, the package is on nobody's path but ours.
        environment["PYTHONPATH"] = python_path(str(package), before)
    elif before is not None:
        environment["PYTHONPATH"] = python_path(before)
    return environment


def run(
    argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> CompletedCommand:
    """Run an external command to its end; SiteError when it is missing or does not end in time."""
    import subprocess

    started = time.monotonic()
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=scrubbed_environment(os.environ if env is None else env),
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise SiteError(f"{argv[0]}: cannot be run: {error.strerror}; is it on PATH?") from None
    with protect_from_reaper(child):
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill_child(child)
            raise SiteError(f"`{' '.join(argv)}` gave no answer in {timeout_s:g} s; it was ended") from None
        except BaseException:
            kill_child(child)
            # After an interrupt the `with` would leave it unreaped.
            child.wait()
            raise
    return CompletedCommand(tuple(argv), child.returncode, out, err, time.monotonic() - started)


def run_with_input(
    argv: Sequence[str],
    document: str,
    *,
    timeout_s: float,
    env: Mapping[str, str],
    cwd: Path | None = None,
    most_bytes: int = 65536,
) -> CompletedCommand:
    """Run a command that reads a document on its stdin and may be no friend: out of time it is ended.

    Of its output, both streams in one, no more than `most_bytes` are kept. SiteError as `run` raises it, with
    the last line that was kept.
    """
    import subprocess
    import tempfile

    started = time.monotonic()
    with tempfile.TemporaryFile() as given:
        given.write(document.encode())
        given.seek(0)
        try:
            child = subprocess.Popen(
                argv,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=scrubbed_environment(env),
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise SiteError(f"{argv[0]}: cannot be run: {error.strerror}; is it on PATH?") from None
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    output = bytearray()
    with protect_from_reaper(child):
        while not (ended := _awaits_reaping(child.pid)) and time.monotonic() - started < timeout_s:
            _read_pipe(child.stdout.fileno(), output, most_bytes, 0.05)
        _read_pipe(child.stdout.fileno(), output, most_bytes, 0.0)
        kill_tree(child.pid)
        # Not reaped yet, the child still holds the number of its group.
        os.killpg(child.pid, signal.SIGKILL)
    text = output.decode(errors="replace")
    if not ended:
        # Not its arguments: a URL among them may be a secret.
        lines = text.strip().splitlines()
        words = f"; last output: {lines[-1][-300:]}" if lines else ""
        raise SiteError(f"`{argv[0]}` did not end in {timeout_s:g} s and was ended{words}")
    return CompletedCommand(tuple(argv), child.returncode, text, "", time.monotonic() - started)


def _awaits_reaping(pid: int) -> bool:
    """Whether a child of ours waits to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _read_pipe(descriptor: int, output: bytearray, most: int, wait_s: float) -> None:
    """Take what a pipe holds now; wait for it, or where nobody writes any more for nothing."""
    import select

    select.select([descriptor], [], [], wait_s)
    try:
        data = os.read(descriptor, 65536)
    except BlockingIOError:
        return
    output += data[: max(0, most - len(output))]
    if not data:
        time.sleep(wait_s)


class ProcessId(NamedTuple):
    """A process for good: a pid alone may be given to another process."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process (any more)."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def identify_process(pid: int) -> ProcessId | None:
    """The process that has this pid now."""
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessId(pid, ticks)


def is_alive(process: ProcessId) -> bool:
    """Whether this very process runs; one that only waits to be reaped does not."""
    fields = _stat(process.pid)
    return fields is not None and int(fields[19]) == process.start_ticks and fields[0] not in ("Z", "X")


def state(pid: int) -> str | None:
    """The state of a process as /proc has it: R, S, D, T, Z, …; None when there is none."""
    fields = _stat(pid)
    return fields[0] if fields else None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on: the name before them may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return None
        raise
    return text[text.rindex(")") + 2 :].split()


class ProcessHandle:
    """A hold on one process, safe against its pid being given to another."""

    def __init__(self, process: ProcessId) -> None:
        self.process = process
        self._descriptor: int | None = None
        try:
            self._descriptor = os.pidfd_open(process.pid)
        except OSError as error:
            # Kernels before 5.3 have no such call: there the start time alone has to do, as it has where
            # descriptors run out.
            if error.errno not in (errno.ENOSYS, errno.ESRCH, errno.EINVAL, errno.EMFILE, errno.ENFILE):
                raise
        if self._descriptor is not None and start_ticks(process.pid) != process.start_ticks:
            self.close()

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when the process ends; None where there is none."""
        return self._descriptor

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return is_alive(self.process)

    def signal(self, number: int) -> bool:
        """Send a signal; False when the process is gone."""
        try:
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif self.is_alive():
                os.kill(self.process.pid, number)
            else:
                return False
        except ProcessLookupError:
            return False
        return True

    def wait_status(self) -> int | None:
        """The wait status of a process that ended, even one that another reaps; None where unknown."""
        # Before it is reaped /proc tells, afterwards (since Linux 6.15) the descriptor does.
        for ask in (self._kept_status, self._zombie_status, self._kept_status):
            status = ask()
            if status is not None:
                return status
        return None

    def _zombie_status(self) -> int | None:
        fields = _stat(self.process.pid)
        if fields and fields[0] == "Z" and int(fields[19]) == self.process.start_ticks:
            return int(fields[49])
        return None

    def _kept_status(self) -> int | None:
        if self._descriptor is None:
            return None
        buffer = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT).ljust(64, b"\0"))
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, buffer)
        except OSError:
            return None
        mask, status = struct.unpack_from("Q", buffer)[0], struct.unpack_from("i", buffer, 60)[0]
        return int(status) if mask & _PIDFD_INFO_EXIT else None

    def close(self) -> None:
        """Let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def descendants(top: ProcessId | int) -> list[ProcessId]:
    """Children, their children and so on that are alive, parents before children.

    Of a process that is gone there are none, whoever has its pid now. A pid alone is for our own, and for
    what cannot be reaped meanwhile.
    """
    children: dict[int, list[ProcessId]] = {}
    for entry in _pids():
        fields = _stat(entry)
        if fields and fields[0] not in ("Z", "X"):
            children.setdefault(int(fields[1]), []).append(ProcessId(entry, int(fields[19])))
    # Looked at afterwards: then the pid was its own all the time.
    if isinstance(top, ProcessId) and start_ticks(top.pid) != top.start_ticks:
        return []
    processes: list[ProcessId] = []
    ahead = [top.pid if isinstance(top, ProcessId) else top]
    while ahead:
        below = children.pop(ahead.pop(0), [])
        processes += below
        ahead += [process.pid for process in below]
    return processes


def processes_with_env(name: str, value: str) -> list[ProcessId]:
    """Living processes, but not the caller, that were started with an environment variable of this value."""
    processes = []
    for pid in _pids():
        process = identify_process(pid)
        if process and pid != os.getpid() and read_initial_variable(pid, name) == value:
            processes.append(process)
    return processes


def read_initial_variable(pid: int, name: str) -> str | None:
    """An environment variable as a process was given it; None without it, or where it is not ours to see."""
    return read_initial_environment(pid).get(name)


def read_initial_environment(pid: int) -> dict[str, str]:
    """The environment as a process was given it; empty where there is none, or it is not ours to see."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in text.split("\0") if entry)
    return {name: value for name, _, value in entries}


def command_lines() -> Iterator[tuple[ProcessId, list[str]]]:
    """Every living process, but not the caller, with the words that it was started with, where they show."""
    for pid in _pids():
        process = identify_process(pid)
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if process and pid != os.getpid():
                yield process, words


def parent_of(pid: int) -> int | None:
    """The parent of a process; None when there is no such process (any more)."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def ancestors() -> Iterator[int]:
    """The processes that this one comes from, its parent first; not init."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        pid = parent_of(pid) or 0


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def kill_processes(processes: Iterable[ProcessId]) -> None:
    """Send SIGKILL to those of the processes that are still themselves."""
    for process in processes:
        handle = ProcessHandle(process)
        # Another user's process cannot be ended by us; whoever asks sees that it is still there.
        with contextlib.suppress(PermissionError):
            handle.signal(signal.SIGKILL)
        handle.close()


def kill_tree(top: ProcessId | int, timeout_s: float = 5.0) -> list[ProcessId]:
    """End everything below a process, but not itself; what is still alive after the time-out is returned.

    `top` as for `descendants`.
    """
    deadline = time.monotonic() + timeout_s
    while alive := descendants(top):
        kill_processes(alive)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return alive


_unreaped_children: weakref.WeakKeyDictionary[subprocess.Popen[Any], ProcessId] = weakref.WeakKeyDictionary()
_unreaped_lock = threading.Lock()


def protect_from_reaper(child: subprocess.Popen[AnyStr]) -> subprocess.Popen[AnyStr]:
    """The same child, which was started just now: known for good, and reaped by nobody but its Popen."""
    identity = identify_process(child.pid)
    if identity is not None:
        with _unreaped_lock:
            _unreaped_children[child] = identity
    return child


def kill_child(child: subprocess.Popen[Any]) -> None:
    """Kill a child of ours and all below it; one that was reaped has no pid any more, and is left alone."""
    if child.poll() is not None:
        return
    with _unreaped_lock:
        identity = _unreaped_children.get(child)
    kill_tree(identity or child.pid)
    child.kill()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent ends, so that none of them gets away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans() -> None:
    """Collect the children that ended, except those that are held: somebody waits for their status."""
    with _unreaped_lock:
        waited_for = {identity for child, identity in _unreaped_children.items() if child.returncode is None}
    for pid in _pids():
        fields = _stat(pid)
        if fields and fields[0] == "Z" and int(fields[1]) == os.getpid():
            if ProcessId(pid, int(fields[19])) in waited_for:
                continue
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def describe_status(status: int) -> str:
    """A wait status in words: `was killed by signal 9 (SIGKILL)`, `ended with exit code 3`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        return f"was killed by signal {number} ({name})"
    return f"ended with exit code {os.WEXITSTATUS(status)}"
