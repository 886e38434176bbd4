"""`python -m tests.lab up|shell|down|deps`: a lab that stays until it is taken down; what `make lab` runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from hpcrun import process
from hpcrun.errors import SiteError, UsageError
from tests.lab import packages
from tests.lab.cluster import CHECKOUT, Lab, Shape

RECORD = packages.CACHE / f"up-{hashlib.sha256(str(CHECKOUT).encode()).hexdigest()[:12]}.json"


def parse_racks(text: str) -> tuple[int, ...]:
    """`2x4` (two racks of four) or `4,2,2` as sizes of racks."""
    count, cross, size = text.partition("x")
    with contextlib.suppress(ValueError):
        racks = (int(size),) * int(count) if cross else tuple(int(word) for word in text.split(","))
        if racks and all(1 <= size <= 99 for size in racks) and sum(racks) <= 99:
            return racks
    raise UsageError(f"RACKS={text}: is no shape of at most 99 nodes; write 2x4 (two racks of four) or 4,2,2")


def running() -> dict[str, Any] | None:
    """The record of this checkout's lab while it runs."""
    try:
        record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return record if process.is_alive(process.ProcessId(*record["keeper"])) else None


def up(racks: str) -> None:
    """Start a lab in the background."""
    shape = parse_racks(racks)
    packages.overlay()
    if running():
        raise UsageError("this checkout's lab is up already; make lab-shell opens a shell on it")
    try:
        packages.overlay(packages.ACCOUNTING)
        accounting = ["accounting"]
    except SiteError as problem:
        print(f"lab: without accounting: {problem}", file=sys.stderr)
        accounting = []
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.lab", "keep", ",".join(map(str, shape)), *accounting],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=CHECKOUT,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdout
    words = keeper.stdout.readline().strip()
    if words != "ready":
        raise SiteError(words or "the lab ended at once; its message stands above")
    print(
        f"lab: {sum(shape)} nodes in {len(shape)} racks; make lab-shell opens a shell, make lab-down ends it"
    )
    keeper.returncode = 0  # It stays: no warning that it is still running when this process ends.


def keep(racks: str, *, accounting: bool) -> None:
    """Hold a lab until told to end; all of it dies with this process."""
    # Handled, not blocked or ignored: those two would be passed on to every process of the lab.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = Lab(Shape(parse_racks(racks)), accounting=accounting)
    with contextlib.suppress(KeyboardInterrupt), wanted as lab:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        me = process.identify_process(os.getpid())
        assert me
        shell = lab.login.space.command(["bash", "--norc"], CHECKOUT)
        RECORD.write_text(
            json.dumps({"keeper": me, "shell": shell, "environ": lab.environ}), encoding="utf-8"
        )
        print("ready", flush=True)
        # Whoever waits for the end of our output is not to wait for the end of the lab.
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        signal.pause()


def shell() -> None:
    """Become a shell on the login node."""
    record = running()
    if not record:
        raise UsageError("this checkout's lab is not up; make lab starts it")
    environ = record["environ"] | {"PS1": "[lab \\h \\w]# "}
    os.execvpe(record["shell"][0], record["shell"], environ)


def down() -> None:
    """End this checkout's lab, and return when it is gone."""
    record = running()
    if not record:
        print("lab: not up")
        return
    keeper = process.ProcessId(*record["keeper"])
    os.kill(keeper.pid, signal.SIGTERM)
    while process.is_alive(keeper):
        time.sleep(0.05)
    RECORD.unlink(missing_ok=True)
    print("lab: down")


def main(argv: list[str]) -> int:
    try:
        match argv:
            case ["up", racks]:
                up(racks)
            case ["keep", racks, *more]:
                keep(racks, accounting="accounting" in more)
            case ["shell"]:
                shell()
            case ["down"]:
                down()
            case ["deps"]:
                packages.install(packages.SLURM, packages.ACCOUNTING, packages.OPENMPI)
            case _:
                raise UsageError("usage: python -m tests.lab up RACKS | shell | down | deps")
    except (SiteError, UsageError) as problem:
        print(f"lab: {problem}", file=sys.stderr)
        return 2 if isinstance(problem, UsageError) else 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
