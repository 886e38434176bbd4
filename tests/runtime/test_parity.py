"""Every layout computes what one process computes; the layouts are those of benchmarks/parity.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parity.py"


def load_script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("parity", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["parity"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


parity = load_script()


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["layout"]: row for row in parity.compare("fp64", 3)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [layout.name for layout in parity.LAYOUTS])
def test_layout_computes_the_same_as_one_process(layout: str, rows: dict[str, dict[str, Any]]) -> None:
    row = rows[layout]
    assert row["loss"] < 1e-12
    assert row["gradient"] < 1e-12
    assert row["norm_relative"] < 1e-12
    assert row["eval"] < 1e-12
