"""Reads and writes weights in Hugging Face's layout: safetensors in one file or shards, and a config.json."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcrun.checkpoint.restore.exchange import atomic_directory
from hpcrun.errors import UsageError
from hpcrun.runtime.model import canonical_name, parameter_shapes
from hpcrun.runtime.resharding import raw_bytes
from hpcrun.specs.base_model import CarriedFiles, HfBaseModel, make_export_config
from hpcrun.specs.hf_directory import (
    HF_CONFIG_FILE,
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX_FILE,
    configured_dtype,
    dtype_mismatch_note,
    read_hf_config,
    read_hf_layout,
)
from hpcrun.specs.hf_quantised import why_quantised
from hpcrun.specs.model import ModelSpec, find_config_differences
from hpcrun.specs.records import sync_directory
from hpcrun.specs.sha256sums import write_sha256sums
from hpcrun.specs.tensor_files import FLOAT_DTYPES, StoredTensor

_STORED_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_ROWS = 4096
"""Rows of two matrices that are compared at a time."""
_ENTRY_BYTES = 192
"""Most that the header of a safetensors file needs for one tensor of ours; a multiple of 8."""


class HFWeights:
    """The tensors of a directory made by save_pretrained or write_hf, under our names, read on demand.

    The constructor raises UsageError for what headers and index show to be wrong.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.layout = read_hf_layout(self.directory)
        self._files: dict[Path, Any] = {}

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Read a tensor in its stored type, or the part of it that `slices` (of step 1) select."""
        stored, file = self.layout.stored_names.get(name), self._open(self._stored(name).path)
        if slices is None:
            whole: Tensor = file.get_tensor(stored)
            return whole
        assert all(cut.step in (None, 1) for cut in slices), f"safetensors ignores the step of {slices}"
        part: Tensor = file.get_slice(stored)[slices]
        return part

    def check(self, spec: ModelSpec) -> None:
        """UsageError unless exactly the model's tensors are here, in shape; a tied head may be absent."""
        if quantised := why_quantised(self.directory):
            raise UsageError(quantised)
        expected, there = parameter_shapes(spec), self.layout.tensors
        if spec.tied and "lm_head.weight" in there:
            expected["lm_head.weight"] = expected[canonical_name(spec, "lm_head.weight")]
        lacking = [name for name in expected if name not in there]
        unexpected = [name for name in there if name not in expected]
        other_shapes = [
            f"{name} {list(there[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in there and there[name].shape != shape
        ]
        untrainable = [
            f"{name} ({tensor.dtype})" for name, tensor in there.items() if tensor.dtype not in FLOAT_DTYPES
        ]
        complaints = [
            _summarise_items("lacks", lacking),
            _summarise_items("has unexpected", unexpected),
            _summarise_items("has in another shape", other_shapes),
            _summarise_items("has, in a type that cannot be trained,", untrainable),
        ]
        if any(complaints):
            remedy = "use sizes that fit, or model.hf, which takes them from its config.json"
            rows = there["embed_tokens.weight"].shape[0] if "embed_tokens.weight" in there else 0
            if rows > spec.vocab and not complaints[0] and not complaints[1]:
                remedy = f"the vocabulary is padded: use vocab: {rows} (vocab_size in {HF_CONFIG_FILE})"
            listed = "; ".join(filter(None, complaints))
            raise UsageError(f"{self.directory}: does not fit the model: it {listed}; {remedy}")

    def notes(self, spec: ModelSpec) -> list[str]:
        """Return notes on where config.json, tokenizer and tensors differ, which is no reason to refuse."""
        notes = list(self.layout.notes)
        try:
            config = read_hf_config(self.directory)
        except FileNotFoundError:
            return [*notes, f"there is no {HF_CONFIG_FILE} beside the weights to compare the model with"]
        except ValueError as error:
            return [*notes, str(error)]
        if note := dtype_mismatch_note(config, self.layout):
            notes.append(note)
        notes += [
            f"{HF_CONFIG_FILE} says {text}; the job's counts"
            for text in find_config_differences(spec, config)
        ]
        return notes

    def check_tied_head(self, spec: ModelSpec) -> None:
        """UsageError where a head that should share the embedding's weight is stored with other values."""
        if not spec.tied or "lm_head.weight" not in self.layout.tensors:
            return
        for row in range(0, spec.vocab, _ROWS):
            rows = (slice(row, min(row + _ROWS, spec.vocab)),)
            if not torch.equal(self.read("lm_head.weight", rows), self.read("embed_tokens.weight", rows)):
                raise UsageError(
                    f"{self.directory}: lm_head.weight is not embed_tokens.weight, although the model ties"
                    " the two (tie_word_embeddings), and would be lost; use tied: false, or remove the head"
                )

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.layout.tensors:
            raise UsageError(f"{self.directory}: has no tensor {name}")
        return self.layout.tensors[name]

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UsageError(
                    f"{path}: is not a complete safetensors file ({error}); download or export it again"
                ) from None
        return self._files[path]


def write_hf(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    directory: Path | str,
    max_shard_bytes: int = 5_000_000_000,
    *,
    base: HfBaseModel | None = None,
) -> tuple[CarriedFiles, tuple[str, ...]]:
    """Write config.json and the tensors, given whole and under our names, as save_pretrained would.

    Adds the files that `base` carries, and SHA256SUMS of all files. At most one tensor is in memory at a
    time. The directory appears complete or not at all.
    Returns the carried files and notes on the export.
    UsageError if it already holds something, SiteError if it cannot be written, ValueError for tensors of
    another model.
    """
    with atomic_directory(directory) as aside:
        carried = base.carry(aside) if base is not None else CarriedFiles()
        sizes = Counter[torch.dtype]()
        stored = _tensors_to_store(spec, tensors, sizes)
        _write_tensors(aside, stored, max_shard_bytes, len(parameter_shapes(spec)))
        config, notes = make_export_config(spec, base, _one_dtype(sizes, base))
        _write_json(aside / HF_CONFIG_FILE, config)
        write_sha256sums(aside)
        _finish(aside)
    return carried, tuple(notes)


def _one_dtype(sizes: Counter[torch.dtype], base: HfBaseModel | None) -> str:
    """Return the type for config.json: of mixed ones the base model's, or one that holds all."""
    kinds = {str(dtype).removeprefix("torch.") for dtype in sizes}
    stated = configured_dtype(base.config) if base is not None and base.config is not None else None
    if stated in kinds:
        return stated
    return str(functools.reduce(torch.promote_types, sizes)).removeprefix("torch.")


def _summarise_items(what: str, items: list[str]) -> str:
    """`lacks a, b, c and 4 more`, or nothing for no items."""
    rest = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return f"{what} {', '.join(items[:3])}{rest}" if items else ""


def _tensors_to_store(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    sizes: Counter[torch.dtype],
) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors as they are written, each of the model's exactly once."""
    missing = parameter_shapes(spec)
    for name, tensor in tensors:
        if canonical_name(spec, name) != name:
            continue
        if missing.pop(name, None) != tuple(tensor.shape):
            raise ValueError(f"{name} {tuple(tensor.shape)} is not a tensor of the model, or came twice")
        # a copy, because the caller may gather the next tensor in the same memory
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        sizes[copy.dtype] += copy.nbytes
        yield name if name == "lm_head.weight" else f"model.{name}", copy
    if missing:
        raise ValueError(f"the model has tensors that were not given: {', '.join(missing)}")


class _Shard:
    """A safetensors file that grows tensor by tensor; its header is written last."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self.size_bytes = path, 0
        self.entries: dict[str, Any] = {}
        # The header has room for `most` entries; the format allows trailing spaces.
        self._header_bytes = 64 + most * _ENTRY_BYTES
        self._file = path.open("wb")
        self._file.seek(8 + self._header_bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a contiguous tensor on the host."""
        place = [self.size_bytes, self.size_bytes + tensor.nbytes]
        self.entries[name] = {
            "dtype": _STORED_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": place,
        }
        self._file.write(raw_bytes(tensor))
        self.size_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the header."""
        header = json.dumps(
            {"__metadata__": {"format": "pt"}, **self.entries}, separators=(",", ":")
        ).encode()
        assert len(header) <= self._header_bytes, f"{len(header)} bytes of header"
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little") + header.ljust(self._header_bytes))
        self._file.close()

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()


def _write_tensors(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int, most: int
) -> None:
    shards: list[_Shard] = []
    try:
        for name, tensor in tensors:
            if not shards or (shards[-1].entries and shards[-1].size_bytes + tensor.nbytes > max_shard_bytes):
                if shards:
                    shards[-1].finish()
                shards.append(_Shard(directory / f"{len(shards)}.shard", most))
            shards[-1].add(name, tensor)
        shards[-1].finish()
    finally:
        if shards:
            shards[-1].close()
    if len(shards) == 1:
        shards[0].path.rename(directory / SAFETENSORS_FILE)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        # the names count the shards, which only now are all known
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        shard.path.rename(directory / final)
        places |= dict.fromkeys(shard.entries, final)
    total = sum(shard.size_bytes for shard in shards)
    _write_json(directory / SAFETENSORS_INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _finish(directory: Path) -> None:
    """Give all files the mode of the umask, which save_file does not, and sync them."""
    mode = (directory / "config.json").stat().st_mode & 0o777
    for path in directory.iterdir():
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)
