"""The tar for an engineer: what is in it, what is cut, and that no secret is."""

from __future__ import annotations

import json
import os
import resource
import shlex
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.runs.postmortem import PostmortemArchive, write_postmortem
from hpcrun.specs.provenance import Provenance, SubmissionRecord, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.metric_lines import metric_line

IN_FILE = "a-very-secret-value"
IN_ENV = "pa$$ 'word' of mine"
SHAPED = "hf_" + "Ab1" * 10


def make(tmp_path: Path, *, env: str = "") -> RunDir:
    """A run of two attempts that failed, with something in every place."""
    token = tmp_path / "token"
    token.write_text(IN_FILE + "\n")
    token.chmod(0o600)
    run = create_run("r")
    quoted = IN_ENV.replace("'", "''")
    run.spec.write_text(
        f"name: r\ncommand: [./a]\nenv: {{DB_PASSWORD: '{quoted}', MODE: fast{env}}}\n"
        f"secrets: {{HF_TOKEN: {token}}}\n"
    )
    words: dict[str, Any] = dict.fromkeys(("name", "user", "host", "directory", "hpcrun", "python"), "x")
    argv = ["hpcrun", "submit", "job.yaml", f"env.DB_PASSWORD={IN_ENV}"]
    record = Provenance(
        kind="command",
        ranks=1,
        steps=None,
        created=1.0,
        argv=argv,
        submissions=[SubmissionRecord(1.0, job=7)],
        **words,
    )
    write_provenance(run, record)
    run.script.write_text(f"export DB_PASSWORD={shlex.quote(IN_ENV)}\nexport WANDB_API_KEY='01'\"23\"abcd\n")
    run.code_diff.write_text("+token = 'something'\n+url = 'https://me:hunter2@host/x'\n")
    run.cluster.write_text("name: north\nenv: {SITE_SECRET: site-wide-word}\n")
    for number in (1, 2):
        attempt = run.attempt(number).create()
        for path in (attempt.plan, attempt.placement, attempt.path / "settings.json", attempt.rank_record(0)):
            write_json(path, {"attempt": number})
        message = f"rank 0 died {number}"
        write_json(attempt.outcome, {"status": "failed", "message": message, "requeued": "crash"})
        attempt.log(0).write_text(f"{IN_FILE} {IN_ENV} {SHAPED} site-wide-word, attempt {number}\n")
    write_json(run.exit, {"status": "failed", "exit_code": 5, "message": "rank 0 died 2", "attempt": 2})
    run.agent_logs.mkdir()
    (run.agent_logs / "n01.log").write_text("agent\n")
    run.submitit.mkdir()
    (run.submitit / "7_0_log.out").write_text("batch\n")
    (run.submitit / "7_submitted.pkl").write_bytes(b"\x80")
    (run.checkpoints / "step-1").mkdir()
    (run.checkpoints / "step-1" / "a.distcp").write_bytes(b"weights")
    run.events.write_text(json.dumps(event_line("launch", 10.0, ranks=1)) + "\n")
    chaos = event_line("chaos", 1.0, phase="injected", node="n01", text="SIGKILL to rank 0")
    run.chaos.write_text(json.dumps(chaos) + "\n")
    run.metrics.write_text(json.dumps(metric_line("step", tokens_per_s=3.5)) + "\n")
    return run


def read(bundle: PostmortemArchive) -> dict[str, str]:
    """The texts in a tar, by their names inside of its one folder."""
    with tarfile.open(bundle.path) as tar:
        members = tar.getmembers()
        folders = {one.name.partition("/")[0] for one in members}
        assert len(folders) == 1
        assert all(one.isfile() and one.mode == 0o600 for one in members)
        return {one.name.partition("/")[2]: tar.extractfile(one).read().decode() for one in members}  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_it_holds_what_an_engineer_asks_for(tmp_path: Path) -> None:
    run = make(tmp_path)
    bundle = write_postmortem(run)
    assert bundle.path == Path(f"{run.id}-postmortem.tar.gz")
    assert stat.S_IMODE(bundle.path.stat().st_mode) == 0o600
    found = read(bundle)
    per_attempt = ["plan.json", "placement.json", "settings.json", "outcome.json", "logs/rank-0.log"]
    per_attempt += ["ranks/rank-0.json"]
    wanted = {f"attempts/{number}/{name}" for number in (1, 2) for name in per_attempt}
    wanted |= {
        "spec.yaml",
        "exit.json",
        "events.jsonl",
        "chaos.jsonl",
        "metrics.jsonl",
        "job.json",
        "job.sbatch",
        "code.diff",
    }
    wanted |= {
        "cluster.yaml",
        "agents/n01.log",
        "batch/7_0_log.out",
        "slurm.txt",
        "versions.txt",
        "summary.txt",
    }
    assert set(found) == wanted == set(bundle.files)
    assert found["metrics.jsonl"] == run.metrics.read_text()
    assert "hpcrun " in found["versions.txt"]
    for line in (
        f"{run.id} is failed: rank 0 died 2\n",
        "== first cause\nattempt 1: failed: rank 0 died 1\nattempt 2: failed: rank 0 died 2\n",
        "goodput ",
        "attempt 1  launch of 1 rank\n",
        "checkpoints, traces, pickles",
    ):
        assert line in found["summary.txt"]


def test_no_secret_gets_out(tmp_path: Path) -> None:
    found = read(write_postmortem(make(tmp_path)))
    whole = "\n".join(found.values())
    for secret in (IN_FILE, IN_ENV, SHAPED, "word", "hunter2", "abcd", "site-wide"):
        assert secret not in whole, secret
    assert found["attempts/1/logs/rank-0.log"] == "(masked) (masked) (masked) (masked), attempt 1\n"
    assert "MODE: fast" in found["spec.yaml"]
    assert found["code.diff"].endswith("'https://me:(masked)@host/x'\n")
    assert found["job.sbatch"] == "export DB_PASSWORD='(masked)'\nexport WANDB_API_KEY=(masked)\n"
    argv = ["hpcrun", "submit", "job.yaml", "env.DB_PASSWORD=(masked)"]
    assert json.loads(found["job.json"])["argv"] == argv


def test_how_its_processes_reach_each_other_stays(tmp_path: Path) -> None:
    run = make(tmp_path)
    secrets = {"peers": "5f" * 32, "leader": "6e" * 32, "planted": "of-another-kind"}
    attempt = run.attempt(2)
    write_json(attempt.peers, {"secret": secrets["peers"], "nodes": {"n01": ["10.0.0.1", 4000]}})
    write_json(run.leader, {"epoch": 1, "address": "n01", "port": 4000, "secret": secrets["leader"]})
    attempt.log(1).write_text(f"joined with {secrets['peers']} and {secrets['leader']}\n")
    write_json(attempt.supervisor, {"host": "n01", "pid": 5, "planted": secrets["planted"]})
    write_json(attempt.rank_record(1), {"pid": 7, "token": "abcdefgh", "node": "n01"})
    record = json.loads(run.job.read_text())
    write_json(run.job, record | {"planted": secrets["planted"]})
    (attempt.path / "anything.json").write_text(json.dumps(secrets))
    bundle = write_postmortem(run)
    found = read(bundle)
    whole = "\n".join(found.values())
    assert not [name for name, secret in secrets.items() if secret in whole]
    assert "attempts/2/peers.json: by its name it holds a secret" in bundle.left_out
    assert "attempts/2/anything.json: is not a usual record" in bundle.left_out
    assert found["attempts/2/logs/rank-1.log"] == "joined with (masked) and (masked)\n"
    assert json.loads(found["attempts/2/supervisor.json"]) == {"host": "n01", "pid": 5}
    assert json.loads(found["attempts/2/ranks/rank-1.json"]) == {"pid": 7, "token": "(masked)", "node": "n01"}


def test_a_key_that_a_log_prints_whole_is_masked_whole(tmp_path: Path) -> None:
    run = make(tmp_path)
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----"
    run.attempt(1).log(0).write_text(f"before\n{key}\nafter TOKENIZERS_PARALLELISM=true max_tokens: 5\n")
    text = read(write_postmortem(run))["attempts/1/logs/rank-0.log"]
    assert text == "before\n(masked)\nafter TOKENIZERS_PARALLELISM=true max_tokens: 5\n"


def test_long_logs_are_cut_at_a_line_and_say_so(tmp_path: Path) -> None:
    run = make(tmp_path)
    line = "x" * 99 + "\n"
    run.attempt(1).log(0).write_text(line * 20_000)
    bundle = write_postmortem(run)
    text = read(bundle)["attempts/1/logs/rank-0.log"]
    first, _, rest = text.partition("\n")
    cut = 20_000 * 100 - len(rest)
    assert first == f"hpcrun: the first {cut} bytes were left out"
    assert set(rest.splitlines()) == {line.strip()}
    assert 2**20 - 100 <= len(rest) <= 2**20
    assert f"attempts/1/logs/rank-0.log: the first {cut} bytes" in bundle.left_out


def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    run = make(tmp_path)
    (tmp_path / "other").write_text("of somebody else")
    log = run.attempt(1).log(0)
    log.unlink()
    log.symlink_to(tmp_path / "other")
    os.mkfifo(run.attempt(1).path / "logs" / "pipe.log")
    (run.attempt(1).path / "run.secret").write_text("of the agents")
    run.spec.write_text("name: [")
    run.attempt(2).outcome.write_text("{")
    run.job.write_text("{")
    bundle = write_postmortem(run)
    found = read(bundle)
    whole = "\n".join(found.values())
    assert "somebody else" not in whole
    assert "of the agents" not in whole
    said = "\n".join(bundle.left_out)
    assert "attempts/1/logs/rank-0.log: Too many levels of symbolic links" in said
    assert "attempts/1/run.secret: by its name it holds a secret" in said
    assert "attempts/1/logs/pipe.log: is not a regular file" in said
    assert "job.json: is damaged" in found["slurm.txt"]
    assert "== first cause\ncannot be told: " in found["summary.txt"]


def test_slurm_is_asked_in_its_own_words(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert "scontrol: cannot be run" in read(write_postmortem(run, tmp_path / "a.tgz"))["slurm.txt"]
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "sacct", "sinfo"):
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\necho {name} knows $*\necho and says >&2\nexit 1\n")
        command.chmod(0o755)
    text = read(write_postmortem(run, tmp_path / "b.tgz"))["slurm.txt"]
    assert "$ scontrol show job -d 7\nscontrol knows show job -d 7\nand says\n" in text
    assert "sacct knows -j 7 -o JobID" in text
    assert "sinfo knows -R" in text


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path)
    write_postmortem(run)
    with pytest.raises(UsageError, match="exists already; remove it"):
        write_postmortem(run)
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        write_postmortem(run, tmp_path / "missing" / "a.tgz")
    write_json(run.sweep, [{}])
    with pytest.raises(UsageError, match="is a sweep: name one of its elements"):
        write_postmortem(run)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_disk_that_is_full_leaves_no_half_a_tar(tmp_path: Path) -> None:
    run = make(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written: File too large"):
            write_postmortem(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [path for path in tmp_path.iterdir() if "postmortem" in path.name]


def test_an_element_of_a_sweep_comes_with_the_sweep_s_own_records(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    write_json(sweep.sweep, [{}, {}])
    element = sweep.element(1)
    element.attempt(1).create().log(0).write_text("mine\n")
    element.spec.write_text("name: r\n")
    (sweep.submitit / "7_1_0_log.out").write_text("batch of 1\n")
    record = json.loads(sweep.job.read_text())
    record["submissions"] = [{"time": 1.0, "job": 7, "array": "0-1"}]
    write_json(sweep.job, record)
    bundle = write_postmortem(element)
    assert bundle.path.name == f"{sweep.id}-1-postmortem.tar.gz"
    found = read(bundle)
    assert {"job.json", "job.sbatch", "attempts/1/logs/rank-0.log", "batch/7_1_0_log.out"} <= set(found)
    assert "batch/7_0_log.out" not in found
