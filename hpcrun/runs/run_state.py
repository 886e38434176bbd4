"""Where runs stand: what their directories say, and what Slurm says of those that left no record."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpcrun.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RANKS_DIED, EXIT_SAVED, UsageError
from hpcrun.runs.snapshot import RunSnapshot, TrainingProgress
from hpcrun.specs.identity import check_run_schema
from hpcrun.specs.provenance import Provenance, read_provenance
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sweep import read_sweep

if TYPE_CHECKING:
    from hpcrun.slurm.jobs import JobRecord
    from hpcrun.slurm.queue import JobQuery, JobQueryResult

RUN_STATES = (
    "running",
    "queued",
    "unknown",
    "lost",
    "dead",
    "failed",
    "cancelled",
    "interrupted",
    "saved",
    "done",
)
"""All states; a sweep is in the first of them that one of its elements is in."""
_ACTIVE_STATES = RUN_STATES[:3]
_SLURM_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RunState:
    """A run at one moment: `state` is one of STATES, `message` says why.

    dead: its supervisor vanished · lost: Slurm does not know its job any more, and it left no record ·
    cancelled: its job was taken out of the queue, or ended by scancel.
    """

    run: RunDir
    state: str
    message: str = ""
    exit_code: int | None = None
    attempt: int | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    host: str | None = None
    pid: int | None = None
    job: str | None = None
    """Slurm's id as its commands take it, 123 or 123_4."""
    cluster: str = ""
    nodes: str = ""
    """The allocation as a host list, while Slurm knows it."""
    start: str = ""
    """When the job started, or is estimated to (local time as Slurm shows it)."""
    elements: dict[str, int] | None = None
    """Of a sweep: how many elements are in which state."""
    replicas: int | None = None
    """How many data-parallel replicas work, where some of the job's are missing."""
    whole_replicas: int | None = None
    """How many the job has then."""
    submission: int = 0
    """Which of the times that the run was handed over that was, from 1: the order, whatever clocks say."""
    submitted: float = 0.0
    """When its newest job was handed over (wall clock); 0 where there is none."""
    changed: float = 0.0
    """When it last wrote something (wall clock)."""
    slurm_state: str = ""
    """What Slurm calls the end of its job, where the run ended otherwise: CANCELLED though it is done.

    So it is after a failover: the batch script is gone, and the job has to be cancelled.
    """
    snapshot: RunSnapshot | None = field(default=None, repr=False, compare=False)
    """What the run's directory said, which the state was made of; None for a sweep and a damaged run."""

    @property
    def shown(self) -> str:
        """The state, and Slurm's where that is another."""
        return f"{self.state} (Slurm says {self.slurm_state})" if self.slurm_state else self.state

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.state not in _ACTIVE_STATES

    @property
    def code(self) -> int:
        """The exit code that stands for the end of the run, also where no record of ours gives one."""
        if self.exit_code is not None:
            return self.exit_code
        codes = {"done": EXIT_DONE, "saved": EXIT_SAVED}
        codes |= dict.fromkeys(("interrupted", "cancelled"), EXIT_INTERRUPTED)
        return codes.get(self.state, EXIT_RANKS_DIED)

    def as_json(self) -> dict[str, Any]:
        """Plain values, the run by its id and path."""
        values = {name: value for name, value in vars(self).items() if name not in ("run", "snapshot")}
        return {"id": self.run.id, "path": str(self.run.path), **values}


def worst_exit_code(codes: Iterable[int]) -> int:
    """The exit code that stands for several: a failure before a save, a save before success."""
    return max(codes, key=lambda code: (code not in (EXIT_DONE, EXIT_SAVED), code), default=EXIT_DONE)


def read_run_state(run: RunDir) -> RunState:
    """The state of a run as its directory tells it: nobody is asked. Damaged records make it unknown."""
    return read_run_states([run], ask=False)[0]


def read_run_states(runs: Sequence[RunDir], *, ask: bool = True) -> list[RunState]:
    """The states of runs; Slurm is asked, once a cluster, about all that left no record of their end."""
    parts = [_run_parts(run) for run in runs]
    states = iter(_read_states([one for each in parts for one in each], ask=ask))
    summaries = []
    for run, each in zip(runs, parts, strict=True):
        own = [next(states) for _ in each]
        summaries.append(own[0] if each == [run] else summarize_sweep(run, own))
    return summaries


def _run_parts(run: RunDir) -> list[RunDir]:
    """The elements of a sweep; any other run, and a sweep whose record is damaged, is its own one part."""
    with suppress(UsageError, OSError):
        if run.sweep.is_file():
            return read_sweep_elements(run)
    return [run]


def with_slurm_state(state: RunState) -> RunState:
    """The same with what Slurm, which is asked, calls the end of the job, where that is another.

    For a single run: for a list nobody is asked about what has a record of its end.
    """
    from hpcrun.slurm.ids import parse_job_id

    job_id = parse_job_id(state.job or "") if state.is_over and not state.slurm_state else None
    if job_id is None or state.exit_code is None or state.elements is not None:
        return state
    from hpcrun.slurm.queue import JobQuery, query_jobs

    owner = state.run.sweep_of_element or state.run
    question = JobQuery(job_id.job, job_id.element, state.cluster, run=owner.id)
    record = query_jobs([question], _SLURM_TIMEOUT_S)[question].record
    name = record.state.name if record and record.state.final else ""
    return replace(state, slurm_state=_contradicting_slurm_state(state.state, name))


def _contradicting_slurm_state(state: str, slurm_state: str) -> str:
    """Slurm's state where it contradicts the run's; empty where it does not, or is not known."""
    differs = bool(slurm_state) and (state == "done") != (slurm_state == "COMPLETED")
    return slurm_state if differs else ""


def read_element_states(sweep: RunDir, *, ask: bool = True) -> list[RunState]:
    """The state of every element of a sweep, in order."""
    return _read_states(read_sweep_elements(sweep), ask=ask)


def summarize_sweep(run: RunDir, elements: Sequence[RunState]) -> RunState:
    """A sweep, as the sum of its elements; of its jobs the newest that one of them belongs to."""
    counts = Counter(one.state for one in elements)
    totals = {state: counts[state] for state in reversed(RUN_STATES) if counts[state]}
    state = next((one for one in RUN_STATES if counts[one]), "unknown")
    why = next((one.message for one in elements if one.state in ("queued", "unknown") and one.message), "")
    message = ", ".join(f"{count} {name}" for name, count in totals.items()) or "it has no elements"
    newest = max((one for one in elements if one.job), key=lambda one: one.submission, default=None)
    return RunState(
        run,
        state,
        f"{message}; {why}" if why else message,
        exit_code=None if state in _ACTIVE_STATES else worst_exit_code(one.code for one in elements),
        host=next((one.host for one in elements if one.host), None),
        job=str(newest.job).partition("_")[0] if newest else None,
        cluster=newest.cluster if newest else "",
        submitted=newest.submitted if newest else 0.0,
        submission=newest.submission if newest else 0,
        elements=totals,
        changed=max([_last_change(run), *(one.changed for one in elements)]),
    )


def read_sweep_elements(sweep: RunDir) -> list[RunDir]:
    """The runs of a sweep's elements, in order; UsageError where its record is damaged."""
    return [sweep.element(number) for number in range(len(read_sweep(sweep)))]


class _ProvenanceCache:
    """The provenance of runs, read once for all the elements of a sweep."""

    def __init__(self) -> None:
        self._known: dict[RunDir, Provenance | None] = {}

    def of(self, run: RunDir) -> Provenance | None:
        owner = run.sweep_of_element or run
        if owner not in self._known:
            self._known[owner] = read_provenance(owner)
        return self._known[owner]


def _read_states(runs: Sequence[RunDir], *, ask: bool) -> list[RunState]:
    origins = _ProvenanceCache()
    states: dict[RunDir, RunState] = {}
    unclear: dict[RunDir, tuple[RunSnapshot, JobQuery]] = {}
    for run in runs:
        try:
            check_run_schema((run.sweep_of_element or run).path)
            if run.sweep.is_file():  # it comes here only when its record is damaged
                read_sweep(run)
            view = RunSnapshot(run, origins.of(run))
            state, message, question = _state_from_records(view)
            if ask and question:
                unclear[run] = view, question
            else:
                states[run] = _make_run_state(view, state, message)
        except (UsageError, OSError) as error:
            states[run] = RunState(run, "unknown", _format_error(error), changed=_last_change(run))
    if unclear:
        from hpcrun.slurm.queue import query_jobs

        answers = query_jobs(question for _, question in unclear.values())
        for run, (view, question) in unclear.items():
            states[run] = _state_from_slurm(view, question, answers[question])
    return [states[run] for run in runs]


def _format_error(error: UsageError | OSError) -> str:
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return text.partition("\n")[0]


def _state_from_records(view: RunSnapshot) -> tuple[str, str, JobQuery | None]:
    """State and message as far as the directory and this host know, and what has to be asked of Slurm."""
    if view.ended:
        return view.ended["status"], view.ended.get("message") or "", None
    if view.original is not None:
        return "interrupted", f"a copy of {view.original}, not started yet; {_resume_hint(view)}", None
    if view.is_alive_here:
        # The process of a sweep runs one element after another.
        waits = view.run.sweep_of_element is not None and not view.has_begun
        return ("queued", "waits for its turn", None) if waits else ("running", "", None)
    if view.job:
        from hpcrun.slurm.queue import JobQuery

        # Training inside of somebody's allocation is not a job of ours.
        is_ours = view.submission is not None and view.submission.job == view.job[0]
        owner = view.run.sweep_of_element or view.run
        question = JobQuery(*view.job, run=owner.id if is_ours else "")
        return "unknown", f"job {question} is in Slurm's hands, which was not asked", question
    if found := view.process:
        host, who = found
        if host != os.uname().nodename:
            return "unknown", f"it was started on {host}; look there whether it still runs", None
        words = f"; last output: {said}" if (said := view.last_words()) else ""
        return "dead", f"its supervisor (pid {who.pid}) is gone; {_resume_hint(view)}{words}", None
    result = read_json(view.attempts[-1].result) if view.attempts else None
    if isinstance(result, dict) and result.get("status") in RUN_STATES:
        return result["status"], "", None
    return "unknown", "no supervisor of ours has recorded itself here", None


def _resume_hint(view: RunSnapshot) -> str:
    verb = "train" if view.submission is None else "submit"
    return f"hpcrun {verb} --resume {(view.run.sweep_of_element or view.run).id}"


def _state_from_slurm(view: RunSnapshot, question: JobQuery, answer: JobQueryResult) -> RunState:
    record = answer.record
    if record is None and answer.trouble:
        return _make_run_state(view, "unknown", answer.trouble, question)
    if record is None or record.state.final:
        # The end may have been written down after we had looked for it, and before Slurm answered.
        again = RunSnapshot(view.run, view.origin)
        if again.ended:
            return _make_run_state(
                again, again.ended["status"], again.ended.get("message") or "", question, record
            )
    if record is None:
        words = f"; the batch shell said last: {said}" if (said := view.last_words()) else ""
        text = f"Slurm does not know job {question} any more, and it left no record of its end; "
        return _make_run_state(view, "lost", f"{text}{_resume_hint(view)}{words}", question)
    return _make_run_state(view, *_describe_job_end(view, record), question, record)


def _describe_job_end(view: RunSnapshot, record: JobRecord) -> tuple[str, str]:
    match record.state.phase:
        case "pending":
            outlook = "will never start: " if record.reason.outlook == "never" else ""
            start = f"; estimated start {record.start}" if record.start else ""
            again = f"again, after attempt {view.attempts[-1].number}: " if view.attempts else ""
            return "queued", f"{again}{outlook}{record.reason.words}{start}"
        case "running":
            is_ending = "COMPLETING" in (record.state.name, *record.state.flags)
            if is_ending and view.is_queued_again:
                return "queued", f"again, after attempt {view.attempts[-1].number}: its nodes are cleaned up"
            is_early = not view.has_begun and not is_ending
            return "running", "the job has started, its supervisor is not up yet" if is_early else ""
        case "unknown":
            shown = " ".join((record.state.name, record.state.detail))
            return "unknown", f"Slurm shows a state that is not known here: {shown}"
    name = record.state.name
    state = "cancelled" if name == "CANCELLED" else "failed"
    detail = f" {record.state.detail}" if record.state.detail else ""
    code = f" with exit code {record.exit_code}" if record.exit_code is not None else ""
    words = f"; the batch shell said last: {shown}" if (shown := view.last_words()) else ""
    return state, f"Slurm says {name}{detail}{code}, and there is no record of an end{words}"


def _make_run_state(
    view: RunSnapshot,
    state: str,
    message: str,
    question: JobQuery | None = None,
    record: JobRecord | None = None,
) -> RunState:
    ended, told, job = view.ended, view.process, view.job
    progress = view.progress() if view.attempts else TrainingProgress()
    replicas = view.replicas or (None, None)
    step = progress.step if ended is None or ended.get("step") is None else ended["step"]
    return RunState(
        view.run,
        state,
        message,
        exit_code=ended["exit_code"] if ended else None,
        attempt=view.attempts[-1].number if view.attempts else None,
        step=step,
        steps=view.origin.steps if view.origin else None,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
        host=told[0] if told else None,
        pid=told[1].pid if told else None,
        job=str(question) if question else _format_job_id(job),
        cluster=job[2] if job else "",
        nodes=record.nodes if record else "",
        start=record.start if record else "",
        replicas=replicas[0],
        whole_replicas=replicas[1],
        submitted=view.submission.time if view.submission else 0.0,
        submission=view.submission_number,
        changed=_last_change(view.run),
        slurm_state=_contradicting_slurm_state(state, ended.get("slurm_state") or "") if ended else "",
        snapshot=view,
    )


def _format_job_id(job: tuple[int, int | None, str] | None) -> str | None:
    if job is None:
        return None
    return str(job[0]) if job[1] is None else f"{job[0]}_{job[1]}"


def _last_change(run: RunDir) -> float:
    newest = 0.0
    for path in (run.spec, run.job, run.events, run.metrics, run.exit):
        with suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return newest
