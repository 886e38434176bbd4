"""Submitting: what is made, what is handed to sbatch, what is left when that fails."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.lustre.storage import StorageFinding, StoragePlan
from hpcrun.checkpoint.parity.sets import choose_erasure_sets
from hpcrun.checkpoint.policy import capacity
from hpcrun.errors import SiteError, SpecError, UsageError
from hpcrun.launch.agents.local_node import LocalNode
from hpcrun.launch.rank_command import SRUN_OPTIONS_VARIABLE
from hpcrun.launch.rank_environment import build_rank_environment
from hpcrun.launch.run_context import RunContext
from hpcrun.process import ProcessId
from hpcrun.runs.run_state import read_element_states
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.cluster import load_cluster
from hpcrun.specs.load import load_job, parse_job
from hpcrun.specs.placement import Placement
from hpcrun.specs.predecessors import Predecessors, read_predecessors
from hpcrun.specs.provenance import read_provenance, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sweep import read_sweep
from hpcrun.submission.prepare import prepare_job
from hpcrun.submission.request import SubmissionRequest
from hpcrun.submission.submit import SubmissionResult, dry_run, submit_job
from tests.slurm.fakes import Fake, calls, environment, stand_ins

JOB = "name: small\nmodel: tiny\ndata: {text: python-stdlib}\nresources: {time: 10m}\n"
SWEEP = JOB + "train: {steps: 4}\nsweep: {grid: {train.seed: [0, 1, 2, 3, 4, 5]}, throttle: 3}\n"
PROFILE = """\
name: here
slurm_cluster: far
slurm_version: "24.05"
root: $WORK/runs
account: proj
partitions: {gpu: {default: true, gpus_per_node: 4, exclusive: true}}
python: {path: $WORK/bin/python}
container: {runtime: apptainer, mounts: ["$WORK:/work"], options: [--cleanenv]}
modules: {load: [site/1], purge: true}
env: {OMP_NUM_THREADS: "4", WHO: site}
setup: ["ulimit -l unlimited"]
"""


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Stand-ins for Slurm's commands; nobody's profiles or templates; the working directory is empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("WORK", str(work))
    monkeypatch.chdir(work)
    return stand_ins(tmp_path, monkeypatch)


@pytest.fixture
def slurm(put: Fake) -> Fake:
    """The same with an sbatch that takes everything, and a squeue that knows nothing."""
    put("sbatch", *map(str, range(101, 120)))
    put("squeue", "")
    return put


def live(
    put: Fake, *, array_size: int = 1001, tres: str = "", racks: str = "", names: Sequence[str] = ()
) -> None:
    """A controller that answers."""
    config = f"SLURM_VERSION = 22.05.8\nMaxArraySize = {array_size}\n"
    partition = "PartitionName=main Default=YES MaxTime=1-00:00:00 MaxNodes=4 TotalNodes=4 State=UP\n"
    partition += f" TRES={tres}\n" if tres else ""
    node = "NodeName=n01 CPUTot=8 RealMemory=64000 Partitions=main State=IDLE\n"
    names = names or [f"n0{number}" for number in range(1, 5 if racks else 2)]
    partition = partition.replace("Nodes=4", f"Nodes={max(4, len(names))}")
    nodes = "\n".join(node.replace("n01", name) for name in names)
    put("scontrol", "slurm 22.05.8", config, partition, nodes, racks or "No topology information available")


def waiting(put: Fake, *jobs: int | str) -> None:
    """A queue in which these wait."""
    put("squeue", "\n".join(f"{job}|PENDING|Priority|N/A||main|0:00|10:00|small" for job in jobs))


def profile(tmp_path: Path, text: str = PROFILE) -> None:
    path = tmp_path / "site" / "profiles" / "here.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def ask(text: str | None = JOB, *overrides: str, **given: Any) -> SubmissionRequest:
    """A request for a job file of this text."""
    path = None
    if text is not None:
        path = Path("job.yaml")
        path.write_text(text, encoding="utf-8")
    return SubmissionRequest(job=path, overrides=overrides, **given)


def handed_over(request: SubmissionRequest) -> SubmissionResult:
    return submit_job(request, lambda _: None)


def noted(request: SubmissionRequest) -> tuple[SubmissionResult, list[str]]:
    notes: list[str] = []
    return submit_job(request, notes.append), notes


def script(request: SubmissionRequest) -> str:
    return dry_run(request, lambda _: None).script


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def runs(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def test_a_run_directory_holds_what_was_handed_over(slurm: Fake, tmp_path: Path, runs_root: Path) -> None:
    log = slurm("sbatch", "a banner that speaks of job 5", "101")
    slurm("sbatch", "Submitted batch job 101")
    done, notes = noted(ask(JOB, "train.steps=7"))
    run = done.run
    assert run.path.parent == runs_root
    assert [path.stat().st_mode & 0o777 for path in (run.path, run.submitit)] == [0o700, 0o700]
    record = read_provenance(run)
    assert record is not None
    assert (record.kind, record.steps, record.submissions) == ("train", 7, list(done.submissions))
    assert (done.submissions[0].job, done.cluster) == (101, "")
    assert "steps: 7" in run.spec.read_text()
    text = run.script.read_text()
    assert str(run.submitit) in text
    assert (run.submitit / "101_submitted.pkl").is_file()
    (words,) = calls(log)
    assert words.startswith("--parsable ")
    assert run.read_exit() is None
    assert not run.cluster.exists()
    assert any("which compute nodes rarely share" in note for note in notes), "pytest's folder is in /tmp"


def test_a_dry_run_prints_that_very_script_and_makes_nothing(slurm: Fake, runs_root: Path) -> None:
    request = ask(JOB, "env.GREETING=it's $HOME")
    shown = script(request)
    assert runs(runs_root) == []
    run = handed_over(request).run
    assert run.script.read_text() == shown.replace("small-dry-run", run.id)


def test_when_sbatch_refuses_nothing_is_left(put: Fake, runs_root: Path) -> None:
    put(
        "sbatch",
        "!sbatch: error: Batch job submission failed: Invalid account or account/partition combination",
    )
    put("squeue", "")
    with pytest.raises(SiteError) as raised:
        handed_over(ask())
    assert runs(runs_root) == []
    told = str(raised.value)
    assert told.startswith(
        "sbatch did not take the job: sbatch: error: Batch job submission failed: Invalid acc"
    )
    assert told.endswith("; no run was made, and --dry-run shows the script")
    assert str(runs_root) not in told, "what it names would be gone"


def test_an_option_that_sbatch_does_not_know_is_told_by_its_key(put: Fake) -> None:
    put("sbatch", "!sbatch: unrecognized option '--foo'")
    with pytest.raises(SiteError, match=r"does not have that option \(resources\.sbatch\.foo\); no run"):
        handed_over(ask(JOB, "resources.sbatch.foo=1", "resources.sbatch.fo=1"))


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("what", ["write_atomically", "write_provenance"])
def test_a_job_that_cannot_be_recorded_is_cancelled(
    what: str, fault: BaseException, slurm: Fake, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcrun.submission import submit

    writes, answered = getattr(submit, what), slurm("sbatch", "101;far")

    def full(*given: Any) -> None:
        if calls(answered):
            raise fault
        writes(*given)

    monkeypatch.setattr(submit, what, full)
    cancelled = slurm("scancel", "")
    with pytest.raises((SiteError, KeyboardInterrupt)):
        handed_over(ask())
    assert calls(cancelled) == ["-M far 101"]
    assert runs(runs_root) == []


def test_a_local_run_that_cannot_be_recorded_is_ended(
    put: Fake, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcrun.slurm import executor

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcrun.submission.submit.write_provenance", full)
    with pytest.raises(SiteError, match="No space left on device"):
        handed_over(ask(None, command=("sleep", "600")))
    assert executor._controllers[-1].wait(timeout=60) == -signal.SIGINT
    assert runs(runs_root) == []


def test_a_full_disk_is_one_line(slurm: Fake, runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    run = handed_over(ask()).run
    run.attempt(1).create()
    end(run, "saved")
    before = sorted(run.path.rglob("*"))
    monkeypatch.setattr("hpcrun.submission.submit.write_atomically", full)
    with pytest.raises(
        SiteError, match=r"spec\.yaml: cannot be written: No space left on device; nothing was"
    ):
        handed_over(ask())
    assert runs(runs_root) == [run.id]
    with pytest.raises(SiteError, match="No space left on device"):
        handed_over(SubmissionRequest(resume=run))
    assert [path for path in sorted(run.path.rglob("*")) if path != run.submission_lock] == before


def test_a_root_that_cannot_be_used_is_not_made(
    slurm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a%j", "a\nb"):
        monkeypatch.setenv("HPCRUN_ROOT", str(tmp_path / name))
        with pytest.raises(UsageError, match="cannot be used for a job"):
            handed_over(ask())
        assert not (tmp_path / name).exists()


def test_when_a_later_array_is_refused_the_first_is_cancelled(put: Fake, runs_root: Path) -> None:
    put("sbatch", "101", "!sbatch: error: Batch job submission failed: Invalid qos specification")
    put("squeue", "")
    cancelled = put("scancel", "")
    live(put, array_size=4)
    with pytest.raises(SiteError):
        handed_over(ask(SWEEP))
    assert calls(cancelled) == ["101"]
    assert runs(runs_root) == []


def test_without_slurm_and_profile_it_runs_here(put: Fake) -> None:
    done = handed_over(ask(None, command=("echo", "hello")))
    (made,) = done.submissions
    assert (done.cluster, made.job, made.host) == ("local", None, os.uname().nodename)
    assert made.pid is not None
    assert os.getsid(made.pid) != os.getsid(0), "it outlives the terminal"
    record = read_provenance(done.run)
    assert record is not None
    assert (record.cluster, record.template, record.submissions) == ("local", None, [made])
    assert done.describe() == f"runs here, in the background, as process {made.pid}"
    os.waitpid(made.pid, 0)
    assert (done.run.read_exit() or {})["status"] == "done"
    assert done.run.attempt(1).log(0).read_text() == "hello\n"


def test_a_sweep_that_runs_here_and_what_failed_again(put: Fake, tmp_path: Path) -> None:
    text = f"test $N != 1 || test -e {tmp_path}/mended"
    sweep = json.dumps({"command": ["sh", "-c", text], "sweep": {"grid": {"env.N": ["0", "1"]}}})
    run: RunDir | None = None
    for states in (["done", "failed"], ["done", "done"]):
        done = handed_over(SubmissionRequest(resume=run, only_failed=True) if run else ask(sweep))
        run = done.run
        (made,) = done.submissions
        assert made.pid is not None
        os.waitpid(made.pid, 0)
        assert [state.state for state in read_element_states(run)] == states
        (tmp_path / "mended").touch()
    assert run is not None
    assert len(run.element(0).attempts()) == 1


def test_without_slurm_there_is_one_node(put: Fake, runs_root: Path) -> None:
    with pytest.raises(SpecError, match=r"resources.nodes: 2 nodes are asked for, but this would run on one"):
        handed_over(ask(None, "resources.nodes=2", command=("true",)))
    assert runs(runs_root) == []


def test_what_only_a_cluster_gives_is_not_dropped_in_silence(put: Fake, runs_root: Path) -> None:
    with pytest.raises(SpecError, match=r"command line container: .* no container is started; leave the"):
        handed_over(ask(None, "container.image=a.sif", command=("true",)))
    assert runs(runs_root) == []
    done, notes = noted(ask(None, "modules=[gcc/12]", "resources.gpus_per_node=2", command=("true",)))
    assert done.submissions[0].pid is not None
    os.waitpid(done.submissions[0].pid, 0)
    assert "command line modules: not loaded, because this runs here without Slurm" in notes
    has_gpus = list(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    told = "command line resources.gpus_per_node: 2 are asked for, but this machine shows none"
    assert (told in notes) is not bool(has_gpus)


@pytest.mark.parametrize(("text", "limit"), [(JOB, 10), (SWEEP, 60), ("command: [a]\n", None)])
def test_a_local_run_is_given_its_time_limit(
    text: str, limit: int | None, put: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int | None] = []

    def here(*_: Any, limit_min: int | None) -> ProcessId:
        given.append(limit_min)
        return ProcessId(1, 1)

    monkeypatch.setattr("hpcrun.slurm.executor.submit_background", here)
    handed_over(ask(text))
    assert given == [limit]


def test_an_image_that_is_not_here_is_told(slurm: Fake, tmp_path: Path) -> None:
    profile(tmp_path)
    told = "command line container.image: {} is not on this machine; it has to be on the compute nodes"
    for image, is_told in (
        ("gone.sif", True),
        ("/none/x", True),
        ("docker://a/b", False),
        ("here.sif", False),
    ):
        Path("here.sif").touch()
        _, notes = noted(ask(JOB, f"container.image={image}"))
        assert (told.format(image) in notes) is is_told, image


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("array", "--template array: is for a sweep, and the job has none"),
        ("train-pyxis", "--template train-pyxis: is for ranks in a container, and the job has no container"),
        ("command-apptainer", "--template command-apptainer: is for ranks in a container"),
    ],
)
def test_a_template_for_another_kind_of_job(template: str, said: str, slurm: Fake) -> None:
    with pytest.raises(UsageError, match=said):
        script(ask(JOB, template=template))


def test_what_decides_where_a_job_runs(slurm: Fake, tmp_path: Path) -> None:
    assert handed_over(ask()).submissions[0].job is not None, "there is an sbatch"
    with pytest.raises(SpecError, match=r"cluster: there is no profile; see `hpcrun cluster draft`"):
        script(ask(JOB, "cluster=default"))
    with pytest.raises(UsageError, match="nowhere: no profile of this name; there are: none"):
        script(ask(JOB, "cluster=nowhere"))
    (tmp_path / "bin" / "sbatch").unlink()
    profile(tmp_path, "name: here\nslurm_module: slurm\n")
    with pytest.raises(SiteError, match=r"sbatch: no such command.*module load slurm"):
        handed_over(ask())
    notes: list[str] = []
    dry_run(ask(JOB, "cluster=local"), notes.append)
    assert "it would run here, as a process in the background" in notes[-1]


def test_the_profile_gives_what_the_job_leaves_open(
    slurm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPCRUN_ROOT")
    profile(tmp_path)
    log = slurm("sbatch", "101;far")
    request = ask(
        JOB + "env: {WHO: me, ompi_Mixed: x}\nmodules: [own/2]\n", "resources.nodes=2", "parallel.dp_shard=2"
    )
    done = handed_over(request)
    work = tmp_path / "work"
    assert done.run.path.parent == work / "runs"
    assert (done.cluster, done.submissions[0].cluster) == ("here", "far")
    assert calls(log)[0].startswith("--parsable -M far ")
    assert "name: here" in done.run.cluster.read_text()
    text = done.run.script.read_text()
    assert directives(text) | {"nodes": "2"} == directives(text)
    assert {
        "partition": "gpu",
        "account": "proj",
        "gpus-per-node": "4",
        "exclusive": "",
    }.items() <= directives(text).items()
    lines = text.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("module load")] == ["site/1", "own/2"]
    assert {"export WHO=me", "export ompi_Mixed=x", "export OMP_NUM_THREADS=4", "ulimit -l unlimited"} <= set(
        lines
    )
    assert f"{work}/bin/python -P -u -m hpcrun _task {done.run.submitit} &" in lines
    assert "SRUN_CPUS_PER_TASK" not in text, "24.05 hands it on by itself"
    assert "SRUN_CPUS_PER_TASK" in script(replace(request, slurm_version="23.02"))


def test_the_release_is_the_one_that_answers(slurm: Fake, tmp_path: Path, runs_root: Path) -> None:
    profile(tmp_path)
    assert "SRUN_CPUS_PER_TASK" not in script(ask())
    live(slurm)
    slurm("sbatch", "101")
    # The live cluster has no partition gpu, which the profile makes the default one.
    run = handed_over(ask(JOB, "resources.partition=main")).run
    assert "SRUN_CPUS_PER_TASK" in run.script.read_text(), "22.05 is here, whatever the profile says"
    assert run.path.parent == runs_root, "HPCRUN_ROOT comes before the profile's root"


def test_a_backtick_cannot_stand_in_a_directive(slurm: Fake) -> None:
    with pytest.raises(
        SpecError, match=r"^command line resources.account: must not contain a backtick; leave it out$"
    ):
        script(ask(JOB, "resources.account='a`b'"))
    with pytest.raises(
        SpecError, match=r"^command line resources.sbatch.comment: must not contain a backtick"
    ):
        script(ask(JOB, "resources.sbatch.comment='a`b'"))


@pytest.mark.parametrize(
    ("text", "overrides", "template", "holds"),
    [
        (JOB, [], "train", ()),
        (None, [], "command", ("_task",)),
        (JOB, ["container.image=a.sif"], "train-apptainer", (r"apptainer\ exec\ --nv\ --bind", "--cleanenv")),
        (None, ["container.image=a.sif"], "command-apptainer", ("a.sif",)),
        (
            JOB,
            ["container.image=a", "container.runtime=pyxis"],
            "train-pyxis",
            ("HPCRUN_RANK_SRUN=--container-image=a",),
        ),
        (SWEEP, [], "array", ("HPCRUN_ELEMENT=$(( SLURM_ARRAY_TASK_ID + 0 ))",)),
        (SWEEP, ["container.image=a.sif"], "array", ("HPCRUN_ELEMENT", r"apptainer\ exec", "WORK:/work")),
    ],
)
def test_the_template_is_the_one_for_the_job(
    text: str | None, overrides: list[str], template: str, holds: tuple[str, ...], slurm: Fake, tmp_path: Path
) -> None:
    profile(tmp_path, PROFILE + "mpi: {launcher: srun}\n")
    command = ("echo", "hi") if text is None else None
    done = handed_over(ask(text, *overrides, command=command))
    record = read_provenance(done.run)
    assert record is not None
    assert Path(str(record.template)).name == f"{template}.sbatch.j2"
    made = done.run.script.read_text()
    for words in holds:
        assert words.replace("WORK", str(tmp_path / "work")) in made


def test_a_sweep_of_a_command(slurm: Fake) -> None:
    done = handed_over(ask("command: [echo]\nsweep: {grid: {env.A: [x, y]}}\n"))
    text = done.run.script.read_text()
    assert "export HPCRUN_ELEMENT=" in text
    assert directives(text)["array"] == "0-1"
    assert [done.run.element(number).spec.is_file() for number in (0, 1, 2)] == [True, True, False]


def test_a_container_needs_a_runtime(slurm: Fake) -> None:
    with pytest.raises(
        UsageError, match=r"container.runtime: is missing, and there is no profile that names one"
    ):
        script(ask(JOB, "container.image=a"))


def test_a_template_of_one_s_own(slurm: Fake) -> None:
    path = Path("mine.sbatch.j2")
    path.write_text('{% extends "shipped/train.sbatch.j2" %}{% block teardown %}\necho bye\n{% endblock %}')
    assert "\necho bye\n" in script(ask(template=str(path)))
    path.write_text(
        '{% extends "shipped/train.sbatch.j2" %}{% block teardown %}\n{{ nothing }}\n{% endblock %}'
    )
    with pytest.raises(UsageError, match=r"mine\.sbatch\.j2:2: 'nothing' is undefined"):
        handed_over(ask(template=str(path)))


def test_requeue_follows_whether_the_job_can_go_on_from_a_save(slurm: Fake) -> None:
    assert "requeue" in directives(script(ask(JOB, "retry.grace=3m")))
    assert directives(script(ask(JOB, "retry.grace=3m")))["signal"] == "B:USR2@180"
    command = script(ask(None, command=("echo",)))
    assert "no-requeue" in directives(command)
    assert "requeue" in directives(script(ask("command: [echo]\nretry: {crash: 1}\n")))


@pytest.mark.parametrize(("limit", "grace"), [("8h", 120), ("8m", 120), ("2m", 30), ("UNLIMITED", 120)])
def test_a_short_job_is_not_signalled_at_its_beginning(limit: str, grace: int, slurm: Fake) -> None:
    for request in (ask(JOB, f"resources.time={limit}"), ask("command: [a]\n", f"resources.time={limit}")):
        assert directives(script(request))["signal"] == f"B:USR2@{grace}"


def test_a_sweep_is_one_array(slurm: Fake) -> None:
    log = slurm("sbatch", "101")
    done = handed_over(ask(SWEEP))
    assert len(calls(log)) == 1
    assert [(one.job, one.array, one.offset) for one in done.submissions] == [(101, "0-5%3", 0)]
    assert read_sweep(done.run)[5] == {"train.seed": 5}
    assert "seed: 5" in done.run.element(5).spec.read_text()
    assert (done.run.submitit / "101_5_submitted.pkl").is_file()


def test_a_sweep_larger_than_the_cluster_s_arrays_becomes_several(slurm: Fake) -> None:
    live(slurm, array_size=2)
    done = handed_over(ask(SWEEP.replace("throttle: 3", "throttle: 2")))
    assert [(one.job, one.array, one.offset) for one in done.submissions] == [
        (101, "0-1%1", 0),
        (102, "0-1%1", 2),
        (103, "0-1%1", 4),
    ]
    last = (done.run.submitit / "103_submission.sh").read_text()
    assert directives(last)["dependency"] == "afterany:101"
    assert "HPCRUN_ELEMENT=$(( SLURM_ARRAY_TASK_ID + 4 ))" in last
    assert done.describe() == "jobs 101[0-1%1], 102[0-1%1], 103[0-1%1]"
    live(slurm, array_size=0)
    with pytest.raises(UsageError, match="this cluster takes no arrays"):
        handed_over(ask(SWEEP))


def end(run: RunDir, status: str, step: int = 4) -> None:
    """The end of its newest attempt."""
    told = {"status": status, "exit_code": 0, "message": "", "attempt": run.attempts()[-1].number}
    write_json(run.exit, told | {"step": step, "ended": time.time()})


def test_only_the_failed_elements_are_submitted_again(slurm: Fake) -> None:
    run = handed_over(ask(SWEEP)).run
    for number, status in enumerate(("done", "failed", "done", "done", "saved")):
        run.element(number).attempt(1).create()
        end(run.element(number), status)
    again = handed_over(SubmissionRequest(resume=run, only_failed=True, overrides=("resources.time=1h",)))
    assert again.run == run
    assert again.submissions[0].array == "1,4-5%3"
    assert directives((run.submitit / "102_submission.sh").read_text())["time"] == "60"
    record = read_provenance(run)
    assert record is not None
    assert [one.job for one in record.submissions] == [101, 102]
    assert [run.element(number).read_exit() is None for number in range(6)] == [
        False,
        True,
        False,
        False,
        True,
        True,
    ]
    for number in range(6):
        run.element(number).attempt(2 if number in (1, 4) else 1).create()
        end(run.element(number), "done")
    with pytest.raises(UsageError, match="every element ended well; nothing is left to do"):
        handed_over(SubmissionRequest(resume=run))
    longer = handed_over(SubmissionRequest(resume=run, overrides=("train.steps=8",)))
    assert longer.submissions[0].array == "0-5%3"
    with pytest.raises(UsageError, match="the sweep's own keys cannot be changed"):
        handed_over(SubmissionRequest(resume=run, overrides=("sweep.grid={train.seed: [9]}",)))


def test_one_element_is_submitted_again(slurm: Fake) -> None:
    run = handed_over(ask(SWEEP)).run
    for number in range(6):
        run.element(number).attempt(1).create()
        end(run.element(number), "failed" if number == 4 else "done")
    again = handed_over(SubmissionRequest(resume=run.element(4)))
    assert (again.run, again.submissions[0].array) == (run, "4%3")
    with pytest.raises(UsageError, match=f"{run.id}/3: it ended well; nothing is left to do"):
        handed_over(SubmissionRequest(resume=run.element(3)))


def test_a_failed_resume_of_a_sweep_leaves_its_elements_as_they_were(slurm: Fake) -> None:
    run = handed_over(ask(SWEEP)).run
    for number in range(6):
        run.element(number).attempt(1).create()
        end(run.element(number), "failed")
    before = {path: path.read_text() for path in run.path.rglob("*.*") if path.suffix in (".yaml", ".json")}
    assert len(before) == 15
    slurm("sbatch", "!sbatch: error: Batch job submission failed: Requested time limit is invalid")
    with pytest.raises(SiteError):
        handed_over(SubmissionRequest(resume=run, overrides=("resources.time=99h",)))
    assert {path: path.read_text() for path in before} == before


def test_why_a_job_would_stand_where_is_told_to_those_who_ask(slurm: Fake) -> None:
    leaf = "SwitchName=leaf{} Level=0 LinkSpeed=1 Nodes=n0{},n0{}\n"
    racks = (
        leaf.format(1, 1, 2)
        + leaf.format(2, 3, 4)
        + "SwitchName=spine Level=1 LinkSpeed=1 Switches=leaf[1-2]"
    )
    request = ask("command: [a]\n", "resources.nodes=2")
    notes: list[str] = []
    details: list[str] = []
    live(slurm, racks=racks)
    submit_job(request, notes.append, details.append)
    assert [note for note in notes if "placement" in note] == []
    assert any("--switches=1" in note for note in notes)
    assert any(line.startswith("placement: ") for line in details)
    live(slurm, racks=racks)
    notes.clear()
    dry_run(request, notes.append)
    assert any(note.startswith("placement: ") for note in notes)


def test_a_thousand_nodes_in_slurm_s_own_folding_are_placed(slurm: Fake) -> None:
    # Slurm folds cn001 to cn1024 to a range that outgrows its padding.
    racks = "".join(
        f"SwitchName=leaf{rack + 1} Level=0 LinkSpeed=1 Nodes=cn[{rack * 32 + 1:03}-{rack * 32 + 32:03}]\n"
        for rack in range(32)
    )
    racks += "SwitchName=spine Level=1 LinkSpeed=1 Nodes=cn[001-1024] Switches=leaf[1-32]\n"
    names = [f"cn{number:03}" for number in range(1, 1025)]
    for count, leaves in ((32, "1"), (33, "2")):
        live(slurm, racks=racks, names=names)
        done, notes = noted(ask("command: [a]\n", f"resources.nodes={count}"))
        assert directives(done.run.script.read_text())["switches"].partition("@")[0] == leaves
        assert not [note for note in notes if "no topology" in note]


@pytest.mark.parametrize(
    ("racks", "said"),
    [
        ("slurm_load_topo error: Zero Bytes were transmitted", "said: slurm_load_topo error"),
        ("SwitchName=leaf1 Nodes=cn[001-", "SwitchName=leaf1 Nodes: 'cn[001-' is not a host list"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "go round in a circle"),
    ],
)
def test_a_topology_that_cannot_be_read_is_said(slurm: Fake, racks: str, said: str) -> None:
    live(slurm, racks=racks)
    _, notes = noted(ask("command: [a]\n", "resources.nodes=2"))
    assert [note for note in notes if note.startswith("no topology known: ") and said in note]
    live(slurm)
    _, notes = noted(ask("command: [a]\n", "resources.nodes=1"))
    assert not [note for note in notes if "no topology" in note]


def test_memory_is_left_out_where_it_is_not_counted(slurm: Fake) -> None:
    live(slurm, tres="cpu=8,mem=4M,node=4")
    done, notes = noted(ask(JOB, "resources.mem=8G"))
    assert "mem" not in directives(done.run.script.read_text())
    assert "resources.mem: left out: this partition counts no memory" in notes


def test_resume_submits_the_same_run_again(slurm: Fake) -> None:
    run = handed_over(ask(JOB, "train.steps=4")).run
    run.attempt(1).create()
    end(run, "saved", 2)
    again = handed_over(SubmissionRequest(resume=run, overrides=("resources.time=2h",)))
    assert (again.run, again.submissions[0].job) == (run, 102)
    assert run.read_exit() is None
    assert directives(run.script.read_text())["time"] == "120"
    assert "time: 2h" in run.spec.read_text()
    end(run, "saved", 3)
    handed_over(SubmissionRequest(resume=run, overrides=("train.steps=9", "resources.time=10m")))
    assert (record := read_provenance(run)) is not None
    assert (record.steps, len(record.submissions)) == (9, 3)
    end(run, "done", 9)
    with pytest.raises(UsageError, match=r"is done \(9 of 9 steps\); to go on, give it more"):
        handed_over(SubmissionRequest(resume=run))


def test_a_failed_resume_leaves_the_run_as_it_was(slurm: Fake) -> None:
    run = handed_over(ask()).run
    run.attempt(1).create()
    end(run, "saved")
    before = {path: path.read_text() for path in (run.spec, run.exit, run.job)}
    (first,) = run.submitit.glob(".submission_file_*")
    slurm("sbatch", "!sbatch: error: Batch job submission failed: Requested time limit is invalid")
    with pytest.raises(SiteError) as raised:
        handed_over(SubmissionRequest(resume=run, overrides=("resources.time=99h",)))
    assert {path: path.read_text() for path in before} == before
    assert list(run.submitit.glob(".submission_file_*")) == [run.submitit / first.name]
    assert "no run was made" not in str(raised.value)


def test_a_run_is_not_submitted_twice_at_once(slurm: Fake, tmp_path: Path) -> None:
    """The second comes while the first waits for sbatch; the queue shows nothing yet."""
    run = handed_over(ask()).run
    run.attempt(1).create()
    end(run, "saved")
    refusals: list[str] = []

    def meanwhile(text: str) -> None:
        with pytest.raises(UsageError) as raised:
            handed_over(SubmissionRequest(resume=run))
        refusals.append(str(raised.value))

    slurm(
        "sbatch",
        "!sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "102",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcrun.slurm.sbatch.PAUSES_S", (0.0,))
        submit_job(SubmissionRequest(resume=run), meanwhile)
    assert refusals
    assert (
        refusals[0] == f"another hpcrun process is submitting {run.id}; check with `hpcrun status {run.id}`"
    )
    record = read_provenance(run)
    assert record is not None
    assert [one.job for one in record.submissions] == [101, 102]
    waiting(slurm, 102)
    with pytest.raises(UsageError, match="is queued"):
        handed_over(SubmissionRequest(resume=run))


def test_a_run_that_goes_on_is_not_submitted_again(slurm: Fake) -> None:
    run = handed_over(ask()).run
    waiting(slurm, 101)
    with pytest.raises(UsageError, match=f"{run.id} is queued; `hpcrun cancel {run.id}` first"):
        handed_over(SubmissionRequest(resume=run))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing to submit; write `hpcrun submit JOB.yaml`"),
        ({"only_failed": True, "job": Path("job.yaml")}, "--only-failed goes with --resume RUN"),
        ({"job": Path("none.yaml")}, "none.yaml: no such file"),
        ({"job": Path("job.yaml"), "slurm_version": "new"}, "--slurm-version new: is not a release of Slurm"),
        ({"job": Path("job.yaml"), "template": "nothing"}, "nothing: no such template or file; there are: "),
    ],
)
def test_requests_that_make_no_sense(given: dict[str, Any], said: str, slurm: Fake) -> None:
    Path("job.yaml").write_text(JOB)
    with pytest.raises(UsageError, match=said):
        script(SubmissionRequest(**given))


def test_jobs_wait_for_the_newest_jobs_of_other_runs(slurm: Fake) -> None:
    first, sweep = handed_over(ask()).run, handed_over(ask(SWEEP)).run
    first.attempt(1).create()
    end(first, "saved")
    handed_over(SubmissionRequest(resume=first))
    waiting(slurm, "102_[0-5%3]", 103)
    asked = ask(JOB, after=(first, sweep), after_any=(first,))
    assert directives(script(asked))["dependency"] == "afterany:103:102"


def test_a_run_that_has_ended_needs_no_waiting(slurm: Fake) -> None:
    run = handed_over(ask()).run
    run.attempt(1).create()
    end(run, "done")
    notes: list[str] = []
    assert "dependency" not in directives(dry_run(ask(JOB, after=(run,)), notes.append).script)
    assert f"{run.id} has ended already (done); there is nothing to wait for" in notes
    end(run, "failed")
    assert "dependency" not in directives(script(ask(JOB, after_any=(run,))))
    with pytest.raises(UsageError, match=f"--after {run.id}: it is failed, so this would never start"):
        script(ask(JOB, after=(run,)))


def test_the_run_knows_which_runs_must_have_ended_well_and_slurm_only_waits(slurm: Fake) -> None:
    first, sweep = handed_over(ask()).run, handed_over(ask(SWEEP)).run
    waiting(slurm, 101, "102_[0-5%3]")
    run = handed_over(ask(JOB, after=(first, sweep.element(2)), after_any=(sweep,))).run
    assert read_predecessors(run) == Predecessors((first, sweep.element(2)))
    assert directives(run.script.read_text())["dependency"] == "afterany:101:102_2:102"
    run.attempt(1).create()
    end(run, "failed")
    again = handed_over(SubmissionRequest(resume=run, after=(first,))).run
    assert read_predecessors(again) == Predecessors((first,), {"": 1})
    assert not read_predecessors(again).has_begun(again)
    again.attempt(2).create()
    assert read_predecessors(again).has_begun(again)
    end(again, "failed")
    slurm("sbatch", "!sbatch: error: no")
    with pytest.raises(SiteError, match="no"):
        handed_over(SubmissionRequest(resume=run))
    assert read_predecessors(again).runs == (first,), "as it was"
    slurm("sbatch", "105")
    handed_over(SubmissionRequest(resume=run))
    assert not run.after.exists()


def test_what_is_not_known_or_not_of_this_cluster_is_not_waited_for(slurm: Fake, tmp_path: Path) -> None:
    run = handed_over(ask()).run
    slurm("squeue", "!slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(UsageError, match=f"--after {run.id}: its state is not known: squeue said"):
        script(ask(JOB, after=(run,)))
    assert directives(script(ask(JOB, after_any=(run,))))["dependency"] == "afterany:101"
    slurm("squeue", "!slurm_load_jobs error: Invalid job id specified")
    slurm("sacct", "!sacct: error: Problem talking to the database: Connection refused")
    with pytest.raises(UsageError, match=r"not known: sacct said: .*the accounting database does not answer"):
        script(ask(JOB, after=(run,)))
    waiting(slurm, 101)
    origin = read_provenance(run)
    assert origin is not None
    write_provenance(run, replace(origin, submissions=[replace(origin.submissions[0], cluster="near")]))
    profile(tmp_path, "name: here\nslurm_cluster: far\n")
    for name in ("after", "after_any"):
        with pytest.raises(UsageError, match=f"{run.id}: it runs on cluster near, this is for far"):
            script(ask(JOB, **{name: (run,)}))


def test_only_slurm_can_make_a_job_wait(slurm: Fake, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "train-run")
    run.path.mkdir()
    (run.path / "spec.yaml").touch()
    with pytest.raises(UsageError, match="train-run: was not submitted to Slurm"):
        script(ask(JOB, after=(run,)))
    with pytest.raises(UsageError, match="--after needs Slurm"):
        script(ask(JOB, "cluster=local", after=(run,)))


def test_a_job_that_slurm_took_but_will_never_start_is_told(slurm: Fake) -> None:
    slurm("squeue", "101|PENDING|PartitionTimeLimit|N/A||main|0:00|10:00|small")
    _, notes = noted(ask())
    assert notes[-1] == (
        "job 101 will not start by itself: asks for more time than the partition allows (Slurm says"
        " PartitionTimeLimit)"
    )


def test_a_job_that_fits_no_node_is_refused_with_its_line(slurm: Fake, runs_root: Path) -> None:
    live(slurm)
    with pytest.raises(SpecError, match=r"job.yaml:4 resources.time: 25h is more than partition main allows"):
        handed_over(ask(JOB.replace("10m", "25h")))
    assert runs(runs_root) == []
    slurm("scontrol", "!slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)")
    done, notes = noted(ask())
    assert done.submissions[0].job is not None
    assert any(note.startswith("not checked against Slurm: `scontrol") for note in notes)


def test_what_the_job_needs_is_looked_for_before(slurm: Fake, tmp_path: Path, runs_root: Path) -> None:
    text = JOB.replace("python-stdlib", "gone.txt") + "secrets: {TOKEN: gone.key}\n"
    with pytest.raises(SpecError) as found:
        handed_over(ask(text))
    lines = sorted(str(found.value).splitlines())
    assert [line.split(": ")[0] for line in lines] == ["job.yaml:3 data.text", "job.yaml:5 secrets.TOKEN"]
    assert runs(runs_root) == []
    notes: list[str] = []
    shown = dry_run(ask(text), notes.append)
    assert shown.script.startswith("#!/bin/bash\n")
    assert sorted(one.subject for one in shown.refused) == ["data.text", "secrets.TOKEN"]
    assert sum(note.startswith("this would be refused: job.yaml:") for note in notes) == 2
    assert script(ask()), "what is only told refuses nothing"


def test_a_place_that_nodes_do_not_see_is_refused(slurm: Fake, tmp_path: Path) -> None:
    profile(tmp_path, "name: here\nlog_roots: [/scratch]\n")
    with pytest.raises(SpecError, match="the profile here allows run directories under /scratch only"):
        handed_over(ask())


def test_a_quota_that_is_passed_is_told(slurm: Fake, tmp_path: Path) -> None:
    profile(tmp_path, "name: here\nquota: [quota, -s]\n")
    slurm("quota", "/home  1.2G  10G  20G\n/scratch  1.205T*  1T  2T  6d")
    _, notes = noted(ask())
    assert "over the quota, so writing may fail: /scratch 1.205T* 1T 2T 6d (`quota -s`)" in notes
    (tmp_path / "bin" / "quota").unlink()
    assert any(note.startswith("the quota is not known: ") for note in noted(ask())[1])


def test_a_python_that_is_not_here_is_told(slurm: Fake) -> None:
    _, notes = noted(ask(JOB, "python=/opt/none/bin/python"))
    assert any("python: /opt/none/bin/python is not on this machine" in note for note in notes)


def test_secrets_are_in_no_file_of_the_run(slurm: Fake, tmp_path: Path) -> None:
    value = "hunter2-hunter2"
    key = tmp_path / "key"
    key.write_text(value + "\n")
    key.chmod(0o600)
    run = handed_over(ask(JOB + f"secrets: {{TOKEN: {key}}}\n")).run
    assert value not in script(ask(JOB + f"secrets: {{TOKEN: {key}}}\n"))
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if value.encode() in path.read_bytes()]


def test_dropped_variables_are_told_only_to_those_who_ask(
    slurm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet")
    notes: list[str] = []
    details: list[str] = []
    submit_job(ask(), notes.append, details.append)
    assert not any("SLURM_CPU_BIND" in note for note in notes)
    assert any("SLURM_CPU_BIND" in note for note in details)


@pytest.mark.parametrize(("level", "refused"), [("refused", True), ("warning", False)])
def test_what_the_file_system_says_of_saves_is_told(
    level: Any, refused: bool, slurm: Fake, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = StorageFinding(level, "quota of the user, space: 4 KiB free, one save needs 1 GiB")
    told = StoragePlan(runs_root, "lustre", None, (), (StorageFinding("unknown", "quota"), finding))
    monkeypatch.setattr(capacity, "plan_save_storage_in_time", lambda *_, **__: told)
    if refused:
        with pytest.raises(SpecError, match=r"no save can be kept here: quota .* needs 1 GiB; make"):
            submit_job(ask(), lambda _: None)
        assert runs(runs_root) == []
    else:
        assert f"saves in {runs_root}: {finding.text}" in noted(ask())[1]


def test_variables_are_unset_and_not_inherited_as_job_and_profile_say(
    slurm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "bin").mkdir()
    (tmp_path / "work" / "bin" / "python").symlink_to(sys.executable)
    text = PROFILE.replace("WHO: site}", "WHO: site, OLD: null, KEPT: null}")
    profile(tmp_path, f"{text}env_deny: [TRITON_CACHE_DIR, '*_CACHE_PATH']\n")
    for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "OWN"):
        monkeypatch.setenv(name, "/home/me/cache")
    log = slurm("sbatch", "101")
    job = JOB + "env: {WHO: null, KEPT: mine}\nenv_deny: [TORCHINDUCTOR_*]\n"
    done = handed_over(ask(job, "env.OMP_NUM_THREADS=null"))
    lines = done.run.script.read_text().splitlines()
    assert [line for line in lines if line.startswith("unset ")] == ["unset OMP_NUM_THREADS WHO OLD"]
    assert "export KEPT=mine" in lines
    assert not [line for line in lines if "export WHO" in line or "export OMP_NUM_THREADS" in line]
    given = environment(log)
    assert not {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR"} & set(given)
    assert {"XDG_CACHE_HOME", "OWN"} <= set(given)
    # As the node and --resume read it.
    again = load_job(done.run.spec).spec
    assert (again.env["WHO"], again.env_deny) == (None, ["TORCHINDUCTOR_*"])
    details: list[str] = []
    dry_run(ask(job), lambda _: None, details.append)
    assert "CUDA_CACHE_PATH" in details[0]
    assert "TORCHINDUCTOR_CACHE_DIR" in details[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env: {PATH: null}", "PATH: jobs need it, it cannot be null"),
        ("env_deny: ['*']", "would take PATH, HOME, USER, SLURM_CONF away"),
        ("env_deny: ['H?ME']", "would take HOME away"),
        ("env_deny: [A B]", "env_deny"),
        ("env: {SLURM_X: null}", "are set by Slurm"),
    ],
)
def test_what_jobs_need_is_left_to_them(put: Fake, text: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        dry_run(ask(JOB + text), lambda _: None)
    assert words in str(refused.value)


def test_ranks_do_not_find_what_is_unset_or_not_wanted(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRITON_CACHE_DIR", "OWN", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "inherited")
    text = 'command: ["true"]\nenv_deny: [TRITON_*, OWN]\n'
    text += "env: {NCCL_DEBUG: null, OMP_NUM_THREADS: null, OWN: mine}\n"
    spec = parse_job(text, "job.yaml").spec
    attempt = create_run("ranks").upcoming_attempt()
    attempt.create()
    here = Placement((os.uname().nodename,))

    def found_at(site: RunContext) -> dict[str, str]:
        with closing(LocalNode(attempt.run)) as nodes:
            return build_rank_environment(attempt, spec, site, here, nodes, lambda _: None)

    found = found_at(RunContext())
    assert not {"NCCL_DEBUG", "OMP_NUM_THREADS"} & set(found)
    assert "TRITON_CACHE_DIR" not in found
    assert found["OWN"] == "mine", "what the job sets is not inherited"
    # Where a batch job stands it was submitted without; what the site has set since then is meant.
    batch = RunContext(Allocation(7, (os.uname().nodename,), "7", is_batch=True))
    found = found_at(batch)
    assert (found.get("TRITON_CACHE_DIR"), found.get("NCCL_DEBUG")) == ("inherited", None)


SURVIVE = "checkpoint: {memory: 1, every: 1, parity: {survive: leaf}}\n"
PYXIS = "container: {image: img.sqsh, runtime: pyxis}\n"


def findings(request: SubmissionRequest) -> list[str]:
    """What a dry run, and a submission with the same words, refuse."""
    refused = [str(one) for one in dry_run(request, lambda _: None).refused]
    with pytest.raises(SpecError) as error:
        submit_job(request, lambda _: None)
    assert [str(one) for one in error.value.problems] == refused
    return refused


@pytest.mark.parametrize("launcher", ["hydra", "mpirun"])
@pytest.mark.parametrize("kind", [JOB, SWEEP, 'command: ["true"]\n'])
def test_a_launcher_that_cannot_start_the_container_is_refused_as_on_the_node(
    kind: str, launcher: str, slurm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(tmp_path, f"name: here\nmpi: {{launcher: {launcher}}}\n")
    (told,) = findings(ask(kind + PYXIS))
    assert f"mpi.launcher: {launcher} starts no container of srun's" in told
    monkeypatch.setenv(SRUN_OPTIONS_VARIABLE, "--container-image=img.sqsh")
    cluster = load_cluster(tmp_path / "site" / "profiles" / "here.yaml")
    with pytest.raises(SiteError) as late:
        RunContext(None, cluster).launcher(parse_job('command: ["true"]', "job.yaml").spec)
    assert str(late.value) in told


def test_or_started_when_it_can(slurm: Fake, tmp_path: Path) -> None:
    profile(tmp_path, "name: here\nmpi: {launcher: srun}\n")
    assert dry_run(ask(JOB + PYXIS), lambda _: None).refused == ()
    profile(tmp_path, "name: here\nmpi: {launcher: hydra}\n")
    other = "container: {image: img.sif, runtime: apptainer}\n"
    assert dry_run(ask(JOB + other), lambda _: None).refused == ()


def test_a_loss_that_so_few_nodes_cannot_survive_is_refused(slurm: Fake) -> None:
    (told,) = findings(ask(JOB + SURVIVE))
    with pytest.raises(UsageError) as late:
        choose_erasure_sets(["n1"], {"leaf": {"n1": "l1"}}, survive="leaf")
    assert str(late.value) in told
    two = ["resources.nodes=2", "parallel.dp_shard=2"]
    assert dry_run(ask(JOB + SURVIVE, *two), lambda _: None).refused == ()
    racks = "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[01-02]\nSwitchName=leaf2 Level=0 Nodes=n[03-04]\n"
    live(slurm, racks=racks + "SwitchName=top Level=1 Nodes=n[01-04] Switches=leaf[1-2]\n")
    refused = dry_run(ask(JOB + SURVIVE.replace("leaf", "rack"), *two), lambda _: None).refused
    assert "rack is not a level of this fabric; use one of node, leaf" in str(refused[0])


def test_a_root_that_may_not_be_written_is_refused_as_on_the_node(
    slurm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPCRUN_ROOT", str(tmp_path / "file" / "runs"))
    (told,) = findings(ask())
    with pytest.raises(UsageError) as late:
        prepare_job(Path("job.yaml"))
    assert str(late.value) == told


def test_what_a_container_holds_is_not_looked_for_outside(slurm: Fake, tmp_path: Path) -> None:
    profile(tmp_path, "name: here\nmpi: {launcher: srun}\n")
    inside = "model: tiny\ndata: {text: /in/the/image.txt}\n" + PYXIS
    done = handed_over(ask(inside))
    # As the supervisor on the node, outside of the container, looks again.
    assert prepare_job(None, resume=done.run).spec.container is not None


def test_modules_that_this_interpreter_lacks_are_told(
    slurm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(tmp_path, "name: here\npython: {checks: [not_there_at_all]}\n")
    notes: list[str] = []
    assert dry_run(ask(), notes.append).refused == ()
    assert any("lacks not_there_at_all" in note for note in notes)
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    dry_run(ask(), notes.append)
    assert any("mpiexec does not exist, and it starts the ranks" in note for note in notes)


@pytest.mark.parametrize(
    ("environ", "text", "words"),
    [
        ({"SBATCH_ACCOUNT": "other"}, "account: mine", "is mine, but SBATCH_ACCOUNT in your environment"),
        ({"SBATCH_TIMELIMIT": "60"}, "time: 2h", "is 2h, but SBATCH_TIMELIMIT in your environment is 60"),
        ({"SBATCH_SEGMENT_SIZE": "3"}, "nodes: 2", "use 1, 2 (SBATCH_SEGMENT_SIZE is 3 in your environment)"),
        ({"SBATCH_REQ_SWITCH": "2"}, "nodes: 2, placement: spread", "(SBATCH_REQ_SWITCH is 2 in"),
        ({"SBATCH_TIMELIMIT": "10"}, "nodes: 1}\nwatch: {floor: 1h", "(SBATCH_TIMELIMIT is 10 in"),
        ({"SLURM_CLUSTERS": "near"}, "nodes: 1", "of the cluster far, but SLURM_CLUSTERS is near"),
    ],
)  # fmt: skip
def test_the_user_s_slurm_variables_are_refused_where_they_contradict(
    environ: dict[str, str],
    text: str,
    words: str,
    slurm: Fake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "SLURM_CLUSTERS" in environ:
        profile(tmp_path, "name: here\nslurm_cluster: far\n")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    told = findings(ask(f'command: ["true"]\nresources: {{{text}}}\n'))
    assert [one for one in told if words in one], told
    assert not any("\n" in one for one in told)


def test_or_fill_what_is_open_and_stay_with_the_run(slurm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    log = slurm("sbatch", "101;far")
    for name, value in {
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_TIMELIMIT": "2:00:00",
        "SLURM_CLUSTERS": "far",
    }.items():
        monkeypatch.setenv(name, value)
    done, notes = noted(ask('command: ["true"]'))
    options = directives(done.run.script.read_text())
    assert (options["account"], options["time"]) == ("mine", "120")
    assert any("resources.account=mine: from SBATCH_ACCOUNT" in note for note in notes)
    assert calls(log)[0].startswith("--parsable -M far ")
    record = read_provenance(done.run)
    assert record is not None
    assert record.inputs["SBATCH_ACCOUNT"] == "mine"
    assert (record.submissions[0].cluster, load_job(done.run.spec).spec.resources.account) == ("far", "mine")
