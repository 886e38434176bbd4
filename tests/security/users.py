"""Several users on one machine: test bodies in mount namespaces of their own, as whoever they are to be."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
VICTIM, ATTACKER = 51_001, 51_002
"""Users that need no entry in passwd."""
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC = 0x1000, 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEEDED = dict.fromkeys(Path(one).resolve() for one in (ROOT, sys.prefix, sys.base_prefix))
_PLACES = [place for place in _NEEDED if not _NEEDED.keys() & set(place.parents)]
"""What the bodies need, wherever it lies."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="two users and mount namespaces; run as root")


def in_namespace(body: Callable[[], None]) -> None:
    """Run `body` in a child with a /tmp and a /dev/shm of its own; where it fails, the caller fails.

    The interpreter and the checkout can be reached by every user there, wherever they lie.
    """

    def inside() -> None:
        _mount_apart()
        body()

    _in_child(inside)


def as_user(uid: int, body: Callable[[], None]) -> None:
    """Run `body` in a child that is this user; where it fails, the caller fails."""

    def inside() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # A process that has changed its user is closed to it in /proc until it says otherwise.
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        os.environ["HOME"] = f"/tmp/home-{uid}"
        Path(os.environ["HOME"]).mkdir(mode=0o700, exist_ok=True)
        body()

    _in_child(inside)


def _in_child(body: Callable[[], None]) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_and_leave(body, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if said or status:
        pytest.fail(said or f"the child ended with status {status}", pytrace=False)


def _run_and_leave(body: Callable[[], None], writer: int) -> NoReturn:
    try:
        body()
    except BaseException:  # noqa: BLE001 - the outermost frame of this process
        os.write(writer, traceback.format_exc().encode(errors="replace")[-60_000:])
        os._exit(1)
    os._exit(0)


def _mount(*argv: str) -> None:
    subprocess.run(["mount", *argv], check=True)


def _mount_apart() -> None:
    if _LIBC.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("--make-rprivate", "/")
    closed: dict[Path, list[Path]] = {}
    for place in _PLACES:
        shut = [one for one in reversed(place.parents) if not one.stat().st_mode & 0o001]
        if shut:
            closed.setdefault(shut[0], []).append(place)
    for shut_place, needed in closed.items():
        held = []
        for number, place in enumerate(needed):
            aside = Path(tempfile.mkdtemp(prefix=f"hpcrun-security-{number}-"))
            _mount("--bind", str(place), str(aside))
            held.append((aside, place))
        _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(shut_place))
        for aside, place in held:
            place.mkdir(parents=True)
            _mount("--bind", str(aside), str(place))
            subprocess.run(["umount", str(aside)], check=True)
            aside.rmdir()
    for shared in (Path("/dev/shm"), Path("/tmp")):
        hidden = [place for place in _PLACES if place.is_relative_to(shared)]
        opened = [(os.open(place, os.O_PATH), place) for place in hidden]
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(shared))
        for descriptor, place in opened:
            place.mkdir(parents=True)
            # Its name leads to nothing any more; the kernel still knows what the descriptor stands for.
            source = f"/proc/self/fd/{descriptor}".encode()
            if _LIBC.mount(source, str(place).encode(), None, _MS_BIND | _MS_REC, None):
                raise OSError(ctypes.get_errno(), "mount", str(place))
            os.close(descriptor)
