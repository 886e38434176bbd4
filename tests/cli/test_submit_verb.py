"""`hpcrun submit`: what its options mean, what goes to stdout, what its process loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.cli.main import main
from hpcrun.specs.rundir import RunDir
from tests.slurm.fakes import Fake, calls, stand_ins

JOB = "name: small\nmodel: tiny\ndata: {text: python-stdlib}\nresources: {time: 10m}\n"
HEAVY = ("torch", "mpi4py", "numpy", "submitit", "transformers", "tokenizers", "safetensors")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """An sbatch that takes everything, nobody's profiles, and a job file in the working directory."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    put = stand_ins(tmp_path, monkeypatch)
    put("sbatch", "101", "102", "103", "104")
    put("squeue", "")
    return put


def hpcrun(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["submit", *words])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_run_s_id_stands_alone_on_stdout(
    slurm: Fake, runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hpcrun("job.yaml", "train.steps=3") == 0
    out, err = capsys.readouterr()
    (run,) = runs_root.iterdir()
    assert out == f"{run.name}\n"
    assert err.splitlines()[-1] == "hpcrun: job 101"
    assert "steps: 3" in RunDir(run).spec.read_text()


def test_json(slurm: Fake, runs_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hpcrun("job.yaml", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = runs_root.iterdir()
    assert found == {
        "schema_version": 2,
        "run": run.name,
        "path": str(run),
        "job": 101,
        "jobs": [101],
        "cluster": "",
        "pid": None,
    }


def test_a_command_needs_no_job_file(slurm: Fake, runs_root: Path) -> None:
    assert hpcrun("name=mine", "resources.nodes=2", "--", "python", "my train.py", "--lr=1") == 0
    (run,) = runs_root.iterdir()
    assert run.name.startswith("mine-")
    spec = RunDir(run).spec.read_text()
    assert all(words in spec for words in ("nodes: 2", "- my train.py", "- --lr=1"))


def test_dry_run(slurm: Fake, runs_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hpcrun("job.yaml", "resources.time=4:00", "--dry-run", "--slurm-version", "23.02") == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=small\n")
    assert "SRUN_CPUS_PER_TASK" in out
    assert "hpcrun: resources.time: 4:00 is 4 minutes; write 4:00:00 for hours and minutes" in err
    assert not runs_root.exists()


def test_a_dry_run_of_what_would_be_refused_fails(
    slurm: Fake, runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hpcrun("job.yaml", "data.text=gone.txt", "--dry-run") == 1
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n")
    assert "this would be refused: command line data.text: " in err
    for words, code, refused in ((["data.text=gone.txt"], 1, 1), ([], 0, 0)):
        assert hpcrun("job.yaml", *words, "--dry-run", "--json") == code
        found = json.loads(capsys.readouterr().out)
        assert sorted(found) == ["refused", "schema_version", "script"]
        assert (found["script"], len(found["refused"])) == (out, refused)
    assert not runs_root.exists()


def test_template_and_cluster(
    slurm: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = tmp_path / "site" / "profiles"
    profiles.mkdir(parents=True)
    for name in ("one", "two"):
        (profiles / f"{name}.yaml").write_text(f"name: {name}\naccount: of-{name}\n")
    assert hpcrun("job.yaml", "--dry-run", "--cluster", "two", "--template", "function") == 0
    out = capsys.readouterr().out
    assert "#SBATCH --account=of-two\n" in out
    assert "--array" not in out
    assert hpcrun("job.yaml", "--dry-run") == 2
    assert "which is the cluster? name one of one, two" in capsys.readouterr().err
    assert hpcrun("job.yaml", "cluster=one", "--dry-run", "--cluster", "two") == 2
    assert "--cluster two: contradicts cluster=one; give one of the two" in capsys.readouterr().err
    assert hpcrun("job.yaml", "cluster=two", "--dry-run", "--cluster", "two") == 0


def test_after_and_resume(slurm: Fake, runs_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hpcrun("job.yaml") == 0
    first = capsys.readouterr().out.strip()
    slurm("squeue", "101|PENDING|Priority|N/A||main|0:00|10:00|small")
    assert hpcrun("job.yaml", "--after", first, "--after-any", first) == 0
    second = RunDir(runs_root / capsys.readouterr().out.strip())
    assert "#SBATCH --dependency=afterany:101\n" in second.script.read_text()
    slurm("squeue", "")
    assert hpcrun("--resume", first, "resources.time=1h", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"] == first
    assert len(list(runs_root.iterdir())) == 2


def test_follow_writes_the_log_and_ends_with_the_run_s_code(
    slurm: Fake, runs_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This sbatch has run the job by the time it answers.
    ran = (
        'run=${@: -1}; run=${run%/submitit/*}; mkdir -p "$run/attempts/1/logs"\n'
        'echo trained >"$run/attempts/1/logs/rank-0.log"\n'
        'echo "{\\"status\\": \\"failed\\", \\"exit_code\\": 5, \\"message\\": \\"a rank died\\",'
        ' \\"attempt\\": 1, \\"step\\": 2, \\"ended\\": 99999999999}" >"$run/exit.json"\n'
    )
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f"#!/bin/bash\n{ran}echo 101\n")
    assert hpcrun("job.yaml", "--follow") == 5
    out, err = capsys.readouterr()
    (run,) = runs_root.iterdir()
    assert out == f"{run.name}\ntrained\n"
    assert "is failed: a rank died" in err
    assert hpcrun("job.yaml", "--follow", "--json") == 5
    out, err = capsys.readouterr()
    assert json.loads(out)["job"] == 101
    assert "trained\n" in err


def test_ctrl_c_while_following_leaves_the_job_alone(
    slurm: Fake, runs_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcrun.runs.follow.follow_logs", interrupted)
    cancelled = slurm("scancel", "")
    assert hpcrun("job.yaml", "--follow") == 130
    (run,) = runs_root.iterdir()
    assert f"the job continues; `hpcrun logs -f {run.name}` follows it" in capsys.readouterr().err
    assert calls(cancelled) == []


def test_v_shows_what_the_job_does_not_get(
    slurm: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet")
    assert hpcrun("job.yaml") == 0
    assert "SLURM_CPU_BIND" not in capsys.readouterr().err
    for options in (["-v"], ["-v", "--dry-run"]):
        assert hpcrun("job.yaml", *options) == 0
        assert "SLURM_CPU_BIND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "hpcrun: nothing to submit; write `hpcrun submit JOB.yaml`, or a command behind `--`"),
        (["none.yaml"], 2, "hpcrun: none.yaml: no such file"),
        (["job.yaml", "trian.steps=3"], 2, "hpcrun: command line trian: unknown key; did you mean train?"),
        (["job.yaml", "--slurm-version", "24.05"], 2, "hpcrun: --slurm-version goes with --dry-run"),
        (["job.yaml", "--after", ","], 2, "hpcrun: --after and --after-any take runs, RUN[,RUN]"),
        (["job.yaml", "--after", "gone"], 2, "hpcrun: gone: no such run"),
        (["job.yaml", "--resume", "gone"], 2, "hpcrun: gone: no such run"),
        (["job.yaml", "--only-failed"], 2, "hpcrun: --only-failed goes with --resume RUN, of a sweep"),
        (["job.yaml", "--dryrun"], 2, "hpcrun: No such option: --dryrun"),
        (["job.yaml", "--"], 2, "hpcrun: command line command: must have at least 1 item"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], code: int, said: str, slurm: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hpcrun(*words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)
    assert err.count("\n") == 1


def loaded(*words: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """What of the heavy things a process of the verb has loaded."""
    code = (
        "import sys\nfrom hpcrun.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n"
        f"    print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "submit", *words],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split(), done


def test_a_dry_run_needs_no_slurm_and_loads_nothing_heavy(slurm: Fake, tmp_path: Path) -> None:
    (tmp_path / "bin" / "sbatch").unlink()
    heavy, done = loaded("job.yaml", "--dry-run")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "this is the script that Slurm would get" in done.stderr
    assert heavy == []


def test_submitting_loads_submitit_and_nothing_else(slurm: Fake) -> None:
    assert loaded("job.yaml")[0] == ["submitit"]
