"""Which saves stay: one rule over what is committed, for a running job and for cleaning up later.

Only whole, committed generations of one line of descent are judged (see `hpcrun.specs.descent`): one that is
still being written, is damaged, of a branch that was left, or another run's, neither fills a place among
the newest nor makes another one go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RetentionVerdict:
    """Whether one committed generation is kept, and why."""

    key: str
    step: int
    stays: bool
    why: str


@dataclass(frozen=True)
class RetentionRule:
    """What a job keeps."""

    newest: int
    """This many of the newest; at least one."""
    every: int = 0
    """Besides, steps that are a multiple of this; 0: none."""

    def judge(
        self, committed: Iterable[tuple[str, int]], pinned: Collection[str] = (), broken: Collection[str] = ()
    ) -> list[RetentionVerdict]:
        """Judge each generation, given as key and step in the order of descent, oldest first.

        `pinned`: keys that a link points at or that are being read. `broken`: keys known to be damaged; they
        are kept: whether they can be repaired is decided elsewhere.
        """
        ordered = list(committed)
        whole = [key for key, _ in ordered if key not in broken]
        newest = set(whole[-max(1, self.newest) :])
        return [
            RetentionVerdict(key, step, *self._of(key, step, newest, pinned, broken)) for key, step in ordered
        ]

    def _of(
        self, key: str, step: int, newest: Collection[str], pinned: Collection[str], broken: Collection[str]
    ) -> tuple[bool, str]:
        if key in broken:
            return True, "damaged, and does not count"
        if key in newest:
            return True, "the newest whole save" if len(newest) == 1 else f"one of the newest {len(newest)}"
        if self.every and step and step % self.every == 0:
            return True, f"step {step} is a multiple of {self.every}"
        if key in pinned:
            return True, "something points at it"
        return False, f"older than the newest {max(1, self.newest)} whole saves"


def find_linked_saves(checkpoints: Path) -> set[str]:
    """Return the names of saves that a symbolic link next to them points at, such as a user's `latest`."""
    try:
        links = [entry for entry in checkpoints.iterdir() if entry.is_symlink()]
        return {link.readlink().name for link in links}
    except OSError:
        return set()


def count_kept_saves(steps: int, every: int, rule: RetentionRule) -> int:
    """Return how many saves are on the disk at most in a run of `steps` steps with a save each `every` steps.

    A new save is complete before the oldest one is removed: one more than the rule keeps.
    """
    made = steps // every + (steps % every > 0) if every else 1
    milestones = (
        sum(1 for step in range(every, steps + 1, every) if step % rule.every == 0)
        if every and rule.every
        else 0
    )
    return min(made, milestones + max(1, rule.newest) + 1)
