"""What lint says of the environments of public repositories, and what proves each error that it can give."""

from __future__ import annotations

import ast
import shlex
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hpcrun.finding import Finding, Severity
from hpcrun.specs.yaml import load_yaml
from hpcrun.tuning.lint import conflicts, environment, lint
from hpcrun.tuning.lint.demands import NETWORK_PLATFORMS
from hpcrun.tuning.lint.environment import layer_from_environment, parse_nccl_conf
from hpcrun.tuning.lint.script_exports import parse_script_exports
from hpcrun.tuning.registry import nccl_grammar, values
from hpcrun.tuning.registry.registry import parse_version

DATA = Path(__file__).parents[1] / "data" / "tuning" / "environments"
BLOCKS: dict[str, Any] = load_yaml(DATA / "sources.yaml").values
ERRORS: list[dict[str, str]] = load_yaml(DATA / "errors.yaml").values["errors"]
RELEASES = [None, (2, 19, 3), (2, 27, 7), (2, 30, 7)]


def test_ten_repositories_and_more_are_looked_at() -> None:
    assert len({one["repository"] for one in BLOCKS.values()}) >= 10
    assert {path.stem for path in DATA.glob("*.sh")} == set(BLOCKS)
    assert all(len(one["commit"]) == 40 for one in BLOCKS.values())


@pytest.mark.parametrize("name", BLOCKS)
def test_a_public_environment_has_the_faults_that_are_proved(name: str) -> None:
    layer = parse_script_exports((DATA / f"{name}.sh").read_text(encoding="utf-8"), name)
    assert layer.notes == ()
    right = {variable: one["level"] for variable, one in BLOCKS[name]["right"].items()}
    found = lint.lint_layers([layer], None).findings
    assert {one.subject: one.severity for one in found if one.severity != "note"} == right
    for version in RELEASES:
        errors = [str(one) for one in lint.lint_layers([layer], version).findings if one.severity == "error"]
        assert errors == []
    assert all(one["proof"] for one in BLOCKS[name]["right"].values())


def linted(row: dict[str, str]) -> list[str]:
    release = parse_version(row["release"], "errors.yaml")
    if "conf" in row:
        layer = parse_nccl_conf(row["conf"], "nccl.conf", release)
    else:
        pairs = (word.partition("=") for word in _words(row["set"]))
        layer = layer_from_environment({name: value for name, _, value in pairs})
    return [one.message for one in lint.lint_layers([layer], release).findings if one.severity == "error"]


def _words(text: str) -> list[str]:
    """Assignments, whose values may hold blanks and signs of the shell."""
    found: list[str] = []
    for word in text.split(" "):
        if "=" in word and word.partition("=")[0].replace("_", "").isalnum():
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


def test_every_error_has_an_example_and_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each place in the source that makes an error, one example makes one, and something proves it."""
    made: set[tuple[str, int]] = set()
    real = Finding.__init__

    def note_down(finding: Finding, severity: Severity, *values: Any, **fields: Any) -> None:
        caller: FrameType | None = sys._getframe(2)
        while severity == "error" and caller is not None:
            made.add((Path(caller.f_code.co_filename).name, caller.f_lineno))
            caller = caller.f_back if caller.f_code.co_name == "error" else None
        real(finding, severity, *values, **fields)

    monkeypatch.setattr(Finding, "__init__", note_down)
    for row in ERRORS:
        assert row["proof"]
        assert any(row["says"] in text for text in linted(row)), row
    for module in (conflicts, environment, nccl_grammar, lint, values):
        path = Path(module.__file__ or "")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in ("make_error", "error"):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                has_example = any((path.name, line) in made for line in lines)
                assert has_example, f"{path.name}:{node.lineno}: this error is in no row of errors.yaml"


def test_every_demand_of_a_platform_has_a_source() -> None:
    for platform in NETWORK_PLATFORMS:
        for name, demand in platform.demands.items():
            assert "/" in demand.source, (platform.name, name)


@pytest.mark.parametrize(
    ("script", "is_told"),
    [
        ("NCCL_HOME=/opt/nccl\nmake NCCL_HOME=$NCCL_HOME", False),
        ("RCCL_HOME=/opt/rccl\necho $RCCL_HOME", False),
        ("NCCL_TESTS_HOME=/t\n", False),
        ("NCCL_IB_TC=106\nsrun x", True),
        ("NCCL_ASYNC_ERROR_HANDLING=1\nsrun x", True),
    ],
)
def test_what_no_rank_needs_may_stay_unexported(script: str, is_told: bool) -> None:
    found = lint.lint_layers([parse_script_exports(script, "s")], None).findings
    assert any("without `export`" in one.text for one in found) == is_told


@pytest.mark.parametrize(
    ("script", "is_checked"),
    [
        ("export NCCL_TOPO_FILE=~/t.xml", False),
        ("NCCL_TOPO_FILE=~ srun x", False),
        ("export NCCL_TOPO_FILE='~/t.xml'", True),
        ('export NCCL_TOPO_FILE="~/t.xml"', True),
        ("export NCCL_TOPO_FILE=\\~/t.xml", True),
        ("env NCCL_TOPO_FILE=~/t.xml srun x", False),
    ],
)
def test_a_home_that_the_shell_replaces_is_no_error(script: str, is_checked: bool) -> None:
    found = lint.lint_layers([parse_script_exports(script, "s")], None)
    assert found.has_errors == is_checked, shlex.quote(script)
