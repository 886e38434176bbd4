"""Parts of a generation that lie whole in the run directory, though the generation itself does not.

A save that is damaged in one place, or was set aside for that, still has its other parts; one that was never
committed has those of the nodes whose workers have written theirs and said so. Together with what nodes hold
they may be all that there ever was.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.commit import DAMAGED_PREFIX
from hpcrun.checkpoint.format import DamagedError, Part, data_file_name, parse_manifest
from hpcrun.checkpoint.part_check import verify_part
from hpcrun.checkpoint.part_record import parse_checksummed
from hpcrun.checkpoint.restore.sources import DirectoryCopy, identify_generation
from hpcrun.checkpoint.restore_plan import SHARED_NODE
from hpcrun.checkpoint.tier import CheckpointId, HeldPart, InventoryEntry


def find_intact_parts(
    checkpoints: Path, stamp: CheckpointId, numbers: Collection[int], *, prove: bool
) -> InventoryEntry | None:
    """Those of the wanted parts that are whole in some directory of their step; None where none is.

    `prove`: read all of them. Otherwise their ends and lists of chunks are looked at, and whoever loads them
    sees to the rest.
    """
    generation, found = bytes.fromhex(stamp.generation), dict[int, HeldPart]()
    for folder in _step_directories(checkpoints, stamp.step):
        for number, part in _list_claimed_parts(folder, stamp):
            if number in found or number not in numbers:
                continue
            held = HeldPart(number, str(folder / data_file_name(part.file)), part.start, part)
            with suppress(DamagedError):
                verify_part(held, generation, ends_only=not prove, shared=True)
                found[number] = held
    parts = tuple(found[number] for number in sorted(found))
    return InventoryEntry(stamp, "durable", SHARED_NODE, parts) if parts else None


def _step_directories(checkpoints: Path, step: int) -> list[Path]:
    """Where files of a step may lie: committed, set aside, and never committed."""
    name = f"step-{step:08d}"
    patterns = (name, f"{DAMAGED_PREFIX}{name}.*", f".{name}.*")
    return [path for pattern in patterns for path in sorted(checkpoints.glob(pattern)) if path.is_dir()]


def _list_claimed_parts(folder: Path, stamp: CheckpointId) -> Iterator[tuple[int, Part]]:
    """The parts of this generation that a directory claims to have."""
    copy = DirectoryCopy(folder)
    saved, manifest = copy.record(), copy.manifest() or b""
    is_told = saved is not None and saved.generation == stamp.generation
    if saved is not None and is_told and xxh3_64_hexdigest(manifest) == saved.manifest_hash:
        yield from enumerate(parse_manifest(manifest).parts)
        return
    if not folder.name.startswith("."):
        if identify_generation(folder) == stamp.generation:
            yield from copy.parts(bytes.fromhex(stamp.generation))
        return
    # What is half written may look whole: only what its worker has synced and recorded counts.
    for path in sorted(folder.glob("parts-*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = parse_checksummed(json.loads(path.read_text(encoding="utf-8")))
            if values["stamp"] == asdict(stamp):
                yield from [(number, Part(*fields)) for number, _, *fields in values["parts"]]
