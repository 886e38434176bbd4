"""SHA256SUMS beside the files of a directory: what `sha256sum -c` checks, written and checked here too."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from hpcrun.errors import UsageError
from hpcrun.files import open_regular, read_regular

SHA256SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
_SIGNATURES = frozenset(f"{SHA256SUMS_FILE}.{suffix}" for suffix in ("asc", "gpg", "sig", "minisig"))
_MOST_BYTES = 16 << 20
_THREADS = 4
"""Hashing leaves Python's lock; more would take the CPUs of other ranks."""


def write_sha256sums(directory: Path) -> None:
    """The hash of every file in a directory; `sha256sum -c SHA256SUMS` there checks them."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    lines = [f"{digest}  {name}\n" for name, digest in _digests(directory, names).items()]
    (directory / SHA256SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def check_sha256sums(directory: Path, *, share: int = 0, shares: int = 1) -> bool:
    """UsageError where files are not what a SHA256SUMS beside them says; False where there is none.

    Names are always compared, both ways; hashes of every `shares`-th file alone, for ranks that divide them.
    """
    expected = read_sha256sums(directory)
    if expected is None:
        return False
    complaints = _find_unlisted_files(directory, expected)
    missing = [name for name in expected if not (directory / name).is_file()]
    if missing:
        complaints.insert(0, f"lacks {_format_some(missing)}")
    if not complaints:
        digests = _digests(directory, list(expected)[share::shares])
        wrong = [name for name, digest in digests.items() if digest != expected[name]]
        complaints = [f"has other bytes in {_format_some(wrong)}"] if wrong else []
    if complaints:
        raise UsageError(
            f"{directory}: is not what its {SHA256SUMS_FILE} says: it {' and '.join(complaints)}; copy or"
            " export it"
            f" again, or make {SHA256SUMS_FILE} anew if you changed it yourself"
        )
    return True


def read_sha256sums(directory: Path) -> dict[str, str] | None:
    """From a file's name to its hash; None without a SHA256SUMS, UsageError for one that is damaged."""
    path = directory / SHA256SUMS_FILE
    try:
        text = read_regular(path, _MOST_BYTES, follow=True).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; export again, or remove it") from None
    sums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise UsageError(
                f"{path}:{number}: is not a hash and a file name, as sha256sum writes them; export again, or"
                " remove the file"
            )
        name = PurePosixPath(match[2])
        if name.is_absolute() or ".." in name.parts:
            raise UsageError(f"{path}:{number}: names {match[2]!r}, outside its directory; do not use it")
        if sums.setdefault(str(name), match[1].lower()) != match[1].lower():
            raise UsageError(f"{path}:{number}: gives {name} a second hash; export again")
    return sums


def _find_unlisted_files(directory: Path, expected: Mapping[str, str]) -> list[str]:
    """Files that are there and have no hash; hidden ones are other tools' and are not read."""
    listed = {*expected, SHA256SUMS_FILE, *_SIGNATURES}
    names = sorted(
        path.name
        for path in directory.iterdir()
        if path.name not in listed and not path.name.startswith(".") and not path.is_dir()
    )
    return [f"holds {_format_some(names)} besides"] if names else []


def _digests(directory: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(directory / name), names), strict=True))


def _digest(path: Path) -> str:
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; copy or export it again") from None


def _format_some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
