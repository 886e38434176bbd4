"""Hugging Face's layout: both directions against transformers itself, and every damaged directory."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpcrun.errors import UsageError
from hpcrun.runtime.hf_weights import HFWeights, write_hf
from hpcrun.runtime.model import Decoder, canonical_name, initialise_parameters
from hpcrun.specs.model import ModelSpec, RopeScaling, make_hf_config, model_fields_from_hf

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
PLAIN = ModelSpec(
    vocab=61, hidden=32, ffn=48, layers=2, heads=4, kv_heads=2, head_dim=8, context=64, init_std=0.2
)
SPECS = {
    "plain": PLAIN,
    "tied": PLAIN.model_copy(update={"tied": True}),
    "one key-value head, wide heads": PLAIN.model_copy(update={"kv_heads": 1, "head_dim": 16}),
    "llama3 scaling": PLAIN.model_copy(update={"rope_scaling": SCALING, "rope_theta": 500000.0}),
}
# longer than SCALING.original_context
TOKENS = torch.arange(96).reshape(2, 48) * 11 % PLAIN.vocab


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install transformers"
    )


def build(spec: ModelSpec) -> Decoder:
    decoder = Decoder(spec)
    initialise_parameters(decoder, spec, seed=3)
    return decoder


def load(weights: HFWeights, spec: ModelSpec) -> Decoder:
    decoder = Decoder(spec)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights.read(canonical_name(spec, name)))
    return decoder


def save(directory: Path, spec: ModelSpec = PLAIN, **options: Any) -> Path:
    write_hf(spec, build(spec).state_dict().items(), directory, **options)
    return directory


@torch.no_grad()
def largest_difference(ours: Decoder, theirs: Any) -> float:
    found, expected = ours(TOKENS), theirs(TOKENS).logits
    assert expected.abs().max() > 1, "logits too small to tell models apart"
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", SPECS)
def test_transformers_computes_the_same_from_what_we_write(
    transformers: Any, tmp_path: Path, name: str
) -> None:
    spec = SPECS[name]
    directory = save(tmp_path / "ours", spec, max_shard_bytes=9000)
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.dtype == torch.float32
    assert largest_difference(build(spec), theirs) < 1e-5


@pytest.mark.parametrize("shard_size", ["5GB", "9KB"])
@pytest.mark.parametrize("name", SPECS)
def test_we_compute_the_same_from_what_transformers_writes(
    transformers: Any, tmp_path: Path, name: str, shard_size: str
) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**make_hf_config(spec)))
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shard_size == "9KB")
    assert ModelSpec(**model_fields_from_hf(tmp_path)) == spec
    weights = HFWeights(tmp_path)
    weights.check(spec)
    assert largest_difference(load(weights, spec), theirs) < 1e-5


@pytest.mark.parametrize("shard_bytes", [10**9, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_written_reads_back(tmp_path: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    decoder = build(PLAIN)
    tensors = ((name, tensor.to(dtype)) for name, tensor in decoder.state_dict().items())
    write_hf(PLAIN, tensors, tmp_path / "a" / "b", max_shard_bytes=shard_bytes)
    weights = HFWeights(tmp_path / "a" / "b")
    weights.check(PLAIN)
    expected = dict(decoder.named_parameters())
    assert sorted(weights.layout.tensors) == sorted(expected)
    for name, parameter in expected.items():
        assert weights.layout.tensors[name].shape == tuple(parameter.shape)
        assert torch.equal(weights.read(name), parameter.to(dtype)), name
        rows = (slice(3, 9),)
        assert torch.equal(weights.read(name, rows), parameter[3:9].to(dtype)), name
    corner, none = (slice(0, 5), slice(30, 32)), (slice(61, 61),)
    assert torch.equal(
        weights.read("lm_head.weight", corner), expected["lm_head.weight"][0:5, 30:32].to(dtype)
    )
    assert weights.read("lm_head.weight", none).shape == (0, 32)


def test_shards_stay_below_the_limit_and_the_index_counts_them(tmp_path: Path) -> None:
    directory = save(tmp_path / "m", max_shard_bytes=9000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = sorted(directory.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))
    ]
    contents = [load_file(path) for path in shards]
    sizes = [sum(tensor.nbytes for tensor in content.values()) for content in contents]
    assert len(sizes) > 2
    assert any(len(content) > 1 for content in contents[1:-1]), "shards were not filled"
    assert max(sizes) <= 9000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert set(index["weight_map"].values()) == {path.name for path in shards}


def test_all_files_get_the_mode_that_new_files_get(tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    directory = save(tmp_path / "m", max_shard_bytes=9000)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "new").stat().st_mode)}


def test_one_memory_may_carry_all_tensors_in_turn(tmp_path: Path) -> None:
    expected = dict(build(PLAIN).named_parameters())
    buffer = torch.empty(61 * 32)

    def gather() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in expected.items():
            yield name, buffer[: parameter.numel()].view(parameter.shape).copy_(parameter.detach())

    write_hf(PLAIN, gather(), tmp_path / "m")
    weights = HFWeights(tmp_path / "m")
    assert all(torch.equal(weights.read(name), parameter) for name, parameter in expected.items())


def test_a_target_that_holds_something_is_refused_and_an_empty_one_is_filled(tmp_path: Path) -> None:
    full, empty, file = tmp_path / "full", tmp_path / "empty", tmp_path / "file"
    full.mkdir()
    (full / "precious").write_text("x")
    empty.mkdir()
    file.write_text("x")
    with pytest.raises(UsageError, match="full: is not empty"):
        save(full)
    with pytest.raises(UsageError, match="file: is a file"):
        save(file)
    save(empty)
    HFWeights(empty).check(PLAIN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]
    assert [path.name for path in full.iterdir()] == ["precious"]


def test_tensors_that_stop_coming_leave_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "norm.weight", torch.ones(32)
        raise RuntimeError("rank 3 died")

    with pytest.raises(RuntimeError, match="rank 3 died"):
        write_hf(PLAIN, broken(), tmp_path / "m")
    with pytest.raises(ValueError, match=r"were not given: embed_tokens\.weight"):
        write_hf(PLAIN, [("norm.weight", torch.ones(32))], tmp_path / "m")
    with pytest.raises(ValueError, match="came twice"):
        write_hf(PLAIN, [("norm.weight", torch.ones(32))] * 2, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_tied_head_is_neither_written_nor_required_but_accepted(tmp_path: Path) -> None:
    spec = SPECS["tied"]
    weights = HFWeights(save(tmp_path / "m", spec))
    assert "lm_head.weight" not in list(weights.layout.tensors)
    weights.check(spec)
    with pytest.raises(UsageError, match=r"lacks lm_head\.weight;"):
        weights.check(PLAIN)
    HFWeights(save(tmp_path / "untied")).check(spec)


def rewrite(directory: Path, change: dict[str, Tensor | None]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_check_names_what_is_missing_unexpected_and_of_another_shape_in_one_line(tmp_path: Path) -> None:
    directory = rewrite(
        save(tmp_path / "m"),
        {
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(32),
            "model.norm.weight": torch.ones(16),
        },
    )
    with pytest.raises(UsageError) as caught:
        HFWeights(directory).check(PLAIN)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    assert "lacks layers.1.mlp.up_proj.weight;" in message
    assert "has unexpected layers.0.self_attn.q_proj.bias;" in message
    assert "norm.weight [16] instead of [32];" in message
    with pytest.raises(UsageError, match=r"and \d+ more"):
        HFWeights(directory).check(PLAIN.model_copy(update={"layers": 5}))


def test_rotary_frequencies_of_early_checkpoints_are_ignored(tmp_path: Path) -> None:
    directory = rewrite(save(tmp_path / "m"), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    HFWeights(directory).check(PLAIN)


@pytest.mark.parametrize("kept", [0, 4, 500, -1])
def test_a_truncated_file_is_called_incomplete(tmp_path: Path, kept: int) -> None:
    path = save(tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"model\.safetensors: is not a complete safetensors file"):
        HFWeights(tmp_path / "m")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match=r"has neither model\.safetensors nor"):
            HFWeights(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "has no weight_map"),
        ("[" * 5000, "cannot be read"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {"a": "shard-9.safetensors"}}', r"names shard-9\.safetensors, which is not there"),
        ('{"weight_map": {"a": "../m2/model.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "outside its directory"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, index: str, message: str) -> None:
    save(tmp_path / "m2")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UsageError, match=message) as caught:
        HFWeights(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_a_damaged_shard_and_one_that_lacks_its_tensor_are_named(tmp_path: Path) -> None:
    directory = save(tmp_path / "m", max_shard_bytes=9000)
    with pytest.raises(UsageError, match="has no tensor nothing"):
        HFWeights(directory).read("nothing")
    first = (
        directory
        / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][
            "model.embed_tokens.weight"
        ]
    )
    save_file({"other": torch.ones(2)}, first)
    with pytest.raises(UsageError, match=rf"{first.name}: .*embed_tokens"):
        HFWeights(directory).check(PLAIN)
    first.write_bytes(b"<html>Access denied</html>")
    with pytest.raises(UsageError, match=f"{first.name}: is not a complete"):
        HFWeights(directory).read("embed_tokens.weight")


MISTRAL = make_hf_config(PLAIN) | {"model_type": "mistral", "sliding_window": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; use llama or mistral"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope scaling 'linear' is not supported",
        ),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "llama3"}}, "has no factor"),
        ({"rope_parameters": "x"}, "rope parameters are not"),
        ({"hidden_size": "32"}, "hidden_size must be a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"vocab_size": None}, "vocab_size must be"),
    ],
)
def test_a_config_that_cannot_be_represented_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL | change))
    with pytest.raises(ValueError, match=message) as caught:
        model_fields_from_hf(tmp_path)
    assert "config.json" in str(caught.value)


def test_configs_of_both_generations_give_the_same_model(tmp_path: Path) -> None:
    spec = SPECS["llama3 scaling"]
    both = make_hf_config(spec)
    for absent in ("rope_parameters", "rope_scaling"):
        old = {key: value for key, value in both.items() if key != absent}
        if absent == "rope_scaling":
            del old["rope_theta"]
        (tmp_path / "config.json").write_text(json.dumps(old))
        assert ModelSpec(**model_fields_from_hf(tmp_path)) == spec
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL | {"rope_scaling": {"rope_type": "default"}}))
    assert ModelSpec(**model_fields_from_hf(tmp_path)) == PLAIN


def test_keys_that_a_family_leaves_out_mean_its_own_defaults(tmp_path: Path) -> None:
    def without(*keys: str) -> None:
        config = {key: value for key, value in MISTRAL.items() if key not in keys}
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8, "head_dim": 4}))

    without("num_key_value_heads")
    assert model_fields_from_hf(tmp_path)["kv_heads"] == 8
    without("sliding_window")
    with pytest.raises(ValueError, match="sliding_window 4096"):
        model_fields_from_hf(tmp_path)
