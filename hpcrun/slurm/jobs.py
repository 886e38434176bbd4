"""Jobs as squeue, scontrol and sacct print them, parsed into one record. No parser raises."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpcrun.slurm.ids import JobId, parse_job_id
from hpcrun.slurm.output_formats import leading_integer, parse_key_value_records, text_or_empty
from hpcrun.slurm.states import JobState, PendingReason, parse_job_state, parse_pending_reason
from hpcrun.units import parse_slurm_time

_COMMAND = "command="
SQUEUE_FORMAT = f"%i|%T|%r|%S|%N|%P|%M|%L|{_COMMAND}%o|%j"
"""The format for squeue -h: command and name come last because they may contain the delimiter."""
SACCT_FORMAT = "JobID,State,ExitCode,Reason,NodeList,Partition,Start,SubmitLine,JobName"
"""The columns for sacct --parsable2, the free texts last as well."""
SACCT_DELIMITER = "\x1f"
"""The delimiter for sacct: submit lines do not contain it."""

_SQUEUE_FIELDS = (
    "JobId",
    "JobState",
    "Reason",
    "StartTime",
    "NodeList",
    "Partition",
    "RunTime",
    "TimeLeft",
    "JobName",
)
_FIELD_OF_SACCT_COLUMN = {
    "JobID": "JobId",
    "State": "JobState",
    "Start": "StartTime",
    "SubmitLine": "Command",
}
"""scontrol's names for what sacct calls something else."""


@dataclass(frozen=True)
class JobRecord:
    """What Slurm reports about a job; what it does not report is empty, None, or unknown."""

    id: JobId
    state: JobState
    reason: PendingReason
    name: str = ""
    partition: str = ""
    nodes: str = ""
    """The allocation as a host list, for hostlist.expand."""
    excluded_nodes: str = ""
    """The job's --exclude as a host list; only scontrol shows it."""
    start: str = ""
    """Local time as Slurm prints it, 2026-11-29T15:06:47; of a pending job the estimate."""
    elapsed_s: float | None = None
    limit_s: float | None = None
    """math.inf for no limit."""
    exit_code: int | None = None
    restarts: int | None = None
    command: str = ""
    """The batch script, or the line that submitted it."""

    def is_of(self, run: str) -> bool:
        """Return whether this may be a job of the run with this id: Slurm reuses job numbers.

        The scripts of a run are in its directory. A job without a known script counts as the run's.
        """
        return not self.command or f"/{run}/" in f"{self.command}|{self.name}"


def parse_squeue(text: str) -> list[JobRecord]:
    """Parse the output of `squeue -h -o SQUEUE_FORMAT`."""
    return _job_records(_squeue_rows(text))


def _squeue_rows(text: str) -> Iterator[dict[str, str]]:
    cluster = ""
    for line in text.splitlines():
        parts = line.split("|", len(_SQUEUE_FIELDS) - 1)
        if line.startswith("CLUSTER: "):
            cluster = line.removeprefix("CLUSTER: ").strip()
        elif len(parts) == len(_SQUEUE_FIELDS):
            row = dict(zip(_SQUEUE_FIELDS, parts, strict=True)) | {"Cluster": cluster}
            if row["JobName"].startswith(_COMMAND):
                row["Command"], _, row["JobName"] = row["JobName"].removeprefix(_COMMAND).partition("|")
            yield row


def parse_scontrol_jobs(text: str) -> list[JobRecord]:
    """Parse the records of `scontrol show job` (without -o)."""
    return _job_records(iter(parse_key_value_records(text, "JobId")))


def parse_sacct(text: str) -> list[JobRecord]:
    """Parse sacct's rows under their header (--parsable2, JobName last)."""
    return _job_records(_sacct_rows(text))


def _sacct_rows(text: str) -> Iterator[dict[str, str]]:
    delimiter = SACCT_DELIMITER if SACCT_DELIMITER in text else "|"
    header: list[str] = []
    for line in text.splitlines():
        parts = line.split(delimiter, len(header) - 1 if header else -1)
        if parts[0] == "JobID":
            header = [_FIELD_OF_SACCT_COLUMN.get(name, name) for name in line.split(delimiter)]
        elif header and len(parts) == len(header):
            yield dict(zip(header, parts, strict=True))


def _job_records(rows: Iterator[dict[str, str]]) -> list[JobRecord]:
    return [_job_record(job, row) for row in rows if (job := _job_id(row)) is not None]


def _job_id(fields: Mapping[str, str]) -> JobId | None:
    job = parse_job_id(fields["JobId"])
    if job is not None and "ArrayJobId" in fields:
        elements = fields.get("ArrayTaskId", "")
        inner = elements if elements.isdigit() else f"[{elements}]"
        job = parse_job_id(f"{fields['ArrayJobId']}_{inner}") or job
    elif job is not None and "HetJobId" in fields:
        job = parse_job_id(f"{fields['HetJobId']}+{fields.get('HetJobOffset', '')}") or job
    cluster = fields.get("Cluster", "")
    return dataclasses.replace(job, cluster=cluster) if job and cluster else job


def _job_record(job: JobId, fields: Mapping[str, str]) -> JobRecord:
    """Make a record of fields under scontrol's names."""

    def text(key: str) -> str:
        return text_or_empty(fields.get(key, ""))

    elapsed, left = parse_slurm_time(fields.get("RunTime", "")), parse_slurm_time(fields.get("TimeLeft", ""))
    limit = parse_slurm_time(fields.get("TimeLimit", ""))
    exit_code = re.fullmatch(r"([0-9]{1,5}):[0-9]{1,5}", fields.get("ExitCode", "").strip())
    return JobRecord(
        id=job,
        state=parse_job_state(fields.get("JobState", "")),
        reason=parse_pending_reason(fields.get("Reason", "")),
        name=fields.get("JobName", ""),
        partition=text("Partition"),
        nodes=text("NodeList"),
        excluded_nodes=text("ExcNodeList"),
        start=text("StartTime"),
        elapsed_s=elapsed,
        limit_s=limit if elapsed is None or left is None else elapsed + left,
        exit_code=int(exit_code[1]) if exit_code else None,
        restarts=leading_integer(fields.get("Restarts", "")),
        command=text("Command"),
    )
