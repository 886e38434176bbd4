"""An attempt's communication settings: chosen, written down with their reasons, and given to its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.slurm.precheck import expand_place
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.records import read_json, write_whole
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.settings import Settings, write_settings
from hpcrun.tuning.advice import Situation, advise, installed_nccl
from hpcrun.tuning.report import read_reports

TABLE = "settings.tsv"
"""In an attempt's directory: node, variable, value there, value elsewhere; read by rank.sh and the shim."""


def advise_job(
    spec: JobSpec,
    cluster: ClusterSpec | None,
    nodes: tuple[str, ...] | None = None,
    *,
    here: bool = False,
    nccl: tuple[int, ...] | None = None,
) -> Settings:
    """What a job should have; `nodes` are those it runs on (None: not known yet), `here`: this is one of them."""
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
    nodes: tuple[str, ...],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Choose an attempt's settings and write them down; gives what every rank's environment gets.

    What the job or the shell has set stands. A profile that is wrong here costs the settings, not the job.
    """
    try:
        settings = advise_job(spec, cluster, nodes, here=True).but_for(environ, "environment")
    except UsageError as error:
        settings = Settings(notes=(f"no settings: {error}",))
    write_settings(attempt.settings, settings)
    write_whole(attempt.path / TABLE, "".join(f"{line}\n" for line in _table(settings)))
    return settings.environment()


def _table(settings: Settings) -> list[str]:
    usual = settings.environment()
    return [
        "\t".join((node.partition(".")[0], one.name, one.value, usual.get(one.name, "")))
        for node, of in settings.by_node.items()
        for one in of
    ]


def apply_here(attempt: Attempt, environ: MutableMapping[str, str], node: str = "") -> dict[str, Any]:
    """Set what holds on this node alone, unless somebody has set it differently; for the rank's record."""
    node = (node or os.uname().nodename).partition(".")[0]
    try:
        lines = (attempt.path / TABLE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    done = {}
    for where, name, value, usual in (line.split("\t") for line in lines if line.count("\t") == 3):
        if where == node and environ.get(name, usual) == usual:
            environ[name] = done[name] = value
    return {"settings": done} if done else {}


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
