"""The executor: the site's script whatever is submitted, pickles that are private."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from hpcrun import process
from hpcrun.errors import SiteError, UsageError
from hpcrun.process import ProcessId
from hpcrun.slurm.executor import TemplateExecutor, require_private_file
from hpcrun.slurm.ids import JobId
from hpcrun.slurm.script_context import ScriptContext
from hpcrun.slurm.template import TemplateLibrary
from tests.slurm.fakes import Fake, calls, stand_ins

LAYER = """{% extends "shipped/function.sbatch.j2" %}
{% block setup %}
{{ super() }}
echo the site was here
{% endblock %}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a stand-in for a command on PATH; see stand_ins."""
    return stand_ins(tmp_path, monkeypatch)


@pytest.fixture
def library(tmp_path: Path) -> TemplateLibrary:
    """The shipped templates, and one of the site's."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "function.sbatch.j2").write_text(LAYER, encoding="utf-8")
    return TemplateLibrary({"site": site, **TemplateLibrary().shipped().directories})


def executor(
    library: TemplateLibrary,
    folder: Path,
    template: str = "function",
    *,
    directives: dict[str, object] | None = None,
    cluster: str | None = None,
) -> TemplateExecutor:
    context = ScriptContext.model_validate(
        {
            "name": "n",
            "run_id": "r",
            "run_dir": "/runs/r",
            "launch": ["python", "-m", "x"],
            "stdout": "/later",
            "directives": {"time": 30} | (directives or {}),
        }
    )
    chosen = library.find(template)
    return TemplateExecutor(folder, library, chosen, context, slurm_cluster=cluster)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_call_becomes_a_job_with_the_site_s_script(
    library: TemplateLibrary, tmp_path: Path, fake: Fake
) -> None:
    fake("sbatch", "12;blue")
    folder = tmp_path / "folder"
    done = executor(library, folder).submit_task(divmod, 7, 2)
    assert (done.job, "echo the site was here" in done.script) == (JobId(12, cluster="blue"), True)
    script, pickled = folder / "12_submission.sh", folder / "12_submitted.pkl"
    delayed = DelayedSubmission.load(pickled)
    assert (delayed.function, delayed.args, delayed._timeout_min) == (divmod, (7, 2), 30)
    assert (mode(folder), mode(pickled), mode(script)) == (0o700, 0o600, 0o600)


def test_the_elements_of_a_sweep_share_one_pickle(
    library: TemplateLibrary, tmp_path: Path, fake: Fake
) -> None:
    log, folder = fake("sbatch", "12"), tmp_path / "folder"
    elements = [1003, 1007, 1012, 1013, 1014]
    made = executor(library, folder, "array").submit_elements(
        divmod, 7, 2, elements=elements, offset=1000, throttle=3
    )
    assert (made.job, made.array) == (JobId(12), "3,7,12-14%3")
    assert "#SBATCH --array=3,7,12-14%3\n" in made.script
    assert "1000" in made.script
    pickles = [folder / f"12_{index}_submitted.pkl" for index in (3, 7, 12, 13, 14)]
    assert sorted(folder.glob("*.pkl")) == sorted(pickles)
    assert len({path.stat().st_ino for path in pickles}) == 1
    assert DelayedSubmission.load(pickles[0]).args == (7, 2)
    assert len(calls(log)) == 1


def test_one_task_is_handed_over_with_its_script(
    library: TemplateLibrary, tmp_path: Path, fake: Fake
) -> None:
    fake("sbatch", "12;blue")
    made = executor(library, tmp_path / "folder", "train")
    done = made.submit_task(divmod, 7, 2)
    assert (done.job, done.array) == (JobId(12, cluster="blue"), None)
    assert (tmp_path / "folder" / "12_submission.sh").read_text(encoding="utf-8") == done.script
    assert DelayedSubmission.load(tmp_path / "folder" / "12_submitted.pkl").args == (7, 2)


def test_the_path_that_slurm_was_given_goes_on_existing(
    library: TemplateLibrary, tmp_path: Path, fake: Fake
) -> None:
    log = fake("sbatch", "12")
    executor(library, tmp_path / "folder").submit_task(dict)
    assert Path(calls(log)[0].split()[-1]).is_file()


def test_a_refused_job_leaves_no_file(library: TemplateLibrary, tmp_path: Path, fake: Fake) -> None:
    fake("sbatch", "!sbatch: error: Batch job submission failed: Invalid account or account/partition")
    folder = tmp_path / "folder"
    with pytest.raises(SiteError, match=r"did not take the job: .*Invalid account"):
        executor(library, folder).submit_task(dict)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_job_whose_pickle_finds_no_place_is_cancelled(
    fault: BaseException,
    library: TemplateLibrary,
    tmp_path: Path,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise fault

    monkeypatch.setattr("hpcrun.slurm.executor.link_or_copy", full)
    fake("sbatch", "12;blue")
    cancelled, folder = fake("scancel", ""), tmp_path / "folder"
    with pytest.raises(type(fault)):
        executor(library, folder).submit_task(dict)
    assert calls(cancelled) == ["-M blue 12"]
    assert list(folder.iterdir()) == []


def test_nodes_that_do_not_exist_are_not_excluded(
    library: TemplateLibrary, tmp_path: Path, fake: Fake
) -> None:
    fake("sbatch", "12")
    fake("sinfo", "n01\nn02")
    made = executor(library, tmp_path / "a", "train", directives={"exclude": "n[02-03]"})
    assert "#SBATCH --exclude=n02\n" in made.submit_task(dict).script
    made = executor(library, tmp_path / "b", "train", directives={"exclude": "n09"})
    assert "--exclude" not in made.submit_task(dict).script


def test_a_pickle_that_others_could_have_written_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    path = folder / "12_submitted.pkl"
    path.touch(mode=0o600)
    require_private_file(path)
    path.chmod(0o620)
    with pytest.raises(UsageError, match="written by others"):
        require_private_file(path)
    path.chmod(0o600)
    folder.chmod(0o703)
    with pytest.raises(UsageError, match="written by others"):
        require_private_file(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away; run as root in a container")
def test_a_pickle_of_somebody_else_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "12_submitted.pkl"
    path.touch(mode=0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        require_private_file(path)


START = """
import os, signal, sys
from pathlib import Path
from hpcrun.slurm.executor import submit_background
found = submit_background(Path(sys.argv[1]), Path.read_text, Path(sys.argv[2]))
print(*found, os.getpgid(found.pid), flush=True)
if sys.argv[3] == "terminal":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.killpg(0, signal.SIGHUP)
"""


@pytest.mark.parametrize("goes", ["terminal", "command"])
def test_a_local_run_outlives_what_started_it_and_its_terminal(tmp_path: Path, goes: str) -> None:
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    os.mkfifo(pipe)
    environ = os.environ | {"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "1"}
    starter = subprocess.run(
        [sys.executable, "-W", "error", "-c", START, str(folder), str(pipe), goes],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
        timeout=60,
        start_new_session=True,
    )
    # Nor is it a warning that it goes on.
    assert (starter.returncode, starter.stderr) == (-1 if goes == "terminal" else 0, "")
    pid, ticks, group = map(int, starter.stdout.split())
    assert (group, process.is_alive(ProcessId(pid, ticks))) == (pid, True)
    # Blocks until the task, whose starter is gone, has opened its end.
    pipe.write_text("still here", encoding="utf-8")
    result = folder / f"{pid}_0_result.pkl"
    handle = process.ProcessHandle(ProcessId(pid, ticks))
    ended = handle.fileno()
    assert ended is not None
    select.select([ended], [], [], 60)
    handle.close()
    assert pickle.loads(result.read_bytes()) == ("success", "still here")
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.iterdir()} == {0o600}
