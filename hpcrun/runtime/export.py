"""Exports saved steps to other formats, one tensor in memory at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.restore.exchange import atomic_directory
from hpcrun.errors import SiteError, UsageError
from hpcrun.runtime.dtype_casts import CastSummary, DtypeCaster
from hpcrun.runtime.hf_weights import write_hf
from hpcrun.runtime.model import parameter_shapes
from hpcrun.runtime.resharding import fill_from_chunks
from hpcrun.specs.base_model import CarriedFiles, HfBaseModel, copy_base_model, read_base_model
from hpcrun.specs.load import load_run_job, render_portable_job
from hpcrun.specs.records import write_atomically, write_json
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import SavedCheckpoint

EXPORT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
SOURCE_DTYPE = "source"
"""For --dtype: the type that each tensor had in the weights that the run began with."""
EXPORT_NOTE_FILE = "hpcrun.json"
"""Beside torch's files: the step and other facts that torch does not store."""

_Progress = Callable[[int], None]


@dataclass(frozen=True)
class ExportSummary:
    """What to report of an export besides its files."""

    casts: tuple[CastSummary, ...]
    carried: CarriedFiles
    notes: tuple[str, ...]


def export_hf(
    run: RunDir,
    saved: SavedCheckpoint,
    directory: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: _Progress = lambda _size: None,
) -> ExportSummary:
    """Write the weights of a saved step as a Hugging Face directory, which appears whole or not at all.

    Each tensor keeps the type it was saved in, unless `dtype` names another one or `source`: the type that
    each had in the weights that the run began with.
    """
    spec = load_run_job(run).spec.model
    if spec is None:
        raise UsageError(f"{run.id}: runs a command and has no model; there is nothing to export")
    base = read_base_model(run.path)
    types = _requested_dtypes(run, dtype, base)
    shapes = {f"model.{name}": shape for name, shape in parameter_shapes(spec).items()}
    casts = DtypeCaster("--dtype", may_round=True)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _read_tensors(saved, shapes, progress):
            short = name.removeprefix("model.")
            yield short, casts.cast(name, tensor, types.get(short, types.get("", tensor.dtype)))

    carried, notes = write_hf(spec, tensors(), directory, max_shard_bytes=shard_bytes, base=base)
    return ExportSummary(tuple(casts.all()), carried, notes)


def _requested_dtypes(run: RunDir, dtype: str | None, base: HfBaseModel | None) -> dict[str, torch.dtype]:
    """Return the types by a tensor's name; the empty name stands for all tensors."""
    if dtype is None:
        return {}
    if dtype in EXPORT_DTYPES:
        return {"": EXPORT_DTYPES[dtype]}
    if dtype != SOURCE_DTYPE:
        raise UsageError(f"--dtype {dtype}: not known; use {', '.join(EXPORT_DTYPES)} or {SOURCE_DTYPE}")
    if base is None:
        raise UsageError(
            f"--dtype {SOURCE_DTYPE}: {run.id} did not begin with weights of Hugging Face;"
            f" use {', '.join(EXPORT_DTYPES)}"
        )
    return {name: EXPORT_DTYPES[kind] for name, kind in base.dtypes.items() if kind in EXPORT_DTYPES}


def export_dcp(
    run: RunDir, saved: SavedCheckpoint, directory: Path, *, progress: _Progress = lambda _size: None
) -> list[str]:
    """Write a saved step as torch's distributed checkpoint, one file a tensor, without a process group.

    Returns the keys of the job that were left out of its spec.yaml because they do not describe the state.
    """
    with (
        GenerationReader(saved) as generation,
        atomic_directory(directory) as aside,
        copy_base_model(run.path, aside),
    ):
        state: dict[str, Any] = {
            name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            for name, tensor in generation.manifest.tensors.items()
        }
        # One file a tensor: torch's writer keeps all contents of a file in memory until it is written.
        writer = FileSystemWriter(aside, single_file_per_rank=False, thread_count=1, sync_files=True)
        try:
            # Torch warns of saving in a single process, which is intended here.
            with warnings.catch_warnings(action="ignore"):
                dcp_save(
                    state, storage_writer=writer, planner=_LazySavePlanner(generation, progress), no_dist=True
                )
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, OSError | SiteError):
                raise cause from None
            raise
        note = {
            name: getattr(saved, name)
            for name in ("step", "position", "world_size", "generation", "structure")
        }
        write_json(aside / EXPORT_NOTE_FILE, {"schema_version": 1, "run": run.id, **note})
        if not run.spec.exists():  # a script's saves
            return []
        text, left_out = render_portable_job(run.spec)
        write_atomically(aside / "spec.yaml", text)
    return left_out


class _LazySavePlanner(DefaultSavePlanner):
    """Reads each tensor only when torch writes it."""

    def __init__(self, generation: GenerationReader, progress: _Progress) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._generation, self._progress = generation, progress

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Read a whole tensor and verify it."""
        assert write_item.tensor_data is not None
        tensor = torch.empty(write_item.tensor_data.size, dtype=write_item.tensor_data.properties.dtype)
        fill_from_chunks(self._generation, {write_item.index.fqn: tensor})
        self._progress(tensor.nbytes)
        return tensor


def _read_tensors(
    saved: SavedCheckpoint, shapes: dict[str, tuple[int, ...]], progress: _Progress
) -> Iterator[tuple[str, Tensor]]:
    """Yield the verified tensors of a save; UsageError where it holds another model."""
    with GenerationReader(saved) as generation:
        stored = generation.manifest.tensors
        wrong = next((n for n in shapes if n not in stored or stored[n].shape != shapes[n]), None)
        if wrong is not None:
            shape = list(stored[wrong].shape) if wrong in stored else "nothing"
            raise UsageError(
                f"{saved.path}: has {shape} of {wrong}, but the run's spec.yaml says {list(shapes[wrong])};"
                " was it changed after the save?"
            )
        for name in shapes:
            tensor = torch.empty(stored[name].shape, dtype=getattr(torch, stored[name].dtype))
            fill_from_chunks(generation, {name: tensor})
            progress(tensor.nbytes)
            yield name, tensor
