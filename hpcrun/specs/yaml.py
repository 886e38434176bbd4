"""YAML as people mean it: no surprise types, no duplicate keys, and a line number for every key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcrun.errors import SpecError, SpecProblem, UsageError
from hpcrun.files import read_regular

MAX_YAML_VALUES = 20_000
"""A document that unfolds to more is a mistake or an attack (aliases of aliases)."""
MAX_YAML_DEPTH = 20
LIST_KEY = "items"
"""The key of what parse_list has read."""

_CORE = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
)
# NUL and halves of surrogate pairs can be written as escapes, but no file name or UTF-8 file can hold them.
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


_HINTS = {
    r"'\t' that cannot start": "indent with spaces, not with tabs",
    "mapping values are not allowed": "check the indentation, and put text that holds `: ` in quotes",
    "expected <block end>": "check the indentation",
}
"""What most often lies behind a complaint of the parser."""


class _CoreTypesLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's core types only: `no`, `012` and `4:00` stay text, `3e-4` is a number."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - so it is declared in the base class


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.1 or of the core types would take for a number or a bool."""

    yaml_implicit_resolvers = _CoreTypesLoader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        resolver = yaml.resolver.Resolver()
        kind: str = resolver.resolve(yaml.ScalarNode, data, (True, False))  # type: ignore[no-untyped-call]
        style = None if kind == f"{_CORE}str" else "'"
        # PyYAML loses line breaks such as \x85 and \u2028 in the other styles.
        return self.represent_scalar(f"{_CORE}str", data, style=style if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)


for _kind, _pattern, _first in _RESOLVERS:
    _CoreTypesLoader.add_implicit_resolver(_CORE + _kind, re.compile(rf"(?:{_pattern})\Z"), list(_first))


_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""What a shell puts in the place of a file."""


@dataclass(frozen=True)
class YamlDocument:
    """A parsed mapping, and where each of its (dotted) keys stands."""

    values: dict[str, Any]
    places: dict[str, str]

    def where(self, key: str) -> str:
        """File and line of a dotted key, or of the nearest parent that was written down."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key, "")


def load_yaml(path: Path, *, follow: bool = True) -> YamlDocument:
    """Read a YAML file into a Document; UsageError when it cannot be read, or is a link not to follow."""
    return parse_yaml(_read_yaml_text(path, follow=follow), str(path))


def load_yaml_list(path: Path) -> YamlDocument:
    """The same for a file that holds a list."""
    return parse_yaml_list(_read_yaml_text(path), str(path))


def _read_yaml_text(path: Path, *, follow: bool = True) -> str:
    try:
        if follow and str(path).startswith(_STREAMS):
            return path.read_text(encoding="utf-8")
        return read_regular(path, follow=follow).decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not text in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse one YAML mapping; every duplicate key and every syntax error names file and line."""
    node = _compose(text, name)
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value" if node else "empty"
        raise SpecError(
            [SpecProblem("", f"is {kind}; write keys with values, such as `name: first-run`", name)]
        )
    builder = _DocumentBuilder(name)
    values = builder.mapping(node, "", 0)
    if builder.problems:
        raise SpecError(builder.problems)
    return YamlDocument(values, builder.places)


def parse_yaml_list(text: str, name: str) -> YamlDocument:
    """The same for a document that is a list of mappings: `values` has one key, ITEMS, which holds them."""
    node = _compose(text, name)
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise SpecError([SpecProblem("", "is not a list; write an item a line, each begins with `- `", name)])
    builder = _DocumentBuilder(name)
    values = builder.value(node, LIST_KEY, 0)
    wrong = [
        SpecProblem("", "must be a mapping of keys to values", builder.places[f"{LIST_KEY}.{number}"])
        for number, entry in enumerate(values)
        if not isinstance(entry, dict)
    ]
    if builder.problems or wrong:
        raise SpecError([*builder.problems, *wrong])
    return YamlDocument({LIST_KEY: values}, builder.places)


def parse_yaml_value(text: str, key: str, name: str) -> Any:
    """The value of `key=value` on the command line, typed by the same rules; what is no YAML is text."""
    try:
        node = _compose(text, name)
    except SpecError:
        node = yaml.ScalarNode(_CORE + "str", text)
    if node is None:
        return None
    builder = _DocumentBuilder(name, numbered=False)
    value = builder.value(node, key, 0)
    if builder.problems:
        raise SpecError(builder.problems)
    return value


def render_yaml(values: dict[str, Any]) -> str:
    """A mapping as YAML that parse_document reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_CoreTypesLoader)
    except yaml.MarkedYAMLError as error:
        mark, began = error.problem_mark or error.context_mark, error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        since = f" that began on line {began.line + 1}" if began and mark and began.line < mark.line else ""
        words = ", ".join(part for part in (f"{error.context or ''}{since}", error.problem) if part)
        words += "".join(f"; {hint}" for symptom, hint in _HINTS.items() if symptom in words)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        place, words = name, f"line {line} holds the character U+{ord(text[error.position]):04X}"
    except yaml.YAMLError as error:
        place, words = name, str(error)
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF" that is no character
        place, words = name, str(error)
    except RecursionError:
        place, words = name, f"nested deeper than {MAX_YAML_DEPTH}"
    raise SpecError([SpecProblem("", f"is not valid YAML: {' '.join(words.split())}", place)])


class _DocumentBuilder:
    """Walks a node tree into plain values, noting the place of every key and every mistake."""

    def __init__(self, name: str, *, numbered: bool = True) -> None:
        self.places = {"": name}
        self.problems: list[SpecProblem] = []
        self._name = name
        self._numbered = numbered
        self._count = 0

    def value(self, node: yaml.Node, key: str, depth: int) -> Any:
        self._count += 1
        if depth > MAX_YAML_DEPTH or self._count > MAX_YAML_VALUES:
            limit = (
                f"nested deeper than {MAX_YAML_DEPTH}"
                if depth > MAX_YAML_DEPTH
                else f"more than {MAX_YAML_VALUES} values"
            )
            raise SpecError(
                [*self.problems, SpecProblem(key, f"{limit}; is it an alias of itself?", self._at(node))]
            )
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key, depth)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.places.setdefault(f"{key}.{index}", self._at(item))
                items.append(self.value(item, f"{key}.{index}", depth + 1))
            return items
        return self._scalar(node, key)

    def mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            word = key_node.value
            if not isinstance(word, str) or not word or not word.isprintable():
                self._refuse(key_node, key, "a key must be a plain word")
                continue
            dotted = f"{key}.{word}" if key else word
            line = key_node.start_mark.line + 1
            if word in result:
                self._refuse(key_node, dotted, f"stands twice, first on line {lines[word]}; remove one")
                continue
            lines[word] = line
            self.places[dotted] = self._at(key_node)
            result[word] = self.value(value_node, dotted, depth + 1)
        return result

    def _scalar(self, node: yaml.Node, key: str) -> Any:
        text = str(node.value)
        if _NO_TEXT.search(text):
            self._refuse(node, key, "holds a character that cannot be written as UTF-8")
            return None
        try:
            match node.tag.removeprefix(_CORE):
                case "str" | "!":
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text)
                case "float":
                    return float(re.sub(r"\.(?=[in])", "", text.lower()))
        except (KeyError, ValueError):
            pass
        self._refuse(node, key, f"{text[:60]!r} is not a plain value of type {node.tag.removeprefix(_CORE)}")
        return None

    def _at(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}" if self._numbered else self._name

    def _refuse(self, node: yaml.Node, key: str, text: str) -> None:
        self.problems.append(SpecProblem(key, text, self._at(node)))
