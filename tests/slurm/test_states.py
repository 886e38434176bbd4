"""Job states and reasons in every dress, and those that nobody has seen yet."""

from __future__ import annotations

import pytest

from hpcrun.slurm.states import JobState, parse_job_state, parse_pending_reason


@pytest.mark.parametrize(
    ("text", "name", "phase"),
    [
        ("RUNNING", "RUNNING", "running"),
        ("R", "RUNNING", "running"),
        ("PD", "PENDING", "pending"),
        ("CONFIGURING", "CONFIGURING", "running"),
        ("SUSPENDED", "SUSPENDED", "running"),
        ("RESIZING", "RESIZING", "running"),
        ("STAGE_OUT", "STAGE_OUT", "running"),
        ("CG", "COMPLETING", "running"),
        ("REQUEUE_HOLD", "REQUEUE_HOLD", "pending"),
        ("RQ", "REQUEUED", "pending"),
        ("SPECIAL_EXIT", "SPECIAL_EXIT", "pending"),
        ("EXPEDITING", "EXPEDITING", "pending"),
        ("COMPLETED", "COMPLETED", "ended"),
        ("F", "FAILED", "ended"),
        ("PREEMPTED", "PREEMPTED", "ended"),
        # never taken for an end by others: reframe#833, rsmas_insar#480
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY", "ended"),
        ("OOM", "OUT_OF_MEMORY", "ended"),
        ("NODE_FAIL", "NODE_FAIL", "ended"),
        ("BF", "BOOT_FAIL", "ended"),
        ("DEADLINE", "DEADLINE", "ended"),
        ("TO", "TIMEOUT", "ended"),
        # cut short by a column, with and without sacct's mark
        ("CANCELLED+", "CANCELLED", "ended"),
        ("OUT_OF_ME+", "OUT_OF_MEMORY", "ended"),
        ("CONFIGUR", "CONFIGURING", "running"),
    ],
)
def test_states(text: str, name: str, phase: str) -> None:
    state = parse_job_state(text)
    assert (state.name, state.phase, state.final) == (name, phase, phase == "ended")


def test_compound_states() -> None:
    assert parse_job_state("CANCELLED by 0") == JobState("CANCELLED", detail="by 0")
    assert parse_job_state("FAILED+COMPLETING") == JobState("FAILED", ("COMPLETING",))
    assert parse_job_state("COMPLETING+FAILED") == JobState("FAILED", ("COMPLETING",))
    assert not parse_job_state("COMPLETING+FAILED").final
    assert parse_job_state("PENDING+REQUEUED").phase == "pending"
    assert parse_job_state("NODE_FAIL+REQUEUED").phase == "pending"
    assert parse_job_state("RUNNING+CONFIGURING").phase == "running"


@pytest.mark.parametrize("text", ["", "RD2", "?", "LEVITATING", "COMPLE", "12", "+", "  ", "CO+"])
def test_an_unknown_state_is_said_to_be_unknown_and_is_no_end(text: str) -> None:
    state = parse_job_state(text)
    assert (state.name, state.phase, state.final) == ("unknown", "unknown", False)


def test_the_state_that_crashed_others_is_known() -> None:
    assert parse_job_state("RD").name == "RESV_DEL_HOLD"  # gwf#244, qtoolkit#37


def test_an_unknown_flag_on_an_end_leaves_the_end_open() -> None:
    state = parse_job_state("FAILED+LEVITATING")
    assert (state.name, state.flags, state.phase) == ("FAILED", ("LEVITATING",), "unknown")
    assert parse_job_state("RUNNING+LEVITATING").phase == "running"


@pytest.mark.parametrize(
    ("text", "outlook", "words"),
    [
        ("Resources", "waits", "waits for nodes to become free"),
        ("(Priority)", "waits", "higher priority"),
        ("Dependency", "waits", "another job"),
        ("DependencyNeverSatisfied", "never", "did not end as required"),
        ("JobHeldUser", "held", "scontrol release"),
        ("JobHeldAdmin", "held", "administrator"),
        ("(ReqNodeNotAvail, UnavailableNodes:n[07-08])", "waits", "reserved: UnavailableNodes:n[07-08]"),
        (
            "(Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions)",
            "waits",
            "down, drained or reserved",
        ),
        ("PartitionTimeLimit", "never", "more time than the partition allows"),
        ("PartitionNodeLimit", "never", "nodes than the partition allows"),
        ("BadConstraints", "never", "no node"),
        ("QOSMaxWallDurationPerJobLimit", "never", "the QOS allows one job"),
        ("AssocMaxGRESPerJob", "never", "the account allows one job"),
        ("QOSMaxCpuPerNode", "never", "one job"),
        ("QOSMinGRES", "never", "less than the QOS requires"),
        ("QOSMinCpuNotSatisfied", "never", "less than the QOS requires"),
        ("QOSMaxGRESPerUser", "waits", "the QOS may use at a time"),
        ("AssocGrpGRES", "waits", "the account may use at a time"),
        ("AssocGrpCPURunMinutesLimit", "waits", "at a time"),
        ("AssocGrpCPUMinutesLimit", "held", "used up"),
        ("QOSJobLimit", "waits", "at a time"),
        ("MaxJobsPerAccount", "waits", "at a time"),
        ("JobArrayTaskLimit", "waits", "elements"),
        ("launch failed requeued held", "held", "its launch failed"),
        ("JobHoldMaxRequeue", "held", "requeued too often"),
        ("SomethingNew", "unknown", "Slurm says SomethingNew"),
        ("", "unknown", "unknown"),
    ],
)
def test_reasons(text: str, outlook: str, words: str) -> None:
    reason = parse_pending_reason(text)
    assert reason.outlook == outlook
    assert words in reason.words
