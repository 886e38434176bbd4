"""A rank keeps to the CPUs that were decided for it, from its first moment on."""

from __future__ import annotations

import os
from typing import Any

from hpcrun.fabric.node_topology import format_cpu_list, parse_cpu_list
from hpcrun.specs.placement import Binding


def bind_process(binding: Binding | None) -> dict[str, Any]:
    """Bind this process as it was decided; what was found and what holds now, for the rank's record.

    Nothing is changed where the rank has come up without all of its CPUs: then somebody has bound it already.
    """
    before = os.sched_getaffinity(0)
    record: dict[str, Any] = {"before": format_cpu_list(before)}
    cpus = set(parse_cpu_list(binding.cpus)) if binding else set()
    if cpus and cpus < before:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            record["refused"] = error.strerror
    return {**record, "cpus": format_cpu_list(os.sched_getaffinity(0))}
