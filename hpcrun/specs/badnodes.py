"""Bad nodes: the lists of nodes to keep away from, each with a reason and an end.

A list is a text file, one JSON object a line, that several people and programs append to:
`{"node": "n[03-04]", "reason": "ECC errors", "since": "2026-11-29T10:00:00Z", "until": null, "by": "ada"}`
`node` (a name or a host list) and `reason` are needed; without `until` an entry holds until it is removed.
Times are ISO 8601, local where they name no zone; a bare date as `until` counts whole. `#` begins a comment.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hpcrun.errors import SiteError, UsageError
from hpcrun.files import open_multiuser
from hpcrun.hostlist import expand_hosts, fold_hosts, sort_hosts
from hpcrun.specs.profiles import config_directories
from hpcrun.units import parse_time

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_FAR_S = 100 * 365 * 86400


@dataclass(frozen=True)
class BadNode:
    """One entry of a list; times in seconds since 1970, None where none is given."""

    nodes: tuple[str, ...]
    reason: str
    since: float | None = None
    until: float | None = None
    by: str = ""


@dataclass(frozen=True)
class BadNodeList:
    """The entries of all lists, and what could not be read."""

    entries: tuple[BadNode, ...] = ()
    notes: tuple[str, ...] = ()

    def active(self, now: float) -> dict[str, str]:
        """The nodes to keep away from now, with all their reasons."""
        reasons: dict[str, list[str]] = {}
        for entry in self.entries:
            if entry.until is None or now < entry.until:
                for node in entry.nodes:
                    reasons.setdefault(node, []).append(entry.reason)
        return {node: "; ".join(dict.fromkeys(texts)) for node, texts in reasons.items()}


def bad_node_files() -> dict[str, Path]:
    """Where the lists lie, `site` and `user`; they need not exist."""
    directories = config_directories()
    return {origin: directories[origin] / "bad-nodes.jsonl" for origin in ("site", "user")}


def load_bad_nodes(paths: Iterable[Path]) -> BadNodeList:
    """All entries of these lists; what is damaged is skipped and told, with file and line."""
    entries: list[BadNode] = []
    notes: list[str] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{path}: cannot be read ({error.strerror}), so its nodes are not avoided")
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                entries.append(_parse_entry(line))
            except UsageError as error:
                notes.append(f"{path}:{number}: {error}; the line is skipped")
    return BadNodeList(tuple(entries), tuple(notes))


def add_bad_node(path: Path, node: str, reason: str, until: float | None, *, now: float, by: str) -> None:
    """Append one entry; UsageError where node or reason are none, SiteError where it cannot be written."""
    entry = {
        "node": node,
        "reason": reason,
        "since": _render_instant(now),
        "until": None if until is None else _render_instant(until),
        "by": by,
    }
    line = json.dumps(entry, ensure_ascii=False)
    _parse_entry(line)  # nobody could read it back
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_synced_lines(path, line.encode() + b"\n")
    except OSError as error:
        raise SiteError(f"{path}: cannot be written: {error.strerror}") from None


def parse_expiry(text: str, now: float, where: str = "--until") -> float | None:
    """The end of an entry: a date, such as 2026-12-01, which counts whole, or a time from now (12h, 7d).

    None for UNLIMITED; `where` begins the error's line.
    """
    if _DATE.match(text.strip()):
        until = _parse_instant(text, where)
    else:
        limit = parse_time(text, where)
        if limit.warning:
            raise UsageError(limit.warning)
        if math.isinf(limit.seconds):
            return None
        until = now + limit.seconds
    if not now < until <= now + _FAR_S:
        raise UsageError(f"{where}: {text.strip()} does not lie ahead; write 12h, 7d, or a date to come")
    return until


def merge_excluded_nodes(
    exclude: str | None, bad: Mapping[str, str], known_nodes: Collection[str] | None
) -> tuple[str, tuple[str, ...]]:
    """The host list for --exclude of a job's own and the bad nodes (`active`), and what to tell the person.

    sbatch refuses a job that excludes a node that is gone, so names that are not among the known nodes are
    dropped; None: which nodes there are is not known.
    """
    own = expand_hosts(exclude or "", "resources.exclude")
    excluded = dict.fromkeys([*own, *bad])
    cluster_nodes = excluded if known_nodes is None else frozenset(known_nodes)
    gone = [node for node in own if node not in cluster_nodes]
    notes = [f"exclude: {fold_hosts(gone)}: no such node (any more); left out"] if gone else []
    reasons: dict[str, list[str]] = {}
    for node, reason in bad.items():
        where = reason if node in cluster_nodes else "no such node (any more); left out"
        reasons.setdefault(where, []).append(node)
    notes += [f"bad nodes: {fold_hosts(nodes)}: {reason}" for reason, nodes in reasons.items()]
    left = [node for node in excluded if node in cluster_nodes]
    return fold_hosts(left, suffixes=False) if left else "", tuple(notes)


def _parse_entry(line: str) -> BadNode:
    """UsageError says what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UsageError('is not an entry; write {"node": "n01", "reason": "ECC errors"}')
    nodes = sort_hosts(expand_hosts(_text(record, "node"), "node"))
    if not nodes:
        raise UsageError("node: names no node; write a name or a host list")
    since, until = (
        None if record.get(key) is None else _parse_instant(_text(record, key), key)
        for key in ("since", "until")
    )
    by = "" if record.get("by") is None else _text(record, "by")
    return BadNode(nodes, _text(record, "reason"), since, until, by)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        shown = "is missing" if key not in record else f"{json.dumps(value)[:60]} is not one line of text"
        raise UsageError(f"{key}: {shown}; write it in quotes")
    return value.strip()


def _parse_instant(text: str, where: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip()).astimezone()
        if _DATE.fullmatch(text.strip()):
            moment = (datetime.fromisoformat(text.strip()) + timedelta(days=1)).astimezone()
        return moment.timestamp()
    except (ValueError, OverflowError, OSError):
        form = "2026-12-01 or 2026-12-01T08:00:00+00:00"
        raise UsageError(f"{where}: {text.strip()!r} is not a time; write {form}") from None


def _render_instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def append_synced_lines(path: Path, line: bytes) -> None:
    """Append whole lines in one write, and sync; a line that is torn before them is ended."""
    descriptor = open_multiuser(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        # A line that somebody did not end would swallow this one.
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * torn + line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
