"""What differs between the ranks of a job and must not: their environments, written down by each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpcrun.finding import Finding
from hpcrun.tuning.lint.conflicts import find_plugin_folder
from hpcrun.tuning.lint.environment import SECRET_VARIABLES, EnvironmentLayer
from hpcrun.tuning.lint.lint import is_communication_variable, sort_lint_findings
from hpcrun.tuning.registry.device_names import parse_device_list
from hpcrun.tuning.registry.registry import variable_registry
from hpcrun.tuning.variable_findings import quote_value

_NODE_NAMES = ("SLURMD_NODENAME", "HOSTNAME", "HOST", "SLURM_NODEID")
_RANK_NAMES = ("RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_MOST_RANKS = 4
"""Ranks that a message names one by one."""


@dataclass(frozen=True)
class RankEnvironment:
    """The environment that one rank wrote down."""

    name: str
    values: Mapping[str, str]

    @property
    def node(self) -> str | None:
        """The node that it ran on, as far as it says."""
        return next((f"{key}={self.values[key]}" for key in _NODE_NAMES if self.values.get(key)), None)

    @property
    def label(self) -> str:
        """The name for messages."""
        rank = next((self.values[key] for key in _RANK_NAMES if self.values.get(key)), None)
        return self.name if rank is None else f"{self.name} (rank {rank})"


def parse_rank_environment(layer: EnvironmentLayer) -> RankEnvironment:
    """The dump that a file holds."""
    values = {setting.name: setting.value for setting in layer.settings if setting.value is not None}
    return RankEnvironment(
        layer.title,
        {name: "(hidden)" if name in SECRET_VARIABLES else value for name, value in values.items()},
    )


def compare_rank_environments(dumps: Sequence[RankEnvironment]) -> tuple[Finding, ...]:
    """What differs between ranks and must not."""
    findings: list[Finding] = []
    names = sorted({name for dump in dumps for name in dump.values if is_communication_variable(name)})
    for name in names:
        findings += _differences(name, dumps)
    findings += [*_same_host(dumps), *_plugins(dumps)]
    return sort_lint_findings(findings)


def _differences(name: str, dumps: Sequence[RankEnvironment]) -> Iterator[Finding]:
    variable = variable_registry().variables.get(name)
    scope = variable.ranks if variable else "same"
    groups = _by_value(name, dumps)
    if scope == "rank" or len(groups) == 1:
        return
    if scope == "same":
        is_read = variable is not None and variable.owner == "nccl"
        text = f"must be equal on all ranks and is not: {_describe_groups(groups)}"
        yield Finding("error" if is_read else "warning", "variable", name, text)
        return
    for node, members in groupby(
        sorted(dumps, key=lambda dump: dump.node or ""), key=lambda dump: dump.node or ""
    ):
        on_node = _by_value(name, list(members))
        if node and len(on_node) > 1:
            text = f"differs between ranks of one node ({node}): {_describe_groups(on_node)}"
            yield Finding("error", "variable", name, text)
    if name == "NCCL_IB_HCA":
        yield from _adapters(groups)
    elif name == "NCCL_IB_GID_INDEX":
        text = (
            f"differs between nodes: {_describe_groups(groups)}; leave it to NCCL, or say"
            " NCCL_IB_ADDR_RANGE (2.21 on)"
        )
        yield Finding("warning", "variable", name, text)
    elif name.endswith("_IFNAME"):
        text = f"differs between nodes: {_describe_groups(groups)}; all of them need a common, routed network"
        yield Finding("warning", "variable", name, text)


def _by_value(name: str, dumps: Sequence[RankEnvironment]) -> dict[str | None, list[RankEnvironment]]:
    groups: dict[str | None, list[RankEnvironment]] = {}
    for dump in dumps:
        groups.setdefault(dump.values.get(name), []).append(dump)
    return groups


def _describe_groups(groups: Mapping[str | None, Sequence[RankEnvironment]]) -> str:
    def who(members: Sequence[RankEnvironment]) -> str:
        rest = f" and {len(members) - _MOST_RANKS} more" if len(members) > _MOST_RANKS else ""
        return ", ".join(dump.label for dump in members[:_MOST_RANKS]) + rest

    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0] or ""))
    return "; ".join(
        f"{'unset' if value is None else quote_value(value)} on {who(of)}" for value, of in ordered
    )


def _same_host(dumps: Sequence[RankEnvironment]) -> Iterator[Finding]:
    nodes: dict[str, set[str]] = {}
    for dump in dumps:
        value = dump.values.get("NCCL_HOSTID")
        if value and dump.node:
            nodes.setdefault(value, set()).add(dump.node)
    for value, hosts in nodes.items():
        if len(hosts) > 1:
            text = (
                f"{quote_value(value)} is the same on {', '.join(sorted(hosts))}: NCCL takes them for"
                " one node"
            )
            yield Finding("error", "variable", "NCCL_HOSTID", text)


def _adapters(groups: Mapping[str | None, Sequence[RankEnvironment]]) -> Iterator[Finding]:
    lists = [parse_device_list(value).entries if value else () for value in groups]
    described = _describe_groups(groups)
    if len({len(adapters) for adapters in lists}) > 1:
        yield Finding("error", "variable", "NCCL_IB_HCA", f"names different numbers of adapters: {described}")
    elif len({frozenset(adapters) for adapters in lists}) == 1:
        text = f"has the same adapters in another order, so rails cross: {described}"
        yield Finding("warning", "variable", "NCCL_IB_HCA", text)
    else:
        text = f"differs between nodes: {described}; see that the rails are the same"
        yield Finding("note", "variable", "NCCL_IB_HCA", text)


def _plugins(dumps: Sequence[RankEnvironment]) -> Iterator[Finding]:
    """Library paths of which only some lead to a network plugin."""
    groups: dict[str | None, list[RankEnvironment]] = {}
    for dump in dumps:
        if (dump.values.get("NCCL_NET_PLUGIN") or "").lower() != "none":
            groups.setdefault(find_plugin_folder(dump.values.get("LD_LIBRARY_PATH", "")), []).append(dump)
    if len(groups) > 1:
        text = (
            f"leads to different network plugins, which hangs where they meet: {_describe_groups(groups)};"
            " make the paths equal, or set NCCL_NET_PLUGIN=none"
        )
        yield Finding("error", "variable", "LD_LIBRARY_PATH", text)
