"""A fault may cost the newest save, but nothing else than a saved state is ever loaded: the quick cases.

`benchmarks/checkpoint_faults.py` plays all of them, and at length.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.descent_faults import DESCENT_CASES
from tests.checkpoint.faults import CASES, SkippedError
from tests.checkpoint.injuries import INJURIES
from tests.checkpoint.node_faults import NODE_CASES
from tests.checkpoint.view_faults import VIEW_CASES

WHOLE = {**CASES, **DESCENT_CASES, **NODE_CASES, **VIEW_CASES}
QUICK = [
    *INJURIES,
    "one byte flipped",
    "cut short",
    "disk really full",
    "writer stopped and lost",
    "rank killed before its part",
    "read-only directory",
    "stale temporary files",
    *DESCENT_CASES,
    "lost node",
    "lost rack",
    "more lost than the parity survives",
    "one replacement node",
    "permuted hosts",
    "flipped byte in a node's memory",
    "lost node and a damaged save",
    "lost node and half a save",
]
VIEWS = [name for name in VIEW_CASES if name != "stale view of one rank"]
"""That one has a world of its own, in tests/runtime."""


@pytest.mark.parametrize("name", QUICK)
def test_nothing_but_a_saved_state_is_loaded_after(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="restoring needs torch: pip install 'hpcrun-slurm[train]'")
    try:
        told = WHOLE[name](tmp_path, True)
    except SkippedError as reason:
        pytest.skip(str(reason))
    assert told.faults > 0
    assert told.silent == 0, told
    assert told.happened, "and it is said what was wrong"
    assert "nothing, and says so" not in told.recovered, told


@pytest.mark.parametrize("name", VIEWS)
def test_nothing_good_is_renamed_and_nothing_half_filled_where(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="restoring needs torch: pip install 'hpcrun-slurm[train]'")
    try:
        told = VIEW_CASES[name](tmp_path, True)
    except SkippedError as reason:
        pytest.skip(str(reason))
    assert told.faults > 0
    assert told.silent == 0, told
    assert told.happened


def test_a_flipped_byte_in_memory_costs_no_generation_that_has_parity(tmp_path: Path) -> None:
    told = NODE_CASES["flipped byte in a node's memory"](tmp_path, True)
    assert all(one.startswith("step 4") for one in told.recovered), told
    assert sum(told.recovered.values()) == told.faults, told
