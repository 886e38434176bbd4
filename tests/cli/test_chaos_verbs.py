"""`hpcrun chaos`: what it takes, what it asks, what it says; the faults themselves are for tests/launch."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from hpcrun import process
from hpcrun.cli.main import main
from hpcrun.mesh import ParallelDegrees
from hpcrun.specs.placement import Placement, write_placement
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir

Capture = pytest.CaptureFixture[str]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    """A run of two ranks here, whose supervisor is this very process; the ranks themselves have ended."""
    run = create_run("r")
    run.spec.write_text("name: r\n")
    attempt = run.attempt(1).create()
    node, found = os.uname().nodename, process.identify_process(os.getpid())
    assert found
    write_json(
        attempt.supervisor,
        {"host": node, "pid": found.pid, "start_ticks": found.start_ticks, "started": 1.0},
    )
    write_placement(attempt.placement, Placement((node, node)), ParallelDegrees())
    for rank in (0, 1):
        write_json(
            attempt.rank_record(rank), {"rank": rank, "node": node, "pid": 2**22 + 1, "start_ticks": 1}
        )
    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("kill-rank RUN", "--rank: name one, or take one at random: rank or random"),
        ("kill-rank RUN --rank 0 --random", "--rank: give only one of them: rank or random"),
        ("kill-rank RUN --rank 0 --seed 3", "--seed: is for random; give both, or neither"),
        ("kill-rank RUN --rank -1", "--rank: -1 is not a rank; ranks count from 0"),
        ("kill-rank RUN --rank 0 --signal KIL", "--signal: 'KIL' is not a signal; write a name such as KILL"),
        ("kill-rank RUN --rank 0 --signal STOP", "--signal: for SIGSTOP there are stop-rank and resume-rank"),
        ("kill-rank RUN --rank 2", "rank 2: RUN has no such rank; there are: 0 to 1"),
        ("kill-rank RUN --rank one", "Invalid value for '--rank'"),
        ("stop-rank RUN --rank 0 --for 3x", "--for: '3x' is not a time; write 90m"),
        ("stop-rank RUN --rank 0 --for UNLIMITED", "--for: UNLIMITED is longer than a day"),
        ("slow RUN --node NODE", "--for: is missing; slow needs it"),
        (
            "slow RUN --node NODE --for 1s --share 1",
            "--share: 1.0 is not a share; write a number between 0 and 1",
        ),
        ("slow RUN --node n9 --for 1s", "node n9: is not a node of RUN; its ranks are on NODE"),
        ("fill-disk RUN --node NODE --for 1s", "--where: is missing; fill-disk needs it"),
        ("fill-disk RUN --node NODE --for 1s --where tmp", "--where: 'tmp' is not an absolute path"),
        ("fill-disk RUN --node NODE --for 1s --where /tmp --leave much", "--leave: 'much' is not an amount"),
        ("kill-agent RUN --node NODE", "RUN has no agents: its supervisor is on the one node of its ranks"),
        (
            "vanish RUN --node NODE",
            "node NODE: also has the supervisor of RUN, without which the run ends",
        ),
        ("vanish RUN --random", "RUN: its only node also has its supervisor; --force takes it"),
        ("kill-rank nobody --rank 0", "nobody: no such run under"),
        ("resume-rank RUN --rank 0", "rank 0 of RUN has ended already"),
        ("play RUN none.yaml", "none.yaml: no such file"),
    ],
)
@pytest.mark.process
def test_what_makes_no_sense_is_one_line(run: RunDir, words: str, told: str, capsys: Capture) -> None:
    names = {"RUN": run.id, "NODE": os.uname().nodename}
    for name, value in names.items():
        words, told = words.replace(name, value), told.replace(name, value)
    assert call("chaos", *words.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert told in said.err
    assert not run.chaos.exists()


def test_a_dry_run_says_what_would_be_done_and_how(run: RunDir, tmp_path: Path, capsys: Capture) -> None:
    node = os.uname().nodename
    assert call("chaos", "stop-rank", run.id, "--random", "--seed", "7", "--for", "5s", "--dry-run") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("would stop rank ")
    assert first.endswith(f" on {node} for 5 s")
    assert " _chaos " in second
    assert call("chaos", "vanish", run.id, "--node", node, "--force", "--dry-run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema_version"], told["run"]) == (2, run.id)
    assert told["would"] == f"kill all of the run on {node}, its agent first"
    scenario = tmp_path / "s.yaml"
    scenario.write_text("- {at: 5s, do: kill-rank, rank: 1}\n- {step: 9, do: kill-supervisor}\n")
    assert call("chaos", "play", run.id, str(scenario), "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"at 5 s: send SIGKILL to rank 1 on {node}",
        f"at step 9: kill the supervisor on {node}",
    ]
    assert not run.chaos.exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.process
def test_on_a_terminal_it_asks_first(run: RunDir, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert call("chaos", "kill-rank", run.id, "--rank", "1") == 1
    said = capsys.readouterr()
    assert f"{run.id}: send SIGKILL to rank 1 on {os.uname().nodename}" in said.err
    assert "nothing was done" in said.err
    # With --yes nobody is asked; that rank has ended.
    assert call("chaos", "kill-rank", run.id, "--rank", "1", "--yes") == 2
    assert "has ended already" in capsys.readouterr().err
