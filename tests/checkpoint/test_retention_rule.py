"""Which saves stay, whatever is committed, damaged or pointed at."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpcrun.checkpoint.commit import apply_retention, find_garbage
from hpcrun.checkpoint.policy.retention import RetentionRule, count_kept_saves, find_linked_saves
from hpcrun.specs.saves import resumable_checkpoints
from tests.checkpoint.generations import save


def test_the_newest_stay_whatever_else_is_wanted() -> None:
    draw = random.Random(4)
    for _ in range(300):
        steps = sorted(draw.sample(range(1, 200), draw.randint(0, 12)))
        committed = [(f"g{step}", step) for step in steps]
        broken = {key for key, _ in committed if draw.random() < 0.3}
        pinned = {key for key, _ in committed if draw.random() < 0.2}
        rule = RetentionRule(draw.randint(0, 4), draw.choice([0, 0, 5, 10]))
        verdicts = rule.judge(committed, pinned, broken)
        assert [one.step for one in verdicts] == steps
        gone = {one.key for one in verdicts if not one.stays}
        whole = [f"g{step}" for step in steps if f"g{step}" not in broken]
        assert not gone & set(whole[-max(1, rule.newest) :]), "the newest whole ones stay"
        assert not gone & (broken | pinned)
        assert not any(rule.every and one.step % rule.every == 0 for one in verdicts if not one.stays)
        assert all(one.why for one in verdicts)
        left = [(one.key, one.step) for one in verdicts if one.stays]
        assert all(one.stays for one in rule.judge(left, pinned, broken)), "twice is as good as once"


def test_each_reason_is_said() -> None:
    committed = [(str(step), step) for step in (10, 20, 25, 30, 35)]
    told = {one.step: (one.stays, one.why) for one in RetentionRule(1, 20).judge(committed, {"25"}, {"30"})}
    assert told == {
        10: (False, "older than the newest 1 whole saves"),
        20: (True, "step 20 is a multiple of 20"),
        25: (True, "something points at it"),
        30: (True, "damaged, and does not count"),
        35: (True, "the newest whole save"),
    }


def test_a_running_job_and_cleaning_up_keep_the_same(tmp_path: Path) -> None:
    for step in (2, 4, 5, 6, 8):
        save(tmp_path, step)
    (tmp_path / "latest").symlink_to("step-00000002")
    assert find_linked_saves(tmp_path) == {"step-00000002"}
    found, _ = find_garbage(tmp_path, 1, in_flight=True, damaged=False, keep_every=4)
    assert [one.path.name for one in found] == ["step-00000005", "step-00000006"]
    apply_retention(tmp_path, 1, keep_every=4)
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [2, 4, 8]
    assert find_garbage(tmp_path, 1, in_flight=True, damaged=False, keep_every=4) == ([], [])


def test_a_save_in_flight_neither_counts_nor_goes(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / ".step-00000004.1").mkdir()
    apply_retention(tmp_path, 1)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".step-00000004.1", "step-00000002"]


@pytest.mark.parametrize(
    ("steps", "every", "rule", "most"),
    [
        (100, 10, RetentionRule(2), 3),
        (100, 0, RetentionRule(2), 1),
        (20, 10, RetentionRule(5), 2),
        (100, 10, RetentionRule(2, 50), 5),
    ],
)
def test_how_many_saves_there_are_at_most(steps: int, every: int, rule: RetentionRule, most: int) -> None:
    assert count_kept_saves(steps, every, rule) == most
