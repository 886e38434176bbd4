"""ModelSpec: the sizes of a decoder, from a preset, a Hugging Face config.json, or given one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from hpcrun.specs.fields import SpecSection
from hpcrun.specs.hf_directory import HF_CONFIG_FILE, read_hf_config
from hpcrun.specs.hf_quantised import why_quantised

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "demo": {"vocab": 256, "hidden": 128, "ffn": 384, "layers": 4, "heads": 4, "kv_heads": 2},
    "tiny": {"vocab": 256, "hidden": 64, "ffn": 128, "layers": 4, "heads": 4, "kv_heads": 2},
    "llama3-1b": {
        "vocab": 128256,
        "hidden": 2048,
        "ffn": 8192,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "tied": True,
        "context": 131072,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_context": 8192,
        },
    },
    "llama3-8b": {
        "vocab": 128256,
        "hidden": 4096,
        "ffn": 14336,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "rope_theta": 500000.0,
        "context": 8192,
    },
    "llama3-70b": {
        "vocab": 128256,
        "hidden": 8192,
        "ffn": 28672,
        "layers": 80,
        "heads": 64,
        "kv_heads": 8,
        "rope_theta": 500000.0,
        "context": 8192,
    },
}
"""Known models by name; the Llama 3 sizes are those of the published config.json files."""


class RopeScaling(SpecSection):
    """Llama 3's stretching of the rotary frequencies for contexts longer than the original one."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_context: int = Field(gt=0)


class ModelSpec(SpecSection):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab: int = Field(gt=0, description="vocabulary size")
    hidden: int = Field(gt=0, description="width of the residual stream")
    ffn: int = Field(gt=0, description="width of the gated feed-forward")
    layers: int = Field(gt=0, description="number of blocks")
    heads: int = Field(gt=0, description="query heads")
    kv_heads: int = Field(gt=0, description="key and value heads; must divide heads")
    head_dim: int = Field(gt=0, description="width of a head; default hidden / heads")
    rope_theta: float = Field(default=10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(default=None, description="Llama 3 scaling of long contexts")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of RMSNorm")
    tied: bool = Field(default=False, description="share the embedding's weight with the output head")
    context: int = Field(default=8192, gt=0, description="longest sequence that the model is meant for")
    init_std: float = Field(default=0.02, gt=0, description="standard deviation of the initial weights")
    weights: str | None = Field(default=None, description="directory of safetensors to start from")


HF_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
}
"""Families that can be represented, with what transformers takes for keys that config.json leaves out."""

HF_FIXED_VALUES = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
}
"""What a config.json may say of parts that our decoder has in one form only."""


_ROPE = ("rope_scaling", "rope_parameters")


def model_fields_from_hf(directory: Path) -> dict[str, Any]:
    """Read a Llama-family config.json into ModelSpec's fields; ValueError says what cannot be represented."""
    path = directory / HF_CONFIG_FILE
    try:
        config = read_hf_config(directory)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give a directory saved by save_pretrained") from None
    if quantised := why_quantised(directory):
        raise ValueError(quantised)
    return _fields_from_config(config, path)


def find_config_differences(spec: ModelSpec, config: dict[str, Any]) -> list[str]:
    """Where a config.json describes another model than the spec, key by key in words."""
    try:
        theirs = ModelSpec(**_fields_from_config(config, Path(HF_CONFIG_FILE))).model_dump()
    except ValidationError as error:
        return [f"{HF_CONFIG_FILE}: {details['loc'][0]}: {details['msg']}" for details in error.errors()]
    except ValueError as error:
        return [str(error)]
    ours = spec.model_dump()
    return [
        f"{key} {theirs[key]!r} instead of {ours[key]!r}"
        for key in ours
        if key != "weights" and theirs[key] != ours[key]
    ]


def _fields_from_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    family = str(config.get("model_type"))
    if family not in HF_FAMILY_DEFAULTS:
        raise ValueError(
            f"{path}: model_type {family!r} is not supported; use {' or '.join(HF_FAMILY_DEFAULTS)}"
        )
    rope = _rope_settings(config, path)
    config = HF_FAMILY_DEFAULTS[family] | config
    for key, plain in HF_FIXED_VALUES.items():
        rope_value = rope.get(key, config.get(key, plain))
        if rope_value != plain:
            raise ValueError(f"{path}: {key} {rope_value!r} is not supported, only {plain!r}")
    try:
        return _translate(config, rope)
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _rope_settings(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """All that a config.json says of the rotary positions; ValueError where it says two things."""
    # transformers 5 keeps the base in rope_parameters, earlier ones beside rope_scaling
    merged: dict[str, Any] = {}
    for section in ({"rope_theta": config.get("rope_theta")}, *map(config.get, _ROPE)):
        if not isinstance(section or {}, dict):
            raise ValueError(f"{path}: the rope parameters are not a JSON object")
        for name, value in (section or {}).items():
            key = "rope_type" if name == "type" else name
            if value is not None and merged.setdefault(key, value) != value:
                raise ValueError(
                    f"{path}: {key} is {merged[key]!r} and also {value!r}; keep the one that the weights were"
                    " trained with"
                )
    return merged


def _translate(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    context = _size(config, "max_position_embeddings")
    fields: dict[str, Any] = {
        "vocab": _size(config, "vocab_size"),
        "hidden": hidden,
        "ffn": _size(config, "intermediate_size"),
        "layers": _size(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "rope_theta": rope.get("rope_theta") or 10000.0,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied": config.get("tie_word_embeddings", False),
        "context": context,
        "init_std": config.get("initializer_range", 0.02),
    }
    kind = rope.get("rope_type") or "default"
    if kind == "llama3":
        fields["rope_scaling"] = {
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_context": rope.get("original_max_position_embeddings", context),
        }
    elif kind != "default":
        raise ValueError(f"rope scaling {kind!r} is not supported; use llama3 or none")
    return fields


def _size(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a positive whole number, not {value!r}")
    return value


def make_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a model for LlamaForCausalLM, with the rope keys of transformers 4 and 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_context,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if spec.rope_scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": spec.rope_theta},
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "max_position_embeddings": spec.context,
        "initializer_range": spec.init_std,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
