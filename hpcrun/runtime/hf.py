"""Weights in Hugging Face's layout: safetensors, one file or shards with an index, beside a config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcrun.checkpoint.restore.exchange import written_aside
from hpcrun.errors import UsageError
from hpcrun.files import is_plain_name
from hpcrun.runtime.model import canonical_name, parameter_shapes
from hpcrun.runtime.planning import raw_bytes
from hpcrun.specs.hf_quantised import why_quantised
from hpcrun.specs.model import ModelSpec, hf_config
from hpcrun.specs.records import sync_directory

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_STORED_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_ENTRY_BYTES = 192
"""Most that the header of a safetensors file needs for one tensor of ours; a multiple of 8."""


class HFWeights:
    """The tensors of a directory that save_pretrained or write_hf made, under our names, read on demand.

    UsageError says what is wrong with the directory: in the constructor for a file that is missing or an
    index that makes no sense, at the first reading for a damaged shard.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._files: dict[Path, Any] = {}
        if (self.directory / SINGLE).is_file():
            path = self.directory / SINGLE
            found = dict.fromkeys(self._open(path).keys(), path)
        elif (self.directory / INDEX).is_file():
            found = _read_index(self.directory / INDEX)
        else:
            raise UsageError(f"{self.directory}: has neither {SINGLE} nor {INDEX}; give a directory with one")
        # our name -> (name in the file, file); early Llama checkpoints also stored the rotary frequencies
        self._places = {
            stored.removeprefix("model."): (stored, path)
            for stored, path in found.items()
            if not stored.endswith(".rotary_emb.inv_freq")
        }

    def names(self) -> list[str]:
        """All tensors, in our names."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self._lazy(name).get_shape())

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor in the type it is stored in, or only the part of it that `slices` (of step 1) cut out."""
        lazy = self._lazy(name)
        if slices is None:
            stored, path = self._places[name]
            whole: Tensor = self._open(path).get_tensor(stored)
            return whole
        assert all(cut.step in (None, 1) for cut in slices), f"safetensors ignores the step of {slices}"
        part: Tensor = lazy[slices]
        return part

    def check(self, spec: ModelSpec) -> None:
        """UsageError unless exactly the model's tensors are here, in shape; a tied head may be absent."""
        if quantised := why_quantised(self.directory):
            raise UsageError(quantised)
        expected = parameter_shapes(spec)
        if spec.tied and "lm_head.weight" in self._places:
            expected["lm_head.weight"] = expected[canonical_name(spec, "lm_head.weight")]
        complaints = [
            _listed("lacks", [name for name in expected if name not in self._places]),
            _listed("has unexpected", [name for name in self._places if name not in expected]),
            _listed(
                "has in another shape",
                [
                    f"{name} {list(shape)} instead of {list(expected[name])}"
                    for name in expected
                    if name in self._places and (shape := self.shape(name)) != expected[name]
                ],
            ),
        ]
        if any(complaints):
            raise UsageError(
                f"{self.directory}: does not fit the model: it {'; '.join(filter(None, complaints))};"
                " use sizes that fit, or model.hf, which takes them from its config.json"
            )

    def _lazy(self, name: str) -> Any:
        """Safetensors' own view of a tensor, of which nothing but the header is read yet."""
        if name not in self._places:
            raise UsageError(f"{self.directory}: has no tensor {name}")
        stored, path = self._places[name]
        try:
            return self._open(path).get_slice(stored)
        except SafetensorError as error:
            raise UsageError(f"{path}: {error}, against {INDEX}; download or export it again") from None

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
    dtype: torch.dtype,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json and the tensors, given whole and under our names, as save_pretrained would.

    At most one tensor is in memory at a time. The directory appears complete or not at all. UsageError if
    it already holds something, SiteError if it cannot be written, ValueError for tensors of another model.
    """
    with written_aside(directory) as aside:
        config = hf_config(spec) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        _write_json(aside / "config.json", config)
        _write_tensors(aside, _stored(spec, tensors, dtype), max_shard_bytes, len(parameter_shapes(spec)))
        _finish(aside)


def _read_index(path: Path) -> dict[str, Path]:
    """From a tensor's name in the file to the shard which holds it."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise UsageError(f"{path}: has no weight_map from tensor names to file names; download it again")
    for shard in dict.fromkeys(places.values()):
        # links may lead elsewhere, as they do in Hugging Face's cache; a name in a downloaded file may not
        if not is_plain_name(shard):
            raise UsageError(f"{path}: names {shard!r}, outside its directory; do not use these weights")
        if not (path.parent / shard).is_file():
            raise UsageError(f"{path}: names {shard}, which is not there; download the missing file")
    return {name: path.parent / shard for name, shard in places.items()}


def _listed(what: str, items: list[str]) -> str:
    """`lacks a, b, c and 4 more`, or nothing for no items."""
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return f"{what} {', '.join(items[:3])}{more}" if items else ""


def _stored(
    spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterable[tuple[str, Tensor]]:
    """The tensors as they go into the files, each of the model's exactly once."""
    missing = parameter_shapes(spec)
    for name, tensor in tensors:
        if canonical_name(spec, name) != name:
            continue
        if missing.pop(name, None) != tuple(tensor.shape):
            raise ValueError(f"{name} {tuple(tensor.shape)} is not a tensor of the model, or came twice")
        # a copy, because the caller may gather the next tensor in the same memory
        copy = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        yield name if name == "lm_head.weight" else f"model.{name}", copy
    if missing:
        raise ValueError(f"the model has tensors that were not given: {', '.join(missing)}")


class _Shard:
    """A safetensors file that grows tensor by tensor; what it holds is written at its beginning, last."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self.size_bytes = path, 0
        self.entries: dict[str, Any] = {}
        # Room for so many entries; the format allows for spaces after them.
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
        """Write the beginning."""
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
        shards[0].path.rename(directory / SINGLE)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        # the names count the shards, which only now are all known
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        shard.path.rename(directory / final)
        places |= dict.fromkeys(shard.entries, final)
    total = sum(shard.size_bytes for shard in shards)
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _finish(directory: Path) -> None:
    """Give all files the mode that the umask asks for, which save_file does not, and make them durable."""
    mode = (directory / "config.json").stat().st_mode & 0o777
    for path in directory.iterdir():
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)
