"""Which nodes reach each other over TCP, by what each of them has tried; the one to blame is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcrun.tuning.finding import Finding


def judge(
    failed: Mapping[str, Mapping[str, str]], nodes: Sequence[str], interface: str
) -> tuple[Finding, ...]:
    """`failed` holds, for each node that has tried, which ones it has not reached, and why.

    A node that is in half of its connections' way is the cause of them all; what is left is told by pairs.
    """
    pairs = {(a, b): why for a, of in failed.items() for b, why in of.items()}
    found = []
    while len(nodes) > 2 and pairs:
        counts = {node: sum(node in pair for pair in pairs) for node in nodes}
        worst = max(counts, key=lambda node: counts[node])
        if counts[worst] < len(nodes) - 1:
            break
        told = sorted(why for pair, why in pairs.items() if worst in pair)
        text = f"{counts[worst]} of its {2 * (len(nodes) - 1)} connections over {interface} fail: {told[0]}"
        found.append(
            Finding("fault", "connection", worst, text, "a firewall, a route or a cable of this node")
        )
        pairs = {pair: why for pair, why in pairs.items() if worst not in pair}
        nodes = [node for node in nodes if node != worst]
    for (a, b), why in pairs.items():
        text = f"does not reach {b} over {interface}: {why}"
        found.append(Finding("fault", "connection", a, text, "a route or a firewall between the two"))
    return tuple(found)
