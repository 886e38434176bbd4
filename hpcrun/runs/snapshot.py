"""A run as its directory tells of it: the end, the last supervisor, the newest job, how far it has come."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcrun import process
from hpcrun.errors import UsageError
from hpcrun.files import read_tail
from hpcrun.specs.metrics import EvalMetric, StepMetric, parse_metric
from hpcrun.specs.provenance import Provenance, SubmissionRecord
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.typed_json import WrongValue

_TAIL_BYTES = 65536
_MAX_LINE_LENGTH = 300

_NUMBER = (int, float)
_FieldTypes = Mapping[str, type | tuple[type, ...]]
_SUPERVISOR_FIELDS: _FieldTypes = {
    "host": str,
    "pid": int,
    "start_ticks": int,
    "started": _NUMBER,
    "slurm_job": int,
    "restarts": int,
    "taken_over": int,
}
_EXIT_FIELDS: _FieldTypes = {
    "status": str,
    "exit_code": int,
    "message": str,
    "attempt": int,
    "ended": _NUMBER,
    "slurm_job": int,
    "slurm_state": str,
}
_REPLICA_FIELDS: _FieldTypes = {"dp_replicate": int, "dp_shard": int, "whole_dp": int}
_SUBMISSION_FIELDS: _FieldTypes = {
    "time": _NUMBER,
    "job": int,
    "cluster": str,
    "array": str,
    "offset": int,
    "host": str,
    "pid": int,
    "start_ticks": int,
    "attempts": dict,
}


class TrainingProgress(NamedTuple):
    """The last figures of metrics.jsonl."""

    step: int | None = None
    loss: float | None = None
    eval_loss: float | None = None


class RunSnapshot:
    """What is read once from the directory of a run; UsageError where a record is damaged.

    Of an element of a sweep, `origin` is the sweep's.
    """

    def __init__(self, run: RunDir, origin: Provenance | None) -> None:
        self.run, self.origin = run, origin
        self.attempts = run.attempts()
        self.supervisor: dict[str, Any] = {}
        self._supervised = 0
        for attempt in reversed(self.attempts):
            record = read_json(attempt.supervisor)
            if record is not None:
                self.supervisor = _validate_record(attempt.supervisor, record, _SUPERVISOR_FIELDS)
                self._supervised = attempt.number
                break
        self.submission = _newest_submission(run, origin)
        identity, owner = origin.identity if origin else None, run.sweep_of_element or run
        self.original = None if identity is None or identity.is_at(owner.path) else identity.made_at.path
        """Of a copy that nobody has started yet: the run whose processes and jobs its records tell of."""
        if self.original is not None:
            self.supervisor, self.submission, self._supervised = {}, None, 0
        self._before = self.submission.attempts_before(run) if self.submission else 0
        self.ended = self._fenced(run.read_exit())

    def _fenced(self, ended: dict[str, Any] | None) -> dict[str, Any] | None:
        """The exit record, unless it is that of an attempt before the newest one, or of an earlier job.

        Told by what was written: the record and the submission are of two hosts, whose clocks may differ.
        """
        if ended is None:
            return None
        _validate_record(self.run.exit, ended, _EXIT_FIELDS, "status", "exit_code")
        number, newest = ended.get("attempt"), self.attempts[-1].number if self.attempts else None
        if number is not None and newest is not None and number != newest:
            return None
        if self.submission is None or (number is not None and number > self._before):
            return ended
        # Of no attempt of the newest job: whoever never began, or was taken out of the queue.
        job = ended.get("slurm_job")
        is_earlier = number is not None if job is None else job != self.submission.job
        return None if is_earlier else ended

    @property
    def has_begun(self) -> bool:
        """Whether a supervisor has come up since the run was last submitted, or at all where it was not."""
        return self._supervised > self._before

    @property
    def submission_number(self) -> int:
        """The place of the newest job among all that the run was handed over as, from 1; 0 without one."""
        submissions = self.origin.submissions if self.origin else []
        return submissions.index(self.submission) + 1 if self.submission else 0

    @property
    def is_local(self) -> bool:
        """Whether the run is processes of one machine, and no job."""
        if self.has_begun:
            return self.supervisor.get("slurm_job") is None
        return self.submission is not None and self.submission.job is None

    @property
    def process(self) -> tuple[str, process.ProcessId] | None:
        """Host and process to look at for a sign of life; None where none has been recorded."""
        begun = self.has_begun or self.submission is None
        record = self.supervisor if begun else vars(self.submission)
        host, pid, ticks = record.get("host"), record.get("pid"), record.get("start_ticks")
        return (host, process.ProcessId(pid, ticks)) if host and pid and ticks is not None else None

    @property
    def is_alive_here(self) -> bool:
        """Whether that process is a living one of this host."""
        recorded = self.process
        return recorded is not None and recorded[0] == os.uname().nodename and process.is_alive(recorded[1])

    @property
    def job(self) -> tuple[int, int | None, str] | None:
        """The Slurm job that the run is or was, if it is one: its id, the index in its array, its cluster."""
        if self.is_local:
            return None
        one, own = self.submission, self.supervisor.get("slurm_job")
        if one is not None and one.job is not None and one.array is not None:
            number = None if self.run.sweep_of_element is None else int(self.run.path.name) - one.offset
            return one.job, number, one.cluster
        if self.has_begun and own is not None:
            return own, None, one.cluster if one and one.job == own else ""
        return (one.job, None, one.cluster) if one and one.job is not None else None

    @property
    def is_taken_over(self) -> bool:
        """Whether another node has gone on with the run, so that the batch shell leads to nobody any more."""
        return self.has_begun and self.supervisor.get("taken_over") is not None

    @property
    def is_queued_again(self) -> bool:
        """Whether the newest attempt has ended, and its supervisor has had the job queued again."""
        record = read_json(self.attempts[-1].outcome) if self.attempts else None
        return isinstance(record, dict) and bool(record.get("requeued"))

    @property
    def replicas(self) -> tuple[int, int] | None:
        """How many replicas the newest attempt has, and how many the job; None where it has them all."""
        return read_replica_counts(self.attempts[-1]) if self.attempts else None

    def progress(self) -> TrainingProgress:
        """The last step, its loss, and the last loss of an evaluation."""
        step: StepMetric | None = None
        evaluation: EvalMetric | None = None
        for line in reversed(read_tail(self.run.metrics, _TAIL_BYTES).splitlines()):
            # Where lines are many, reading them all as JSON would be most of the work.
            if step is not None and (evaluation is not None or b'"eval_loss"' not in line):
                continue
            try:
                metric = parse_metric(json.loads(line)).metric
            except (ValueError, RecursionError, WrongValue):  # torn, or cut where the tail begins
                continue
            if step is None and isinstance(metric, StepMetric):
                step = metric
            elif evaluation is None and isinstance(metric, EvalMetric):
                evaluation = metric
        return TrainingProgress(
            None if step is None else step.step,
            None if step is None else step.loss,
            None if evaluation is None else evaluation.eval_loss,
        )

    def batch_logs(self) -> list[Path]:
        """What the batch shell, or the local process, of the newest submission has printed into."""
        folder = (self.run.sweep_of_element or self.run).submitit
        one = self.submission
        found = self.job if one is None or one.job is not None else (one.pid, None, "")
        if found is None or not folder.is_dir():
            return []
        stem = str(found[0]) if found[1] is None else f"{found[0]}_{found[1]}"
        return [path for end in ("out", "err") for path in sorted(folder.glob(f"{stem}_*log.{end}"))]

    def last_words(self) -> str:
        """The last line that the batch shell printed: of trouble before our supervisor only this is left."""
        for path in reversed(self.batch_logs()):
            lines = [
                line.strip() for line in read_tail(path, _TAIL_BYTES).decode(errors="replace").splitlines()
            ]
            if printed := [line for line in lines if line]:
                return printed[-1][:_MAX_LINE_LENGTH]
        return ""


def read_replica_counts(attempt: Attempt) -> tuple[int, int] | None:
    """How many replicas an attempt has, and how many its job; None where it has them all, or none of ours."""
    plan = read_json(attempt.plan)
    if not isinstance(plan, dict) or plan.get("whole_dp") is None:
        return None
    record = _validate_record(attempt.plan, plan, _REPLICA_FIELDS, *_REPLICA_FIELDS)
    return record["dp_replicate"] * record["dp_shard"], record["whole_dp"]


def _validate_record(path: Path, record: Any, kinds: _FieldTypes, *needed: str) -> dict[str, Any]:
    """The record, where its values are of these kinds, or null where they are not needed; else UsageError."""
    if not isinstance(record, dict):
        raise UsageError(f"{path}: is damaged: it holds no mapping; remove it")
    for name, kind in kinds.items():
        value = record.get(name)
        if not isinstance(value, kind) and (value is not None or name in needed):
            words = "text" if kind is str else "a number"
            raise UsageError(f"{path}: is damaged: {name} is {json.dumps(value)}, not {words}; remove it")
    return record


def _newest_submission(run: RunDir, origin: Provenance | None) -> SubmissionRecord | None:
    """The newest job of a run; of an element, the newest that holds it."""
    submissions = origin.submissions if origin else []
    for one in submissions:
        _validate_record((run.sweep_of_element or run).job, vars(one), _SUBMISSION_FIELDS, "time", "offset")
    if run.sweep_of_element is None:
        return submissions[-1] if submissions else None
    number = int(run.path.name)
    return next((one for one in reversed(submissions) if _includes_element(one, number)), None)


def _includes_element(one: SubmissionRecord, element: int) -> bool:
    if one.array is None:
        return True
    from hpcrun.slurm.ids import parse_array_elements

    return any(element - one.offset in indices for indices in parse_array_elements(one.array)[0])
