"""Values of a job in a site's templates: whatever a template does with them, bash runs none of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from hpcrun.slurm.template import ShellCode, TemplateLibrary, as_shell_code

NASTY = (
    "$(touch x)",
    "`touch x`",
    ";touch x;",
    "'\"; touch x; '\"",
    "\ntouch x\n",
    "a\\\ntouch x #",
    "&touch x&",
    "|touch x",
    "{}${x:=$(touch x)}{0}%s",
    "END\ntouch x\nEND",
)
WRITTEN = (
    # Everything that counts as code: a macro's text, a block's, a set block's, an admin's line.
    "say('k')",
    "self.part()",
    "kept",
    "lines[0]",
    "lines | first",
    "say('k') | string",
)
FRAME = (
    "{% macro say(what) %}echo {0} {a} %s o {{ what }}{% endmacro %}"
    "{% macro called() %}{{ EXPR }}{% endmacro %}"
    "{% set kept %}echo {0} %s o{% endset %}"
    "#!/bin/bash\n{% block part %}echo {0} {a} %s o{% endblock %}\n"
    "#CUT\n: PLACES"
)
"""Where an expression stands: alone, in a word, in a macro that is code itself, between quotes."""
PLACES = ("{{ EXPR }}", "a{{ EXPR }}b\n{{ called() }}\n{{ called().format(v, a=v) }}", '"{{ EXPR }}"')
MORE = (
    "{c} ~ v", "{c} + v", "v + {c}", "{c} % v", "{c} % (v, v)", "{c} * 2", "{c}[1:]", "{c}[::-1]", "[{c}, v]",
    "({c}, v)", "{c} if not v else v", "{c} or v", "v and {c} ~ v", "{c}.format", "({c} | attr('format'))(v)",
    "({c} | attr('format_map'))({'a': v, '0': v})", "{c}.format(v, a=v)", "{c}.format_map({'a': v})",
    "({c} | list) | join(v)", "[{c}] | map('replace', 'o', v) | first", "[{c}] | map('format', v) | first",
    "[{c}] | map('string') | map('replace', 'o', v) | list", "({c} | safe).format(v, a=v)", "{c} | safe ~ v",
    "({c} | e) ~ v", "({c} | safe) + v", "({c} | safe) % v", "({c} | safe).join([v])", "{c}.join([v, v])",
    "{c}.split('o') | join(v)",
    "{c}.partition('o') | join(v)", "{c}.translate({111: v})", "v.join([{c}, {c}])",
    "say(v).format(v, a=v)",
    "say({c} ~ v)", "say({c}.replace('o', v))", "v", "[v]", "{'a': v}.a", "v | words",
    "[v, v] | words", "dict(a=v).items() | list | first", "cycler(v, v).next()", "joiner(v)()", "joiner(v)()",
    "namespace(x=v).x", "namespace(x={c} ~ v).x", "lines | join(v)", "lines + [v]", "v | string", "v | list",
    "self.part().replace('o', v)", "super", "range(3) | join(v)", "loop", "self", "say", "none",
    "{c}.__class__",
    "{c}.__add__(v)", "{c}.__class__(v)", "{c}.written(v)", "{c}['written'](v)", "({c} | attr('written'))(v)",
    "v.written(v)", "{c}.replace.__self__.__class__(v)", "{c} | replace('o', v)", "{c} | format(v)",
    "v | replace('a', {c})", "({c}, v) | max", "({c}, v) | min | string", "[[{c}, v]] | sum(start=[])",
)  # fmt: skip


def _expressions() -> list[str]:
    """Every method of text and every filter, on code, with values for its arguments."""
    calls = ("", "v", "'o', v", "90, v", "3, true, v", "v, a=v", "wrapstring=v", "[v, v]", "{'a': v, '0': v}")
    methods = [name for name in dir(str) if not name.startswith("_")]
    filters = sorted(set(_ENVIRONMENT.filters) - {"unquoted"})
    found = [one.replace("{c}", f"({code})") for one in MORE for code in WRITTEN]
    for call in calls:
        found += [f"lines[0].{name}({call})" for name in methods]
        found += [f"lines[0] | {name}({call})" for name in filters]
    return list(dict.fromkeys(found))


_ENVIRONMENT = TemplateLibrary().shipped()._environment


def _rendered(expression: str, values: Sequence[str]) -> Iterator[str]:
    """The scripts that it makes in several places; none where it is refused."""
    for place in PLACES:
        with suppress(TemplateError, TypeError, ValueError, LookupError, AttributeError, AssertionError):
            text = FRAME.replace("PLACES", place).replace("EXPR", expression)
            template = _ENVIRONMENT.from_string(text)
            for value in values:
                words = {"v": value, "lines": [as_shell_code("echo {0} {a} o")]}
                yield template.render(words).partition("#CUT\n")[2]
            continue
        return


def test_nothing_that_a_template_does_with_a_value_runs_it(tmp_path: Path) -> None:
    scripts: dict[str, str] = {}
    for number, expression in enumerate(_expressions()):
        values = [NASTY[number % len(NASTY)], NASTY[8]]
        for text in _rendered(expression, values):
            scripts.setdefault(text, expression)
    assert len(scripts) > 300
    # Each in a shell of its own, so that one that ends a quotation early does not hide the next.
    runner = (
        'n=0; while IFS= read -r -d "" one; do (eval "$one") </dev/null; [[ -e x ]] && rm x && echo "RAN $n"'
    )
    done = subprocess.run(
        ["bash", "-c", f"{runner}; n=$((n+1)); done"],
        input="\0".join([*scripts, ""]).encode(errors="replace"),
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        capture_output=True,
        check=False,
        timeout=200,
    )
    ran = [int(line.split()[1]) for line in done.stdout.decode().splitlines() if line.startswith("RAN ")]
    named = list(scripts.items())
    assert not [named[number] for number in ran]


@pytest.mark.parametrize("code", WRITTEN)
def test_a_method_of_code_gives_a_value_that_is_quoted(code: str) -> None:
    (text, *_) = _rendered(f"({code}).format(v, v, a=v)", ["$(touch x)"])
    assert "$(" not in text
    assert "\\$\\(touch\\ x\\)" in text


def test_code_called_as_a_class_gives_plain_text() -> None:
    code: Any = as_shell_code("a;b")
    assert type(code) is ShellCode
    for made in (type(code)("x"), ShellCode("x"), code[1:], code + "c", code.upper(), code.replace("a", "b")):
        assert type(made) is str
