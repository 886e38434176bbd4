"""sacct on a real slurmdbd: what it says of jobs that ended, each in its own way, and what we read in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.slurm.inputs import OPTION_OF_VARIABLE, REFUSED_VARIABLES, RESOURCE_KEY_OF_VARIABLE
from hpcrun.slurm.jobs import SACCT_DELIMITER, SACCT_FORMAT, JobRecord, parse_sacct
from tests.lab.cluster import Lab, Shape
from tests.lab.desk import Desk
from tests.lab.packages import ACCOUNTING, NoLabError, overlay

SACCT = ["sacct", "--parsable2", f"--delimiter={SACCT_DELIMITER}", "-o", SACCT_FORMAT]
JOBS = {
    "done": ["--wrap=true"],
    "failed": ["--job-name=odd|name", "--wrap=exit 3"],
    "killed": ["--wrap=kill -9 $$"],
    "array": ["--array=0-3%2", "--wrap=exit $((SLURM_ARRAY_TASK_ID % 2))"],
    "overdue": ["--time=1", "--wrap=sleep 600"],
    "stopped": ["--wrap=sleep 600"],
    "withdrawn": ["--hold", "--wrap=true"],
}


@pytest.fixture(scope="module")
def lab(lab_here: None) -> Iterator[Lab]:
    """A small lab of this file's own, with accounting."""
    try:
        overlay(ACCOUNTING)
    except NoLabError as reason:
        pytest.skip(str(reason))
    with Lab(Shape((2,)), accounting=True) as lab:
        yield lab


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> dict[str, str]:
    """The ids of JOBS, all of which have ended."""
    words = ["sbatch", "--parsable", "--output=/dev/null"]
    ids = {name: lab.run([*words, *more]).require_success().stdout.strip() for name, more in JOBS.items()}

    def state(name: str) -> str:
        return lab.run(["squeue", "-h", "-j", ids[name], "-o", "%T"]).stdout.strip()

    for name in ("overdue", "stopped"):
        lab.wait_until(lambda name=name: state(name) == "RUNNING", 30)  # type: ignore[misc]
    # By itself the shortest limit is a minute.
    lab.run(["scontrol", "update", f"jobid={ids['overdue']}", "endtime=now+2seconds"]).require_success()
    lab.run(["scancel", ids["stopped"], ids["withdrawn"]]).require_success()
    everyone = [*SACCT, "--allocations", "-j", ",".join(ids.values())]

    def ended() -> bool:
        found = parse_sacct(lab.run(everyone).stdout)
        return len(found) == len(JOBS) + 3 and all(record.state.phase == "ended" for record in found)

    lab.wait_until(ended, 100, lambda: lab.run(everyone).stdout)
    return ids


@pytest.fixture
def of(lab: Lab, jobs: dict[str, str]) -> dict[str, list[JobRecord]]:
    """What is known of each job, with its steps."""
    return {
        name: parse_sacct(lab.run([*SACCT, "-j", job]).require_success().stdout) for name, job in jobs.items()
    }


@pytest.mark.parametrize(
    ("name", "state", "exit_code"),
    [
        ("done", "COMPLETED", 0),
        ("failed", "FAILED", 3),
        ("killed", "FAILED", 0),
        ("overdue", "TIMEOUT", 0),
        ("stopped", "CANCELLED", 0),
        ("withdrawn", "CANCELLED", 0),
    ],
)
def test_how_a_job_ended(
    name: str, state: str, exit_code: int, of: dict[str, list[JobRecord]], jobs: dict[str, str]
) -> None:
    record = of[name][0]
    assert (record.id.job, record.id.element) == (int(jobs[name]), None)
    assert (record.state.name, record.state.phase) == (state, "ended")
    assert (record.exit_code, record.partition) == (exit_code, "main")


def test_who_cancelled_stands_behind_the_state(of: dict[str, list[JobRecord]]) -> None:
    assert of["stopped"][0].state.detail == "by 0"


def test_a_job_that_never_ran_has_no_nodes(of: dict[str, list[JobRecord]]) -> None:
    assert of["withdrawn"][0].nodes == ""
    assert of["stopped"][0].nodes in ("n01", "n02")


def test_a_name_may_hold_the_delimiter(of: dict[str, list[JobRecord]]) -> None:
    assert of["failed"][0].name == "odd|name"
    assert of["failed"][0].command.startswith("sbatch ")
    assert "odd|name" in of["failed"][0].command


def test_the_steps_come_after_their_job(of: dict[str, list[JobRecord]]) -> None:
    assert [record.name for record in of["failed"]] == ["odd|name", "batch"]
    assert len(of["withdrawn"]) == 1


def test_every_element_of_an_array_has_its_own_record(of: dict[str, list[JobRecord]]) -> None:
    elements = [record for record in of["array"] if record.name != "batch"]
    assert {(one.id.element, one.state.name, one.exit_code) for one in elements} == {
        (0, "COMPLETED", 0),
        (1, "FAILED", 1),
        (2, "COMPLETED", 0),
        (3, "FAILED", 1),
    }


@pytest.fixture
def desk(lab: Lab, tmp_path: Path) -> Desk:
    """A place on this lab's login node, with an account of the user's own."""
    found = Desk(lab, tmp_path)
    found.profile()
    for words in (["add", "account", "mine"], ["add", "user", "root", "account=mine"]):
        lab.run(["sacctmgr", "--immediate", *words])
    return found


POISON = [
    "SQUEUE_FORMAT=%i",
    "SQUEUE_FORMAT2=jobid",
    "SQUEUE_STATES=SUSPENDED",
    "SQUEUE_USERS=nobody",
    "SINFO_FORMAT=%P",
    "SINFO_PARTITION=none",
    "SACCT_FORMAT=JobName",
    "SCANCEL_INTERACTIVE=1",
    "SCANCEL_STATE=SUSPENDED",
    "SLURM_TIME_FORMAT=relative",
    "SLURM_TOPO_LEN=5",
    "SLURM_BITSTR_LEN=1",
]
"""What people set for their own use of Slurm's commands."""


def test_a_job_lands_where_the_user_s_environment_says(lab: Lab, desk: Desk) -> None:
    wanted = ["SBATCH_ACCOUNT=mine", "SBATCH_TIMELIMIT=7", "SBATCH_WCKEY=w", "SLURM_CLUSTERS=lab"]
    # As if from inside of another job, whose place this one must not get.
    around = ["SLURM_JOB_ID=9999", "SLURM_JOB_ACCOUNT=other", "SLURM_NTASKS=64", "SLURM_JOB_NODELIST=n01"]
    before = ("env", *wanted, *around, *POISON)
    done = desk.hpcrun("submit", "name=landed", "resources.nodes=1", "--", "sleep", "300", before=before)
    assert "resources.account=mine: from SBATCH_ACCOUNT" in done.stderr
    assert "-M lab: from SLURM_CLUSTERS" in done.stderr
    run = done.stdout.strip()
    number = re.search(r"job (\d+)", done.stderr)
    assert number is not None
    told = lab.run(["scontrol", "show", "job", number[1]]).require_success().stdout
    assert "Account=mine" in told
    assert "TimeLimit=00:07:00" in told
    assert "NumTasks=1 " in told
    shown = desk.hpcrun("describe", run, before=before).stdout
    assert "SBATCH_ACCOUNT=mine" in shown
    state = desk.hpcrun("status", run, before=before, code=None).stdout
    assert re.search(r"queued|pending|starting|running", state), state
    desk.hpcrun("cancel", run, before=before)
    lab.wait_until(lambda: number[1] not in lab.run(["squeue", "-h", "-o", "%i"]).stdout, 30)


def test_or_is_refused_with_both_values(lab: Lab, desk: Desk) -> None:
    words = ("resources.account=root", "--", "true")
    before = ("env", "SBATCH_ACCOUNT=mine")
    done = desk.hpcrun("submit", *words, before=before, code=2)
    assert "is root, but SBATCH_ACCOUNT in your environment is mine" in done.stderr
    dry = desk.hpcrun("submit", "--dry-run", *words, before=before, code=1)
    assert "is root, but SBATCH_ACCOUNT in your environment is mine" in dry.stderr
    assert not desk.runs.exists()


def test_every_variable_of_this_release_s_sbatch_is_known(lab: Lab) -> None:
    binary = (
        lab.run(["sh", "-c", 'cat "$(command -v sbatch)" | tr -c "A-Z0-9_" "\\n"']).require_success().stdout
    )
    found = {word for word in binary.split() if re.fullmatch(r"SBATCH_[A-Z0-9_]{3,}", word)}
    assert len(found) > 40
    known = {*RESOURCE_KEY_OF_VARIABLE, *OPTION_OF_VARIABLE, *REFUSED_VARIABLES, "SBATCH_CLUSTERS"}
    assert found - known == set()
