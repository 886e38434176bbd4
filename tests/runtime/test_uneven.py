"""Fewer replicas than a job has: its samples stay exact, and a run goes on as if nothing had been lost."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.runtime.data_loader import IGNORED_TARGET, Batches, TokenSource, eval_batches
from hpcrun.runtime.optimizer import learning_rate_of_step
from hpcrun.specs.load import parse_job
from hpcrun.specs.metrics import EvalMetric, Metric, MetricRecord, StepMetric, newest_steps, read_metrics
from hpcrun.specs.plan import Plan
from hpcrun.specs.records import read_json
from hpcrun.specs.reduced_plan import plan_with_replicas
from hpcrun.submission.prepare import prepare_job
from tests.launch.pretended import pretend, supervise
from tests.launch.supervised import Recorder, send
from tests.runtime.test_data_loader import S, counting_source, ids

JOB = "model: {preset: demo}\ndata: {text: x, seq_len: 4}\nelastic: {}\ntrain: {gbs: 32, mbs: 2}\n"


def samples(source: TokenSource, plan: Plan, start: int, steps: int) -> tuple[list[int], int]:
    """The sequences that count of some steps, all ranks together, and where the next step begins."""
    seen: list[int] = []
    for rank in range(plan.degrees.dp):
        with Batches(
            source,
            seq_len=S,
            seed=3,
            gbs=plan.gbs,
            mbs=plan.mbs,
            dp_rank=rank,
            dp_size=plan.degrees.dp,
            start_sample=start,
            rounds=plan.grad_accum if plan.is_uneven else None,
        ) as batches:
            for _ in range(steps):
                inputs, targets = next(batches)
                assert inputs.shape == targets.shape == (plan.grad_accum, plan.mbs, S)
                counts = (targets != IGNORED_TARGET).all(-1)
                assert ((targets == IGNORED_TARGET).all(-1) | counts).all(), (
                    "a sequence counts whole or not at all"
                )
                seen += [one for one, is_real in zip(ids(inputs), counts.flatten(), strict=True) if is_real]
            position = batches.position
    return seen, position


@pytest.mark.parametrize("batch", ["keep", "shrink"])
@pytest.mark.parametrize(
    "layout", ["{dp_replicate: 4}", "{dp_replicate: 4, pp: 2, schedule: interleaved}", "{dp_shard: 4}"]
)
def test_no_sample_is_lost_or_repeated_when_replicas_go_and_come(
    tmp_path: Path, layout: str, batch: str
) -> None:
    source = counting_source(tmp_path, 130)  # epochs end inside of steps
    job = parse_job(JOB, "job", (f"parallel={layout}", f"elastic.batch={batch}"))
    whole = job.training_plan
    position, seen = 0, list[int]()
    for dp, steps in ((4, 2), (3, 3), (1, 1), (2, 2), (4, 3)):
        new, position = samples(source, plan_with_replicas(job.spec, whole, dp), position, steps)
        seen += new
    assert position == len(seen)
    assert batch == "shrink" or position == 11 * whole.gbs
    assert Counter(seen) == Counter(source.order(0, position, 3))


def test_microbatches_differ_by_one_at_most(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 100)
    options: dict[str, int] = {"seq_len": S, "seed": 3, "gbs": 16, "mbs": 2, "dp_size": 3, "rounds": 3}
    counts = []
    for rank in range(3):
        with Batches(source, dp_rank=rank, **options) as batches:
            counts.append(int((next(batches)[1] != IGNORED_TARGET).all(-1).all(-1).sum()))
    assert counts == [3, 3, 2]


def test_held_out_sequences_are_the_same_for_any_number_of_replicas(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 200, holdout=0.3)
    options = {"gbs": 16, "mbs": 2, "sequences": 32}
    whole = [ids(x) for x, _ in eval_batches(source, rounds=8, dp_rank=0, dp_size=1, **options)]
    parts = [list(eval_batches(source, rounds=3, dp_rank=rank, dp_size=3, **options)) for rank in range(3)]
    for step, expected in enumerate(whole):
        real = [
            (x.reshape(-1, S), (y != IGNORED_TARGET).all(-1).flatten())
            for x, y in (part[step] for part in parts)
        ]
        assert Counter(one for x, keep in real for one in ids(x[keep])) == Counter(expected)


@pytest.mark.parametrize(
    ("batch", "rule", "factor"),
    [("keep", "keep", 1.0), ("shrink", "keep", 1.0), ("shrink", "linear", 0.25), ("shrink", "sqrt", 0.5)],
)
def test_the_learning_rate_follows_a_smaller_batch_only_by_rule(batch: str, rule: str, factor: float) -> None:
    words = ("parallel.dp_shard=4", f"elastic={{batch: {batch}, lr: {rule}}}", "train.schedule=constant")
    job = parse_job(JOB, "job", (*words, "train.lr=0.5", "train.lr_scaling={rule: linear, base_gbs: 16}"))
    plans = (job.training_plan, plan_with_replicas(job.spec, job.training_plan, 1))
    assert [learning_rate_of_step(job.spec, plan, 1) for plan in plans] == [1.0, factor]


def test_too_few_rounds_are_refused(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 100)
    with pytest.raises(UsageError, match="gbs 16 does not go into 2 rounds"):
        Batches(source, seq_len=S, seed=3, gbs=16, mbs=2, dp_rank=0, dp_size=3, rounds=2)


RUN = """
name: elastic
model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}
data: {text: TEXT, seq_len: 32, holdout: 0.2}
parallel: {dp_shard: 3}
train: {steps: 48, mbs: 1, gbs: 12, lr: 3e-3, warmup: 2, eval: {sequences: 24}}
checkpoint: {every: 2}
resources: {nodes: 3}
device: cpu
elastic: {min_replicas: 2}
"""


def losses(records: list[MetricRecord]) -> dict[int, float]:
    return {metric.step: metric.loss for metric in newest_steps(records)}


def test_a_run_that_loses_a_node_and_gets_it_back_computes_what_an_undisturbed_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "job.yaml"
    path.write_text(RUN.replace("TEXT", str(Path(__file__))))
    alone = ["parallel.dp_shard=1", "resources.nodes=1", "elastic=null"]
    plain = supervise(pretend("a"), prepare_job(path, alone), Recorder())
    assert plain.status == "done", plain.message

    there, observer = pretend("abc"), Recorder()

    def act(metric: Metric) -> None:
        match metric, observer.ready:
            case StepMetric(step=5), 3:
                there.pretended.lose("b")
            case StepMetric(step=8), 2:
                send(signal.SIGTERM)()

    monkeypatch.setattr(observer, "step", act)
    shrunk = supervise(there, prepare_job(path), observer)
    assert shrunk.status == "saved", shrunk.message
    assert any("going on with 2 of 3 replicas from step" in note for note in observer.notes)
    grown = supervise(pretend("abc"), prepare_job(None, resume=shrunk.run), Recorder())
    assert grown.status == "done", grown.message
    assert [read_json(attempt.plan)["dp_shard"] for attempt in grown.run.attempts()] == [3, 2, 3]
    records, expected = list(read_metrics(grown.run)), list(read_metrics(plain.run))
    assert losses(records) == pytest.approx(losses(expected), rel=1e-5)
    ends = [
        [one.metric.eval_loss for one in lines if isinstance(one.metric, EvalMetric)][-1]
        for lines in (records, expected)
    ]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
