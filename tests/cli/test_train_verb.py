"""`hpcrun train` and the frame around every verb, with ranks that run a stub instead of torch."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrun import __version__
from hpcrun.cli.display import format_short_number, format_step, make_display
from hpcrun.cli.main import main
from hpcrun.launch.signal_queue import unblock_signals
from hpcrun.specs.metrics import StepMetric
from tests.metric_lines import metric

ROOT = Path(__file__).parents[2]

# Loaded by every Python process that finds it on its path: it stands in for the module that needs torch.
STUB = """\
import os, sys, time, types
stub = types.ModuleType("hpcrun.runtime.rank")

def main(run_dir, number, requests):
    from pathlib import Path
    from hpcrun.errors import NotANumberError
    from hpcrun.launch import rank_shim
    from hpcrun.launcher_world import detect_world
    from hpcrun.specs.metrics import MetricRecord, StepMetric
    from hpcrun.specs.records import JsonLineWriter, write_json
    from hpcrun.specs.rundir import RunDir
    attempt, world = RunDir(Path(run_dir)).attempt(number), detect_world(os.environ)
    assert "torch" not in sys.modules and rank_shim.enter_rank(attempt, world) is requests
    from mpi4py import MPI
    comm, mode = MPI.COMM_WORLD, os.environ["STUB"]
    rank_shim.record_shared_memory(attempt, world.rank)
    if mode == "nan":
        if world.rank == 1:
            raise NotANumberError("step 2: loss is nan")
        time.sleep(30)
    if mode == "exit" and world.rank == 1:
        sys.exit(3)
    status, step = "done", 0
    while step < 50:
        step += 1
        requests.has_begun()
        if world.rank == 0:
            writer = JsonLineWriter(attempt.run.metrics)
            metric = StepMetric(step, 5 - step / 50, 0.5, 1e-3, 1e3, 0.1, {}, None, None)
            writer.write(MetricRecord(number, time.time(), metric).as_json())
            writer.close()
        while mode == "wait" and step == 2 and not requests.stop:
            time.sleep(0.01)
        if requests.stop:
            status = "saved"
            break
    comm.Barrier()
    if world.rank == 0:
        result = {"attempt": number, "status": status, "step": step, "loss": 5 - step / 50}
        write_json(attempt.result, result | {"eval_loss_before": 5.5, "eval_loss_after": 4.25})
    comm.Barrier()
    return 0 if status == "done" else 75

def join_world(job, overrides, resume, world, display):
    print("joined as", world.rank, "of", world.size, job, list(overrides), resume)
    return 75

stub.main, stub.join_world = main, join_world
sys.modules["hpcrun.runtime.rank"] = stub
"""

JOB = """\
name: t
model: tiny
data: {text: corpus.txt, seq_len: 16, holdout: 0}
train: {steps: 50}
parallel: {dp_replicate: 2}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "sitecustomize.py").write_text(STUB)
    return tmp_path / "job.yaml"


@pytest.fixture(autouse=True)
def signals_flow() -> Iterator[None]:
    yield
    unblock_signals()


def start(
    job: Path,
    *words: str,
    mode: str = "done",
    python: Sequence[str] = ("-m", "hpcrun"),
    environ: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *python, *words],
        cwd=job.parent,
        env=os.environ | {"PYTHONPATH": f"{job.parent / 'stub'}:{ROOT}", "STUB": mode} | (environ or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=60)
    assert "Traceback" not in err
    return child.returncode, out, err


def call(*words: str) -> int:
    """Run the command in this process, up to its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_train_to_the_end(job: Path, runs_root: Path) -> None:
    code, out, err = finish(start(job, "train", "job.yaml", "train.steps=50"))
    assert code == 0, err
    (run,) = runs_root.iterdir()
    assert out.splitlines() == [
        f"run   {run}",
        "ended done at step 50",
        "loss  4.0000",
        "eval  4.2500 (before: 5.5000)",
    ]
    assert "hpcrun: 2 ranks ready after" in err
    assert "hpcrun: step 50/50  loss 4.0000" in err
    resumed = finish(start(job, "train", "--resume", run.name))
    assert resumed[0] == 2
    assert "is done (50 of 50 steps)" in resumed[2]


def test_train_says_how_it_ended_in_json(job: Path) -> None:
    code, out, _ = finish(start(job, "train", "job.yaml", "--json"))
    told = json.loads(out)
    assert code == told["exit_code"] == 0
    assert (told["schema_version"], told["status"], told["step"], told["attempt"]) == (2, "done", 50, 1)
    assert Path(told["path"]).name == told["run"]


def test_a_signal_to_the_command_saves_and_the_run_goes_on_later(job: Path, runs_root: Path) -> None:
    child = start(job, "train", "job.yaml", mode="wait")
    assert child.stderr is not None
    while "ranks ready" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    code, out, _ = finish(child)
    (run,) = runs_root.iterdir()
    assert code == 75
    assert re.search(rf"resume with: \S*hpcrun train --resume {run.name}$", out, re.MULTILINE)
    code, out, _ = finish(start(job, "train", "--resume", run.name, "train.steps=60"))
    assert code == 0
    assert len(list((run / "attempts").iterdir())) == 2


TERM_WHILE_LOADING = """\
import importlib, os, signal
load = importlib.import_module

def load_and_be_asked_to_stop(name, package=None):
    if name == "hpcrun.cli.train":
        os.kill(os.getpid(), signal.SIGTERM)
    return load(name, package)

importlib.import_module = load_and_be_asked_to_stop
from hpcrun.cli.main import main
main()
"""


def test_a_signal_while_the_command_is_loaded_is_not_lost(job: Path) -> None:
    code, out, _ = finish(start(job, "train", "job.yaml", mode="wait", python=("-c", TERM_WHILE_LOADING)))
    assert code == 75
    assert "ended saved" in out


@pytest.mark.parametrize(
    ("mode", "code", "text"),
    [
        ("nan", 4, "hpcrun: rank 1 on node {node}: step 2: loss is nan"),
        ("exit", 5, "hpcrun: rank 1 on node {node}: SystemExit: 3; log: "),
    ],
)
def test_what_escapes_from_a_rank_is_one_line_and_an_exit_code(
    job: Path, mode: str, code: int, text: str
) -> None:
    found, _, err = finish(start(job, "train", "job.yaml", "retry.crash=0", mode=mode))
    assert found == code
    assert text.format(node=os.uname().nodename) in err


def test_inside_a_world_train_is_a_rank_of_it(job: Path, runs_root: Path) -> None:
    world = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
    code, out, _ = finish(start(job, "train", "job.yaml", "train.lr=1", environ=world))
    assert (code, out) == (75, "joined as 3 of 4 job.yaml ['train.lr=1'] None\n")
    assert not runs_root.exists()


def test_print_spec_needs_no_data(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "corpus.txt").unlink()
    assert call("train", str(job), "train.steps=7", "--print-spec") == 0
    out = capsys.readouterr().out
    assert "\n  steps: 7\n" in out
    assert out.splitlines()[-1].startswith("# plan: dp_replicate 2")


def test_print_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", "--print-schema") == 0
    assert "train" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train"], "no job file given; write `hpcrun train JOB.yaml"),
        (["train", "train.steps=3"], "no job file given"),
        (["train", "absent.yaml"], "absent.yaml: no such file"),
        (["train", "JOB", "train.stepz=3"], "did you mean steps?"),
        (["train", "JOB", "--retry"], "No such option: --retry (see `hpcrun train --help`)"),
        (["train", "JOB", "--resume", "x"], "--resume takes the job from the run"),
        (["train", "--resume", "x"], "x: no such run"),
        (["list", "--", "ls"], "list takes no command after `--` (found: ls)"),
        (["trian"], "trian: no such command; did you mean train?"),
        (["status"], "status: name a run, or several, or give --all"),
    ],
)
def test_mistakes_of_usage_are_one_line(
    job: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*[str(job) if word == "JOB" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert all(line.startswith("hpcrun: ") for line in err.splitlines())


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted(sys.modules), file=sys.stderr))\n"
        "from hpcrun.cli.main import main\nmain([sys.argv[1]])"
    )
    for word, said in (("--help", "usage: hpcrun VERB"), ("--version", f"hpcrun {__version__}")):
        done = subprocess.run(
            [sys.executable, "-c", code, word],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(said)
        for heavy in ("torch", "pydantic", "rich", "jinja2", "typer", "yaml", "mpi4py", "numpy"):
            assert f"'{heavy}'" not in done.stderr


def test_the_shim_of_a_rank_loads_nothing_heavy() -> None:
    code = "import sys, hpcrun.launch.rank_shim; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "mpi4py", "numpy", "pydantic", "yaml", "typer", "subprocess", "hpcrun.specs.job"}
    assert set(done.stdout.split()) & heavy == set()


def test_a_reader_that_has_seen_enough_is_no_error(job: Path) -> None:
    child = start(job, "train", "--print-schema")
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait() == 0


def step(number: int, **fields: Any) -> StepMetric:
    made = metric("step", number, loss=2.0, step_time_s=0.5, **fields)
    assert isinstance(made, StepMetric)
    return made


def test_elsewhere_than_on_a_terminal_the_run_is_a_few_lines() -> None:
    stream = io.StringIO()
    display = make_display(1000, stream)
    display.ranks_ready(1, 2.0)
    for number in range(1, 1001):
        display.step(step(number, tokens_per_s=123_456.0))
    display.step(metric("save", 1000, seconds=1.25))
    display.step(metric("eval", 1000, eval_loss=1.5))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "hpcrun: 1 rank ready after 2.0 s"
    assert "hpcrun: step 1000/1000  loss 2.0000  123k tokens/s  0.5 s per step" in lines
    assert lines[-2:] == ["hpcrun: step 1000: saved in 1.2 s", "hpcrun: step 1000: eval loss 1.5000"]
    assert len(lines) < 16


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_is_a_bar_with_notes_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    display = make_display(4, stream)
    display.note("starting")
    display.ranks_ready(2, 1.0)
    for number in (1, 2, 3, 4):
        display.step(step(number))
    display.note("saving [step 4]")
    display.close()
    text = stream.getvalue()
    assert "4/4" in text
    assert "loss 2.0000" in text
    assert "hpcrun: saving [step 4]" in text


def test_a_terminal_that_went_away_does_not_end_the_run() -> None:
    tried: list[str] = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(5, "Input/output error")

    make_display(1, Gone()).note("still here")
    assert "still here" in "".join(tried)


def test_figures_are_short() -> None:
    assert [format_short_number(number) for number in (7.0, 1234.0, 45_600_000.0, 1.5e9)] == [
        "7",
        "1.23k",
        "45.6M",
        "1.5G",
    ]
    assert format_step(step(2, mfu=0.412), 100) == "loss 2.0000  1k tokens/s  mfu 41.2%  49 s left"
    assert format_step(step(9), 10) == "loss 2.0000  1k tokens/s  0.5 s per step"
