"""What is wrong in the environment of a job: each variable by itself, all together, and rank against rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrun.tuning.issue import Complaint, Fault, Level, error, note, show, warning
from hpcrun.tuning.lint.conflicts import conflicts
from hpcrun.tuning.lint.demands import is_demanded
from hpcrun.tuning.lint.environment import Chain, Layer, Setting, effective, printable, resolve
from hpcrun.tuning.registry.nccl_grammar import ELIGIBLE, parse_selection
from hpcrun.tuning.registry.registry import Lookalike, Variable, Version, at, registry, show_version
from hpcrun.tuning.registry.values import check_value, number

_ORDER = {"error": 0, "warning": 1, "note": 2}
_OURS = re.compile(r"NCCL_|RCCL_|TORCH_NCCL_")
"""How the names begin that nobody but NCCL and its company uses."""


@dataclass(frozen=True)
class Report:
    """All that was found, and what counts."""

    findings: tuple[Complaint, ...]
    chains: Mapping[str, Chain]
    """Of the variables that are known or look as if."""
    notes: tuple[str, ...] = ()
    """What could not be looked into."""
    read: tuple[str, ...] = ()
    """How much of each script was read."""

    @property
    def has_errors(self) -> bool:
        """Whether anything does not do what it says."""
        return any(one.level == "error" for one in self.findings)

    def origins(self) -> Iterator[str]:
        """Every variable that is set, its value, and where that stands."""
        for name, chain in sorted(self.chains.items()):
            if chain.winner is not None:
                yield f"{'set':7}  {chain.winner.where} {name}: {_shown(chain.winner)}"

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "findings": [one.as_json() for one in self.findings],
            "settings": {name: chain_json(chain) for name, chain in sorted(self.chains.items())},
            "notes": list(self.notes),
            "read": list(self.read),
        }


def chain_json(chain: Chain) -> dict[str, Any]:
    """Who sets a variable and who wins, as plain values."""
    winner = chain.winner
    return {
        "value": printable(winner) if winner else None,
        "is_set": winner is not None,
        "where": winner.where if winner else None,
        "steps": [
            {"value": printable(one), "origin": one.origin, "where": one.where, "fate": fate}
            for one, fate in chain.steps
        ],
    }


def is_ours(name: str) -> bool:
    """Whether a name is one of those that this is about."""
    return name in registry().variables or bool(_OURS.match(name))


def lint(layers: Sequence[Layer], version: Version | None) -> Report:
    """Everything that is wrong, worst first; layers from the weakest on, files that only fill at the end."""
    chains = resolve(layers)
    counts = effective(chains)
    used = frozenset().union(*(layer.used for layer in layers))
    ours = {
        name: chain for name, chain in chains.items() if is_ours(name) and not _is_scripts_own(chain, used)
    }
    findings = [*_of_places(ours)]
    for name, chain in ours.items():
        if chain.winner is not None:
            findings += (
                Complaint(fault.level, name, _text(fault, name, counts, version), chain.winner.where)
                for fault in check_setting(chain.winner, version, counts)
            )
    for name, fault in conflicts(counts, version):
        where = counts[name].where if name in counts else ""
        findings.append(Complaint(fault.level, name, _text(fault, name, counts, version), where))
    return Report(
        worst_first(findings),
        ours,
        tuple(line for layer in layers for line in layer.notes),
        tuple(_coverage(layer) for layer in layers if layer.read is not None),
    )


def _text(fault: Fault, name: str, counts: Mapping[str, Setting], version: Version | None) -> str:
    """What a fault says, with its remedy only where that leaves nothing as bad behind."""
    return fault.text if remedies(fault, name, counts, version) else fault.bare


def remedies(fault: Fault, name: str, counts: Mapping[str, Setting], version: Version | None) -> bool:
    """Whether the value that a fault proposes has itself no fault that is as bad or worse."""
    if fault.instead is None or name not in counts:
        return True
    mended = {**counts, name: replace(counts[name], value=fault.instead)}
    left = [*check_setting(mended[name], version, mended)]
    left += [other for at_name, other in conflicts(mended, version) if at_name == name]
    return all(_ORDER[other.level] > _ORDER[fault.level] for other in left)


def _coverage(layer: Layer) -> str:
    unread = f", {len(layer.notes)} not looked into" if layer.notes else ""
    return f"{layer.title}: {layer.read} command{'' if layer.read == 1 else 's'} read{unread}"


def _is_scripts_own(chain: Chain, used: Collection[str]) -> bool:
    """Whether a script only keeps something of its own under this name, which no NCCL reads."""
    known = registry()
    is_known = chain.name in known.variables or known.lookalike(chain.name) or chain.name in known.symbols
    is_exported = any(setting.is_exported or setting.faults for setting, _ in chain.steps)
    if chain.name in used:
        return not is_known or not is_exported
    return not is_exported and not is_known and known.nearest(chain.name) is None


def worst_first(findings: Sequence[Complaint]) -> tuple[Complaint, ...]:
    """Each of them once, errors first, then by name."""
    once = dict.fromkeys(findings)
    return tuple(sorted(once, key=lambda one: (_ORDER[one.level], one.name, one.where, one.text)))


def _of_places(chains: Mapping[str, Chain]) -> Iterator[Complaint]:
    """What is wrong with how a variable is written down, and what is set to no end."""
    for name, chain in chains.items():
        for setting, fate in chain.steps:
            for fault in setting.faults:
                yield Complaint(fault.level, name, fault.text, setting.where)
            if not setting.faults and fate.startswith("not exported") and _is_for_ranks(name):
                text = "is set without `export`, so that no rank sees it"
                level: Level = "error" if name in registry().variables else "warning"
                yield Complaint(level, name, text, setting.where)
        values = {setting.value for setting, fate in chain.steps if not fate.startswith("not exported")}
        if chain.winner is not None and len(values) > 1:
            lost = ", ".join(
                f"{_shown(setting)} ({setting.where})"
                for setting, _ in chain.steps
                if setting is not chain.winner and setting.value != chain.winner.value
            )
            yield Complaint("note", name, f"{_shown(chain.winner)} wins over {lost}", chain.winner.where)


def _is_for_ranks(name: str) -> bool:
    """Whether it matters that ranks see it: builds and scripts have names like NCCL's of their own."""
    found = registry().lookalike(name)
    return name in registry().variables or found is None or found.reader == "torch"


def _shown(setting: Setting) -> str:
    value = printable(setting)
    return "a computed value" if value is None else show(value)


def check_setting(
    setting: Setting, version: Version | None, environment: Mapping[str, Setting] | None = None
) -> Iterator[Fault]:
    """What is wrong with one variable taken by itself; the environment tells which platform this is."""
    known = registry().variables.get(setting.name)
    if known is None:
        yield from _unknown(setting.name)
        return
    absence = known.absence(version) if known.owner == "nccl" else ""
    if absence:
        release = show_version(version or ())
        instead = f"; use {known.instead}" if known.instead else ""
        say = error if known.removed and version and version >= known.removed else warning
        yield say(f"does nothing: it {absence}, and this is {release}{instead}")
        return
    if known.removed and version is None:
        instead = f"; use {known.instead}" if known.instead else ""
        yield warning(f"is not read from {show_version(known.removed)} on{instead}")
    if known.deprecated and (version is None or version >= known.deprecated):
        instead = f"; use {known.instead}" if known.instead else ""
        yield note(f"is deprecated since {show_version(known.deprecated)}{instead}")
    if known.kind == "undocumented":
        yield note("is read by the library and documented nowhere we know; leave it unless you know why")
    if setting.value is None:
        yield note("is computed by the shell, so that its value is not checked")
        return
    rule = at(known.values, version)
    faults = list(check_value(known.name, setting.value, rule, version)) if rule else []
    if is_demanded(known.name, setting.value, environment or {}):
        yield from (one for one in faults if one.level == "error")
        return
    yield from faults
    if not any(one.level == "error" for one in faults):
        yield from _left_over(known, setting.value, version)


def _unknown(name: str) -> Iterator[Fault]:
    impostor = registry().lookalike(name)
    if impostor is not None:
        yield _impostor(impostor)
        return
    if name in registry().symbols:
        yield error(f"is no variable but {registry().symbols[name]}; it does nothing")
        return
    close = registry().nearest(name)
    if name.startswith(("TORCH_NCCL_", "RCCL_")):
        hint = f"; did you mean {close}?" if close else ""
        yield warning(f"is not known; {name.partition('_')[0]} reads more than is known here{hint}")
    elif close:
        yield error(f"is not known, and NCCL never complains about that; did you mean {close}?")
    else:
        library = show_version(registry().library)
        yield warning(f"is not known: no NCCL up to {library} reads it, and nobody else that we know")


def _impostor(found: Lookalike) -> Fault:
    text = f"; {found.text}" if found.text else ""
    if found.reader == "torch":
        return warning(f"is torch's old name, which NCCL never reads; use {found.instead}{text}")
    if found.reader == "nobody":
        return note(f"is read by nobody{text}")
    if found.reader:
        return note(f"is not read by NCCL but by {found.reader}{text}")
    instead = f"; {found.instead} is what comes nearest" if found.instead else ""
    # That no plugin of any vendor reads it cannot be proved.
    return warning(f"looks like one of NCCL's variables, and no release of NCCL reads it{instead}{text}")


def _left_over(known: Variable, value: str, version: Version | None) -> Iterator[Fault]:
    if not known.left:
        return
    dangerous = known.left.split(",")
    found = {word.strip().upper() for word in re.split("[,;]", value)} | {value.strip().upper()}
    figure = number(value)
    if dangerous == ["any"] or found & {one.upper() for one in dangerous} or str(figure) in dangerous:
        why: str | None = known.danger or known.effect
        if known.name in ("NCCL_PROTO", "NCCL_ALGO"):
            why = _of_choice(known.name, value, version) or ""
        if why:
            yield warning(f"{show(value)}: left over from an experiment? {why}")


def _of_choice(name: str, value: str, version: Version | None) -> str:
    """What is bad about a choice of protocols or algorithms; nothing where the choice by size stays."""
    chosen = parse_selection(name, value, version).chosen
    if name == "NCCL_PROTO":
        if all({"ll", "simple"} <= left for left in chosen.values()):
            return ""  # LL128 is kept away, or told of by itself
        if any("ll128" in left for left in chosen.values()):
            return registry().variables[name].danger
    else:
        if any(not left & ELIGIBLE[function] for function, left in chosen.items()):
            return registry().variables[name].danger
        if all(_chooses_by_size(function, left) for function, left in chosen.items()):
            return ""
    return "A fixed choice is slower at other sizes."


def _chooses_by_size(function: str, left: frozenset[str]) -> bool:
    """Whether an algorithm for small messages and one for large ones are left, where a function has both."""
    return "ring" in left and ("tree" in left or "tree" not in ELIGIBLE[function])
