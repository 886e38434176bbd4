"""How the drain worker keeps out of training's way, and that it stops doing so when somebody waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from hpcrun.checkpoint.drain.pacer import LEAST_SHARE, Pacer, share_for


def ticking(seconds: float) -> Callable[[], float]:
    """A clock by which that much has passed at every look."""
    times = itertools.count()
    return lambda: seconds * next(times)


@pytest.mark.parametrize(
    ("worked_s", "interval_s", "spread", "share"),
    [
        (1.0, 100.0, 0.0, 1.0),  # not asked for
        (0.0, None, 0.25, LEAST_SHARE),  # the first save: nobody waits for it
        (1.0, 400.0, 0.25, LEAST_SHARE),  # a hundred seconds for one of work: slower would help nobody
        (5.0, 40.0, 0.25, 0.5),  # ten seconds for five
        (30.0, 40.0, 0.25, 1.0),  # saves come as fast as they can be stored
        (1.0, 0.0, 0.25, 1.0),
        (50.0, 100.0, 1.0, 0.5),
    ],
)
def test_the_share_follows_from_what_the_last_save_took(
    worked_s: float, interval_s: float | None, spread: float, share: float
) -> None:
    assert share_for(worked_s, interval_s, spread) == share


def test_a_rest_is_as_long_as_the_share_asks_for() -> None:
    pacer = Pacer()
    pacer.spread = 0.25
    pacer.save_begins()
    pacer.start()
    worked_s = 0.0
    for _ in range(3):
        begin = time.monotonic()
        while time.monotonic() < begin + 0.005:
            pass
        worked_s += 0.005
        pacer.rest(4096)
    assert pacer.rested_s >= worked_s * (1 / LEAST_SHARE - 1)


def test_too_little_work_is_not_worth_a_rest() -> None:
    pacer = Pacer(ticking(0.0001))
    pacer.spread = 0.25
    pacer.save_begins()
    pacer.start()
    for _ in range(10):
        pacer.rest()
    assert pacer.rested_s == 0


def test_without_a_spread_there_are_no_rests() -> None:
    pacer = Pacer(ticking(3600.0))
    pacer.save_begins()
    pacer.start()
    pacer.rest()  # nine times an hour, otherwise


def test_who_rests_goes_on_when_somebody_waits() -> None:
    pacer = Pacer(ticking(3600.0))
    pacer.spread = 0.25
    pacer.save_begins()

    def work() -> None:
        pacer.start()
        for _ in range(1000):  # of which each rest is a second long, however long the work was
            pacer.rest()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(0.05)
    assert worker.is_alive()
    pacer.hasten()
    worker.join(20)
    assert not worker.is_alive()
