"""Jobs as squeue, scontrol and sacct print them, read into one record. No parser raises."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from hpcrun.slurm.ids import JobId, parse_job_id
from hpcrun.slurm.output_formats import (
    SlurmFields,
    json_number,
    json_string,
    leading_integer,
    nested_value,
    parse_json_objects,
    parse_key_value_records,
    parse_slurm_table,
    text_or_empty,
)
from hpcrun.slurm.states import UNKNOWN, JobState, PendingReason, parse_job_state, parse_pending_reason
from hpcrun.units import parse_slurm_time

_COMMAND = "command="
SQUEUE_FORMAT = f"%i|%T|%r|%S|%N|%P|%M|%L|{_COMMAND}%o|%j"
"""What to ask squeue for (with -h): command and name come last, because they may hold the delimiter."""
SACCT_FORMAT = (
    "JobID,State,ExitCode,Reason,NodeList,Partition,Start,End,ElapsedRaw,TimelimitRaw,SubmitLine,JobName"
)
"""What to ask sacct for, with --parsable2; for the same reason."""
SACCT_DELIMITER = "\x1f"
"""For its --delimiter: no line that submits a job holds this one."""

_SQUEUE_FIELDS = (
    "JOBID",
    "STATE",
    "REASON",
    "START_TIME",
    "NODELIST",
    "PARTITION",
    "TIME",
    "TIME_LEFT",
    "NAME",
)


@dataclass(frozen=True)
class JobRecord:
    """What Slurm says about a job; a part that it does not say is empty, None, or unknown."""

    id: JobId
    state: JobState
    reason: PendingReason
    name: str = ""
    partition: str = ""
    nodes: str = ""
    """The allocation as a host list, for hostlist.expand."""
    start: str = ""
    """Local time as Slurm prints it, 2026-11-29T15:06:47; of a pending job the estimate."""
    end: str = ""
    elapsed_s: float | None = None
    limit_s: float | None = None
    """math.inf for no limit."""
    exit_code: int | None = None
    signal: int | None = None
    restarts: int | None = None
    stdout: str = ""
    command: str = ""
    """The batch script, or the line that submitted it."""
    fields: SlurmFields = field(default_factory=dict, repr=False, compare=False)
    """All that the command printed about the job, under the command's own names."""

    def is_of(self, run: str) -> bool:
        """Whether it may be a job of the run with this id: Slurm gives the numbers of old jobs to new ones.

        Our scripts lie below the run's directory; where Slurm names no script nothing is known against it.
        """
        return not self.command or f"/{run}/" in f"{self.command}|{self.name}"


def parse_squeue(text: str) -> list[JobRecord]:
    """squeue's jobs: asked for with SQUEUE_FORMAT, or in one of its own tables (default, -l, --start)."""
    table = parse_slurm_table(text, "JOBID")
    rows = [_table_fields(row) for row in table] or list(_delimited(text))
    return [record for row in rows if (record := _from_squeue(row)) is not None]


def _delimited(text: str) -> Iterator[dict[str, str]]:
    cluster = ""
    for line in text.splitlines():
        parts = line.split("|", len(_SQUEUE_FIELDS) - 1)
        if line.startswith("CLUSTER: "):
            cluster = line.removeprefix("CLUSTER: ").strip()
        elif len(parts) == len(_SQUEUE_FIELDS):
            row = dict(zip(_SQUEUE_FIELDS, parts, strict=True)) | {"CLUSTER": cluster}
            if row["NAME"].startswith(_COMMAND):
                command, _, name = row["NAME"].removeprefix(_COMMAND).partition("|")
                row |= {"COMMAND": command, "NAME": name}
            yield row


def _table_fields(row: dict[str, str]) -> dict[str, str]:
    """A row of a table under the names of _SQUEUE_FIELDS: its last column holds the nodes or the reason."""
    last = row.get("NODELIST(REASON)", "")
    about = {"REASON": last} if last.startswith("(") else {"NODELIST": last}
    return {**row, "STATE": row.get("STATE", row.get("ST", "")), **about}


def _from_squeue(row: SlurmFields) -> JobRecord | None:
    found = parse_job_id(row["JOBID"])
    if found is None:
        return None
    cluster = row.get("CLUSTER", "")
    elapsed, left = parse_slurm_time(row.get("TIME", "")), parse_slurm_time(row.get("TIME_LEFT", ""))
    limit = parse_slurm_time(row.get("TIME_LIMI", ""))
    return JobRecord(
        id=dataclasses.replace(found, cluster=cluster) if cluster else found,
        state=parse_job_state(row.get("STATE", "")),
        reason=parse_pending_reason(row.get("REASON", "")),
        name=row.get("NAME", ""),
        partition=row.get("PARTITION", ""),
        nodes=text_or_empty(row.get("NODELIST", "")),
        start=text_or_empty(row.get("START_TIME", "")),
        elapsed_s=elapsed,
        limit_s=limit if elapsed is None or left is None else elapsed + left,
        command=text_or_empty(row.get("COMMAND", "")),
        fields=row,
    )


def parse_scontrol_jobs(text: str) -> list[JobRecord]:
    """The records of `scontrol show job` (without -o)."""
    records = parse_key_value_records(text, "JobId")
    return [record for fields in records if (record := _from_scontrol(fields)) is not None]


def _from_scontrol(fields: dict[str, str]) -> JobRecord | None:
    found = parse_job_id(fields["JobId"])
    if found is None:
        return None
    if "ArrayJobId" in fields:
        elements = fields.get("ArrayTaskId", "")
        inner = elements if elements.isdigit() else f"[{elements}]"
        found = parse_job_id(f"{fields['ArrayJobId']}_{inner}") or found
    elif "HetJobId" in fields:
        found = parse_job_id(f"{fields['HetJobId']}+{fields.get('HetJobOffset', '')}") or found
    exit_code, signal = _exit(fields.get("ExitCode", ""))
    return JobRecord(
        id=found,
        state=parse_job_state(fields.get("JobState", "")),
        reason=parse_pending_reason(fields.get("Reason", "")),
        name=fields.get("JobName", ""),
        partition=text_or_empty(fields.get("Partition", "")),
        nodes=text_or_empty(fields.get("NodeList", "")),
        start=text_or_empty(fields.get("StartTime", "")),
        end=text_or_empty(fields.get("EndTime", "")),
        elapsed_s=parse_slurm_time(fields.get("RunTime", "")),
        limit_s=parse_slurm_time(fields.get("TimeLimit", "")),
        exit_code=exit_code,
        signal=signal,
        restarts=leading_integer(fields.get("Restarts", "")),
        stdout=text_or_empty(fields.get("StdOut", "")),
        command=text_or_empty(fields.get("Command", "")),
        fields=fields,
    )


def _exit(text: str) -> tuple[int | None, int | None]:
    """Exit code and signal of `3:0`."""
    match = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,5})", text.strip())
    return (int(match[1]), int(match[2])) if match else (None, None)


def parse_sacct(text: str) -> list[JobRecord]:
    """sacct's rows under their header (--parsable2, JobName last); jobs and, where asked for, their steps."""
    delimiter = SACCT_DELIMITER if SACCT_DELIMITER in text else "|"
    header: list[str] = []
    found = []
    for line in text.splitlines():
        parts = line.split(delimiter, len(header) - 1 if header else -1)
        if parts[0] in ("JobID", "JobIDRaw"):
            header = line.split(delimiter)
        elif header and len(parts) == len(header):
            record = _from_sacct(dict(zip(header, parts, strict=True)))
            found += [record] if record else []
    return found


def _from_sacct(row: dict[str, str]) -> JobRecord | None:
    found = parse_job_id(row.get("JobID", row.get("JobIDRaw", "")))
    if found is None:
        return None
    cluster = row.get("Cluster", "")
    exit_code, signal = _exit(row.get("ExitCode", ""))
    raw = row.get("ElapsedRaw", "")
    return JobRecord(
        id=dataclasses.replace(found, cluster=cluster) if cluster else found,
        state=parse_job_state(row.get("State", "")),
        reason=parse_pending_reason(row.get("Reason", "")),
        name=row.get("JobName", ""),
        partition=text_or_empty(row.get("Partition", "")),
        nodes=text_or_empty(row.get("NodeList", "")),
        start=text_or_empty(row.get("Start", "")),
        end=text_or_empty(row.get("End", "")),
        elapsed_s=leading_integer(raw) if raw else parse_slurm_time(row.get("Elapsed", "")),
        limit_s=parse_slurm_time(row.get("TimelimitRaw", row.get("Timelimit", ""))),
        exit_code=exit_code,
        signal=signal,
        restarts=leading_integer(row.get("Restarts", "")),
        command=text_or_empty(row.get("SubmitLine", "")),
        fields=row,
    )


def parse_jobs_json(text: str) -> list[JobRecord]:
    """The jobs of `squeue --json` and `scontrol show jobs --json`, data_parser v0.0.38 to v0.0.45.

    The text formats are smaller and change less: ask for those where there is a choice.
    """
    return [record for job in parse_json_objects(text, "jobs") if (record := _from_json(job)) is not None]


def _from_json(job: dict[str, Any]) -> JobRecord | None:
    found = _json_id(job)
    if found is None:
        return None
    state = job.get("job_state")
    limit, raw_exit = json_number(job.get("time_limit")), job.get("exit_code")
    exit_code, signal = nested_value(raw_exit, "return_code"), nested_value(raw_exit, "signal", "id")
    if isinstance(raw_exit, int):  # a wait status, until v0.0.39
        exit_code, signal = raw_exit >> 8, raw_exit & 0x7F
    restarts = json_number(job.get("restart_cnt"))
    return JobRecord(
        id=found,
        state=parse_job_state(state if isinstance(state, list) else json_string(state) or UNKNOWN),
        reason=parse_pending_reason(json_string(job.get("state_reason"))),
        name=json_string(job.get("name")),
        partition=json_string(job.get("partition")),
        nodes=text_or_empty(json_string(job.get("nodes"))),
        start=_clock(job.get("start_time")),
        end=_clock(job.get("end_time")),
        limit_s=None if limit is None else limit * 60,
        exit_code=_whole(json_number(exit_code)),
        signal=_whole(json_number(signal)),
        restarts=_whole(restarts),
        stdout=json_string(job.get("stdout_expanded")) or json_string(job.get("standard_output")),
        fields={key: value for key, value in job.items() if isinstance(value, str)},
    )


def _json_id(job: dict[str, Any]) -> JobId | None:
    own, array = _whole(json_number(job.get("job_id"))), _whole(json_number(job.get("array_job_id")))
    element, listed = _whole(json_number(job.get("array_task_id"))), json_string(job.get("array_task_string"))
    het, offset = _whole(json_number(job.get("het_job_id"))), _whole(json_number(job.get("het_job_offset")))
    text = str(own)
    if array and element is not None:
        text = f"{array}_{element}"
    elif array and listed:
        text = f"{array}_[{listed}]"
    elif het:
        text = f"{het}+{offset}"
    found, cluster = parse_job_id(text), json_string(job.get("cluster"))
    return dataclasses.replace(found, cluster=cluster) if found else None


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) else None


def _clock(value: Any) -> str:
    """Seconds since 1970 as Slurm prints them; 0 means not yet."""
    seconds = _whole(json_number(value))
    try:
        return datetime.fromtimestamp(seconds).isoformat() if seconds else ""
    except (ValueError, OverflowError, OSError):
        return ""
