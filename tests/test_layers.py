"""Who may import whom: the table of rooms as data, held against the syntax trees of the whole package."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hpcrun"

LEVELS = (
    {
        "address",
        "errors",
        "files",
        "finding",
        "formulas",
        "hostlist",
        "hydra",
        "launcher_world",
        "local_identity",
        "masking",
        "mesh",
        "process",
        "mounts",
        "shm_segments",
        "typed_json",
        "units",
    },
    {"messages"},
    {"specs"},
    {"data"},
    {"slurm"},
    {"fabric"},
    {"tuning", "checkpoint"},
    {"planner", "runs"},
    {"health"},
    {"telemetry", "submission"},
    {"launch"},
    {"chaos", "runtime"},
    {"bench"},
    {"cli"},
    {"__main__"},
)
"""Rooms from the ground up: imports go strictly down, or stay inside the room. The ground is one room."""

LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FACE = "__init__"
"""hpcrun/__init__.py resolves names from any room on first use; the rooms take nothing but its dunders."""

RESTRICTED = {
    "torch": {"runtime", "bench"},
    "mpi4py": {"runtime", "bench"},
    "numpy": {"runtime", "bench", "checkpoint", "planner"},
}
DEFERRED_ONLY = {("numpy", "checkpoint"), ("numpy", "planner")}

FOLDERS = {
    "checkpoint": (("parity", "objects", "lustre"), ("policy",), ("flush",), ("restore",)),
    "specs": (("events",),),
    "launch": (("watch", "failover"), ("agents",), ("checkpointing",)),
    "tuning": (("registry", "model"), ("lint", "log"), ("policy",), ("host",)),
}
"""Folders inside a room from the ground up; what stands beside them may use them, and they it."""
SHARE = 0.2
"""Of the package's lines, what one room may have at most."""

Import = tuple[int, str, bool]
"""Line, dotted name, and whether it stands inside a function."""


def imports(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import in a module of the package, relative ones resolved, `from a import b` as a.b."""

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                yield from ((child.lineno, f"{base}.{alias.name}", inside) for alias in child.names)
            else:
                yield from walk(child, inside)

    yield from walk(tree, False)


def offences(source: str, module: str) -> list[str]:
    """What a module, given by its path below the package, imports and must not."""
    room = Path(module).parts[0].removesuffix(".py")
    package = ".".join(("hpcrun", *Path(module).parts[:-1]))
    if room == FACE:
        return []
    if room not in LEVEL:
        return [f"{module}: {room} is no room of the table"]
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("hpcrun"), name) if name not in LEVEL and not name.startswith("__"):
                found.append(f"{module}:{node.lineno}: hpcrun.{name} is for users, not for rooms")
    for line, name, deferred in imports(tree, package):
        top, _, rest = name.partition(".")
        place = f"{module}:{line}: {name}"
        if top == "hpcrun" and rest not in ("", "__version__"):
            target = rest.partition(".")[0]
            if target not in LEVEL:
                found.append(f"{place} is no room")
            elif target != room and LEVEL[target] >= LEVEL[room] and LEVEL[room] > 0:
                found.append(f"{place}: {room} stands on level {LEVEL[room]}, {target} on {LEVEL[target]}")
            elif LEVEL[room] == 0 < LEVEL[target]:
                found.append(f"{place}: {room} stands on the ground")
        if room not in RESTRICTED.get(top, {room}):
            found.append(f"{place}: only in {', '.join(sorted(RESTRICTED[top]))}")
        if (top, room) in DEFERRED_ONLY and not deferred:
            found.append(f"{place}: only inside a function")
    return found


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("specs/a.py", "from hpcrun.errors import UsageError", False),
        ("specs/a.py", "from hpcrun.specs.b import x", False),
        ("specs/a.py", "from . import b", False),
        ("specs/a.py", "from ..errors import x", False),
        ("process.py", "from hpcrun.errors import SiteError", False),
        ("launch/a.py", "from hpcrun import __version__", False),
        ("launch/a.py", "import hpcrun\nhpcrun.__file__", False),
        ("checkpoint/a.py", "def f():\n    import numpy", False),
        ("runtime/a.py", "import torch.nn as nn", False),
        ("__init__.py", "from hpcrun.cli import main", False),
        ("specs/a.py", "from hpcrun.launch import world", True),
        ("specs/a.py", "def f():\n    from hpcrun.cli.main import main", True),
        ("specs/a.py", "if x:\n    import hpcrun.runtime.rank", True),
        ("specs/a.py", "from hpcrun import slurm", True),
        ("specs/a.py", "from .. import launch", True),
        ("specs/a.py", "from ..launch import world", True),
        ("specs/a.py", "import hpcrun\nhpcrun.submit", True),
        ("specs/a.py", "from hpcrun import submit", True),
        ("mesh.py", "from hpcrun.specs import job", True),
        ("planner/a.py", "from hpcrun.tuning import rules", False),
        ("planner/a.py", "from hpcrun.runs import x", True),
        ("tuning/a.py", "from hpcrun.checkpoint import x", True),
        ("launch/a.py", "def f():\n    import hpcrun.runtime.rank", True),
        ("cellar/a.py", "", True),
        ("launch/a.py", "import torch", True),
        ("cli/a.py", "def f():\n    from mpi4py import MPI", True),
        ("specs/a.py", "def f():\n    import numpy as np", True),
        ("checkpoint/a.py", "import numpy", True),
    ],
)
def test_the_rules_themselves(module: str, source: str, wrong: bool) -> None:
    assert bool(offences(source, module)) is wrong


def test_imports_go_strictly_down() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 10
    found = [
        offence
        for path in modules
        for offence in offences(path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE)))
    ]
    assert not found, "\n".join(found)


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("hpcrun", *path.relative_to(PACKAGE).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


def import_graph() -> dict[str, set[str]]:
    """Which module takes something from which; those for types alone and inside functions as well."""
    known = modules()
    graph = dict[str, set[str]]()
    for name, path in known.items():
        if name == "hpcrun":  # the face takes what it shows on first use
            continue
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        taken = (dotted for _, dotted, _ in imports(ast.parse(path.read_text(encoding="utf-8")), package))
        targets = {dotted if dotted in known else dotted.rpartition(".")[0] for dotted in taken}
        graph[name] = {target for target in targets if target in known and target != "hpcrun"} - {name}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        graphlib.TopologicalSorter(import_graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_folders_of_a_room_have_an_order() -> None:
    heights = {
        f"hpcrun.{room}.{folder}": height
        for room, levels in FOLDERS.items()
        for height, level in enumerate(levels)
        for folder in level
    }
    folders = {".".join(name.split(".")[:3]) for name in modules() if name.count(".") > 2}
    assert folders == heights.keys()
    wrong = []
    for name, targets in import_graph().items():
        mine = ".".join(name.split(".")[:3])
        for target in targets:
            its = ".".join(target.split(".")[:3])
            is_inside = its != mine and its.rpartition(".")[0] == mine.rpartition(".")[0]
            if is_inside and {mine, its} <= heights.keys() and heights[its] >= heights[mine]:
                wrong.append(f"{name} takes from {target}, which stands no lower")
    assert not wrong, "\n".join(wrong)


def test_no_room_is_most_of_the_house() -> None:
    lines: dict[str, int] = {}
    for name, path in modules().items():
        room = name.split(".")[1] if "." in name else FACE
        lines[room] = lines.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    total = sum(lines.values())
    large = {room: count for room, count in lines.items() if count > SHARE * total}
    assert not large, f"of {total} lines: {large}"


def test_names_that_are_looked_up_by_text_exist() -> None:
    """`import_module("hpcrun.a").b` is seen by no type checker."""
    known, wrong = modules(), []
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(
                    ast.Call(ast.Attribute(_, "import_module"), [ast.Constant(str(target))]), wanted
                ):
                    source = known[target].read_text(encoding="utf-8") if target in known else ""
                    if target.startswith("hpcrun") and f"def {wanted}(" not in source:
                        wrong.append(f"{name}: {target}.{wanted}")
    assert not wrong
