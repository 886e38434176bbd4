"""Which nodes reach each other over TCP, by what each of them has tried; the one to blame is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrun.finding import Finding


@dataclass(frozen=True)
class UnreachableNode:
    """A node that is in half of its connections' way: it is the cause of them all."""

    node: str
    failed: int
    tried: int
    why: str


def attribute_failures(
    failed: Mapping[str, Mapping[str, str]], nodes: Sequence[str]
) -> tuple[list[UnreachableNode], dict[tuple[str, str], str]]:
    """The nodes to blame, and the pairs that do not reach one another for another reason.

    `failed` holds, for each node that has tried, which ones it has not reached, and why.
    """
    pairs = {(a, b): why for a, of in failed.items() for b, why in of.items()}
    culprits = []
    while len(nodes) > 2 and pairs:
        counts = {node: sum(node in pair for pair in pairs) for node in nodes}
        worst = max(counts, key=lambda node: counts[node])
        if counts[worst] < len(nodes) - 1:
            break
        reasons = sorted(why for pair, why in pairs.items() if worst in pair)
        culprits.append(UnreachableNode(worst, counts[worst], 2 * (len(nodes) - 1), reasons[0]))
        pairs = {pair: why for pair, why in pairs.items() if worst not in pair}
        nodes = [node for node in nodes if node != worst]
    return culprits, pairs


def check_connectivity(
    failed: Mapping[str, Mapping[str, str]], nodes: Sequence[str], interface: str
) -> tuple[Finding, ...]:
    """Report the failures as findings."""
    culprits, pairs = attribute_failures(failed, nodes)
    findings = []
    for culprit in culprits:
        text = f"{culprit.failed} of its {culprit.tried} connections over {interface} fail: {culprit.why}"
        remedy = "a firewall, a route or a cable of this node"
        findings.append(Finding("error", "connection", culprit.node, text, remedy))
    for (a, b), why in pairs.items():
        text = f"does not reach {b} over {interface}: {why}"
        findings.append(Finding("error", "connection", a, text, "a route or a firewall between the two"))
    return tuple(findings)
