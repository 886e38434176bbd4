"""What every test gets: a root for run directories of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def signals_let_through() -> Iterator[None]:
    """A verb that a test calls here holds signals back for a supervisor that never comes: undone after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
