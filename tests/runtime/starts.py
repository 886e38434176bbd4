"""Starts of a script in a directory of saves, each a process of its own: forked, so that torch is there."""

from __future__ import annotations

import io
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from hpcrun.errors import HpcrunError


def start(script: Callable[[], Any]) -> Any:
    """What a script gives, run by a process that then ends without any tidying up.

    What it was refused with comes as text; whatever it said on stderr follows a blank line there.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(_outcome(script), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pickle.loads(pipe.read() or pickle.dumps("it ended without a word"))
    os.waitpid(child, 0)
    return told


def _outcome(script: Callable[[], Any]) -> Any:
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            return script()
        except HpcrunError as error:
            return f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001 - the outermost frame of the process
            return traceback.format_exc() + said.getvalue()


@contextmanager
def running(script: Callable[[], Any]) -> Iterator[int]:
    """The process of a script that goes on until the body ends, and is killed then."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        kept = script()  # what it has made lives as long as the process
        os.write(writing, b"." if kept is not None else b"!")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"."
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
