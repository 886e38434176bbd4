"""Watchdog: tells from the progress of ranks that an attempt hangs, by limits that it learns."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrun.launch.attempt_events import RankProgress
from hpcrun.specs.job import JobSpec
from hpcrun.units import parse_time

_FLOOR_S = {"training": 30.0, "command": 600.0}
_STEP = "step"
_MAX_CALL_GAP_S = 5.0
"""Whoever asks less often was stopped himself: for that time nobody is to blame."""


@dataclass(frozen=True)
class Hang:
    """Ranks that have made no progress for longer than they may."""

    ranks: tuple[int, ...]
    section: str
    step: int | None
    silent_s: float
    limit_s: float
    learnt_s: float | None
    """The longest time that the section has taken before; None where nothing is known."""

    def __str__(self) -> str:
        """In words."""
        at = (
            "" if self.step is None else f" {self.step}" if self.section == _STEP else f" at step {self.step}"
        )
        took = self.learnt_s
        past = "nothing is known of it yet" if took is None else f"it took {took:.3g} s at most"
        silent = f"{self.silent_s:.0f} s ({self.limit_s:.0f} s are allowed, {past})"
        return f"no progress in {self.section}{at} for {silent}"


@dataclass
class _RankPosition:
    section: str
    step: int | None
    since: float


class HangWatchdog:
    """Hears progress and says who is late; all times are its caller's monotonic clock.

    What sections took is kept from one attempt to the next. The first steps of an attempt are not measured
    (the rank sees to that), and have the limit of slow sections.
    """

    def __init__(self, spec: JobSpec) -> None:
        watch = spec.watch
        self._is_on, self._factor = watch.hangs, watch.factor
        floor = _FLOOR_S["command" if spec.command else "training"]
        self._floor_s = floor if watch.floor is None else parse_time(watch.floor).seconds
        self._slow_s = max(parse_time(watch.slow).seconds, 0.0)
        self._longest: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """A new attempt: nobody has said anything yet."""
        self._places: dict[int, _RankPosition] = {}
        self._stopped: dict[int, float] = {}
        self._warm: set[int] = set()
        self._asked: float | None = None

    def heard(self, progress: RankProgress, now: float) -> None:
        """A rank says where it is."""
        for section, seconds in progress.longest_s.items():
            self._longest[section] = max(seconds, self._longest.get(section, 0.0))
        if _STEP in progress.longest_s:
            self._warm.add(progress.rank)
        place = self._places.get(progress.rank)
        if (
            place is None
            or (place.section, place.step) != (progress.section, progress.step)
            or progress.longest_s
        ):
            self._places[progress.rank] = _RankPosition(progress.section, progress.step, now)

    def stopped(self, rank: int, is_stopped: bool, now: float) -> None:
        """A rank's process was stopped by a signal, or goes on: whatever it did, it does no more of it."""
        if is_stopped:
            self._stopped[rank] = now
        else:
            self._stopped.pop(rank, None)

    def limit_s(self, section: str, rank: int) -> float:
        """How long a section of this rank may take now.

        That others have left their first steps behind may be known before what this one says of its own.
        """
        learnt = self._factor * self._longest.get(section, 0.0)
        if section == _STEP and rank in self._warm:
            return max(self._floor_s, learnt)
        return max(self._slow_s, self._floor_s, learnt)

    def hang(self, now: float) -> Hang | None:
        """Who is late now; to be asked often."""
        if self._asked is not None and now - self._asked > _MAX_CALL_GAP_S:
            for place in self._places.values():
                place.since += now - self._asked
            self._stopped = {rank: since + now - self._asked for rank, since in self._stopped.items()}
        self._asked = now
        if not self._is_on:
            return None
        for rank, since in self._stopped.items():
            if now - since > self._floor_s:
                section, step = self.where(rank) or (_STEP, None)
                return Hang((rank,), section, step, now - since, self._floor_s, self._longest.get(section))
        places = self._places.items()
        late = [rank for rank, place in places if now - place.since > self.limit_s(place.section, rank)]
        if not late:
            return None
        # Ranks that wait for one another are late one after the other: the longest silence came first.
        earliest = min(late, key=lambda rank: (self._places[rank].since, rank))
        first = self._places[earliest]
        limit, learnt = self.limit_s(first.section, earliest), self._longest.get(first.section)
        return Hang(tuple(sorted(late)), first.section, first.step, now - first.since, limit, learnt)

    def where(self, rank: int) -> tuple[str, int | None] | None:
        """The section and step that a rank was in when it was last heard."""
        place = self._places.get(rank)
        return None if place is None else (place.section, place.step)
