"""One lab for all tests of this folder, which ends with the last of them, and a way to have another."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.lab.cluster import Lab
from tests.lab.desk import Desk
from tests.lab.packages import NoLabError, overlay

HERE = Path(__file__).parent
_open_labs = contextlib.ExitStack()
_labs: list[Lab] = []


_LONGEST_S = 1200
"""Longer than a test waits for any one thing: what that was is then said, and not only that it took long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder time: its machines share this one with whatever else it does."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LONGEST_S))


@pytest.fixture(scope="session")
def lab_here() -> None:
    """Skip, with the reason and the remedy, where there can be no lab."""
    try:
        overlay()
    except NoLabError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def lab(lab_here: None) -> Iterator[Lab]:
    """The folder's lab: two racks of four, all nodes idle; whatever a test breaks is mended after it."""
    if not _labs:
        _labs.append(_open_labs.enter_context(Lab()))
    yield _labs[0]
    _labs[0].mend()


@pytest.fixture
def desk(lab: Lab, tmp_path: Path) -> Desk:
    """A place on the login node with an empty profile of the lab."""
    found = Desk(lab, tmp_path)
    found.profile()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """End the lab before the first test elsewhere: tests of processes want none but their own."""
    yield
    if nextitem is None or HERE not in nextitem.path.parents:
        _labs.clear()
        _open_labs.close()
