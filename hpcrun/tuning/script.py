"""What a batch script exports, found without running it; what a shell would compute stays unknown.

Both branches of an `if` are taken, in the order of their lines. A `$` in single quotes counts as computed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcrun.tuning.environment import Layer, Setting

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.S)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HERE = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_ENDS = re.compile(r"[();&|]+|[{}]")
_OPENERS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "time", "!", "exec", "command"})
_STARTERS = frozenset({"srun", "mpirun", "mpiexec", "mpiexec.hydra", "apptainer", "singularity", "docker"})
_MOST_JOINED = 60
"""Lines that a quoted text may span."""
_COMPUTED = re.compile(r"[$`]")


@dataclass
class _Script:
    name: str
    settings: list[Setting] = field(default_factory=list)
    local: dict[str, Setting] = field(default_factory=dict)
    """Assigned and, so far, not exported."""
    removed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exports_all: bool = False

    def put(self, name: str, value: str | None, where: str, *, exported: bool = True) -> None:
        setting = Setting(name, value, "script", where, exported or self.exports_all)
        if setting.is_exported:
            self.removed.pop(name, None)
            self.local.pop(name, None)
            self.settings.append(setting)
        elif name not in self.removed and any(one.name == name for one in self.settings):
            self.settings.append(Setting(name, value, "script", where))  # it stays exported
        else:
            self.local[name] = setting


def parse_script(text: str, name: str) -> Layer:
    """The exports of a script in the order of its lines, and what it takes away."""
    script = _Script(name)
    for line, words in _commands(text):
        where = f"{name}:{line}"
        if words and words[0] == "#SBATCH":
            _directive(script, words[1:], where)
        else:
            _command(script, words, where)
    settings = (*script.settings, *script.local.values())
    return Layer(name, settings, script.removed, notes=tuple(script.notes))


def drops_shell(text: str) -> bool:
    """Whether `#SBATCH --export` keeps the submitting shell's environment out of the job."""
    values = re.findall(r"^#SBATCH\s+(?:.*\s)?--export[=\s]\s*(\S+)", text, re.M)
    return bool(values) and "ALL" not in values[-1].strip("'\"").upper().split(",")


def _commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Each simple command with its line, as words without quotes; #SBATCH lines as they are."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        start = at
        line = lines[at].removesuffix("\r")
        at += 1
        if line.startswith("#SBATCH"):
            yield start + 1, line.split()
            continue
        while line.endswith("\\") and at < len(lines):
            line = line[:-1] + lines[at].removesuffix("\r")
            at += 1
        words = _split(line)
        joined = 1
        while words is None and at < len(lines) and joined < _MOST_JOINED:
            line += f"\n{lines[at]}"
            at += 1
            joined += 1
            words = _split(line)
        if words is None:
            at = start + 1
            continue
        here = _HERE.search(line)
        if here:
            ends = (number for number in range(at, len(lines)) if lines[number].strip() == here[2])
            at = next(ends, at - 1) + 1
        yield from ((start + 1, command) for command in _simple(words))


def _split(line: str) -> list[str] | None:
    """Words and operators; None where a quote is still open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return None


def _simple(words: Sequence[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in words:
        if word.startswith("#"):
            break
        if _ENDS.fullmatch(word):
            if command:
                yield command
            command = []
        elif word in _OPENERS and not command:
            continue
        else:
            command.append(word)
    if command:
        yield command


def _directive(script: _Script, words: Sequence[str], where: str) -> None:
    for at, word in enumerate(words):
        if word.startswith("#"):
            break
        if word.startswith("--export=") or (word == "--export" and at + 1 < len(words)):
            value = word.partition("=")[2] or words[at + 1]
            _exported_list(script, value.strip("'\""), where)


def _exported_list(script: _Script, text: str, where: str) -> None:
    for item in text.split(","):
        match = _ASSIGNMENT.fullmatch(item)
        if match:
            script.put(match[1], _known(match[3]), where)


def _command(script: _Script, words: list[str], where: str) -> None:
    assigned = []
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        assigned.append((match[1], None if match[2] else _known(match[3])))
        words = words[1:]
    for name, value in assigned:
        # Before a command it is that command's alone, which is what starts the ranks.
        script.put(name, value, where, exported=bool(words))
    if not words:
        return
    verb, rest = words[0].rpartition("/")[2], words[1:]
    if verb in ("export", "declare", "typeset"):
        _export(script, verb, rest, where)
    elif verb == "unset":
        for name in (word for word in rest if _NAME.fullmatch(word)):
            script.local.pop(name, None)
            script.removed[name] = where
    elif verb == "set" and ("-a" in rest or "allexport" in rest):
        script.exports_all = "+o" not in rest
    elif verb == "set" and "+a" in rest:
        script.exports_all = False
    elif verb == "env":
        _command(script, [word for word in rest if not word.startswith("-")], where)
    elif verb in ("source", ".", "module", "ml", "conda", "mamba", "spack"):
        script.notes.append(f"{where}: what `{' '.join(words)[:60]}` sets is not known here")
    elif verb in _STARTERS:
        _starter(script, rest, where)


def _export(script: _Script, verb: str, rest: Sequence[str], where: str) -> None:
    flags = "".join(word[1:] for word in rest if word.startswith("-"))
    if verb != "export" and "x" not in flags:
        return
    for word in rest:
        match = _ASSIGNMENT.fullmatch(word)
        if match:
            script.put(match[1], None if match[2] else _known(match[3]), where)
        elif _NAME.fullmatch(word) and word in script.local:
            held = script.local[word]
            script.put(word, held.value, held.where)
        elif _NAME.fullmatch(word) and "n" in flags:
            script.removed[word] = where


def _starter(script: _Script, rest: Sequence[str], where: str) -> None:
    """The options by which srun, mpirun, mpiexec and container commands set variables."""
    for at, word in enumerate(rest):
        following = rest[at + 1] if at + 1 < len(rest) else ""
        if word.startswith("--export="):
            _exported_list(script, word.partition("=")[2], where)
        elif word == "--export":
            _exported_list(script, following, where)
        elif word.startswith("--env="):
            _exported_list(script, word.removeprefix("--env="), where)
        elif word in ("-x", "--env", "-e"):
            _exported_list(script, following, where)
        elif word in ("-genv", "-env") and _NAME.fullmatch(following) and at + 2 < len(rest):
            script.put(following, _known(rest[at + 2]), where)


def _known(value: str) -> str | None:
    """A value, unless a shell has to compute it."""
    return None if _COMPUTED.search(value) else value
