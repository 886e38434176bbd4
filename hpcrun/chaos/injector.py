"""Injects a fault on a node: finds the processes of one run, proves that they are its own, and acts on them.

This is the internal verb `_chaos`. It reports on standard output, a JSON object a line, when the fault is
injected and when it is removed. A lasting fault is removed as soon as standard input ends: the sender is gone
then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from hpcrun import process
from hpcrun.chaos.disk_filler import DiskFiller
from hpcrun.chaos.faults import InjectionOrder, InjectionReport
from hpcrun.errors import EXIT_SITE, HpcrunError, UsageError
from hpcrun.process import ProcessHandle, ProcessId
from hpcrun.specs.records import read_json
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import dump_typed, parse_typed
from hpcrun.units import format_bytes

_PERIOD_S = 0.002
"""How often slowed ranks are stopped: work of a millisecond must feel its share too."""
_LOOK_S = 2.0
_ROUNDS = 5
_NODE = os.uname().nodename


class TargetGoneError(UsageError):
    """The target is not there any more, or not yet."""


def execute_injection(run: RunDir, order: str) -> int:
    """Carry out one order, an InjectionOrder in JSON, and return the exit code; a refusal is reported too."""
    # Slurm's signals to the steps of a job are meant for the ranks; SIGTERM and the like must remove the
    # fault.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        injector = _Injector(run, parse_typed(InjectionOrder, json.loads(order)))
        _INJECTIONS[injector.fault.do](injector)
    except HpcrunError as error:
        _report("refused", str(error), exit_code=error.exit_code, is_gone=isinstance(error, TargetGoneError))
        return error.exit_code
    except OSError as error:
        text = f"{error.filename or 'strike'}: {error.strerror or error}"
        _report("refused", text, exit_code=EXIT_SITE)
        return EXIT_SITE
    return 0


class _Injector:
    """One fault on this node: what it does, and how its processes are found."""

    def __init__(self, run: RunDir, order: InjectionOrder) -> None:
        self.fault = order.fault
        self._run, self._order, self._attempt = run, order, run.attempt(order.attempt)

    def kill_rank(self) -> None:
        """Send the fault's signal to a rank."""
        self._signal_rank(signal.Signals(self.fault.signal))

    def resume_rank(self) -> None:
        """Let a stopped rank go on."""
        self._signal_rank(signal.SIGCONT)

    def _signal_rank(self, number: signal.Signals) -> None:
        with _open_handles(self._rank_processes(self._order.ranks[0])) as handles:
            _report("injected", f"{number.name} to rank {self._order.ranks[0]}", _pids(handles))
            _signal_all(handles, number)

    def stop_rank(self) -> None:
        """Stop a rank, for a time or until it is resumed."""
        rank, lasts_s = self._order.ranks[0], self.fault.for_s
        with _open_handles(self._rank_processes(rank)) as handles:
            _report("injected", f"SIGSTOP to rank {rank}", _pids(handles))
            try:
                _stop_processes(handles, lambda: self._rank_processes(rank))
                if lasts_s is not None:
                    _wait(lasts_s)
            finally:
                if lasts_s is not None:
                    self._resume_ranks()
            if lasts_s is not None:
                _report("removed", f"SIGCONT to rank {rank}")

    def slow_node(self) -> None:
        """Stop the ranks of the node for a share of every short period."""
        share, ranks = self.fault.share, self._order.ranks
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        targets = self._processes_of_ranks()
        if not targets:
            raise TargetGoneError(f"no rank of {self._run.id} runs on {_NODE} any more")
        _report("injected", f"takes {share:.0%} of the time from {names}", [target.pid for target in targets])
        end = time.monotonic() + (self.fault.for_s or 0.0)
        try:
            while targets and time.monotonic() < end:
                with _open_handles(targets) as handles:
                    if _pause_for_share(share, handles, min(end, time.monotonic() + _LOOK_S)):
                        break
                targets = self._processes_of_ranks()
        finally:
            self._resume_ranks()
        _report("removed", f"leaves {names} alone")

    def kill_agent(self) -> None:
        """Kill the agent of this node."""
        self._kill(self._agents(), "the agent", f"no agent of {self._run.id} runs")

    def kill_supervisor(self) -> None:
        """Kill the supervisor."""
        self._kill(self._supervisors(), "the supervisor", f"the supervisor of {self._run.id} does not run")

    def kill_node(self) -> None:
        """Kill all of the run on this node at once, the agent first: nothing may report how the rest died."""
        candidates = [*self._guardians(), *self._supervisors(), *self._agents()]
        candidates += [child for top in list(candidates) for child in process.descendants(top)]
        candidates += process.processes_with_env(RUN_ID_VARIABLE, self._run.run_id)
        ours = {os.getpid(), *process.ancestors()}
        targets = [
            candidate
            for candidate in dict.fromkeys(candidates)
            if candidate.pid not in ours and _is_own_process(candidate)
        ]
        self._kill(targets, f"all of the run on {_NODE}", f"nothing of {self._run.id} runs")

    def _kill(self, targets: Sequence[ProcessId], what: str, absent: str) -> None:
        if not targets:
            raise TargetGoneError(f"{absent} on {_NODE} any more")
        _report("injected", f"SIGKILL to {what}", [target.pid for target in targets])
        process.kill_processes(targets)

    def fill_disk(self) -> None:
        """Fill a file system of the node for a time."""
        where = Path(self.fault.where)
        with DiskFiller(where, self._run.path, force=self.fault.force) as filler:
            _report("injected", f"fills {where} ({filler.description})")
            taken = filler.fill(self.fault.leave_mib * 2**20, lambda: _wait(0))
            _report("filled", f"took {format_bytes(taken)} of {where}")
            _wait(self.fault.for_s or 0.0)
        _report("removed", f"gives {where} back")

    def _rank_processes(self, rank: int) -> list[ProcessId]:
        """Return the processes of a rank, parents first; UsageError if they are gone or not the run's.

        For a command these are the program, without the script around it that reports how the program ended.
        """
        record, who = read_json(self._attempt.rank_record(rank)) or {}, f"rank {rank} of {self._run.id}"
        if record.get("node") != _NODE:
            raise TargetGoneError(f"{who} has not come up on {_NODE}")
        top = ProcessId(record["pid"], record["start_ticks"])
        if not process.is_alive(top):
            raise TargetGoneError(f"{who} has ended already (pid {top.pid})")
        if not self._belongs_to_attempt(top):
            raise UsageError(
                f"{who}: pid {top.pid} does not carry the run's mark in its environment (it may have"
                " overwritten it, as with setproctitle); it is left alone"
            )
        below = [child for child in process.descendants(top) if self._belongs_to_attempt(child)]
        if not self._attempt.rank_script.exists():
            return [top, *below]
        if not below:
            raise TargetGoneError(f"{who}: its program has ended already")
        return below

    def _processes_of_ranks(self) -> list[ProcessId]:
        """The processes of all ranks of the order that still run."""
        processes: list[ProcessId] = []
        for rank in self._order.ranks:
            with suppress(UsageError):
                processes += self._rank_processes(rank)
        return processes

    def _resume_ranks(self) -> None:
        with _open_handles(self._processes_of_ranks()) as handles:
            _signal_all(handles, signal.SIGCONT)

    def _belongs_to_attempt(self, candidate: ProcessId) -> bool:
        marks = process.read_initial_environment(candidate.pid)
        expected = (self._run.run_id, str(self._attempt.number))
        return (
            _is_own_process(candidate)
            and (marks.get(RUN_ID_VARIABLE), marks.get(ATTEMPT_VARIABLE)) == expected
        )

    def _agents(self) -> list[ProcessId]:
        """The agent of this node, known by its command line and its job."""
        agents = []
        for candidate, words in process.command_lines():
            verb = next((place for place, word in enumerate(words) if word == "_agent"), 0)
            if verb >= 2 and words[verb - 2 : verb] == ["-m", "hpcrun"] and words[verb + 1 :]:
                with suppress(OSError):
                    is_ours = os.path.samefile(words[verb + 1], self._run.path)  # noqa: PTH121 - any text
                    if is_ours and self._belongs_to_job(candidate):
                        agents.append(candidate)
        return agents

    def _supervisors(self) -> list[ProcessId]:
        """The supervisor, if it is a process of this node."""
        supervisor = self._order.supervisor
        identity = ProcessId(supervisor.pid, supervisor.start_ticks)
        return [identity] if supervisor.host == _NODE and self._belongs_to_job(identity) else []

    def _guardians(self) -> list[ProcessId]:
        """In a batch job, the process that would start another supervisor."""
        commands = dict(process.command_lines())
        parents = [
            process.identify_process(process.parent_of(supervisor.pid) or 0)
            for supervisor in self._supervisors()
        ]
        return [parent for parent in parents if parent is not None and "_task" in commands.get(parent, ())]

    def _belongs_to_job(self, candidate: ProcessId) -> bool:
        job = self._order.supervisor.slurm_job
        is_of_job = job is None or process.read_initial_variable(candidate.pid, "SLURM_JOB_ID") == str(job)
        return is_of_job and _is_own_process(candidate)


_INJECTIONS: dict[str, Callable[[_Injector], None]] = {
    "kill-rank": _Injector.kill_rank,
    "stop-rank": _Injector.stop_rank,
    "resume-rank": _Injector.resume_rank,
    "kill-agent": _Injector.kill_agent,
    "vanish": _Injector.kill_node,
    "slow": _Injector.slow_node,
    "fill-disk": _Injector.fill_disk,
    "kill-supervisor": _Injector.kill_supervisor,
}


def _pause_for_share(share: float, handles: Sequence[ProcessHandle], until: float) -> bool:
    """Take this share of the time from them; return True when our input has ended.

    Either end of a slice may come late: what was taken too much or too little is made up for.
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


def _is_own_process(candidate: ProcessId) -> bool:
    """Whether it is this user's, and its pid not another process's by now."""
    with suppress(OSError):
        return Path(f"/proc/{candidate.pid}").stat().st_uid == os.getuid() and process.is_alive(candidate)
    return False


@contextmanager
def _open_handles(processes: Sequence[ProcessId]) -> Iterator[list[ProcessHandle]]:
    """Open a handle to each inside the block: a pid may be given to another process at any time."""
    handles = [ProcessHandle(identity) for identity in processes]
    try:
        yield handles
    finally:
        for handle in handles:
            handle.close()


def _signal_all(handles: Sequence[ProcessHandle], number: int) -> None:
    for handle in handles:
        handle.signal(number)


def _stop_processes(handles: Sequence[ProcessHandle], find: Callable[[], list[ProcessId]]) -> None:
    """Stop processes, and what they have started meanwhile."""
    _signal_all(handles, signal.SIGSTOP)
    stopped = {handle.process for handle in handles}
    for _ in range(_ROUNDS):
        with suppress(UsageError):
            started = [target for target in find() if target not in stopped]
            if not started:
                return
            stopped.update(started)
            with _open_handles(started) as handles:
                _signal_all(handles, signal.SIGSTOP)


def _wait(seconds: float) -> bool:
    """Wait, but no longer than our input lasts; return True when it has ended."""
    end = time.monotonic() + seconds
    while select.select([sys.stdin], [], [], max(0.0, end - time.monotonic()))[0]:
        if not os.read(sys.stdin.fileno(), 4096):
            return True
    return False


def _pids(handles: Sequence[ProcessHandle]) -> list[int]:
    return [handle.process.pid for handle in handles]


def _report(
    kind: Literal["injected", "filled", "removed", "refused"],
    text: str,
    pids: Sequence[int] = (),
    *,
    exit_code: int = 0,
    is_gone: bool = False,
) -> None:
    report = InjectionReport(kind, text, time.time(), time.monotonic(), tuple(pids), exit_code, is_gone)
    # The reader may be gone; the fault is removed all the same.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{json.dumps(dump_typed(report))}\n".encode())
