"""How the checkpoint worker keeps out of training's way, and that it stops doing so when somebody waits."""

from __future__ import annotations

import threading
import time

import pytest

from hpcrun.checkpoint.flush.throttle import MIN_DUTY_CYCLE, Throttle, compute_duty_cycle


class Clock:
    """Time that passes as it is told to: so much at every look."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def sparing(clock: Clock) -> Throttle:
    """A pacer that has seen two saves far apart."""
    pacer = Throttle(clock)
    pacer.flush_duty = 0.25
    pacer.begin_save()
    clock.now += 1e6
    pacer.begin_save()
    pacer.start()
    return pacer


@pytest.mark.parametrize(
    ("worked_s", "interval_s", "spread", "share"),
    [
        (1.0, 100.0, 0.0, 1.0),  # not asked for
        (0.0, None, 0.25, 1.0),  # the first save: nobody knows when the next one is due
        (1.0, 400.0, 0.25, MIN_DUTY_CYCLE),  # a hundred seconds for one of work: slower would help nobody
        (5.0, 40.0, 0.25, 0.5),  # ten seconds for five
        (30.0, 40.0, 0.25, 1.0),  # saves come as fast as they can be stored
        (1.0, 0.0, 0.25, 1.0),
        (50.0, 100.0, 1.0, 0.5),
    ],
)
def test_the_share_follows_from_what_the_last_save_took(
    worked_s: float, interval_s: float | None, spread: float, share: float
) -> None:
    assert compute_duty_cycle(worked_s, interval_s, spread) == share


def test_a_rest_is_as_long_as_the_share_asks_for() -> None:
    pacer = sparing(Clock(0.005))  # by which every piece of work, and every rest, takes 5 ms
    begin = time.monotonic()
    pacer.rest()
    pacer.rest(4096)
    # Clocks of different kinds need not agree to the last millisecond.
    assert time.monotonic() - begin >= 0.8 * 2 * 0.005 * (1 / MIN_DUTY_CYCLE - 1)
    assert pacer.rested_s == pytest.approx(0.01)


def test_too_little_work_is_not_worth_a_rest() -> None:
    pacer = sparing(Clock(0.0001))
    for _ in range(10):
        pacer.rest()
    assert pacer.rested_s == 0


@pytest.mark.parametrize("why", ["no spread", "the first save", "a new attempt", "somebody waits"])
def test_when_there_are_no_rests(why: str) -> None:
    pacer = sparing(Clock(3600.0))
    if why == "no spread":
        pacer.flush_duty = 0.0
        pacer.begin_save()
    elif why == "somebody waits":
        pacer.hasten()
    else:
        pacer.forget()
        pacer.begin_save()
    pacer.start()
    pacer.rest()
    assert pacer.rested_s == 0


def test_who_rests_goes_on_when_somebody_waits() -> None:
    pacer = sparing(Clock(3600.0))

    def work() -> None:
        pacer.start()
        for _ in range(1000):  # of which each is a second long, however long the work was
            pacer.rest()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(0.05)
    assert worker.is_alive()
    pacer.hasten()
    worker.join(20)
    assert not worker.is_alive()


def test_it_is_calm_when_no_save_is_on_its_way() -> None:
    pacer = Throttle()
    assert pacer.await_idle(0.0)
    pacer.begin_save()
    assert not pacer.await_idle(0.0)
    pacer.resume_throttling()
    assert pacer.await_idle(0.0)
