"""`hpcrun template`: what its verbs print, and where; what they load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.template import app
from hpcrun.errors import UsageError
from hpcrun.slurm.template import TemplateLibrary

HEAVY = ("torch", "mpi4py", "numpy", "submitit")
SITE = """\
{% extends "shipped/train.sbatch.j2" %}
{% block setup %}
{{ super() -}}
ulimit -l unlimited
{% endblock %}
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site's directory, empty, and none of the user's."""
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.setenv("HPCRUN_SITE", str(place))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return place


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_list_marks_what_is_hidden(site: Path) -> None:
    (site / "train.sbatch.j2").write_text(SITE)
    lines = [line.split() for line in run("list").stdout.splitlines()]
    shipped = str(TemplateLibrary().find("shipped/train").path)
    assert [line for line in lines if line[0] == "train"] == [
        ["train", "site", str(site / "train.sbatch.j2")],
        ["train", "shipped", shipped, "(hidden)"],
    ]
    content = json.loads(run("list", "--json").stdout)
    taken = {row["name"]: row["origin"] for row in content["templates"] if row["taken"]}
    assert (content["schema_version"], taken["train"], taken["array"]) == (2, "site", "shipped")


def test_show_a_template_its_layers_and_its_script(site: Path) -> None:
    (site / "train.sbatch.j2").write_text(SITE)
    result = run("show", "train")
    assert result.stdout == SITE
    assert [Path(layer).name for layer in result.stderr.strip().split(" -> ")] == [
        "train.sbatch.j2",
        "train.sbatch.j2",
        "base.sbatch.j2",
    ]
    rendered = run("show", "train", "--rendered", "--slurm-version", "22.05").stdout
    assert rendered.startswith("#!/bin/bash\n#SBATCH --job-name=fixture\n")
    assert "\nulimit -l unlimited\n" in rendered
    content = json.loads(run("show", "train", "--json").stdout)
    assert (content["text"], len(content["layers"])) == (SITE, 3)


def test_show_the_context() -> None:
    text = run("show", "--context").stdout
    assert next(line for line in text.splitlines() if line.startswith("launch ")).endswith("as words")
    content = json.loads(run("show", "--context", "--json").stdout)
    assert {"name": "grace_s", "type": "integer", "meaning": "how many seconds before"} in content["context"]


@pytest.mark.process
def test_export_then_check_then_diff(site: Path) -> None:
    path = site / "train.sbatch.j2"
    made = run("export", "train")
    assert (made.exit_code, made.stdout) == (0, f"{path}\n")
    assert '{% extends "shipped/train.sbatch.j2" %}' in path.read_text()
    checked = run("check", "train")
    assert (checked.exit_code, checked.stdout) == (0, f"{path}: ok\n")
    assert run("diff", "train").stdout == ""
    assert isinstance(run("export", "train").exception, UsageError), "it is there already"
    path.write_text(SITE)
    assert [line for line in run("diff", "train").stdout.splitlines() if line[0] in "+-"][2:] == [
        "+ulimit -l unlimited"
    ]
    assert "+ulimit -l unlimited" in json.loads(run("diff", "train", "--json").stdout)["diff"]


def test_export_the_whole_text(tmp_path: Path) -> None:
    made = run("export", "shipped/base", "--to", tmp_path / "new", "--whole")
    path = tmp_path / "new" / "base.sbatch.j2"
    assert made.stdout == f"{path}\n"
    assert path.read_text() == TemplateLibrary().find("shipped/base").path.read_text()


def test_check_says_what_is_wrong_and_exits_with_1(site: Path) -> None:
    path = site / "train.sbatch.j2"
    path.write_text(SITE.replace("ulimit -l unlimited", "{{ nodez }}"))
    result = run("check", "train")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"error    contract  {path}:4: 'nodez' is undefined; ")
    content = json.loads(run("check", "train", "--json").stdout)
    assert (content["ok"], len(content["findings"])) == (False, 1)


@pytest.mark.process
def test_check_takes_a_path_and_a_profile(tmp_path: Path) -> None:
    path, profile = tmp_path / "mine.sbatch.j2", tmp_path / "p.yaml"
    path.write_text(SITE)
    profile.write_text("name: a\nsetup: ['if']\n")
    assert run("check", path).stdout == f"{path}: ok\n"
    result = run("check", path, "--profile", profile)
    assert result.exit_code == 1
    assert (
        result.stdout
        == "error    contract  profile a setup: bash -n: line 2: syntax error: unexpected end of file\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "nothing"], "nothing: no such template or file; there are: array, base,"),
        (["check", "train", "--slurm-version", "new"], "--slurm-version new: is not a release of Slurm"),
        (["check", "train", "--profile", "none.yaml"], "none.yaml: no such file"),
        (["show"], "no template given; write `hpcrun template show NAME`"),
        (["export", "train", "--to", "/proc/self/no"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_template_that_extends_nothing_shipped_has_no_diff(site: Path) -> None:
    (site / "mine.sbatch.j2").write_text("#!/bin/bash\n")
    result = run("diff", "mine")
    assert "extends no shipped template; there is nothing to compare with" in str(result.exception)


@pytest.mark.process
def test_a_login_node_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hpcrun.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n"
        f"    loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "    print('loaded', loaded, 'jinja2' in sys.modules, file=sys.stderr)\n"
    )
    said = []
    for words in (["template", "check", "train"], ["template", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stderr.splitlines()[-1])
    assert said == ["loaded [] True", "loaded [] False"]
