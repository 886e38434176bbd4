"""What is wrong in the environment of a job: each variable by itself, all together, and rank against rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrun.finding import SEVERITIES, Finding, Severity, count_severities, sort_findings
from hpcrun.tuning.lint.conflicts import find_conflicts
from hpcrun.tuning.lint.demands import is_demanded_by_platform
from hpcrun.tuning.lint.environment import (
    EnvironmentLayer,
    PrecedenceChain,
    VariableAssignment,
    effective_assignments,
    printable_value,
    resolve_layers,
)
from hpcrun.tuning.registry.nccl_grammar import ELIGIBLE_ALGORITHMS, parse_nccl_selection
from hpcrun.tuning.registry.registry import (
    CommVariable,
    LookalikeVariable,
    Version,
    format_version,
    value_in_release,
    variable_registry,
)
from hpcrun.tuning.registry.values import check_value, parse_c_integer
from hpcrun.tuning.variable_findings import (
    make_error,
    make_note,
    make_warning,
    quote_value,
)

_OURS = re.compile(r"NCCL_|RCCL_|TORCH_NCCL_")
"""Beginnings of names that only NCCL and its plugins use."""


@dataclass(frozen=True)
class LintReport:
    """All that was found, and what counts."""

    findings: tuple[Finding, ...]
    chains: Mapping[str, PrecedenceChain]
    """Chains of the known variables and of those that look like them."""
    notes: tuple[str, ...] = ()
    """What could not be looked into."""
    read: tuple[str, ...] = ()
    """The number of commands read of each script."""

    @property
    def has_errors(self) -> bool:
        """Whether anything does not do what it says."""
        return count_severities(self.findings)["error"] > 0

    def origins(self) -> Iterator[str]:
        """Every variable that is set, its value, and where that stands."""
        for name, chain in sorted(self.chains.items()):
            if chain.winner is not None:
                yield f"{'set':7}  {chain.winner.where} {name}: {_shown(chain.winner)}"

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "settings": {name: chain_as_json(chain) for name, chain in sorted(self.chains.items())},
            "notes": list(self.notes),
            "read": list(self.read),
        }


def chain_as_json(chain: PrecedenceChain) -> dict[str, Any]:
    """Who sets a variable and which setting wins, as plain values."""
    winner = chain.winner
    return {
        "value": printable_value(winner) if winner else None,
        "is_set": winner is not None,
        "where": winner.where if winner else None,
        "steps": [
            {
                "value": printable_value(setting),
                "origin": setting.origin,
                "where": setting.where,
                "fate": fate,
            }
            for setting, fate in chain.steps
        ],
    }


def is_communication_variable(name: str) -> bool:
    """Whether a name is one of those that this is about."""
    return name in variable_registry().variables or bool(_OURS.match(name))


def lint_layers(layers: Sequence[EnvironmentLayer], version: Version | None) -> LintReport:
    """Everything that is wrong, worst first; layers from the weakest on, files that only fill at the end."""
    chains = resolve_layers(layers)
    counts = effective_assignments(chains)
    used = frozenset().union(*(layer.used for layer in layers))
    ours = {
        name: chain
        for name, chain in chains.items()
        if is_communication_variable(name) and not _is_scripts_own(chain, used)
    }
    faults = [*find_conflicts(counts, version)]
    for chain in ours.values():
        if chain.winner is not None:
            faults += check_assignment(chain.winner, version, counts)
    findings = [_place_finding(fault, counts, version) for fault in faults]
    return LintReport(
        sort_lint_findings([*_check_places(ours), *findings]),
        ours,
        tuple(line for layer in layers for line in layer.notes),
        tuple(_coverage_note(layer) for layer in layers if layer.read is not None),
    )


def _place_finding(
    fault: Finding, counts: Mapping[str, VariableAssignment], version: Version | None
) -> Finding:
    """Add where the variable is set; drop a remedy whose value has itself a fault as bad or worse."""
    name = fault.subject
    if name not in counts:
        return fault
    fault = replace(fault, where=counts[name].where)
    if fault.proposal is None:
        return fault
    mended = {**counts, name: replace(counts[name], value=fault.proposal)}
    left = [*check_assignment(mended[name], version, mended)]
    left += [other for other in find_conflicts(mended, version) if other.subject == name]
    worst = SEVERITIES.index(fault.severity)
    is_sound = all(SEVERITIES.index(other.severity) > worst for other in left)
    return fault if is_sound else replace(fault, remedy="", proposal=None)


def _coverage_note(layer: EnvironmentLayer) -> str:
    unread = f", {len(layer.notes)} not looked into" if layer.notes else ""
    return f"{layer.title}: {layer.read} command{'' if layer.read == 1 else 's'} read{unread}"


def _is_scripts_own(chain: PrecedenceChain, used: Collection[str]) -> bool:
    """Whether a script only keeps something of its own under this name, which no NCCL reads."""
    registry = variable_registry()
    is_known = (
        chain.name in registry.variables or registry.lookalike(chain.name) or chain.name in registry.symbols
    )
    is_exported = any(setting.is_exported or setting.faults for setting, _ in chain.steps)
    if chain.name in used:
        return not is_known or not is_exported
    return not is_exported and not is_known and registry.nearest(chain.name) is None


def sort_lint_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each of them once, errors first, then by variable."""
    return sort_findings(
        sorted(findings, key=lambda finding: (finding.subject, finding.where, finding.message))
    )


def _check_places(chains: Mapping[str, PrecedenceChain]) -> Iterator[Finding]:
    """What is wrong with how a variable is written down, and what is set to no end."""
    for name, chain in chains.items():
        for setting, fate in chain.steps:
            for fault in setting.faults:
                yield replace(fault, subject=name, where=setting.where)
            if not setting.faults and fate.startswith("not exported") and _is_for_ranks(name):
                text = "is set without `export`, so that no rank sees it"
                severity: Severity = "error" if name in variable_registry().variables else "warning"
                yield Finding(severity, "variable", name, text, where=setting.where)
        values = {setting.value for setting, fate in chain.steps if not fate.startswith("not exported")}
        if chain.winner is not None and len(values) > 1:
            lost = ", ".join(
                f"{_shown(setting)} ({setting.where})"
                for setting, _ in chain.steps
                if setting is not chain.winner and setting.value != chain.winner.value
            )
            text = f"{_shown(chain.winner)} wins over {lost}"
            yield Finding("note", "variable", name, text, where=chain.winner.where)


def _is_for_ranks(name: str) -> bool:
    """Whether it matters that ranks see it: builds and scripts have names like NCCL's of their own."""
    lookalike = variable_registry().lookalike(name)
    return name in variable_registry().variables or lookalike is None or lookalike.reader == "torch"


def _shown(setting: VariableAssignment) -> str:
    value = printable_value(setting)
    return "a computed value" if value is None else quote_value(value)


def check_assignment(
    setting: VariableAssignment,
    version: Version | None,
    environment: Mapping[str, VariableAssignment] | None = None,
) -> Iterator[Finding]:
    """What is wrong with one variable taken by itself; the environment tells which platform this is."""
    variable = variable_registry().variables.get(setting.name)
    if variable is None:
        yield from _unknown(setting.name)
        return
    absence = variable.absence(version) if variable.owner == "nccl" else ""
    remedy = f"use {variable.instead}" if variable.instead else ""
    if absence:
        release = format_version(version or ())
        make = make_error if variable.removed and version and version >= variable.removed else make_warning
        yield make(variable.name, f"does nothing: it {absence}, and this is {release}", remedy)
        return
    if variable.removed and version is None:
        yield make_warning(variable.name, f"is not read from {format_version(variable.removed)} on", remedy)
    if variable.deprecated and (version is None or version >= variable.deprecated):
        yield make_note(variable.name, f"is deprecated since {format_version(variable.deprecated)}", remedy)
    if variable.kind == "undocumented":
        text = "is read by the library and documented nowhere we know; leave it unless you know why"
        yield make_note(variable.name, text)
    if setting.value is None:
        yield make_note(variable.name, "is computed by the shell, so that its value is not checked")
        return
    rule = value_in_release(variable.values, version)
    faults = list(check_value(variable.name, setting.value, rule, version)) if rule else []
    if is_demanded_by_platform(variable.name, setting.value, environment or {}):
        yield from (fault for fault in faults if fault.severity == "error")
        return
    yield from faults
    if not count_severities(faults)["error"]:
        yield from _check_leftover(variable, setting.value, version)


def _unknown(name: str) -> Iterator[Finding]:
    impostor = variable_registry().lookalike(name)
    if impostor is not None:
        yield _lookalike_issue(impostor)
        return
    if name in variable_registry().symbols:
        yield make_error(name, f"is not a variable but {variable_registry().symbols[name]}; it does nothing")
        return
    close = variable_registry().nearest(name)
    if name.startswith(("TORCH_NCCL_", "RCCL_")):
        hint = f"; did you mean {close}?" if close else ""
        text = f"is not known; {name.partition('_')[0]} reads more than is known here{hint}"
        yield make_warning(name, text)
    elif close:
        yield make_error(name, f"is not known, and NCCL never complains about that; did you mean {close}?")
    else:
        library = format_version(variable_registry().library)
        text = f"is not known: no NCCL up to {library} reads it, and nobody else that we know"
        yield make_warning(name, text)


def _lookalike_issue(lookalike: LookalikeVariable) -> Finding:
    text = f"; {lookalike.text}" if lookalike.text else ""
    if lookalike.reader == "torch":
        return make_warning(
            lookalike.name, f"is torch's old name, which NCCL never reads; use {lookalike.instead}{text}"
        )
    if lookalike.reader == "nobody":
        return make_note(lookalike.name, f"is not read by anything{text}")
    if lookalike.reader:
        return make_note(lookalike.name, f"is not read by NCCL but by {lookalike.reader}{text}")
    instead = f"; {lookalike.instead} is what comes nearest" if lookalike.instead else ""
    # That no plugin of any vendor reads it cannot be proved.
    return make_warning(
        lookalike.name, f"looks like one of NCCL's variables, and no release of NCCL reads it{instead}{text}"
    )


def _check_leftover(variable: CommVariable, value: str, version: Version | None) -> Iterator[Finding]:
    if not variable.left:
        return
    dangerous = variable.left.split(",")
    words = {word.strip().upper() for word in re.split("[,;]", value)} | {value.strip().upper()}
    figure = parse_c_integer(value)
    if dangerous == ["any"] or words & {word.upper() for word in dangerous} or str(figure) in dangerous:
        why: str | None = variable.danger or variable.effect
        if variable.name in ("NCCL_PROTO", "NCCL_ALGO"):
            why = _choice_objection(variable.name, value, version) or ""
        if why:
            yield make_warning(variable.name, f"{quote_value(value)}: left over from an experiment? {why}")


def _choice_objection(name: str, value: str, version: Version | None) -> str:
    """What is bad about a choice of protocols or algorithms; nothing where the choice by size stays."""
    chosen = parse_nccl_selection(name, value, version).chosen
    if name == "NCCL_PROTO":
        if all({"ll", "simple"} <= left for left in chosen.values()):
            return ""  # LL128 is kept away, or told of by itself
        if any("ll128" in left for left in chosen.values()):
            return variable_registry().variables[name].danger
    else:
        if any(not left & ELIGIBLE_ALGORITHMS[function] for function, left in chosen.items()):
            return variable_registry().variables[name].danger
        if all(_chooses_by_size(function, left) for function, left in chosen.items()):
            return ""
    return "A fixed choice is slower at other sizes."


def _chooses_by_size(function: str, left: frozenset[str]) -> bool:
    """Whether an algorithm for small messages and one for large ones are left, where a function has both."""
    return "ring" in left and ("tree" in left or "tree" not in ELIGIBLE_ALGORITHMS[function])
