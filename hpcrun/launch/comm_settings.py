"""An attempt's communication settings: chosen, written down with their reasons, and given to its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hpcrun.errors import UsageError
from hpcrun.launch.node_environment import render_node_table
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.records import write_atomically
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.settings import CommSetting, CommSettings, write_comm_settings
from hpcrun.tuning.host.node_report import read_nccl_conf_files
from hpcrun.tuning.job_settings import advise_job, align_mpi_class

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_comm_settings(
    attempt: Attempt,
    spec: JobSpec,
    cluster: ClusterSpec | None,
    placement: Placement,
    environ: Mapping[str, str],
    note: Callable[[str], None] = lambda _: None,
    interfaces: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Choose an attempt's settings and write them down; gives what every rank's environment gets.

    What the job or the shell has set stands, and `note` is told. A profile that is wrong here costs the
    settings, not the job. `interfaces`: the one that every node is reached at, where they were asked.
    """
    try:
        nodes = placement.nodes
        here = os.uname().nodename.partition(".")[0] in {node.partition(".")[0] for node in nodes}
        files = read_nccl_conf_files(Path("/"), environ) if here else {}
        settings = advise_job(spec, cluster, nodes, here=here, stands={**files, **environ})
        settings = settings.without_variables(environ, "environment").without_variables(
            files, "nccl.conf of this node"
        )
        settings = align_mpi_class(settings)
    except UsageError as error:
        settings = CommSettings(notes=(f"no settings: {error}",))
        note(settings.notes[0])
    settings = (
        _with_gloo_interface(settings, interfaces or {}, environ) if len(placement.nodes) > 1 else settings
    )
    for lost in settings.overruled:
        if lost.value != lost.ours:
            note(str(lost))
    write_comm_settings(attempt.settings, settings)
    write_atomically(attempt.node_table, render_node_table(settings, placement))
    return settings.environment()


def _with_gloo_interface(
    settings: CommSettings, interfaces: Mapping[str, str], environ: Mapping[str, str]
) -> CommSettings:
    """The same with gloo's interface where nobody has set it: by itself gloo believes the host's own name."""
    if (
        _GLOO_INTERFACE in environ
        or not interfaces
        or any(existing.name == _GLOO_INTERFACE for existing in settings.all())
    ):
        return settings

    def gloo_setting(interface: str) -> CommSetting:
        return CommSetting(
            _GLOO_INTERFACE, interface, "where the other nodes reach this one", "the nodes themselves"
        )

    if len(set(interfaces.values())) == 1:
        return replace(
            settings, everywhere=(*settings.everywhere, gloo_setting(next(iter(interfaces.values()))))
        )
    of_node = {
        node: (*settings.by_node.get(node, ()), gloo_setting(interface))
        for node, interface in interfaces.items()
    }
    return replace(settings, by_node={**settings.by_node, **of_node})
