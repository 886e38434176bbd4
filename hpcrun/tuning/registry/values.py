"""Whether a value is one that a variable takes; the little language of `values` in registry.yaml.

bool | int A..B | bytes A..B | auto A..B                 numbers; either end may be left out
enum A,B | ienum A,B | words A,B | subsys A,B            one of them, in any case, several, several with ^
level | interfaces | devices | algo | proto | cidr | netdevs | policies | address | plugin | path | text
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence

from hpcrun.finding import Finding
from hpcrun.tuning.registry.nccl_grammar import check_device_list, check_nccl_selection
from hpcrun.tuning.registry.registry import Version
from hpcrun.tuning.variable_findings import closest_word, make_error, make_note, make_warning, quote_value

_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|\d+)", re.A)
_LEADING = re.compile(r"\s*[-+]?(?:0[xX][0-9a-fA-F]+|\d+)", re.A)
_UNIT = re.compile(r"[-+]?(\d+(?:\.\d+)?)\s*([KMG])i?B?", re.I | re.A)
_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30}
_TOO_LARGE = re.compile(r"\s*[-+]?(0[xX][0-9a-fA-F]{16,}|[1-9]\d{18,})\s*", re.A)
_MOST_DIGITS = 24


def check_value(name: str, value: str, rule: str, version: Version | None) -> Iterator[Finding]:
    """What is wrong with a value, by its rule; nothing when it is empty, which NCCL takes for unset."""
    kind, _, rest = rule.partition(" ")
    if not value:
        return
    if kind in _KINDS:
        yield from _KINDS[kind](name, value, rest)
    elif kind in ("algo", "proto"):
        yield from check_nccl_selection(name, value, version)
    elif kind in ("devices", "interfaces"):
        yield from check_device_list(name, value, version, ports=kind == "devices")


def parse_c_integer(value: str) -> int | None:
    """A value as C's strtoll with base 0 reads it when all of it is a number: 16, 0x10 and 020 are one."""
    text = value.strip()
    if not _NUMBER.fullmatch(text):
        return None
    digits = text.lstrip("+-").lower()
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") and digits != "0" else 10
    if len(digits) > _MOST_DIGITS:
        return None
    try:
        number = int(digits, base)
    except ValueError:  # 08: C stops before the 8
        return None
    number = -number if text.startswith("-") else number
    return number if -(2**63) <= number < 2**63 else None


def is_same_value(first: str, other: str) -> bool:
    """Whether two values are alike, numbers however they are written."""
    number = parse_c_integer(first)
    return first == other or (number is not None and number == parse_c_integer(other))


def _bool(name: str, value: str, rest: str) -> Iterator[Finding]:
    words = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}
    meant = words.get(value.strip().lower())
    if meant:
        yield make_error(
            name, f"{quote_value(value)} is not a number and reads as 0", f"write {meant}", meant
        )
        return
    number = parse_c_integer(value)
    if number is None:
        yield from _no_number(name, value, "0 or 1")
    elif number not in (0, 1):
        yield make_warning(name, f"{quote_value(value)}: 0 and 1 are all that it knows")


def _int(name: str, value: str, rest: str) -> Iterator[Finding]:
    number = parse_c_integer(value)
    if number is None:
        yield from _no_number(name, value, _range(rest) or "a whole number")
    elif not _is_in_range(number, rest):
        yield make_error(name, f"{quote_value(value)} is out of range; allowed: {_range(rest)}")
    elif re.fullmatch(r"\s*[-+]?0\d+\s*", value):
        yield make_warning(name, f"{quote_value(value)} begins with 0 and is read as octal: {number}")


def _bytes(name: str, value: str, rest: str) -> Iterator[Finding]:
    unit = _UNIT.fullmatch(value.strip())
    if unit:
        meant = int(float(unit[1]) * _SIZES[unit[2].upper()])
        read = _LEADING.match(value)
        text = (
            f"{quote_value(value)}: units are not read, it counts as {read[0].strip() if read else 0} bytes"
        )
        yield make_error(name, text, f"write {meant}", str(meant))
        return
    yield from _int(name, value, rest)


def _no_number(name: str, value: str, allowed: str) -> Iterator[Finding]:
    if _TOO_LARGE.fullmatch(value):
        yield make_error(name, f"{quote_value(value)} is too large and counts as unset; allowed: {allowed}")
        return
    read = _LEADING.match(value)
    number = read[0].strip()[:_MOST_DIGITS] if read else 0
    yield make_error(name, f"{quote_value(value)} is not a number and reads as {number}; allowed: {allowed}")


def _auto(name: str, value: str, rest: str) -> Iterator[Finding]:
    if value.strip().lower() not in ("auto", "inf"):
        yield from _int(name, value, rest)


def _enum(name: str, value: str, rest: str) -> Iterator[Finding]:
    allowed = rest.split(",")
    if value not in allowed:
        same = [word for word in allowed if word.lower() == value.strip().lower()]
        if same:
            remedy = f"write {same[0]}, capitals and blanks count"
            yield make_error(name, f"{quote_value(value)} is not known", remedy, same[0])
        else:
            text = f"{quote_value(value)} is not known{_nearest(value, allowed)}"
            yield make_error(name, text, "", closest_word(value, allowed))


def _ienum(name: str, value: str, rest: str) -> Iterator[Finding]:
    allowed = rest.split(",")
    if value.upper() not in {word.upper() for word in allowed}:
        text = f"{quote_value(value)} is not known{_nearest(value, allowed)}"
        yield make_error(name, text, "", closest_word(value, allowed))


def _words(name: str, value: str, rest: str) -> Iterator[Finding]:
    allowed = {word.upper() for word in rest.split(",")}
    for word in value.removeprefix("^").split(","):
        if word.upper() not in allowed:
            text = f"{quote_value(word)} is not known and is left out{_nearest(word, rest.split(','))}"
            yield make_warning(name, text)


def _level(name: str, value: str, rest: str) -> Iterator[Finding]:
    if value in _LEVELS:
        return
    if value.upper() in _LEVELS:
        upper = value.upper()
        yield make_error(name, f"{quote_value(value)} is ignored", f"write {upper}, capitals count", upper)
    elif value.isdecimal():
        yield make_note(
            name,
            f"{quote_value(value)} is the old numbering, which may change; write one of {', '.join(_LEVELS)}",
        )
    else:
        hint = _nearest(value, _LEVELS)
        text = f"{quote_value(value)} is not known and ignored{hint}"
        yield make_error(name, text, "", closest_word(value, _LEVELS))


def _cidr(name: str, value: str, rest: str) -> Iterator[Finding]:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        yield make_error(name, f"{quote_value(value)} is not a network; write it as 10.0.0.0/16 or fd02::/16")
        return
    if "/" not in value:
        whole = f"{value}/16"
        yield make_error(name, f"{quote_value(value)} has no length of prefix", f"write it as {whole}", whole)


def _netdevs(name: str, value: str, rest: str) -> Iterator[Finding]:
    if not re.fullmatch(r"AUTO|ALL|MAX:[1-9]\d*", value, re.I):
        yield make_error(name, f"{quote_value(value)} is not known; allowed: AUTO, ALL, MAX:n")


def _policies(name: str, value: str, rest: str) -> Iterator[Finding]:
    names = ("DEFAULT", "EFFICIENCY", "ZERO")
    for word in value.split("|"):
        if word.upper() not in names and value not in ("0", "1", "2"):
            yield make_error(name, f"{quote_value(word)} is not known{_nearest(word, names)}")


def _address(name: str, value: str, rest: str) -> Iterator[Finding]:
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^\s:\[\]]+):(\d{1,5})", value)
    if match is None or not 0 < int(match[1]) < 65536:
        yield make_error(name, f"{quote_value(value)} is not an address; write host:port or [IPv6]:port")


def _path(name: str, value: str, rest: str) -> Iterator[Finding]:
    if value.startswith("~"):
        yield make_error(name, f"{quote_value(value)}: ~ is not replaced here; write the whole path")


def _anything(name: str, value: str, rest: str) -> Iterator[Finding]:
    return iter(())


_KINDS: dict[str, Callable[[str, str, str], Iterator[Finding]]] = {
    "bool": _bool,
    "int": _int,
    "bytes": _bytes,
    "auto": _auto,
    "enum": _enum,
    "ienum": _ienum,
    "words": _words,
    "subsys": _words,
    "level": _level,
    "cidr": _cidr,
    "netdevs": _netdevs,
    "policies": _policies,
    "address": _address,
    "plugin": _anything,
    "path": _path,
    "text": _anything,
}
VALUE_KINDS = frozenset({*_KINDS, "algo", "proto", "devices", "interfaces"})
"""What a rule may begin with."""


def _is_in_range(number: int, rest: str) -> bool:
    low, _, high = rest.partition("..")
    return (not low or number >= int(low)) and (not high or number <= int(high))


def _range(rest: str) -> str:
    low, _, high = rest.partition("..")
    return f"{low} to {high}" if low and high else f"{low} and above" if low else ""


def _nearest(word: str, allowed: Sequence[str]) -> str:
    close = closest_word(word, allowed)
    return f"{f'; did you mean {close}?' if close else ';'} allowed: {', '.join(allowed)}"
