"""The checkpoints of a directory as plain values, for people and programs to list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrun.checkpoint.commit import DAMAGED_PREFIX, LEFT_PREFIX, find_save_problem
from hpcrun.specs.saves import SAVE_FORMAT_VERSION, SavedCheckpoint, read_saved_checkpoints, sort_checkpoints


def describe_checkpoint(
    saved: SavedCheckpoint, problem: str | None, standing: str | None = None, path: str | None = None
) -> dict[str, Any]:
    """A checkpoint in plain values; `standing` says why the run does not resume from it."""
    return {
        "step": saved.step,
        "samples": saved.position,
        "world_size": saved.world_size,
        "attempt": saved.attempt,
        "format_version": SAVE_FORMAT_VERSION,
        "generation": saved.generation,
        "structure": saved.structure,
        "tier": saved.tier,
        "written": saved.written,
        "size_bytes": sum(saved.file_bytes) + saved.manifest_bytes,
        "state": "damaged" if problem else "complete",
        "problem": problem,
        "path": path or str(saved.path),
        "standing": standing,
    }


def list_checkpoints(checkpoints: Path) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The committed checkpoints, and what is damaged or was set aside, each with its problem."""
    saves, unreadable = read_saved_checkpoints(checkpoints)
    kinds = sort_checkpoints(checkpoints, saves)
    standing = {saved.path: "left: on a branch that is not resumed from" for saved in kinds.left}
    standing |= {
        saved.path: f"of another run ({saved.run_id})" if saved.run_id else "of an unknown run"
        for saved in kinds.strangers
    }
    steps = [
        describe_checkpoint(saved, find_save_problem(saved), standing.get(saved.path)) for saved in saves
    ]
    damaged = [{"path": str(save.path), "problem": save.problem} for save in unreadable]
    for prefix, problem in (
        (DAMAGED_PREFIX, "set aside when a restart found it damaged"),
        (LEFT_PREFIX, "set aside when another save of that step took its place"),
    ):
        damaged += [
            {"path": str(path), "problem": problem} for path in sorted(checkpoints.glob(f"{prefix}*"))
        ]
    return steps, damaged
