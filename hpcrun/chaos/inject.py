"""Rehearsing a fault on a running run of one's own: the victim, the way to its node, the record."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hpcrun import process
from hpcrun.chaos.faults import InjectedFault
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.hostlist import fold_hosts
from hpcrun.launcher_world import without_rank_variables
from hpcrun.local_identity import owner_name, user_name
from hpcrun.process import environment_with_package
from hpcrun.runs.run_lock import read_supervisor_record
from hpcrun.runs.run_state import read_run_states
from hpcrun.slurm.allocation import step_environment
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

_ANSWER_TIMEOUT_S = 60.0
_UNDO_TIMEOUT_S = 10.0


class TargetNotReadyError(UsageError):
    """The victim is not there; where another attempt is about to start, it may be in a moment."""


@dataclass(frozen=True)
class InjectionTarget:
    """A fault with its victim found: what is about to be done."""

    run: RunDir
    fault: InjectedFault
    attempt: int
    node: str
    ranks: tuple[int, ...]
    """Those that are struck on the node, where ranks are."""
    supervisor: dict[str, Any]

    @property
    def is_here(self) -> bool:
        """Whether the victim is on this very host."""
        return short_host_name(self.node) == short_host_name(os.uname().nodename)

    def __str__(self) -> str:
        """In words, as what one is about to do."""
        fault, where = self.fault, f"on {self.node}"
        lasts = f" for {fault.for_s:g} s" if fault.for_s is not None else ""
        words = {
            "kill-rank": f"send {fault.signal.name} to rank {fault.rank} {where}",
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
        """How the node is reached: as a child here, as a step of the job's elsewhere."""
        order = {
            **{
                name: getattr(self.fault, name) for name in ("do", "rank", "for_s", "share", "where", "force")
            },
            "signal": int(self.fault.signal),
            "leave_mib": self.fault.leave_mib,
            "attempt": self.attempt,
            "ranks": self.ranks,
            "supervisor": self.supervisor,
        }
        words = ["-P", "-m", "hpcrun", "_chaos", str(self.run.path), json.dumps(order)]
        if self.is_here:
            return [sys.executable, *words]
        job = self.supervisor["slurm_job"]
        step = ["srun", f"--jobid={job}", "--overlap", "--no-kill", "--nodes=1", "--ntasks=1"]
        step += [f"--nodelist={self.node}", "--mpi=none", "--mem=0", "--cpu-bind=none", "--unbuffered"]
        return [*step, _node_python(self.run), *words]


def require_running(run: RunDir) -> None:
    """UsageError unless this is a run of one's own that goes on now; SiteError where nobody knows."""
    if run.sweep.is_file():
        raise UsageError(f"{run.id} is a sweep: name one of its elements, such as {run.id}/0")
    owner = run.path.stat().st_uid
    if owner != os.getuid():
        raise UsageError(
            f"{run.id} belongs to {owner_name(owner)}; faults are rehearsed on runs of one's own"
        )
    (state,) = read_run_states([run])
    why = f" ({state.message})" if state.message else ""
    if state.state == "unknown":
        raise SiteError(f"{run.id}: nothing was done: {state.message}")
    if state.state != "running":
        raise UsageError(f"{run.id} is {state.state}{why}; there is nothing to rehearse on")


def find_target(run: RunDir, fault: InjectedFault) -> InjectionTarget:
    """Find the victim of a fault among what the newest attempt has; UsageError where there is no such one."""
    supervisor, attempts = read_supervisor_record(run), run.attempts()
    found = read_placement(attempts[-1].placement) if attempts else None
    if found is None or not supervisor:
        raise TargetNotReadyError(
            f"{run.id} is about to start; there is nobody to strike yet, ask again in a moment"
        )
    placement, number = found[0], attempts[-1].number
    if fault.kind.at == "run":
        return InjectionTarget(run, fault, number, short_host_name(supervisor["host"]), (), supervisor)
    chosen = _choose_victim(run, fault, placement, supervisor)
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


def _choose_victim(
    run: RunDir, fault: InjectedFault, placement: Placement, supervisor: dict[str, Any]
) -> InjectedFault:
    """The fault with a victim; one at random is the same for the same seed, attempt and placement."""
    if not fault.is_random:
        return fault
    seed = random.SystemRandom().randrange(10**6) if fault.seed is None else fault.seed
    dice = random.Random(seed)
    if fault.kind.at == "rank":
        return replace(fault, rank=dice.randrange(len(placement.ranks)), seed=seed)
    nodes = _candidate_nodes(fault, placement)
    spared = short_host_name(supervisor["host"]) if fault.do == "vanish" and not fault.force else None
    among = [node for node in nodes if short_host_name(node) != spared]
    if not among:
        raise UsageError(f"{run.id}: its one node has its supervisor as well; --force takes it all the same")
    return replace(fault, node=dice.choice(among), seed=seed)


def _candidate_nodes(fault: InjectedFault, placement: Placement) -> list[str]:
    spares = () if fault.do == "slow" else placement.spares
    return [*placement.nodes, *spares]


def _require_rank(run: RunDir, rank: int, placement: Placement) -> None:
    if rank >= len(placement.ranks):
        last = len(placement.ranks) - 1
        raise UsageError(f"rank {rank}: {run.id} has no such rank; there are: {'0 to ' * (last > 0)}{last}")


def _require_node(
    run: RunDir, fault: InjectedFault, placement: Placement, supervisor: dict[str, Any]
) -> None:
    nodes, host = _candidate_nodes(fault, placement), short_host_name(supervisor["host"])
    if fault.node not in nodes:
        spares = f", and as spares {fold_hosts(placement.spares)}" if placement.spares else ""
        raise UsageError(
            f"node {fault.node}: is none of {run.id}; its ranks stand on"
            f" {fold_hosts(placement.nodes)}{spares}"
        )
    if fault.do == "kill-agent" and (
        supervisor.get("slurm_job") is None or [*map(short_host_name, nodes)] == [host]
    ):
        raise UsageError(f"{run.id} has no agents: its supervisor is on the one node of its ranks, {host}")
    if fault.do == "vanish" and short_host_name(fault.node) == host and not fault.force:
        others = [node for node in nodes if short_host_name(node) != host]
        instead = f"name another ({fold_hosts(others)}), or " if others else ""
        raise UsageError(
            f"node {fault.node}: has the supervisor of {run.id} as well, without which the run ends;"
            f" {instead}use --force"
        )


class Injection:
    """A fault that is being rehearsed; `close` undoes what still lasts."""

    def __init__(self, aimed: InjectionTarget) -> None:
        self.aim = aimed
        self._waiting, self._over = b"", False
        self._said: list[dict[str, Any]] = []
        environ = environment_with_package(step_environment(without_rank_variables(os.environ)))
        for name in (RUN_ID_VARIABLE, RUN_DIR_VARIABLE, ATTEMPT_VARIABLE):
            environ.pop(name, None)
        words = aimed.command()
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
        """The moment of the strike, which is recorded; HpcrunError where there was none."""
        end = time.monotonic() + _ANSWER_TIMEOUT_S
        while not self._said and not self._over:
            self._read(0.2)
            if time.monotonic() > end:
                raise SiteError(
                    f"{self.aim.node} gave no answer in {_ANSWER_TIMEOUT_S:g} s; nothing is known to be done"
                )
        if not self._said:
            words = self._last_words()
            raise SiteError(f"{self.aim.node} could not be reached{f': {words}' if words else ''}")
        first = self._said.pop(0)
        if first["kind"] == "refused":
            words = f"{self.aim.node}: {first['text']}"
            if first.get("is_gone"):
                raise TargetNotReadyError(words)
            raise UsageError(words) if first["exit_code"] == UsageError.exit_code else SiteError(words)
        return self._record(first)

    def news(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """What has been said since then, which is recorded as well."""
        self._read(timeout_s)
        said, self._said = self._said, []
        return [self._record(message) for message in said]

    @property
    def is_over(self) -> bool:
        """Whether all has been done, and undone where it was to last for a time."""
        return self._over and not self._said

    def _read(self, timeout_s: float) -> None:
        assert self._child.stdout is not None
        if self._over:
            return
        if select.select([self._child.stdout], [], [], timeout_s)[0]:
            data = os.read(self._child.stdout.fileno(), 65536)
            self._over = not data
            *lines, self._waiting = (self._waiting + data).split(b"\n")
            for line in lines:
                # What a site's prolog prints comes this way too.
                with suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict) and "kind" in message:
                        self._said.append(message)

    def _last_words(self) -> str:
        assert self._child.stderr is not None
        os.set_blocking(self._child.stderr.fileno(), False)
        said = (self._child.stderr.read() or b"").decode(errors="replace")
        return next((line.strip()[:300] for line in reversed(said.splitlines()) if line.strip()), "")

    def _record(self, said: dict[str, Any]) -> dict[str, Any]:
        """One line of chaos.jsonl; time and monotonic are those of the node, at the moment itself."""
        fault, aimed = self.aim.fault, self.aim
        stamp = EventStamp(said["time"], said["monotonic"], aimed.attempt, os.uname().nodename)
        event = ChaosEvent(
            said["kind"],
            fault.do,
            fault.rank,
            aimed.node,
            said["text"],
            tuple(said["pids"]),
            fault.seed,
            user_name(),
        )
        record = EventRecord(stamp, event).as_json()
        writer = JsonLineWriter(aimed.run.chaos)
        writer.write(record)
        writer.close()
        return record

    def close(self) -> None:
        """End what lasts, which undoes it, and let go."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        end = time.monotonic() + _UNDO_TIMEOUT_S
        while not self._over and time.monotonic() < end:
            self.news(0.1)
        try:
            self._child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill_child(self._child)
            self._child.wait()
        self._child.stdout.close()
        self._child.stderr.close()


def inject_fault(aimed: InjectionTarget, write: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Carry a fault out, and wait until it is undone where it lasts; the records, each written at once."""
    injection = Injection(aimed)
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
    """A host's name without its domain: Slurm and the host itself may not agree on that."""
    return name.partition(".")[0]


def _node_python(run: RunDir) -> str:
    """The Python that the nodes have; the one that runs this where the run's records do not say."""
    owner = run.sweep_of_element or run
    with suppress(HpcrunError):
        cluster = load_cluster(owner.cluster) if owner.cluster.exists() else None
        return job_python(load_run_job(run).spec, cluster)
    return sys.executable
