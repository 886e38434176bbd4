"""The lines of metrics.jsonl about saves, in words for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrun.units import format_bytes, format_duration

_QUIET_LEVELS = ("memory", "local", "parity")
"""Reached many times an hour; worth a line only where it fails."""


def is_durable_save(line: Mapping[str, Any]) -> bool:
    """Whether a line says that a step is in the run directory."""
    kind, level = line.get("kind"), line.get("level")
    return (kind == "save" and level in (None, "durable")) or (kind == "stored" and level == "durable")


def describe_save(line: Mapping[str, Any]) -> str:
    """What a line about a save says; empty for other lines, and for what is not worth telling."""
    kind, level, step = line.get("kind"), line.get("level"), line.get("step")
    if kind == "save" and level in (None, "durable"):
        return f"step {step}: saved{_format_seconds(line.get('seconds'), ' in')}"
    if kind == "stored" and level not in _QUIET_LEVELS:
        where = "" if level == "durable" else f" ({level})"
        return f"step {step}: saved{where}{_format_seconds(line.get('lag_s'), ' after')} beside training"
    if kind == "save_failed":
        return f"step {step}: was not saved ({level}): {line.get('why')}"
    if kind == "save_skipped":
        return f"step {step}: is not saved, the save before is still being stored ({line.get('why')})"
    if kind == "save_stalled":
        return f"step {step}: is held up ({level}): {line.get('why')}"
    if kind == "save_unchanged":
        return f"step {step}: warning: {line.get('why')}"
    if kind == "save_interval":
        every = line.get("every_s")
        often = format_duration(every) if isinstance(every, int | float) else "unknown"
        return f"saves are {often} apart from now on: {line.get('why')}"
    if kind == "flush":
        return f"step {step}: {_describe_flush(line)}{_format_seconds(line.get('seconds'), ' after')}"
    return ""


def describe_weights(line: Mapping[str, Any]) -> str:
    """What a line about the weights that a run begins with says."""
    dtypes, notes = line.get("dtypes"), line.get("notes")
    kinds = [f"{count} {dtype}" for dtype, count in dtypes.items()] if isinstance(dtypes, dict) else []
    hashes = "hashes checked" if line.get("is_hashed") else "no SHA256SUMS beside them"
    text = f"begins with weights of {line.get('source')}"
    text += f" ({', '.join(kinds)} tensors, kept in {line.get('kept')}; {hashes})"
    return "; ".join([text, *(map(str, notes) if isinstance(notes, list) else ())])


def _describe_flush(line: Mapping[str, Any]) -> str:
    done, size = line.get("done_bytes"), line.get("size_bytes")
    where = ", ".join(map(str, line.get("levels") or []))
    if not isinstance(size, int | float) or not size:
        return f"on its way to {where}"
    if not isinstance(done, int | float):
        return f"{format_bytes(size)} on their way to {where}"
    return f"{format_bytes(done)} of {format_bytes(size)} written ({min(1.0, done / size):.0%}), to {where}"


def _format_seconds(value: Any, word: str) -> str:
    return f"{word} {value:.1f} s" if isinstance(value, int | float) else ""
