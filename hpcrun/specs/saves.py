"""Which steps of a run are committed; readable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcrun.errors import UsageError
from hpcrun.specs.records import read_json

FORMAT_VERSION = 1
RECORD = "complete.json"
"""Written last into a step's directory: without it the step does not exist."""


@dataclass(frozen=True)
class Saved:
    """A committed step: where it lies and what is known of it without loading it."""

    path: Path
    step: int
    position: int
    """Training samples consumed, all ranks together."""
    world_size: int
    attempt: int


def saved_steps(checkpoints: Path) -> list[Saved]:
    """The committed steps of a run, oldest first; anything half-written is left out."""
    found = []
    for path in checkpoints.glob("step-*") if checkpoints.is_dir() else ():
        record = read_json(path / RECORD)
        if not isinstance(record, dict):
            continue
        if record.get("format_version", 0) > FORMAT_VERSION:
            raise UsageError(
                f"{path}: written in format {record['format_version']}, this hpcrun reads up to"
                f" {FORMAT_VERSION}; use a newer hpcrun"
            )
        found.append(Saved(path, record["step"], record["position"], record["world_size"], record["attempt"]))
    return sorted(found, key=lambda saved: saved.step)
