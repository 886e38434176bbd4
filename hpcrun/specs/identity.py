"""A run's identity, or that of a script's saves: a uuid in job.json, with the place where it was made.

By the place a copy is noticed. Processes, memory, saves and objects are marked with the identity. A name
would not do: a copy of a run directory may have the same name, and runs of one name may lie under several
roots.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.specs.records import read_json, write_json

_RUN_ID = re.compile(r"[0-9a-f]{32}")
_FILE = "job.json"
IDENTITY_KEYS = ("schema_version", "run_id", "made_at", "copied_from")
"""What of job.json is the identity."""
RUN_SCHEMA_VERSION = 2
"""The version of a run directory: its files, events and metrics. It rises when older ones cannot be read."""


@dataclass(frozen=True)
class DirectoryLocation:
    """Where a run directory is: its path and, as a renamed directory keeps it, its inode."""

    host: str
    path: str
    device: int
    inode: int

    def is_same_inode(self, other: DirectoryLocation) -> bool:
        """Whether both may be one directory. A device's number says something on its own host alone."""
        return self.inode == other.inode and (self.device == other.device or self.host != other.host)


@dataclass(frozen=True)
class RunIdentity:
    """Which run a directory is."""

    run_id: str
    made_at: DirectoryLocation
    copied_from: tuple[str, ...] = ()
    """The identities of the runs that this was copied from, whose saves it has."""

    @classmethod
    def new(cls, folder: Path, run_id: str | None = None) -> RunIdentity:
        """One for a run that is made in this directory; `run_id` where it was chosen before."""
        return cls(run_id or new_run_id(), locate_directory(folder))

    def branched(self, folder: Path, run_id: str | None = None) -> RunIdentity:
        """One for a copy in this directory, which becomes a run of its own."""
        copied_from = (self.run_id, *self.copied_from)
        return RunIdentity(run_id or new_run_id(), locate_directory(folder), copied_from)

    def is_at(self, folder: Path) -> bool:
        """Whether the run itself is in this directory, and not a copy of it.

        A directory that was moved is still the run, unless the run is where it was made.
        """
        here = locate_directory(folder)
        if here.path == self.made_at.path:
            return True
        return here.is_same_inode(self.made_at) and not self._is_elsewhere(here)

    def _is_elsewhere(self, here: DirectoryLocation) -> bool:
        """Whether another directory lies where the run was made, and is that run."""
        folder = Path(self.made_at.path)
        try:
            there, identity = locate_directory(folder), read_run_identity(folder)
        except (OSError, UsageError):
            return False
        return (there.device, there.inode) != (here.device, here.inode) and bool(
            identity and identity.run_id == self.run_id
        )


def new_run_id() -> str:
    """One that nobody has."""
    return uuid.uuid4().hex


def locate_directory(folder: Path) -> DirectoryLocation:
    """Where a directory is now; OSError where there is none."""
    path = folder.resolve()
    status = path.stat()
    return DirectoryLocation(os.uname().nodename, str(path), status.st_dev, status.st_ino)


def parse_run_identity(record: Any) -> RunIdentity | None:
    """What job.json says; None for a run of before there were identities, UsageError for a damaged one."""
    if not isinstance(record, dict) or "run_id" not in record:
        return None
    run_id, place = record["run_id"], record.get("made_at") or {}
    try:
        made_at = DirectoryLocation(
            str(place["host"]), str(place["path"]), int(place["device"]), int(place["inode"])
        )
    except (TypeError, KeyError, ValueError, OverflowError):
        raise UsageError("made_at is not the place of a directory") from None
    copied_from = record.get("copied_from") or []
    if not isinstance(copied_from, list) or not all(map(_is_run_id, [run_id, *copied_from])):
        raise UsageError("run_id or copied_from is not 32 hexadecimal digits")
    return RunIdentity(run_id, made_at, tuple(copied_from))


def _is_run_id(value: Any) -> bool:
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


def check_run_schema(folder: Path) -> None:
    """UsageError where a run directory is of another version; of a damaged job.json others complain."""
    try:
        record = read_json(folder / _FILE) or {}
    except (UsageError, OSError):
        return
    version = record.get("schema_version") if isinstance(record, dict) else RUN_SCHEMA_VERSION
    if version == RUN_SCHEMA_VERSION:
        return
    found = f"schema version {json.dumps(version)[:60]}"
    if version is None:
        found = "no schema version (it is of an older hpcrun, or a part of a run)"
    maker = f" ({record['hpcrun']})" if isinstance(record.get("hpcrun"), str) else ""
    raise UsageError(
        f"{folder}: has {found}, and this hpcrun reads version {RUN_SCHEMA_VERSION}; use the hpcrun that made"
        f" it{maker}, or start a new run"
    )


def read_run_identity(folder: Path) -> RunIdentity | None:
    """The identity of the run in a directory; None without one, UsageError where job.json is damaged."""
    path = folder / _FILE
    record = read_json(path)
    try:
        return parse_run_identity(record)
    except UsageError as error:
        raise UsageError(f"{path}: is damaged: {error}") from None


def write_run_identity(folder: Path, identity: RunIdentity, **values: Any) -> None:
    """Write job.json anew: the identity, and these values."""
    write_json(folder / _FILE, {**values, **asdict(identity), "schema_version": RUN_SCHEMA_VERSION})


def directory_digest(folder: Path) -> str:
    """What stands for the identity of a directory that has none yet."""
    return hashlib.blake2b(os.fsencode(folder.absolute()), digest_size=16).hexdigest()
