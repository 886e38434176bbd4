"""The runner of external commands, and the tools for process trees, on real processes."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.process import ProcessHandle, ProcessId

# A tree: a shell in a session of its own, a child in another one, a grandchild; each line is a pid.
TREE = "setsid sh -c 'sleep 60 & echo $!; wait' & sleep 60 & echo $!; wait"


@pytest.fixture
def spawn() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    spawned: list[subprocess.Popen[str]] = []

    def start(script: str) -> subprocess.Popen[str]:
        spawned.append(subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True))
        return spawned[-1]

    yield start
    for child in spawned:
        process.kill_tree(child.pid)
        child.kill()
        child.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_command_gives_back_its_output() -> None:
    done = process.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=20)
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")
    with pytest.raises(SiteError, match="ended with exit code 3: err"):
        done.require_success()
    assert process.run(["true"], timeout_s=20).require_success().exit_code == 0


def test_the_environment_is_scrubbed_and_messages_are_in_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("KEPT", "yes")
    done = process.run(["env"], timeout_s=20)
    assert "PYTHONPATH" not in done.stdout
    assert {"LC_ALL=C", "KEPT=yes"} <= set(done.stdout.splitlines())
    assert process.run(["env"], timeout_s=20, env={"A": "b"}).stdout.splitlines() == ["A=b", "LC_ALL=C"]


def test_a_command_is_out_of_reach_of_the_terminal_s_signals() -> None:
    done = process.run(["cut", "-d", " ", "-f", "6", "/proc/self/stat"], timeout_s=20)
    assert int(done.stdout) != os.getsid(0)


def test_a_missing_command_is_the_site_s_fault(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="no-such-command: cannot be run: No such file"):
        process.run(["no-such-command"], timeout_s=1)
    (tmp_path / "data").touch()
    with pytest.raises(SiteError, match="cannot be run: Permission denied"):
        process.run([str(tmp_path / "data")], timeout_s=1)


def test_a_command_that_hangs_is_ended_with_all_its_children() -> None:
    marker = f"{os.getpid()}-hang"
    env = {**os.environ, "HANG_MARKER": marker}
    with pytest.raises(SiteError, match=r"gave no answer in 0.3 s; it was ended"):
        process.run(["/bin/sh", "-c", TREE], timeout_s=0.3, env=env)
    wait_until(lambda: process.processes_with_env("HANG_MARKER", marker) == [])


def test_descendants_reach_through_sessions_and_die_together(
    spawn: Callable[[str], subprocess.Popen[str]],
) -> None:
    shell = spawn(TREE)
    assert shell.stdout is not None
    sleepers = {int(shell.stdout.readline()), int(shell.stdout.readline())}
    assert sleepers < {one.pid for one in process.descendants(shell.pid)}
    assert process.kill_tree(shell.pid) == []
    assert process.descendants(shell.pid) == []
    shell.wait()


def test_processes_are_found_by_what_they_were_given(
    spawn: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"{os.getpid()}-find"
    monkeypatch.setenv("FIND_MARKER", marker)
    child = spawn("exec sleep 60")
    wait_until(lambda: process.read_initial_variable(child.pid, "FIND_MARKER") == marker)
    assert [one.pid for one in process.processes_with_env("FIND_MARKER", marker)] == [child.pid]
    assert process.processes_with_env("FIND_MARKER", marker[:-1]) == []
    assert process.read_initial_variable(child.pid, "FIND_MARK") is None
    words = {one.pid: words for one, words in process.command_lines()}
    assert words[child.pid] == ["sleep", "60"]
    assert os.getpid() not in words
    assert process.parent_of(child.pid) == os.getpid()


def test_a_handle_knows_when_and_how_its_process_ended(
    spawn: Callable[[str], subprocess.Popen[str]],
) -> None:
    child = spawn("exec sleep 60")
    identity = process.identify_process(child.pid)
    assert identity is not None
    handle = ProcessHandle(identity)
    assert handle.is_alive()
    assert handle.wait_status() is None
    assert handle.signal(signal.SIGTERM)
    wait_until(lambda: not handle.is_alive())
    assert handle.wait_status() == signal.SIGTERM, "not reaped yet, but gone"
    child.wait()
    assert not handle.signal(signal.SIGTERM)
    handle.close()


def test_a_pid_that_was_given_to_another_is_not_touched(
    spawn: Callable[[str], subprocess.Popen[str]],
) -> None:
    child = spawn("exec sleep 60")
    ticks = process.start_ticks(child.pid)
    assert ticks is not None
    stale = ProcessHandle(ProcessId(child.pid, ticks - 1))
    assert not stale.is_alive()
    assert not stale.signal(signal.SIGKILL)
    process.kill_processes([ProcessId(child.pid, ticks - 1)])
    assert process.is_alive(ProcessId(child.pid, ticks))


def test_without_pidfd_the_start_time_has_to_do(
    spawn: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    child = spawn("exec sleep 60")
    identity = process.identify_process(child.pid)
    assert identity is not None
    handle = ProcessHandle(identity)
    assert handle.fileno() is None
    assert not ProcessHandle(ProcessId(child.pid, identity.start_ticks - 1)).signal(signal.SIGKILL)
    assert handle.signal(signal.SIGKILL)
    wait_until(lambda: not handle.is_alive())
    assert handle.wait_status() == signal.SIGKILL


def test_who_is_gone_has_no_identity() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    assert process.identify_process(child.pid) is None
    assert process.start_ticks(child.pid) is None


PARENT = """
import os, signal, sys, time
from hpcrun import process
process.become_subreaper()
middle = os.fork()
if middle == 0:
    leaf = os.fork()
    if leaf == 0:
        if sys.argv[1] == "bound":
            process.die_with_parent(signal.SIGKILL)
        print("up", flush=True)
        time.sleep(60)
    time.sleep(60)
sys.stdin.readline()
os.kill(middle, signal.SIGKILL)
os.waitpid(middle, 0)
if sys.argv[1] == "bound":
    pid, status = os.wait()
    print("leaf", status, flush=True)
else:
    print("adopted", len(process.descendants(os.getpid())), flush=True)
    process.kill_tree(os.getpid())
    process.reap_orphans()
    try:
        os.wait()
    except ChildProcessError:
        print("reaped", flush=True)
"""


@pytest.mark.parametrize(("kind", "said"), [("bound", "leaf 9\n"), ("free", "adopted 1\nreaped\n")])
def test_parents_and_their_deaths(kind: str, said: str) -> None:
    root = str(Path(process.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        out, _ = parent.communicate("go\n", timeout=20)
    assert out == said


def told(words: list[str], document: str = "", timeout_s: float = 20) -> process.CompletedCommand:
    return process.run_with_input(words, document, timeout_s=timeout_s, env=os.environ)


def test_a_document_is_told_and_the_answer_is_bounded() -> None:
    done = told([sys.executable, "-c", "import sys; sys.stdout.write(sys.stdin.read())"], "x" * 300_000)
    assert (done.exit_code, done.stdout) == (0, "x" * 65536)
    # One that does not listen, and one that closes its output and goes on.
    assert told(["true"], "x" * 300_000).exit_code == 0
    assert told(["sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 3"]).exit_code == 3
    assert told(["sh", "-c", "echo no >&2"]).stdout == "no\n"


@pytest.mark.parametrize("script", ["echo $$; sleep 60", TREE, "yes"])
def test_who_does_not_end_in_time_is_ended_with_all_below(script: str) -> None:
    with pytest.raises(SiteError, match=r"^`sh` did not end in 0\.5 s and was ended; last output: "):
        told(["sh", "-c", script, "secret"], timeout_s=0.5)
    assert process.descendants(os.getpid()) == []


def test_what_is_left_in_the_background_goes_too() -> None:
    done = told(["sh", "-c", "sleep 60 & echo $!"])
    pid = int(done.stdout)
    wait_until(
        lambda: (
            not process.start_ticks(pid)
            or not process.is_alive(ProcessId(pid, process.start_ticks(pid) or 0))
        )
    )
    with pytest.raises(SiteError, match="no-such-program: cannot be run: No such file"):
        told(["no-such-program"])


def test_nothing_is_ended_below_a_pid_that_another_process_has_now(
    spawn: Callable[[str], subprocess.Popen[str]],
) -> None:
    """The pid was reaped and given away: the tree below it is somebody else's."""
    shell = spawn(TREE)
    assert shell.stdout is not None
    sleepers = [int(shell.stdout.readline()), int(shell.stdout.readline())]
    now = process.identify_process(shell.pid)
    assert now is not None
    before = process.ProcessId(now.pid, now.start_ticks - 1)
    assert process.descendants(before) == []
    assert process.kill_tree(before) == []
    handle = process.ProcessHandle(before)
    assert not handle.signal(signal.SIGKILL)
    handle.close()
    # One whose end was noticed is not signalled either, whoever has its pid.
    ended = spawn("exit 3")
    ended.wait()
    ended.pid = shell.pid
    process.kill_child(ended)
    assert all(process.state(one) not in (None, "Z") for one in (shell.pid, *sleepers))
    process.kill_child(process.protect_from_reaper(shell))
    shell.wait()
    wait_until(lambda: all(process.state(one) in (None, "Z") for one in sleepers))


def test_a_child_that_somebody_waits_for_is_not_reaped_as_an_orphan(
    spawn: Callable[[str], subprocess.Popen[str]],
) -> None:
    held = process.protect_from_reaper(spawn("exit 7"))
    wait_until(lambda: process.state(held.pid) == "Z")
    process.reap_orphans()
    assert held.wait() == 7


def test_a_process_is_held_also_where_descriptors_have_run_out(
    spawn: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    child = spawn("exec sleep 60")
    known = process.identify_process(child.pid)
    assert known is not None
    monkeypatch.setattr(os, "pidfd_open", none_left)
    process.kill_processes([known])
    assert child.wait() == -signal.SIGKILL
