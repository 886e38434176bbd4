"""Jobs of both releases, read from all that squeue, scontrol and sacct print about them."""

from __future__ import annotations

import math
from collections.abc import Callable

from hpcrun.slurm.ids import JobId
from hpcrun.slurm.jobs import (
    SACCT_DELIMITER,
    SACCT_FORMAT,
    JobRecord,
    parse_sacct,
    parse_scontrol_jobs,
    parse_squeue,
)

Captured = Callable[[str, str], str]


def by_id(records: list[JobRecord]) -> dict[str, JobRecord]:
    return {
        f"{record.id}{'[]' if len(record.id.elements) and record.id.element is None else ''}": record
        for record in records
    }


def test_squeue_asked_for_our_format(captured: Captured, version: str) -> None:
    jobs = parse_squeue(captured(version, "squeue-format"))
    assert len(jobs) == 9
    trained = next(job for job in jobs if job.name == "train a|b")
    assert (trained.state.name, trained.nodes, trained.partition) == ("RUNNING", "n[01-02]", "main")
    assert trained.limit_s == 600
    array = next(job for job in jobs if len(job.id.elements) and job.id.element is None)
    assert (array.id.elements, array.nodes, array.start) == ((range(2, 10),), "", "")
    assert array.reason.code == "JobArrayTaskLimit"
    assert [job.id.offset for job in jobs if job.id.offset is not None] == [0, 1]
    waiting = next(job for job in jobs if job.reason.code == "Resources")
    assert waiting.start.startswith("2026-11-29T15:16")
    endless = next(job for job in jobs if job.reason.code == "Dependency")
    assert endless.limit_s == math.inf


def test_the_script_of_a_job_is_told_beside_its_name() -> None:
    rows = [
        "7|RUNNING|None|N/A|n1|main|0:04|5:00|command=/runs/a.sh|x|y",
        "8|RUNNING|None|N/A|n1|main|0:04|5:00|x|y",
    ]
    shown = [(job.command, job.name) for job in parse_squeue("\n".join(rows))]
    assert shown == [("/runs/a.sh", "x|y"), ("", "x|y")]


def test_clusters_are_kept_apart() -> None:
    line = "7|RUNNING|None|N/A|n1|main|0:04|5:00|a"
    jobs = parse_squeue(f"CLUSTER: north\n{line}\n\nCLUSTER: south\n{line}\nslurm_load_jobs error: x|y\n")
    assert [(job.id.job, job.id.cluster) for job in jobs] == [(7, "north"), (7, "south")]


def test_scontrol_on_a_running_a_failed_a_cancelled_and_a_requeued_job(
    captured: Captured, version: str
) -> None:
    def show(name: str) -> JobRecord:
        (job,) = parse_scontrol_jobs(captured(version, f"show-job-{name}"))
        return job

    running, failed = show("running"), show("failed")
    assert (running.name, running.state.name, running.nodes) == ("train a|b", "RUNNING", "n[01-02]")
    assert (running.limit_s, running.restarts, running.partition) == (600, 0, "main")
    assert (failed.state.name, failed.exit_code) == ("FAILED", 3)
    assert failed.reason.code == "NonZeroExitCode"
    cancelled = show("cancelled")
    assert (cancelled.state.final, cancelled.limit_s, cancelled.nodes) == (True, math.inf, "")
    requeued = show("requeued")
    assert (requeued.restarts, requeued.state.phase, requeued.reason.code) == (1, "pending", "BeginTime")
    # nodes that it had are not nodes that it has
    assert requeued.nodes == ""


def test_the_elements_of_an_array(captured: Captured, version: str) -> None:
    waiting, *running = parse_scontrol_jobs(captured(version, "show-job-array"))
    assert (waiting.id.elements, waiting.state.phase) == ((range(2, 10),), "pending")
    assert [job.id.element for job in running] == [1, 0]
    assert {job.id.job for job in running} == {waiting.id.job}


def test_a_job_name_cannot_pass_for_other_fields() -> None:
    text = "JobId=5 JobName=x JobState=COMPLETED\nJobState=COMPLETED\n   JobState=FAILED\n   ExitCode=1:0\n"
    (job,) = parse_scontrol_jobs(text)
    assert (job.name, job.state.name, job.exit_code) == ("x JobState=COMPLETED", "FAILED", 1)


def test_a_component_of_a_heterogeneous_job() -> None:
    (job,) = parse_scontrol_jobs("JobId=20 HetJobId=19 HetJobOffset=1 JobName=wrap\n   JobState=RUNNING\n")
    assert job.id == JobId(19, offset=1)


def test_no_job_is_no_record(captured: Captured, version: str) -> None:
    assert parse_scontrol_jobs(captured(version, "show-job-unknown")) == []
    assert parse_sacct(captured(version, "sacct")) == []


def sacct(*rows: str) -> list[JobRecord]:
    return parse_sacct("\n".join([SACCT_FORMAT.replace(",", "|"), *rows]) + "\n")


def test_sacct() -> None:
    jobs = sacct(
        "123|CANCELLED by 0|0:15|None|n[01-02]|main|2026-11-29T15:00:00|sbatch /x.sh|train a|b",
        "124|PENDING|0:0|Priority|None assigned|main|None||x",
        "19+0|OUT_OF_MEMORY|0:125|None|n01|main|None||het",
        "123_[0-400:4%2]|PENDING|0:0|None|None assigned|main|Unknown||sweep",
        "123.batch|FAILED|1:0||n01||Unknown||batch",
        "garbage",
    )
    assert [str(job.id) for job in jobs] == ["123", "124", "19+0", "123", "123"]
    first, second, third, fourth, step = jobs
    assert (first.state.name, first.state.detail, first.name) == ("CANCELLED", "by 0", "train a|b")
    assert first.command == "sbatch /x.sh"
    # None broke others (slurm-mail#58)
    assert (second.start, second.nodes) == ("", "")
    assert (third.state.final, third.id.offset) == (True, 0)
    assert (fourth.id.elements, fourth.nodes) == ((range(0, 401, 4),), "")
    assert (step.exit_code, step.name) == (1, "batch")


def test_a_line_that_submits_may_hold_what_a_name_holds() -> None:
    header, row = SACCT_FORMAT.split(","), ["7", *["x"] * 6, "sbatch -J a|b", "a|b"]
    (job,) = parse_sacct("".join(SACCT_DELIMITER.join(one) + "\n" for one in (header, row)))
    assert (job.command, job.name) == ("sbatch -J a|b", "a|b")


def test_sacct_in_another_order_of_columns() -> None:
    (job,) = parse_sacct("JobID|State|Cluster|Restarts\n7|COMPLETED|south|2\n")
    assert (job.id.cluster, job.restarts, job.state.name) == ("south", 2, "COMPLETED")


def test_the_excluded_nodes_of_a_job() -> None:
    shown = "JobId=5 JobName=x\n   JobState=PENDING ExcNodeList={}\n"
    lists = [parse_scontrol_jobs(shown.format(text))[0].excluded_nodes for text in ("n[1-2]", "(null)")]
    assert lists == ["n[1-2]", ""]
