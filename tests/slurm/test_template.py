"""Templates: who is found first, what a value can never do, and mistakes with file and line."""

from __future__ import annotations

import random
import shlex
import subprocess
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.slurm.template import BatchTemplate, TemplateLibrary, quote_shell_word, quote_shell_words

HOSTILE = (
    "$(touch x)",
    "`touch x`",
    "`boom`",
    "; touch x",
    "&& touch x",
    "| touch x",
    "> x",
    "\ntouch x\n",
    "\r\ntouch x",
    "END\ntouch x\n",
    "'; touch x; '",
    '"; touch x; "',
    "'\"'$(touch x)\"'\"",
    "\\$(touch x)",
    "\\`touch x\\`",
    "a\\",
    "\\",
    "'",
    '"',
    "$'\\n'touch x",
    "${x:=$(touch x)}",
    "é; touch x",
    "\u2028touch x\u00a0; touch x",
    "*",
    "#x",
    "~root",
    "{a,b}",
    "!!",
    "%s%%",
    "",
    " ",
    "x=y",
    "<<END",
)
CONTEXTS = (
    "echo {}",
    'echo "{}"',
    "echo '{}'",
    "echo `echo {}`",
    'echo "$(echo {})"',
    "cat <<END\n{}\nEND",
    "cat <<'STOP'\n{}\nSTOP",
    "# {}",
    "y={}",
    "echo ${{y:-{}}}",
    "[[ a == {} ]]",
    "case a in {}) ;; esac",
)


@pytest.fixture
def library(tmp_path: Path) -> TemplateLibrary:
    shipped = TemplateLibrary().directories["shipped"]
    places = {"user": tmp_path / "user", "site": tmp_path / "site", "shipped": shipped}
    for name in ("user", "site"):
        places[name].mkdir()
    return TemplateLibrary(places)


def site(library: TemplateLibrary, text: str, name: str = "mine", origin: str = "site") -> BatchTemplate:
    path = library.directories[origin] / f"{name}.sbatch.j2"
    path.write_text(text)
    return library.find(f"{origin}/{name}")


def refused(library: TemplateLibrary, text: str, **values: object) -> str:
    template = site(library, text)
    with pytest.raises(UsageError) as caught:
        library.render(template, values)
    (line,) = str(caught.value).splitlines()
    return line.replace(f"{library.directories['site']}/", "")


@pytest.mark.process
def test_quoted_values_reach_the_program_as_they_are(tmp_path: Path) -> None:
    generator = random.Random(0)
    alphabet = "ab $`'\"\\;|&<>(){}[]*?!#~=%^\n\t\r\x01\x7fé\u2028\u00a0𝄞-_/:,."
    values = ["".join(generator.choices(alphabet, k=generator.randrange(12))) for _ in range(2000)]
    values = [*HOSTILE, *values]
    script = f"printf '%s\\0' {quote_shell_words(values)}\n"
    assert script.count("\n") == 1, "a quoted value stays on one line"
    for locale in ("C", "C.UTF-8"):
        done = subprocess.run(
            ["bash"], input=script.encode(), env={"LC_ALL": locale}, capture_output=True, check=True
        )
        assert done.stdout.decode().split("\0")[:-1] == values


def test_plain_values_stay_readable() -> None:
    assert quote_shell_word("/scratch/me/run-1_%j.out") == "/scratch/me/run-1_%j.out"
    assert quote_shell_word("two words") == "two\\ words"
    assert quote_shell_word("") == "''"


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.process
def test_a_value_is_not_run_wherever_it_stands(context: str, tmp_path: Path) -> None:
    (tmp_path / "boom").write_text("#!/bin/bash\ntouch x\n")
    (tmp_path / "boom").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for number, value in enumerate(HOSTILE):
        # In a shell of its own, so that one that ends a quotation early does not hide the next.
        script = context.format(quote_shell_word(value)) + "\n"
        folder = tmp_path / str(number)
        folder.mkdir()
        subprocess.run(
            ["bash"],
            input=script.encode(),
            cwd=folder,
            env=environ,
            capture_output=True,
            check=False,
            timeout=20,
        )
        assert list(folder.iterdir()) == [], f"{value!r} was run in {script!r}"


def test_what_is_quoted_and_what_is_not(library: TemplateLibrary) -> None:
    template = site(
        library,
        "{% macro say(what) %}echo {{ what }}{% endmacro %}\n"
        "{% block a %}\nv={{ v }}\n{% endblock %}\n"
        "{{ say(v) }}\n{{ self.a() }}{{ words }} {{ v ~ '!' }} {{ v | upper }} {{ 3 }} {{ true }}\n"
        "{{ words | words }}\n{{ 'a;b' | unquoted }} {{ v | safe }} {{ self.a() ~ v }}\n",
    )
    text = library.render(template, {"v": "a;b", "words": ["x y", 1]})
    assert text.splitlines() == [
        "v=a\\;b",
        "echo a\\;b",
        "v=a\\;b",
        "x\\ y 1 a\\;b\\! A\\;B 3 true",
        "\\'x\\ y\\'\\ 1",
        "a;b a\\;b v=a\\\\\\;b$'\\012'a\\;b",
    ]
    assert shlex.split(shlex.split("\\'x\\ y\\'\\ 1")[0]) == ["x y", "1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a\n{{ nodez }}\n",
            "mine.sbatch.j2:2: 'nodez' is undefined; `hpcrun template show --context` lists",
        ),
        ("a\n{{ d.nothing }}\n", "mine.sbatch.j2:2: 'dict object' has no attribute 'nothing'"),
        ("a\nb\n{% if %}\n", "mine.sbatch.j2:3: Expected an expression, got 'end of statement block'"),
        ("{% block setup %}\n", "mine.sbatch.j2:1: Unexpected end of template."),
        (
            "\n{{ v.__class__ }}\n",
            "mine.sbatch.j2:2: access to attribute '__class__' of 'str' object is unsafe.",
        ),
        ("\n{{ ''.__class__.__mro__ }}\n", "mine.sbatch.j2:2: access to attribute '__class__' of 'str'"),
        (
            "\n{{ d.update({}) }}\n",
            "mine.sbatch.j2:2: access to attribute 'update' of 'dict' object is unsafe.",
        ),
        ("{{ none }}\n", "mine.sbatch.j2:1: the value is null for this job; put it under {% if ... %}"),
        ("\n{{ v | nofilter }}\n", "mine.sbatch.j2:2: No filter named 'nofilter'."),
        ('\n{% include "mine.sbatch.j2" %}\n', "mine.sbatch.j2:2: RecursionError: maximum recursion depth"),
        ("{{ range }}\n", "mine.sbatch.j2:1: a function cannot be printed"),
        ("{{ d }}\n", "mine.sbatch.j2:1: a dict cannot be printed"),
        ("\n{{ 1 / 0 }}\n", "mine.sbatch.j2:2: ZeroDivisionError: division by zero"),
        ("\n{{ v + 1 }}\n", "mine.sbatch.j2:2: TypeError: can only concatenate str"),
        ("\n{{ 'a\\nb' | unquoted }}\n", "mine.sbatch.j2:2: unquoted: the value contains a line break"),
        (
            '\n{% extends "shipped/trian.sbatch.j2" %}\n',
            "mine.sbatch.j2:2: extends shipped/trian.sbatch.j2, which does",
        ),
        ("{% extends v %}\n", "mine.sbatch.j2:1: extends must name a template in quotes"),
        ('\n{% include "no.sbatch.j2" %}\n', "mine.sbatch.j2:2: no.sbatch.j2 does not exist"),
        ('\n{% include "../../etc/passwd" %}\n', "mine.sbatch.j2:2: ../../etc/passwd does not exist"),
        (
            "\n{% filter upper %}{{ v }}{% endfilter %}\n",
            "mine.sbatch.j2:2: the tag filter would get round the quot",
        ),
        (
            "\n{% autoescape true %}{{ v }}{% endautoescape %}",
            "mine.sbatch.j2:2: the tag autoescape would get round",
        ),
        ("#SBATCH --comment={{ lines }}\n", "mine.sbatch.j2:1: a directive must not contain a line break"),
        ('{% extends "mine.sbatch.j2" %}\n', "mine.sbatch.j2: extends itself; write shipped/mine.sbatch.j2"),
    ],
)
def test_mistakes_in_a_template_are_one_line_with_its_place(
    text: str, said: str, library: TemplateLibrary
) -> None:
    line = refused(library, text, v="x", d={"a": 1}, lines="a\\\nb")
    assert line.startswith(said), line


def test_the_line_is_that_of_the_layer_where_it_happened(library: TemplateLibrary) -> None:
    site(library, "\n\n{% block setup %}{{ absent }}{% endblock %}\n", "inner")
    assert refused(library, '{% extends "inner.sbatch.j2" %}\n').startswith("inner.sbatch.j2:3: 'absent'")


def test_a_template_that_cannot_be_read(library: TemplateLibrary) -> None:
    path = library.directories["site"] / "mine.sbatch.j2"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"mine\.sbatch\.j2: is not text in UTF-8"):
        library.render(library.find("mine"), {})


@pytest.mark.parametrize(
    ("kind", "said"), [("folder", "is not a file"), ("link", "is a link that leads nowhere")]
)
def test_what_only_looks_like_a_template_does_not_let_another_take_its_place(
    kind: str, said: str, library: TemplateLibrary
) -> None:
    path = library.directories["site"] / "train.sbatch.j2"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")
    with pytest.raises(
        UsageError, match=rf"site/train\.sbatch\.j2: {said}; put a template there, or take it"
    ):
        library.find("train")
    with pytest.raises(UsageError, match=said):
        library.render(site(library, '{% extends "train.sbatch.j2" %}\n'), {})
    assert library.find("shipped/train").origin == "shipped"


def test_the_nearest_template_of_a_name_is_taken(library: TemplateLibrary, tmp_path: Path) -> None:
    assert library.find("train").origin == "shipped"
    own = site(library, "own\n", "train")
    assert library.find("train") == library.find("train.sbatch.j2") == own
    user = site(library, "user\n", "train", "user")
    assert library.find("train") == user
    assert library.find("site/train") == own
    assert library.find("shipped/train").origin == "shipped"
    assert library.shipped().find("train").origin == "shipped"
    path = tmp_path / "elsewhere.sbatch.j2"
    path.write_text('{% extends "site/train.sbatch.j2" %}\n')
    assert library.find(str(path)).origin == "path"
    assert library.render(library.find(str(path)), {}) == "own\n"
    with pytest.raises(
        UsageError, match="nothing: no such template or file; there are: array, base, command"
    ):
        library.find("nothing")
    for word in ("__init__.py", "../jobs/demo", "_pyxis.sbatch.j2x", "other/train"):
        with pytest.raises(UsageError, match="no such template"):
            library.find(word)
