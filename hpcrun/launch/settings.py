"""An attempt's communication settings: chosen, written down with their reasons, and given to its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.launch.nodevalues import render_table, table_of
from hpcrun.slurm.precheck import expand_place
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.records import read_json, write_whole
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.settings import Settings, write_settings
from hpcrun.tuning.advice import Situation, advise, installed_nccl
from hpcrun.tuning.host import nccl_files
from hpcrun.tuning.report import read_reports


def advise_job(
    spec: JobSpec,
    cluster: ClusterSpec | None,
    nodes: tuple[str, ...] | None = None,
    *,
    here: bool = False,
    nccl: tuple[int, ...] | None = None,
) -> Settings:
    """What a job should have; `nodes`: those it runs on, None: not known yet; `here`: this is one of them."""
    reports, notes = _reports(cluster)
    if nodes is not None:
        short = {node.partition(".")[0] for node in nodes}
        reports = {node: one for node, one in reports.items() if node.partition(".")[0] in short}
    own_python = spec.python is None and spec.container is None
    found = advise(
        Situation(
            cluster,
            spec.resources.nodes if nodes is None else len(nodes),
            reports,
            nccl or (installed_nccl() if own_python else None),
            tuple(name for _, name in socket.if_nameindex()) if here else None,
        )
    )
    settings = Settings(found.everywhere, found.by_node, (), (*notes, *found.notes))
    return settings.but_for(spec.env, "env of the job")


def settle(
    attempt: Attempt,
    spec: JobSpec,
    cluster: ClusterSpec | None,
    placement: Placement,
    environ: Mapping[str, str],
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Choose an attempt's settings and write them down; gives what every rank's environment gets.

    What the job or the shell has set stands, and `note` is told. A profile that is wrong here costs the
    settings, not the job.
    """
    try:
        nodes = placement.nodes
        here = os.uname().nodename.partition(".")[0] in {node.partition(".")[0] for node in nodes}
        settings = advise_job(spec, cluster, nodes, here=here).but_for(environ, "environment")
        if here:
            settings = settings.but_for(nccl_files(Path("/"), environ), "nccl.conf of this node")
    except UsageError as error:
        settings = Settings(notes=(f"no settings: {error}",))
        note(settings.notes[0])
    for lost in settings.overruled:
        if lost.value != lost.ours:
            note(str(lost))
    write_settings(attempt.settings, settings)
    write_whole(table_of(attempt), render_table(settings, placement))
    return settings.environment()


def _reports(cluster: ClusterSpec | None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What the doctor has told of the cluster's nodes; where that cannot be read, a note says so."""
    if cluster is None or cluster.network.reports is None:
        return {}, []
    path = Path(expand_place(cluster.network.reports))
    try:
        found = read_json(path)
        if found is None:
            return {}, [
                f"{path}: network.reports of the profile is not there (yet); nothing is known by node"
            ]
        return dict(read_reports(found, str(path))), []
    except OSError as error:
        return {}, [f"{path}: network.reports of the profile cannot be read: {error.strerror}"]
    except UsageError as error:
        return {}, [str(error)]
