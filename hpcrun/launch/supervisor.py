"""Supervisor: owns a run directory, launches a prepared job there, and records how it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from hpcrun import process
from hpcrun.errors import EXIT_INTERRUPTED, EXIT_SAVED, EXIT_SITE, HpcrunError, SiteError
from hpcrun.health.lemon_nodes import NodeFault, record_node_faults
from hpcrun.launch import admission, recovery
from hpcrun.launch.agents.nodes import Nodes
from hpcrun.launch.attempt_monitor import (
    AttemptLimits,
    AttemptMonitor,
    AttemptOutcome,
    OutcomeStatus,
    RunObserver,
)
from hpcrun.launch.checkpointing.coordinator import CheckpointCoordinator
from hpcrun.launch.device_assignment import assign_devices, binding_inputs
from hpcrun.launch.draining_nodes import DrainPoller
from hpcrun.launch.failover.state import FailoverState, await_run_end, own_run, read_left_out_nodes
from hpcrun.launch.fault_nodes import attribute_node_faults
from hpcrun.launch.final_save import watch_time_limit
from hpcrun.launch.launchers import Launcher, LaunchRequest
from hpcrun.launch.node_pool import NodePool
from hpcrun.launch.outcome import OutcomeRecorder, record_run_exit
from hpcrun.launch.rank_command import rank_command
from hpcrun.launch.rank_environment import build_rank_environment
from hpcrun.launch.run_context import RunContext
from hpcrun.launch.signal_queue import SignalQueue, StopRequested
from hpcrun.launch.telemetry_session import telemetry_session
from hpcrun.launch.watch.watchdog import HangWatchdog
from hpcrun.runs.lease import FencedError, LeaderEventWriter
from hpcrun.runs.run_lock import clean_up_leftovers, take_over_run_lock
from hpcrun.specs.events.supervisor import FaultEvent
from hpcrun.specs.io_retry import retry_while_full
from hpcrun.specs.load import render_job
from hpcrun.specs.metrics import MetricReader
from hpcrun.specs.origin import record_provenance
from hpcrun.specs.placement import Placement, write_placement
from hpcrun.specs.records import write_atomically, write_json
from hpcrun.specs.run_lookup import new_run
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.submission.prepare import PreparedJob

_POLL_S = 0.2
_REPEATED_START_FACTOR = 0.2
"""Of the time to start and meet: so much is enough on nodes where it has just been in vain."""


class Supervisor:
    """Runs a prepared job, one attempt after the other, from its first launch to its exit record."""

    def __init__(
        self,
        prepared: PreparedJob,
        inbox: SignalQueue,
        observer: RunObserver,
        *,
        site: RunContext | None = None,
        command: Callable[[Attempt], Sequence[str]] | None = None,
        limits: AttemptLimits | None = None,
        succession: FailoverState | None = None,
    ) -> None:
        self._prepared, self._signal_queue, self._observer = prepared, inbox, observer
        self._context, self._limits = site or RunContext(), limits or AttemptLimits.of(prepared.spec)
        self._failover, self._command = succession, command
        self._node_pool = NodePool(prepared, self._context)
        self._watchdog = HangWatchdog(prepared.spec)
        self._verify: Callable[[], None] = lambda: None
        self._outcome_recorder = OutcomeRecorder(
            prepared.spec, self._context, observer.note, lambda: self._verify()
        )
        self._drains: DrainPoller | None = None
        self._coordinator: CheckpointCoordinator | None = None
        self._began_at = self._attempts_without_progress = 0
        self._unconnected_nodes: tuple[str, ...] = ()
        """The nodes of the last attempt, where its ranks did not meet."""

    def run(self) -> AttemptOutcome:
        """Run the job; the outcome says how it ended. HpcrunError when it could not be started at all."""
        prepared = self._prepared
        # Before there is a directory: what cannot work leaves nothing behind.
        self._context.per_node(prepared.spec)
        launcher = self._context.launcher(prepared.spec)
        run = prepared.resume or self._new_run()
        try:
            outcome = self._run_as_leader(run, launcher)
        except (HpcrunError, OSError, KeyboardInterrupt) as error:
            # A new run is nobody else's, and says how it has ended, also where it has not come to an attempt.
            if prepared.resume is None and not isinstance(error, FencedError) and run.read_exit() is None:
                is_asked = isinstance(error, KeyboardInterrupt)
                code = EXIT_INTERRUPTED if is_asked else getattr(error, "exit_code", EXIT_SITE)
                record_run_exit(
                    run, "interrupted" if is_asked else "failed", code, str(error) or "interrupted"
                )
            raise
        self._observer.finished(outcome)
        return outcome

    def _new_run(self) -> RunDir:
        """The directory of a new run, with all that makes it one; nothing where that cannot be written."""
        with new_run(self._prepared.spec.name) as run:
            write_atomically(run.spec, render_job(self._prepared.spec))
            record_provenance(run, self._prepared.spec)
        return run

    def _run_as_leader(self, run: RunDir, launcher: Launcher) -> AttemptOutcome:
        prepared, note = self._prepared, self._observer.note
        has_epoch = self._failover is not None and self._failover.epoch is not None
        owned = take_over_run_lock(run) if has_epoch else own_run(run, self._context.allocation, note)
        with owned, telemetry_session(run, prepared.spec, self._context, note) as hand_over:
            try:
                if self._failover is None:  # else ranks may have left something in memory
                    self._signal_queue.raise_stops()
                with self._context.nodes(run, prepared.spec, self._failover) as nodes:
                    return self._attempts(run, launcher, nodes)
            except FencedError as fenced:
                # The run is another's, and so is its record; our end would be the end of the job under it.
                hand_over()
                self._observer.note(str(fenced))
                await_run_end(run, self._is_told_to_end)
                raise FencedError(f"{run.id}: the other supervisor has ended it, or is gone too") from None
            except (HpcrunError, OSError) as error:
                failure = _as_site_error(error, run) if isinstance(error, OSError) else error
                record_run_exit(run, "failed", failure.exit_code, str(failure))
                raise failure from error
            except StopRequested as asked:
                outcome = self._ended_early(run, run.attempts()[-1:], asked.number)
                record_run_exit(run, outcome.status, outcome.exit_code, outcome.message, step=outcome.step)
                return outcome
            except KeyboardInterrupt:
                record_run_exit(
                    run, "interrupted", EXIT_INTERRUPTED, "interrupted before the ranks were started"
                )
                raise

    def _is_told_to_end(self) -> bool:
        """Whether we got a signal because Slurm ends the job: then nobody needs us to keep it."""
        allocation = self._context.allocation
        return bool(self._signal_queue.read()) and (
            allocation is None or allocation.disposition() != "running"
        )

    def _attempts(self, run: RunDir, launcher: Launcher, nodes: Nodes) -> AttemptOutcome:
        """One attempt after the other; what Slurm says of the nodes is known meanwhile."""
        self._verify = nodes.verify
        network = self._context.cluster.network if self._context.cluster else None
        spec, tell, note = self._prepared.spec, self._outcome_recorder.event, self._observer.note
        self._coordinator = CheckpointCoordinator(run, spec, nodes, tell, note, network)
        self._drains = DrainPoller(self._context.allocation) if self._context.allocation else None
        try:
            with watch_time_limit(self._context.allocation, run, self._prepared.spec, self._observer.note):
                return self._run_attempts(run, launcher, nodes)
        finally:
            if self._drains is not None:
                self._drains.stop()

    def _run_attempts(self, run: RunDir, launcher: Launcher, nodes: Nodes) -> AttemptOutcome:
        """For as long as there is reason for another attempt here."""
        outcome = self._failover.last_attempt(run, nodes.lost) if self._failover else None
        if self._failover:
            lost, suspects = read_left_out_nodes(run)
            self._node_pool.lose(lost)
            self._node_pool.avoid(suspects, nodes)
        while True:
            if outcome is None:
                attempt = self._open(run)
                outcome = self._preflight(attempt, nodes) or self._stopped_early(attempt)
                if outcome is not None:
                    return self._close(outcome)
                outcome = self._run_attempt(attempt, launcher, nodes)
            self._verify()
            cause = recovery.restart_cause(outcome)
            if cause not in recovery.FAULT_CAUSES:
                return self._close(outcome)
            self._take_stock(outcome, cause, nodes)
            refused = self._why_no_retry_here(outcome, cause, nodes)
            if refused is not None:
                return self._close(outcome, refused)
            self._outcome_recorder.attempt(outcome, relaunched=cause)
            self._outcome_recorder.event(outcome.files, self._node_pool.relaunch_event(nodes, outcome.files))
            fit, step = self._node_pool.fit(nodes), self._newest_step(outcome)
            # A supervisor that has just come knows only of what lies in the run directory.
            knows = (
                self._coordinator is None or self._coordinator.has_decided or not self._coordinator.has_tiers
            )
            newest = f"step {step}" if knows else "the newest save that is whole"
            self._observer.note(f"{outcome.message}; going on{fit} from {newest}")
            nodes.restart_lost_agents()
            stop_signal = self._rest(recovery.backoff_s(self._attempts_without_progress), nodes)
            if stop_signal is not None:
                # Near the time limit the job is to be queued again; whoever sends another one means its end.
                stop = None if stop_signal == signal.SIGUSR2 else stop_signal
                return self._close(replace(outcome, stop=stop), "it was asked to stop")
            outcome = None

    def _take_stock(self, outcome: AttemptOutcome, cause: recovery.RestartCause, nodes: Nodes) -> None:
        """After a fault: tell it, and settle which nodes may go on; those that are blamed are remembered."""
        progress, run, allocation = self._progress(outcome), outcome.run, self._context.allocation
        self._attempts_without_progress = 0 if progress else self._attempts_without_progress + 1
        is_same = not progress and cause in ("crash", "hang") and recovery.is_repeated_failure(run, outcome)
        kind = "deterministic" if is_same else "infrastructure" if cause == "straggler" else outcome.kind
        at_fault = outcome.suspects or outcome.lost
        fault = FaultEvent(cause, kind, at_fault, outcome.rank, outcome.message)
        self._outcome_recorder.event(outcome.files, fault)
        self._node_pool.lose(outcome.lost)
        self._node_pool.avoid(outcome.suspects, nodes)
        if allocation is not None:
            self._remember(attribute_node_faults(outcome, cause, allocation.job))
            drained = self._drains.known if self._drains else {}
            for node in self._node_pool.avoid(drained, nodes):
                self._observer.note(f"{node} is {drained[node]} in Slurm: a spare takes its place")

    def _rest(self, seconds: float, nodes: Nodes) -> signal.Signals | None:
        """Wait before another attempt, if there is reason to; the signal of who wants no other one."""
        if seconds:
            self._observer.note(f"waiting for {seconds:g} s before the next attempt")
        until = time.monotonic() + seconds
        while True:
            signals = [number for number in self._signal_queue.read() if number != signal.SIGUSR1]
            if signals:
                return signals[0]
            left = until - time.monotonic()
            if left <= 0:
                return None
            nodes.rest(min(left, _POLL_S))

    def _preflight(self, attempt: Attempt, nodes: Nodes) -> AttemptOutcome | None:
        """Leave out the nodes that are not well; how the attempt ends where too few are left."""
        spec, cluster, allocation = self._prepared.spec, self._context.cluster, self._context.allocation
        ask = admission.build_preflight_request(
            spec, cluster, attempt.number, nodes.alive, is_alone=self._context.is_here
        )
        if ask is None:
            return None
        result = admission.run_preflight(ask, nodes)
        self._outcome_recorder.event(attempt, result.as_event())
        for text in result.notes(warnings=allocation is not None):
            self._observer.note(text)
        self._node_pool.refuse(result.refused)
        gone = self._node_pool.unreported_losses(nodes)
        if allocation is not None:
            self._remember(result.node_faults(attempt, allocation.job, time.time()))
        if self._node_pool.shortage(nodes) is None or not (result.refused or gone):
            return None
        stopped = admission.preflight_failure_outcome(
            attempt, result, self._node_pool.left(nodes), self._node_pool.least, gone
        )
        self._outcome_recorder.event(attempt, stopped.as_event())
        return stopped

    def _stopped_early(self, attempt: Attempt) -> AttemptOutcome | None:
        """How the attempt ends where a stop was asked for before there are ranks; None where none was.

        What nodes hold in memory alone ranks have to save first.
        """
        can_save = self._prepared.spec.retries is not None
        requested = [
            number
            for number in self._signal_queue.peek()
            if number != signal.SIGUSR1 and (can_save or number != signal.SIGUSR2)
        ]
        in_memory = self._coordinator is not None and self._coordinator.step() > recovery.newest_saved_step(
            attempt.run
        )
        if not requested or in_memory:
            return None
        number = signal.SIGINT if signal.SIGINT in requested else requested[0]
        return self._ended_early(attempt.run, [attempt], number)

    def _ended_early(
        self, run: RunDir, attempts: Sequence[Attempt], number: signal.Signals
    ) -> AttemptOutcome:
        """How a run ends that was stopped before there were ranks; in its last attempt, if it came to one."""
        step, is_interrupt = recovery.newest_saved_step(run), number == signal.SIGINT
        status: OutcomeStatus = "interrupted" if is_interrupt else "saved"
        code = EXIT_INTERRUPTED if is_interrupt else EXIT_SAVED
        at = f" (the newest save is of step {step})" if step else ""
        again = "submit" if self._context.is_batch else "train"
        text = f"{number.name}: stopped before the ranks were started{at}"
        text = f"{text}; continue with: hpcrun {again} --resume {run.id}"
        newest = attempts[0].number if attempts else 1
        outcome = AttemptOutcome(run, newest, status, code, text, step, stop=number)
        for attempt in attempts:
            self._outcome_recorder.event(attempt, outcome.as_event())
        return outcome

    def _remember(self, seen: Iterable[NodeFault]) -> None:
        """Keep what was seen of nodes for the user's other jobs."""
        problem = record_node_faults(list(seen))
        if problem:
            self._observer.note(problem)

    def _why_no_retry_here(
        self, outcome: AttemptOutcome, cause: recovery.RestartCause, nodes: Nodes
    ) -> str | None:
        """Why the run cannot go on in this allocation, or None when it can."""
        progress, spec = self._progress(outcome), self._prepared.spec
        return self._node_pool.shortage(nodes) or recovery.why_no_retry(
            outcome.run, spec, cause, outcome, progress, in_place=True
        )

    def _progress(self, outcome: AttemptOutcome) -> int | None:
        """Steps that the attempt has saved; None for a command, whose steps nobody counts."""
        return None if self._prepared.spec.command else self._newest_step(outcome) - self._began_at

    def _newest_step(self, outcome: AttemptOutcome) -> int:
        """The newest step that was saved, in the run directory or, as far as is known, in memory."""
        if self._coordinator is None:
            return recovery.newest_saved_step(outcome.run)
        return self._coordinator.step(is_node_lost=bool(outcome.lost))

    def _close(self, outcome: AttemptOutcome, refused: str = "") -> AttemptOutcome:
        """The last attempt is over; `refused` says why there is no other one in this allocation."""
        return self._outcome_recorder.close(outcome, self._progress(outcome), refused)

    def _open(self, run: RunDir) -> Attempt:
        """The next attempt of a run, with all that stands in its directory before the ranks start."""
        spec = self._prepared.spec
        for note in clean_up_leftovers(run):
            self._observer.note(note)
        attempt = run.upcoming_attempt()
        self._began_at = recovery.newest_saved_step(run)

        def furnish() -> None:
            run.exit.unlink(missing_ok=True)
            attempt.create()
            write_atomically(run.spec, render_job(spec))
            write_json(attempt.supervisor, self._identity())

        retry_while_full(furnish)
        return attempt

    def _identity(self) -> dict[str, Any]:
        allocation = self._context.allocation
        return {
            "pid": os.getpid(),
            "start_ticks": process.start_ticks(os.getpid()),
            "host": os.uname().nodename,
            "started": time.time(),
            "slurm_job": None if allocation is None else allocation.job,
            "restarts": None if allocation is None else allocation.restarts,
            "taken_over": self._failover.elsewhere if self._failover else None,
        }

    def _run_attempt(self, attempt: Attempt, launcher: Launcher, nodes: Nodes) -> AttemptOutcome:
        spec, plan, out = self._prepared.spec, self._node_pool.fit(nodes).plan, self._node_pool.out(nodes)
        if plan is not None:
            write_atomically(attempt.plan, plan.model_dump_json(indent=2) + "\n")
        placement = self._with_devices(self._context.place(spec, plan, nodes, out), launcher, nodes)
        write_placement(attempt.placement, placement, plan.degrees if plan else spec.degrees)
        write_atomically(attempt.hosts, "".join(f"{node}\n" for node in placement.ranks))
        assert self._coordinator is not None
        around = (*placement.nodes, *placement.spares)
        domains = self._context.domains(nodes, around) if self._coordinator.has_tiers else {}
        environ = self._coordinator.prepare(attempt, placement, domains)
        self._began_at = self._coordinator.step()
        if (stopped := self._stopped_early(attempt)) is not None:
            return stopped
        outcome = self._follow(attempt, placement, launcher, nodes, environ)
        self._coordinator.after(outcome)
        self._unconnected_nodes = placement.nodes if outcome.never_connected else ()
        return outcome

    def _limits_on(self, nodes: tuple[str, ...]) -> AttemptLimits:
        """How long an attempt there may take; what was just in vain need not take as long once more."""
        again = self._limits.start_s * _REPEATED_START_FACTOR
        return replace(self._limits, start_s=again) if nodes == self._unconnected_nodes else self._limits

    def _with_devices(self, placement: Placement, launcher: Launcher, nodes: Nodes) -> Placement:
        """The placement with what every rank uses of its node."""
        spec, site = self._prepared.spec, self._context
        in_slurm = site.allocation is not None
        around = binding_inputs(spec, site.cluster, launcher.name, os.environ, in_slurm=in_slurm)
        bound, notes = assign_devices(placement, nodes.inventories, around)
        for text in notes:
            self._observer.note(text)
        return bound

    def _follow(
        self,
        attempt: Attempt,
        placement: Placement,
        launcher: Launcher,
        nodes: Nodes,
        worker_environment: Mapping[str, str],
    ) -> AttemptOutcome:
        spec = self._prepared.spec
        assert self._coordinator is not None
        command = (
            tuple(self._command(attempt))
            if self._command
            else rank_command(attempt, spec, placement, os.environ)
        )
        launch = LaunchRequest(
            attempt,
            placement,
            command,
            build_rank_environment(attempt, spec, self._context, placement, nodes, self._observer.note)
            | {**worker_environment},
            launcher,
            uses_exit_records=spec.command is not None,
            can_save=spec.retries is not None,
            stragglers=spec.watch.stragglers,
            job=self._context.allocation.job if self._context.allocation and self._context.is_batch else None,
        )
        events = LeaderEventWriter(attempt.run.events, self._verify)
        reader = MetricReader(attempt.run, from_now=True)
        try:
            again: Literal["train", "submit"] = "submit" if self._context.is_batch else "train"
            course = AttemptMonitor(
                launch,
                nodes,
                self._observer,
                self._limits_on(placement.nodes),
                events,
                reader,
                self._watchdog,
                again,
                beside=self._coordinator.look,
            )
            return course.run(self._signal_queue)
        finally:
            events.close()


def _as_site_error(error: OSError, run: RunDir) -> SiteError:
    place = f"{error.filename}: " if error.filename else ""
    return SiteError(f"{place}{error.strerror or error}; the run was ended: {run.path}")
