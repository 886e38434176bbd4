"""Logs of public threads: what is healthy does not alarm, what fails is told by its cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrun.tuning.log.diagnosis import diagnose_nccl_log
from hpcrun.tuning.log.nccl_log import parse_nccl_log

DATA = Path(__file__).parents[1] / "data" / "tuning" / "threads"


def threads(name: str) -> list[tuple[str, str, str, str]]:
    """Thread, release, what is right, text."""
    found = []
    for part in re.split(r"(?m)^@ ", (DATA / f"{name}.txt").read_text(encoding="utf-8"))[1:]:
        head, _, text = part.partition("\n")
        thread, release, right = [cell.strip() for cell in f"{head}||".split("|")[:3]]
        found.append((thread, release, right, text))
    return found


HEALTHY = [*threads("healthy-made"), *threads("healthy-kept")]
FAILING = [*threads("failing-made"), *threads("failing-kept")]


def told(text: str) -> list[str]:
    return [f"{one.meaning.id}:{one.meaning.level}" for one in diagnose_nccl_log(parse_nccl_log(text)).found]


def test_enough_of_them_are_looked_at() -> None:
    releases = {release.split(".")[1] for _, release, _, _ in HEALTHY}
    assert len(HEALTHY) >= 20
    assert len(releases) >= 8
    assert len(FAILING) >= 30


@pytest.mark.parametrize("name", ["healthy-made", "failing-made"])
def test_the_release_of_rccl_is_read(name: str) -> None:
    (text,) = [text for thread, _, _, text in threads(name) if thread.startswith("ROCm/")]
    log = parse_nccl_log(text)
    assert (log.library, log.version) in (("RCCL", "2.21.5"), ("RCCL", "2.27.7"))


@pytest.mark.parametrize(("thread", "release", "right", "text"), HEALTHY)
def test_a_healthy_log_does_not_alarm(thread: str, release: str, right: str, text: str) -> None:
    loud = [one for one in told(text) if not one.endswith(":harmless")]
    assert set(loud) <= set(right.split()), (thread, release)


@pytest.mark.parametrize(("thread", "release", "right", "text"), FAILING)
def test_a_failing_log_is_told_by_its_cause(thread: str, release: str, right: str, text: str) -> None:
    found = told(text)
    wanted = [word for word in right.split() if not word.startswith("!")]
    assert found[0] == wanted[0], (thread, release)
    assert set(wanted) <= set(found)
    never = [word[1:] for word in right.split() if word.startswith("!")]
    assert not [word for word in found if word.partition(":")[0] in never]
