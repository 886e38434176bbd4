"""What differs between the ranks of a job and must not: their environments, written down by each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpcrun.tuning.issue import Complaint, show
from hpcrun.tuning.lint.conflicts import plugin_on_path
from hpcrun.tuning.lint.environment import SECRET, Layer
from hpcrun.tuning.lint.lint import is_ours, worst_first
from hpcrun.tuning.registry.device_names import parse_devices
from hpcrun.tuning.registry.registry import registry

_NODE_NAMES = ("SLURMD_NODENAME", "HOSTNAME", "HOST", "SLURM_NODEID")
_RANK_NAMES = ("RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_MOST_RANKS = 4
"""Ranks that a message names one by one."""


@dataclass(frozen=True)
class RankDump:
    """The environment that one rank wrote down."""

    name: str
    values: Mapping[str, str]

    @property
    def node(self) -> str | None:
        """The node that it ran on, as far as it says."""
        return next((f"{key}={self.values[key]}" for key in _NODE_NAMES if self.values.get(key)), None)

    @property
    def label(self) -> str:
        """How a message calls it."""
        rank = next((self.values[key] for key in _RANK_NAMES if self.values.get(key)), None)
        return self.name if rank is None else f"{self.name} (rank {rank})"


def rank_dump(layer: Layer) -> RankDump:
    """The dump that a file holds."""
    values = {one.name: one.value for one in layer.settings if one.value is not None}
    return RankDump(
        layer.title, {name: "(hidden)" if name in SECRET else value for name, value in values.items()}
    )


def compare_ranks(dumps: Sequence[RankDump]) -> tuple[Complaint, ...]:
    """What differs between ranks and must not."""
    findings: list[Complaint] = []
    names = sorted({name for dump in dumps for name in dump.values if is_ours(name)})
    for name in names:
        findings += _differences(name, dumps)
    findings += [*_same_host(dumps), *_plugins(dumps)]
    return worst_first(findings)


def _differences(name: str, dumps: Sequence[RankDump]) -> Iterator[Complaint]:
    known = registry().variables.get(name)
    scope = known.ranks if known else "same"
    groups = _by_value(name, dumps)
    if scope == "rank" or len(groups) == 1:
        return
    if scope == "same":
        is_read = known is not None and known.owner == "nccl"
        text = f"must be equal on all ranks and is not: {_told(groups)}"
        yield Complaint("error" if is_read else "warning", name, text)
        return
    for node, members in groupby(
        sorted(dumps, key=lambda one: one.node or ""), key=lambda one: one.node or ""
    ):
        on_node = _by_value(name, list(members))
        if node and len(on_node) > 1:
            yield Complaint("error", name, f"differs between ranks of one node ({node}): {_told(on_node)}")
    if name == "NCCL_IB_HCA":
        yield from _adapters(groups)
    elif name == "NCCL_IB_GID_INDEX":
        text = (
            f"differs between nodes: {_told(groups)}; leave it to NCCL, or say NCCL_IB_ADDR_RANGE (2.21 on)"
        )
        yield Complaint("warning", name, text)
    elif name.endswith("_IFNAME"):
        text = f"differs between nodes: {_told(groups)}; all of them need a common, routed network"
        yield Complaint("warning", name, text)


def _by_value(name: str, dumps: Sequence[RankDump]) -> dict[str | None, list[RankDump]]:
    groups: dict[str | None, list[RankDump]] = {}
    for dump in dumps:
        groups.setdefault(dump.values.get(name), []).append(dump)
    return groups


def _told(groups: Mapping[str | None, Sequence[RankDump]]) -> str:
    def who(members: Sequence[RankDump]) -> str:
        more = f" and {len(members) - _MOST_RANKS} more" if len(members) > _MOST_RANKS else ""
        return ", ".join(one.label for one in members[:_MOST_RANKS]) + more

    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0] or ""))
    return "; ".join(f"{'unset' if value is None else show(value)} on {who(of)}" for value, of in ordered)


def _same_host(dumps: Sequence[RankDump]) -> Iterator[Complaint]:
    nodes: dict[str, set[str]] = {}
    for dump in dumps:
        value = dump.values.get("NCCL_HOSTID")
        if value and dump.node:
            nodes.setdefault(value, set()).add(dump.node)
    for value, found in nodes.items():
        if len(found) > 1:
            text = f"{show(value)} is the same on {', '.join(sorted(found))}: NCCL takes them for one node"
            yield Complaint("error", "NCCL_HOSTID", text)


def _adapters(groups: Mapping[str | None, Sequence[RankDump]]) -> Iterator[Complaint]:
    lists = [parse_devices(value).entries if value else () for value in groups]
    told = _told(groups)
    if len({len(one) for one in lists}) > 1:
        yield Complaint("error", "NCCL_IB_HCA", f"names different numbers of adapters: {told}")
    elif len({frozenset(one) for one in lists}) == 1:
        yield Complaint(
            "warning", "NCCL_IB_HCA", f"has the same adapters in another order, so rails cross: {told}"
        )
    else:
        yield Complaint(
            "note", "NCCL_IB_HCA", f"differs between nodes: {told}; see that the rails are the same"
        )


def _plugins(dumps: Sequence[RankDump]) -> Iterator[Complaint]:
    """Library paths of which only some lead to a network plugin."""
    groups: dict[str | None, list[RankDump]] = {}
    for dump in dumps:
        if (dump.values.get("NCCL_NET_PLUGIN") or "").lower() != "none":
            groups.setdefault(plugin_on_path(dump.values.get("LD_LIBRARY_PATH", "")), []).append(dump)
    if len(groups) > 1:
        text = (
            f"leads to different network plugins, which hangs where they meet: {_told(groups)};"
            " make the paths equal, or set NCCL_NET_PLUGIN=none"
        )
        yield Complaint("error", "LD_LIBRARY_PATH", text)
