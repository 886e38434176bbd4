"""Where there can be no lab, one line says why and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab import packages
from tests.lab.packages import Bundle, NoLabError

ABSENT = Bundle("Slurm", ("no-such-package",), ("no-such-program",))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Slurm and without apt-get; its /etc."""
    monkeypatch.setattr(packages, "check_machine", lambda: None)
    monkeypatch.setattr(packages, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(packages, "CONFIGURATIONS", tmp_path / "etc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    return tmp_path / "etc"


def test_another_user_than_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoLabError, match="needs root; run it as root"):
        packages.overlay()


def test_packages_that_cannot_be_unpacked_name_the_remedy(bare: Path) -> None:
    with pytest.raises(
        NoLabError, match=r"could not unpack it \(there is no apt-get here\); run: make lab-deps"
    ):
        packages.overlay(ABSENT)


@pytest.mark.parametrize("ci", ["true", ""])
def test_nothing_is_brought_to_a_machine_of_a_cluster(
    bare: Path, ci: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "slurm-llnl").mkdir(parents=True)
    (bare / "slurm-llnl/slurm.conf").write_text("ClusterName=real\n", encoding="utf-8")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(NoLabError, match=r"slurm-llnl/slurm.conf exists, so no other Slurm is brought"):
        packages.overlay(ABSENT)
    with pytest.raises(NoLabError, match=r"slurm-llnl/slurm.conf exists"):
        packages.install(ABSENT)
