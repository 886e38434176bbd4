"""What every test gets: a root for run directories of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HPCRUN_ROOT of this test, so that no test writes into the checkout or sees another's runs."""
    root = tmp_path / "runs"
    monkeypatch.setenv("HPCRUN_ROOT", str(root))
    # Nor what this user's runs have seen of nodes.
    monkeypatch.setenv("XDG_CONFIG_HOME", f"{tmp_path}-config")
    return root
