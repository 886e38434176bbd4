"""What a batch script exports, found without running it; what a shell would compute stays unknown.

Both branches of an `if` are taken, in the order of their lines. A `$` in single quotes counts as computed.
A shell inside (`srun bash -c "..."`, a here-document, a script that the script itself writes) is read too;
what cannot be read is said in the notes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hpcrun.tuning.lint.environment import EnvironmentLayer, VariableAssignment
from hpcrun.tuning.lint.shell_words import ShellCommand, parse_shell_commands, strip_shell_comments

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.S)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_USE = re.compile(r"\$\{?#?([A-Za-z_][A-Za-z0-9_]*)")
_WHOLE_USE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?\})")
_STARTERS = frozenset(
    {"srun", "sbatch", "salloc", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun"}
    | {"apptainer", "singularity", "docker", "podman", "podman-hpc", "nerdctl", "enroot", "shifter", "ch-run"}
)
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "ash"})
_SHELL_VALUES = frozenset({"--rcfile", "--init-file", "-o", "+o", "-O", "+O"})
_ENV_VALUES = frozenset({"-C", "--chdir"})
_PRINTS = frozenset({"echo", "printf", "grep", "egrep", "[", "[[", "test"})
"""Commands that look at a value and hand it to nobody."""
_DEEPEST = 6
_COMPUTED = re.compile(r"[$`]")
_MENTION = re.compile(r"\b((?:TORCH_NCCL|NCCL|RCCL)_[A-Z0-9_]+)(?:\+?=|[\"']\]\s*=)(?!=)\s*(\S{0,80})")
_PRINT_ONLY = re.compile(r"\s*(?:echo|printf|grep|\[\[?|test)\b[^|>]*(?:>&2)?\s*")


@dataclass
class _ScriptState:
    name: str
    settings: list[VariableAssignment] = field(default_factory=list)
    local: dict[str, VariableAssignment] = field(default_factory=dict)
    """Assigned and, so far, not exported."""
    removed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exports_all: bool = False
    first_line: int = 1
    """Where it begins in the file, for a shell inside it."""
    depth: int = 0
    used: set[str] = field(default_factory=set)
    """Names whose value the script itself hands on."""
    written: dict[str, ShellCommand] = field(default_factory=dict)
    """Files that the script writes from here-documents."""
    seen: set[tuple[str, int]] = field(default_factory=set)
    """Which names were understood on which lines."""
    commands: int = 0

    def where(self, line: int) -> str:
        return f"{self.name}:{line}"

    def put(self, name: str, value: str | None, line: int, *, exported: bool = True) -> None:
        setting = VariableAssignment(name, value, "script", self.where(line), exported or self.exports_all)
        self.seen.add((name, line))
        if setting.is_exported:
            self.removed.pop(name, None)
            self.local.pop(name, None)
            self.settings.append(setting)
        elif name not in self.removed and any(setting.name == name for setting in self.settings):
            self.settings.append(
                VariableAssignment(name, value, "script", setting.where)
            )  # it stays exported
        else:
            self.local[name] = setting

    def value(self, name: str) -> str | None:
        """What a variable holds now, where that is known."""
        held = [setting for setting in self.settings if setting.name == name]
        last = self.local.get(name) or (held[-1] if held else None)
        return last.value if last else None


def parse_script_exports(text: str, name: str) -> EnvironmentLayer:
    """The exports of a script in the order of its lines, and what it takes away."""
    script = _ScriptState(name)
    _read_commands(script, text)
    script.notes += _find_unseen_lines(script, text)
    return EnvironmentLayer(
        name,
        (*script.settings, *script.local.values()),
        script.removed,
        notes=tuple(dict.fromkeys(script.notes)),
        used=frozenset(script.used),
        read=script.commands,
    )


def drops_shell_environment(text: str) -> bool:
    """Whether `#SBATCH --export` keeps the submitting shell's environment out of the job."""
    values = re.findall(r"^#SBATCH\s+(?:.*\s)?--export[=\s]\s*(\S+)", text, re.M)
    return bool(values) and "ALL" not in values[-1].strip("'\"").upper().split(",")


def _read_commands(script: _ScriptState, text: str) -> None:
    commands = parse_shell_commands(text)
    for line in commands.unread:
        where = script.where(script.first_line + line - 1)
        script.notes.append(f"{where}: a quote is never closed; this line was not looked into")
    for command in commands.found:
        line = script.first_line + command.line - 1
        script.commands += 1
        if command.words[:1] == ["#SBATCH"]:
            _directive(script, command.words[1:], line)
        else:
            placed = replace(command, line=line, document_line=script.first_line + command.document_line - 1)
            _command(script, placed)


def _read_subshell(script: _ScriptState, text: str, line: int) -> None:
    """What another shell would run: it inherits what is exported, and hands nothing back."""
    if script.depth >= _DEEPEST:
        script.notes.append(f"{script.where(line)}: shells inside shells inside this are not looked into")
        return
    inner = replace(script, local={}, exports_all=False, first_line=line, depth=script.depth + 1, commands=0)
    _read_commands(inner, text)
    script.commands += inner.commands
    script.local |= {name: setting for name, setting in inner.local.items() if name not in script.local}


def _find_unseen_lines(script: _ScriptState, text: str) -> Iterator[str]:
    """Lines that seem to set one of NCCL's variables in a way that was not understood."""
    spans = [(command.line, command.last_line) for command in parse_shell_commands(text).found]
    for number, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("#") or _PRINT_ONLY.fullmatch(line):
            continue
        first, last = next((span for span in spans if span[0] <= number <= span[1]), (number, number))
        for match in _MENTION.finditer(strip_shell_comments(line)):
            name, value = match[1], match[2].lstrip("\"'")
            is_seen = any((name, at) in script.seen for at in range(first, last + 1))
            if not is_seen and not value.startswith((f"${name}", f"${{{name}")):
                yield f"{script.where(number)}: {name} stands here in a form that was not looked into"


def _directive(script: _ScriptState, words: Sequence[str], line: int) -> None:
    for at, word in enumerate(words):
        if word.startswith("#"):
            break
        if word.startswith("--export=") or (word == "--export" and at + 1 < len(words)):
            value = word.partition("=")[2] or words[at + 1]
            _exported_list(script, value.strip("'\""), line)


def _exported_list(script: _ScriptState, text: str, line: int) -> None:
    for item in text.split(","):
        match = _ASSIGNMENT.fullmatch(item)
        if match:
            script.put(match[1], _known(match[3]), line)


def _command(script: _ScriptState, command: ShellCommand) -> None:
    words, line = _expanded(script, command.words), command.line
    _note_uses(script, words)
    assigned = []
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        assigned.append((match[1], None if match[2] else _known(match[3])))
        words = words[1:]
    for name, value in assigned:
        # Before a command it is that command's alone, which is what starts the ranks.
        script.put(name, value, line, exported=bool(words))
    if not words:
        return
    verb, rest = words[0].rpartition("/")[2], words[1:]
    if verb in ("export", "declare", "typeset"):
        _export(script, verb, rest, line)
    elif verb in ("local", "readonly"):
        _export(script, "declare", rest, line)
    elif verb == "for" and rest and _NAME.fullmatch(rest[0]):
        script.put(rest[0], None, line, exported=False)
    elif verb == "unset":
        for name in (word for word in rest if _NAME.fullmatch(word)):
            script.local.pop(name, None)
            script.removed[name] = script.where(line)
    elif verb == "set":
        if "-a" in rest or "allexport" in rest:
            script.exports_all = "+o" not in rest
        elif "+a" in rest:
            script.exports_all = False
    elif verb == "eval":
        _eval(script, " ".join(rest), line)
    elif verb in ("source", ".") and rest and rest[0] in script.written:
        written = script.written.pop(rest[0])  # so that it does not read itself
        _in_place(script, written.document or "", written.document_line)
        script.written[rest[0]] = written
    elif verb in ("source", ".", "module", "ml", "conda", "mamba", "spack"):
        script.notes.append(f"{script.where(line)}: what `{' '.join(words)[:60]}` sets is not known here")
    elif verb not in _PRINTS:
        _remember_file(script, words, command)
        _read_started_command(script, words, replace(command, words=words))


def _expanded(script: _ScriptState, words: Sequence[str]) -> list[str]:
    """The words with variables that the script itself has set, where such a one is a whole word."""
    if words and words[0] in _PRINTS:
        return list(words)
    expanded: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        match = _WHOLE_USE.fullmatch(word)
        value = script.value(match[1] or match[2]) if match else None
        if value is None:
            expanded.append(word)
            continue
        script.used.add(match[1] or match[2] if match else "")
        expanded += [value] if re.fullmatch(r"-\w*c", before) else _words(value)
    return expanded


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote is open
        return text.split()


def _note_uses(script: _ScriptState, words: Sequence[str]) -> None:
    if words and words[0] in _PRINTS:
        return
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        own = match[1] if match else ""
        script.used |= {name for name in _USE.findall(word) if name != own}


def _eval(script: _ScriptState, text: str, line: int) -> None:
    if _COMPUTED.match(text) or script.depth >= _DEEPEST:
        script.notes.append(f"{script.where(line)}: what `eval {text[:60]}` sets is not known here")
    else:
        _in_place(script, text, line)


def _in_place(script: _ScriptState, text: str, line: int) -> None:
    """Commands that this very shell runs."""
    before, script.first_line, script.depth = script.first_line, line, script.depth + 1
    if script.depth <= _DEEPEST:
        _read_commands(script, text)
    script.first_line, script.depth = before, script.depth - 1


def _remember_file(script: _ScriptState, words: Sequence[str], command: ShellCommand) -> None:
    if command.document is None:
        return
    for at, word in enumerate(words[:-1]):
        if word in (">", ">>", ">|") or word == "tee":
            script.written[words[at + 1]] = command


def _read_started_command(script: _ScriptState, words: Sequence[str], command: ShellCommand) -> None:
    """What a command hands to those that it starts: options, `env`, and shells among its words."""
    line, starts = command.line, False
    for at, word in enumerate(words):
        base, rest = word.rpartition("/")[2], words[at + 1 :]
        if base in _STARTERS and not starts:
            starts = True
            _read_launcher_options(script, rest, line)
        elif base == "env":
            _env(script, rest, command)
            return
        elif base in _SHELLS:
            _shell(script, base, rest, command)
            return
        elif (at == 0 or starts) and (word in script.written or word.endswith((".sh", ".bash"))):
            _script_file(script, word, line)
            return


def _env(script: _ScriptState, rest: Sequence[str], command: ShellCommand) -> None:
    words = list(rest)
    while words and (words[0].startswith("-") or _ASSIGNMENT.fullmatch(words[0])):
        word = words.pop(0)
        if match := _ASSIGNMENT.fullmatch(word):
            script.put(match[1], _known(match[3]), command.line)
        elif word in ("-i", "-", "--ignore-environment"):
            script.notes.append(
                f"{script.where(command.line)}: `env -i` starts with nothing; all that was set before is lost"
            )
        elif word in ("-u", "--unset") and words:
            script.removed[words.pop(0)] = script.where(command.line)
        elif word.startswith("--unset="):
            script.removed[word.removeprefix("--unset=")] = script.where(command.line)
        elif word in ("-S", "--split-string") and words:
            words = [*_words(words.pop(0)), *words]
        elif word.startswith(("-S", "--split-string=")):
            words = [*_words(word.removeprefix("-S").removeprefix("--split-string=")), *words]
        elif word in _ENV_VALUES and words:
            words.pop(0)
    if words:
        _read_started_command(script, words, command)


def _shell(script: _ScriptState, shell: str, rest: Sequence[str], command: ShellCommand) -> None:
    """A shell that a command starts: with -c a text, else a file, else what it is fed."""
    words, is_text = list(rest), False
    while words and words[0][:1] in ("-", "+") and words[0] not in ("-", "--"):
        word = words.pop(0)
        is_short = word.startswith("-") and not word.startswith("--")
        is_text = is_text or (is_short and "c" in word)
        if words and (word in _SHELL_VALUES or (is_short and word[1:].endswith(("o", "O")))):
            words.pop(0)
    words = [word for word in words if word not in ("-", "--")]
    if words and is_text:
        if _WHOLE_USE.fullmatch(words[0]):
            script.notes.append(
                f"{script.where(command.line)}: what `{shell} -c {words[0][:60]}` sets is not known here"
            )
        else:
            _read_subshell(script, words[0], command.line)
    elif words and words[0][:1] not in "<>":
        _script_file(script, words[0], command.line)
    elif command.document is not None:
        _read_subshell(script, command.document, command.document_line)
    elif "<" in words:
        script.notes.append(
            f"{script.where(command.line)}: what `{shell} {' '.join(words)[:60]}` sets is not known here"
        )


def _script_file(script: _ScriptState, name: str, line: int) -> None:
    key = name if name in script.written else name.removeprefix("./")
    written = script.written.pop(key, None)
    if written is not None:
        _read_subshell(script, written.document or "", written.document_line)
        script.written[key] = written
    else:
        script.notes.append(f"{script.where(line)}: what the script `{name[:60]}` sets is not known here")


def _export(script: _ScriptState, verb: str, rest: Sequence[str], line: int) -> None:
    flags = "".join(word[1:] for word in rest if word.startswith("-"))
    is_exported = verb == "export" or "x" in flags
    for word in rest:
        match = _ASSIGNMENT.fullmatch(word)
        if match:
            script.put(match[1], None if match[2] else _known(match[3]), line, exported=is_exported)
        elif is_exported and _NAME.fullmatch(word) and word in script.local:
            held = script.local[word]
            script.put(word, held.value, int(held.where.rpartition(":")[2]))
        elif _NAME.fullmatch(word) and "n" in flags and verb == "export":
            script.removed[word] = script.where(line)


def _read_launcher_options(script: _ScriptState, rest: Sequence[str], line: int) -> None:
    """The options by which srun, mpirun, mpiexec and container commands set variables."""
    for at, word in enumerate(rest):
        following = rest[at + 1] if at + 1 < len(rest) else ""
        if word.startswith(("--export=", "--env=", "--set-env=")):
            _exported_list(script, word.partition("=")[2], line)
        elif word in ("--export", "-x", "--env", "--set-env", "-e"):
            _exported_list(script, following, line)
        elif word.startswith("-e") and _ASSIGNMENT.fullmatch(word[2:]):
            _exported_list(script, word[2:], line)
        elif word in ("-genv", "-env") and _NAME.fullmatch(following) and at + 2 < len(rest):
            script.put(following, _known(rest[at + 2]), line)


def _known(value: str) -> str | None:
    """A value, unless a shell has to compute it."""
    return None if _COMPUTED.search(value) else value
