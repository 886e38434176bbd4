"""Jobs of both releases, read from all that squeue, scontrol and sacct print about them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from hpcrun.slurm.ids import JobId
from hpcrun.slurm.jobs import (
    SACCT_DELIMITER,
    SACCT_FORMAT,
    JobRecord,
    parse_jobs_json,
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
    array = next(job for job in jobs if job.id.throttle)
    assert (array.id.elements, array.id.throttle, array.nodes, array.start) == ((range(2, 10),), 2, "", "")
    assert array.reason.code == "JobArrayTaskLimit"
    assert [job.id.offset for job in jobs if job.id.offset is not None] == [0, 1]
    waiting = next(job for job in jobs if job.reason.code == "Resources")
    assert waiting.start.startswith("2026-11-29T15:16")
    endless = next(job for job in jobs if job.reason.code == "Dependency")
    assert endless.limit_s == math.inf


@pytest.mark.parametrize("name", ["squeue", "squeue-long"])
def test_squeue_s_own_tables(captured: Captured, version: str, name: str) -> None:
    table = {str(job.id): job for job in parse_squeue(captured(version, name))}
    ours = {str(job.id): job for job in parse_squeue(captured(version, "squeue-format"))}
    assert list(table) == list(ours)
    for key, job in table.items():
        assert (job.id, job.state, job.nodes, job.partition) == (
            ours[key].id,
            ours[key].state,
            ours[key].nodes,
            ours[key].partition,
        )
        assert ours[key].name.startswith(job.name)
        assert job.elapsed_s == ours[key].elapsed_s
    if name == "squeue-long":
        assert {job.limit_s for job in table.values()} == {300, 600, math.inf}


def test_estimated_starts(captured: Captured, version: str) -> None:
    jobs = parse_squeue(captured(version, "squeue-start"))
    assert [bool(job.start) for job in jobs] == [True, False, False]
    assert jobs[0].fields["SCHEDNODES"] == "n[01-08]"
    assert {job.state.name for job in jobs} == {"PENDING"}


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
    assert running.stdout.startswith("/scratch/demo/")
    assert (failed.state.name, failed.exit_code, failed.signal) == ("FAILED", 3, 0)
    assert failed.reason.code == "NonZeroExitCode"
    cancelled = show("cancelled")
    assert (cancelled.state.final, cancelled.limit_s, cancelled.nodes) == (True, math.inf, "")
    requeued = show("requeued")
    assert (requeued.restarts, requeued.state.phase, requeued.reason.code) == (1, "pending", "BeginTime")
    # nodes that it had are not nodes that it has
    assert requeued.nodes == ""


def test_gpus_of_a_job_are_spelt_by_release(captured: Captured) -> None:
    spelt = {
        version: parse_scontrol_jobs(captured(version, "show-job-running"))[0].fields["TresPerNode"]
        for version in ("22.05.8", "25.11.7")
    }
    assert spelt == {"22.05.8": "gres:gpu:2", "25.11.7": "gres/gpu:2"}


def test_the_elements_of_an_array(captured: Captured, version: str) -> None:
    waiting, *running = parse_scontrol_jobs(captured(version, "show-job-array"))
    assert (waiting.id.elements, waiting.id.throttle, waiting.state.phase) == ((range(2, 10),), 2, "pending")
    assert [job.id.element for job in running] == [1, 0]
    assert {job.id.job for job in running} == {waiting.id.job}
    assert running[0].fields["JobId"] != str(waiting.id.job)


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
        "123|CANCELLED by 0|0:15|None|n[01-02]|main|2026-11-29T15:00:00|2026-11-29T15:01:00|60|10"
        "|sbatch /x.sh|train a|b",
        "124|PENDING|0:0|Priority|None assigned|main|None|Unknown|0|Partition_Limit||x",
        "19+0|OUT_OF_MEMORY|0:125|None|n01|main|None|Unknown|5|UNLIMITED||het",
        "123_[0-400:4%2]|PENDING|0:0|None|None assigned|main|Unknown|Unknown|0|365-00:00:00||sweep",
        "123.batch|FAILED|1:0||n01||Unknown|Unknown|3|||batch",
        "garbage",
    )
    assert [str(job.id) for job in jobs] == ["123", "124", "19+0", "123", "123"]
    first, second, third, fourth, step = jobs
    assert (first.state.name, first.state.detail, first.signal, first.name) == (
        "CANCELLED",
        "by 0",
        15,
        "train a|b",
    )
    assert first.command == "sbatch /x.sh"
    assert (first.elapsed_s, first.limit_s) == (60, 600)
    # Partition_Limit and None broke others (slurm-mail#58)
    assert (second.limit_s, second.start, second.end, second.nodes) == (None, "", "", "")
    assert (third.limit_s, third.state.final, third.id.offset) == (math.inf, True, 0)
    assert (fourth.limit_s, fourth.id.throttle) == (365 * 86400, 2)
    assert (step.id.step, step.limit_s) == ("batch", None)


def test_a_line_that_submits_may_hold_what_a_name_holds() -> None:
    header, row = SACCT_FORMAT.split(","), ["7", *["x"] * 9, "sbatch -J a|b", "a|b"]
    (job,) = parse_sacct("".join(SACCT_DELIMITER.join(one) + "\n" for one in (header, row)))
    assert (job.command, job.name) == ("sbatch -J a|b", "a|b")


def test_sacct_in_another_order_of_columns() -> None:
    (job,) = parse_sacct("JobID|State|Cluster|Elapsed|Restarts\n7|COMPLETED|south|01:00:00|2\n")
    assert (job.id.cluster, job.elapsed_s, job.restarts, job.state.succeeded) == ("south", 3600, 2, True)


def test_json_agrees_with_text(captured: Captured, version: str) -> None:
    listed = {str(job.id): job for job in parse_squeue(captured(version, "squeue-format"))}
    found = parse_jobs_json(captured(version, "squeue-json"))
    assert len(found) >= len(listed)
    for job in found:
        assert job.id.cluster == ("lab" if version == "22.05.8" else "lab25")
        if (text := listed.get(str(job.id))) and text.id.elements == job.id.elements:
            assert (job.id.throttle, job.id.offset) == (text.id.throttle, text.id.offset)
            assert (job.name, job.state, job.nodes, job.partition) == (
                text.name,
                text.state,
                text.nodes,
                text.partition,
            )
            # 22.05 prints null where there is no limit
            assert job.limit_s == (
                None if text.limit_s == math.inf and version == "22.05.8" else text.limit_s
            )
    assert sorted(job.id.offset for job in found if job.id.offset is not None) == [0, 1]
    failed = [(job.exit_code, job.signal, job.reason.code) for job in found if job.state.name == "FAILED"]
    assert failed == ([(3, 0, "NonZeroExitCode")] if version == "22.05.8" else [])


def test_json_of_an_exit_code_in_parts() -> None:
    code = {"status": ["ERROR"], "return_code": {"set": True, "infinite": False, "number": 3}}
    signal = {"id": {"set": True, "infinite": False, "number": 9}, "name": "KILL"}
    (job,) = parse_jobs_json(json.dumps({"jobs": [{"job_id": 5, "exit_code": {**code, "signal": signal}}]}))
    assert (job.exit_code, job.signal) == (3, 9)


@pytest.mark.parametrize(
    "job",
    [
        # null for a pending job (torchx#1101), a new shape (jobperf#4), string or list (jobbergate#722)
        {"job_id": 5, "job_state": "PENDING", "job_resources": None, "nodes": None, "time_limit": None},
        {"job_id": 5, "job_state": ["PENDING"], "job_resources": {"nodes": {"list": "n1"}}, "nodes": ""},
        {
            "job_id": {"set": True, "number": 5},
            "job_state": ["PENDING"],
            "time_limit": {"set": False, "number": 0},
        },
    ],
)
def test_json_of_a_pending_job_in_each_shape(job: dict[str, object]) -> None:
    (record,) = parse_jobs_json(json.dumps({"jobs": [job]}))
    assert (record.id, record.state.name, record.nodes, record.limit_s) == (JobId(5), "PENDING", "", None)


def test_json_without_limit_and_json_that_is_none() -> None:
    (job,) = parse_jobs_json(
        '{"jobs": [{"job_id": 5, "time_limit": {"set": true, "infinite": true, "number": 0}}, {}]}'
    )
    assert (job.limit_s, job.state.name) == (math.inf, "unknown")
    for text in ("", "[]", "null", '{"jobs": {}}', '{"jobs": [1]}', "{" * 100_000):
        assert parse_jobs_json(text) == []
