"""Python functions as jobs on this machine, what their specs may say, and what runs in a job of theirs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from submitit import Job
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, pickle_load

import hpcrun
from hpcrun.errors import HpcrunError, SiteError, SpecError, UsageError
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.rundir import all_runs
from tests.slurm.fakes import Fake, calls, stand_ins

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


def test_what_the_spec_unsets_or_denies_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "PYTHONFAULTHANDLER", "GONE", "PLAIN"):
        monkeypatch.setenv(name, "1")
    spec = LOCAL | {"env": {"GONE": None}, "env_deny": ["TRITON_*", "PYTHONF*"]}
    names = ("TRITON_CACHE_DIR", "PYTHONFAULTHANDLER", "GONE", "PLAIN")
    assert hpcrun.submit(_environment, *names, spec=spec).result() == [None, None, None, "1"]


def test_the_user_s_slurm_variables_hold_for_functions_too(
    put: Fake, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = put("sbatch", "12;far")
    put("squeue", "")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("SLURM_CLUSTERS", "far")
    with pytest.raises(SpecError, match=r"resources.account: is proj, but SBATCH_ACCOUNT .* is mine"):
        hpcrun.submit(divmod, 7, 2, spec={"resources": {"account": "proj"}})
    assert runs(runs_root) == []
    hpcrun.submit(divmod, 7, 2)
    (run,) = all_runs()
    assert "#SBATCH --account=mine\n" in (run.submitit / "12_submission.sh").read_text(encoding="utf-8")
    assert calls(log)[0].startswith("--parsable -M far ")
    record = read_provenance(run)
    assert record is not None
    assert record.inputs == {"SBATCH_ACCOUNT": "mine", "SLURM_CLUSTERS": "far"}


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


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Stand-ins for Slurm's commands."""
    return stand_ins(tmp_path, monkeypatch)


def runs(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.exists() else []


def test_of_what_was_not_taken_nothing_is_left(put: Fake, runs_root: Path) -> None:
    put("sbatch", "!sbatch: error: invalid account")
    with pytest.raises(HpcrunError, match="invalid account"):
        hpcrun.submit(divmod, 7, 2)
    assert runs(runs_root) == []


@pytest.mark.parametrize("spec", [LOCAL, {}])
def test_of_what_cannot_be_pickled_nothing_is_left(spec: dict[str, Any], put: Fake, runs_root: Path) -> None:
    log = put("sbatch", "12")
    for jobs in (
        lambda: hpcrun.submit(_take, threading.Lock(), spec=spec),
        lambda: hpcrun.submit_array(_take, [1, threading.Lock()], spec=spec),
    ):
        with pytest.raises(
            UsageError, match=r"^_take: function and arguments must be picklable.*cannot pickle"
        ):
            jobs()
        assert runs(runs_root) == []
    assert calls(log) == []


def _take(one: object) -> None:
    """Nothing is done with it."""


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_call_that_cannot_be_recorded_is_cancelled(
    fault: BaseException, put: Fake, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise fault

    put("sbatch", "12;blue")
    cancelled = put("scancel", "")
    # The origin, which is written before, has come by its own way to this.
    importlib.import_module("hpcrun.launch.submit.snapshot")
    monkeypatch.setattr("hpcrun.specs.provenance.write_provenance", full)
    with pytest.raises((SiteError, KeyboardInterrupt)):
        hpcrun.submit_array(divmod, [7, 8], [2, 3])
    assert calls(cancelled) == ["-M blue 12"]
    assert runs(runs_root) == []


@pytest.mark.parametrize(
    ("fn", "arguments", "said"),
    [
        ("echo", (), "submit: a str is no function; give a function and then its arguments"),
        (_take, (), r"_take: missing a required argument: 'one'; it is called as _take\(one: "),
        (_take, (1, 2), "_take: too many positional arguments"),
    ],
)
def test_a_call_that_can_only_fail_is_not_submitted(
    fn: Any, arguments: tuple[Any, ...], said: str, runs_root: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        hpcrun.submit(fn, *arguments, spec=LOCAL)
    assert not runs_root.exists()


def test_one_call_of_an_array_that_can_only_fail_is_not_submitted(runs_root: Path) -> None:
    with pytest.raises(UsageError, match="_take: too many positional arguments"):
        hpcrun.submit_array(_take, [1], [2], spec=LOCAL)
    assert not runs_root.exists()


def live(put: Fake) -> None:
    """A controller that answers."""
    config = "SLURM_VERSION = 22.05.8\nMaxArraySize = 1001\n"
    partition = (
        "PartitionName=main Default=YES MaxTime=1:00:00 MaxNodes=4 TotalNodes=4 State=UP TRES=cpu=8,mem=4M\n"
    )
    node = "NodeName=n01 CPUTot=8 RealMemory=64000 Partitions=main State=IDLE\n"
    put("scontrol", "slurm 22.05.8", config, partition, node, "No topology information available")


def test_a_function_is_checked_against_the_cluster(
    put: Fake, runs_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put("sbatch", "12")
    put("squeue", "12|PENDING|PartitionTimeLimit|N/A||main|0:00|10:00|function")
    live(put)
    with pytest.raises(SpecError, match=r"spec resources.time: 2h is more than partition main allows"):
        hpcrun.submit(divmod, 7, 2, spec={"resources": {"time": "2h"}})
    assert runs(runs_root) == []
    live(put)
    hpcrun.submit(divmod, 7, 2, spec={"resources": {"time": "30m", "mem": "1G"}})
    (run,) = all_runs()
    script = (run.submitit / "12_submission.sh").read_text(encoding="utf-8")
    assert "--mem" not in script
    assert "resources.mem: left out: this partition counts no memory" in caplog.messages
    assert "which compute nodes seldom share" in caplog.text, "pytest's folder is in /tmp"
    assert "job 12 will not start by itself: asks for more time than the partition allows" in caplog.text


def test_a_function_s_place_is_checked(put: Fake, runs_root: Path, tmp_path: Path) -> None:
    put("sbatch", "12")
    profile = tmp_path / "site" / "profiles" / "here.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("name: here\nlog_roots: [/scratch]\n", encoding="utf-8")
    with pytest.raises(SpecError, match="the profile here allows run directories under /scratch only"):
        hpcrun.submit(divmod, 7, 2)
    assert not runs_root.exists()


def test_a_root_that_cannot_be_used_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRUN_ROOT", str(tmp_path / "a%j"))
    with pytest.raises(UsageError, match="no folder for a job"):
        hpcrun.submit(divmod, 7, 2, spec=LOCAL)
    assert not (tmp_path / "a%j").exists()


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
        [sys.executable, "-m", "hpcrun.launch.submit.functions", str(paths.folder)],
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
