"""When the supervisor has last heard of the agents, for those that show it to others."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import RunDir

_WRITE_INTERVAL_S = 5.0


class HeartbeatAgeFile:
    """A small file that is written over and over, where somebody looks at it."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.heartbeat_ages
        self._is_wanted = run.telemetry.is_dir()
        self._shown = 0.0

    def show(self, silent_s: Mapping[str, float]) -> None:
        """Write down for how long nothing was heard of each node, if it is time to; what fails is let go."""
        now = time.monotonic()
        if not self._is_wanted or now - self._shown < _WRITE_INTERVAL_S:
            return
        self._shown = now
        ages = {node: round(age, 3) for node, age in silent_s.items()}
        aside = self._path.with_suffix(".new")
        # Not synced: it is worth nothing a moment later, and must not hold up the supervisor.
        with contextlib.suppress(OSError):
            aside.write_text(json.dumps({**_monotonic_now(), "ages": ages}), encoding="utf-8")
            aside.replace(self._path)


def read_heartbeat_ages(run: RunDir) -> dict[str, float]:
    """For how long each node has not been heard of; empty where nobody on this host has written it down."""
    record: Any = None
    with contextlib.suppress(UsageError, OSError):
        record = read_json(run.heartbeat_ages)
    try:
        now = _monotonic_now()
        # What a supervisor on another host has left says nothing any more, and its clock is another one.
        if record["host"] != now["host"]:
            return {}
        since = max(0.0, now["monotonic"] - float(record["monotonic"]))
        return {str(node): float(age) + since for node, age in record["ages"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}


def _monotonic_now() -> dict[str, Any]:
    """This moment by the one clock that all processes of a host share and nobody sets."""
    return {"host": os.uname().nodename, "monotonic": time.monotonic()}
