"""Injects a fault into a running run of the user: finds the target, reaches its node, writes the record."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hpcrun import process
from hpcrun.chaos.faults import InjectedFault, InjectionOrder, InjectionReport, SupervisorProcess
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.hostlist import fold_hosts
from hpcrun.launcher_world import without_rank_variables
from hpcrun.local_identity import owner_name, user_name
from hpcrun.process import environment_with_package
from hpcrun.runs.run_lock import read_supervisor_record
from hpcrun.runs.run_state import read_run_states
from hpcrun.slurm.allocation import node_step, step_environment
from hpcrun.specs.cluster import load_cluster
from hpcrun.specs.events.event import EventStamp
from hpcrun.specs.events.log import EventRecord
from hpcrun.specs.events.supervisor import ChaosEvent
from hpcrun.specs.load import load_run_job
from hpcrun.specs.placement import Placement, read_placement
from hpcrun.specs.records import JsonLineWriter, read_json
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.batch_script import job_python
from hpcrun.typed_json import WrongValue, dump_typed, parse_typed

_ANSWER_TIMEOUT_S = 60.0
_UNDO_TIMEOUT_S = 10.0


class TargetNotReadyError(UsageError):
    """The target is not there; it may be in a moment, where another attempt is about to start."""


@dataclass(frozen=True)
class InjectionTarget:
    """A fault and its target."""

    run: RunDir
    fault: InjectedFault
    attempt: int
    node: str
    ranks: tuple[int, ...]
    """The ranks on the node that are hit; empty if no rank is."""
    supervisor: SupervisorProcess

    @property
    def is_here(self) -> bool:
        """Whether the target is on this host."""
        return short_host_name(self.node) == short_host_name(os.uname().nodename)

    def __str__(self) -> str:
        """What the fault is about to do."""
        fault, where = self.fault, f"on {self.node}"
        lasts = f" for {fault.for_s:g} s" if fault.for_s is not None else ""
        words = {
            "kill-rank": f"send {signal.Signals(fault.signal).name} to rank {fault.rank} {where}",
            "stop-rank": f"stop rank {fault.rank} {where}{lasts or ' until resume-rank'}",
            "resume-rank": f"let rank {fault.rank} {where} go on",
            "kill-agent": f"kill the agent {where}",
            "vanish": f"kill all of the run {where}, its agent first",
            "slow": f"take {fault.share:.0%} of the time from the {len(self.ranks)} ranks {where}{lasts}",
            "fill-disk": f"fill {fault.where} {where} up to the last {fault.leave_mib} MiB{lasts}",
            "kill-supervisor": f"kill the supervisor {where}",
        }
        return words[fault.do]

    def command(self) -> list[str]:
        """The command that injects the fault: a child process on this host, a step of the job elsewhere."""
        order = InjectionOrder(self.fault, self.attempt, self.ranks, self.supervisor)
        words = ["-P", "-m", "hpcrun", "_chaos", str(self.run.path), json.dumps(dump_typed(order))]
        if self.is_here:
            return [sys.executable, *words]
        step = node_step(self.node, f"--jobid={self.supervisor.slurm_job}", "--unbuffered")
        return [*step, _node_python(self.run), *words]


def require_running(run: RunDir) -> None:
    """UsageError unless this is a running run of this user; SiteError if its state is not known."""
    if run.sweep.is_file():
        raise UsageError(f"{run.id} is a sweep: name one of its elements, such as {run.id}/0")
    owner = run.path.stat().st_uid
    if owner != os.getuid():
        raise UsageError(
            f"{run.id} belongs to {owner_name(owner)}; faults are injected into your own runs only"
        )
    (state,) = read_run_states([run])
    why = f" ({state.message})" if state.message else ""
    if state.state == "unknown":
        raise SiteError(f"{run.id}: nothing was done: {state.message}")
    if state.state != "running":
        raise UsageError(f"{run.id} is {state.state}{why}; there is nothing to inject it into")


def find_target(run: RunDir, fault: InjectedFault) -> InjectionTarget:
    """Find the target of a fault in the newest attempt; UsageError if there is no such target."""
    record, attempts = read_supervisor_record(run), run.attempts()
    placed = read_placement(attempts[-1].placement) if attempts else None
    if placed is None or not record:
        raise TargetNotReadyError(
            f"{run.id} is about to start; there is no target yet; try again in a moment"
        )
    supervisor = parse_typed(SupervisorProcess, record, allow_extra=True)
    placement, number = placed[0], attempts[-1].number
    if fault.kind.at == "run":
        return InjectionTarget(run, fault, number, short_host_name(supervisor.host), (), supervisor)
    chosen = _choose_target(run, fault, placement, supervisor)
    if fault.kind.at == "rank":
        assert chosen.rank is not None
        _require_rank(run, chosen.rank, placement)
        if read_json(attempts[-1].rank_record(chosen.rank)) is None:
            raise TargetNotReadyError(
                f"rank {chosen.rank} of attempt {number} of {run.id} has not come up yet"
            )
        return InjectionTarget(run, chosen, number, placement.ranks[chosen.rank], (chosen.rank,), supervisor)
    assert chosen.node is not None
    _require_node(run, chosen, placement, supervisor)
    return InjectionTarget(run, chosen, number, chosen.node, tuple(placement.on(chosen.node)), supervisor)


def _choose_target(
    run: RunDir, fault: InjectedFault, placement: Placement, supervisor: SupervisorProcess
) -> InjectedFault:
    """The fault with a target; a random one is the same for the same seed, attempt and placement."""
    if not fault.is_random:
        return fault
    seed = random.SystemRandom().randrange(10**6) if fault.seed is None else fault.seed
    generator = random.Random(seed)
    if fault.kind.at == "rank":
        return replace(fault, rank=generator.randrange(len(placement.ranks)), seed=seed)
    nodes = _candidate_nodes(fault, placement)
    spared = short_host_name(supervisor.host) if fault.do == "vanish" and not fault.force else None
    among = [node for node in nodes if short_host_name(node) != spared]
    if not among:
        raise UsageError(f"{run.id}: its only node also has its supervisor; --force takes it nevertheless")
    return replace(fault, node=generator.choice(among), seed=seed)


def _candidate_nodes(fault: InjectedFault, placement: Placement) -> list[str]:
    spares = () if fault.do == "slow" else placement.spares
    return [*placement.nodes, *spares]


def _require_rank(run: RunDir, rank: int, placement: Placement) -> None:
    if rank >= len(placement.ranks):
        last = len(placement.ranks) - 1
        raise UsageError(f"rank {rank}: {run.id} has no such rank; there are: {'0 to ' * (last > 0)}{last}")


def _require_node(
    run: RunDir, fault: InjectedFault, placement: Placement, supervisor: SupervisorProcess
) -> None:
    nodes, host = _candidate_nodes(fault, placement), short_host_name(supervisor.host)
    if fault.node not in nodes:
        spares = f", and as spares {fold_hosts(placement.spares)}" if placement.spares else ""
        raise UsageError(
            f"node {fault.node}: is not a node of {run.id}; its ranks are on"
            f" {fold_hosts(placement.nodes)}{spares}"
        )
    if fault.do == "kill-agent" and (
        supervisor.slurm_job is None or [*map(short_host_name, nodes)] == [host]
    ):
        raise UsageError(f"{run.id} has no agents: its supervisor is on the one node of its ranks, {host}")
    if fault.do == "vanish" and short_host_name(fault.node) == host and not fault.force:
        others = [node for node in nodes if short_host_name(node) != host]
        instead = f"name another ({fold_hosts(others)}), or " if others else ""
        raise UsageError(
            f"node {fault.node}: also has the supervisor of {run.id}, without which the run ends;"
            f" {instead}use --force"
        )


class Injection:
    """A fault that is being injected; `close` undoes what still lasts."""

    def __init__(self, target: InjectionTarget) -> None:
        self._target = target
        self._unread, self._has_ended = b"", False
        self._reports: list[InjectionReport] = []
        environ = environment_with_package(step_environment(without_rank_variables(os.environ)))
        for name in (RUN_ID_VARIABLE, RUN_DIR_VARIABLE, ATTEMPT_VARIABLE):
            environ.pop(name, None)
        words = target.command()
        try:
            self._child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            raise SiteError(f"{words[0]}: cannot be run: {error.strerror}; is it on PATH?") from None
        try:
            self.struck = self._await()
        except BaseException:
            self.close()
            raise

    def _await(self) -> dict[str, Any]:
        """The record of the injection, at the moment when it happens; HpcrunError if it was refused."""
        end, node = time.monotonic() + _ANSWER_TIMEOUT_S, self._target.node
        while not self._reports and not self._has_ended:
            self._read(0.2)
            if time.monotonic() > end:
                raise SiteError(
                    f"{node} gave no answer in {_ANSWER_TIMEOUT_S:g} s; nothing is known to be done"
                )
        if not self._reports:
            words = self._last_words()
            raise SiteError(f"{node} could not be reached{f': {words}' if words else ''}")
        first = self._reports.pop(0)
        if first.kind == "refused":
            words = f"{node}: {first.text}"
            if first.is_gone:
                raise TargetNotReadyError(words)
            raise UsageError(words) if first.exit_code == UsageError.exit_code else SiteError(words)
        return self._record(first)

    def news(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """The records of what was reported since the last call."""
        self._read(timeout_s)
        reports, self._reports = self._reports, []
        return [self._record(report) for report in reports]

    @property
    def is_over(self) -> bool:
        """Whether all has been done, and undone where it was to last for a time."""
        return self._has_ended and not self._reports

    def _read(self, timeout_s: float) -> None:
        assert self._child.stdout is not None
        if self._has_ended:
            return
        if select.select([self._child.stdout], [], [], timeout_s)[0]:
            data = os.read(self._child.stdout.fileno(), 65536)
            self._has_ended = not data
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                # The output of a site's prolog comes through the same pipe.
                with suppress(ValueError, WrongValue):
                    self._reports.append(parse_typed(InjectionReport, json.loads(line)))

    def _last_words(self) -> str:
        assert self._child.stderr is not None
        os.set_blocking(self._child.stderr.fileno(), False)
        printed = (self._child.stderr.read() or b"").decode(errors="replace")
        return next((line.strip()[:300] for line in reversed(printed.splitlines()) if line.strip()), "")

    def _record(self, report: InjectionReport) -> dict[str, Any]:
        """Write one line of chaos.jsonl; time and monotonic are the node's, at the moment itself."""
        target, fault = self._target, self._target.fault
        stamp = EventStamp(report.time, report.monotonic, target.attempt, os.uname().nodename)
        # What fails after it began is over too.
        phase = "removed" if report.kind == "refused" else report.kind
        event = ChaosEvent(
            phase, fault.do, fault.rank, target.node, report.text, report.pids, fault.seed, user_name()
        )
        record = EventRecord(stamp, event).as_json()
        writer = JsonLineWriter(target.run.chaos)
        writer.write(record)
        writer.close()
        return record

    def close(self) -> None:
        """End what lasts, which undoes it, and close the pipes."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        end = time.monotonic() + _UNDO_TIMEOUT_S
        while not self._has_ended and time.monotonic() < end:
            self.news(0.1)
        try:
            self._child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill_child(self._child)
            self._child.wait()
        self._child.stdout.close()
        self._child.stderr.close()


def inject_fault(target: InjectionTarget, write: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Inject a fault and wait until it is undone; return its records, each of which is written at once."""
    injection = Injection(target)
    records = [injection.struck]
    write(injection.struck)
    try:
        while not injection.is_over:
            for record in injection.news(0.5):
                records.append(record)
                write(record)
    finally:
        injection.close()
    return records


def short_host_name(name: str) -> str:
    """A host's name without its domain: Slurm and the host itself may differ in that."""
    return name.partition(".")[0]


def _node_python(run: RunDir) -> str:
    """The Python that the nodes have; the one that runs this where the run's records do not say."""
    owner = run.sweep_of_element or run
    with suppress(HpcrunError):
        cluster = load_cluster(owner.cluster) if owner.cluster.exists() else None
        return job_python(load_run_job(run).spec, cluster)
    return sys.executable
