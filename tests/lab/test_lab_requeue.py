"""Jobs that stop before they are done, and go back into the queue: once, and only with progress."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.lab.desk import Desk, records, story

JOB = """
name: sequence
model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}
data: {text: python-stdlib, pattern: "a*.py", seq_len: 32, holdout: 0}
parallel: {dp_shard: 2, pp: 2}
train: {steps: 80, mbs: 1, gbs: 8}
resources: {nodes: 2, time: 10m, mem: 2G}
"""


def steps(run: RunDir) -> list[tuple[int, float]]:
    """Every line of a step, doubled ones too."""
    return [
        (line["step"], line["loss"]) for line in read_json_lines(run.metrics) if line.get("kind") == "step"
    ]


def outcomes(run: RunDir) -> list[tuple[str, str | None]]:
    return [(one["status"], one["requeued"]) for one in records(run, "attempts/*/outcome.json")]


def signal(desk: Desk, run: RunDir, name: str) -> None:
    """What Slurm sends to the batch shell."""
    job = json.loads(run.job.read_text())["submissions"][-1]["job"]
    desk.lab.run(["scancel", "--batch", f"--signal={name}", str(job)]).require_success()


def test_training_that_is_stopped_and_queued_again_gives_the_undisturbed_sequence(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    desk.hpcrun("train", "job.yaml", "name=undisturbed", "resources.nodes=1")
    (undisturbed,) = (RunDir(path) for path in desk.runs.iterdir())
    run = desk.submit("job.yaml")
    desk.until(lambda: len(steps(run)) > 3, run)
    signal(desk, run, "USR2")
    assert desk.ended(run)["status"] == "done", story(run)
    assert steps(run) == steps(undisturbed)
    assert [step for step, _ in steps(run)] == list(range(1, 81))
    ended = outcomes(run)
    # Slurm says that the limit is far away: somebody wanted the nodes.
    assert ended == [("saved", "preemption"), ("done", None)]
    who = records(run, "attempts/*/supervisor.json")
    assert [record["restarts"] for record in who] == list(range(len(ended)))
    status = json.loads(desk.hpcrun("status", run.id, "--json").stdout)
    assert (status["state"], status["attempt"], status["step"]) == ("done", len(ended), 80)


# Counts up to a number, saves the count when it is asked to stop, and goes on from there. Slurm signals every
# process of a step, the mv of a trap among them.
COUNTER = """
new="$SAVED.new.$RANK"
trap 'trap "" USR2 TERM; echo "$count" > "$new"; mv "$new" "$SAVED.$RANK"; exit 75' USR2 TERM
count=$(cat "$SAVED.$RANK" 2>/dev/null || echo 0)
while [ "$count" -lt "$UP_TO" ]; do
    sleep 0.2
    count=$((count + 1))
    echo "$count" >> "$SAVED.counts.$RANK"
done
"""


def counter(desk: Desk, up_to: int, *words: str) -> RunDir:
    saved = desk.path / "saved"
    env = (f"env.SAVED={saved}", f"env.UP_TO='{up_to}'")
    return desk.submit("name=count", "resources.nodes=2", *env, *words, "--", "sh", "-c", COUNTER)


def counts(desk: Desk, rank: int) -> list[int]:
    return [int(line) for line in Path(f"{desk.path}/saved.counts.{rank}").read_text().split()]


def test_a_program_that_saves_goes_on_after_its_time_limit(desk: Desk) -> None:
    # Slurm looks every half minute whether it is time to send the signal.
    run = counter(desk, 230, "resources.time=2m", "retry={grace: 110s}")
    assert desk.ended(run)["status"] == "done", story(run)
    assert outcomes(run)[0] == ("saved", "time_limit")
    for rank in (0, 1):
        assert counts(desk, rank) == list(range(1, 231))


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(desk: Desk) -> None:
    run = counter(desk, 1000, "retry={}")
    # Of both: a rank that has not set its trap yet would be ended by the signal.
    desk.until(lambda: all(Path(f"{desk.path}/saved.counts.{rank}").exists() for rank in (0, 1)), run)
    desk.hpcrun("cancel", run.id)
    ended = desk.ended(run)
    assert (ended["status"], ended["exit_code"]) == ("saved", 75), story(run)
    assert outcomes(run) == [("saved", None)]
    desk.until_none_is_left(run)
    # By hand it goes on, as the next attempt.
    desk.hpcrun("submit", "--resume", run.id, "env.UP_TO='1'")
    assert desk.ended(run)["status"] == "done", story(run)
    assert run.attempts()[-1].number == 2


def test_a_crash_is_tried_again_as_often_as_the_budget_allows(desk: Desk) -> None:
    # Never twice in the same way.
    body = 'sleep 0.3; case $(ls "$RUN/attempts" | wc -l) in 1) exit 3 ;; *) kill -9 $$ ;; esac'
    root = desk.runs / "crash"
    run = desk.submit("name=crash", "retry={crash: 1}", "--", "sh", "-c", f"RUN=$(echo {root}-*); {body}")
    ended = desk.ended(run)
    assert [one[0] for one in outcomes(run)] == ["failed", "failed"], story(run)
    assert ended["message"].endswith("not tried again: retry.crash allows 1, and 1 have been used")


def test_training_that_dies_twice_without_progress_is_not_tried_again(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    run = desk.submit("job.yaml", "train.steps=100000", "resources.nodes=1")
    for number in (1, 2):
        path = run.attempt(number).rank_record(3)
        desk.until(path.exists, run)
        record = json.loads(path.read_text())
        desk.lab.node(record["node"]).run(["kill", "-9", str(record["pid"])]).require_success()
    ended = desk.ended(run)
    assert outcomes(run) == [("failed", None), ("failed", None)], story(run)
    assert ended["exit_code"] == 93
    assert ended["message"].endswith("not tried again: it failed twice in the same way, without progress")


def test_what_stopped_with_code_93_is_never_tried_again(desk: Desk) -> None:
    run = desk.submit("name=never", "retry={crash: 5}", "--", "sh", "-c", "exit 93")
    assert desk.ended(run)["exit_code"] == 93
    assert outcomes(run) == [("failed", None)]
    assert math.isfinite(desk.ended(run)["ended"])


def test_slurm_s_own_requeue_is_not_the_end_of_the_run(desk: Desk) -> None:
    run = counter(desk, 40, "retry={}")
    # Of both: a rank that has not set its trap yet would be ended by the signal.
    desk.until(lambda: all(Path(f"{desk.path}/saved.counts.{rank}").exists() for rank in (0, 1)), run)
    job = json.loads(run.job.read_text())["submissions"][-1]["job"]
    desk.lab.run(["scontrol", "requeue", str(job)]).require_success()
    desk.until(run.attempt(1).outcome.exists, run)
    assert not run.exit.exists()
    assert desk.ended(run)["status"] == "done", story(run)
    assert outcomes(run) == [("saved", "preemption"), ("done", None)]
    assert counts(desk, 0) == counts(desk, 1) == list(range(1, 41))


def test_a_program_that_was_told_to_stop_has_not_failed(desk: Desk) -> None:
    run = desk.submit("name=told", "resources.nodes=2", "--", "sh", "-c", "sleep 60")
    desk.until(run.attempt(1).rank_record(1).exists, run)
    desk.hpcrun("cancel", run.id)
    ended = desk.ended(run)
    assert (ended["status"], ended["exit_code"]) == ("interrupted", 130), story(run)
    assert ended["message"].startswith("stopped by SIGTERM, as asked, without a save")


def test_a_run_in_the_queue_is_not_run_here_as_well(desk: Desk) -> None:
    run = desk.submit("name=held", "resources.sbatch.hold=true", "--", "true")
    told = desk.hpcrun("train", "--resume", run.id, code=2).stderr
    assert "is queued as job" in told
