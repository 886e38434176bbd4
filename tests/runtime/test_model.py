"""The decoder: stages, recomputation, tying, first values and rotary positions."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrun.runtime.model import (
    Decoder,
    Recompute,
    canonical_name,
    initial_value,
    initialise_parameters,
    loss_function,
    parameter_shapes,
    rotary_frequencies,
)
from hpcrun.specs.model import MODEL_PRESETS, ModelSpec, RopeScaling

SPEC = ModelSpec(vocab=61, hidden=32, ffn=48, layers=3, heads=4, kv_heads=2, head_dim=8)
TIED = SPEC.model_copy(update={"tied": True})
TOKENS = torch.arange(22).reshape(2, 11) * 7 % SPEC.vocab


def build(spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    decoder = Decoder(spec, **options).to(dtype)
    initialise_parameters(decoder, spec, seed=5)
    return decoder


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    loss_function(decoder(TOKENS), TOKENS.roll(-1, 1)).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


class CountOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
def test_stages_in_a_row_compute_what_the_whole_model_does(spec: ModelSpec) -> None:
    whole = build(spec)
    stages = [
        build(spec, layers=range(0, 1), head=False),
        build(spec, layers=range(1, 3), embed=False, head=False),
        build(spec, layers=range(0), embed=False),
    ]
    x = TOKENS
    for stage in stages:
        x = stage(x)
    assert x.shape == (2, 11, spec.vocab)
    assert torch.equal(x, whole(TOKENS))
    names = {name for stage in stages for name in stage.state_dict()}
    assert names == set(whole.state_dict())
    assert "layers.2.self_attn.q_proj.weight" in stages[1].state_dict()


def test_a_position_sees_no_later_token_and_knows_where_it_stands() -> None:
    decoder = build()
    changed = TOKENS.clone()
    changed[:, 7:] = 3
    before, after = decoder(TOKENS), decoder(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    # the same set of earlier tokens in another order is another past
    swapped = TOKENS[:, [1, 0, *range(2, 11)]]
    assert not torch.allclose(decoder(swapped)[:, -1], before[:, -1], rtol=0, atol=1e-9)


def test_shorter_sequences_after_longer_ones_and_back_give_the_same_logits() -> None:
    decoder, fresh = build(), build()
    decoder(TOKENS[:, :3])
    long = decoder(TOKENS)
    torch.testing.assert_close(long[:, :5], decoder(TOKENS[:, :5]), rtol=0, atol=1e-14)
    assert torch.equal(long, fresh(TOKENS))


def test_training_goes_on_after_an_evaluation_in_inference_mode() -> None:
    decoder = build()
    with torch.inference_mode():
        decoder(TOKENS)
    assert len(gradients(decoder)) == len(parameter_shapes(SPEC))


@pytest.mark.parametrize(
    ("recompute", "matmuls_again", "activations_again"), [("selective", False, True), ("full", True, True)]
)
def test_recompute_gives_the_same_gradients_and_computes_again_what_it_says(
    recompute: Recompute, matmuls_again: bool, activations_again: bool
) -> None:
    with CountOperations() as plain:
        expected = gradients(build())
    with CountOperations() as again:
        found = gradients(build(recompute=recompute))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert (again.seen["mm"] > plain.seen["mm"]) is matmuls_again
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert plain.seen[attention] == SPEC.layers
    assert (again.seen[attention] > plain.seen[attention]) is matmuls_again
    assert (again.seen["silu"] > plain.seen["silu"]) is activations_again


def test_a_tied_model_has_one_parameter_for_both_ends_which_gets_both_gradients() -> None:
    decoder = build(TIED)
    assert decoder.lm_head is not None
    assert decoder.embed_tokens is not None
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert "lm_head.weight" not in dict(decoder.named_parameters())
    shared = gradients(decoder)["embed_tokens.weight"]
    apart = build(SPEC)
    with torch.no_grad():
        assert apart.lm_head is not None
        assert apart.embed_tokens is not None
        apart.lm_head.weight.copy_(apart.embed_tokens.weight)
    both = gradients(apart)
    torch.testing.assert_close(
        shared, both["embed_tokens.weight"] + both["lm_head.weight"], rtol=0, atol=1e-15
    )


def test_a_tied_head_alone_has_its_own_parameter_with_the_embedding_s_values() -> None:
    head = build(TIED, layers=range(2, 3), embed=False)
    assert head.lm_head is not None
    whole = dict(build(TIED).named_parameters())
    assert torch.equal(head.lm_head.weight, whole["embed_tokens.weight"])
    assert canonical_name(TIED, "lm_head.weight") == "embed_tokens.weight"
    assert canonical_name(SPEC, "lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
def test_a_model_built_on_meta_computes_after_to_empty_and_initialise(spec: ModelSpec) -> None:
    with torch.device("meta"):
        decoder = Decoder(spec)
    assert not list(decoder.buffers())
    decoder.to_empty(device="cpu")
    initialise_parameters(decoder, spec, seed=5)
    assert torch.equal(decoder(TOKENS), build(spec, torch.float32)(TOKENS))
    tied = decoder.lm_head is not None and decoder.embed_tokens is not None
    assert tied
    assert (decoder.lm_head.weight is decoder.embed_tokens.weight) is spec.tied  # type: ignore[union-attr]


def test_first_values_depend_on_seed_and_name_alone() -> None:
    whole = dict(build().named_parameters())
    stage = build(layers=range(1, 3), embed=False)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole[name]), name
    assert not torch.equal(
        whole["layers.0.self_attn.q_proj.weight"], whole["layers.1.self_attn.q_proj.weight"]
    )
    name, shape = "layers.0.mlp.up_proj.weight", (48, 32)
    drawn = initial_value(SPEC, name, shape, seed=5)
    assert torch.equal(drawn, initial_value(SPEC, name, shape, seed=5))
    assert not torch.equal(drawn, initial_value(SPEC, name, shape, seed=6))
    # a float64 run starts from float32 values
    assert torch.equal(whole[name], drawn.double())


def test_first_values_stay_the_same_from_release_to_release() -> None:
    value = initial_value(SPEC, "layers.0.mlp.up_proj.weight", (48, 32), seed=0)
    assert value[0, :3].tolist() == pytest.approx([0.01756194, 0.02028012, 0.01845155], rel=1e-5)


@pytest.mark.parametrize("rows", [slice(0, 700), slice(300, 1100), slice(1023, 1025), slice(2000, 2500)])
def test_a_rank_draws_its_rows_as_they_stand_in_the_whole(rows: slice) -> None:
    # 1024 columns: a block of draws is 1024 rows, and the last one is cut short
    name, shape = "layers.0.mlp.up_proj.weight", (2500, 1024)
    whole = initial_value(SPEC, name, shape, seed=3)
    assert torch.equal(initial_value(SPEC, name, shape, seed=3, rows=rows), whole[rows])
    assert not torch.equal(whole[:1024], whole[1024:2048])


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embed_tokens.weight", 0.02),
        ("layers.1.self_attn.v_proj.weight", 0.02),
        ("layers.1.self_attn.o_proj.weight", 0.02 / math.sqrt(6)),
        ("layers.1.mlp.down_proj.weight", 0.02 / math.sqrt(6)),
    ],
)
def test_first_values_are_normal_with_a_smaller_spread_into_the_residual_stream(
    name: str, std: float
) -> None:
    value = initial_value(SPEC, name, (400, 250), seed=1)
    assert value.mean().item() == pytest.approx(0, abs=std / 50)
    assert value.std().item() == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.post_attention_layernorm.weight"])
def test_norms_start_at_one(name: str) -> None:
    assert torch.equal(initial_value(SPEC, name, (32,), seed=1), torch.ones(32))


def test_parameter_shapes_of_a_known_model() -> None:
    shapes = parameter_shapes(ModelSpec(**MODEL_PRESETS["llama3-1b"]))
    assert sum(math.prod(shape) for shape in shapes.values()) == 1_235_814_400
    assert shapes["layers.15.self_attn.k_proj.weight"] == (512, 2048)
    assert "lm_head.weight" not in shapes


def test_llama3_scaling_keeps_fast_rotations_and_stretches_slow_ones() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=1000)
    plain = SPEC.model_copy(update={"head_dim": 64, "rope_theta": 500000.0})
    scaled = plain.model_copy(update={"rope_scaling": scaling})
    cpu = torch.device("cpu")
    before = rotary_frequencies(plain, cpu, torch.float64)
    after = rotary_frequencies(scaled, cpu, torch.float64)
    kinds = set()
    for index, (frequency, found) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        assert frequency == pytest.approx(500000.0 ** (-2 * index / 64), rel=1e-12)
        wavelength = 2 * math.pi / frequency
        if wavelength < 250:
            kinds.add("kept")
            expected = frequency
        elif wavelength > 1000:
            kinds.add("stretched")
            expected = frequency / 8
        else:
            kinds.add("between")
            smooth = (1000 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert found == pytest.approx(expected, rel=1e-12)
    assert kinds == {"kept", "between", "stretched"}


def test_a_stage_that_receives_a_cut_sequence_makes_tables_for_the_whole() -> None:
    seen: list[int] = []
    stage = build(layers=range(1, 2), embed=False, head=False)
    stage.seq_shards = 4

    def note(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, cos, sin = inputs
        seen.extend((len(cos), len(sin)))
        return x.repeat(1, 4, 1), cos, sin

    stage.layers["1"].register_forward_pre_hook(note)
    stage(torch.zeros(2, 3, SPEC.hidden, dtype=torch.float64))
    assert seen == [12, 12]


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-13), (torch.float32, 1e-4)])
def test_rotary_tables_are_as_exact_as_the_model(dtype: torch.dtype, accuracy: float) -> None:
    tables: list[Tensor] = []
    decoder = build(dtype=dtype, layers=range(1), embed=False, head=False)
    decoder.layers["0"].register_forward_pre_hook(lambda module, inputs: tables.extend(inputs[1:]))
    decoder(torch.zeros(1, 900, SPEC.hidden, dtype=dtype))
    cos, sin = tables
    assert cos.dtype == sin.dtype == dtype
    for position, pair in ((0, 0), (899, 0), (500, 1), (899, 3)):
        angle = position * SPEC.rope_theta ** (-2 * pair / SPEC.head_dim)
        assert cos[position, pair].item() == pytest.approx(math.cos(angle), abs=accuracy)
        assert sin[position, pair].item() == pytest.approx(math.sin(angle), abs=accuracy)


def test_bf16_stays_near_float64() -> None:
    exact = build()(TOKENS)
    rough = build(dtype=torch.bfloat16)
    logits = rough(TOKENS)
    assert logits.dtype == torch.bfloat16
    assert (logits.double() - exact).abs().max() < 0.02 * exact.abs().max()
    loss = loss_function(logits, TOKENS.roll(-1, 1))
    assert loss.dtype == torch.float32
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in rough.parameters())


def test_loss_is_the_mean_over_all_tokens_and_keeps_float64() -> None:
    logits = torch.zeros(2, 3, 10, dtype=torch.float64)
    logits[0, 0, 4] = 2.0
    targets = torch.tensor([[4, 1, 2], [3, 4, 5]])
    expected = (5 * math.log(10) + math.log(math.exp(2) + 9) - 2) / 6
    loss = loss_function(logits, targets)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected, rel=1e-14)


# Dynamo looks at .grad of what a compiled block is given
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_computes_the_same() -> None:
    decoder, plain = build(recompute="selective"), gradients(build())
    for block in decoder.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    found = gradients(decoder)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14)
