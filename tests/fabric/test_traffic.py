"""What ranks send each other: the formulas against sums done by hand, and who is whose neighbour."""

from __future__ import annotations

from typing import cast

from hpcrun.fabric.traffic import (
    ASSUMED_BYTES,
    Traffic,
    TrafficFlow,
    TrafficPattern,
    axis_stride,
    declared_traffic,
    estimate_traffic,
)
from hpcrun.formulas import layer_parameters, model_parameters
from hpcrun.mesh import ParallelDegrees
from hpcrun.specs.load import parse_job
from hpcrun.specs.model import ModelSpec

BASE = "model: {preset: demo, layers: 8}\ndata: {text: x, seq_len: 64}\n"


def traffic(*overrides: str) -> Traffic:
    job = parse_job(BASE, "job.yaml", overrides)
    return estimate_traffic(job.spec.model, job.plan, job.spec)


def flow(axis: str, *overrides: str) -> TrafficFlow:
    found = traffic(*overrides).flow(axis)
    assert found is not None
    return found


MODEL = cast(ModelSpec, parse_job(BASE, "job.yaml").spec.model)
WEIGHTS = model_parameters(MODEL)


def test_replicas_send_their_gradients_twice_round_a_ring() -> None:
    found = flow("dp_replicate", "parallel.dp_replicate=4")
    assert (found.pattern, found.size) == ("ring", 4)
    assert found.bytes == 2 * 3 * WEIGHTS * 4 // 4  # 2 (n-1)/n of fp32


def test_gradients_travel_in_fp32_under_bf16_and_in_fp64_under_fp64() -> None:
    whole = flow("dp_replicate", "parallel.dp_replicate=2").bytes
    assert flow("dp_replicate", "parallel.dp_replicate=2", "train.precision=bf16").bytes == whole
    assert flow("dp_replicate", "parallel.dp_replicate=2", "train.precision=fp64").bytes == 2 * whole


def test_zero_decides_how_often_shards_are_gathered() -> None:
    shard = ("parallel.dp_shard=2", "parallel.microbatches=4")
    piece = WEIGHTS * 4 // 2  # (n-1)/n of fp32
    assert flow("dp_shard", *shard, "parallel.zero=1").bytes == 2 * piece
    assert flow("dp_shard", *shard, "parallel.zero=2").bytes == (1 + 4) * piece
    assert flow("dp_shard", *shard, "parallel.zero=3").bytes == (8 + 4) * piece


def test_replicas_of_shards_sum_only_their_shard() -> None:
    alone = flow("dp_replicate", "parallel.dp_replicate=2").bytes
    assert flow("dp_replicate", "parallel.dp_replicate=2", "parallel.dp_shard=2").bytes == alone // 2


def test_a_stage_hands_its_residual_on_each_way_for_every_microbatch() -> None:
    found = flow("pp", "parallel.pp=2", "parallel.microbatches=4", "train.mbs=3")
    assert (found.pattern, found.messages) == ("chain", 8)
    assert found.bytes == 4 * 3 * 64 * MODEL.hidden * 4


def test_stages_dealt_in_turns_close_the_chain_and_those_folded_do_not() -> None:
    turns = flow("pp", "parallel.pp=2", "parallel.schedule=interleaved")
    folded = flow("pp", "parallel.pp=2", "parallel.schedule=zero_bubble")
    plain = flow("pp", "parallel.pp=2")
    assert (turns.pattern, folded.pattern) == ("loop", "chain")
    assert turns.bytes == folded.bytes == 2 * plain.bytes


def test_a_pipeline_rank_reduces_the_layers_that_it_holds() -> None:
    found = flow("dp_replicate", "parallel.pp=2", "parallel.dp_replicate=2")
    assert found.bytes < WEIGHTS * 4
    assert found.bytes >= 4 * 4 * layer_parameters(MODEL)


def test_tensor_parallel_has_nine_gathers_or_scatters_a_layer() -> None:
    residual = 64 * MODEL.hidden * 4
    assert flow("tp", "parallel.tp=2").bytes == 9 * 8 * residual // 2
    assert flow("tp", "parallel.tp=2", "train.recompute=full").bytes == 13 * 8 * residual // 2


def test_context_parallel_sends_keys_and_values_round_the_ring() -> None:
    job = parse_job(BASE, "job.yaml")
    plan = job.training_plan.model_copy(update={"cp": 2})
    found = estimate_traffic(MODEL, plan, job.spec).flow("cp")
    assert found is not None
    keys_and_values = 3 * 32 * 2 * MODEL.kv_heads * MODEL.head_dim * 4 * 8
    assert found.bytes == keys_and_values + WEIGHTS * 4


def test_one_rank_sends_nothing() -> None:
    assert traffic() == Traffic(())
    assert str(traffic()) == "no traffic"


def test_a_command_with_degrees_sends_equal_bytes_and_says_that_this_is_assumed() -> None:
    job = parse_job(
        "command: [python, x.py]\nresources: {nodes: 4}\nparallel: {pp: 2, dp_shard: 2, tp: 2}\n", "job.yaml"
    )
    found = estimate_traffic(None, None, job.spec)
    assert [(one.axis, one.pattern, one.bytes) for one in found.flows] == [
        ("pp", "chain", ASSUMED_BYTES),
        ("dp_shard", "ring", ASSUMED_BYTES),
        ("tp", "ring", ASSUMED_BYTES),
    ]
    assert "assumed" in found.notes[0]


def test_a_command_without_degrees_is_one_ring_over_all_ranks() -> None:
    job = parse_job("command: [a]\nresources: {nodes: 3, ranks_per_node: 2}\n", "job.yaml")
    (found,) = estimate_traffic(None, None, job.spec).flows
    assert (found.pattern, found.size) == ("ring", 6)
    assert list(found.edges(job.spec.degrees, 6))[-1] == (5, 0, ASSUMED_BYTES)


def test_neighbours_of_every_pattern() -> None:
    degrees = ParallelDegrees(pp=3, tp=2)

    def pairs(pattern: TrafficPattern) -> list[tuple[int, int]]:
        edges = TrafficFlow("pp", pattern, 3, 9, 1).edges(degrees, 6)
        return sorted((a, b) for a, b, _ in edges if a % 2 == 0)

    assert pairs("ring") == [(0, 2), (2, 4), (4, 0)]
    assert pairs("chain") == [(0, 2), (2, 0), (2, 4), (4, 2)]
    assert pairs("loop") == [(0, 2), (0, 4), (2, 0), (2, 4), (4, 0), (4, 2)]
    assert pairs("all_to_all") == [(0, 2), (0, 4), (2, 0), (2, 4), (4, 0), (4, 2)]


def test_experts_stand_on_neighbours_in_the_data_and_context_ranks() -> None:
    degrees = ParallelDegrees(dp_shard=2, cp=2, tp=2)
    (found,) = (one for one in declared_traffic(degrees, 8, ep=4).flows if one.axis == "ep")
    assert axis_stride(degrees, "ep") == 2
    assert {b for a, b, _ in found.edges(degrees, 8) if a == 1} == {3, 5, 7}
    assert sum(size for a, _, size in found.edges(degrees, 8) if a == 1) >= found.bytes
