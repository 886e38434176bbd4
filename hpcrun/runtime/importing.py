"""Imports states of other formats or runs as a committed generation, from which training resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpcrun.checkpoint.commit import begin_generation, commit_generation, discard_draft
from hpcrun.checkpoint.format import (
    CHUNK_BYTES,
    ITEM_BYTES,
    PART_ALIGN,
    ChunkSpec,
    Part,
    align_size,
    collect_tensors,
    compute_structure_digest,
    render_tensors,
)
from hpcrun.checkpoint.generation import GenerationReader, read_part_tail
from hpcrun.checkpoint.part_writer import write_part
from hpcrun.checkpoint.restore.exchange import SaveOwner, check_would_be_newest, copy_generation_in
from hpcrun.checkpoint.slices import split_slice
from hpcrun.errors import SiteError, UsageError
from hpcrun.runtime.dtype_casts import CastSummary, DtypeCaster
from hpcrun.runtime.export import EXPORT_DTYPES, EXPORT_NOTE_FILE
from hpcrun.runtime.hf_weights import HFWeights
from hpcrun.runtime.resharding import raw_bytes
from hpcrun.runtime.sharded_model import state_shapes
from hpcrun.runtime.torch_dcp import METADATA_FILE, TorchCheckpoint
from hpcrun.specs.base_model import CarriedFiles, copy_base_model, keep_base_model
from hpcrun.specs.hf_directory import (
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX_FILE,
    conversion_advice,
    find_pickled_weights,
)
from hpcrun.specs.job import JobSpec
from hpcrun.specs.saves import (
    COMMIT_RECORD,
    MAX_COUNT,
    SavedCheckpoint,
    UnreadableCheckpoint,
    read_saved_checkpoint,
)
from hpcrun.specs.sha256sums import check_sha256sums
from hpcrun.typed_json import WrongValue, parse_typed

_Progress = Callable[[int], None]
_MAX_RANKS = 1 << 20


def detect_source_format(source: Path) -> str:
    """Return `hpcrun`, `dcp` or `hf`, by the files in a directory; UsageError for anything else."""
    if not source.is_dir():
        raise UsageError(
            f"{source}: is not a directory; give one that `ckpt export`, torch or transformers made"
        )
    saved = read_saved_checkpoint(source)
    if isinstance(saved, SavedCheckpoint) or (saved is not None and (source / COMMIT_RECORD).exists()):
        return "hpcrun"
    if (source / METADATA_FILE).is_file():
        return "dcp"
    if (source / SAFETENSORS_FILE).is_file() or (source / SAFETENSORS_INDEX_FILE).is_file():
        return "hf"
    if find_pickled_weights(source):
        raise UsageError(f"{source}: has no safetensors; {conversion_advice(source)}")
    raise UsageError(
        f"{source}: cannot be imported: it has none of {COMMIT_RECORD} (hpcrun), {METADATA_FILE}"
        f" (torch's distributed checkpoint), {SAFETENSORS_FILE} or {SAFETENSORS_INDEX_FILE} (Hugging Face)"
    )


def import_hpcrun(
    source: Path,
    checkpoints: Path,
    job: JobSpec | None,
    step: int | None,
    progress: _Progress = lambda _size: None,
) -> ImportSummary:
    """Copy a committed generation and verify every byte; without a job any state is accepted."""
    saved = read_saved_checkpoint(source)
    if isinstance(saved, UnreadableCheckpoint):
        raise UsageError(f"{source}: is damaged: {saved.problem}; import another copy")
    assert saved is not None
    if step not in (None, saved.step):
        raise UsageError(f"--step {step}: {source} is of step {saved.step}; leave --step out")
    with GenerationReader(saved) as generation:
        stored = generation.manifest.tensors
    if job is not None:
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        _check_state(source, job, shapes, lambda name: stored[name].dtype)
    check_would_be_newest(checkpoints, saved.step)
    with copy_base_model(source, checkpoints.parent):
        return ImportSummary(copy_generation_in(saved, checkpoints, progress))


def import_dcp(
    source: Path,
    checkpoints: Path,
    job: JobSpec,
    step: int | None,
    progress: _Progress = lambda _size: None,
) -> ImportSummary:
    """Import a state that torch's distributed checkpoint holds under our names (model., optimizer.)."""
    check_sha256sums(source)
    checkpoint, note = TorchCheckpoint(source), _read_export_note(source)
    if note is not None and step not in (None, note.step):
        raise UsageError(f"--step {step}: {source} is of step {note.step}; leave --step out")
    number = step if note is None else note.step
    if number is None:
        raise UsageError(f"{source}: does not say of which step it is; give --step N")
    if checkpoint.others:
        raise UsageError(
            f"{source}: also holds {checkpoint.others[0]}, which is not a tensor; save it without"
        )
    shapes = checkpoint.shapes()
    needed = sum(math.prod(shape) * checkpoint.dtype(name).itemsize for name, shape in shapes.items())
    if needed > sum(path.stat().st_size for path in source.iterdir()):
        raise SiteError(f"{source}: is damaged: its tensors take more than its files hold")
    _check_state(source, job, shapes, lambda name: str(checkpoint.dtype(name)).removeprefix("torch."))
    if note is None:
        if job.train.gbs is None:
            raise UsageError("train.gbs: is not known, nor how many samples were consumed; set it in the job")
        note = _ExportNote(number, number * job.train.gbs, 1)
        # Random state belongs to a world of known size; without it a run begins with that of its seed.
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("rng.")}
    state = _ImportedState(number, note.position, note.world_size, shapes, checkpoint.dtype, checkpoint.read)
    with copy_base_model(source, checkpoints.parent):
        return ImportSummary(_write_state(state, checkpoints, progress))


def import_hf(
    source: Path,
    checkpoints: Path,
    job: JobSpec,
    step: int | None,
    progress: _Progress = lambda _size: None,
    dtype: str | None = None,
) -> ImportSummary:
    """Import weights alone as the state before the first step, as `model.weights` would load them.

    `dtype`: the type that training keeps them in; giving it allows values to be rounded.
    """
    if step not in (None, 0):
        raise UsageError(
            f"--step {step}: {source} holds weights alone, and no step but 0 begins without moments; leave"
            " --step out"
        )
    model, kept = job.model, EXPORT_DTYPES[job.train.kept_dtype]
    assert model is not None
    if dtype not in (None, job.train.kept_dtype):
        raise UsageError(
            f"--dtype {dtype}: a run of this job keeps weights in {job.train.kept_dtype} (train.precision);"
            " use that"
        )
    hashed = check_sha256sums(source)
    weights, casts = HFWeights(source), DtypeCaster("--dtype", may_round=dtype is not None)
    weights.check(model)
    weights.check_tied_head(model)
    shapes = state_shapes(model)

    def read(name: str) -> Tensor:
        if name.startswith("optimizer."):
            return torch.zeros(shapes[name], dtype=kept)
        short = name.removeprefix("model.")
        return casts.cast(short, weights.read(short), kept)

    with keep_base_model(source, checkpoints.parent, weights.layout.torch_types()) as carried:
        saved = _write_state(_ImportedState(0, 0, 1, shapes, lambda _name: kept, read), checkpoints, progress)
    return ImportSummary(saved, tuple(casts.all()), carried, tuple(weights.notes(model)), hashed)


@dataclass(frozen=True)
class ImportSummary:
    """The save made of a state, and what to report of it."""

    saved: SavedCheckpoint
    casts: tuple[CastSummary, ...] = ()
    carried: CarriedFiles | None = None
    notes: tuple[str, ...] = ()
    is_hashed: bool = True
    """Whether its files were compared with hashes that came with them."""


@dataclass(frozen=True)
class _ImportedState:
    """A state to be written, one tensor at a time."""

    step: int
    position: int
    world_size: int
    shapes: dict[str, tuple[int, ...]]
    dtype: Callable[[str], torch.dtype]
    read: Callable[[str], Tensor]


@dataclass(frozen=True)
class _ExportNote:
    """What an export of ours says next to torch's files; other fields are ignored."""

    step: int
    position: int
    world_size: int


def _read_export_note(source: Path) -> _ExportNote | None:
    path = source / EXPORT_NOTE_FILE
    try:
        note = parse_typed(_ExportNote, json.loads(path.read_text(encoding="utf-8")), allow_extra=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; export again, or remove it") from None
    except WrongValue as error:
        raise UsageError(
            f"{path}: makes no sense: {error}; export again, or remove it and give --step"
        ) from None
    counts = (note.step, note.position)
    if not all(0 <= count < MAX_COUNT for count in counts) or not 1 <= note.world_size <= _MAX_RANKS:
        raise UsageError(f"{path}: makes no sense; export again, or remove it and give --step")
    return note


def _check_state(
    source: Path, job: JobSpec, shapes: dict[str, tuple[int, ...]], dtype_of: Callable[[str], str]
) -> None:
    """UsageError unless a state holds just the job's tensors, each in its shape and type."""
    model = job.model
    if model is None:
        raise UsageError("the job runs a command and has no model; no state can be imported into it")
    there = {name: shape for name, shape in shapes.items() if not name.startswith("rng.")}
    for name in shapes.keys() - there.keys():
        if dtype_of(name) != "uint8" or len(shapes[name]) != 1:
            raise UsageError(f"{source}: {name} is not a random state; export or save it again")
    expected, dtype = state_shapes(model), job.train.kept_dtype
    for complaint, names in (
        ("lacks", [name for name in expected if name not in there]),
        ("also holds", [name for name in there if name not in expected]),
        ("has another shape of", [n for n in expected if n in there and there[n] != expected[n]]),
        ("has another type of", [name for name in there if dtype_of(name) != dtype]),
    ):
        if not names:
            continue
        first, rest = names[0], f" and {len(names) - 1} more" if len(names) > 1 else ""
        what = f": {list(there[first])} instead of {list(expected[first])}" if "shape" in complaint else ""
        what = f": {dtype_of(first)} instead of {dtype}" if "type" in complaint else what
        raise UsageError(f"{source}: {complaint} {first}{rest}{what}; import a state of this job's model")


def _write_state(state: _ImportedState, checkpoints: Path, progress: _Progress) -> SavedCheckpoint:
    """Write and commit a state, in as many parts as its world has ranks."""
    check_would_be_newest(checkpoints, state.step)
    owner = SaveOwner.for_next_start(checkpoints)
    draft = begin_generation(checkpoints, state.step, owner.attempt)
    try:
        parts, tails, start = list[Part](), [], 0
        for number in range(state.world_size):
            names = [name for at, name in enumerate(state.shapes) if at % state.world_size == number]
            pieces = [piece for name in names for piece in _pieces(state, name)]
            contents = _contents(state, names, progress)
            part = write_part(draft.file(0), draft.generation, number, pieces, contents, start=start)
            parts.append(part)
            tails.append(read_part_tail(draft.file(0), part, number, draft.generation))
            start += align_size(part.size_bytes, PART_ALIGN)
        tensors_of_all = collect_tensors(tails)
        return commit_generation(
            draft,
            parts,
            render_tensors(tensors_of_all),
            compute_structure_digest(tensors_of_all),
            step=state.step,
            position=state.position,
            world_size=state.world_size,
            attempt=owner.attempt,
            descent=owner.descent,
        )
    except BaseException:
        discard_draft(draft)
        raise


def _pieces(state: _ImportedState, name: str) -> Iterator[ChunkSpec]:
    """Cut a tensor into chunks that a reader can verify one by one."""
    shape, dtype = state.shapes[name], str(state.dtype(name)).removeprefix("torch.")
    for box in split_slice(shape, ITEM_BYTES[dtype], CHUNK_BYTES):
        yield ChunkSpec(name, dtype, shape, box.offsets, box.sizes)


def _contents(state: _ImportedState, names: list[str], progress: _Progress) -> Iterator[memoryview]:
    """Yield the bytes of the pieces, with one tensor in memory at a time."""
    for name in names:
        tensor = state.read(name)
        for piece in _pieces(state, name):
            slices = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            yield raw_bytes(tensor[slices].contiguous())
        progress(tensor.nbytes)
