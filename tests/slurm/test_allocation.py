"""The allocation seen from inside, with stand-ins for Slurm's commands: nodes, fate, and one requeue."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.errors import SiteError
from hpcrun.slurm.allocation import Allocation, find_allocation
from hpcrun.specs.rundir import RunDir

JOB = Allocation(61, ("n01", "n02"), "61", is_batch=True, restarts=0)
SHOWN = """JobId=61 JobName=count
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime={ran} TimeLimit=00:10:00 TimeMin=N/A
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol whose requeue does as the file `requeue` says, and which shows the job in the file `job`."""
    tool = tmp_path / "scontrol"
    tool.write_text(
        f'#!/bin/sh\nif [ "$1" = requeue ]; then . {tmp_path}/requeue; else cat {tmp_path}/job; fi\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def shown(place: Path, state: str = "COMPLETING", restarts: int = 0, ran: str = "00:01:00") -> None:
    (place / "job").write_text(SHOWN.format(state=state, restarts=restarts, ran=ran))


@pytest.mark.parametrize(
    ("state", "restarts", "ran", "fate"),
    [
        ("RUNNING", 0, "00:01:00", "running"),
        ("COMPLETING", 1, "00:01:00", "queued again"),
        ("PENDING", 1, "00:00:00", "queued again"),
        ("COMPLETING", 0, "00:01:00", "cancelled"),
        ("CANCELLED", 0, "00:01:00", "cancelled"),
        ("COMPLETING", 0, "00:09:58", "time limit"),
    ],
)
def test_what_slurm_means_to_do_with_the_job(
    scontrol: Path, state: str, restarts: int, ran: str, fate: str
) -> None:
    shown(scontrol, state, restarts, ran)
    assert JOB.disposition() == fate


def test_the_requeue_that_ends_our_own_command_is_one(scontrol: Path) -> None:
    (scontrol / "requeue").write_text("kill -TERM $$\n")
    shown(scontrol, restarts=1)
    JOB.requeue()
    shown(scontrol, restarts=0)
    with pytest.raises(SiteError, match="`scontrol requeue 61`"):
        JOB.requeue()


def test_a_refusal_is_told_in_slurm_s_words_and_a_second_requeue_is_none(scontrol: Path) -> None:
    shown(scontrol, "RUNNING")
    (scontrol / "requeue").write_text("echo 'Requested operation is presently disabled' >&2; exit 1\n")
    with pytest.raises(SiteError, match="presently disabled"):
        JOB.requeue()
    (scontrol / "requeue").write_text("echo 'Job is pending execution' >&2; exit 1\n")
    JOB.requeue()


def test_where_we_stand_is_read_from_the_environment() -> None:
    environ = {"SLURM_JOB_ID": "61", "SLURM_JOB_NODELIST": "n[01-02]"}
    assert find_allocation({}) is None
    assert find_allocation(environ) == Allocation(61, ("n01", "n02"), "61", is_batch=False)
    array = {"SLURM_ARRAY_JOB_ID": "60", "SLURM_ARRAY_TASK_ID": "3", "SUBMITIT_EXECUTOR": "slurm"}
    assert find_allocation({**environ, **array, "SLURM_RESTART_COUNT": "2"}) == Allocation(
        61, ("n01", "n02"), "60_3", is_batch=True, restarts=2
    )
    wide = find_allocation(environ | {"SLURM_JOB_NODELIST": "cn[001-1000]"})
    assert wide is not None
    assert (len(wide.nodes), wide.nodes[-1]) == (1000, "cn1000")
    with pytest.raises(SiteError, match="SLURM_JOB_NODELIST"):
        find_allocation(environ | {"SLURM_JOB_NODELIST": "n[01"})


def test_agents_get_a_step_each_or_one_for_all(tmp_path: Path) -> None:
    nodes = [f"n{number:02d}" for number in range(1, 5)]
    apart = JOB.agent_steps(RunDir(tmp_path), nodes, most=4)
    assert list(apart) == [(node,) for node in nodes]
    assert apart["n03",][-7:-6] == ["--nodelist=n03"]
    together = JOB.agent_steps(RunDir(tmp_path), nodes, most=3)
    (words,) = together.values()
    assert list(together) == [tuple(nodes)]
    for word in ("--nodes=4", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--nodelist=n[01-04]"):
        assert word in words


def test_nodes_that_an_admin_drains_are_known_with_the_reason(scontrol: Path) -> None:
    nodes = (
        "NodeName=n01 State=ALLOCATED Partitions=main Reason=ok once",
        "NodeName=n02 State=ALLOCATED+DRAIN Partitions=main Reason=ECC errors [root@2026-11-29T10:00:00]",
        "NodeName=n03 State=MIXED+DRAIN Partitions=main",
    )
    (scontrol / "job").write_text("\n".join(nodes) + "\n")
    drained = JOB.draining_nodes()
    assert drained is not None
    assert list(drained) == ["n02", "n03"]
    assert drained["n02"].startswith("draining (ECC errors")
    assert drained["n03"] == "draining"
    # What Slurm does not say changes nothing.
    for said in ("", "slurm_load_node error: Unable to contact slurm controller\n"):
        (scontrol / "job").write_text(said)
        assert JOB.draining_nodes() is None
