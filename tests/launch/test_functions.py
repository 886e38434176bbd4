"""Python functions as jobs on this machine, what their specs may say, and what runs in a job of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from submitit import Job
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, pickle_load

import hpcrun
from hpcrun.errors import HpcrunError, SiteError, SpecError, UsageError
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.rundir import all_runs

LOCAL = {"cluster": "local"}


@pytest.fixture(autouse=True)
def no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's user and site have set up is not what is tested."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = "import sys; before = set(sys.modules); import hpcrun; print(*set(sys.modules) - before)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout == "hpcrun\n"
    assert {"submit", "submit_array", "__version__"} <= set(dir(hpcrun))
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        hpcrun.sumbit  # noqa: B018


def test_a_function_runs_here_and_gives_its_result() -> None:
    job: Job[dict[str, int]] = hpcrun.submit(dict, [("a", 1)], b=2, spec=LOCAL | {"name": "pairs"})
    assert job.result() == {"a": 1, "b": 2}
    (run,) = all_runs()
    assert run.id.startswith("pairs-")
    assert Path(job.paths.folder) == run.submitit
    record = read_provenance(run)
    assert record is not None
    (submission,) = record.submissions
    assert (record.cluster, submission.pid, submission.job) == ("local", int(job.job_id), None)
    assert submission.start_ticks


def test_each_task_has_a_result_of_its_own_and_the_spec_s_environment() -> None:
    spec = LOCAL | {"resources": {"ranks_per_node": 2}, "env": {"MiXed": "a b"}}
    job = hpcrun.submit(_environment, "SUBMITIT_LOCAL_GLOBALID", "MiXed", spec=spec)
    assert job.results() == [["0", "a b"], ["1", "a b"]]


def _environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_a_function_is_called_once_for_each_set_of_arguments() -> None:
    jobs = hpcrun.submit_array(divmod, [7, 8], iter([2, 3]), spec=LOCAL)
    assert [job.result() for job in jobs] == [(3, 1), (2, 2)]
    (run,) = all_runs()
    record = read_provenance(run)
    assert record is not None
    assert [one.pid for one in record.submissions] == [int(job.job_id) for job in jobs]


def test_no_arguments_are_no_jobs(runs_root: Path) -> None:
    assert hpcrun.submit_array(divmod, [], [], spec=LOCAL) == []
    assert not runs_root.exists()


def test_a_function_s_traceback_reaches_the_caller() -> None:
    job = hpcrun.submit(divmod, 1, 0, spec=LOCAL)
    with pytest.raises(FailedJobError, match="ZeroDivisionError"):
        job.result()


def test_a_spec_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("name: small\ncluster: local\nresources: {time: 5m}\n", encoding="utf-8")
    assert hpcrun.submit(divmod, 7, 2, spec=path).result() == (3, 1)
    (run,) = all_runs()
    assert "time: 5m" in run.spec.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"train": {"steps": 3}}, "spec train: is not for a function"),
        ({"resource": {"nodes": 3}}, "spec resource: is not for a function; did you mean resources?"),
        ({"resources": {"nodes": 0}}, "spec resources.nodes: must be at least 1"),
        ({"resources": {"node": 1}}, "spec resources.node: unknown key; did you mean nodes?"),
        ({"name": "a b"}, "spec name:"),
    ],
)
def test_mistakes_in_a_spec_are_told_with_their_key(
    spec: dict[str, Any], wrong: str, runs_root: Path
) -> None:
    with pytest.raises(SpecError) as raised:
        hpcrun.submit(divmod, 7, 2, spec=LOCAL | spec)
    assert str(raised.value).startswith(wrong)
    assert not runs_root.exists()


def test_mistakes_in_a_file_are_told_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("name: small\ntrain: {steps: 3}\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"small\.yaml:2 train: is not for a function"):
        hpcrun.submit(divmod, 7, 2, spec=path)


def test_several_nodes_need_slurm() -> None:
    with pytest.raises(SiteError, match=r"resources\.nodes: 2"):
        hpcrun.submit(divmod, 7, 2, spec=LOCAL | {"resources": {"nodes": 2}})


def test_a_cluster_that_is_not_known_is_no_reason_to_run_here() -> None:
    with pytest.raises(UsageError, match="nowhere"):
        hpcrun.submit(divmod, 7, 2, spec={"cluster": "nowhere"})


def test_what_was_not_taken_is_recorded_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2; exit 1\n", encoding="utf-8")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    with pytest.raises(HpcrunError, match="invalid account"):
        hpcrun.submit(divmod, 7, 2)
    (run,) = all_runs()
    record = run.read_exit()
    assert record is not None
    assert (record["status"], record["exit_code"]) == ("failed", 3)
    assert "invalid account" in record["message"]


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    """Where job 7, a call of divmod, looks for what it is to do."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    found = JobPaths(folder, "7", 0)
    found.submitted_pickle.touch(mode=0o600)
    DelayedSubmission(divmod, 7, 2).dump(found.submitted_pickle)
    return found


def run_task(paths: JobPaths) -> subprocess.CompletedProcess[str]:
    """What the script of a job runs, as the only task of job 7."""
    slurm = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    return subprocess.run(
        [sys.executable, "-m", "hpcrun.launch.functions", str(paths.folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | slurm,
        timeout=60,
    )


def test_a_task_puts_its_result_down_whatever_a_killed_attempt_left(paths: JobPaths) -> None:
    half = paths.result_pickle.with_suffix(".pkl.save_tmp")
    half.write_bytes(b"half")
    paths.submitted_pickle.with_suffix(".pkl.save_tmp").write_bytes(b"half")
    done = run_task(paths)
    assert done.returncode == 0, done.stderr
    assert pickle_load(paths.result_pickle) == ("success", (3, 1))
    assert not list(paths.folder.glob("*.save_tmp"))


def test_a_task_does_not_load_what_others_could_have_written(paths: JobPaths) -> None:
    paths.submitted_pickle.chmod(0o622)
    done = run_task(paths)
    assert done.returncode == 1
    assert "can be written by others" in done.stderr
    assert "Traceback" not in done.stderr
    assert not paths.result_pickle.exists()
