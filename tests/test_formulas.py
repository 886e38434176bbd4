"""Parameter counts against published models, and the identities between the FLOP formulas."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest

from hpcrun.formulas import (
    head_flops_per_token,
    layer_flops_per_token,
    layer_parameters,
    median_interval,
    min_samples_for_median,
    model_parameters,
    peak_flops,
    train_flops_per_token,
)
from hpcrun.specs.model import MODEL_PRESETS, ModelSpec


def preset(name: str, **changes: Any) -> ModelSpec:
    fields = MODEL_PRESETS[name] | changes
    return ModelSpec.model_validate({"head_dim": fields["hidden"] // fields["heads"]} | fields)


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-1b", 1_235_814_400)],
)
def test_parameter_counts_are_those_of_the_published_weights(name: str, count: int) -> None:
    assert model_parameters(preset(name)) == count


def test_a_layer_more_is_a_layer_s_parameters_more_and_tying_saves_the_head() -> None:
    model, deeper = preset("demo"), preset("demo", layers=5)
    assert model_parameters(deeper) - model_parameters(model) == layer_parameters(model)
    assert model_parameters(model) - model_parameters(preset("demo", tied=True)) == model.vocab * model.hidden


def test_training_flops_are_six_a_weight_and_the_attention_core() -> None:
    model, seq_len = preset("llama3-8b"), 8192
    norms = (2 * model.layers + 1) * model.hidden
    weights = model_parameters(model) - model.vocab * model.hidden - norms  # the embedding is a look-up
    core = 12 * model.layers * seq_len * model.heads * model.head_dim
    assert train_flops_per_token(model, seq_len, causal=False) == 6 * weights + core
    assert train_flops_per_token(model, seq_len) == 6 * weights + core / 2


def test_a_step_is_three_forwards_of_blocks_and_head() -> None:
    model = preset("demo")
    forward = model.layers * layer_flops_per_token(model, 256) + head_flops_per_token(model)
    assert train_flops_per_token(model, 256) == 3 * forward
    assert head_flops_per_token(model) == 2 * model.hidden * model.vocab


@pytest.mark.parametrize(
    ("device", "precision", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "fp64", None),
        ("a device of tomorrow", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_peaks_are_known_or_none(device: str, precision: str, flops: float | None) -> None:
    assert peak_flops(device, precision) == flops


@pytest.mark.parametrize("count", range(6, 60))
def test_the_median_s_interval_is_the_narrowest_that_holds_it_in_95_of_100(count: int) -> None:
    low, high = median_interval([float(one) for one in range(count, 0, -1)])
    assert low + high == count + 1
    k = int(low)
    missed = [2 * sum(comb(count, below) for below in range(end)) / 2**count for end in (k, k + 1)]
    assert missed[0] <= 0.05 < missed[1]


def test_too_few_values_give_their_whole_range() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([2.0]) == (2.0, 2.0)
    assert (min_samples_for_median(), min_samples_for_median(0.99), min_samples_for_median(0.5)) == (6, 8, 2)
