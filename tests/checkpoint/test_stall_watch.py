"""What does not get on is told of, now and then."""

from __future__ import annotations

from hpcrun.checkpoint.flush.stall_watch import StallWatch


def test_what_hangs_is_told_of_ever_less_often() -> None:
    now = 0.0
    watch = StallWatch(lambda: now)
    told = []
    watch.at("/lustre/a")
    for second in range(1, 42):
        now = float(second)
        if second == 4:
            watch.note_progress()
        if (stuck := watch.stuck()) is not None:
            told.append(stuck)
    assert told == [("/lustre/a", 5.0), ("/lustre/a", 10.0), ("/lustre/a", 20.0)]
    watch.done()
    now = 99.0
    assert watch.stuck() is None
