"""Sweeps: the combinations that a `sweep` section stands for, and sweep.json, the record of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from hpcrun.errors import SpecError, SpecProblem, UsageError
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.rundir import RunDir

if TYPE_CHECKING:  # a verb that only reads sweep.json does without pydantic
    from hpcrun.specs.resources import SweepSpec

MAX_SWEEP_ELEMENTS = 10_000
"""More than this is a slip of the keyboard, and more files than any file system likes."""
UNSWEEPABLE_KEYS = ("name", "sweep", "secrets", "cluster")
"""Sections that belong to the whole sweep."""


def expand_sweep(sweep: SweepSpec) -> list[dict[str, Any]]:
    """The dotted keys and values of every element, in order; the last key of `grid` varies fastest.

    An element is one of all combinations of `grid`, one row of `zip` and one entry of `list`. SpecError lists
    all mistakes.
    """
    problems = [*_find_unsweepable_keys(sweep), *_find_repeated_keys(sweep), *_find_uneven_rows(sweep)]
    if not (sweep.grid or sweep.zip or sweep.list):
        problems.append(SpecProblem("sweep", "has nothing to try; give grid, zip or list"))
    rows = len(next(iter(sweep.zip.values()), [()]))
    count = math.prod(len(values) for values in sweep.grid.values()) * rows * max(1, len(sweep.list))
    if count > MAX_SWEEP_ELEMENTS:
        text = f"stands for {count} elements; at most {MAX_SWEEP_ELEMENTS} are taken, use fewer values"
        problems.append(SpecProblem("sweep", text))
    if problems:
        raise SpecError(problems)
    grid = [dict(zip(sweep.grid, row, strict=True)) for row in itertools.product(*sweep.grid.values())]
    zipped = [dict(zip(sweep.zip, row, strict=True)) for row in zip(*sweep.zip.values(), strict=True)]
    parts = (grid, zipped or [{}], sweep.list or [{}])
    return [first | second | third for first, second, third in itertools.product(*parts)]


def write_sweep(run: RunDir, elements: list[dict[str, Any]]) -> None:
    """Put the dotted keys and values of every element into the run's sweep.json."""
    write_json(run.sweep, elements)


def read_sweep(run: RunDir) -> list[dict[str, Any]]:
    """The dotted keys and values of every element; UsageError when this is not a sweep, or it is damaged."""
    record = read_json(run.sweep)
    if record is None:
        raise UsageError(f"{run.id}: is not a sweep (it has no {run.sweep.name})")
    if not isinstance(record, list) or not all(isinstance(element, dict) for element in record):
        raise UsageError(f"{run.sweep}: is damaged: not a list of mappings; start the sweep again")
    return record


def _sweep_keys(sweep: SweepSpec) -> list[tuple[str, str]]:
    """Every key with its place in the section; those of `list` once an entry."""
    listed = [(f"list.{index}", key) for index, row in enumerate(sweep.list) for key in row]
    return [*(("grid", key) for key in sweep.grid), *(("zip", key) for key in sweep.zip), *listed]


def _find_unsweepable_keys(sweep: SweepSpec) -> list[SpecProblem]:
    text = "cannot be swept; {} belongs to the whole sweep, give it once above"
    return [
        SpecProblem(f"sweep.{part}.{key}", text.format(key.partition(".")[0]))
        for part, key in _sweep_keys(sweep)
        if key.partition(".")[0] in UNSWEEPABLE_KEYS
    ]


def _find_repeated_keys(sweep: SweepSpec) -> list[SpecProblem]:
    rows = dict.fromkeys(key for row in sweep.list for key in row)
    counts = Counter([*sweep.grid, *sweep.zip, *rows])
    parts = {"grid": [*sweep.grid], "zip": [*sweep.zip], "list": [*rows]}
    problems = []
    for key, count in counts.items():
        if count > 1:
            names = [name for name, part in parts.items() if key in part]
            place = "list" if names[-1] == "list" else f"{names[-1]}.{key}"
            text = f"{key} stands in {' and in '.join(names)}; leave it in one of them"
            problems.append(SpecProblem(f"sweep.{place}", text))
    return problems


def _find_uneven_rows(sweep: SweepSpec) -> list[SpecProblem]:
    lengths = {key: len(values) for key, values in sweep.zip.items()}
    if len(set(lengths.values())) <= 1:
        return []
    counts = ", ".join(f"{key} {count}" for key, count in lengths.items())
    return [
        SpecProblem(
            "sweep.zip", f"its lists must be equally long, found {counts}; for all combinations use grid"
        )
    ]
