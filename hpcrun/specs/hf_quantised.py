"""Whether a Hugging Face directory holds quantised weights, from its small files and headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.specs.hf_directory import read_hf_config
from hpcrun.specs.tensor_files import FLOAT_DTYPES, read_safetensors_header

_SECTIONS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json that say how weights were quantised."""
_BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""What GPTQ, AWQ and ModelOpt write beside it."""
_MOST_SHARDS = 4
"""The first may hold embeddings alone, which stay as they are; no more are looked at on each load."""
_REMEDY = "training needs plain bf16, fp16 or fp32 weights; give the model it was made from"


def why_quantised(directory: Path) -> str | None:
    """In words why these weights cannot be trained; None where nothing shows that they are quantised.

    What is missing or damaged is left to whoever reads the weights.
    """
    config = _json(directory)
    for key in _SECTIONS:
        section = config.get(key) or {}
        if section:
            method = (
                section.get("quant_method") or section.get("quant_algo") if isinstance(section, dict) else ""
            )
            how = f" by {method}" if method else ""
            return f"{directory / 'config.json'}: the weights are quantised{how} ({key}); {_REMEDY}"
    for name in _BESIDE:
        if (directory / name).is_file():
            return f"{directory / name}: the weights are quantised; {_REMEDY}"
    for path in _shards(directory)[:_MOST_SHARDS]:
        for tensor, kind in _types(path):
            if kind not in FLOAT_DTYPES and not tensor.endswith(("inv_freq", "position_ids", "attn.bias")):
                return f"{path}: the weights are quantised ({tensor} is stored as {kind}); {_REMEDY}"
    return None


def _shards(directory: Path) -> list[Path]:
    try:
        return sorted(
            path for path in directory.iterdir() if path.suffix == ".safetensors" and path.is_file()
        )
    except OSError:
        return []


def _types(path: Path) -> Iterator[tuple[str, str]]:
    """The tensors in a safetensors file and the type of each, as its header says."""
    with suppress(UsageError):
        yield from ((name, tensor.dtype) for name, tensor in read_safetensors_header(path).items())


def _json(directory: Path) -> Mapping[str, Any]:
    try:
        return read_hf_config(directory)
    except (OSError, ValueError):
        return {}
