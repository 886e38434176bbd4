"""What a command line of Lustre's `lfs` may say: verbs, options, values and exit codes, as a table.

Only what hpcrun uses. `parse_lfs_command` takes a command line apart or refuses it: tests hold every command
that runs, and the emulated Lustre, to this table. Sources are files of the Lustre repository.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STRIPE_UNIT = 64 << 10
MAX_STRIPES = 2000
"""lustre/include/uapi/linux/lustre/lustre_user.h: LOV_MAX_STRIPE_COUNT."""
_SUFFIX = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_SIZE = re.compile(r"(\d{1,19})([kmgtp]?)", re.I | re.A)
_OSTS = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.A)
_POOL = re.compile(r"([A-Za-z0-9_-]{1,8}\.)?[A-Za-z0-9._-]{1,15}", re.A)


def parse_stripe_size(text: str) -> int:
    """Bytes, as `lfs` takes a stripe size: K, M, G… are powers of 1024, below 4096 it means KiB."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    size = int(match[1]) * _SUFFIX[match[2].lower()]
    return size << 10 if size < 4096 else size


def parse_ost_list(text: str) -> list[int]:
    """The indices of a list such as 1,2-4,7."""
    if not _OSTS.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of OSTs, such as 1,2-4,7")
    columns: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        columns += range(int(first), int(last or first) + 1)
    if not columns or len(set(columns)) != len(columns):
        raise ValueError(f"{text!r} is not a list of different OSTs")
    return columns


def _integer_between(least: int, most: int) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not re.fullmatch(r"-?\d{1,6}", text, re.A) or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not from {least} to {most}")

    return check


def _check_stripe_size(text: str) -> None:
    if parse_stripe_size(text) % STRIPE_UNIT:
        raise ValueError(f"{text!r} is not a multiple of 64 KiB")


def _check_component_end(text: str) -> None:
    if text.lower() not in ("-1", "eof"):
        _check_stripe_size(text)


def _matching_pattern(pattern: str, what: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not re.fullmatch(pattern, text, re.A):
            raise ValueError(f"{text!r} is no {what}")

    return check


def _check_pool(text: str) -> None:
    if not _POOL.fullmatch(text):
        raise ValueError(f"{text!r} is not a name of a pool: letters, digits, . _ -, 15 at most")


def _check_osts(text: str) -> None:
    parse_ost_list(text)


class LfsOption(NamedTuple):
    """An option of a verb: its names, the first one short, and what checks its value."""

    names: tuple[str, ...]
    value: Callable[[str], None] | None
    """None: it takes no value."""
    source: str


@dataclass(frozen=True)
class LfsVerb:
    """A verb of `lfs`."""

    options: tuple[LfsOption, ...]
    exclusive: tuple[tuple[str, ...], ...]
    """Of each of these groups one at most."""
    exit_codes: dict[int, str]
    source: str
    required: str = ""
    """Of these options one at least."""


_SETSTRIPE, _GETSTRIPE = "Documentation/man1/lfs-setstripe.1", "Documentation/man1/lfs-getstripe.1"
_DF, _QUOTA = "Documentation/man1/lfs-df.1", "Documentation/man1/lfs-quota.1"
_PROJECT = "Documentation/man1/lfs-project.1"
_ERRNO = "lustre/utils/lfs.c, main(): its errno; CMD_HELP of libcfs/include/libcfs/util/parser.h"
_NAME = _matching_pattern(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,63}", "user or group")
_FAILURES = {0: "done", 1: "not permitted", 2: "no such file", 4: "usage", 13: "denied", 22: "refused"}

LFS_VERBS = {
    "setstripe": LfsVerb(
        options=(
            LfsOption(
                ("-c", "--stripe-count"), _integer_between(-1, MAX_STRIPES), f"{_SETSTRIPE}: -1 is all OSTs"
            ),
            LfsOption(
                ("-C", "--overstripe-count"), _integer_between(-32, MAX_STRIPES), f"{_SETSTRIPE}: since 2.13"
            ),
            LfsOption(("-S", "--stripe-size"), _check_stripe_size, f"{_SETSTRIPE}: a multiple of 64 KiB"),
            LfsOption(
                ("-i", "--stripe-index"), _integer_between(-1, 65535), f"{_SETSTRIPE}: -1 lets the MDS choose"
            ),
            LfsOption(("-o", "--ost"), _check_osts, f"{_SETSTRIPE}: indices and ranges of them"),
            LfsOption(("-p", "--pool"), _check_pool, f"{_SETSTRIPE}; LOV_MAXPOOLNAME is 15"),
            LfsOption(
                ("-E", "--component-end", "--comp-end"), _check_component_end, f"{_SETSTRIPE}: -1 is eof"
            ),
            LfsOption(
                ("-z", "--extension-size", "--ext-size"), _check_stripe_size, f"{_SETSTRIPE}: changes -E"
            ),
            LfsOption(
                ("-L", "--layout"), _matching_pattern("raid0|mdt", "layout"), f"{_SETSTRIPE}: mdt first only"
            ),
        ),
        exclusive=(("-c", "-C"),),
        exit_codes=_FAILURES | {17: "it has a layout already", 19: "no such pool", 28: "no OST has room"},
        source=f"{_SETSTRIPE}; {_ERRNO}",
        required="-c -C -S -i -o -p -E",
    ),
    "getstripe": LfsVerb(
        options=(
            LfsOption(("-y", "--yaml"), None, f"{_GETSTRIPE}: YAML for plain layouts too"),
            LfsOption(("-d", "--directory"), None, f"{_GETSTRIPE}: the directory, not what is in it"),
        ),
        exclusive=(),
        exit_codes=_FAILURES | {25: "not on Lustre", 61: "it has no layout"},
        source=f"{_GETSTRIPE}; {_ERRNO}",
    ),
    "df": LfsVerb(
        options=(
            LfsOption(("-l", "--lazy"), None, f"{_DF}: never waits for a target that is gone"),
            LfsOption(("-i", "--inodes"), None, f"{_DF}: inodes in place of KiB"),
            LfsOption(("-p", "--pool"), _check_pool, f"{_DF}: only the OSTs of a pool"),
            LfsOption(("-v", "--verbose"), None, f"{_DF}: targets that are off, too"),
        ),
        exclusive=(),
        exit_codes=_FAILURES | {5: "a target failed", 11: "a target is gone", 19: "no such pool"},
        source=f"{_DF}; {_ERRNO}",
    ),
    "quota": LfsVerb(
        options=(
            LfsOption(("-q", "--quiet"), None, f"{_QUOTA}: no header"),
            LfsOption(("-u", "--user"), _NAME, f"{_QUOTA}: a name or a number"),
            LfsOption(("-g", "--group"), _NAME, f"{_QUOTA}: a name or a number"),
            LfsOption(("-p", "--projid"), _matching_pattern(r"\d{1,10}", "project"), f"{_QUOTA}: since 2.10"),
        ),
        exclusive=(("-u", "-g", "-p"),),
        exit_codes=_FAILURES | {3: "quotas are off", 5: "a target failed", 95: "not supported"},
        source=f"{_QUOTA}; {_ERRNO}",
        required="-u -g -p",
    ),
    "project": LfsVerb(
        options=(LfsOption(("-d", "--directory"), None, f"{_PROJECT}: the directory, not what is in it"),),
        exclusive=(),
        exit_codes=_FAILURES | {25: "not on Lustre", 95: "not supported"},
        source=f"{_PROJECT}; {_ERRNO}",
    ),
}


class LfsCommand(NamedTuple):
    """A command line of `lfs`, taken apart."""

    verb: str
    options: tuple[tuple[str, str], ...]
    """In order, by their short names, with their values."""
    operand: str


def parse_lfs_command(words: Sequence[str]) -> LfsCommand:
    """What comes after `lfs`; ValueError with the reason where the table does not allow it."""
    if not words or words[0] not in LFS_VERBS:
        raise ValueError(f"lfs {words[0] if words else ''}: no verb of {', '.join(LFS_VERBS)}")
    verb = LFS_VERBS[words[0]]
    rest, options = list(words[1:]), list[tuple[str, str]]()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        options += _parse_options(verb, word, rest)
    command = LfsCommand(words[0], tuple(options), rest[0] if rest else "")
    if len(rest) != 1 or not command.operand.startswith("/"):
        raise ValueError(f"lfs {words[0]}: needs one absolute path, not {' '.join(rest) or 'none'}")
    _check_combination(verb, command)
    return command


def _parse_options(verb: LfsVerb, word: str, rest: list[str]) -> list[tuple[str, str]]:
    """The options that a word holds (-dy holds two); the value of the last may be the next word."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        option = _find_option(verb, name)
        if option.value is None and equals:
            raise ValueError(f"{name} takes no value")
        return [(option.names[0], _take_value(option, value if equals else None, rest))]
    matches = []
    letters = word[1:]
    while letters:
        option = _find_option(verb, f"-{letters[0]}")
        letters = letters[1:]
        matches.append((option.names[0], _take_value(option, letters or None, rest)))
        if option.value is not None:
            break
    return matches


def _find_option(verb: LfsVerb, name: str) -> LfsOption:
    for option in verb.options:
        if name in option.names:
            return option
    allowed = " ".join(option.names[0] for option in verb.options)
    raise ValueError(f"{name} is none of {allowed}")


def _take_value(option: LfsOption, value: str | None, rest: list[str]) -> str:
    if option.value is None:
        return ""
    if value is None:
        if not rest:
            raise ValueError(f"{option.names[0]} needs a value")
        value = rest.pop(0)
    try:
        option.value(value)
    except ValueError as error:
        raise ValueError(f"{option.names[0]}: {error}") from None
    return value


def _check_combination(verb: LfsVerb, command: LfsCommand) -> None:
    """What the options of a command line mean for one another."""
    names = [name for name, _ in command.options]
    for group in verb.exclusive:
        if sum(name in group for name in names) > 1 and "-E" not in names:
            raise ValueError(f"lfs {command.verb}: only one of {' '.join(group)}")
    if verb.required and not set(verb.required.split()) & set(names):
        raise ValueError(f"lfs {command.verb}: needs one of {verb.required}")
    if command.verb != "setstripe":
        return
    given = dict(command.options)
    if "-o" in given and "-E" not in given:
        osts = parse_ost_list(given["-o"])
        if "-c" in given and int(given["-c"]) != len(osts):
            raise ValueError(f"lfs setstripe: -c {given['-c']} does not agree with {len(osts)} OSTs in -o")
        if "-i" in given and int(given["-i"]) not in osts:
            raise ValueError(f"lfs setstripe: -i {given['-i']} is not in -o {given['-o']}")
    if "-z" in names and "-E" not in names:
        raise ValueError("lfs setstripe: -z needs -E")
    if names.count("-L") and "-E" not in names:
        raise ValueError("lfs setstripe: -L needs -E")
    if names and "-E" in names and names[0] != "-E":
        raise ValueError("lfs setstripe: options before the first -E belong to no component")
    ends = [value.lower() for name, value in command.options if name == "-E"]
    sizes = [parse_stripe_size(end) for end in ends if end not in ("-1", "eof")]
    if sizes != sorted(set(sizes)) or any(end in ("-1", "eof") for end in ends[:-1]):
        raise ValueError("lfs setstripe: the ends of the components must rise")
