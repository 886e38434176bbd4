"""Python functions as jobs on this machine, what their specs may say, and what runs in a job of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from submitit.helpers import DelayedSubmission

import hpcrun
from hpcrun import process
from hpcrun.errors import FunctionError, HpcrunError, SiteError, SpecError, UsageError
from hpcrun.runs.requests import request_save
from hpcrun.runs.run_state import read_run_state
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.run_lookup import all_runs
from hpcrun.submission.functions import FunctionJob
from hpcrun.submission.request import SubmissionRequest
from hpcrun.submission.submit import submit_job
from tests.slurm.fakes import Fake, calls, stand_ins

LOCAL = {"cluster": "local"}


@pytest.fixture(autouse=True)
def no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What this machine's user and site have set up is not what is tested; supervisors are let end."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    yield
    end = time.monotonic() + 60
    while process.descendants(os.getpid()) and time.monotonic() < end:
        time.sleep(0.05)


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
    job: FunctionJob[dict[str, int]] = hpcrun.submit(dict, [("a", 1)], b=2, spec=LOCAL | {"name": "pairs"})
    assert job.result() == {"a": 1, "b": 2}
    (run,) = all_runs()
    assert run.id.startswith("pairs-")
    assert job.files == run
    record = read_provenance(run)
    assert record is not None
    (submission,) = record.submissions
    assert (record.kind, record.cluster, submission.job) == ("function", "local", None)
    assert submission.pid == int(job.job_id)
    assert submission.start_ticks
    ended = run.read_exit()
    assert ended is not None
    assert (ended["status"], ended["exit_code"], ended["attempt"]) == ("done", 0, 1)
    assert (job.state, job.exception()) == ("done", None)


def test_each_rank_has_a_result_of_its_own_and_the_spec_s_environment() -> None:
    spec = LOCAL | {"resources": {"ranks_per_node": 2}, "env": {"MiXed": "a b"}}
    job = hpcrun.submit(_environment, "RANK", "MiXed", spec=spec)
    assert job.results() == [["0", "a b"], ["1", "a b"]]
    with pytest.raises(UsageError, match=r"runs 2 times; use results\(\)"):
        job.result()


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
    assert [job.files for job in jobs] == [run.element(0), run.element(1)]
    assert read_run_state(run).elements == {"done": 2}


def test_no_arguments_are_no_jobs(runs_root: Path) -> None:
    assert hpcrun.submit_array(divmod, [], [], spec=LOCAL) == []
    assert not runs_root.exists()


def test_a_function_s_traceback_reaches_the_caller() -> None:
    job = hpcrun.submit(_deep, spec=LOCAL)
    with pytest.raises(FunctionError, match=r"in _deep\n.*\nValueError: no such luck") as raised:
        job.result()
    assert "submission/function_call.py" not in str(raised.value), "our own lines are of no interest"
    state = read_run_state(job.files)
    assert (state.state, state.exit_code) == ("failed", 5)
    assert "rank 0 on node" in state.message
    assert "ValueError: no such luck; log: " in state.message


def _deep() -> None:
    raise ValueError("no such luck")


@pytest.mark.parametrize(
    ("fn", "arguments", "state", "said"),
    [
        (os._exit, (9,), "failed", "ended with exit code 9"),
        (os.abort, (), "failed", "was killed by signal 6"),
        (sys.exit, (3,), "failed", "ended with exit code 3"),
        (threading.Lock, (), "failed", "cannot pickle"),
        (sys.exit, (75,), "saved", "continue with: hpcrun"),
    ],
)
def test_a_function_that_does_not_return_has_no_result(
    fn: Any, arguments: tuple[Any, ...], state: str, said: str
) -> None:
    job = hpcrun.submit(fn, *arguments, spec=LOCAL)
    error = job.exception()
    assert said in str(error)
    assert job.state == state


def test_a_program_that_ends_itself_well_gives_nothing() -> None:
    assert hpcrun.submit(sys.exit, spec=LOCAL).result() is None


PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
import hpcrun, beside_the_script
place = Path(sys.argv[1])

class Mine(beside_the_script.Thing):
    pass

def work(number, place):
    print("at work", number)
    if number == 2 and not Path(place, "mended").exists():
        raise ValueError("no luck")
    return Mine(beside_the_script.double(number))

if __name__ == "__main__":
    os.chdir("/")  # the job is not started where the script is
    jobs = hpcrun.submit_array(work, [1, 2], [str(place)] * 2, spec={"cluster": "local"})
    errors = [job.exception() for job in jobs]
    assert errors[0] is None and "ValueError: no luck" in str(errors[1]), errors
    assert jobs[0].stdout() == "at work 1\\n", jobs[0].stdout()
    assert jobs[0].result().value == 2
    place.joinpath("mended").touch()
    words = [sys.executable, "-m", "hpcrun", "submit", "--only-failed", "--resume"]
    subprocess.run([*words, jobs[0].files.sweep_of_element.id], check=True, capture_output=True)
    print(jobs[1].result().value, len(jobs[0].files.attempts()), len(jobs[1].files.attempts()))
"""


def test_modules_beside_the_script_are_found_and_only_what_failed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text(
        "class Thing:\n    def __init__(self, value):\n        self.value = value\n\n\n"
        "def double(number):\n    return 2 * number\n",
        encoding="utf-8",
    )
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.returncode) == ("4 1 2\n", 0), done.stderr


CLOSED = """
import sys
from pathlib import Path
import hpcrun
Path(sys.argv[1]).write_text(str(hpcrun.submit(divmod, 7, 2, spec={"cluster": "local"}).result()))
"""


def test_a_program_without_descriptors_has_its_result(tmp_path: Path) -> None:
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED, str(tmp_path / "told")]
    assert subprocess.run(words, check=False, timeout=120).returncode == 0
    assert (tmp_path / "told").read_text(encoding="utf-8") == "(3, 1)"


class Counter:
    """A function that can save itself, as submitit has it."""

    def __call__(self, start: int, place: str) -> int:
        if start:
            return start
        Path(place, "up").touch()
        time.sleep(600)
        return 0

    def checkpoint(self, start: int, place: str) -> DelayedSubmission:
        return DelayedSubmission(self, start + 7, place)


def test_a_function_that_can_save_goes_on_from_there(tmp_path: Path) -> None:
    job = hpcrun.submit(Counter(), 0, str(tmp_path), spec=LOCAL)
    until(tmp_path / "up")
    assert not job.done()
    job.cancel()
    assert "is saved: saved; continue with: hpcrun " in str(job.exception())
    submit_job(SubmissionRequest(resume=job.files), lambda _: None)
    assert job.result() == 7


def test_a_function_that_is_asked_to_stop_is_interrupted_and_closes_what_it_has_open(tmp_path: Path) -> None:
    job = hpcrun.submit(_sleep, str(tmp_path), spec=LOCAL)
    until(tmp_path / "up")
    with pytest.raises(UsageError, match="is a function, which cannot be asked to save"):
        request_save(job.files)
    job.cancel()
    assert "stopped by SIGTERM, as asked, without a save" in str(job.exception())
    assert (job.state, read_run_state(job.files).exit_code) == ("interrupted", 130)
    assert (tmp_path / "closed").exists()
    job.cancel()


def _sleep(place: str) -> None:
    Path(place, "up").touch()
    try:
        time.sleep(600)
    finally:
        Path(place, "closed").touch()


def until(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_call_that_others_could_have_written_is_not_made(tmp_path: Path) -> None:
    job = hpcrun.submit(_touch, str(tmp_path / "made"), spec=LOCAL)
    job.result()
    (tmp_path / "made").unlink()
    for path, mode in ((job.files.call, 0o622), (job.files.path, 0o770)):
        path.chmod(mode)
        submit_job(SubmissionRequest(resume=job.files), lambda _: None)
        assert "can be written by others" in str(job.exception())
        path.chmod(0o700)
    link = tmp_path / "link"
    job.files.call.rename(link)
    job.files.call.symlink_to(link)
    submit_job(SubmissionRequest(resume=job.files), lambda _: None)
    assert "is a symbolic link, which is not followed" in str(job.exception())
    assert not (tmp_path / "made").exists()


def _touch(path: str) -> None:
    Path(path).touch()


def test_a_result_that_others_could_have_written_is_not_loaded() -> None:
    job = hpcrun.submit(divmod, 7, 2, spec=LOCAL)
    job.wait()
    job.files.attempt(1).call_result(0).chmod(0o622)
    with pytest.raises(UsageError, match="can be written by others"):
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
    with pytest.raises(SpecError, match=r"spec resources\.nodes: 2 nodes are asked for, but this would run"):
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
    # Not of the snapshot, which writes the origin before.
    monkeypatch.setattr("hpcrun.submission.submit.write_provenance", full)
    with pytest.raises((SiteError, KeyboardInterrupt)):
        hpcrun.submit_array(divmod, [7, 8], [2, 3])
    assert calls(cancelled) == ["-M blue 12"]
    assert runs(runs_root) == []


@pytest.mark.parametrize(
    ("fn", "arguments", "said"),
    [
        ("echo", (), "submit: a str is not a function; give a function and then its arguments"),
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
    script = run.script.read_text(encoding="utf-8")
    assert "--mem" not in script
    assert "resources.mem: left out: this partition counts no memory" in caplog.messages
    assert "which compute nodes rarely share" in caplog.text, "pytest's folder is in /tmp"
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
    with pytest.raises(UsageError, match="cannot be used for a job"):
        hpcrun.submit(divmod, 7, 2, spec=LOCAL)
    assert not (tmp_path / "a%j").exists()
