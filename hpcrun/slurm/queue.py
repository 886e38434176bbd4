"""Queries and cancels jobs: one squeue and one sacct call for any number of jobs."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.slurm.answers import parse_slurm_problem
from hpcrun.slurm.client import cluster_option, run_slurm_client
from hpcrun.slurm.jobs import (
    SACCT_DELIMITER,
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    JobRecord,
    parse_sacct,
    parse_squeue,
)

_HEADS = re.compile(r"JobID|CLUSTER:")
"""The beginnings of an answer without jobs."""
_MOST_WORDS = 80
_MOST_IDS = 5000
"""More may not fit on a command line; then all jobs are queried."""
_PHASES = ("running", "pending", "unknown", "ended")


class JobQuery(NamedTuple):
    """A job, or one element of an array; of the cluster here where none is named."""

    job: int
    element: int | None = None
    cluster: str = ""
    run: str = ""
    """The id of the run that the job should belong to; a job of another run does not count as found."""

    def __str__(self) -> str:
        """The id as Slurm's commands take it."""
        return str(self.job) if self.element is None else f"{self.job}_{self.element}"


class JobQueryResult(NamedTuple):
    """What Slurm knows; without a record and without a problem it does not know the job (any more)."""

    record: JobRecord | None = None
    trouble: str = ""
    """Why Slurm could not be queried, in the command's own words."""


class _JobIndex:
    """The records that a command printed, indexed: an array has thousands of elements."""

    def __init__(self, records: Iterable[JobRecord] = ()) -> None:
        self._jobs: defaultdict[int, list[JobRecord]] = defaultdict(list)
        self._elements: dict[tuple[int, int], JobRecord] = {}
        self._ranges: defaultdict[int, list[JobRecord]] = defaultdict(list)
        self._rest: dict[int, JobRecord] = {}
        for record in records:
            job = record.id
            self._jobs[job.job].append(record)
            if job.element is not None:
                self._elements[job.job, job.element] = record
            elif job.elements:
                self._ranges[job.job].append(record)
            elif record.state.final:
                # The elements that never started of an array that was cancelled as a whole are not listed any
                # more.
                self._rest[job.job] = record

    def find(self, query: JobQuery) -> JobRecord | None:
        record = self._of_this_number(query)
        return None if record and query.run and not record.is_of(query.run) else record

    def _of_this_number(self, query: JobQuery) -> JobRecord | None:
        records = self._jobs[query.job]
        if query.element is None:
            # For an array the element that still runs decides, for a heterogeneous job the first component.
            return min(records, key=lambda record: _PHASES.index(record.state.phase), default=None)
        if single := self._elements.get((query.job, query.element)):
            return single
        listed = (record for record in self._ranges[query.job] if record.id.holds(query.element))
        return next(listed, self._rest.get(query.job))


def query_jobs(
    questions: Iterable[JobQuery], timeout_s: float = 20.0, *, in_accounts: bool = True
) -> dict[JobQuery, JobQueryResult]:
    """Query Slurm about jobs, with one squeue call a cluster.

    Never raises: if squeue is missing, or it or sacct fails, the result holds the error, because a failed
    query does not prove that a job is gone. On clusters without accounts a job that squeue forgot is unknown;
    so it is without `in_accounts`. `timeout_s` is the limit of each call.
    """
    by_cluster: defaultdict[str, list[JobQuery]] = defaultdict(list)
    for query in dict.fromkeys(questions):
        by_cluster[query.cluster].append(query)
    answers = {}
    for cluster, queries in by_cluster.items():
        current, trouble = _run_job_query(_squeue_command(queries, cluster), parse_squeue, timeout_s)
        forgotten = [query for query in queries if current.find(query) is None]
        older = _JobIndex()
        if forgotten and not trouble and in_accounts and shutil.which("sacct"):
            older, trouble = _run_job_query(_sacct_command(forgotten, cluster), parse_sacct, timeout_s)
        for query in queries:
            record = current.find(query) or older.find(query)
            answers[query] = JobQueryResult(record, "" if record else trouble)
    return answers


def _squeue_command(queries: Sequence[JobQuery], cluster: str) -> list[str]:
    return ["squeue", "-h", "-t", "all", "-o", SQUEUE_FORMAT, *_selection_options(queries, cluster)]


def _sacct_command(queries: Sequence[JobQuery], cluster: str) -> list[str]:
    words = ["sacct", "--parsable2", f"--delimiter={SACCT_DELIMITER}", "--allocations", "-o", SACCT_FORMAT]
    return [*words, *_selection_options(queries, cluster)]


def _selection_options(queries: Sequence[JobQuery], cluster: str) -> list[str]:
    # An element that waits is only found by the id of its array.
    jobs = dict.fromkeys(str(query.job) for query in queries)
    ids = ["-j", ",".join(jobs)] if len(jobs) <= _MOST_IDS else []
    return [*ids, *cluster_option(cluster)]


def _run_job_query(
    argv: Sequence[str], parse: Callable[[str], list[JobRecord]], timeout_s: float
) -> tuple[_JobIndex, str]:
    """What a command knows, and what went wrong."""
    try:
        # By default Slurm cuts the list of an array's waiting elements short.
        done = run_slurm_client(argv, timeout_s=timeout_s, extra={"SLURM_BITSTR_LEN": "0"})
    except SiteError as error:
        # The whole line is long, and holds the delimiter, which is no character for a terminal.
        return _JobIndex(), str(error).replace(" ".join(argv), argv[0])
    records = parse(done.stdout)
    trouble = _problem_text(argv[0], done)
    if not records and not trouble and not done.exit_code:
        trouble = _not_understood(argv[0], done.stdout)
    return _JobIndex(records), trouble


def _not_understood(command: str, answer: str) -> str:
    """Why an answer without a job is no proof that there is none: it is not what this command prints."""
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    if any(_HEADS.match(line) for line in lines) or not lines:
        return ""
    words = "".join(letter if letter.isprintable() else "?" for letter in lines[0])[:_MOST_WORDS]
    return f"{command} printed no list of jobs: {words!r}; is it Slurm's own {command}?"


def _problem_text(command: str, done: process.CompletedCommand) -> str:
    output = f"{done.stderr}\n{done.stdout}".strip() if done.exit_code else done.stderr
    trouble = parse_slurm_problem(output)
    if trouble and trouble.kind in ("no-job", "no-accounting"):
        return ""
    if trouble:
        return f"{command} said: {trouble.text}" + (f"; {trouble.remedy}" if trouble.remedy else "")
    return (
        f"{command} ended with exit code {done.exit_code}: {output or 'no words'}" if done.exit_code else ""
    )


def cancel_job(job: JobQuery, how: Literal["pending", "save", "now"], timeout_s: float = 30.0) -> None:
    """pending: take what waits out of the queue; save: ask the batch shell to save and stop; now: end it all.

    SiteError with scancel's words; a job that is over is no error.
    """
    words = {
        # With this filter Slurm 22.05 takes all waiting elements of the array, whichever is named.
        "pending": ["--state=PENDING"] if job.element is None else [],
        "save": ["--state=RUNNING", "--batch", "--signal=TERM"],
        "now": [],
    }[how]
    done = run_slurm_client(["scancel", *words, *cluster_option(job.cluster), str(job)], timeout_s=timeout_s)
    trouble = parse_slurm_problem(done.stderr)
    is_over = trouble is not None and trouble.kind in ("no-job", "ended")
    if done.exit_code and not is_over and not f"{done.stderr}{done.stdout}".strip():
        # scancel also ends like this when the job has ended before it.
        is_over = _is_over(job)
    if not is_over:
        done.require_success()


def _is_over(job: JobQuery) -> bool:
    """Whether a job has ended or is ending, as far as squeue reports."""
    record, trouble = query_jobs([job])[job]
    if record is None:
        return not trouble
    return record.state.final or "COMPLETING" in (record.state.name, *record.state.flags)
