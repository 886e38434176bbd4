"""Where settings come from and which of several wins: shell, profile, job, script, container, nccl.conf.

The process's environment beats the files. Among the files NCCL takes the user's (NCCL_CONF_FILE from 2.23 on,
else ~/.nccl.conf) before /etc/nccl.conf, each for what is not set yet.
"""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.finding import Finding
from hpcrun.tuning.registry.registry import Version
from hpcrun.tuning.variable_findings import make_error, make_warning
from hpcrun.units import format_bytes

_ASSIGNMENT = re.compile(r"(?:export |declare -x )?([A-Za-z_][A-Za-z0-9_]*|BASH_FUNC_\S+?)=(.*)", re.S)
_NAMED = re.compile(r"(?:export |declare -x )([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)
_VALUELESS = re.compile(r"(?:export|declare -x) [A-Za-z_][A-Za-z0-9_]*")
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "v": "\v", "f": "\f", "E": "\x1b"}
_LONGEST = 1023
"""What NCCL keeps of a name or a value in a file."""
_MOST_BYTES = 2**24
NCCL_SITE_CONF = Path("/etc/nccl.conf")
CONF_FILE_SINCE: Version = (2, 23)
_PORTABLE: Version = (2, 30)
"""From here on a line may end as on Windows, and the user's file is looked for in $HOME."""
"""From here on NCCL_CONF_FILE names the user's file."""
SECRET_VARIABLES = frozenset({"NCCL_PSK"})
"""Variables whose values are never printed."""


@dataclass(frozen=True)
class VariableAssignment:
    """One place that sets one variable."""

    name: str
    value: str | None
    """None: a shell computes it, so that it is not known here."""
    origin: str
    """shell, script, container, job, profile, or the file."""
    where: str
    """With its line where it has one."""
    is_exported: bool = True
    faults: tuple[Finding, ...] = ()
    raw: str = ""
    """The line as written, where it says more than the value."""


@dataclass(frozen=True)
class EnvironmentLayer:
    """What one source sets and takes away; `fills`: only what is not set before."""

    title: str
    settings: tuple[VariableAssignment, ...] = ()
    removed: Mapping[str, str] = field(default_factory=dict)
    """Names that it takes out, and where."""
    fills: bool = False
    notes: tuple[str, ...] = ()
    """What it could not see into."""
    used: frozenset[str] = frozenset()
    """Names whose value a script itself hands on, as `$NAME`."""
    read: int | None = None
    """Commands of a script that were read; None for what is not a script."""


@dataclass(frozen=True)
class PrecedenceChain:
    """All that sets one variable; the first that stands is what counts."""

    name: str
    winner: VariableAssignment | None
    """None: it was taken away again, or never exported."""
    steps: tuple[tuple[VariableAssignment, str], ...]
    """Every setting in the order of the layers, and what becomes of it."""


def resolve_layers(layers: Sequence[EnvironmentLayer]) -> dict[str, PrecedenceChain]:
    """For every name who sets it and who wins; layers from the weakest on, those that fill at the end."""
    state: dict[str, VariableAssignment] = {}
    steps: dict[str, list[tuple[VariableAssignment, str]]] = {}
    for layer in layers:
        for setting in layer.settings:
            story = steps.setdefault(setting.name, [])
            held = state.get(setting.name)
            if layer.fills and held is not None:
                story.append((setting, f"not looked at: {held.where} sets it"))
                continue
            if not setting.is_exported and held is None:
                story.append((setting, "not exported: no other process sees it"))
                continue
            if held is not None:
                at = next(i for i, (setting, _) in enumerate(story) if setting is held)
                story[at] = (held, f"replaced at {setting.where}")
            state[setting.name] = setting
            story.append((setting, "counts"))
        for name, where in layer.removed.items():
            gone = state.pop(name, None)
            if gone is not None:
                at = next(i for i, (setting, _) in enumerate(steps[name]) if setting is gone)
                steps[name][at] = (gone, f"taken away at {where}")
    return {name: PrecedenceChain(name, state.get(name), tuple(story)) for name, story in steps.items()}


def printable_value(setting: VariableAssignment) -> str | None:
    """A value as it may be shown."""
    return "(hidden)" if setting.name in SECRET_VARIABLES and setting.value else setting.value


def effective_assignments(chains: Mapping[str, PrecedenceChain]) -> dict[str, VariableAssignment]:
    """What counts in the end."""
    return {name: chain.winner for name, chain in chains.items() if chain.winner is not None}


def read_user_file(path: Path) -> str:
    """The text of a file that a person named; UsageError in one line when it cannot be had."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as problem:
        raise UsageError(f"{path}: cannot be read: {problem.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise UsageError(
            f"{path}: is larger than {format_bytes(_MOST_BYTES)}; that is not a list of variables"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not text in UTF-8") from None


def layer_from_environment(environ: Mapping[str, str], title: str = "shell") -> EnvironmentLayer:
    """The environment of a process that is at hand."""
    return EnvironmentLayer(
        title, tuple(VariableAssignment(name, value, title, title) for name, value in environ.items())
    )


def parse_environment_dump(text: str, name: str, origin: str) -> EnvironmentLayer:
    """An environment that was written down: `env`, `env -0`, `export -p`, /proc/PID/environ, an env-file.

    Also the JSON of `docker inspect` or `skopeo inspect --config`. UsageError where nothing in it is one.
    """
    if text.lstrip()[:1] in ("[", "{"):
        pairs = _from_json(text, name)
    elif "\0" in text:
        pairs = [(0, entry) for entry in text.split("\0") if entry]
    else:
        pairs = list(_parse_assignment_lines(text))
    settings = []
    for line, pair in pairs:
        match = _ASSIGNMENT.fullmatch(pair)
        if match is None:
            if line == 0:
                continue
            raise UsageError(
                f"{name}:{line}: {pair[:60]!r} is not a NAME=VALUE; write down `env` or `env -0`"
            )
        value = _unquoted(match[2]) if _NAMED.fullmatch(pair) else match[2]
        settings.append(VariableAssignment(match[1], value, origin, f"{name}:{line}" if line else name))
    return EnvironmentLayer(name, tuple(settings))


def _parse_assignment_lines(text: str) -> Iterator[tuple[int, str]]:
    """Assignments with their line; what follows one without being one belongs to its value."""
    start, held = 0, ""
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.removesuffix("\r")
        if _ASSIGNMENT.fullmatch(content):
            if start:
                yield start, held
            start, held = number, content
        elif _VALUELESS.fullmatch(content):
            continue
        elif start and content and not content.startswith("#"):
            held += f"\n{content}"
        elif content.strip() and not content.startswith("#"):
            yield number, content
    if start:
        yield start, held


def _unquoted(text: str) -> str:
    """What `export -p` wrote in quotes."""
    if len(text) >= 3 and text.startswith("$'") and text.endswith("'"):
        return re.sub(r"\\(.)", lambda match: _ANSI.get(match[1], match[1]), text[2:-1], flags=re.S)
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return re.sub(r'\\([\\"$`])', r"\1", text[1:-1])
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1].replace("'\\''", "'")
    return text


def _from_json(text: str, name: str) -> list[tuple[int, str]]:
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{name}: begins like JSON and is none; write NAME=VALUE lines instead") from None
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0]
    for key in ("Config", "config", "Env", "env"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
        raise UsageError(f"{name}: holds no list of NAME=VALUE; give `docker inspect IMAGE`, or lines")
    return [(0, item) for item in content]


def nccl_conf_paths(value: str | None, version: Version | None, root: Path = Path("/")) -> list[Path]:
    """The files that NCCL reads, those that win first; `value` is NCCL_CONF_FILE's."""
    site = root / NCCL_SITE_CONF.relative_to("/")
    if value and (version is None or version >= CONF_FILE_SINCE):
        below = root / value.lstrip("/")
        return [below if value.startswith("/") and below.exists() else Path(value), site]
    home = os.environ.get("HOME") if version is not None and version >= _PORTABLE else None
    try:
        home = home or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return [site]
    return [root / home.lstrip("/") / ".nccl.conf", site]


def parse_nccl_conf(text: str, name: str, version: Version | None = None) -> EnvironmentLayer:
    """A configuration file as NCCL reads it: # in the first column alone, nothing is trimmed or unquoted."""
    settings = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.removesuffix("\r") if version is not None and version >= _PORTABLE else raw
        if line.startswith("#") or not line.strip():
            continue
        where = f"{name}:{number}"
        key, equals, value = line.partition("=")
        if not equals:
            fault = make_error(key.strip(), "has no `=` and is passed over")
            settings.append(VariableAssignment(key.strip(), None, name, where, False, (fault,), line))
            continue
        settings.append(
            VariableAssignment(
                key[:_LONGEST],
                value[:_LONGEST],
                name,
                where,
                True,
                tuple(_check_conf_line(key, value, version)),
                line,
            )
        )
    return EnvironmentLayer(name, tuple(_repair_names(settings)), fills=True)


def _repair_names(settings: Sequence[VariableAssignment]) -> Iterator[VariableAssignment]:
    """A name that blanks keep NCCL from knowing is told by the name that was meant, and does not count."""
    for setting in settings:
        meant = setting.name.strip().removeprefix("export ").strip()
        if meant != setting.name:
            yield VariableAssignment(
                meant, setting.value, setting.origin, setting.where, False, setting.faults, setting.raw
            )
        else:
            yield setting


def _check_conf_line(key: str, value: str, version: Version | None) -> Iterator[Finding]:
    if key.strip().startswith("export "):
        yield make_error(key, "this is not a shell: `export` becomes part of the name; take it out")
    elif key != key.strip():
        yield make_error(key, "the blank is part of the name; take it out")
    if value.endswith("\r"):
        text = "the line ends as on Windows, and that end is part of the value"
        yield make_error(key, text) if version is not None else make_warning(key, f"{text} before NCCL 2.30")
    elif value != value.strip():
        yield make_warning(key, "the blank is part of the value; take it out")
    if value[:1] in ("'", '"'):
        yield make_error(key, "the quotes are part of the value; take them out")
    if re.search(r"\s#", value):
        yield make_error(key, "a comment behind the value is part of it; give it a line of its own")
    if "$" in value:
        yield make_error(key, "this is not a shell: $ is not replaced")
    if len(key) > _LONGEST or len(value) > _LONGEST:
        yield make_error(key, f"NCCL keeps {_LONGEST} characters and drops the rest")
