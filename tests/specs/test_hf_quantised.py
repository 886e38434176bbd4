"""Quantised Hugging Face directories are refused when a job is loaded, before anything is queued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import SpecError
from hpcrun.specs.hf_quantised import why_quantised
from hpcrun.specs.load import load_job
from hpcrun.specs.model import ModelSpec, make_hf_config, model_fields_from_hf
from hpcrun.submission.prepare import check_job_inputs

SPEC = ModelSpec(vocab=256, hidden=32, ffn=64, layers=2, heads=4, kv_heads=2, head_dim=8)


def directory(
    place: Path, types: Mapping[str, str], config: Mapping[str, Any] = {}, beside: str = ""
) -> Path:
    """A directory with a config.json and one small file of weights of these types."""
    (place / "config.json").write_text(json.dumps({**make_hf_config(SPEC), **config}))
    header = {name: {"dtype": kind, "shape": [0], "data_offsets": [0, 0]} for name, kind in types.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (place / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    if beside:
        (place / beside).write_text("{}")
    return place


@pytest.mark.parametrize(
    ("types", "config", "beside", "said"),
    [
        ({}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "", "quantised by gptq"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "", "quantised by fp8"),
        ({}, {"quantization_config": {"load_in_4bit": True}}, "", "quantised (quantization_config)"),
        ({}, {"compression_config": {"format": "pack-quantized"}}, "", "quantised (compression_config)"),
        ({}, {"quantization": {"bits": 4}}, "", "quantised (quantization)"),
        ({}, {}, "quantize_config.json", "quantize_config.json: the weights are quantised"),
        ({}, {}, "hf_quant_config.json", "hf_quant_config.json: the weights are quantised"),
        ({"a.qweight": "I32"}, {}, "", "(a.qweight is stored as I32)"),
        ({"a.weight": "F8_E4M3", "b.weight": "BF16"}, {}, "", "(a.weight is stored as F8_E4M3)"),
        ({"a.weight": "U8"}, {}, "", "(a.weight is stored as U8)"),
    ],
)
def test_quantised_weights_are_refused_at_once(
    tmp_path: Path, types: dict[str, str], config: dict[str, Any], beside: str, said: str
) -> None:
    place = directory(tmp_path, types, config, beside)
    assert said in (why_quantised(place) or "")
    with pytest.raises(ValueError, match="give the model it was made from"):
        model_fields_from_hf(place)
    words = [f"model.hf={place}", "data.text=/nowhere"]
    with pytest.raises(SpecError, match=r"model\.hf.*quantised"):
        load_job(None, words)
    (tmp_path / "text.txt").write_text("some words " * 20_000)
    keys = ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads")
    sizes = [f"model.{key}={getattr(SPEC, key)}" for key in keys] + [f"model.weights={place}"]
    with pytest.raises(SpecError, match=r"model\.weights.*quantised"):
        check_job_inputs(load_job(None, [*sizes, f"data.text={tmp_path / 'text.txt'}"]))


@pytest.mark.parametrize(
    ("types", "config"),
    [
        ({"a.weight": "BF16", "b.weight": "F32"}, {}),
        ({"a.weight": "F16", "rotary_emb.inv_freq": "F32", "embeddings.position_ids": "I64"}, {}),
        ({}, {"quantization_config": None}),
        ({}, {"quantization_config": {}}),
    ],
)
def test_plain_weights_are_taken(tmp_path: Path, types: dict[str, str], config: dict[str, Any]) -> None:
    assert why_quantised(directory(tmp_path, types, config)) is None
    assert ModelSpec(**model_fields_from_hf(tmp_path)).hidden == 32


def test_what_cannot_be_read_is_left_to_others(tmp_path: Path) -> None:
    assert why_quantised(tmp_path / "nowhere") is None
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert why_quantised(tmp_path) is None
