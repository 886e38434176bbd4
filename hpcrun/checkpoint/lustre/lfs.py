"""Lustre's own command: what it is asked, and what it answers.

Text in, object out: the parsers are pure and take what all versions since 2.10 print. Whatever goes wrong
is an LfsError, because nobody may depend on `lfs`: it can be missing, forbidden, or wait for a dead server.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpcrun import process
from hpcrun.errors import SiteError

_TIMEOUT_S = 20.0
_TARGET = re.compile(r"\[(MDT|OST):(\d+)\](?:\s+([A-Za-z]+))?$", re.A)
_SILENT = re.compile(r"(?:\S*-)?(OST|MDT)([0-9a-f]{4})(?:_UUID)?\s*:\s(.+)$", re.A)


class LfsError(SiteError):
    """`lfs` could not do something, or was not understood."""

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.number = number
        """The errno that it ended with, where that is known."""


@dataclass(frozen=True)
class LayoutComponent:
    """A stretch of a file that is laid out in one way."""

    start: int
    end: int | None
    """None: to the end of the file."""
    stripes: int
    """-1: all OSTs; 0: what the file system gives."""
    stripe_bytes: int
    pattern: str
    pool: str | None
    osts: tuple[int, ...]
    """Those that hold it; empty where none does yet."""


@dataclass(frozen=True)
class FileLayout:
    """How a file is laid out, or will be if it is made in a directory."""

    components: tuple[LayoutComponent, ...]

    @property
    def is_progressive(self) -> bool:
        """Whether it changes along the file."""
        return len(self.components) > 1

    @property
    def osts(self) -> tuple[int, ...]:
        """All that hold a piece of the file."""
        return tuple(sorted({ost for component in self.components for ost in component.osts}))

    def as_json(self) -> list[dict[str, Any]]:
        """As it is recorded."""
        return [asdict(component) for component in self.components]

    def __str__(self) -> str:
        return "; ".join(
            (
                "on the metadata server"
                if "mdt" in component.pattern
                else f"{_format_stripes(component.stripes)} of {component.stripe_bytes >> 10} KiB"
            )
            + (f" in pool {component.pool}" if component.pool else "")
            + (f" up to {component.end >> 10} KiB" if component.end is not None else "")
            for component in self.components
        )


def _format_stripes(stripes: int) -> str:
    return "stripes on all OSTs" if stripes < 0 else f"{stripes} stripe{'s' * (stripes != 1)}"


@dataclass(frozen=True)
class LustreTarget:
    """An object or metadata target: a file system of its own, that can be full while others are not."""

    kind: Literal["OST", "MDT"]
    index: int
    total: int
    """Bytes, or inodes where those were asked for."""
    free: int
    flags: str = ""
    """D degraded, N and R no new files, S out of space, I out of inodes."""
    problem: str | None = None
    """Why it gave no figures."""


@dataclass(frozen=True)
class LustreQuota:
    """What a user, group or project has used, and may; a limit of None is none."""

    used_bytes: int
    soft_bytes: int | None
    hard_bytes: int | None
    used_inodes: int
    soft_inodes: int | None
    hard_inodes: int | None
    is_exact: bool
    """False where a server did not answer: usage is then too low."""


def parse_getstripe(text: str) -> FileLayout:
    """What `lfs getstripe -y` prints, of a directory with -d; LfsError if it is something else."""
    import yaml

    try:
        document = yaml.load(text, Loader=yaml.BaseLoader)
        if not isinstance(document, dict):
            raise ValueError("no mapping")
        if "lcm_entry_count" not in document and "lcm_layout_gen" not in document:
            return FileLayout((_parse_component(document, 0, None),))
        entries = document.get("components") or [
            document[key] for key in document if re.fullmatch(r"component\d+", key, re.A)
        ]
        components = tuple(_parse_layout_entry(entry) for entry in entries)
        if not components:
            raise ValueError("no components")
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        first = " ".join(text.split())[:80]
        raise LfsError(f"`lfs getstripe -y` printed what is not a layout ({error}): {first!r}") from None
    return FileLayout(components)


def _parse_layout_entry(entry: dict[str, Any]) -> LayoutComponent:
    end = entry["lcme_extent.e_end"]
    return _parse_component(
        entry["sub_layout"], int(entry["lcme_extent.e_start"]), None if end == "EOF" else int(end)
    )


def _parse_component(values: dict[str, Any], start: int, end: int | None) -> LayoutComponent:
    """A plain layout; of a directory its keys lack the prefix."""
    plain = {key.removeprefix("lmm_"): value for key, value in values.items()}
    return LayoutComponent(
        start,
        end,
        int(plain["stripe_count"]),
        int(plain.get("stripe_size") or plain.get("extension_size") or 0),
        str(plain.get("pattern", "raid0")),
        plain.get("pool") or None,
        tuple(int(obj["l_ost_idx"]) for obj in plain.get("objects") or ()),
    )


def parse_lfs_df(text: str, unit: int = 1) -> list[LustreTarget]:
    """What `lfs df` prints without -h, each figure times `unit`; LfsError where there is no target at all."""
    rows = []
    for line in text.splitlines():
        words, target = line.split(), _TARGET.search(line)
        silent = _SILENT.match(line.strip())
        if target and len(words) >= 6 and all(word.isdigit() for word in words[1:4]):
            kind: Literal["OST", "MDT"] = "OST" if target[1] == "OST" else "MDT"
            flags = (target[3] or "").replace("f", "")
            rows.append(LustreTarget(kind, int(target[2]), int(words[1]) * unit, int(words[3]) * unit, flags))
        elif silent:
            kind = "OST" if silent[1] == "OST" else "MDT"
            rows.append(LustreTarget(kind, int(silent[2], 16), 0, 0, problem=silent[3]))
    if not rows:
        raise LfsError(f"`lfs df` printed no target: {' '.join(text.split())[:80]!r}")
    return rows


def parse_lfs_quota(text: str) -> LustreQuota:
    """What `lfs quota -u|-g|-p` prints without -h and -v; LfsError if it is something else."""
    after: list[str] | None = None
    for line in text.splitlines():
        if line.split()[:1] == ["Filesystem"]:
            after = []
        elif after is not None:
            after += line.split()
    # The mount point may hold blanks and, if long, stand on a line of its own; the figures come behind it.
    for first in range(1, len(after or ()) - 7):
        row = (after or [])[first : first + 8]
        figures = [word.strip("[]*") for word in (row[:3] + row[4:7])]
        if all(figure.isdigit() for figure in figures):
            used, soft, hard, files, soft_files, hard_files = map(int, figures)
            return LustreQuota(
                used << 10,
                soft << 10 or None,
                hard << 10 or None,
                files,
                soft_files or None,
                hard_files or None,
                is_exact="[" not in "".join(row),
            )
    raise LfsError(f"`lfs quota` printed no table: {' '.join(text.split())[:80]!r}")


def parse_lfs_project(text: str) -> int:
    """The project of a directory as `lfs project -d` prints it; 0 is none."""
    words = text.split()
    if not words or not words[0].isdigit():
        raise LfsError(f"`lfs project` printed no project: {' '.join(words)[:80]!r}")
    return int(words[0])


class LfsClient:
    """The command, as one asks it; LfsError for whatever goes wrong."""

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    def default_layout(self, directory: Path) -> FileLayout:
        """How a file will be laid out that is made in a directory."""
        return parse_getstripe(self._ask("getstripe", "-d", "-y", str(directory)))

    def layout(self, file: Path) -> FileLayout:
        """How a file is laid out."""
        return parse_getstripe(self._ask("getstripe", "-y", str(file)))

    def space(self, directory: Path, pool: str | None = None) -> list[LustreTarget]:
        """Bytes of every target; of a pool only its OSTs. A dead one is not waited for."""
        return parse_lfs_df(
            self._ask("df", "-l", *_pool_suffix(pool), str(directory), in_part=True), unit=1024
        )

    def inodes(self, directory: Path) -> list[LustreTarget]:
        """Inodes of every target."""
        return parse_lfs_df(self._ask("df", "-l", "-i", str(directory), in_part=True))

    def quota(self, directory: Path, kind: Literal["user", "group", "project"], number: int) -> LustreQuota:
        """What somebody may use of the file system of a directory."""
        option = {"user": "-u", "group": "-g", "project": "-p"}[kind]
        return parse_lfs_quota(self._ask("quota", option, str(number), str(directory), in_part=True))

    def project(self, directory: Path) -> int:
        """The project that a directory counts for."""
        return parse_lfs_project(self._ask("project", "-d", str(directory)))

    def create(self, file: Path, arguments: Sequence[str]) -> None:
        """Make an empty file that is laid out as the arguments of `setstripe` say."""
        self._ask("setstripe", *arguments, str(file))

    def _ask(self, *words: str, in_part: bool = False) -> str:
        """What it prints; with `in_part` also where it failed but printed something."""
        if shutil.which("lfs") is None:
            raise LfsError("there is no `lfs` on PATH", errno.ENOENT)
        try:
            done = process.run(["lfs", *words], timeout_s=self._timeout_s)
        except SiteError as error:
            raise LfsError(str(error)) from None
        if done.exit_code and not (in_part and done.stdout.strip()):
            output = " ".join((done.stderr.strip() or done.stdout.strip() or "it printed nothing").split())
            raise LfsError(f"`lfs {' '.join(words)}`: {output[:200]}", done.exit_code)
        return done.stdout


def _pool_suffix(pool: str | None) -> tuple[str, ...]:
    return ("-p", pool) if pool else ()
