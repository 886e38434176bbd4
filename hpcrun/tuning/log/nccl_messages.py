"""NCCL's own warnings by a few of their words: where each is printed, in which releases, and whose it is.

The table is nccl_messages.tsv, sorted, a row a message; benchmarks/log_knowledge.py makes it from NCCL's
source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from hpcrun.tuning.registry.registry import Version, parse_version
from hpcrun.typed_json import parse_typed

NcclSubsystem = Literal[
    "bootstrap",
    "socket",
    "ib",
    "nvls",
    "p2p",
    "shm",
    "topology",
    "cuda",
    "proxy",
    "plugin",
    "ras",
    "registration",
    "argument",
    "internal",
    "environment",
]
MessageOwner = Literal["ours", "theirs", "system"]
MessageRole = Literal["cause", "follows", "harmless"]
MESSAGE_TABLE = Path(__file__).with_name("nccl_messages.tsv")
_SHORT = 10
"""Letters of a fragment that tell a message where the line's file is unknown or of the same subsystem."""
_SURE = 20
"""Letters that do where the line's file is of another subsystem."""


@dataclass(frozen=True)
class NcclMessage:
    """One warning of NCCL's."""

    fragment: str
    """Words that tell it from all others; empty where the text is built when it is printed."""
    files: tuple[str, ...]
    first: Version
    last: Version
    """The newest release of the table that has it."""
    subsystem: NcclSubsystem
    whose: MessageOwner
    """ours: the program's or its settings'; theirs: NCCL's own check; system: driver, network or host."""
    role: MessageRole
    meaning: str
    """The entry of nccl_warnings.yaml; empty where it has none of its own."""


@cache
def load_nccl_messages() -> tuple[NcclMessage, ...]:
    """The whole table."""
    rows = MESSAGE_TABLE.read_text(encoding="utf-8").splitlines()
    return tuple(_parse_message(row.split("\t")) for row in rows if row and not row.startswith("#"))


def find_nccl_message(text: str, place: str) -> NcclMessage | None:
    """The message that a line is: the longest words that fit, of the line's own file where it can be."""
    here = subsystem_of_source(place) if place else None
    fitting = [
        message
        for message in load_nccl_messages()
        if message.fragment
        and message.fragment in text
        and (
            place in message.files
            or len(message.fragment) >= (_SHORT if here in (None, message.subsystem) else _SURE)
        )
    ]
    return max(fitting, key=lambda message: (place in message.files, len(message.fragment)), default=None)


def clear_message_cache() -> None:
    """Read the table anew at the next question."""
    for cached in (load_nccl_messages, subsystem_of_source, _places):
        cached.cache_clear()


@cache
def subsystem_of_source(place: str) -> NcclSubsystem | None:
    """What a file of NCCL's source is about; None where nothing is known of it and of its folder."""
    if not place:
        return None
    parts = place.split("/")
    subsystems = _places()
    for start in range(len(parts)):
        if subsystem := subsystems.get("/".join(parts[start:])):
            return subsystem
    folders = {name.rpartition("/")[0]: what for name, what in subsystems.items() if "/" in name}
    for end in range(len(parts) - 1, 0, -1):
        for start in range(end):
            if subsystem := folders.get("/".join(parts[start:end])):
                return subsystem
    return None


@cache
def _places() -> dict[str, NcclSubsystem]:
    counts: dict[str, list[NcclSubsystem]] = {}
    for message in load_nccl_messages():
        for name in message.files:
            counts.setdefault(name, []).append(message.subsystem)
    return {name: max(sorted({*votes}), key=votes.count) for name, votes in counts.items()}


def _parse_message(cells: list[str]) -> NcclMessage:
    values = dict(zip(NcclMessage.__dataclass_fields__, cells, strict=True))
    releases = {key: parse_version(values[key], MESSAGE_TABLE.name) for key in ("first", "last")}
    return parse_typed(NcclMessage, {**values, **releases, "files": values["files"].split(",")})
