"""`submit`: from a job file to a job that waits in Slurm's queue, or that runs here in the background."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.errors import SiteError, UsageError
from hpcrun.files import read_regular
from hpcrun.finding import Finding
from hpcrun.runs import run_lock
from hpcrun.slurm.arrays import ArrayChunk
from hpcrun.slurm.ids import JobId
from hpcrun.slurm.queue import JobQuery, query_jobs
from hpcrun.slurm.sbatch import (
    cancel_submitted_job,
    format_array_indices,
    log_file_pattern,
    render_submission_script,
    submission_environment,
)
from hpcrun.slurm.script_context import ArrayContext
from hpcrun.specs.cluster import render_cluster
from hpcrun.specs.origin import record_provenance
from hpcrun.specs.predecessors import write_predecessors
from hpcrun.specs.provenance import (
    Provenance,
    SubmissionRecord,
    count_attempts,
    read_provenance,
    write_provenance,
)
from hpcrun.specs.records import write_atomically
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sweep import write_sweep
from hpcrun.submission.dependencies import NoteCallback
from hpcrun.submission.request import PreparedSubmission, SubmissionRequest, refuse_submission
from hpcrun.tuning.job_settings import preview_job_settings
from hpcrun.units import parse_time

_SLURM_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class SubmissionResult:
    """A run that was handed over: as one job or, for a sweep, as one or more arrays."""

    run: RunDir
    submissions: tuple[SubmissionRecord, ...]
    cluster: str
    """The profile's name; `local` for a process of this machine; empty without a profile."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for --json."""
        first = self.submissions[0]
        jobs = [submission.job for submission in self.submissions if submission.job is not None]
        where = {"cluster": self.cluster, "pid": first.pid}
        return {"run": self.run.id, "path": str(self.run.path), "job": first.job, "jobs": jobs} | where

    def describe(self) -> str:
        """In words, as what it was handed over."""
        if self.cluster == "local":
            return f"runs here, in the background, as process {self.submissions[0].pid}"
        jobs = ", ".join(
            f"{submission.job}[{submission.array}]" if submission.array else str(submission.job)
            for submission in self.submissions
        )
        on = f" on {self.cluster}" if self.cluster else ""
        return f"job{'s' * (len(self.submissions) > 1)} {jobs}{on}"


@dataclass(frozen=True)
class DryRunResult:
    """What would be submitted, and what would be refused."""

    script: str
    refused: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values for --json."""
        return {"script": self.script, "refused": [str(problem) for problem in self.refused]}


def dry_run(
    request: SubmissionRequest, note: NoteCallback, detail: NoteCallback = lambda _: None
) -> DryRunResult:
    """Return the script that `submit` would submit, except for the run's id; creates nothing, needs no Slurm.

    `note` is called with the findings about the job and the cluster, refusals included.
    """
    job = PreparedSubmission(request, note, note)
    deny = [*(job.cluster.env_deny if job.cluster else ()), *job.resolved.spec.env_deny]
    dropped = submission_environment(os.environ, deny)[1]
    if dropped:
        detail(f"left out of the job's environment: {', '.join(dropped)}")
    for setting in (
        () if job.is_local else preview_job_settings(job.resolved.spec, job.cluster, os.environ).everywhere
    ):
        detail(f"the ranks get {setting}")
    findings = job.findings()
    refusals = tuple(finding for finding in findings if finding.severity == "error")
    for finding in findings:
        note(f"this would be refused: {finding}" if finding in refusals else str(finding))
    run = job.resume or RunDir(job.place / f"{job.resolved.spec.name}-dry-run")
    if job.is_local:
        note("it would run here, as a process in the background; this is the script that Slurm would get")
    chunks = job.chunks()
    if len(chunks) > 1:
        note(f"the sweep becomes {len(chunks)} arrays; this is the script of the first")
    array = None
    if chunks:
        first = chunks[0]
        indices = [element - first.offset for element in first.elements]
        array = ArrayContext(indices=format_array_indices(indices, first.throttle), offset=first.offset)
    text = render_submission_script(job.library, job.template, job.context(run), run.submitit, array, note)
    return DryRunResult(text, refusals)


def submit_job(
    request: SubmissionRequest, note: NoteCallback, detail: NoteCallback = lambda _: None
) -> SubmissionResult:
    """Check a job, create its run directory and submit it; an error leaves no partial run.

    `note` is called with what the user should know, `detail` with what may be of interest.
    """
    with _submission_lock(request.resume):
        job = PreparedSubmission(request, note, detail)
        findings = job.findings()
        if refusals := [finding for finding in findings if finding.severity == "error"]:
            raise refuse_submission(refusals)
        for finding in findings:
            note(str(finding))
        with _make_run_directory(job) as run:
            record = _record_provenance(job, run)
            if job.is_local:
                submissions = [_start_locally(job, run, record)]
            else:
                submissions = _submit_to_slurm(job, run, record, detail)
    if not job.is_local:
        warn_of_unstartable_jobs(submissions, note)
    return SubmissionResult(run, tuple(submissions), job.cluster_name)


@contextmanager
def _submission_lock(resumed: RunDir | None) -> Iterator[None]:
    """Keep others from submitting this run between the look at its state and the record of its new job."""
    if resumed is None:
        yield
        return
    run = resumed.sweep_of_element or resumed
    text = f"another hpcrun process is submitting {run.id}; check with `hpcrun status {run.id}`"
    with run_lock.hold_lock_file(run, run.submission_lock, lambda: UsageError(text)):
        yield


@contextmanager
def _make_run_directory(job: PreparedSubmission) -> Iterator[RunDir]:
    """Create the run directory with all that the job reads; restore what was there if the body fails.

    SiteError if a file cannot be written, as on a full disk.
    """
    # Before anything is made: the root, too, would stay.
    log_file_pattern(job.place)
    run, elements = job.resume or create_run(job.resolved.spec.name, job.place), job.elements
    handed_over = False
    before: dict[Path, str] = {}
    try:
        files = [run.exit, run.spec, run.cluster, run.job, run.script, run.after]
        files += [path for element in map(run.element, elements) for path in (element.exit, element.spec)]
        before |= {path: read_regular(path).decode() for path in files if job.resume and path.exists()}
        _write_run_files(job, run)
        yield run
        handed_over = True
    except OSError as error:
        place = error.filename or run.path
        reason = error.strerror or error
        raise SiteError(f"{place}: cannot be written: {reason}; nothing was submitted") from None
    finally:
        if not handed_over and job.resume is None:
            shutil.rmtree(run.path, ignore_errors=True)
        elif not handed_over:
            _restore_files(before, job.note)


def _restore_files(before: Mapping[Path, str], note: NoteCallback) -> None:
    for path, text in before.items():
        try:
            write_atomically(path, text)
        except OSError as error:
            note(f"{path}: could not be put back as it was: {error.strerror}")


def _record_provenance(job: PreparedSubmission, run: RunDir) -> Provenance:
    """Where the run comes from, written down when it is made, with what it is to do now."""
    spec, name = job.resolved.spec, job.cluster_name or None
    template = None if job.is_local else job.template.path
    provenance = read_provenance(run)
    if provenance is None:
        provenance = record_provenance(run, spec, cluster=name, template=template)
        provenance = replace(provenance, inputs=dict(job.inputs.sources))
        return replace(provenance, kind="function", steps=None) if job.is_function else provenance
    steps = None if spec.command else spec.train.steps
    path = None if template is None else str(template)
    inputs = dict(job.inputs.sources)
    return replace(provenance, ranks=spec.ranks, steps=steps, cluster=name, template=path, inputs=inputs)


def _write_run_files(job: PreparedSubmission, run: RunDir) -> None:
    run.submitit.mkdir(mode=0o700, exist_ok=True)
    write_atomically(run.spec, job.resolved.render())
    if job.cluster is not None:
        write_atomically(run.cluster, render_cluster(job.cluster))
    else:
        run.cluster.unlink(missing_ok=True)
    write_predecessors(run, job.after, _count_attempts_before(job, run))
    # While a job waits or runs there is no record of its end.
    run.exit.unlink(missing_ok=True)
    if job.resolved.elements:
        _write_element_files(job, run)
    if job.request.furnish is not None:
        job.request.furnish(run)


def _write_element_files(job: PreparedSubmission, run: RunDir) -> None:
    if job.resume is None:
        write_sweep(run, [element.overrides for element in job.resolved.elements])
        run.elements.mkdir(mode=0o700)
    for number in job.elements:
        element = run.element(number)
        for folder in (element.path, element.checkpoints):
            folder.mkdir(mode=0o700, exist_ok=True)
        # Not write_atomically: syncing a thousand files takes minutes on some file systems.
        element.spec.write_text(job.resolved.elements[number].render(), encoding="utf-8")
        element.spec.chmod(0o600)
        element.exit.unlink(missing_ok=True)


def _count_attempts_before(job: PreparedSubmission, run: RunDir) -> dict[str, int]:
    return count_attempts(run, job.elements) if job.resume else {}


def _load_batch_task() -> Callable[[str], int]:
    """What the batch job runs; pickled by its name, so that it is loaded there and not here."""
    task: Callable[[str], int] = importlib.import_module("hpcrun.launch.batch_task").run_task
    return task


def _start_locally(job: PreparedSubmission, run: RunDir, record: Provenance) -> SubmissionRecord:
    """Start the run in the background; it is ended again where that cannot be recorded."""
    from hpcrun.slurm.executor import submit_background

    # As for an array, so that an element is known by its newest submission.
    elements = format_array_indices(job.elements) if job.elements else None
    time_limit = job.resolved.spec.resources.time
    limit = parse_time(time_limit).minutes if time_limit else None
    if limit is not None:
        # The limit is an element's, and one process runs them all.
        limit *= max(1, len(job.elements))
    now, host, before = time.time(), os.uname().nodename, _count_attempts_before(job, run)
    identity = submit_background(run.submitit, _load_batch_task(), str(run.path), limit_min=limit)
    made = SubmissionRecord(
        now, array=elements, host=host, pid=identity.pid, start_ticks=identity.start_ticks, attempts=before
    )
    is_recorded = False
    try:
        write_provenance(run, record.submitted(made))
        is_recorded = True
    finally:
        if not is_recorded:
            handle = process.ProcessHandle(identity)
            handle.signal(signal.SIGINT)
            handle.close()
    return made


def _submit_to_slurm(
    job: PreparedSubmission, run: RunDir, record: Provenance, detail: NoteCallback
) -> list[SubmissionRecord]:
    """Submit the job, or every array of the sweep; what was submitted is cancelled when the rest fails."""
    from hpcrun.slurm.executor import TemplateExecutor

    now, made, cluster = time.time(), list[SubmissionRecord](), job.cluster
    begun = _count_attempts_before(job, run)
    chunks: list[ArrayChunk | None] = [*job.chunks()] or [None]
    context = job.context(run)
    handed_over = False
    try:
        for chunk in chunks:
            before = [f"afterany:{made[chunk.after].job}"] if chunk and chunk.after is not None else []
            wait = {"dependency": ",".join([*job.dependencies, *before])} if before else {}
            executor = TemplateExecutor(
                run.submitit,
                job.library,
                job.template,
                context.model_copy(update={"directives": context.directives | wait}),
                slurm_cluster=job.slurm_cluster,
                slurm_module=cluster.slurm_module if cluster else None,
                note=job.note,
                detail=detail,
            )
            if chunk is None:
                done = executor.submit_task(_load_batch_task(), str(run.path))
            else:
                done = executor.submit_elements(
                    _load_batch_task(),
                    str(run.path),
                    elements=chunk.elements,
                    offset=chunk.offset,
                    throttle=chunk.throttle,
                )
            offset = chunk.offset if chunk else 0
            submission = SubmissionRecord(
                now, done.job.job, done.job.cluster, done.array, offset, attempts=begun
            )
            made.append(submission)
            if len(made) == 1:
                write_atomically(run.script, done.script)
            write_provenance(run, record.submitted(*made))
        handed_over = True
    except SiteError as error:
        raise _sbatch_error(job, str(error)) from None
    finally:
        if not handed_over:
            for submission in made:
                assert submission.job is not None
                cancel_submitted_job(JobId(submission.job, cluster=submission.cluster), job.note)
    return made


def _sbatch_error(job: PreparedSubmission, text: str) -> SiteError:
    """Return sbatch's error, with the keys of the raw options that it names, and what remains of the
    submission."""
    raw = job.resolved.spec.resources.sbatch
    named = [option for option in raw if re.search(rf"--{re.escape(option)}(?![\w-])", text)]
    keys = f" ({', '.join(f'resources.sbatch.{option}' for option in named)})" if named else ""
    left = "" if job.resume else "; no run was made, and --dry-run shows the script"
    return SiteError(f"{text}{keys}{left}")


def warn_of_unstartable_jobs(submissions: Sequence[SubmissionRecord], note: NoteCallback) -> None:
    """Warn of a job that can never start: Slurm accepts some of these, and reports it in the queue only."""
    first = submissions[0]
    assert first.job is not None
    question = JobQuery(first.job, cluster=first.cluster)
    record = query_jobs([question], _SLURM_TIMEOUT_S)[question].record
    reason = record.reason if record and record.state.phase == "pending" else None
    if reason is not None and reason.outlook in ("never", "held"):
        note(f"job {first.job} will not start by itself: {reason.words} (Slurm says {reason.code})")
