"""Asking about jobs and taking them back, with commands in Slurm's place that print what it prints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.errors import SiteError
from hpcrun.slurm.jobs import SQUEUE_FORMAT
from hpcrun.slurm.queue import JobQuery, cancel_job, query_jobs

Fake = Callable[..., Callable[[], list[str]]]

NO_JOB = "slurm_load_jobs error: Invalid job id specified"
NO_ACCOUNTING = "Slurm accounting storage is disabled"
SACCT_HEAD = "JobID|State|ExitCode|Reason|NodeList|Partition|Start|End|ElapsedRaw|TimelimitRaw|JobName"
LINE_HEAD = SACCT_HEAD.replace("JobName", "SubmitLine|JobName")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a command on PATH, alone there with its kind, and returns how often and how it was called."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def make(name: str, out: str = "", err: str = "", code: int = 0) -> Callable[[], list[str]]:
        calls, path = tmp_path / f"{name}.calls", tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.out").write_text(out)
        path.write_text(
            "#!/bin/sh\n"
            f'echo "$* $SLURM_BITSTR_LEN$SQUEUE_FORMAT$SLURM_CLUSTERS" >> {calls}\n'
            'while IFS= read -r line || [ -n "$line" ]; do printf "%s\\n" "$line"; done'
            f" < {tmp_path}/{name}.out\n"
            f"echo '{err}' >&2\nexit {code}\n"
        )
        path.chmod(0o755)
        return lambda: calls.read_text().splitlines() if calls.exists() else []

    return make


def row(job: str, state: str = "PENDING", reason: str = "Priority", nodes: str = "") -> str:
    return f"{job}|{state}|{reason}|N/A|{nodes}|main|0:00|5:00|a|b\n"


def test_one_call_for_any_number_of_jobs_of_a_cluster(fake: Fake) -> None:
    squeue = fake("squeue", "".join(row(str(job)) for job in range(500)))
    answers = query_jobs([*(JobQuery(job) for job in range(500)), JobQuery(3), JobQuery(7, cluster="north")])
    here, north = sorted(squeue(), key=len, reverse=True)
    assert here == f"-h -t all -o {SQUEUE_FORMAT} -j {','.join(map(str, range(500)))} 0"
    assert north == f"-h -t all -o {SQUEUE_FORMAT} -j 7 -M north 0"
    assert len(answers) == 501
    assert all(answer.record and answer.record.name == "a|b" for answer in answers.values())


def test_what_the_caller_has_set_changes_neither_the_question_nor_the_answer(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    monkeypatch.setenv("SLURM_CLUSTERS", "north")
    monkeypatch.setenv("SLURM_BITSTR_LEN", "64")
    squeue = fake("squeue", row("5"))
    query_jobs([JobQuery(5)])
    assert squeue()[0].endswith("-j 5 0")


def test_elements_are_found_in_rows_of_their_own_and_in_ranges(fake: Fake) -> None:
    fake("squeue", row("17_[4-7,9%2]") + row("17_0", "RUNNING", "None", "n01") + row("17_1", "FAILED"))
    fake("sacct", f"{SACCT_HEAD}\n17_2|COMPLETED|0:0|None|n01|main|x|y|4|5|a\n")
    answers = query_jobs([JobQuery(17, element) for element in (0, 1, 2, 5, 8, 9)])
    names = {one.element: record.state.name for one, (record, _) in answers.items() if record}
    assert names == {0: "RUNNING", 1: "FAILED", 2: "COMPLETED", 5: "PENDING", 9: "PENDING"}
    assert answers[JobQuery(17, 8)] == (None, "")


def test_what_never_started_of_a_cancelled_array_is_shown_without_elements(fake: Fake) -> None:
    fake("squeue", row("17", "CANCELLED") + row("17_0", "RUNNING"))
    answers = query_jobs([JobQuery(17, 0), JobQuery(17, 4)])
    assert [one.record and one.record.state.name for one in answers.values()] == ["RUNNING", "CANCELLED"]
    fake("squeue", row("17", "RUNNING"))
    assert query_jobs([JobQuery(17, 4)])[JobQuery(17, 4)].record is None


def test_what_squeue_forgot_is_asked_of_sacct_in_one_call(fake: Fake) -> None:
    fake("squeue", row("1"))
    sacct = fake(
        "sacct",
        f"{SACCT_HEAD}\n"
        "2|OUT_OF_MEMORY|0:125|None|n01|main|2026-11-29T15:06:47|2026-11-29T15:16:47|600|Partition_Limit|a\n"
        "3|CANCELLED by 0|0:15|None|None assigned|main|None|2026-11-29T15:16:47|0|UNLIMITED|a|b\n",
    )
    answers = query_jobs([JobQuery(1), JobQuery(2), JobQuery(3), JobQuery(4)])
    assert len(sacct()) == 1
    assert "-j 2,3,4" in sacct()[0]
    memory, cancelled = answers[JobQuery(2)].record, answers[JobQuery(3)].record
    assert memory
    assert (memory.state.name, memory.state.final, memory.limit_s) == ("OUT_OF_MEMORY", True, None)
    assert cancelled
    assert (cancelled.state.name, cancelled.nodes, cancelled.start) == ("CANCELLED", "", "")
    assert answers[JobQuery(4)] == (None, "")


@pytest.mark.parametrize(
    "sacct", [{"err": NO_ACCOUNTING, "code": 1}, {"out": NO_ACCOUNTING, "code": 1}, None]
)
def test_without_accounts_a_forgotten_job_is_just_not_known(fake: Fake, sacct: dict[str, str] | None) -> None:
    fake("squeue", err=NO_JOB, code=1)
    if sacct is not None:
        fake("sacct", **sacct)
    assert query_jobs([JobQuery(5)]) == {JobQuery(5): (None, "")}


DOWN = (
    "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to"
    " host:localhost:6819: Connection refused\nsacct: error: Sending PersistInit msg: Connection refused\n"
    "sacct: error: Problem talking to the database: Connection refused"
)


@pytest.mark.parametrize(
    ("sacct", "words"),
    [
        ({"err": DOWN, "code": 1}, "Connection refused; the accounting database does not answer"),
        ({"err": DOWN}, "Connection refused; the accounting database does not answer"),
        (
            {"err": "sacct: error: Sending PersistInit msg: timed out", "code": 1},
            "does not answer",
        ),
        ({"err": "sacct: error: Slurmdbd is not there", "code": 1}, "does not answer"),
        ({"err": "sacct: error: Database is busy or waiting for lock from other user"}, "does not answer"),
        ({"err": "sacct: fatal: Could not establish a configuration source", "code": 1}, "no Slurm config"),
        ({"err": "slurm_load error: Unable to contact slurm controller", "code": 1}, "controller does not"),
        ({"err": "sacct: error: something new"}, "sacct said: sacct: error: something new"),
        ({"code": 7}, "sacct ended with exit code 7: no words"),
    ],
)
def test_accounts_that_cannot_be_asked_are_no_proof_that_a_job_is_gone(
    fake: Fake, sacct: dict[str, str], words: str
) -> None:
    fake("squeue", row("6", "RUNNING"))
    fake("sacct", **sacct)
    gone, there = query_jobs([JobQuery(5), JobQuery(6)]).values()
    assert gone.record is None
    assert words in gone.trouble
    assert (there.record is not None, there.trouble) == (True, "")
    assert query_jobs([JobQuery(5)], in_accounts=False) == {JobQuery(5): (None, "")}


def test_accounts_that_hang_are_no_proof_that_a_job_is_gone(fake: Fake, tmp_path: Path) -> None:
    fake("squeue", err=NO_JOB, code=1)
    fake("sacct")
    (tmp_path / "bin" / "sacct").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (answer,) = query_jobs([JobQuery(5)], timeout_s=0.5).values()
    assert answer.trouble == "`sacct` gave no answer in 0.5 s; it was ended"


@pytest.mark.parametrize(
    ("squeue", "words"),
    [
        (
            {"err": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "code": 1},
            "connect failure); the controller does not answer",
        ),
        ({"err": "squeue: error: something new", "code": 1}, "squeue said: squeue: error: something new"),
        ({"out": "gone mad", "code": 7}, "squeue ended with exit code 7: gone mad"),
        (None, "squeue: cannot be run"),
    ],
)
def test_when_squeue_cannot_be_asked_the_answer_says_why(
    fake: Fake, squeue: dict[str, str] | None, words: str
) -> None:
    if squeue is not None:
        fake("squeue", **squeue)
    sacct = fake("sacct")
    (answer,) = query_jobs([JobQuery(5)]).values()
    assert answer.record is None
    assert words in answer.trouble
    assert sacct() == [], "another wait, for what may be old"


def test_a_command_that_hangs_is_ended(fake: Fake, tmp_path: Path) -> None:
    fake("squeue")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (answer,) = query_jobs([JobQuery(5)], timeout_s=0.2).values()
    assert "gave no answer in 0.2 s" in answer.trouble


@pytest.mark.parametrize(
    ("printed", "phase"),
    [
        ("RD", "pending"),
        ("RESV_DEL_HOLD", "pending"),
        ("OUT_OF_ME+", "ended"),
        ("NODE_FAIL", "ended"),
        ("COMPLETING", "running"),
        ("NEVER_SEEN", "unknown"),
        ("", "unknown"),
    ],
)
def test_no_state_raises(fake: Fake, printed: str, phase: str) -> None:
    fake("squeue", row("5", printed))
    record = query_jobs([JobQuery(5)])[JobQuery(5)].record
    assert record
    assert record.state.phase == phase


def test_the_first_component_speaks_for_a_heterogeneous_job(fake: Fake) -> None:
    fake("squeue", row("19+0", "RUNNING", "None", "n01") + row("19+1", "RUNNING", "None", "n02"))
    record = query_jobs([JobQuery(19)])[JobQuery(19)].record
    assert record
    assert record.nodes == "n01"


def test_so_many_jobs_that_they_fit_on_no_command_line(fake: Fake) -> None:
    squeue = fake("squeue", row("70000"))
    answers = query_jobs([JobQuery(job) for job in range(20001, 70001)])
    assert "-j" not in squeue()[0]
    assert [one.job for one, (record, _) in answers.items() if record] == [70000]


@pytest.mark.parametrize(
    ("command", "is_known"),
    [
        ("/runs/r-1/submitit/.submission_file_a.sh", True),
        ("/runs/a|b/r-1/submitit/.submission_file_a.sh", True),
        ("/runs/r-11/submitit/.submission_file_a.sh", False),
        ("/home/else/job.sh", False),
        ("(null)", True),
        ("", True),
    ],
)
def test_a_number_that_slurm_has_given_to_another_job_is_not_known(
    command: str, is_known: bool, fake: Fake
) -> None:
    fake("squeue", f"5|RUNNING|None|N/A|n01|main|0:00|5:00|command={command}|a|b\n")
    fake("sacct", "")
    mine, anyone = JobQuery(5, run="r-1"), JobQuery(5)
    answers = query_jobs([mine, anyone])
    assert (answers[mine].record is not None, answers[mine].trouble) == (is_known, "")
    assert answers[anyone].record is not None


def test_what_sacct_knows_of_another_run_s_job_is_not_ours(fake: Fake) -> None:
    fake("squeue", "")
    line = "5|FAILED|1:0|None|n01|main|x|y|4|5|sbatch --parsable /runs/{}/submitit/.submission_file_a.sh|n\n"
    for run, is_known in (("r-1", True), ("r-2", False)):
        fake("sacct", f"{LINE_HEAD}\n{line.format(run)}")
        ours = JobQuery(5, run="r-1")
        assert (query_jobs([ours])[ours].record is not None) is is_known


@pytest.mark.parametrize(
    ("state", "is_error"), [("COMPLETING", False), ("CANCELLED", False), ("RUNNING", True), ("", False)]
)
def test_a_scancel_that_fails_without_a_word_is_looked_after(state: str, is_error: bool, fake: Fake) -> None:
    fake("scancel", code=229)
    fake("sacct", "")
    fake("squeue", row("5_1", state) if state else "")
    if not is_error:
        cancel_job(JobQuery(5, 1), "now")
        return
    with pytest.raises(SiteError, match="ended with exit code 229: it printed nothing"):
        cancel_job(JobQuery(5, 1), "now")


def test_a_job_is_taken_back_on_its_own_cluster(fake: Fake) -> None:
    scancel = fake("scancel")
    cancel_job(JobQuery(5), "now")
    cancel_job(JobQuery(5, 3, "north"), "save")
    cancel_job(JobQuery(5, cluster="north"), "pending")
    cancel_job(JobQuery(5, 3), "pending")
    assert [call.split() for call in scancel()] == [
        ["5"],
        ["--state=RUNNING", "--batch", "--signal=TERM", "-M", "north", "5_3"],
        ["--state=PENDING", "-M", "north", "5"],
        ["5_3"],
    ]


def test_scancel_s_own_words_come_through_but_a_job_that_is_over_is_no_error(fake: Fake) -> None:
    over = "scancel: error: Kill job error on job id 5: Job/step already completing or completed"
    fake("scancel", err=over, code=1)
    cancel_job(JobQuery(5), "now")
    fake("scancel", err="scancel: error: Kill job error on job id 5: Access/permission denied", code=1)
    with pytest.raises(SiteError, match="Access/permission denied"):
        cancel_job(JobQuery(5), "now")
    (Path(os.environ["PATH"]) / "scancel").unlink()
    with pytest.raises(SiteError, match="scancel: cannot be run"):
        cancel_job(JobQuery(5), "now")


@pytest.mark.parametrize(
    "printed", ["<html>502 Bad Gateway</html>", "\x7fELF\x02", "usage: squeue [OPTIONS]"]
)
@pytest.mark.parametrize("which", ["squeue", "sacct"])
def test_an_answer_that_is_none_is_no_proof_that_a_job_is_gone(fake: Fake, which: str, printed: str) -> None:
    fake("squeue", printed if which == "squeue" else "")
    fake("sacct", printed if which == "sacct" else f"{SACCT_HEAD}\n")
    record, trouble = query_jobs([JobQuery(7)])[JobQuery(7)]
    assert record is None
    assert f"{which} printed no list of jobs" in trouble


def test_a_list_without_jobs_is_one(fake: Fake) -> None:
    fake("squeue", "CLUSTER: north\n")
    fake("sacct", f"{SACCT_HEAD}\n")
    assert query_jobs([JobQuery(7)])[JobQuery(7)] == (None, "")
