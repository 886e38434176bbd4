"""Values of one node or one rank alone: a table that the supervisor writes and each rank reads."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.settings import CommSettings

BINDING_VARIABLES = ("HPCRUN_CPUS", "HPCRUN_NIC", "HPCRUN_GPU_UUID")
"""What a program's rank finds of its binding: its CPUs, the adapter and the GPU that are near to them."""


def render_node_table(settings: CommSettings, placement: Placement | None = None) -> str:
    """The table's text, with the bindings of a placement; a value that it cannot hold is left out."""
    usual = settings.environment()
    rows = [
        (node.partition(".")[0], setting.name, setting.value, usual.get(setting.name, ""))
        for node, of in settings.by_node.items()
        for setting in of
    ]
    for rank, binding in enumerate(placement.bindings if placement else ()):
        values = zip(
            BINDING_VARIABLES, (binding.cpus, binding.nic, binding.uuid) if binding else (), strict=False
        )
        rows += [(f"rank:{rank}", name, value, "") for name, value in values if value]
    return "".join("\t".join(row) + "\n" for row in rows if not any(c in "".join(row) for c in "\t\n"))


def apply_node_environment(
    attempt: Attempt, environ: MutableMapping[str, str], node: str = ""
) -> dict[str, Any]:
    """Set what holds on this node, unless somebody has set it differently; what was set, for its record."""
    node = (node or os.uname().nodename).partition(".")[0]
    try:
        lines = attempt.node_table.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    done = {}
    for where, name, value, usual in (line.split("\t") for line in lines if line.count("\t") == 3):
        if where == node and environ.get(name, usual) == usual:
            environ[name] = done[name] = value
    return {"settings": done} if done else {}
