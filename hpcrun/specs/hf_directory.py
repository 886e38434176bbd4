"""Which tensors a Hugging Face directory holds, by headers and index alone: its files have to agree."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.files import UntrustedFileError, is_plain_name, read_regular
from hpcrun.specs.tensor_files import FLOAT_DTYPES, StoredTensor, read_safetensors_header

SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX_FILE = "model.safetensors.index.json"
HF_CONFIG_FILE = "config.json"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_INDEX_BYTES = 256 << 20
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_ROTARY = ".rotary_emb.inv_freq"
"""Early Llama checkpoints stored the rotary frequencies, which follow from the configuration."""


@dataclass(frozen=True)
class HfLayout:
    """The tensors of a directory under our names."""

    directory: Path
    stored_names: dict[str, str]
    """From our name of a tensor to the one in its file."""
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...]
    """What is worth a word and no reason to refuse it."""

    def torch_types(self) -> dict[str, str]:
        """From our name of a tensor to torch's name of its type."""
        return {name: FLOAT_DTYPES.get(tensor.dtype, tensor.dtype) for name, tensor in self.tensors.items()}


def read_hf_layout(directory: Path) -> HfLayout:
    """UsageError where files are missing or damaged, or the index and the files do not say the same."""
    notes = list[str]()
    if (directory / SAFETENSORS_FILE).is_file():
        if (directory / SAFETENSORS_INDEX_FILE).is_file():
            raise UsageError(
                f"{directory}: has both {SAFETENSORS_FILE} and {SAFETENSORS_INDEX_FILE}, so it is not"
                " clear which weights count;"
                " move one of the two away"
            )
        stored = read_safetensors_header(directory / SAFETENSORS_FILE)
    elif (directory / SAFETENSORS_INDEX_FILE).is_file():
        stored = _read_shards(directory, notes)
    else:
        raise UsageError(
            f"{directory}: has neither {SAFETENSORS_FILE} nor {SAFETENSORS_INDEX_FILE};"
            f" {conversion_advice(directory)}"
        )
    rotary = [name for name in stored if name.endswith(_ROTARY)]
    if rotary:
        notes.append(f"{len(rotary)} tensors *{_ROTARY} are not taken, as they follow from {HF_CONFIG_FILE}")
    ours: dict[str, str] = {}
    for name in [key for key in stored if not key.endswith(_ROTARY)]:
        other = ours.setdefault(name.removeprefix("model."), name)
        if other != name:
            raise UsageError(
                f"{directory}: has both {other} and {name}, so it is not clear which one counts; save it with"
                " one of them"
            )
    return HfLayout(directory, ours, {name: stored[key] for name, key in ours.items()}, tuple(notes))


def why_precision_is_lost(layout: HfLayout, kept: str) -> str | None:
    """In words why weights would lose digits in the type that training keeps them in, else None."""
    wide = [name for name, tensor in layout.tensors.items() if tensor.dtype == "F64"]
    if not wide or kept == "float64":
        return None
    return (
        f"{layout.directory}: {format_some_names(wide)} {'are' if wide[1:] else 'is'} float64, but this"
        " job keeps weights"
        f" in {kept}, which may lose digits; set train.precision: fp64, or import them with"
        f" `hpcrun ckpt import {layout.directory} --dtype {kept}`"
    )


def dtype_mismatch_note(config: dict[str, Any], layout: HfLayout) -> str | None:
    """What config.json says of the type of the tensors, where the tensors have another one."""
    stated = configured_dtype(config)
    counts = Counter(layout.torch_types().values())
    if stated is None or set(counts) == {stated}:
        return None
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())
    return f"{HF_CONFIG_FILE} says {stated}, the tensors are {kinds}; what the tensors are counts"


def configured_dtype(config: dict[str, Any]) -> str | None:
    """What a config.json says of the type of the tensors; transformers 5 calls it dtype."""
    stated = config.get("dtype", config.get("torch_dtype"))
    return stated.removeprefix("torch.") if isinstance(stated, str) else None


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The config.json of a directory; ValueError says what is wrong with it, FileNotFoundError."""
    return _read_object(directory / HF_CONFIG_FILE, _MOST_CONFIG_BYTES)


def format_some_names(names: Iterable[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    items = list(names)
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


def _read_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """A JSON object from elsewhere: never more than so many bytes, whatever stands under its name."""
    try:
        document = json.loads(read_regular(path, most_bytes, follow=True))
    except FileNotFoundError:
        raise
    except UntrustedFileError as error:
        raise ValueError(str(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a JSON object")
    return document


def _read_shards(directory: Path, notes: list[str]) -> dict[str, StoredTensor]:
    """The tensors of all shards, each where the index says and nowhere else."""
    path = directory / SAFETENSORS_INDEX_FILE
    try:
        index = _read_object(path, _MOST_INDEX_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {str(error).removeprefix(f'{path} ')}; download it again") from None
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise UsageError(f"{path}: has no weight_map from tensor names to file names; download it again")
    stored: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(places.values()):
        # links may lead elsewhere, as they do in Hugging Face's cache; a name in a downloaded file may not
        if not is_plain_name(shard):
            raise UsageError(f"{path}: names {shard!r}, outside its directory; do not use these weights")
        if not (directory / shard).is_file():
            raise UsageError(f"{path}: names {shard}, which is not there; download the missing file")
        there = read_safetensors_header(directory / shard)
        lacking = [name for name, place in places.items() if place == shard and name not in there]
        if lacking:
            raise UsageError(
                f"{directory / shard}: has no {format_some_names(lacking)}, against"
                f" {SAFETENSORS_INDEX_FILE}; download or export it again"
            )
        unlisted = [name for name in there if places.get(name) != shard]
        if unlisted:
            raise UsageError(
                f"{directory / shard}: also holds {format_some_names(unlisted)}, against"
                f" {SAFETENSORS_INDEX_FILE}; download or export it"
                " again"
            )
        stored |= there
    others = {entry.name for entry in directory.iterdir() if _SHARD.fullmatch(entry.name)} - set(
        places.values()
    )
    if others:
        notes.append(
            f"{format_some_names(sorted(others))}: not named by {SAFETENSORS_INDEX_FILE}, so not read"
        )
    total = index["metadata"].get("total_size") if isinstance(index.get("metadata"), dict) else None
    size = sum(tensor.size_bytes for tensor in stored.values())
    if total not in (None, size):
        notes.append(f"{SAFETENSORS_INDEX_FILE} says {total} bytes in all, the tensors take {size}")
    # in the order of the index
    return {name: stored[name] for name in places}


def find_pickled_weights(directory: Path) -> list[str]:
    """Weights that take a pickle to read, which may run code."""
    suffixes = (".bin", ".pt", ".pth", ".ckpt")
    return sorted(entry.name for entry in directory.glob("*") if entry.suffix in suffixes)


def conversion_advice(directory: Path) -> str:
    """In place of a directory without safetensors; transformers makes safetensors of pickles."""
    if not find_pickled_weights(directory):
        return "give a directory with one"
    return (
        f"{format_some_names(find_pickled_weights(directory))} may run code when loaded, so convert where"
        " you trust it:"
        " AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), and give NEW"
    )
