"""Supervisor: owns a run directory, launches a prepared job there, and records how it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from hpcrun import process
from hpcrun.errors import EXIT_DO_NOT_RESTART, EXIT_INTERRUPTED, EXIT_SITE, HpcrunError, SiteError
from hpcrun.launch import admission, recover
from hpcrun.launch.blame import blamed
from hpcrun.launch.command import rank_command
from hpcrun.launch.course import Course, Limits, Observer, Outcome
from hpcrun.launch.elastic import fit_on, least_nodes
from hpcrun.launch.elsewhere import exclusion, keep_away
from hpcrun.launch.endurance import patiently
from hpcrun.launch.inbox import Inbox
from hpcrun.launch.launchers import Launch, Launcher
from hpcrun.launch.lease import FencedError, LeaderWriter
from hpcrun.launch.lemons import Sighting, note_sightings
from hpcrun.launch.nodes import Nodes
from hpcrun.launch.ownership import succeed, sweep_leftovers
from hpcrun.launch.prepare import Prepared
from hpcrun.launch.probe import NCCL_PIPE, NCCL_TRACE
from hpcrun.launch.progress import SOCKET_VARIABLE, STACKS_VARIABLE
from hpcrun.launch.settings import settle
from hpcrun.launch.shim import ATTEMPT_VARIABLE, RUN_ID_VARIABLE
from hpcrun.launch.site import Site, with_our_package
from hpcrun.launch.snapshot import record_origin
from hpcrun.launch.succession import Succession, left_out, own, stand_back
from hpcrun.launch.telemetry import told_of
from hpcrun.launch.watchdog import Watchdog
from hpcrun.launch.world import without_world
from hpcrun.specs.load import render_job
from hpcrun.specs.placement import Placement, write_placement
from hpcrun.specs.records import LineReader, write_json, write_whole
from hpcrun.specs.rundir import Attempt, RunDir, create_run
from hpcrun.specs.secrets import read_secrets
from hpcrun.units import parse_time

_NAP_S = 0.2
_FIRST_PORT, _PORTS = 20000, 10000
"""Below those that the kernel gives out by itself (from 32768 on)."""


class Supervisor:
    """Runs a prepared job, as one attempt, from its launch to its exit record."""

    def __init__(
        self,
        prepared: Prepared,
        inbox: Inbox,
        observer: Observer,
        *,
        site: Site | None = None,
        command: Callable[[Attempt], Sequence[str]] | None = None,
        limits: Limits | None = None,
        succession: Succession | None = None,
    ) -> None:
        self._prepared, self._inbox, self._observer = prepared, inbox, observer
        self._site, self._limits = site or Site(), limits or Limits()
        self._succession = succession
        self._began_at = 0
        self._excluded: set[str] = set()
        self._lost: set[str] = set()
        self._verify: Callable[[], None] = lambda: None
        self._command = command
        self._watchdog = Watchdog(prepared.spec)
        self._fruitless = 0

    def run(self) -> Outcome:
        """Run the job; the outcome says how it ended. HpcrunError when it could not be started at all."""
        prepared = self._prepared
        # Before there is a directory: what cannot work leaves nothing behind.
        self._site.per_node(prepared.spec)
        launcher = self._site.launcher(prepared.spec)
        run = prepared.resume or create_run(prepared.spec.name)
        if prepared.resume is None:
            record_origin(run, prepared.spec)
        note = self._observer.note
        owned = succeed(run) if self._succession else own(run, self._site.allocation, note)
        with owned, told_of(run, prepared.spec, self._site, note) as hand_over:
            try:
                with self._site.nodes(run, self._succession) as nodes:
                    outcome = self._attempts(run, launcher, nodes)
            except FencedError as fenced:
                # The run is another's, and so is its record; our end would be the end of the job under it.
                hand_over()
                self._observer.note(str(fenced))
                stand_back(run, self._is_told_to_end)
                raise FencedError(f"{run.id}: the other supervisor has ended it, or is gone too") from None
            except (HpcrunError, OSError) as error:
                failure = _as_site_error(error, run) if isinstance(error, OSError) else error
                record_exit(run, "failed", failure.exit_code, str(failure))
                raise failure from error
            except KeyboardInterrupt:
                record_exit(run, "interrupted", EXIT_INTERRUPTED, "interrupted before the ranks were started")
                raise
        self._observer.finished(outcome)
        return outcome

    def _is_told_to_end(self) -> bool:
        """Whether we got a signal because Slurm ends the job: then nobody needs us to keep it."""
        allocation = self._site.allocation
        return bool(self._inbox.read()) and (allocation is None or allocation.fate() != "running")

    def _attempts(self, run: RunDir, launcher: Launcher, nodes: Nodes) -> Outcome:
        """One attempt after the other, for as long as there is reason for another one here."""
        self._verify = nodes.verify
        outcome = self._succession.last_attempt(run, nodes.lost) if self._succession else None
        if self._succession:
            self._avoid(left_out(run)[1], nodes)
        while True:
            if outcome is None:
                attempt = self._open(run)
                outcome = self._preflight(attempt, nodes)
                if outcome is not None:
                    return self._close(outcome)
                outcome = self._run_attempt(attempt, launcher, nodes)
            self._verify()
            cause = recover.cause_of(outcome)
            if cause not in recover.FAULTS:
                return self._close(outcome)
            self._tell_fault(outcome, cause)
            self._lost |= set(outcome.lost)
            self._avoid(outcome.suspects, nodes)
            if self._site.allocation is not None:
                self._remember(blamed(outcome, cause, self._site.allocation.job))
            refused = self._why_not_here(outcome, cause, nodes)
            if refused is not None:
                return self._close(outcome, refused)
            self._record(outcome, relaunched=cause)
            left = [node for node in nodes.alive if node not in self._excluded]
            fit = fit_on(self._prepared, self._site.per_node(self._prepared.spec), len(left))
            without = sorted(self._excluded | self._lost.difference(nodes.alive))
            more = {
                "excluded": without,
                "spares_left": len(left) - fit.nodes,
                **fit.change(outcome.run.attempt(outcome.attempt)),
            }
            self._event(run, "relaunch", outcome, **more)
            self._observer.note(f"{outcome.message}; going on{fit} from step {recover.saved_step(run)}")
            nodes.call_back()
            if not self._rest(recover.back_off_s(self._fruitless), nodes):
                return self._close(outcome, "it was asked to stop")
            outcome = None

    def _tell_fault(self, outcome: Outcome, cause: recover.Cause) -> None:
        """An event with what is known of a fault; the attempts in a row that saved nothing are counted."""
        progress, run = self._progress(outcome), outcome.run
        self._fruitless = 0 if progress else self._fruitless + 1
        is_same = not progress and cause in ("crash", "hang") and recover.is_repeated(run, outcome)
        kind = "deterministic" if is_same else "infrastructure" if cause == "straggler" else outcome.kind
        nodes = outcome.suspects or outcome.lost
        more = {"nodes": list(nodes), "rank": outcome.rank, "message": outcome.message}
        self._event(run, "fault", outcome, cause=cause, kind=kind, **more)

    def _rest(self, seconds: float, nodes: Nodes) -> bool:
        """Wait before another attempt, if there is reason to; False when somebody wants no other one."""
        if seconds:
            self._observer.note(f"waiting for {seconds:g} s before the next attempt")
        until = time.monotonic() + seconds
        while True:
            if any(number != signal.SIGUSR1 for number in self._inbox.read()):
                return False
            left = until - time.monotonic()
            if left <= 0:
                return True
            nodes.rest(min(left, _NAP_S))

    def _avoid(self, suspects: Collection[str], nodes: Nodes) -> None:
        """Put spares in the place of nodes that are under suspicion, as far as there are any."""
        left = [node for node in nodes.alive if node not in self._excluded]
        whole = fit_on(self._prepared, self._site.per_node(self._prepared.spec), len(left)).nodes
        for node in suspects:
            if node in left and len(left) > whole:
                left.remove(node)
                self._excluded.add(node)

    def _preflight(self, attempt: Attempt, nodes: Nodes) -> Outcome | None:
        """Leave out the nodes that are not well; how the attempt ends where too few are left."""
        spec, cluster, allocation = self._prepared.spec, self._site.cluster, self._site.allocation
        ask = admission.ask_for(spec, cluster, attempt.number, is_alone=self._site.is_here)
        if ask is None:
            return None
        found = admission.admit(ask, nodes)
        admission.record(attempt, found)
        for text in found.notes(warnings=allocation is not None):
            self._observer.note(text)
        self._excluded |= set(found.refused)
        if allocation is not None:
            self._remember(found.sightings(attempt, allocation.job, time.time()))
        left = [node for node in nodes.alive if node not in self._excluded]
        gone = [one for one in nodes.lost if one.node not in self._excluded | self._lost]
        if len(left) >= self._slots() or not (found.refused or gone):
            return None
        return admission.stopped(attempt, found, left, self._slots(), gone)

    def _remember(self, seen: Sequence[Sighting]) -> None:
        """Keep what was seen of nodes for the user's other jobs."""
        told = note_sightings(seen)
        if told:
            self._observer.note(told)

    def _slots(self) -> int:
        """How many nodes the ranks need at least."""
        return least_nodes(self._prepared, self._site.per_node(self._prepared.spec))

    def _why_not_here(self, outcome: Outcome, cause: recover.Cause, nodes: Nodes) -> str | None:
        """Why the run cannot go on in this allocation, or None when it can."""
        left = [node for node in nodes.alive if node not in self._excluded]
        if len(left) < self._slots():
            return f"{self._slots()} nodes are needed, and {len(left)} are left"
        progress = self._progress(outcome)
        return recover.refusal(outcome.run, self._prepared.spec, cause, outcome, progress, in_place=True)

    def _progress(self, outcome: Outcome) -> int | None:
        """Steps that the attempt has saved; None for a command, whose steps nobody counts."""
        return None if self._prepared.spec.command else recover.saved_step(outcome.run) - self._began_at

    def _open(self, run: RunDir) -> Attempt:
        """The next attempt of a run, with all that stands in its directory before the ranks start."""
        spec = self._prepared.spec
        for note in sweep_leftovers(run):
            self._observer.note(note)
        attempt = run.coming_attempt()
        self._began_at = recover.saved_step(run)

        def furnish() -> None:
            run.exit.unlink(missing_ok=True)
            attempt.create()
            write_whole(run.spec, render_job(spec))
            write_json(attempt.supervisor, self._identity())

        patiently(furnish)
        return attempt

    def _identity(self) -> dict[str, Any]:
        allocation = self._site.allocation
        return {
            "pid": os.getpid(),
            "start_ticks": process.start_ticks(os.getpid()),
            "host": os.uname().nodename,
            "started": time.time(),
            "slurm_job": None if allocation is None else allocation.job,
            "restarts": None if allocation is None else allocation.restarts,
            "taken_over": None if self._succession is None else self._succession.epoch,
        }

    def _run_attempt(self, attempt: Attempt, launcher: Launcher, nodes: Nodes) -> Outcome:
        spec, left = self._prepared.spec, [node for node in nodes.alive if node not in self._excluded]
        plan = fit_on(self._prepared, self._site.per_node(spec), len(left)).plan
        if plan is not None:
            write_whole(attempt.plan, plan.model_dump_json(indent=2) + "\n")
        placement = self._site.place(spec, plan, nodes, self._excluded)
        write_placement(attempt.placement, placement, plan.degrees if plan else spec.degrees)
        write_whole(attempt.hosts, "".join(f"{node}\n" for node in placement.ranks))
        return self._follow(attempt, placement, launcher, nodes)

    def _follow(self, attempt: Attempt, placement: Placement, launcher: Launcher, nodes: Nodes) -> Outcome:
        spec = self._prepared.spec
        command = (
            tuple(self._command(attempt))
            if self._command
            else rank_command(attempt, spec, placement, os.environ)
        )
        launch = Launch(
            attempt,
            placement,
            command,
            self._environ(attempt, placement),
            launcher,
            judges_exits=spec.command is not None,
            can_save=spec.retries is not None,
            stragglers=spec.watch.stragglers,
            job=self._site.allocation.job if self._site.allocation and self._site.is_batch else None,
        )
        events = LeaderWriter(attempt.run.events, self._verify)
        metrics = attempt.run.metrics
        reader = LineReader(metrics, metrics.stat().st_size if metrics.exists() else 0)
        try:
            again: Literal["train", "submit"] = "submit" if self._site.is_batch else "train"
            course = Course(
                launch, nodes, self._observer, self._limits, events, reader, self._watchdog, again
            )
            return course.run(self._inbox)
        finally:
            events.close()

    def _environ(self, attempt: Attempt, placement: Placement) -> dict[str, str]:
        spec, cluster = self._prepared.spec, self._site.cluster
        environ = with_our_package(without_world(os.environ))
        cores = max(1, len(os.sched_getaffinity(0)) // placement.per_node)
        environ.setdefault("OMP_NUM_THREADS", str(spec.resources.cpus_per_rank or cores))
        # Where torch's recorder of NCCL calls waits to be asked, and where it writes to.
        environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(attempt.stacks / NCCL_PIPE))
        environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(attempt.stacks / NCCL_TRACE))
        number = self._site.allocation.job if self._site.allocation else os.getpid()
        port = _FIRST_PORT + (number * 7 + attempt.number) % _PORTS
        suffix = cluster.network.fabric_suffix if cluster else ""
        meeting = {"MASTER_ADDR": f"{placement.ranks[0]}{suffix}", "MASTER_PORT": str(port)}
        if spec.command is None:
            meeting = {}
        ours = settle(attempt, spec, cluster, placement.nodes, environ | spec.env, self._observer.note)
        marks = {RUN_ID_VARIABLE: attempt.run.id, ATTEMPT_VARIABLE: str(attempt.number)}
        # Nobody can take a name that nobody can guess.
        marks |= {SOCKET_VARIABLE: f"hpcrun-{os.urandom(12).hex()}", STACKS_VARIABLE: str(attempt.stacks)}
        return ours | environ | spec.env | meeting | read_secrets(spec.secrets) | marks

    def _close(self, outcome: Outcome, refused: str = "") -> Outcome:
        """Record how the last attempt ended, and queue the job again where that is called for.

        `refused` says why the run does not go on in this allocation.
        """
        run = outcome.run
        fate = self._site.allocation.fate() if self._site.allocation and outcome.stop else "running"
        if fate == "queued again":
            # A preemption, or somebody's `scontrol requeue`: the run is not over.
            self._record(outcome, requeued="preemption")
            self._event(run, "requeue", outcome, cause="preemption")
            return outcome
        if fate == "time limit" and outcome.status != "saved":
            outcome = replace(outcome, status="failed", message=f"reached its time limit; {outcome.message}")
        if recover.REPEATED in refused:
            outcome = replace(outcome, exit_code=EXIT_DO_NOT_RESTART)
        cause, told = self._queue_again(outcome)
        self._record(outcome, requeued=cause)
        if cause is not None:
            self._event(run, "requeue", outcome, cause=cause)
            return outcome
        self._verify()
        told = told or (refused if outcome.attempt > 1 else "")
        message = f"{outcome.message}; not tried again: {told}" if told else outcome.message
        record_exit(run, outcome.status, outcome.exit_code, message, outcome.attempt, outcome.step)
        return replace(outcome, message=message)

    def _record(self, outcome: Outcome, **after: str | None) -> None:
        """How an attempt has ended, and what came after it."""
        record = {"status": outcome.status, "exit_code": outcome.exit_code, "message": outcome.message}
        more = {"step": outcome.step, "requeued": None, "relaunched": None, "ended": time.time()}
        with suppress(OSError):
            path = outcome.run.attempt(outcome.attempt).outcome
            patiently(lambda: write_json(path, record | more | after))

    def _event(self, run: RunDir, event: str, outcome: Outcome, **more: Any) -> None:
        events = LeaderWriter(run.events, self._verify)
        now = {"time": time.time(), "monotonic": time.monotonic(), "attempt": outcome.attempt}
        events.write(now | {"event": event} | more)
        events.close()

    def _queue_again(self, outcome: Outcome) -> tuple[recover.Cause | None, str]:
        """The cause for which the job was queued again, or why it was not, where one might expect it."""
        allocation, spec, run = self._site.allocation, self._prepared.spec, outcome.run
        if allocation is None or not self._site.is_batch or outcome.exit_code == EXIT_DO_NOT_RESTART:
            return None, ""
        grace = parse_time(spec.retries.grace).seconds if spec.retries else 0.0
        cause = recover.cause_of(outcome, grace, allocation.seconds_left())
        if cause is None or (cause in ("crash", "node") and spec.retries is None):
            return None, ""
        refused = recover.refusal(run, spec, cause, outcome, self._progress(outcome), in_place=False)
        # Where the ranks have not even started, Slurm would give the same nodes again.
        ill = outcome.lost if outcome.exit_code == EXIT_SITE else ()
        self._verify()
        if refused is None:
            away = exclusion(allocation, ill, spec.resources.all_nodes) if ill else ""
            try:
                allocation.requeue()
            except SiteError as error:
                refused = str(error)
        if refused is not None:
            return None, refused
        self._observer.note(f"{cause.replace('_', ' ')}: queued again as job {allocation.id}")
        if away:
            self._observer.note(keep_away(allocation, away))
        return cause, ""


def record_exit(
    run: RunDir,
    status: str,
    exit_code: int,
    message: str,
    attempt: int | None = None,
    step: int | None = None,
) -> None:
    """Write how a run has ended."""
    record = {"status": status, "exit_code": exit_code, "message": message, "attempt": attempt, "step": step}
    # Where even this cannot be written, the message on the terminal says so.
    with suppress(OSError):
        patiently(lambda: write_json(run.exit, record | {"ended": time.time()}))


def _as_site_error(error: OSError, run: RunDir) -> SiteError:
    place = f"{error.filename}: " if error.filename else ""
    return SiteError(f"{place}{error.strerror or error}; the run was ended: {run.path}")
