"""Who and where this process is, also where the system does not say: user, home, directory, descriptors."""

from __future__ import annotations

import os
import pwd
import re
from contextlib import suppress
from pathlib import Path

from hpcrun.errors import SiteError

_USER = re.compile(r"\$(?:USER|LOGNAME|\{USER\}|\{LOGNAME\})(?![A-Za-z0-9_])")


def user_name(number: int | None = None) -> str:
    """The name of a user, by default ours; the number where it has none, as in a container."""
    number = os.geteuid() if number is None else number
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def owner_name(number: int) -> str:
    """The name of a user, for messages; `user 1000` where it has none."""
    name = user_name(number)
    return f"user {number}" if name == str(number) else name


def expand_path(text: str) -> str:
    """`~` and `$VARS` replaced; `$USER` is known without the variable. What is not known stays as it is."""
    # Unlike Path.expanduser, this one does not raise where there is no home.
    text = os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111
    return _USER.sub(lambda _: user_name(), text) if "$" in text else text


def working_directory() -> Path:
    """The working directory; SiteError where it has been removed, or cannot be reached."""
    try:
        return Path.cwd()
    except OSError as error:
        raise SiteError(
            f"the working directory is gone, or closed to you ({error.strerror}); cd to another one"
        ) from None


def absolute_path(path: Path | str) -> Path:
    """A path from the working directory; SiteError where it takes one and there is none."""
    path = Path(path)
    return path if path.is_absolute() else working_directory() / path


def display_path(path: Path) -> str:
    """A path as one would type it here: relative where it lies below the working directory."""
    with suppress(SiteError, ValueError):
        return str(path.relative_to(working_directory()))
    return str(path)


def open_missing_descriptors() -> None:
    """Have descriptors 0 to 2 where a process was started with one of them closed.

    The next file or socket that is opened would take its number, and be written over by whoever prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one.
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
