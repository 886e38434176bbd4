"""`make lab`, `make lab-shell`, `make lab-down`: a lab that stays between commands."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.cluster import CHECKOUT
from tests.lab.packages import ACCOUNTING, SLURM, NoLabError, overlay


class Commands:
    """`python -m tests.lab …` with a cache of its own, so that a lab of the user's is left alone."""

    def __init__(self, cache: Path) -> None:
        self.environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XDG_CACHE_HOME": str(cache)}
        (cache / "hpcrun-lab").mkdir(parents=True)
        self.accounting = False
        for bundle in (SLURM, ACCOUNTING):
            with contextlib.suppress(NoLabError):
                if folder := overlay(bundle):
                    (cache / "hpcrun-lab" / folder.name).symlink_to(folder)
                self.accounting = bundle is ACCOUNTING

    def __call__(self, *words: str, typed: str = "") -> tuple[int, str]:
        argv = [sys.executable, "-m", "tests.lab", *words]
        done = subprocess.run(
            argv, input=typed, capture_output=True, text=True, cwd=CHECKOUT, env=self.environ, timeout=60
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def commands(lab_here: None, tmp_path: Path) -> Commands:
    return Commands(tmp_path / "cache")


def test_a_lab_stays_until_it_is_taken_down(commands: Commands) -> None:
    not_up = (2, "lab: this checkout's lab is not up; make lab starts it\n")
    assert commands("shell") == not_up
    code, said = commands("up", "2x1")
    try:
        assert (code, said.startswith("lab: 2 nodes in 2 racks;")) == (0, True)
        code, said = commands("shell", typed="hostname; srun -wn02 hostname\n")
        assert (code, said.split()) == (0, ["login", "n02"])
        code, said = commands("shell", typed="sacctmgr -nP show cluster format=cluster\n")
        assert (said == "lab\n") == commands.accounting
        code, said = commands("up", "2x4")
        assert (code, "is up already" in said) == (2, True)
    finally:
        assert commands("down") == (0, "lab: down\n")
    assert commands("down") == (0, "lab: not up\n")
    assert commands("shell") == not_up
