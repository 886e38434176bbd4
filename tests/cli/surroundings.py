"""Runs many commands in one process's forks, each in odd surroundings; a program for test_surroundings.

Standard input holds a JSON list of [surroundings, arguments]; what became of each is printed as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from hpcrun.cli.main import VERBS, main

ALSO = (
    "hpcrun.chaos.inject",
    "hpcrun.submission.submit",
    "hpcrun.submission.checkpoint_plan",
    "hpcrun.launch.supervisor",
    "hpcrun.runs.postmortem",
    "hpcrun.runs.follow",
    "hpcrun.fabric.draw",
    "hpcrun.fabric.place",
    "hpcrun.checkpoint.restore.repair",
    "hpcrun.tuning.advice",
    "hpcrun.slurm.template",
    "hpcrun.data.tokenize",
)
"""What many verbs load only when they need it: here once."""
STANDARD = (
    "ClusterShell.NodeSet",
    "email.parser",
    "gzip",
    "http.server",
    "prometheus_client",
    "tarfile",
    "urllib.error",
    "urllib.request",
)
"""The interpreter may lie where another user cannot read it."""
MOST_S = 60
STRANGER = 51001
"""A user without an entry in passwd."""


def arrange(surroundings: str, error: int) -> None:
    """Make this process what it would be if it had been started there."""
    here = Path(tempfile.mkdtemp(dir=os.environ["PLACE"]))
    here.chmod(0o777)
    os.chdir(here)
    os.dup2(error, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    sink = os.open("/dev/full" if surroundings == "full" else os.devnull, os.O_WRONLY)
    if surroundings == "no reader":
        reader, sink = os.pipe()
        os.close(reader)
    os.dup2(sink, 1)
    closed = {"no output": [1], "no error": [2], "no input": [0], "none": [0, 1, 2]}.get(surroundings, [])
    for number in closed:
        os.close(number)
    names = ("stdin", "stdout", "stderr")
    for number, name in enumerate(names):
        mode = "r" if number == 0 else "w"
        stream = None if number in closed else open(number, mode, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if surroundings == "no directory":
        here.rmdir()
    if surroundings == "closed directory":
        here.chmod(0)
        os.setresuid(STRANGER, STRANGER, STRANGER)
    if surroundings == "no user":
        for name in ("HOME", "USER", "LOGNAME", "XDG_CONFIG_HOME"):
            os.environ.pop(name, None)
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)


def run(surroundings: str, arguments: list[str], place: Path) -> dict[str, Any]:
    """One command, in a child."""
    path = place / "error"
    error = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    child = os.fork()
    if child == 0:
        code: object = 99
        try:
            signal.alarm(MOST_S)
            arrange(surroundings, error)
            main(arguments)
        except SystemExit as leave:
            code = leave.code
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except BaseException as fault:  # noqa: BLE001 - it is what is looked for
            import traceback

            os.write(error, "".join(traceback.format_exception(fault)).encode())
        finally:
            os._exit(code if isinstance(code, int) else 98)
    _, status = os.waitpid(child, 0)
    os.close(error)
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "error": path.read_text(encoding="utf-8", errors="replace")}


if __name__ == "__main__":
    for module in (*(f"hpcrun.cli.{verb.module}" for verb in VERBS.values()), *ALSO, *STANDARD):
        importlib.import_module(module)
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    os.environ["PLACE"] = str(place)
    told = [run(surroundings, arguments, place) for surroundings, arguments in json.load(sys.stdin)]
    shutil.rmtree(place)
    print(json.dumps(told))
