"""The few settings that a job should have on a cluster, each with reason and source."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrun.local_identity import expand_path
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.fields import set_variables
from hpcrun.specs.settings import CommSetting, CommSettings
from hpcrun.tuning.fabrics import FabricKind, find_fabric_kind
from hpcrun.tuning.host.doctor_report import ports_of_report
from hpcrun.tuning.host.gids import AUTOMATIC_GID_SINCE, find_routable_family, find_routable_gid_index
from hpcrun.tuning.lint.environment import VariableAssignment as Assigned
from hpcrun.tuning.lint.lint import check_assignment
from hpcrun.tuning.lint.traffic_classes import check_class_agreement, decode_traffic_class
from hpcrun.tuning.registry.device_names import render_exact_names
from hpcrun.tuning.registry.nccl_grammar import FORCED_LL128_DANGER, forces_ll128
from hpcrun.tuning.registry.registry import Version, format_version, required_nccl_release

_FAMILY_SINCE, _RANGE_SINCE, _TOPOLOGY_SINCE = "NCCL 2.21", "NCCL 2.21", "NCCL 2.6"
_OF_VERBS = ("NCCL_IB_", "UCX_IB_", "UCX_NET_DEVICES")
_UNREAD: Mapping[str, tuple[str, ...]] = {
    "infiniband": ("NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS", "NCCL_IB_ADDR_"),
    "efa": _OF_VERBS,
    "tcp": _OF_VERBS,
}
"""Prefixes of variables without effect, by transport: classes and addresses are for RoCE alone."""
_NOTHING = "nothing to set: the profile names no interface, devices or traffic class"
_FAMILIES = {"ipv4": "AF_INET", "ipv6": "AF_INET6"}


@dataclass(frozen=True)
class AdviceContext:
    """A job on a cluster, as far as it matters to its traffic."""

    cluster: ClusterSpec | None
    nodes: int = 2
    """The number of nodes; 0: not known."""
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the doctor has told of nodes, by node."""
    nccl: Version | None = None
    interfaces: tuple[str, ...] | None = None
    """Those of this host, where it is one of the job's nodes."""
    measured: tuple[CommSetting, ...] = ()
    """Tuning that the measured policy supports for such a job: the figures as reason, its row as source.

    Those of one source were measured together: all of them are set, or none.
    Nothing else may set a variable that is no fact of the system; what is refused here, a note tells."""


def advise_settings(situation: AdviceContext) -> CommSettings:
    """System facts, from the profile, the kind of fabric and the nodes; UsageError for no such fabric.

    Tuning comes from measurements alone: nothing is set because others have set it.
    """
    facts = _system_facts(situation)
    tuning, refused = _split_measured(situation, {setting.name for setting in facts.all()})
    measured = {setting.name for setting in tuning}
    notes = (
        note
        for note in facts.notes
        if note.partition(" is not set: ")[0] not in measured and not (tuning and note == _NOTHING)
    )
    return CommSettings((*facts.everywhere, *tuning), facts.by_node, (), (*notes, *refused))


def _system_facts(situation: AdviceContext) -> CommSettings:
    cluster = situation.cluster
    if cluster is None:
        return CommSettings(notes=("there is no profile of the cluster, so nothing is known to be set",))
    if situation.nodes == 1:
        return CommSettings(notes=("one node: no traffic between nodes, so nothing is set for it",))
    network = cluster.network
    kind = _fabric_kind(cluster)
    notes: list[str] = []
    if network.interface and not _has_interface(situation, network.interface):
        notes.append(f"network.interface of the profile, {network.interface}, is not on this node; left out")
    if kind is not None and kind.has_script:
        return CommSettings(
            tuple(_advise_interface(situation)), {}, (), (*notes, *kind.notes, *_unmeasured(kind))
        )
    advised = (
        *_advise_interface(situation),
        *_advise_devices(cluster, network.hcas, "profile: network.hcas"),
        *_advise_traffic_classes(cluster, kind),
        *_advise_address_family(situation),
        *_advise_fabric_facts(kind),
    )
    everywhere, late = _split_by_version(advised, situation.nccl)
    everywhere, idle = _split_by_effect(everywhere, kind)
    by_node, node_notes = _advise_per_node(situation)
    by_node = {node: tuple(_split_by_effect(of, kind)[0]) for node, of in by_node.items()}
    by_node = {node: of for node, of in by_node.items() if of}
    notes += [
        *late,
        *idle,
        *node_notes,
        *_class_disagreement_notes(cluster, everywhere),
        *(kind.notes if kind else ()),
    ]
    if not everywhere and not by_node:
        notes.insert(0, _NOTHING)
    return CommSettings(tuple(everywhere), by_node, (), tuple(dict.fromkeys([*notes, *_unmeasured(kind)])))


def _fabric_kind(cluster: ClusterSpec) -> FabricKind | None:
    named = cluster.network.fabric
    return find_fabric_kind(named, f"profile {cluster.name}: network.fabric") if named else None


def _split_measured(situation: AdviceContext, facts: Collection[str]) -> tuple[list[CommSetting], list[str]]:
    """What is measured and may be set; and what may not, with the reason."""
    kind = _fabric_kind(situation.cluster) if situation.cluster else None
    kept, notes = _split_by_version(situation.measured, situation.nccl)
    allowed, lost = (
        [],
        {setting.source: setting.name for setting in situation.measured if setting not in kept},
    )
    for setting in kept:
        if kind is not None and kind.has_script:
            why = f"the script of {kind.title} sets it, and its checker refuses others"
        elif setting.name in facts:
            why = "it is a fact of the system here, not a matter of tuning"
        elif not (setting.reason and setting.source):
            why = "it names no sweep and no figures"
        else:
            why = _objection(setting, situation.nccl)
        if why:
            notes.append(f"{setting.name}={setting.value}, measured, is left out: {why}")
            lost[setting.source] = setting.name
        else:
            allowed.append(setting)
    for setting in allowed:
        if setting.source in lost:
            why = f"it was measured together with {lost[setting.source]}"
            notes.append(f"{setting.name}={setting.value}, measured, is left out: {why}")
    return [setting for setting in allowed if setting.source not in lost], notes


def _objection(setting: CommSetting, nccl: Version | None) -> str:
    """What speaks against a value; empty: nothing."""
    if forces_ll128(setting.name, setting.value, nccl):
        return FORCED_LL128_DANGER
    faults = check_assignment(Assigned(setting.name, setting.value, "measured", setting.source), nccl)
    return "; ".join(fault.message for fault in faults if fault.severity == "error")


def _split_by_effect(
    settings: Sequence[CommSetting], kind: FabricKind | None
) -> tuple[list[CommSetting], list[str]]:
    """Those that anybody reads on such a fabric; the others are told."""
    starts = _UNREAD.get(kind.transport, ()) if kind else ()
    idle = [setting for setting in settings if setting.name.startswith(starts)]
    notes = [
        f"{setting.name} is left out: on {kind.title} nothing reads it ({setting.source})"
        for setting in idle
        if kind is not None
    ]
    return [setting for setting in settings if setting not in idle], notes


def _has_interface(situation: AdviceContext, interface: str) -> bool:
    """Whether an interface may be named: libraries give up where it is missing."""
    return situation.interfaces is None or interface in situation.interfaces


def _advise_interface(situation: AdviceContext) -> Iterator[CommSetting]:
    assert situation.cluster is not None
    name, source = situation.cluster.network.interface, "profile: network.interface"
    if name is None or not _has_interface(situation, name):
        return
    reason = "the interface between nodes; `=` so that no longer name is taken too"
    yield CommSetting("NCCL_SOCKET_IFNAME", render_exact_names([name]), reason, source)
    yield CommSetting("GLOO_SOCKET_IFNAME", name, "the same for gloo", source)
    if situation.cluster.mpi.library == "openmpi":
        yield CommSetting("OMPI_MCA_btl_tcp_if_include", name, "the same for Open MPI's TCP", source)


def _advise_devices(
    cluster: ClusterSpec, hcas: Sequence[str], source: str, why: str = "the adapters for jobs"
) -> Iterator[CommSetting]:
    if hcas:
        reason = f"{why}; `=` so that mlx5_1 does not take mlx5_10"
        yield CommSetting("NCCL_IB_HCA", render_exact_names(hcas), reason, source)
        if cluster.mpi.library == "openmpi":
            names = ",".join(f"{hca}:1" for hca in hcas)
            yield CommSetting("UCX_NET_DEVICES", names, "the same adapters for MPI over UCX", source)


def _advise_traffic_classes(cluster: ClusterSpec, kind: FabricKind | None) -> Iterator[CommSetting]:
    network, transport = cluster.network, kind.transport if kind else ""
    tc, source = network.traffic_class, "profile: network.traffic_class"
    if tc is None and kind is not None and transport == "roce":
        tc, source = kind.traffic_class, f"fabric {kind.name}: {kind.source}"
    if tc is not None:
        reason = (
            f"{decode_traffic_class(tc)}: the class that switches keep lossless; NCCL would take 0,"
            " best effort"
        )
        yield CommSetting("NCCL_IB_TC", str(tc), reason, source)
        if cluster.mpi.library == "openmpi":
            yield CommSetting("UCX_IB_TRAFFIC_CLASS", str(tc), "the same class for MPI over UCX", source)
    level, source = network.service_level, "profile: network.service_level"
    if level is None and kind is not None and kind.service_level is not None:
        level, source = kind.service_level, f"fabric {kind.name}: {kind.source}"
    if level is not None:
        yield CommSetting("NCCL_IB_SL", str(level), "the service level that the site routes jobs on", source)
        if cluster.mpi.library == "openmpi":
            yield CommSetting("UCX_IB_SL", str(level), "the same for MPI over UCX", source)


def _advise_address_family(situation: AdviceContext) -> Iterator[CommSetting]:
    assert situation.cluster is not None
    network = situation.cluster.network
    if network.address_family is not None:
        reason = "the adapters' addresses are of this family; NCCL finds the index of one by itself"
        value = _FAMILIES[network.address_family]
        source = "profile: network.address_family"
        yield CommSetting("NCCL_IB_ADDR_FAMILY", value, reason, source, _FAMILY_SINCE)
    else:
        yield from _family_of_nodes(situation)
    if network.address_range is not None:
        reason = "adapters have addresses in several networks, and this is the one between nodes"
        source = "profile: network.address_range"
        yield CommSetting("NCCL_IB_ADDR_RANGE", network.address_range, reason, source, _RANGE_SINCE)
    if network.nccl_topology is not None:
        reason = "virtual machines hide which adapter is near which GPU; this file says it"
        source = "profile: network.nccl_topology"
        yield CommSetting(
            "NCCL_TOPO_FILE", expand_path(network.nccl_topology), reason, source, _TOPOLOGY_SINCE
        )


def _family_of_nodes(situation: AdviceContext) -> Iterator[CommSetting]:
    """IPv6, where that alone gives every adapter of every node an address that can be routed."""
    ports = [port for node in situation.reports for port in _used_ports(situation, node)]
    if find_routable_family(ports) == "AF_INET6":
        reason = "the adapters have IPv6 addresses only; by itself NCCL would take a link-local one"
        source = "doctor's reports of the nodes"
        yield CommSetting("NCCL_IB_ADDR_FAMILY", "AF_INET6", reason, source, _FAMILY_SINCE)


def _advise_fabric_facts(kind: FabricKind | None) -> Iterator[CommSetting]:
    for fact in kind.settings if kind else ():
        source = f"fabric {kind.name}: {kind.source}" if kind else ""
        yield CommSetting(fact.name, fact.value, fact.reason, source, fact.needs)


def _used_ports(situation: AdviceContext, node: str) -> list[Any]:
    hcas = situation.cluster.network.hcas if situation.cluster else []
    return [
        port
        for port in ports_of_report(situation.reports[node])
        if (port.device in hcas if hcas else True) and port.is_active
    ]


def _advise_per_node(situation: AdviceContext) -> tuple[dict[str, tuple[CommSetting, ...]], list[str]]:
    """Values that hold on one node alone, by its report; and what was seen there."""
    assert situation.cluster is not None
    hcas = situation.cluster.network.hcas
    settings_of_node: dict[str, tuple[CommSetting, ...]] = {}
    notes: list[str] = []
    for node, report in situation.reports.items():
        settings: list[CommSetting] = []
        ports = ports_of_report(report)
        good = [
            hca for hca in hcas if any(port.device == hca and port.is_active is not False for port in ports)
        ]
        if ports and hcas and good != hcas:
            lacking = ", ".join(hca for hca in hcas if hca not in good)
            if good:
                why = f"without {lacking}, missing or down here"
                settings += _advise_devices(situation.cluster, good, _report_source(report), why)
            notes.append(
                f"{node}: {lacking} is missing or down{'' if good else '; none of the devices is left'}"
            )
        settings += _gid_index(situation, node, notes)
        if settings:
            settings_of_node[node] = tuple(settings)
    return settings_of_node, notes


def _report_source(report: Mapping[str, Any]) -> str:
    """The source of a value: the report with its day, as the node may have changed since."""
    moment = report.get("time")
    day = (
        time.strftime("%Y-%m-%d", time.localtime(moment))
        if isinstance(moment, int | float)
        else "unknown date"
    )
    return f"doctor's report of the node, {day}"


def _gid_index(situation: AdviceContext, node: str, notes: list[str]) -> list[CommSetting]:
    """For an old NCCL, which else takes index 0; only where one index is right at every adapter."""
    if situation.nccl is None or situation.nccl >= AUTOMATIC_GID_SINCE:
        return []
    assert situation.cluster is not None
    network = situation.cluster.network
    ports = [port for port in _used_ports(situation, node) if port.is_roce]
    family = "AF_INET6" if network.address_family == "ipv6" else "AF_INET"
    indices = {find_routable_gid_index(port, family, network.address_range or "") for port in ports}  # type: ignore[arg-type]
    if len(indices) == 1 and None not in indices:
        reason = "this NCCL takes index 0 by itself, which is link-local; this is the RoCE v2 address"
        source = _report_source(situation.reports[node])
        return [CommSetting("NCCL_IB_GID_INDEX", str(indices.pop()), reason, source)]
    if ports:
        notes.append(f"{node}: which GID index is right is not certain; NCCL 2.21 finds it by itself")
    return []


def _split_by_version(
    settings: Sequence[CommSetting], nccl: Version | None
) -> tuple[list[CommSetting], list[str]]:
    """Those that this NCCL reads; the others are told."""
    kept, notes = [], []
    for setting in settings:
        needs = required_nccl_release(setting)
        if nccl is not None and needs is not None and nccl < needs:
            notes.append(
                f"{setting.name} is left out: it needs {setting.needs}, this is {format_version(nccl)}"
            )
        else:
            kept.append(setting)
    return kept, notes


def _class_disagreement_notes(cluster: ClusterSpec, settings: Sequence[CommSetting]) -> list[str]:
    """Whether what is set, with the profile's own env, leaves NCCL and MPI in two classes."""
    of_site = set_variables(cluster.env)
    environ = {setting.name: setting.value for setting in settings} | of_site
    if "NCCL_IB_TC" in of_site and any(setting.name == "UCX_IB_TRAFFIC_CLASS" for setting in settings):
        # MPI goes along with it where only NCCL's is set.
        environ |= {"UCX_IB_TRAFFIC_CLASS": of_site["NCCL_IB_TC"]} | of_site
    if not any(name in environ for name in ("NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS")):
        return []
    findings = check_class_agreement(
        environ, f"profile {cluster.name}", uses_ucx=cluster.mpi.library == "openmpi"
    )
    return [str(finding) for finding in findings]


def _unmeasured(kind: FabricKind | None) -> Iterator[str]:
    for tuning in kind.published if kind else ():
        source = f"{kind.source if kind else ''} has {tuning.value} ({tuning.says})"
        yield f"{tuning.name} is not set: {source}, and it is not measured here"
