"""A job with fewer replicas: what is left of its plan, and what cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.errors import SpecError, UsageError
from hpcrun.specs.load import ResolvedJob, parse_job, render_job
from hpcrun.specs.plan import Plan
from hpcrun.specs.reduced_plan import minimum_ranks, plan_with_replicas, read_attempt_plan, shrink_plan

BASE = "model: {preset: demo, layers: 8}\ndata: {text: x, seq_len: 64}\n"


def job(*overrides: str) -> ResolvedJob:
    return parse_job(BASE, "job.yaml", ("elastic={}", *overrides))


def fewer(ranks: int, *overrides: str) -> Plan | None:
    resolved = job(*overrides)
    return shrink_plan(resolved.spec, resolved.training_plan, ranks)


@pytest.mark.parametrize(
    ("layout", "ranks", "left", "zero"),
    [
        # left: dp_replicate, dp_shard
        ("{dp_replicate: 4}", 3, (3, 1), 0),
        ("{dp_shard: 4}", 3, (1, 3), 3),
        ("{dp_shard: 4, zero: 2}", 2, (1, 2), 2),
        ("{dp_shard: 4, zero: 2}", 1, (1, 1), 0),
        ("{dp_replicate: 3, dp_shard: 2}", 5, (2, 2), 3),
        ("{dp_replicate: 3, dp_shard: 2}", 3, (1, 2), 3),
        ("{dp_replicate: 3, dp_shard: 2}", 1, (1, 1), 0),
        ("{dp_shard: 3, pp: 2, tp: 2}", 11, (1, 2), 1),
        ("{dp_replicate: 3}", 9, (3, 1), 0),
    ],
)
def test_whole_groups_go_first_then_shards(layout: str, ranks: int, left: tuple[int, int], zero: int) -> None:
    plan = fewer(ranks, f"parallel={layout}")
    assert plan is not None
    assert (plan.dp_replicate, plan.dp_shard, plan.zero) == (*left, zero)


@pytest.mark.parametrize(
    ("overrides", "dp", "rounds", "is_uneven"),
    [
        (("parallel.dp_replicate=4", "train.gbs=16"), 3, 6, True),
        (("parallel.dp_replicate=4", "train.gbs=16"), 2, 8, False),
        (("parallel.dp_replicate=4", "train={gbs: 16, mbs: 2}"), 3, 3, True),
        (("parallel={dp_replicate: 3, pp: 2, schedule: 1f1b}", "train.gbs=9"), 2, 5, True),
        # Interleaved cuts microbatches into equal rounds: five would not do, and the sixth is empty for all.
        (("parallel={dp_replicate: 3, pp: 2, schedule: interleaved}", "train.gbs=9"), 2, 6, True),
        (("parallel={dp_replicate: 5, pp: 2, schedule: interleaved}", "train.gbs=10"), 2, 6, True),
    ],
)
def test_the_batch_stays_and_every_rank_runs_as_many_rounds(
    overrides: tuple[str, ...], dp: int, rounds: int, is_uneven: bool
) -> None:
    resolved = job(*overrides)
    plan = plan_with_replicas(resolved.spec, resolved.training_plan, dp)
    assert (plan.gbs, plan.grad_accum, plan.is_uneven) == (resolved.training_plan.gbs, rounds, is_uneven)
    assert not resolved.training_plan.is_uneven


def test_a_batch_that_may_shrink_goes_with_the_replicas() -> None:
    plan = fewer(3, "parallel.dp_replicate=4", "train.gbs=16", "elastic.batch=shrink")
    assert plan is not None
    assert (plan.gbs, plan.grad_accum, plan.is_uneven) == (12, 4, False)


def test_below_the_least_there_is_no_plan() -> None:
    overrides = ("parallel={dp_replicate: 3, dp_shard: 2}", "elastic.min_replicas=3")
    assert fewer(5, *overrides) is not None
    assert fewer(3, *overrides) is None, "three replicas would have to be four or two"
    resolved = job(*overrides)
    assert minimum_ranks(resolved.spec, resolved.training_plan) == 4
    assert fewer(2, "parallel.dp_replicate=3", "elastic=null") is None
    assert fewer(1, "parallel={dp_replicate: 3, pp: 2}") is None


def test_a_plan_says_what_is_missing_and_reads_back() -> None:
    plan = fewer(3, "parallel.dp_shard=4", "train.gbs=16")
    assert plan is not None
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.describe() == (
        "dp_shard 3 (3 ranks), ZeRO 3, 3 of 4 replicas, 16 sequences a step = up to 1 × 6 on dp 3"
    )


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (("elastic.min_replicas=4", "parallel.dp_shard=3"), "elastic.min_replicas", "use at most 3"),
        (("elastic={}",), "elastic", "there is one replica"),
        (("elastic.lr=sqrt", "parallel.dp_shard=2"), "elastic.lr", "use batch shrink"),
        (("elastic.batch=grow", "parallel.dp_shard=2"), "elastic.batch", "keep"),
    ],
)
def test_what_cannot_be_meant(overrides: tuple[str, ...], key: str, text: str) -> None:
    with pytest.raises(SpecError) as error:
        job(*overrides)
    (problem,) = error.value.problems
    assert problem.key == key
    assert text in problem.text


def test_a_command_shares_its_own_batch() -> None:
    with pytest.raises(SpecError, match="elastic: cannot be combined with command"):
        parse_job("command: [a]\n", "job.yaml", ("elastic={}", "parallel.dp_shard=2"))


@pytest.mark.parametrize(("rule", "factor"), [("keep", 1.0), ("linear", 0.25), ("sqrt", 0.5)])
def test_the_learning_rate_follows_by_rule(rule: str, factor: float) -> None:
    elastic = job("parallel.dp_shard=4", "elastic.batch=shrink", f"elastic.lr={rule}").spec.elastic
    assert elastic is not None
    assert elastic.lr_factor(4, 16) == factor
    assert elastic.lr_factor(16, 16) == 1.0


def test_the_plan_of_an_attempt_is_one_of_the_job_s(tmp_path: Path) -> None:
    resolved, path = job("parallel={dp_replicate: 2, dp_shard: 2}", "train.gbs=16"), tmp_path / "plan.json"
    whole = resolved.training_plan
    # What the ranks read is the resolved job.
    again = parse_job(render_job(resolved.spec), "spec.yaml")
    assert again.training_plan == whole
    for dp in (4, 2, 1):
        plan = plan_with_replicas(resolved.spec, whole, dp)
        path.write_text(plan.model_dump_json())
        assert read_attempt_plan(path, again.spec, again.training_plan) == plan
    for wrong in ({"grad_accum": 5}, {"dp_replicate": 3}, {"dp_shard": 3, "dp_replicate": 1}, {"tp": 2}):
        path.write_text(whole.model_copy(update=wrong).model_dump_json())
        with pytest.raises(UsageError, match=r"but the job makes .*start the run again"):
            read_attempt_plan(path, resolved.spec, whole)
    path.write_text("{}")
    with pytest.raises(UsageError, match="is not a plan of this version"):
        read_attempt_plan(path, resolved.spec, whole)
    path.unlink()
    with pytest.raises(UsageError, match="is missing"):
        read_attempt_plan(path, resolved.spec, whole)
