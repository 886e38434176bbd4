"""What an NCCL log shows besides warnings: ignored settings, one proxy for all ranks, single queue pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcrun.finding import Finding, sort_findings
from hpcrun.tuning.log.nccl_log import NcclLog
from hpcrun.tuning.registry.values import parse_c_integer

_SEND = re.compile(
    r"(?P<rank>\d+)\[\S+?\] -> \d+\[\S+?\] \[send\] via NET/(?P<net>\w+)/\d+(?:\((?P<proxy>\d+)\))?"
)
_MANY = 3
"""Ranks that send through one other."""
_MOST = 0.75


def check_nccl_log(log: NcclLog) -> tuple[Finding, ...]:
    """Check everything, worst findings first."""
    return sort_findings([*_few_channels(log), *_one_proxy(log), *_lone_queue_pairs(log)])


def _few_channels(log: NcclLog) -> Iterator[Finding]:
    """A least number of channels above what the library can do: some fall to 2 then."""
    for name in ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS"):
        minimum = parse_c_integer(log.env.get(name, ""))
        if minimum and log.channels and log.channels < minimum:
            used = f"{log.channels} channels are used: {log.library or 'the library'} has its ceiling"
            text = f"is {minimum}, and {used}"
            remedy = "leave it out, or ask for 32 at most; measure what that gains"
            yield Finding("warning", "channels", name, text, remedy)


def _sends(log: NcclLog) -> Iterator[tuple[int, str, int | None]]:
    """Rank, network, and through whose proxy, of every connection out of a node."""
    for line in log.lines:
        if match := _SEND.search(line.text):
            yield int(match["rank"]), match["net"], int(match["proxy"]) if match["proxy"] else None


def _one_proxy(log: NcclLog) -> Iterator[Finding]:
    """Sends of many ranks that go through one neighbour, whose one thread serves them all (PXN)."""
    through: dict[int, list[int]] = {}
    for rank, _, proxy in _sends(log):
        if proxy is not None and proxy != rank:
            through.setdefault(proxy, []).append(rank)
    of_node: dict[int, int] = {}
    for proxy, ranks in through.items():
        node = proxy // (log.per_node or log.ranks or 1)
        of_node[node] = of_node.get(node, 0) + len(ranks)
    for proxy, ranks in through.items():
        node = proxy // (log.per_node or log.ranks or 1)
        if len({*ranks}) >= _MANY and len(ranks) >= _MOST * of_node[node]:
            text = f"sends for {len({*ranks})} other ranks ({len(ranks)} of {of_node[node]} such connections)"
            remedy = (
                "one proxy thread serves them: see that it has a core of its own, and measure"
                " NCCL_P2P_PXN_LEVEL=0 for all-to-all (`tune policy add`)"
            )
            yield Finding("note", "proxy", f"rank {proxy}", text, remedy, "medium")


def _lone_queue_pairs(log: NcclLog) -> Iterator[Finding]:
    """RoCE between nodes by one queue pair a connection: what switches hash may fall onto one link."""
    pairs = parse_c_integer(log.env.get("NCCL_IB_QPS_PER_CONNECTION", "")) or 1
    adaptive = parse_c_integer(log.env.get("NCCL_IB_ADAPTIVE_ROUTING", "")) == 1
    if pairs > 1 or adaptive or not any(nic.endswith("/RoCE") for nic in log.nics):
        return
    sends = [rank for rank, net, _ in _sends(log) if net == "IB"]
    if sends:
        count = f"{len(sends)} connections of {len({*sends})} ranks"
        text = f"{count} have one queue pair each: as many flows for switches to hash"
        remedy = (
            "where flows fall onto one uplink each has half of it: measure NCCL_IB_QPS_PER_CONNECTION=2 and 4"
            " (`tune policy add`), or ask for adaptive routing"
        )
        yield Finding("note", "queue pairs", ", ".join(log.nics), text, remedy, "low")
