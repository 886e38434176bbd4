"""The sbatch templates that admins own: where they are, what they extend, and their text for one job.

A value never becomes shell code: whatever a template prints is quoted, except text of the template itself
(blocks, macros) and an admin's own lines. The quoting holds everywhere in a script, also where a template has
put quotes around a value, in comments and in here-documents: there the value may come out with backslashes in
it, but it is never run.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, StrictUndefined, TemplateSyntaxError, nodes
from jinja2.exceptions import TemplateError, TemplateNotFound, TemplateRuntimeError, UndefinedError
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpcrun.errors import UsageError
from hpcrun.specs.profiles import config_directories

TEMPLATE_SUFFIX = ".sbatch.j2"
TEMPLATE_BLOCKS = ("directives", "setup", "environment", "launch", "teardown")
"""What a site may override of the shipped base."""
MAX_TEMPLATE_LAYERS = 16
"""A template that extends through more files than this goes in a circle."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_PIECES = re.compile(
    r"(?P<safe>[A-Za-z0-9_@%+=:,./-]+)|(?P<control>[\0-\x1f\x7f`]+)|(?P<wide>[^\0-\x7f]+)|(?P<other>.)"
)
_BROKEN_DIRECTIVE = re.compile(r"^#SBATCH.*(?<!\\)(?:\\\\)*\$'", re.MULTILINE)
_ESCAPED_BLANK = re.compile(r"(?<!\\)((?:\\\\)*)\\ ")
_OF_EXPRESSIONS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""What an expression of a template may raise in Python."""
_HINT = "`hpcrun template show --context` lists the values"


class ShellCode(str):
    """Shell text that is written as it is: text of a template, and an admin's own lines.

    Every operation on it gives plain text again, which is quoted. Jinja converts the results of a value's
    methods by calling the value's class: so the class, called, returns plain text too.
    """

    __slots__ = ()

    def __new__(cls, text: object = "") -> str:  # type: ignore[misc]
        """Plain text; `as_shell_code` is the way to code, which a template cannot call."""
        return str(text)


def as_shell_code(text: str) -> ShellCode:
    """Mark shell text as code; it must not contain unquoted values of a job."""
    return str.__new__(ShellCode, text)


def quote_shell_word(value: str) -> str:
    """One shell word, on one line, that is nowhere in a script taken for code; sbatch reads it alike."""
    if not value:
        return "''"
    return "".join(_quote_piece(match) for match in _PIECES.finditer(value))


def _quote_piece(match: re.Match[str]) -> str:
    text = match[0]
    if match["safe"]:
        return text
    if match["control"]:
        # Control characters and backticks, which inside backticks are literal only in this form.
        return "$'" + "".join(f"\\{ord(character):03o}" for character in text) + "'"
    # Not a backslash: in a plain locale it would hold for the first byte of a character alone.
    return f"'{text}'" if match["wide"] else f"\\{text}"


@dataclass(frozen=True)
class BatchTemplate:
    """One template file: its name, its origin, and its path."""

    name: str
    origin: str
    path: Path

    @property
    def key(self) -> str:
        """How a template names it in `extends`: site/train.sbatch.j2; a file on its own goes by its path."""
        return str(self.path) if self.origin == "path" else f"{self.origin}/{self.name}"


class TemplateLibrary:
    """The templates of the user, the site and the package, nearest first."""

    def __init__(self, directories: Mapping[str, Path] | None = None) -> None:
        self.directories = dict(config_directories() if directories is None else directories)

    def shipped(self) -> TemplateLibrary:
        """Return the library of the shipped templates only."""
        return TemplateLibrary({"shipped": self.directories["shipped"]})

    def templates(self) -> list[BatchTemplate]:
        """Every template that a job can name, by name; the first of several of one name is taken."""
        templates = []
        for origin, directory in self.directories.items():
            for path in directory.glob(f"*{TEMPLATE_SUFFIX}"):
                if not path.name.startswith("_") and _NAME.fullmatch(path.name):
                    templates.append(BatchTemplate(path.name, origin, path))
        order = list(self.directories)
        return sorted(
            templates,
            key=lambda template: (template.name.removesuffix(TEMPLATE_SUFFIX), order.index(template.origin)),
        )

    def find(self, word: str) -> BatchTemplate:
        """The template of a name (train), of a name with its origin (shipped/train), or of a path."""
        for spelling in (word, f"{word}{TEMPLATE_SUFFIX}"):
            template = self._look_up(spelling)
            if template is not None:
                return template
        path = Path(word)
        if path.is_file():
            return BatchTemplate(path.name, "path", path.absolute())
        names = ", ".join(
            dict.fromkeys(template.name.removesuffix(TEMPLATE_SUFFIX) for template in self.templates())
        )
        raise UsageError(f"{word}: no such template or file; there are: {names}")

    def _look_up(self, key: str) -> BatchTemplate | None:
        origin, slash, name = key.partition("/")
        origins = [origin] if slash else list(self.directories)
        name = name if slash else origin
        if not _NAME.fullmatch(name) or not name.endswith(TEMPLATE_SUFFIX):
            return None
        for place in origins:
            path = self.directories[place] / name if place in self.directories else None
            if path is not None and _is_template(path):
                return BatchTemplate(name, place, path)
        return None

    def chain(self, template: BatchTemplate) -> tuple[BatchTemplate, ...]:
        """Return the template and all that it extends, in this order; UsageError for one that cannot be
        read."""
        layers = [template]
        with self._told(template):
            while (parent := self._parent(layers[-1])) is not None:
                layers.append(parent)
                if parent in layers[:-1] or len(layers) > MAX_TEMPLATE_LAYERS:
                    inner = layers[-2]
                    own = f"; write shipped/{inner.name} for the one that comes with hpcrun"
                    raise UsageError(
                        f"{inner.path}: extends itself{own if inner.name == parent.name else ''}"
                    )
        return tuple(layers)

    def _parent(self, template: BatchTemplate) -> BatchTemplate | None:
        extends = next(self._tree(template).find_all(nodes.Extends), None)
        if extends is None:
            return None
        if not isinstance(extends.template, nodes.Const):
            wrong = "extends must name a template in quotes"
            raise TemplateSyntaxError(wrong, extends.lineno, template.key, str(template.path))
        name = str(extends.template.value)
        parent = self._look_up(name)
        if parent is None:
            wrong = f"extends {name}, which does not exist"
            raise TemplateSyntaxError(wrong, extends.lineno, template.key, str(template.path))
        return parent

    def _tree(self, template: BatchTemplate) -> nodes.Template:
        return self._environment.parse(read_template_source(template), template.key, str(template.path))

    def _user_layers(self, template: BatchTemplate) -> list[BatchTemplate]:
        """The layers to search for a mistake: those that are not shipped, if there are any."""
        layers = self.chain(template)
        return [layer for layer in layers if layer.origin != "shipped"] or list(layers)

    def file_location(self, template: BatchTemplate) -> str:
        """The file to look into first: the outermost one that is not shipped."""
        return str(self._user_layers(template)[0].path)

    def block_location(self, template: BatchTemplate, block: str) -> str:
        """File and line of a block where it was overridden last; the file alone where there is none."""
        for layer in self._user_layers(template):
            for node in self._tree(layer).find_all(nodes.Block):
                if node.name == block:
                    return f"{layer.path}:{node.lineno}"
        return self.file_location(template)

    def text_location(self, template: BatchTemplate, line: str, block: str) -> str:
        """File and line that a line of the script came from, as far as its text shows; else the block's."""
        best, place = 2, ""
        for layer in self._user_layers(template):
            for number, source in enumerate(read_template_source(layer).split("\n"), start=1):
                head = re.split(r"\{[{%#]", source, maxsplit=1)[0].strip()
                if len(head) > best and line.strip().startswith(head):
                    best, place = len(head), f"{layer.path}:{number}"
        return place or self.block_location(template, block)

    def unused_text(self, template: BatchTemplate) -> Iterator[tuple[str, str]]:
        """Yield text of a layer that no script would contain: file and line, and the reason."""
        layers = self.chain(template)
        for layer, *above in (layers[start:] for start in range(len(layers) - 1)):
            tree = self._tree(layer)
            defined = {block.name for parent in above for block in self._tree(parent).find_all(nodes.Block)}
            for block in _outermost_blocks(tree):
                if block.name not in defined:
                    near = difflib.get_close_matches(block.name, defined, n=1)
                    meant = f"did you mean {near[0]}? " if near else ""
                    yield (
                        f"{layer.path}:{block.lineno}",
                        f"the block {block.name} is in no template that this extends, so no script would"
                        f" contain it; {meant}there are: {', '.join(sorted(defined))}",
                    )
            for line in _text_outside(tree):
                yield (
                    f"{layer.path}:{line}",
                    "this is outside of every block, so no script would contain it",
                )

    def render(self, template: BatchTemplate, values: Mapping[str, Any]) -> str:
        """Render the script; UsageError with file and line for any error in the template."""
        self.chain(template)
        with self._told(template):
            text = str(self._environment.get_template(template.key).render(values))
        text = re.sub(r"^#SBATCH.*", lambda match: escape_directive(match[0]), text, flags=re.MULTILINE)
        broken = _BROKEN_DIRECTIVE.search(text)
        if broken:
            line = text[broken.start() :].partition("\n")[0]
            place = self.text_location(template, line, "directives")
            raise UsageError(
                f"{place}: a directive must not contain a line break, control character or backtick: {line}"
            )
        return text

    @cached_property
    def _environment(self) -> _TemplateEnvironment:
        return _TemplateEnvironment(self._load)

    def _load(self, key: str) -> tuple[str, str]:
        path = Path(key)
        template = BatchTemplate(path.name, "path", path) if path.is_absolute() else self._look_up(key)
        if template is None:
            raise TemplateNotFound(key)
        return read_template_source(template), str(template.path)

    @contextmanager
    def _told(self, template: BatchTemplate) -> Iterator[None]:
        """Convert Jinja's errors to one line with file and line."""
        try:
            yield
        except TemplateSyntaxError as error:
            where = f"{error.filename or template.path}:{error.lineno}"
            raise UsageError(f"{where}: {_one_line(error.message or 'is not a template')}") from None
        except TemplateNotFound as error:
            text = f"{error.name} does not exist"
            raise UsageError(f"{self._line_of(error, template)}: {text}") from None
        except TemplateError as error:
            hint = f"; {_HINT}" if isinstance(error, UndefinedError) else ""
            text = _one_line(error.message or type(error).__name__)
            raise UsageError(f"{self._line_of(error, template)}: {text}{hint}") from None
        except _OF_EXPRESSIONS as error:
            text = f"{type(error).__name__}: {_one_line(str(error))}"
            raise UsageError(f"{self._line_of(error, template)}: {text}") from None

    def _line_of(self, error: Exception, template: BatchTemplate) -> str:
        """The innermost template line of a traceback, in which Jinja has put the lines of templates."""
        folders = {str(folder) for folder in [*self.directories.values(), template.path.parent]}
        place, trace = str(template.path), error.__traceback__
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            if name == str(template.path) or (name.endswith(".j2") and str(Path(name).parent) in folders):
                place = f"{name}:{trace.tb_lineno}"
            trace = trace.tb_next
        return place


def _is_template(path: Path) -> bool:
    """Whether a template exists; UsageError for a broken link or a directory, which would hide another
    one."""
    try:
        if path.is_file():
            return True
        # Not exists(), to which a link that leads nowhere is nothing.
        if not os.path.lexists(path):
            return False
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    what = "is a link that leads nowhere" if path.is_symlink() else "is not a file"
    raise UsageError(f"{path}: {what}; put a template there, or take it away")


def _outermost_blocks(node: nodes.Node) -> Iterator[nodes.Block]:
    """Yield the blocks that are in no other block; inner ones move with the outer one."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Block):
            yield child
        else:
            yield from _outermost_blocks(child)


def _text_outside(tree: nodes.Template) -> Iterator[int]:
    """The lines of what is printed after `extends`, outside of blocks."""
    extends = next((at for at, node in enumerate(tree.body) if isinstance(node, nodes.Extends)), None)
    for node in tree.body[len(tree.body) if extends is None else extends :]:
        for piece in node.nodes if isinstance(node, nodes.Output) else ():
            text = piece.data if isinstance(piece, nodes.TemplateData) else "x"
            if text.strip():
                yield piece.lineno + text[: len(text) - len(text.lstrip())].count("\n")


def read_template_source(template: BatchTemplate) -> str:
    """The text of a template; UsageError when it cannot be read."""
    try:
        # Not read_text, which would hide line ends of another system.
        return template.path.read_bytes().decode()
    except UnicodeDecodeError:
        raise UsageError(f"{template.path}: is not text in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{template.path}: cannot be read: {error.strerror}") from None


def render_extension(template: BatchTemplate) -> str:
    """A template to be edited: it extends another one and overrides each of its blocks by itself."""
    blocks = [f"{{% block {block} %}}\n{{{{ super() -}}}}\n{{% endblock %}}" for block in TEMPLATE_BLOCKS]
    about = "{# Change blocks, before or after super(), or without it; remove those that stay as they are. #}"
    return "\n".join([about, f'{{% extends "{template.key}" %}}', *blocks, ""])


class _TemplateLoader(BaseLoader):
    def __init__(self, load: Callable[[str], tuple[str, str]]) -> None:
        self._load = load

    def get_source(self, environment: Any, template: str) -> tuple[str, str, Callable[[], bool]]:
        source, path = self._load(template)
        tree = environment.parse(source, template, path)
        for kind, tag in ((nodes.FilterBlock, "filter"), (nodes.ScopedEvalContextModifier, "autoescape")):
            forbidden = next(tree.find_all(kind), None)
            if forbidden is not None:
                wrong = f"the tag {tag} would get round the quoting; filter single values instead"
                raise TemplateSyntaxError(wrong, forbidden.lineno, template, path)
        return source, path, lambda: True


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja in which what a template has written is Code, and everything else is quoted when printed."""

    # Blocks, macros and whole scripts are put together by this.
    concat = staticmethod(lambda pieces: as_shell_code("".join(pieces)))

    def __init__(self, load: Callable[[str], tuple[str, str]]) -> None:
        super().__init__(
            loader=_TemplateLoader(load),
            undefined=StrictUndefined,
            finalize=_finalize_value,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        self.filters |= {"words": _join_words, "unquoted": _unquoted}


def _finalize_value(value: Any) -> str:
    """What `{{ value }}` writes; None and mappings are mistakes."""
    if isinstance(value, ShellCode | Undefined):
        return str(value)
    if isinstance(value, list | tuple):
        return " ".join(quote_shell_word(_plain_text(item)) for item in value)
    return quote_shell_word(_plain_text(value))


def _plain_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if value is None:
        raise TemplateRuntimeError("the value is null for this job; put it under {% if ... %}")
    raise TemplateRuntimeError(f"a {type(value).__name__} cannot be printed; print its items")


def _join_words(value: Iterable[Any]) -> str:
    """A list as one text that shlex.split takes apart again: for a variable that holds a command."""
    return shlex.join(_plain_text(item) for item in value)


def _unquoted(value: Any) -> ShellCode:
    """Return a value unquoted: the admin vouches that it is not shell code."""
    text = _plain_text(value)
    if not text.isprintable():
        raise TemplateRuntimeError("unquoted: the value contains a line break or control character")
    return as_shell_code(text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def escape_directive(line: str) -> str:
    """The text of a directive as sbatch takes it apart: to it a blank ends a word even behind a backslash.

    Only for comments: around quotes that a template has put itself this would split words.
    """
    return _ESCAPED_BLANK.sub(r"\1' '", line)


def quote_shell_words(words: Sequence[str]) -> str:
    """A command line as templates print a list."""
    return " ".join(map(quote_shell_word, words))
