"""NCCL's two little languages as it reads them: choices of algorithms and protocols, and device lists; pure.

NCCL_ALGO and NCCL_PROTO were a flat list up to 2.23, where a word that is not known is passed over in
silence. From 2.24 on it is `list;function:list;function:^list`, where such a word ends the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpcrun.finding import Finding
from hpcrun.tuning.registry.device_names import DeviceList, parse_device_list
from hpcrun.tuning.registry.registry import Version, format_version
from hpcrun.tuning.variable_findings import closest_word, make_error, make_note, make_warning, quote_value

NCCL_FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
NCCL_PROTOCOLS = ("ll", "ll128", "simple")
NCCL_ALGORITHMS: Mapping[str, tuple[Version, Version | None]] = {
    "ring": ((2, 5), None),
    "tree": ((2, 5), None),
    "collnet": ((2, 5), (2, 14)),
    "collnetchain": ((2, 14), None),
    "collnetdirect": ((2, 14), None),
    "nvls": ((2, 17), None),
    "nvlstree": ((2, 18), None),
    "pat": ((2, 23), None),
}
"""The releases that know each name: from, and up to but without."""

_SCATTERING = frozenset({"ring", "pat", "nvls", "collnetdirect"})
ELIGIBLE_ALGORITHMS: Mapping[str, frozenset[str]] = {
    "broadcast": frozenset({"ring"}),
    "reduce": frozenset({"ring"}),
    "allgather": _SCATTERING,
    "reducescatter": _SCATTERING,
    "allreduce": frozenset({"ring", "tree", "collnet", "collnetchain", "collnetdirect", "nvls", "nvlstree"}),
}
"""Which algorithms a function has at all."""

PER_FUNCTION_SINCE: Version = (2, 24)
"""From here on functions can be named, and a word that is not known is fatal."""
FROM_EMPTY_SINCE: Version = (2, 31)
"""From here on NCCL_ALGO begins with nothing chosen, which counts for the functions that NCCL_PROTO names."""
FORCED_LL128_DANGER = (
    "it would turn LL128 on where NCCL has it off, which corrupts data in silence, and a check that passed is"
    " no proof; where it is safe NCCL takes LL128 by itself"
)
_RAILS: Version = (2, 30)
_MOST_DEVICES = 32
_LONGEST_INTERFACE = 15
_DRIVERS = frozenset({"mlx4", "mlx5", "hfi1"})
"""Prefixes of all adapters of a driver."""
_WHOLE = re.compile(r"\d$")
_ZERO = re.compile(r"(?<!\d)0$")
_FEW_MORE = re.compile(r"(?<!\d)[1-9]$")
"""Adapters are counted without leading zeros, and no host has a hundred."""
_NOWHERE = re.compile(r"lo|(docker|virbr|br-|veth|cni|flannel|cali)\w*")


@dataclass(frozen=True)
class NcclSelection:
    """What a value chooses: for each function that it covers the choices that are left."""

    chosen: Mapping[str, frozenset[str]]
    """The choices of the functions that the value names."""
    has_default: bool
    """Whether it begins with a list for all functions."""
    faults: tuple[Finding, ...] = ()
    words: frozenset[str] = frozenset()
    """What is listed in it without ^."""

    @property
    def is_valid(self) -> bool:
        """Whether NCCL takes it."""
        return not any(fault.severity == "error" for fault in self.faults)


@dataclass
class _SelectionReader:
    """Reads one value; `choices` are the words that this release knows."""

    name: str
    choices: Sequence[str]
    version: Version | None
    faults: list[Finding] = field(default_factory=list)
    listed: set[str] = field(default_factory=set)

    @property
    def is_strict(self) -> bool:
        return self.version is None or self.version >= PER_FUNCTION_SINCE

    def error(self, text: str) -> None:
        self.faults.append(make_error(self.name, text))

    def elements(self, text: str) -> frozenset[str]:
        """The choices of one list; with ^ all the others."""
        inverted = text.startswith("^")
        choices = set()
        for word in text.removeprefix("^").split(","):
            if not word:
                continue
            if word.lower() in self.choices:
                choices.add(word.lower())
                if not inverted:
                    self.listed.add(word.lower())
            else:
                self._refuse(word)
        return frozenset(self.choices) - choices if inverted else frozenset(choices)

    def _refuse(self, word: str) -> None:
        releases = NCCL_ALGORITHMS.get(word.strip().lower())
        if word != word.strip() and word.strip().lower() in self.choices:
            hint = "; take the blank out, it counts"
        elif "ring" in self.choices and releases is not None and self.version is not None:
            since, until = releases
            end = f"to before {format_version(until)}" if until else "on"
            hint = f"; it is known from {format_version(since)} {end}"
        else:
            close = closest_word(word.strip().lower(), self.choices)
            hint = f"{f'; did you mean {close}?' if close else ';'} allowed: {', '.join(self.choices)}"
        until_old = "ends the job" if self.is_strict else "is passed over in silence"
        on = "" if self.version else " from 2.24 on"
        self.error(f"{quote_value(word)} is not known and {until_old}{on}{hint}")


def known_nccl_choices(name: str, version: Version | None) -> tuple[str, ...]:
    """The words that NCCL_ALGO, or NCCL_PROTO, takes in a release."""
    if name.endswith("PROTO"):
        return NCCL_PROTOCOLS
    if version is None:
        return tuple(word for word, (_, until) in NCCL_ALGORITHMS.items() if until is None)
    return tuple(
        word
        for word, (since, until) in NCCL_ALGORITHMS.items()
        if since <= version and (until is None or version < until)
    )


def parse_nccl_selection(name: str, text: str, version: Version | None) -> NcclSelection:
    """What NCCL_ALGO or NCCL_PROTO chooses in a release, and what is wrong with it."""
    reader = _SelectionReader(name, known_nccl_choices(name, version), version)
    if not reader.is_strict:
        return _flat(reader, text)
    chosen: dict[str, frozenset[str]] = {}
    named: set[str] = set()
    has_default = False
    for at, part in enumerate(part for part in text.split(";") if part):
        pieces = [piece for piece in part.split(":") if piece]
        if len(pieces) < 2:
            if at:
                reader.error(f"{quote_value(part)} names no function; only the first list may, ends the job")
                continue
            has_default = True
            chosen |= dict.fromkeys(NCCL_FUNCTIONS, reader.elements(pieces[0] if pieces else ""))
            continue
        function = pieces[0].lower()
        if function not in NCCL_FUNCTIONS:
            close = closest_word(function, NCCL_FUNCTIONS)
            hint = f"{f'; did you mean {close}?' if close else ';'} allowed: {', '.join(NCCL_FUNCTIONS)}"
            reader.error(f"{quote_value(pieces[0])} is not a function and ends the job{hint}")
            continue
        if len(pieces) > 2:
            reader.error(f"{quote_value(part)} has more than one colon; what follows the second is lost")
        if function in named:
            reader.faults.append(make_warning(name, f"{function} stands twice; the last one holds"))
        named.add(function)
        chosen[function] = reader.elements(pieces[1])
    if text.startswith(";") and has_default:
        reader.error("begins with `;`, after which a list must name a function; ends the job")
    if version is None and named:
        reader.faults.append(
            make_warning(name, "names functions, which NCCL before 2.24 passes over in silence")
        )
    return NcclSelection(chosen, has_default, tuple(reader.faults), frozenset(reader.listed))


def _flat(reader: _SelectionReader, text: str) -> NcclSelection:
    if ":" in text or ";" in text:
        version = format_version(reader.version or PER_FUNCTION_SINCE)
        reader.error(
            f"names functions, which are read from 2.24 on; {version} passes all of it over in silence"
        )
        return NcclSelection({}, False, tuple(reader.faults))
    chosen = dict.fromkeys(NCCL_FUNCTIONS, reader.elements(text))
    return NcclSelection(chosen, True, tuple(reader.faults), frozenset(reader.listed))


def forces_ll128(name: str, value: str, version: Version | None) -> bool:
    """Whether a value makes NCCL use LL128 without its own check that GPUs and paths keep its stores whole.

    A protocol that NCCL_PROTO turns on is no longer looked at (src/graph/tuning.cc of 2.30.7, lines 446, 455
    and 517 to 536: LL128 is 2 by itself, and only 2 is held against compute capability, NVLink and path).
    """
    if name != "NCCL_PROTO":
        return False
    return any("ll128" in left for left in parse_nccl_selection(name, value, version).chosen.values())


def check_nccl_selection(name: str, text: str, version: Version | None) -> Iterator[Finding]:
    """All that is wrong with a value of NCCL_ALGO or NCCL_PROTO taken by itself."""
    selection = parse_nccl_selection(name, text, version)
    yield from selection.faults
    if name.endswith("PROTO"):
        if forces_ll128("NCCL_PROTO", text, version):
            how = "" if "ll128" in selection.words else ", since ^ turns on all that it does not list"
            yield make_warning(
                name,
                f"forces LL128 also where NCCL has turned it off{how}; that corrupts data in silence",
                "write ^LL128, or LL,Simple",
                "^LL128",
            )
        return
    if not selection.is_valid:
        return
    lost = ", ".join(functions_without_choice(selection))
    if lost and version is not None and version < PER_FUNCTION_SINCE:
        yield make_note(name, f"has no algorithm for {lost}, which fall back to ring")
    elif lost:
        since = "" if version else " from 2.24 on"
        is_list = not set(text) & set("^:;")
        yield make_error(
            name,
            f"leaves {lost} without an algorithm{since}, which ends a job that uses them",
            "add ring",
            f"{text},ring" if is_list else None,
        )


def functions_without_choice(selection: NcclSelection) -> list[str]:
    """The functions that none of their algorithms is left for."""
    return [
        function for function, left in selection.chosen.items() if not left & ELIGIBLE_ALGORITHMS[function]
    ]


def check_device_list(variable: str, text: str, version: Version | None, *, ports: bool) -> Iterator[Finding]:
    """What is wrong with a device list; `ports`: adapters, not interfaces."""
    devices = parse_device_list(text)
    if text.startswith("=^"):
        meant = "^" + text.replace("^", "", 1)
        remedy = f"write {quote_value(meant)}"
        yield make_error(variable, "begins with =^, which matches nothing", remedy, meant)
        return
    if not devices.entries:
        yield make_error(variable, "names no device, and so takes all")
    names = devices.names
    for name in names:
        if name[0] in "=^":
            yield make_error(
                variable, f"{quote_value(name)} matches nothing: the sign stands once, before the whole list"
            )
        elif name != name.strip():
            yield make_error(variable, f"{quote_value(name)} matches nothing: blanks are part of a name")
    twice = sorted(
        {name for entry in devices.entries if devices.entries.count(entry) > 1 for name in entry[:1]}
    )
    if twice:
        yield make_warning(variable, f"{quote_value(', '.join(twice))}: stands twice; was another one meant?")
    if len(names) > _MOST_DEVICES:
        yield make_error(variable, f"names {len(names)} devices; NCCL takes {_MOST_DEVICES} at most")
    if not devices.exact:
        yield from _find_prefix_traps(variable, text, devices, ports)
    yield from _fields(variable, devices, version) if ports else _interfaces(variable, devices)


def _find_prefix_traps(variable: str, text: str, devices: DeviceList, ports: bool) -> Iterator[Finding]:
    """A name that also takes longer ones, where nothing says that these are meant."""
    names = [name for name in devices.names if name.isprintable()]
    trapped = [name for name in names if _is_prefix_trap(name, names, ports)]
    if not trapped or (devices.excludes and not ports):
        return
    first = min(trapped, key=lambda name: name[-1]) if ports else trapped[0]
    shown = first[-_LONGEST_INTERFACE:]
    # A number that is 0 goes on with no further digit; a VLAN can follow any.
    further = [f"{shown}0"] * (not _ZERO.search(first)) + [f"{shown}.100"]
    other = f"{shown}0 to {shown}9" if ports else " and ".join(further)
    does = "leaves out" if devices.excludes else "takes"
    sign = "^=" if devices.excludes else "="
    exact = f"{sign}{text.removeprefix('^')}"
    # With = all entries are whole names, also those that are only the beginning of some.
    are_whole = len(names) == len(devices.names) and all(_WHOLE.search(name) for name in names)
    are_whole = are_whole and not _DRIVERS & set(names)
    # A second adapter of that name is often there, one above thirty or a second interface seldom.
    say = make_warning if ports and first[-1] in "12" else make_note
    yield say(
        variable,
        f"{quote_value(first)} also {does} {other}: names match by how they begin",
        f"write {quote_value(exact)}" if are_whole else "",
        exact if are_whole else None,
    )


def _is_prefix_trap(name: str, names: Sequence[str], ports: bool) -> bool:
    if name in _DRIVERS or not _WHOLE.search(name):
        return False
    if ports and not _FEW_MORE.search(name):
        return False
    longer = any(other != name and other.startswith(name) for other in names)
    covered = any(other != name and name.startswith(other) for other in names)
    return not longer and not covered


def _fields(variable: str, devices: DeviceList, version: Version | None) -> Iterator[Finding]:
    for entry in devices.entries:
        whole = ":".join(entry)
        if len(entry) > 4:
            text = f"{quote_value(whole)} has too many fields; the form is name:port:rail:plane"
            yield make_error(variable, text)
        elif len(entry) > 2 and version is not None and version < _RAILS:
            yield make_error(variable, f"{quote_value(whole)}: rail and plane are read from 2.30 on")
        for what, value in zip(("port", "rail", "plane"), entry[1:], strict=False):
            if not re.fullmatch(r"\d{1,3}" if what == "port" else r"-?\d{1,5}", value, re.A) and value:
                yield make_error(variable, f"{quote_value(whole)}: {quote_value(value)} is no {what}")


def _interfaces(variable: str, devices: DeviceList) -> Iterator[Finding]:
    for entry in devices.entries:
        name = entry[0]
        if len(entry) > 1:
            text = f"{quote_value(':'.join(entry))}: an interface has no port; a colon ends the name here"
            yield make_error(variable, text)
        if len(name) > _LONGEST_INTERFACE:
            text = f"{quote_value(name)} is longer than {_LONGEST_INTERFACE}, as no interface can be"
            yield make_error(variable, text)
        if not devices.excludes and _NOWHERE.fullmatch(name):
            text = f"{quote_value(name)} leads to no other host: it does for jobs on one node alone"
            yield make_warning(variable, text)
