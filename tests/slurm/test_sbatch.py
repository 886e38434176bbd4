"""sbatch as it is called: the environment, the answers, patience, and no job twice. Stand-ins answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hpcrun.errors import SiteError, UsageError
from hpcrun.slurm import sbatch
from hpcrun.slurm.ids import JobId
from hpcrun.slurm.sbatch import (
    drop_unknown_nodes,
    format_array_indices,
    log_file_pattern,
    render_submission_script,
    submission_environment,
    submit_batch_script,
)
from hpcrun.slurm.script_context import ArrayContext, ScriptContext
from hpcrun.slurm.template import TemplateLibrary
from tests.slurm.fakes import Fake, calls, environment, stand_ins

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a stand-in for a command on PATH; see stand_ins."""
    monkeypatch.setattr(sbatch, "PAUSES_S", (0.0,) * 4)
    return stand_ins(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_CPU_BIND",
        "SLURM_CPUS_PER_TASK",
        "SLURM_MEM_PER_NODE",
        "SLURM_JOB_ID",
        "SBATCH_GRES",
        "SRUN_CPUS_PER_TASK",
        "PMI_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PRTE_LAUNCHED",
        "HYDRA_LAUNCHER",
        "HYDI_CONTROL_FD",
        "MPI_LOCALRANKID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "SUBMITIT_EXECUTOR",
        "HPCRUN_ELEMENT",
        "BASH_FUNC_module%%",
        "BASH_ENV",
    ],
)
def test_what_a_job_was_given_does_not_reach_the_next_one(name: str) -> None:
    assert submission_environment({name: "x", "HOME": "/h"}) == ({"HOME": "/h"}, (name,))


@pytest.mark.parametrize(
    "name",
    ["SLURM_CONF", "SLURM_JWT", "PATH", "HPCRUN_ROOT", "HPCRUN_SITE", "UCX_TLS", "RANKS", "LC_ALL", "MiXed"],
)
def test_what_is_the_user_s_own_does(name: str) -> None:
    assert submission_environment({name: "x"}) == ({name: "x"}, ())


def test_sbatch_runs_in_that_environment(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = fake("sbatch", "12")
    for name in ("SLURM_CPU_BIND", "SLURM_ARRAY_TASK_ID", "PMIX_RANK", "BASH_FUNC_module%%"):
        monkeypatch.setenv(name, "() { :; }")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    said: list[str] = []
    submit_batch_script(tmp_path / "script", detail=said.append)
    given = environment(log)
    assert not {"SLURM_CPU_BIND", "SLURM_ARRAY_TASK_ID", "PMIX_RANK", "BASH_FUNC_module%%"} & set(given)
    assert (given["SLURM_CONF"], given["LC_ALL"]) == ("/etc/slurm/slurm.conf", "C.UTF-8")
    assert "SLURM_CPU_BIND" in said[0]
    assert "() {" not in said[0]


def test_a_locale_that_the_user_has_not_set_is_not_made_up(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = fake("sbatch", "12")
    monkeypatch.delenv("LC_ALL", raising=False)
    submit_batch_script(tmp_path / "script")
    assert "LC_ALL" not in environment(log)


@pytest.mark.parametrize(
    ("answer", "job"),
    [
        ("12", JobId(12)),
        ("12;nautilus", JobId(12, cluster="nautilus")),
        ("Submitted batch job 12 on cluster nautilus", JobId(12, cluster="nautilus")),
        ("Welcome! Your job 5 has ended.\n-- 3 jobs left --\nSubmitted batch job 12", JobId(12)),
        ("Welcome! Your job 5 has ended.\n12;nautilus", JobId(12, cluster="nautilus")),
    ],
)
def test_the_id_and_the_cluster_are_read_from_whatever_answers(
    answer: str, job: JobId, fake: Fake, tmp_path: Path
) -> None:
    log = fake("sbatch", answer)
    assert submit_batch_script(tmp_path / "script") == job
    assert calls(log) == [f"--parsable {tmp_path}/script"]


def test_another_cluster_is_asked_by_name(fake: Fake, tmp_path: Path) -> None:
    log = fake("sbatch", "12")
    assert submit_batch_script(tmp_path / "script", slurm_cluster="blue").cluster == "blue"
    assert calls(log) == [f"--parsable -M blue {tmp_path}/script"]


def test_a_refusal_is_final_and_told_in_sbatch_s_words(fake: Fake, tmp_path: Path) -> None:
    words = "sbatch: error: invalid partition specified: gpux"
    log = fake("sbatch", f"!{words}")
    with pytest.raises(SiteError) as raised:
        submit_batch_script(tmp_path / "script")
    assert str(raised.value) == f"sbatch did not take the job: {words}; `sinfo` lists the partitions"
    assert len(calls(log)) == 1


@pytest.mark.parametrize("silent", ["", " \n"])
def test_no_id_is_no_job(silent: str, fake: Fake, tmp_path: Path) -> None:
    fake("sbatch", silent)
    fake("squeue", "7|/else/other")
    with pytest.raises(SiteError, match=r"printed nothing$"):
        submit_batch_script(tmp_path / "script")
    fake("squeue", "!slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SiteError, match="printed nothing; look with `squeue --me` whether the job is there"):
        submit_batch_script(tmp_path / "script")


def test_a_wrapper_that_prints_its_banner_only_has_submitted_all_the_same(fake: Fake, tmp_path: Path) -> None:
    log = fake("sbatch", "Welcome to the cluster! Be nice.")
    fake("squeue", f"12|{tmp_path}/script")
    assert submit_batch_script(tmp_path / "script") == JobId(12)
    assert len(calls(log)) == 1


@pytest.mark.parametrize("shown", [1, 2])
def test_an_interrupt_leaves_no_job_that_nobody_knows(
    shown: int, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch has handed the job over and has not answered yet when Ctrl-C comes."""
    monkeypatch.setattr(sbatch, "_LATE_S", 0.0)
    fake("sbatch", "12")
    command = tmp_path / "bin" / "sbatch"
    command.write_text("#!/bin/bash\nsleep 0.2; kill -INT $PPID; exec sleep 600\n", encoding="utf-8")
    fake("squeue", *["7|/else/other"] * (shown - 1), f"12|{tmp_path}/script")
    cancelled = fake("scancel", "")
    with pytest.raises(KeyboardInterrupt):
        submit_batch_script(tmp_path / "script", slurm_cluster="blue")
    assert calls(cancelled) == ["-M blue 12"]


def test_what_cannot_be_taken_back_is_told(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    fake("scancel", "!scancel: error: Kill job error on job id 12: Access/permission denied")
    sbatch.cancel_submitted_job(JobId(12), said.append)
    assert said[0].startswith("job 12 was submitted in vain and could not be cancelled: ")


@pytest.mark.parametrize(
    "words",
    [
        TIMED_OUT,
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
    ],
)
def test_a_busy_controller_is_asked_again_when_the_job_is_not_there(
    words: str, fake: Fake, tmp_path: Path
) -> None:
    log, looked = fake("sbatch", f"!{words}", f"!{words}", "12"), fake("squeue", "7|/else/other")
    assert submit_batch_script(tmp_path / "script") == JobId(12)
    assert (len(calls(log)), len(calls(looked))) == (3, 2)


def test_a_job_that_is_there_although_the_answer_was_lost_is_not_submitted_again(
    fake: Fake, tmp_path: Path
) -> None:
    log = fake("sbatch", f"!{TIMED_OUT}", "13")
    fake("squeue", f"CLUSTER: blue\n7|{tmp_path}/other\n12|/real/{tmp_path.name}/script")
    assert submit_batch_script(tmp_path / "script", slurm_cluster="blue") == JobId(12, cluster="blue")
    assert len(calls(log)) == 1


def test_without_a_sure_no_there_is_no_second_try(fake: Fake, tmp_path: Path) -> None:
    log = fake("sbatch", f"!{TIMED_OUT}", "13")
    looked = fake("squeue", "!slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SiteError, match="squeue --me") as raised:
        submit_batch_script(tmp_path / "script")
    assert TIMED_OUT in str(raised.value)
    assert (len(calls(log)), len(calls(looked))) == (1, 5)


def test_it_is_not_tried_for_ever(fake: Fake, tmp_path: Path) -> None:
    log = fake("sbatch", f"!{TIMED_OUT}")
    fake("squeue", "7|/else/other")
    with pytest.raises(SiteError, match="the job is not there"):
        submit_batch_script(tmp_path / "script")
    assert len(calls(log)) == 5


@pytest.mark.parametrize(
    ("module", "remedy"), [("slurm/22.05", "module load slurm/22.05"), (None, "load the")]
)
def test_where_there_is_no_sbatch_the_module_is_named(
    module: str | None, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteError, match=remedy):
        submit_batch_script(tmp_path / "script", slurm_module=module)


def test_nodes_that_are_gone_are_not_excluded(fake: Fake) -> None:
    fake("sinfo", "n01\nn01\nn02\nn03")
    said: list[str] = []
    assert drop_unknown_nodes("n[02-04],m1", note=said.append) == "n[02-03]"
    assert "m1" in said[0]
    assert "n04" in said[0]
    assert drop_unknown_nodes("m1") == ""
    assert drop_unknown_nodes("n[01-02]") == "n[01-02]"


def test_what_cannot_be_asked_about_stays_excluded(fake: Fake) -> None:
    fake("sinfo", "!sinfo: error: Unable to contact slurm controller")
    assert drop_unknown_nodes("n[02-04],m1") == "n[02-04],m1"


def test_where_the_logs_go() -> None:
    assert log_file_pattern(Path("/runs/50%/a b")) == "/runs/50%%/a b/%j_%t_log.out"
    assert log_file_pattern(Path("/runs/x"), is_array=True, ending="err") == "/runs/x/%A_%a_%t_log.err"
    for name in ("%j", "a%t", "%A", "%a", "a\nb"):
        with pytest.raises(UsageError, match="HPCRUN_ROOT"):
            log_file_pattern(Path("/runs") / name)


@pytest.mark.parametrize(
    ("indices", "throttle", "listed"),
    [
        (range(40), None, "0-39"),
        (range(40), 8, "0-39%8"),
        ([3, 7, 12, 13, 14], None, "3,7,12-14"),
        ([5], 1, "5%1"),
        ([2, 1, 1], None, "1-2"),
    ],
)
def test_indices_as_sbatch_takes_them(indices: list[int], throttle: int | None, listed: str) -> None:
    assert format_array_indices(indices, throttle) == listed


def context(**more: object) -> ScriptContext:
    run = "/runs/r"
    given = {"name": "n", "run_id": "r", "run_dir": run, "launch": ["python", "-m", "x"], "stdout": "/later"}
    return ScriptContext.model_validate(given | more)


def test_the_script_names_the_logs_of_its_folder() -> None:
    library = TemplateLibrary().shipped()
    train = render_submission_script(
        library, library.find("train"), context(stderr="/later"), Path("/runs/r/submitit")
    )
    assert "#SBATCH --output=/runs/r/submitit/%j_0_log.out\n" in train
    assert "#SBATCH --error=/runs/r/submitit/%j_0_log.err\n" in train
    array = ArrayContext(indices="0-3%2", offset=1000)
    sweep = render_submission_script(
        library, library.find("array"), context(), Path("/runs/50%/submitit"), array
    )
    assert "#SBATCH --output=/runs/50%%/submitit/%A_%a_0_log.out\n" in sweep
    assert "#SBATCH --array=0-3%2\n" in sweep
    assert "--error" not in sweep


PRINT_SCRIPT = """
import json, sys
from pathlib import Path
from hpcrun.slurm.sbatch import render_submission_script
from hpcrun.slurm.script_context import ScriptContext
from hpcrun.slurm.template import TemplateLibrary
library = TemplateLibrary().shipped()
given = json.loads(sys.argv[1])
context = ScriptContext(**given)
text = render_submission_script(library, library.find("train"), context, Path(sys.argv[2]))
assert "#SBATCH --job-name=n" in text
print(*{"numpy", "torch", "mpi4py"} & set(sys.modules))
"""


def test_a_script_is_shown_without_slurm_and_without_numpy(tmp_path: Path) -> None:
    from hpcrun import process

    values = json.dumps(context().model_dump(exclude_unset=True))
    words = [sys.executable, "-c", PRINT_SCRIPT, values, str(tmp_path / "folder")]
    done = process.run(words, timeout_s=60, env={"PATH": "", "HOME": os.environ["HOME"]}, cwd=tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("", "")
    assert not (tmp_path / "folder").exists()


def test_an_sbatch_that_hangs_is_ended_and_the_job_looked_for(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbatch, "_SBATCH_S", 0.2)
    fake("sbatch", "never said")
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    fake("squeue", f"12|{tmp_path}/script")
    assert submit_batch_script(tmp_path / "script") == JobId(12)


def test_a_warning_beside_an_id_is_told(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    fake("sbatch", "12")
    command = tmp_path / "bin" / "sbatch"
    command.write_text("#!/bin/sh\necho 'sbatch: error: Socket timed out' >&2; echo 12\n", encoding="utf-8")
    assert submit_batch_script(tmp_path / "script", note=said.append) == JobId(12)
    assert "Socket timed out" in said[0]
