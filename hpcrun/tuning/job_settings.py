"""A job's settings: advice by its file, its profile and its nodes' reports; what is set already stands."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.local_identity import expand_path
from hpcrun.slurm.sbatch import submission_environment
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.records import read_json
from hpcrun.specs.settings import CommSetting, CommSettings
from hpcrun.tuning.advice import AdviceContext, advise_settings
from hpcrun.tuning.host.doctor_report import parse_doctor_reports
from hpcrun.tuning.lint.demands import is_demanded_by_platform
from hpcrun.tuning.lint.environment import VariableAssignment as Assigned
from hpcrun.tuning.lint.environment import effective_assignments, resolve_layers
from hpcrun.tuning.lint.script_exports import parse_script_exports
from hpcrun.tuning.policy.policy import PolicyRequest, choose_measured_settings, load_policy
from hpcrun.tuning.registry.nccl_grammar import forces_ll128
from hpcrun.tuning.registry.nccl_library import find_job_nccl_library
from hpcrun.tuning.registry.registry import Version

_FOLLOWED_VARIABLES = {"UCX_IB_TRAFFIC_CLASS": "NCCL_IB_TC", "UCX_IB_SL": "NCCL_IB_SL"}


def advise_job(
    spec: JobSpec,
    cluster: ClusterSpec | None,
    nodes: tuple[str, ...] | None = None,
    *,
    here: bool = False,
    nccl: Version | None = None,
    stands: Mapping[str, str] | None = None,
) -> CommSettings:
    """What a job should have; `nodes`: those it runs on, None: not known yet; `here`: this is one of them.

    What its own env sets stands, and is told as overruled. `stands`: what else is set and will be kept.
    """
    reports, notes = _load_reports(cluster)
    count = spec.resources.nodes if nodes is None else len(nodes)
    version = nccl or find_job_nccl_library(spec, cluster).version
    # What the job unsets is its own matter too: nothing is set in its place.
    own = {name: value or "" for name, value in spec.env.items()}
    demand = PolicyRequest(version, count, spec.ranks_per_node, {**(stands or {}), **own})
    measured, unmeasured = _policy_settings(cluster, demand)
    if nodes is not None:
        short = {node.partition(".")[0] for node in nodes}
        reports = {node: report for node, report in reports.items() if node.partition(".")[0] in short}
    advice = advise_settings(
        AdviceContext(
            cluster,
            count,
            reports,
            version,
            tuple(name for _, name in socket.if_nameindex()) if here else None,
            measured,
        )
    )
    settings = CommSettings(advice.everywhere, advice.by_node, (), (*notes, *advice.notes, *unmeasured))
    corrupting = find_corrupting_settings(own, version, "env of the job")
    return replace(settings, notes=(*settings.notes, *corrupting)).without_variables(own, "env of the job")


def preview_job_settings(
    spec: JobSpec, cluster: ClusterSpec | None, environ: Mapping[str, str], nccl: Version | None = None
) -> CommSettings:
    """What `submit` will set, before there is a job: what its environment will hold by then stands too.

    `environ` is what the job is submitted with.
    """
    deny = [*(cluster.env_deny if cluster else ()), *spec.env_deny]
    shell = submission_environment(environ, deny)[0]
    site_env = {} if cluster is None else {name: value or "" for name, value in cluster.env.items()}
    of_site = {} if cluster is None else {**site_env, **_exported_variables(cluster)}
    settings = advise_job(spec, cluster, nccl=nccl, stands={**shell, **of_site})
    corrupting = [
        *find_corrupting_settings(of_site, nccl, f"profile {cluster.name}" if cluster else ""),
        *find_corrupting_settings(shell, nccl, "this shell"),
    ]
    settings = replace(settings, notes=(*settings.notes, *corrupting))
    if cluster is not None:
        settings = settings.without_variables(site_env, f"env of profile {cluster.name}")
        settings = settings.without_variables(
            _exported_variables(cluster), f"setup of profile {cluster.name}"
        )
    return align_mpi_class(settings.without_variables(shell, "this shell"))


def find_corrupting_settings(environ: Mapping[str, str], nccl: Version | None, by: str) -> list[str]:
    """Notes on settings of others that may corrupt data and that no platform asks for."""
    given = {name: Assigned(name, value, by, by) for name, value in environ.items()}
    return [
        f"{name}={value} stands, as {by} has it: it turns LL128 on also where NCCL has it off, which corrupts"
        f" data in silence; where it is safe NCCL takes LL128 by itself; write {name}=^LL128"
        for name, value in environ.items()
        if forces_ll128(name, value, nccl) and not is_demanded_by_platform(name, value, given)
    ]


def align_mpi_class(settings: CommSettings) -> CommSettings:
    """Settings in which MPI's class and level follow the NCCL values that somebody else has set."""
    stands = {setting.name: setting for setting in settings.overruled}

    def led(setting: CommSetting) -> CommSetting:
        lead = stands.get(_FOLLOWED_VARIABLES.get(setting.name, ""))
        if lead is None or lead.value == setting.value or not re.fullmatch("[0-9]{1,3}", lead.value):
            return setting
        return replace(setting, value=lead.value, reason=f"as {lead.name} stands", source=lead.by)

    return replace(settings, everywhere=tuple(map(led, settings.everywhere)))


def _exported_variables(cluster: ClusterSpec) -> dict[str, str]:
    """What the profile's own lines set for every job."""
    assignments = effective_assignments(
        resolve_layers([parse_script_exports("\n".join(cluster.setup), "setup")])
    )
    return {
        name: "(computed)" if assignment.value is None else assignment.value
        for name, assignment in assignments.items()
    }


def _policy_settings(
    cluster: ClusterSpec | None, demand: PolicyRequest
) -> tuple[tuple[CommSetting, ...], tuple[str, ...]]:
    """What the cluster's policy supports, and what it does not; a note where it cannot be read."""
    if cluster is None or cluster.network.policy is None:
        return (), ()
    path = Path(expand_path(cluster.network.policy))
    if not path.exists():
        return (), (f"{path}: network.policy of the profile is not there (yet); nothing is measured",)
    try:
        return choose_measured_settings(load_policy(path), demand, str(path))
    except UsageError as error:
        return (), (f"network.policy of the profile is not used: {'; '.join(str(error).splitlines())}",)


def _load_reports(cluster: ClusterSpec | None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What the doctor has told of the cluster's nodes; where that cannot be read, a note says so."""
    if cluster is None or cluster.network.reports is None:
        return {}, []
    path = Path(expand_path(cluster.network.reports))
    try:
        content = read_json(path)
        if content is None:
            return {}, [
                f"{path}: network.reports of the profile is not there (yet); nothing is known by node"
            ]
        return dict(parse_doctor_reports(content, str(path))), []
    except OSError as error:
        return {}, [f"{path}: network.reports of the profile cannot be read: {error.strerror}"]
    except UsageError as error:
        return {}, [str(error)]
