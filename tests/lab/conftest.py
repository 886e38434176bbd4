"""One lab for all tests of a session, and a way to have another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.cluster import Lab
from tests.lab.packages import NoLabError, overlay


@pytest.fixture(scope="session")
def lab_here() -> None:
    """Skip, with the reason and the remedy, where there can be no lab."""
    try:
        overlay()
    except NoLabError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def running_lab(lab_here: None) -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture
def lab(running_lab: Lab) -> Iterator[Lab]:
    """The session's lab: two racks of four, all nodes idle; whatever a test breaks is mended after it."""
    yield running_lab
    running_lab.mend()
