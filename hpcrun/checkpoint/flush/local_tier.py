"""The local tier: a node's own disk, where every save is one file with a small record beside it.

DIRECTORY/RUN/NODE/step-00000016.GENERATION.bin     the node's parts, one after the other
DIRECTORY/RUN/NODE/step-00000016.GENERATION.json    where each lies in it; without it the file is nothing

DIRECTORY is taken as the job names it; other users may be able to write there. What counts as a save of ours
is proved by its owner: RUN and NODE are directories, and the files in them regular files with one name, that
belong to this user and that nobody else may write, opened level by level without following links; and the
record names the run. Where RUN is another user's, RUN.RANDOM stands in for it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.flush.arena import escape_run_id
from hpcrun.checkpoint.flush.stall_watch import StallWatch
from hpcrun.checkpoint.format import PART_ALIGN, Part, align_size
from hpcrun.checkpoint.part_record import parse_checksummed, render_checksummed
from hpcrun.checkpoint.part_writer import write_image
from hpcrun.checkpoint.tier import CheckpointId, HeldPart, InventoryEntry, NodeShards, TierName
from hpcrun.errors import SiteError
from hpcrun.files import OwnedDirectory, UntrustedFileError, make_directories
from hpcrun.local_identity import expand_path

_ASIDE_SUFFIX = ".aside"
_PROBE_NAME = ".prove"


class LocalTier:
    """Keeps sealed parts on the node's own disk."""

    name: TierName = "local"

    def __init__(
        self,
        directory: str,
        run_id: str,
        node: str,
        written: Callable[[int], None] = lambda count: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`directory` may name variables of the environment, and begin with ~; SiteError for unknown ones.

        `written` gets the bytes of each write; `say` is told why saves are not where they usually are.
        """
        expanded = expand_path(directory)
        if "$" in expanded:
            raise SiteError(
                f"checkpoint.local: {directory}: names a variable that is not set on node {node};"
                " set it in the job's environment, or name the directory"
            )
        self._base, self._run_id, self._node = Path(expanded), run_id, node
        self._written, self._say, self._is_told = written, say, False
        self._watch = StallWatch()

    def with_watch(self, watch: StallWatch) -> LocalTier:
        """This, telling a watch what it is at."""
        self._watch = watch
        return self

    @property
    def folder(self) -> Path:
        """Where saves of this node lie, or usually would."""
        found = (files.path for files in self._folders())
        return next(found, self._base / escape_run_id(self._run_id) / self._node)

    def nodes(self) -> list[str]:
        """The nodes of which there may be saves here."""
        return sorted({name for run in self._runs() for name in run.names()})

    def store(self, load: NodeShards) -> dict[str, Any]:
        """Copy the parts into one file; their hashes are in them."""
        self._watch.at(f"{self._base} (checkpoint.local)")
        try:
            with self._made() as files:
                return self._store(load, files)
        except UntrustedFileError as error:
            raise SiteError(f"checkpoint.local: {error}") from None

    def prove(self) -> None:
        """Write and remove a file there; OSError or SiteError where that cannot be."""
        try:
            with self._made() as files:
                files.write_whole(_PROBE_NAME, b"\0")
                files.unlink(_PROBE_NAME)
        except UntrustedFileError as error:
            raise SiteError(f"checkpoint.local: {error}") from None

    def _store(self, load: NodeShards, files: OwnedDirectory) -> dict[str, Any]:
        for leftover in files.names():
            if leftover.endswith(_ASIDE_SUFFIX):
                files.unlink(leftover)
        stem = f"step-{load.stamp.step:08d}.{load.stamp.generation}"
        target, aside = f"{stem}.bin", f"{stem}{_ASIDE_SUFFIX}"
        held, position = [], 0
        try:
            descriptor = files.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                for one in load.parts:
                    write_image(descriptor, one.image, position, self._written)
                    held.append(HeldPart(one.number, target, position, one.part))
                    position += align_size(one.part.size_bytes, PART_ALIGN)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            files.rename(aside, target)
            parts = [asdict(part) for part in held]
            told = {"run": self._run_id, "stamp": asdict(load.stamp), "parts": parts}
            files.write_whole(f"{stem}.json", render_checksummed(told).encode())
        except OSError:
            for name in (aside, target):
                files.unlink(name)
            raise
        return {"path": str(files.path / target)}

    def holdings(self) -> list[InventoryEntry]:
        """What lies here whole, as far as names and sizes tell, the newest last."""
        found = [
            self._holding(files, name)
            for files in self._folders()
            for name in files.names()
            if name.startswith("step-") and name.endswith(".json")
        ]
        return sorted((one for one in found if one is not None), key=lambda one: one.stamp.step)

    def _holding(self, files: OwnedDirectory, record: str) -> InventoryEntry | None:
        name = f"{record.removesuffix('.json')}.bin"
        try:
            told = parse_checksummed(json.loads(files.read(record)))
            size = files.size_of(name)
            parts = [HeldPart(**{**one, "part": Part(**one["part"])}) for one in told["parts"]]
            stamp = CheckpointId(**told["stamp"])
        except (OSError, UntrustedFileError, ValueError, KeyError, TypeError):
            return None
        if told.get("run") != self._run_id or not parts:
            return None
        if size != max(one.at + one.part.size_bytes for one in parts):
            return None
        path = str(files.path / name)
        return InventoryEntry(
            stamp, "local", self._node, tuple(HeldPart(one.number, path, one.at, one.part) for one in parts)
        )

    def retain(self, generations: Collection[str]) -> None:
        """Let go of all but these generations and what no record speaks of; with none, also of the folder."""
        wanted = set(generations)
        for files in self._folders():
            for name in files.names():
                path = Path(name)
                if not name.startswith("step-") or path.suffix != ".bin":
                    continue
                record = path.with_suffix(".json").name
                if path.suffixes[0][1:] not in wanted or not files.has(record):
                    with contextlib.suppress(OSError):
                        files.unlink(record)
                        files.unlink(name)
        if not wanted:  # where something else is there, it stays
            runs = []
            for run in self._runs():
                run.remove_empty(self._node)
                runs.append(run.path.name)
            with contextlib.suppress(OSError), OwnedDirectory.below(self._base) as base:
                for one in runs:
                    base.remove_empty(one)

    def _runs(self) -> Iterator[OwnedDirectory]:
        """The directories of this run: the usual one, and those that stand in for it."""
        with contextlib.suppress(OSError), OwnedDirectory.below(self._base) as base:
            yield from base.owned_candidates(escape_run_id(self._run_id))

    def _folders(self) -> Iterator[OwnedDirectory]:
        """The directories of this node in them."""
        for run in self._runs():
            with contextlib.suppress(OSError, UntrustedFileError), run.folder(self._node) as files:
                yield files

    def _made(self) -> OwnedDirectory:
        for run in self._runs():
            if run.has(self._node):
                return run.folder(self._node)
        make_directories(self._base)
        with (
            OwnedDirectory.below(self._base) as base,
            base.open_or_substitute(escape_run_id(self._run_id), self._tell) as run,
        ):
            return run.folder(self._node, make=True)

    def _tell(self, text: str) -> None:
        if not self._is_told:
            self._say(f"checkpoint.local: {text}")
        self._is_told = True
