"""What a job may ask for of its saves, and what does not go together."""

from __future__ import annotations

import pytest

from hpcrun.errors import SpecError
from hpcrun.specs.load import parse_job

BASE = "model: {preset: demo}\ndata: {text: x, seq_len: 64}\n"


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (
            "{every: 4, durable: {every: 6}}",
            "durable.every",
            "6 is not a multiple of checkpoint.every, 4; use 4 or 8",
        ),
        ("{every: 4, durable: {every: 3}}", "durable.every", "use 4"),
        ("{durable: {every: 6}}", "durable.every", "needs checkpoint.every, which is 0"),
        (
            "{every: 4, memory: 2, durable: {every: 8}, object: {url: 's3://b/p', every: 4}}",
            "object.every",
            "4 is not a multiple of checkpoint.durable.every, 8; use 8",
        ),
        ("{every: 4, local: /disk}", "local", "checkpoint.memory is 0; use 2, or leave local out"),
        ("{every: 4, parity: {survive: leaf}}", "parity.survive", "checkpoint.memory is 0"),
    ],
)
def test_what_would_be_done_otherwise_than_it_reads_is_refused(section: str, key: str, words: str) -> None:
    with pytest.raises(SpecError) as found:
        parse_job(BASE, "job.yaml", (f"checkpoint={section}",))
    (problem,) = found.value.problems
    assert problem.key == f"checkpoint.{key}"
    assert words in problem.text


def test_what_goes_together() -> None:
    levels = "{every: 4, memory: 1, local: /disk, durable: {every: 8}, object: {url: 's3://b/p', every: 16}}"
    for section in (levels, "{every: 4, object: {url: 's3://b/p', every: 8}}", "{}"):
        parse_job(BASE, "job.yaml", (f"checkpoint={section}",))


def test_a_command_has_saves_in_memory_where_it_asks_for_them() -> None:
    job = parse_job("command: [python, own.py]\ncheckpoint: {memory: 2}\n", "job.yaml", ())
    assert job.spec.checkpoint.memory == 2
    with pytest.raises(SpecError, match="checkpoint: stands beside command"):
        parse_job("command: [python, own.py]\ncheckpoint: {every: 2}\n", "job.yaml", ())
