"""Captured outputs, without the lines that say which command printed them and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CAPTURED = Path(__file__).parents[1] / "data" / "slurm"


@pytest.fixture(params=["22.05.8", "25.11.7"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def captured() -> Callable[[str, str], str]:
    """The output in tests/data/slurm/VERSION/NAME.txt."""

    def read(version: str, name: str) -> str:
        lines = (CAPTURED / version / f"{name}.txt").read_text(encoding="utf-8").split("\n", 1)[1]
        return lines.rpartition("[exit ")[0] or lines

    return read
