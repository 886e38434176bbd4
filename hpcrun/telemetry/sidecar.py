"""The processes beside a run: each tells somebody else of it, and one looks after them until it is over."""

from __future__ import annotations

import contextlib
import importlib
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from hpcrun import process
from hpcrun.errors import UsageError
from hpcrun.files import open_for_append
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import RunDir

SIDECARS = {
    "exporter": ("hpcrun.telemetry.prometheus_exporter", "Exporter"),
    "tensorboard": ("hpcrun.telemetry.trackers", "TensorBoard"),
    "wandb": ("hpcrun.telemetry.trackers", "Wandb"),
    "hooks": ("hpcrun.telemetry.hooks", "Hooks"),
}
CONFIG_FILE = "orders.json"
"""What the supervisor wants of each, by its name; `about`: the run itself."""
TEXTFILE_SUFFIX = ".prom"
"""How the file for the node_exporter ends."""
ALL_DELIVERED = "all told"
"""What the supervisor reads when there is nothing more to tell."""
FINAL_DELIVERY_S = 45.0
"""At the end, for what is still to be told."""
_NICE = 10
_AGAIN_S = (1.0, 5.0, 25.0)
"""One that dies is started again after so long, and after that no more."""
_POLL_S = 0.5
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Meant for the run: that its supervisor is gone is what ends us."""


class TelemetrySidecar(Protocol):
    """One of them: `turn` does what there is to do now, again and again."""

    every_s: float

    def turn(self) -> None:
        """Look, and tell what is new."""

    def close(self) -> None:
        """The supervisor is gone: tell the rest."""


def main(run_dir: str, name: str) -> int:
    """Be the companion of this name, or without one the process that looks after all."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    run = RunDir(Path(run_dir))
    orders = read_json(run.telemetry / CONFIG_FILE)
    if not name:
        os.nice(_NICE)
        process.become_subreaper()
        _SidecarManager(run, [one for one in SIDECARS if one in orders]).keep()
        sys.stdout.write(ALL_DELIVERED)
        return 0
    process.die_with_parent()
    _redirect_stderr()
    module, kind = SIDECARS[name]
    companion = getattr(importlib.import_module(module), kind)(run, orders["about"], orders[name])
    _run_sidecar(companion)
    return 0


def _run_sidecar(companion: TelemetrySidecar) -> None:
    while True:
        companion.turn()
        if _wait_for_stdin_close(companion.every_s):
            companion.turn()
            companion.close()
            return


def _wait_for_stdin_close(wait_s: float) -> bool:
    """Wait so long; True at once when whoever started us has closed our stdin."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        return bool(selector.select(wait_s)) and not os.read(sys.stdin.fileno(), 4096)


class _SidecarManager:
    """Starts them, starts again what dies, and ends them when the run is over."""

    def __init__(self, run: RunDir, names: list[str]) -> None:
        self._run = run
        self._children = {name: self._start(name) for name in names}
        self._deaths = dict.fromkeys(names, 0)
        self._due: dict[str, float] = {}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        with open_for_append(self._log(name)) as log:
            words = ["-P", "-m", "hpcrun", "_beside", str(self._run.path), name]
            return subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=log)

    def _log(self, name: str) -> Path:
        return self._run.sidecar_log(name)

    def keep(self) -> None:
        """Until the supervisor is gone, and all has been told."""
        while not _wait_for_stdin_close(_POLL_S):
            for name, child in self._children.items():
                if name not in self._due and child.poll():
                    self._schedule_restart(name)
            for name in [name for name, due in self._due.items() if time.monotonic() > due]:
                del self._due[name]
                self._children[name] = self._start(name)
        self._drain()

    def _schedule_restart(self, name: str) -> None:
        number, why = self._deaths[name], f"{name} has failed{_last_log_line(self._log(name))}"
        self._deaths[name] += 1
        if number < len(_AGAIN_S):
            self._due[name] = time.monotonic() + _AGAIN_S[number]
            # The first is worth a line, and the last.
            if number == 0:
                print_to_console(f"{why}; it is started again, the run continues; log: {self._log(name)}")
        else:
            self._due[name] = float("inf")
            print_to_console(f"{why} {number + 1} times; it is not started again, the run continues")

    def _drain(self) -> None:
        for name in [name for name, due in self._due.items() if due < float("inf")]:
            self._children[name] = self._start(name)  # for its last words
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.close()
        deadline = time.monotonic() + FINAL_DELIVERY_S
        for name, child in self._children.items():
            try:
                code = child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print_to_console(
                    f"{name} did not come to an end in {FINAL_DELIVERY_S:g} s, and was ended;"
                    f" log: {self._log(name)}"
                )
                continue
            if code and self._due.get(name) != float("inf"):
                print_to_console(
                    f"{name} has failed at the end{_last_log_line(self._log(name))}; log: {self._log(name)}"
                )
        process.kill_tree(os.getpid())


def _last_log_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-50:]]
    printed = [line for line in lines if line]
    return f": {printed[-1][:300]}" if printed else ""


_console_fd = [2]
"""The supervisor's stderr."""


def _redirect_stderr() -> None:
    """What a companion and its libraries complain of is for its log; what it says is for people."""
    _console_fd[0] = os.dup(2)
    os.dup2(1, 2)


def print_to_console(text: str) -> None:
    """Tell whoever watches the run, in one line."""
    # A terminal that was closed must not end us.
    with contextlib.suppress(OSError):
        os.write(_console_fd[0], f"hpcrun: telemetry: {text}\n".encode())


def write_sidecar_log(text: str) -> None:
    """A line, or several, in the companion's own log."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    sys.stdout.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))
    sys.stdout.flush()


def load_sidecar_state(run: RunDir, name: str) -> dict[str, Any]:
    """What a companion has written down to go on from; empty without it, or where it is damaged."""
    try:
        record = read_json(run.sidecar_state(name))
    except UsageError:
        return {}
    return record if isinstance(record, dict) else {}
