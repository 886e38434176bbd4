"""Captured host trees, each in one text file of tests/data/tuning/hosts, laid out again as files and links.

A line is `PATH = TEXT`, `PATH -> TARGET` (both from the root), `PATH <<` with the text up to a line `>>`,
`- PATH` (removes what an included file has put there), or `include FILE`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

HOSTS = Path(__file__).parents[1] / "data" / "tuning" / "hosts"


def lay_out(name: str, root: Path) -> Path:
    """Make the tree of a file below a root, and give the root."""
    root.mkdir(parents=True, exist_ok=True)
    lines = iter((HOSTS / f"{name}.txt").read_text(encoding="utf-8").splitlines())
    for line in lines:
        _lay(line, lines, root)
    return root


def _lay(line: str, lines: Iterator[str], root: Path) -> None:
    if not line.strip() or line.startswith("#"):
        return
    if line.startswith("include "):
        lay_out(line.removeprefix("include "), root)
    elif line.startswith("- "):
        path = root / line.removeprefix("- ")
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    elif " -> " in line:
        link, target = line.split(" -> ")
        place = root / link
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(root.resolve() / target, place.parent.resolve()))
    elif line.endswith(" <<"):
        inside = iter(lines.__next__, ">>")
        _write(root / line.removesuffix(" <<"), "\n".join(inside))
    else:
        name, _, text = line.partition(" = ")
        _write(root / name, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")
