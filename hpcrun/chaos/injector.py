"""What a rehearsal does on a node: it finds processes of one run, proves that they are, and strikes them.

It is the internal verb `_chaos`: it says on standard output, a JSON object a line, when it strikes and when
it has undone that. What lasts is undone as soon as its standard input ends: whoever has started it is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.chaos.disk_filler import DiskFiller
from hpcrun.errors import HpcrunError, UsageError
from hpcrun.process import ProcessHandle, ProcessId
from hpcrun.specs.records import read_json
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.units import format_bytes

_PERIOD_S = 0.002
"""How often slowed ranks are stopped: whatever takes a millisecond on a node that is well feels its share."""
_LOOK_S = 2.0
_ROUNDS = 5


class TargetGoneError(UsageError):
    """The victim is not there any more, or not yet."""


def execute_injection(run: RunDir, order: Mapping[str, Any]) -> int:
    """Carry out one order; a refusal is said on standard output as well, and is the exit code."""
    # Slurm's signals to the steps of a job are meant for the ranks; an end has to undo what was done.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        _INJECTIONS[order["do"]](run, order)
    except HpcrunError as error:
        _report("refused", str(error), exit_code=error.exit_code, is_gone=isinstance(error, TargetGoneError))
        return error.exit_code
    except OSError as error:
        _report("refused", f"{error.filename or 'strike'}: {error.strerror or error}", exit_code=3)
        return 3
    return 0


def _kill_rank(run: RunDir, order: Mapping[str, Any]) -> None:
    number = signal.Signals(order["signal"])
    with _open_handles(_rank_process_tree(run, order, order["rank"])) as handles:
        _report("injected", f"{number.name} to rank {order['rank']}", handles)
        _signal_all(handles, number)


def _stop_rank(run: RunDir, order: Mapping[str, Any]) -> None:
    rank, lasts_s = order["rank"], order["for_s"]
    with _open_handles(_rank_process_tree(run, order, rank)) as handles:
        _report("injected", f"SIGSTOP to rank {rank}", handles)
        try:
            _stop_processes(handles, lambda: _rank_process_tree(run, order, rank))
            if lasts_s is not None:
                _wait(lasts_s)
        finally:
            if lasts_s is not None:
                _resume_ranks(run, order, [rank])
        if lasts_s is not None:
            _report("removed", f"SIGCONT to rank {rank}")


def _resume_rank(run: RunDir, order: Mapping[str, Any]) -> None:
    with _open_handles(_rank_process_tree(run, order, order["rank"])) as handles:
        _report("injected", f"SIGCONT to rank {order['rank']}", handles)
        _signal_all(handles, signal.SIGCONT)


def _slow_node(run: RunDir, order: Mapping[str, Any]) -> None:
    """Stop the ranks of the node for a share of every short period."""
    share, ranks = order["share"], order["ranks"]
    found = _rank_process_trees(run, order, ranks)
    if not found:
        raise TargetGoneError(f"no rank of {run.id} runs on {_local_node()} any more")
    _report("injected", f"takes {share:.0%} of the time from {_format_ranks(ranks)}", found)
    end = time.monotonic() + order["for_s"]
    try:
        while found and time.monotonic() < end:
            with _open_handles(found) as handles:
                if _pause_for_share(share, handles, min(end, time.monotonic() + _LOOK_S)):
                    break
            found = _rank_process_trees(run, order, ranks)
    finally:
        _resume_ranks(run, order, ranks)
    _report("removed", f"leaves {_format_ranks(ranks)} alone")


def _pause_for_share(share: float, handles: Sequence[ProcessHandle], until: float) -> bool:
    """Take this share of the time from them; True when our input has ended.

    We may come late to either end of a slice: what was taken too much or too little is made up for.
    """
    begin, taken = time.monotonic(), 0.0
    while (now := time.monotonic()) < until:
        owed = share * (now - begin) - taken
        if _wait(max(0.0, (1 - share) * _PERIOD_S - owed / share)):
            return True
        stopped = time.monotonic()
        _signal_all(handles, signal.SIGSTOP)
        is_left = _wait(max(0.0, share * (stopped - begin) - taken) / (1 - share))
        _signal_all(handles, signal.SIGCONT)
        taken += time.monotonic() - stopped
        if is_left:
            return True
    return False


def _kill_agent(run: RunDir, order: Mapping[str, Any]) -> None:
    agents = _find_agents(run, order)
    if not agents:
        raise TargetGoneError(f"no agent of {run.id} runs on {_local_node()} any more")
    _report("injected", "SIGKILL to the agent", agents)
    process.kill_processes(agents)


def _kill_node(run: RunDir, order: Mapping[str, Any]) -> None:
    """All of the run on this node at once, the agent first: nobody is to tell how the others died."""
    found = [*_find_guardian(order), *_find_supervisor(order), *_find_agents(run, order)]
    found += [one for top in list(found) for one in process.descendants(top)]
    found += process.processes_with_env(RUN_ID_VARIABLE, run.run_id)
    ours = {os.getpid(), *_ancestors()}
    all_of_it = [one for one in dict.fromkeys(found) if one.pid not in ours and _is_own_process(one)]
    if not all_of_it:
        raise TargetGoneError(f"nothing of {run.id} runs on {_local_node()} any more")
    _report("injected", f"SIGKILL to all of the run on {_local_node()}", all_of_it)
    process.kill_processes(all_of_it)


def _kill_supervisor(run: RunDir, order: Mapping[str, Any]) -> None:
    found = _find_supervisor(order)
    if not found:
        raise TargetGoneError(f"the supervisor of {run.id} does not run on {_local_node()} any more")
    _report("injected", "SIGKILL to the supervisor", found)
    process.kill_processes(found)


def _fill_disk(run: RunDir, order: Mapping[str, Any]) -> None:
    where = Path(order["where"])
    with DiskFiller(where, run.path, force=order["force"]) as filler:
        _report("injected", f"fills {where} ({filler.told})")
        taken = filler.fill(order["leave_mib"] * 2**20, lambda: _wait(0))
        _report("filled", f"took {format_bytes(taken)} of {where}", taken_bytes=taken)
        _wait(order["for_s"])
    _report("removed", f"gives {where} back")


_INJECTIONS: dict[str, Callable[[RunDir, Mapping[str, Any]], None]] = {
    "kill-rank": _kill_rank,
    "stop-rank": _stop_rank,
    "resume-rank": _resume_rank,
    "kill-agent": _kill_agent,
    "vanish": _kill_node,
    "slow": _slow_node,
    "fill-disk": _fill_disk,
    "kill-supervisor": _kill_supervisor,
}


def _rank_process_tree(run: RunDir, order: Mapping[str, Any], rank: int) -> list[ProcessId]:
    """The processes of a rank, parents first; UsageError where it is gone, or its pid is not the run's.

    Of a command it is the program, and not the script before it that tells how the program has ended.
    """
    attempt = run.attempt(order["attempt"])
    record = read_json(attempt.rank_record(rank)) or {}
    if record.get("node") != _local_node():
        raise TargetGoneError(f"rank {rank} of {run.id} has not come up on {_local_node()}")
    top = ProcessId(record["pid"], record["start_ticks"])
    if not process.is_alive(top):
        raise TargetGoneError(f"rank {rank} of {run.id} has ended already (pid {top.pid})")
    if not _belongs_to_attempt(attempt, top):
        raise UsageError(
            f"rank {rank} of {run.id}: pid {top.pid} does not carry the run's mark in its environment (it may"
            " have overwritten it, as with setproctitle); it is left alone"
        )
    below = [one for one in process.descendants(top) if _belongs_to_attempt(attempt, one)]
    if not attempt.rank_script.exists():
        return [top, *below]
    if not below:
        raise TargetGoneError(f"rank {rank} of {run.id}: its program has ended already")
    return below


def _rank_process_trees(run: RunDir, order: Mapping[str, Any], ranks: Sequence[int]) -> list[ProcessId]:
    """The same of several ranks, without those that have ended."""
    found: list[ProcessId] = []
    for rank in ranks:
        with suppress(UsageError):
            found += _rank_process_tree(run, order, rank)
    return found


def _belongs_to_attempt(attempt: Attempt, one: ProcessId) -> bool:
    marks = process.read_initial_environment(one.pid)
    wanted = (attempt.run.run_id, str(attempt.number))
    return _is_own_process(one) and (marks.get(RUN_ID_VARIABLE), marks.get(ATTEMPT_VARIABLE)) == wanted


def _is_own_process(one: ProcessId) -> bool:
    """Whether it is this user's, and still itself."""
    with suppress(OSError):
        return Path(f"/proc/{one.pid}").stat().st_uid == os.getuid() and process.is_alive(one)
    return False


def _find_agents(run: RunDir, order: Mapping[str, Any]) -> list[ProcessId]:
    """The agent of this node, known by its command line and its job."""
    found = []
    for one, words in process.command_lines():
        verb = next((place for place, word in enumerate(words) if word == "_agent"), 0)
        if verb >= 2 and words[verb - 2 : verb] == ["-m", "hpcrun"] and words[verb + 1 :]:
            with suppress(OSError):
                is_it = os.path.samefile(words[verb + 1], run.path)  # noqa: PTH121 - a word may be any text
                if is_it and _is_own_process(one) and _belongs_to_job(one, order):
                    found.append(one)
    return found


def _find_supervisor(order: Mapping[str, Any]) -> list[ProcessId]:
    """The supervisor, where it is a process of this node."""
    told = order["supervisor"]
    one = ProcessId(told["pid"], told["start_ticks"])
    return (
        [one]
        if told["host"] == _local_node() and _is_own_process(one) and _belongs_to_job(one, order)
        else []
    )


def _find_guardian(order: Mapping[str, Any]) -> list[ProcessId]:
    """In a batch job, the process that would have another supervisor come back."""
    known = dict(process.command_lines())
    parents = [process.identify_process(process.parent_of(one.pid) or 0) for one in _find_supervisor(order)]
    return [one for one in parents if one is not None and "_task" in known.get(one, ())]


def _belongs_to_job(one: ProcessId, order: Mapping[str, Any]) -> bool:
    job = order["supervisor"].get("slurm_job")
    return job is None or process.read_initial_variable(one.pid, "SLURM_JOB_ID") == str(job)


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 1:
        yield pid
        pid = process.parent_of(pid) or 0


@contextmanager
def _open_handles(found: Sequence[ProcessId]) -> Iterator[list[ProcessHandle]]:
    """A hold on each of them inside the block: a pid may be given to another process at any time."""
    handles = [ProcessHandle(one) for one in found]
    try:
        yield handles
    finally:
        for handle in handles:
            handle.close()


def _signal_all(handles: Sequence[ProcessHandle], number: int) -> None:
    for handle in handles:
        handle.signal(number)


def _stop_processes(handles: Sequence[ProcessHandle], look: Callable[[], list[ProcessId]]) -> None:
    """Stop them, and what they have started meanwhile."""
    _signal_all(handles, signal.SIGSTOP)
    known = {handle.process for handle in handles}
    for _ in range(_ROUNDS):
        with suppress(UsageError):
            more = [one for one in look() if one not in known]
            if not more:
                return
            known.update(more)
            with _open_handles(more) as new:
                _signal_all(new, signal.SIGSTOP)


def _resume_ranks(run: RunDir, order: Mapping[str, Any], ranks: Sequence[int]) -> None:
    with _open_handles(_rank_process_trees(run, order, ranks)) as handles:
        _signal_all(handles, signal.SIGCONT)


def _wait(seconds: float) -> bool:
    """Wait, but no longer than our input lasts; True when it has ended."""
    end = time.monotonic() + seconds
    while select.select([sys.stdin], [], [], max(0.0, end - time.monotonic()))[0]:
        if not os.read(sys.stdin.fileno(), 4096):
            return True
    return False


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _local_node() -> str:
    return os.uname().nodename


def _report(kind: str, text: str, found: Sequence[ProcessHandle | ProcessId] = (), **more: Any) -> None:
    pids = [one.process.pid if isinstance(one, ProcessHandle) else one.pid for one in found]
    now = {"time": time.time(), "monotonic": time.monotonic(), "node": _local_node()}
    line = json.dumps({"kind": kind, "text": text, **now, "pids": pids, **more})
    # Whoever has asked may be gone; what was done is undone all the same.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())
