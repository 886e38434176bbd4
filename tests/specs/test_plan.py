"""The layout of a job: what is derived, and what does not go together."""

from __future__ import annotations

import itertools

import pytest

from hpcrun.errors import SpecError
from hpcrun.specs.load import parse_job
from hpcrun.specs.plan import Plan

BASE = "model: {preset: demo, layers: 8}\ndata: {text: x, seq_len: 64}\n"


def plan(*overrides: str) -> Plan:
    return parse_job(BASE, "job.yaml", overrides).training_plan


@pytest.mark.parametrize(
    ("overrides", "zero"),
    [
        ((), 0),
        (("parallel.dp_replicate=4",), 0),
        (("parallel.dp_shard=2",), 3),
        (("parallel.dp_shard=2", "parallel.pp=2"), 1),
        (("parallel.dp_shard=2", "parallel.pp=2", "parallel.zero=2"), 2),
    ],
)
def test_zero_follows_from_the_degrees(overrides: tuple[str, ...], zero: int) -> None:
    assert plan(*overrides).zero == zero


@pytest.mark.parametrize(
    ("overrides", "gbs", "grad_accum"),
    [
        ((), 1, 1),
        (("parallel.pp=2",), 2, 2),
        (("parallel.dp_shard=2", "parallel.dp_replicate=2", "train.mbs=3"), 12, 1),
        (("parallel.microbatches=4", "train.mbs=2"), 8, 4),
        (("parallel.pp=2", "train.gbs=12", "train.mbs=2", "parallel.dp_shard=2"), 12, 3),
        (("train.gbs=6", "train.mbs=2", "parallel.microbatches=3"), 6, 3),
    ],
)
def test_the_batch_comes_from_gbs_or_from_microbatches(
    overrides: tuple[str, ...], gbs: int, grad_accum: int
) -> None:
    found = plan(*overrides)
    assert (found.gbs, found.grad_accum) == (gbs, grad_accum)
    assert found.gbs == found.mbs * found.grad_accum * found.degrees.dp


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        ("gpipe", [[0], [1]]),
        ("1f1b", [[0], [1]]),
        ("interleaved", [[0, 2], [1, 3]]),
        ("zero_bubble", [[0, 3], [1, 2]]),
    ],
)
def test_each_schedule_spreads_its_stages_over_the_ranks(schedule: str, held: list[list[int]]) -> None:
    found = plan("parallel.pp=2", f"parallel.schedule={schedule}")
    assert [found.stages_of(rank) for rank in range(2)] == held
    assert len(found.stage_layers) == found.stages
    layers = itertools.chain.from_iterable(range(begin, end) for begin, end in found.stage_layers)
    assert list(layers) == list(range(8))


def test_the_stage_with_a_large_head_gets_fewer_layers() -> None:
    even, uneven = plan("parallel.pp=2"), plan("parallel.pp=2", "model.vocab=8192")
    assert even.stage_layers == [(0, 4), (4, 8)]
    first, last = (end - begin for begin, end in uneven.stage_layers)
    assert first > last


def test_a_plan_reads_back_from_json_and_describes_itself() -> None:
    found = plan("parallel.pp=2", "parallel.dp_shard=2", "parallel.tp=2", "train.gbs=8")
    assert Plan.model_validate_json(found.model_dump_json()) == found
    assert found.describe() == (
        "pp 2 × dp_shard 2 × tp 2 (8 ranks), ZeRO 1, 1f1b over 4+4 layers, 8 sequences a step = 1 × 4 × dp 2"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "parallel.tp=2 resources.ranks_per_node=4",
            "parallel: tp 2 is 2 ranks, but resources asks for nodes 1 × ranks_per_node 4 = 4;",
        ),
        (
            "parallel.tp=2 resources.nodes=3",
            "resources.nodes: 3 nodes cannot share 2 ranks evenly (tp 2 is 2 ranks); use 1, 2",
        ),
        (
            "parallel.tp=2 resources.nodes=2 resources.ranks_per_node=2",
            "parallel: tp 2 is 2 ranks, but resources asks for nodes 2 × ranks_per_node 2 = 4;",
        ),
        (
            "parallel.dp_replicate=8 resources.nodes=2 resources.gpus_per_node=2 device=cuda",
            "resources.gpus_per_node: 2 is less than the 4 ranks on each node, and device cuda gives each",
        ),
        (
            "resources.placement=pin",
            "resources.nodelist: is missing; placement pin needs it, such as n[01-04]",
        ),
        ("resources.nodelist=n[01-02]", "resources.nodelist: needs placement pin, which is pack; write"),
        (
            "resources.placement=pin resources.nodelist=n[01-04] resources.exclude=n03,n[04-09]",
            "resources.nodelist: n[03-04] stands in exclude too; leave it in one of the two",
        ),
        (
            "resources.placement=spread resources.switches=1",
            "resources.switches: needs placement pack, which is spread; leave one of the two out",
        ),
        (
            "resources.placement=none resources.segment=1",
            "resources.segment: needs placement pack, which is none; leave one of the two out",
        ),
        ("resources.switches=2", "resources.switches: 2 is more than the job has nodes; use at most 1"),
        (
            "parallel.dp_replicate=6 resources.nodes=6 resources.segment=4",
            "resources.segment: 4 does not divide the 6 nodes; use 1, 2, 3, 6",
        ),
        (
            "resources.topo_exclusive=true resources.exclusive=false",
            "resources.topo_exclusive: true keeps every other job away, but exclusive is false; leave one",
        ),
        ("env.A=x secrets.A=y", "secrets.A: stands in env too; leave it in one of the two"),
        ("parallel.zero=0 parallel.dp_shard=2", "parallel.zero: 0 shards nothing, but dp_shard is 2; use"),
        ("parallel.zero=2", "parallel.zero: 2 needs dp_shard above 1, which is 1; raise dp_shard"),
        (
            "parallel.tp=3",
            "parallel.tp: 3 does not divide model.heads 4, model.kv_heads 2, model.hidden 128,",
        ),
        ("parallel.tp=4", "parallel.tp: 4 does not divide model.kv_heads 2; use 1, 2"),
        ("parallel.tp=2 data.seq_len=63", "parallel.tp: 2 does not divide data.seq_len 63; use 1"),
        ("parallel.tp=2 model.vocab=255", "parallel.tp: 2 does not divide model.vocab 255; use 1"),
        ("model.kv_heads=3", "model.kv_heads: 3 does not divide heads 4; use one of 1, 2, 4"),
        ("model.head_dim=33", "model.head_dim: 33 is odd; rotary positions need an even width"),
        ("model.hidden=33554432", "model.hidden: must be at most 16777216"),
        ("model.layers=5000", "model.layers: must be at most 1024"),
        ("data.seq_len=9000", "data.seq_len: 9000 is longer than model.context 8192; use at most 8192"),
        ("parallel.pp=9", "parallel.pp: pp 9 stages need as many layers, but the model has 8"),
        (
            "parallel.pp=8 parallel.schedule=interleaved",
            "parallel.pp: pp 8 × virtual_stages 2 = 16 stages need as many layers, but the model has 8",
        ),
        (
            "parallel.dp_shard=2 train.mbs=2 train.gbs=6",
            "train.gbs: 6 is not a multiple of mbs 2 × dp 2 = 4; the nearest is 8",
        ),
        ("parallel.dp_shard=4 train.gbs=1", "is not a multiple of mbs 1 × dp 4 = 4; the nearest is 4"),
        (
            "train.gbs=4 parallel.microbatches=3",
            "parallel.microbatches: 3 contradicts train.gbs 4 = mbs 1 × dp 1 × 4; use 4, or leave one",
        ),
        ("parallel.virtual_stages=2", "parallel.virtual_stages: must be 1 under pp 1, not 2"),
        ("parallel.pp=2 parallel.virtual_stages=2", "parallel.virtual_stages: must be 1 for 1f1b, not 2"),
        (
            "parallel.pp=2 parallel.schedule=interleaved parallel.virtual_stages=1",
            "parallel.virtual_stages: must be 2 or more for interleaved, not 1",
        ),
        (
            "parallel.pp=2 parallel.schedule=zero_bubble parallel.virtual_stages=3",
            "parallel.virtual_stages: must be 2 for zero_bubble, not 3",
        ),
        (
            "parallel.pp=4 parallel.microbatches=3",
            "parallel.schedule: 1f1b needs at least pp 4 microbatches a step, there are 3; change train.gbs",
        ),
        (
            "parallel.pp=2 parallel.schedule=interleaved parallel.microbatches=5",
            "parallel.schedule: interleaved cannot cut 5 microbatches into equal rounds; use a multiple",
        ),
        (
            "parallel.pp=2 parallel.schedule=zero_bubble train.recompute=full",
            "train.recompute: full under zero_bubble would run every block's forward twice more",
        ),
        (
            "parallel.pp=2 parallel.schedule=zero_bubble train.compile=true",
            "train.compile: a compiled block cannot split its backward as zero_bubble does",
        ),
        ("train.steps=5 train.warmup=6", "train.warmup: 6 is more than train.steps 5; use at most 5"),
        ("train.steps=5 train.profile={start: 6}", "train.profile.start: 6 comes after the last step 5"),
        (
            "parallel.tp=2 train.profile={start: 1, ranks: [0, 2]}",
            "train.profile.ranks: 2 is not a rank of this job; use 0 to 1",
        ),
    ],
)
def test_what_does_not_go_together_is_said(overrides: str, message: str) -> None:
    words = overrides.replace(": ", ":\0").replace(", ", ",\0").split(" ")
    with pytest.raises(SpecError) as caught:
        plan(*(word.replace("\0", " ") for word in words))
    assert len(caught.value.problems) == 1
    assert message in str(caught.value)


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        plan("parallel.tp=3", "parallel.pp=9", "parallel.zero=3", "train.warmup=500", "train.gbs=1")
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"parallel.tp", "parallel.pp", "parallel.zero", "parallel.schedule", "train.warmup"}


def test_gpipe_takes_any_number_of_microbatches() -> None:
    assert plan("parallel.pp=4", "parallel.schedule=gpipe", "parallel.microbatches=1").gbs == 1
