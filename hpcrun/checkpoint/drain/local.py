"""The local level: a node's own disk, where every save is one file with a small record beside it.

DIRECTORY/RUN/NODE/step-00000016.GENERATION.bin     the node's parts, one after the other
DIRECTORY/RUN/NODE/step-00000016.GENERATION.json    where each lies in it; without it the file is nothing
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.format import PART_ALIGN, Part, padded
from hpcrun.checkpoint.levels import HeldPart, Holding, Level, Load, Stamp
from hpcrun.checkpoint.partrecord import parse_checked, render_checked
from hpcrun.checkpoint.write import write_image
from hpcrun.errors import SiteError
from hpcrun.specs.records import sync_directory, write_whole

_ASIDE = ".aside"


class LocalStation:
    """Keeps sealed parts on the node's own disk."""

    level: Level = "local"

    def __init__(
        self, directory: str, run_id: str, node: str, written: Callable[[int], None] = lambda count: None
    ) -> None:
        """`directory` may name variables of the environment, and begin with ~; SiteError for unknown ones.

        `written` gets the bytes of each write.
        """
        expanded = os.path.expanduser(os.path.expandvars(directory))  # noqa: PTH111 - with variables before
        if "$" in expanded:
            raise SiteError(
                f"checkpoint.local: {directory}: names a variable that is not set on node {node};"
                " set it in the job's environment, or name the directory"
            )
        self.folder = Path(expanded) / run_id.replace("/", "+") / node
        self._node, self._written = node, written

    def store(self, load: Load) -> dict[str, Any]:
        """Copy the parts into one file; their hashes are in them."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self.folder.glob(f"*{_ASIDE}"):
            leftover.unlink()
        target = self.folder / f"step-{load.stamp.step:08d}.{load.stamp.generation}.bin"
        aside = target.with_suffix(_ASIDE)
        held, position = [], 0
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for one in load.parts:
                    write_image(descriptor, one.image, position, self._written)
                    held.append(HeldPart(one.number, target.name, position, one.part))
                    position += padded(one.part.size_bytes, PART_ALIGN)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            aside.replace(target)
            told = {"stamp": asdict(load.stamp), "parts": [asdict(part) for part in held]}
            write_whole(target.with_suffix(".json"), render_checked(told))
            sync_directory(self.folder)
        except OSError:
            for path in (aside, target):
                path.unlink(missing_ok=True)
            raise
        return {"path": str(target)}

    def holdings(self) -> list[Holding]:
        """What lies here whole, as far as names and sizes tell, the newest last."""
        found = [self._holding(path) for path in self.folder.glob("step-*.json")]
        return sorted((one for one in found if one is not None), key=lambda one: one.stamp.step)

    def _holding(self, record: Path) -> Holding | None:
        try:
            told = parse_checked(json.loads(record.read_text(encoding="utf-8")))
            size = record.with_suffix(".bin").stat().st_size
            parts = [HeldPart(**{**one, "part": Part(**one["part"])}) for one in told["parts"]]
            stamp = Stamp(**told["stamp"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not parts or size != max(one.at + one.part.size_bytes for one in parts):
            return None
        path = str(record.with_suffix(".bin"))
        return Holding(
            stamp, "local", self._node, tuple(HeldPart(one.number, path, one.at, one.part) for one in parts)
        )

    def retain(self, generations: Collection[str]) -> None:
        """Let go of all but these generations and what no record speaks of; with none, also of the folder."""
        wanted = set(generations)
        for path in self.folder.glob("step-*.bin"):
            record = path.with_suffix(".json")
            if path.suffixes[0][1:] not in wanted or not record.exists():
                with contextlib.suppress(OSError):
                    record.unlink(missing_ok=True)
                    path.unlink()
        if not wanted:
            with contextlib.suppress(OSError):  # something else is there
                self.folder.rmdir()
                self.folder.parent.rmdir()
