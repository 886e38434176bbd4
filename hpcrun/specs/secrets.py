"""Secrets: values for the ranks' environment, from files that only their owner may read."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hpcrun.errors import SpecError, SpecProblem

_LIMIT_BYTES = 65_536
"""More than this is another file than was meant; an environment takes 128 KiB a variable."""


def check_secret_files(secrets: Mapping[str, str]) -> list[SpecProblem]:
    """What is wrong with the files (name to path), without a word of what is in them."""
    return _read_all(secrets)[1]


def read_secrets(secrets: Mapping[str, str]) -> dict[str, str]:
    """The values by name, without the line break at the end; SpecError when a file is not as it should be."""
    values, problems = _read_all(secrets)
    if problems:
        raise SpecError(problems)
    return values


def _read_all(secrets: Mapping[str, str]) -> tuple[dict[str, str], list[SpecProblem]]:
    values, problems = {}, []
    for name, path in secrets.items():
        try:
            values[name] = _read_secret(Path(path))
        except OSError as error:
            text = f"{path}: cannot be read: {error.strerror}; write the value into it, then chmod 600 {path}"
            problems.append(SpecProblem(f"secrets.{name}", text))
        except ValueError as error:
            problems.append(SpecProblem(f"secrets.{name}", f"{path}: {error}"))
    return values, problems


def _read_secret(path: Path) -> str:
    """The value in one file; OSError, or ValueError with the reason why it is refused."""
    # Not to wait for the writer of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_owner(path, os.fstat(descriptor))  # of what is open here, whatever has the name by now
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(_LIMIT_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _LIMIT_BYTES:
        raise ValueError(f"is larger than {_LIMIT_BYTES // 1024} KiB; it is to hold one value")
    if b"\0" in data:
        raise ValueError("holds NUL bytes, which no environment can; it is to hold one value as text")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError("is not text in UTF-8; it is to hold one value as text") from None
    value = text.removesuffix("\n").removesuffix("\r")
    if not value.strip():
        raise ValueError(f"{'holds blanks only' if value else 'is empty'}; write the value into it")
    return value


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file; give a file that holds the value")
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"belongs to user {status.st_uid}, not to you ({os.geteuid()}); give a file of yours"
        )
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"has mode {mode:04o}, others than you may use it; run: chmod 600 {path}")
