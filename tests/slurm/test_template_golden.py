"""The script of every shipped template for three Slurm releases; two of them share the files to compare with.

python tests/slurm/test_template_golden.py --write      writes the files anew
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcrun.slurm.contract import render_script
from hpcrun.slurm.script_context import example_context
from hpcrun.slurm.template import TEMPLATE_SUFFIX, TemplateLibrary
from hpcrun.specs.cluster import load_cluster
from hpcrun.specs.shipped import shipped_file

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {"22.05": "22.05", "24.05": "25.11", "25.11": "25.11"}
"""Release to the one whose files hold its scripts."""
LIBRARY = TemplateLibrary().shipped()
NAMES = [
    one.name.removesuffix(TEMPLATE_SUFFIX)
    for one in LIBRARY.templates()
    if one.name != f"base{TEMPLATE_SUFFIX}"
]


def script(name: str, version: str) -> str:
    template = LIBRARY.find(name)
    cluster = load_cluster(shipped_file("profiles/example.yaml"))
    return render_script(LIBRARY, template, example_context(LIBRARY, template, cluster, version))


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("name", NAMES)
def test_the_script_is_the_one_on_file(name: str, version: str) -> None:
    path = GOLDEN / f"{name}-{FILES[version]}.sh"
    assert script(name, version) == path.read_text(encoding="utf-8"), f"if wanted: {__doc__}"


def test_no_file_is_left_over() -> None:
    wanted = {f"{name}-{version}.sh" for name in NAMES for version in FILES.values()}
    assert {path.name for path in GOLDEN.glob("*.sh")} == wanted


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    for old in GOLDEN.glob("*.sh"):
        old.unlink()
    for name in NAMES:
        for version in {*FILES.values()}:
            (GOLDEN / f"{name}-{version}.sh").write_text(script(name, version), encoding="utf-8")
