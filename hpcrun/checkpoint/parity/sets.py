"""Erasure sets: which nodes keep parity for one another, so that what fails together does not lose a save.

Nodes are laid in a line, those of one failure domain side by side, and dealt out to the sets in turn: as
long as there are no fewer sets than nodes in the largest domain, no set has two nodes of one domain, and the
sizes of the sets differ by one at most, however unequal the domains are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hpcrun.errors import UsageError
from hpcrun.fabric.graph import pluralize
from hpcrun.hostlist import fold_hosts

ParityScheme = Literal["none", "partner", "xor", "rs"]
FailureDomains = Mapping[str, Mapping[str, str | None]]
"""Level → node → unit, innermost level first; None: not known."""

NODE_DOMAIN = "node"
"""The level that is always there."""
_PARITY: dict[str, int] = {"partner": 1, "xor": 1, "rs": 2}
_KEY = "checkpoint.parity"
_MAX_NAMED = 4


@dataclass(frozen=True)
class ErasureSets:
    """The sets of an attempt, and what they are good for."""

    sets: tuple[tuple[str, ...], ...]
    """The nodes of each, in order; empty: there is no parity."""
    parity: tuple[int, ...]
    """How many nodes of each set may be lost."""
    scheme: ParityScheme
    domain: str | None
    """The highest level of the fabric of which any one unit may be lost."""
    nodes: tuple[str, ...]
    domains: FailureDomains = field(repr=False)
    notes: tuple[str, ...] = ()
    """What is other than one would expect, a line each."""

    def of(self, node: str) -> tuple[tuple[str, ...], int] | None:
        """The set of a node and the set's parity; None: the node is in no set."""
        return next(
            ((nodes, parity) for nodes, parity in zip(self.sets, self.parity, strict=True) if node in nodes),
            None,
        )

    def survives(self, lost: Collection[str]) -> bool:
        """Whether what the lost nodes held can be made again from the others."""
        return not set(lost) & set(self.nodes) or (
            bool(self.sets)
            and all(
                sum(node in lost for node in nodes) <= parity
                for nodes, parity in zip(self.sets, self.parity, strict=True)
            )
        )

    @property
    def statement(self) -> str:
        """Which simultaneous losses the newest generation survives, and which it does not."""
        if not self.sets:
            why = "there is one node" if len(self.nodes) < 2 else "scheme is none"
            reason = "of what a lost node held only the run directory is sure to have a copy"
            return f"no parity, as {why}: {reason}"
        return "\n".join((self._shape(), self._survived(), self._not_survived(), *self.notes))

    def _shape(self) -> str:
        sizes = Counter(map(len, self.sets))
        shape = " and ".join(f"{count} of {format_node_count(size)}" for size, count in sorted(sizes.items()))
        extra = [parity / (len(nodes) - parity) for nodes, parity in zip(self.sets, self.parity, strict=True)]
        most = f"{max(extra):.0%}"
        share = most if max(extra) == min(extra) else f"up to {most}"
        return f"parity: {self.scheme}, erasure sets: {shape}; {share} of what a node holds, on others"

    def _survived(self) -> str:
        most = min(self.parity)
        claims = [
            f"any one {level}" if units == 1 else f"any {units} {pluralize(level, units)}"
            for level in reversed(list(self.domains))
            if (units := self._most_units(level))
        ]
        claims.append("any one node" if most == 1 else f"any {most} nodes")
        together = sum(self.parity)
        if together > most:
            each = "one node" if max(self.parity) == 1 else f"{max(self.parity)} nodes"
            claims.append(f"up to {together} nodes at once of which no set has more than {each}")
        return f"survives the loss of {'; '.join(claims)}"

    def _not_survived(self) -> str:
        least = min(self.parity)
        claims = [f"{'two' if least == 1 else least + 1} nodes of one set"]
        for level, units in self.domains.items():
            named_units = [
                unit for unit in dict.fromkeys(units[node] for node in self.nodes) if unit is not None
            ]
            fatal = [
                unit
                for unit in named_units
                if not self.survives({node for node in self.nodes if units[node] == unit})
            ]
            if fatal:
                rest = f" and {len(fatal) - _MAX_NAMED} more" if len(fatal) > _MAX_NAMED else ""
                words = pluralize(level, len(fatal))
                claims.append(f"{words} {', '.join(fatal[:_MAX_NAMED])}{rest}")
        return f"does not survive the loss of {'; '.join(claims)}"

    def _most_units(self, level: str) -> int:
        """Any so many units of a level may be lost at once; 0 also where a node's unit is not known."""
        units = self.domains[level]
        if any(units[node] is None for node in self.nodes):
            return 0
        most = len({units[node] for node in self.nodes})
        for nodes, parity in zip(self.sets, self.parity, strict=True):
            counts = sorted(Counter(units[node] for node in nodes).values(), reverse=True)
            most = min(most, max(n for n in range(len(counts) + 1) if sum(counts[:n]) <= parity))
        return most


def format_node_count(count: int) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {pluralize(NODE_DOMAIN, count)}"


def choose_erasure_sets(
    nodes: Sequence[str],
    domains: FailureDomains,
    *,
    scheme: Literal["auto", "none", "partner", "xor", "rs"] = "auto",
    set_size: int = 8,
    survive: str | None = None,
    with_rs: bool = True,
) -> ErasureSets:
    """The sets for these nodes; UsageError where the level that must be survived cannot be.

    Without such a level the highest is taken of which the loss of any one unit is survived. `with_rs`:
    whether `auto` may fall back on Reed-Solomon.
    """
    names = tuple(dict.fromkeys(nodes))
    levels = {
        level: {node: units.get(node) for node in names}
        for level, units in domains.items()
        if level != NODE_DOMAIN
    }
    _check_survive(survive, scheme, names, levels)
    if scheme == "none" or len(names) < 2:
        return ErasureSets((), (), "none", None, names, levels)
    known, notes = [NODE_DOMAIN], []
    for level, units in levels.items():
        if missing := [node for node in names if units[node] is None]:
            notes.append(
                f"the {level} of {fold_hosts(missing)} is not known, so nothing is promised of any {level}"
            )
        else:
            known.append(level)
    parities = ((1, 2) if with_rs else (1,)) if scheme == "auto" else (_PARITY[scheme],)
    for domain in [survive] if survive is not None else known[::-1]:
        line = _order_by_domain(names, levels, domain)
        units = levels.get(domain) or {node: node for node in names}
        for parity in dict.fromkeys(min(count, len(names) - 1) for count in parities):
            sets = _deal_into_sets(line, units, 2 if scheme == "partner" else set_size, parity)
            if all(_largest_unit_share(erasure_set, units) <= parity for erasure_set in sets):
                named = _effective_scheme(sets, parity)
                if scheme not in ("auto", named):
                    notes.append(f"{scheme} was asked for; sets of such sizes make it {named}")
                if survive is None:
                    notes.append(_explain_domain(domain, known))
                return ErasureSets(sets, (parity,) * len(sets), named, domain, names, levels, tuple(notes))
    assert survive is not None, "one node can always be lost"
    raise UsageError(_not_survivable_text(survive, max(parities), names, levels[survive]))


def check_survivable(
    survive: str | None, scheme: str, nodes: int, levels: Collection[str] | None = None
) -> None:
    """UsageError where the loss of a level cannot be survived with so many nodes, whichever they are.

    `levels`: those of the fabric, where they are known.
    """
    if survive is None:
        return
    if scheme == "none":
        raise UsageError(f"{_KEY}.survive: {survive} is not survived with scheme: none; set scheme: auto")
    if levels is not None and survive != NODE_DOMAIN and survive not in levels:
        allowed = ", ".join((NODE_DOMAIN, *levels))
        raise UsageError(f"{_KEY}.survive: {survive} is not a level of this fabric; use one of {allowed}")
    if nodes < 2:
        raise UsageError(
            f"{_KEY}.survive: the loss of a {survive} is not survived by one node alone; take more nodes, or"
            " leave survive out"
        )


def _check_survive(survive: str | None, scheme: str, nodes: tuple[str, ...], levels: FailureDomains) -> None:
    """UsageError where a level that must be survived is none, or not known well enough."""
    check_survivable(survive, scheme, len(nodes), levels)
    if survive is None:
        return
    if missing := [node for node, unit in levels.get(survive, {}).items() if unit is None]:
        raise UsageError(
            f"{_KEY}.survive: the {survive} of {fold_hosts(missing)} is not known; describe the fabric in the"
            f" profile, or set survive: {NODE_DOMAIN}"
        )


def _order_by_domain(nodes: tuple[str, ...], levels: FailureDomains, domain: str) -> list[str]:
    """The nodes in a line: those of one unit side by side, and so at the other levels as far as it goes."""
    place = {node: number for number, node in enumerate(nodes)}
    first: dict[tuple[str, str | None], int] = {}
    heads: dict[str | None, str] = {}
    for node in nodes:
        heads.setdefault(levels[domain][node] if domain in levels else node, node)
        for level, units in levels.items():
            first.setdefault((level, units[node]), place[node])

    def above(node: str) -> list[int]:
        return [first[level, levels[level][node]] for level in reversed(list(levels))]

    def key(node: str) -> tuple[list[int], int, list[int], int]:
        # A unit that lies in several units of a level above stays together, where its first node is.
        head = heads[levels[domain][node] if domain in levels else node]
        return above(head), place[head], above(node), place[node]

    return sorted(nodes, key=key)


def _deal_into_sets(
    line: list[str], units: Mapping[str, str | None], set_size: int, parity: int
) -> tuple[tuple[str, ...], ...]:
    """As many sets as the size asks for and the largest unit needs, each large enough for its parity."""
    count = max(-(-len(line) // set_size), _largest_unit_share(line, units))
    count = max(1, min(count, len(line) // (parity + 1)))
    return tuple(tuple(line[start::count]) for start in range(count))


def _largest_unit_share(nodes: Sequence[str], units: Mapping[str, str | None]) -> int:
    return max(Counter(units[node] for node in nodes).values())


def _effective_scheme(sets: Sequence[Sequence[str]], parity: int) -> ParityScheme:
    """What it really is: where there is one data block to a stripe, its parity is a copy."""
    if all(len(nodes) == parity + 1 for nodes in sets):
        return "partner"
    return "xor" if parity == 1 else "rs"


def _explain_domain(domain: str, domains: list[str]) -> str:
    if len(domains) == 1:
        return "no level of the fabric is known, so that only the loss of nodes is counted on"
    higher = domains[domains.index(domain) + 1 :]
    but = f", as no {' or '.join(higher)} can be lost" if higher else ""
    return f"{domain} is the highest level of which this placement can lose any one{but}"


def _not_survivable_text(
    survive: str, parity: int, nodes: tuple[str, ...], units: Mapping[str, str | None]
) -> str:
    unit, count = Counter(units[node] for node in nodes).most_common(1)[0]
    stronger = ", or set scheme: rs" if parity == 1 else ""
    return (
        f"{_KEY}.survive: the loss of any one {survive} is not survived: {survive} {unit} has {count} of"
        f" {format_node_count(len(nodes))}, and a set can lose {format_node_count(parity)}; take nodes of"
        f" more {pluralize(survive, 2)} (resources.placement: spread){stronger}, or set survive:"
        f" {NODE_DOMAIN}"
    )
