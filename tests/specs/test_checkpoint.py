"""Which saves a job may ask for: what cannot work together is refused when it is read."""

from __future__ import annotations

import pytest

from hpcrun.errors import SpecError
from hpcrun.specs.load import parse_job

BASE = "model: demo\ndata: {text: x, seq_len: 64}\ntrain: {steps: 1000}\n"
STORE = "object: {url: 's3://b/p', every: %d}"


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (
            "memory: 2, every: 20, durable: {every: 50}",
            "durable.every",
            "50 is not a multiple .* use 40 or 60",
        ),
        ("memory: 2, every: 20, durable: {every: 5}", "durable.every", "5 is not a multiple .* use 20"),
        (f"memory: 1, every: 20, {STORE % 30}", "object.every", r"\(checkpoint.every 20\); use 20 or 40"),
        (
            f"memory: 1, every: 20, durable: {{every: 40}}, {STORE % 60}",
            "object.every",
            r"\(checkpoint.durable.every 40\); use 40 or 80",
        ),
        (
            "memory: 2, durable: {every: 6}",
            "durable.every",
            "6 needs checkpoint.every in steps",
        ),
        (f"memory: 2, {STORE % 6}", "object.every", "6 needs checkpoint.every in steps"),
        ("local: /scratch", "local", "set checkpoint.memory to 1 or 2"),
        ("parity: {scheme: xor}", "parity.scheme", "set checkpoint.memory to 1 or 2"),
        ("parity: {survive: leaf}", "parity.survive", "set checkpoint.memory to 1 or 2"),
        ("every: 20, durable: {every: 40}", "durable.every", "set checkpoint.memory to 1 or 2"),
        ("durable: {direct: true}", "durable.direct", "set checkpoint.memory to 1 or 2"),
        ("replicate_to_spares: true", "replicate_to_spares", "set checkpoint.memory to 1 or 2"),
        (
            "memory: 2, replicate_to_spares: true",
            "replicate_to_spares",
            "resources.spares is 0, and no node could hold copies",
        ),
        ("durability_action: stop", "durability_action", "give checkpoint.max_durable_age"),
        ("every: 7, keep_every: 300", "keep_every", "every 7 steps, and 1000 in all"),
        ("every: 100, keep_every: 5000", "keep_every", "no save is of a multiple of 5000"),
        ("keep_every: 300", "keep_every", "checkpoint.every is auto"),
    ],
)
def test_what_cannot_work_is_refused_at_its_key(section: str, key: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse_job(f"{BASE}checkpoint: {{{section}}}\n", "job.yaml")
    (problem,) = caught.value.problems
    assert problem.key == f"checkpoint.{key}"
    assert problem.where.startswith("job.yaml")


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("behind", "skip", "on_backlog"),
        ("max_undurable", "2h", "max_durable_age"),
        ("spares", "true", "replicate_to_spares"),
        ("spread", "0.5", "flush_duty"),
        ("undurable", "alert", "durability_action"),
    ],
)
def test_a_key_of_earlier_job_files_names_the_one_of_now(old: str, value: str, new: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(f"{BASE}checkpoint: {{memory: 2, {old}: {value}}}\n", "job.yaml")
    assert str(caught.value) == f"job.yaml:4 checkpoint.{old}: is now called {new}; rename the key"
    assert parse_job(
        f"{BASE}resources: {{spares: 1}}\ncheckpoint: {{memory: 2, {new}: {value}}}\n", "job.yaml"
    )


@pytest.mark.parametrize(
    "section",
    [
        "every: 20",
        f"memory: 2, every: 20, durable: {{every: 40}}, {STORE % 80}, keep_every: 200",
        f"memory: 1, every: 30, durable: {{every: 30}}, {STORE % 60}, local: /x, parity: {{scheme: rs}}",
        "every: 20, durable: {every: 20}, parity: {scheme: none}",
        "max_durable_age: 2h, durability_action: stop",
        "memory: 2, replicate_to_spares: true}\nresources: {spares: 1",
        "memory: 2, replicate_to_spares: true}\nparallel: {dp_shard: 2}\nresources: {nodes: 2}\nelastic: {",
        "replicate_to_spares: false",
        "every: 40, keep_every: 100",
        STORE % 0,  # copied by hand, and gone on from
        "keep_every: 500",
    ],
)
def test_what_can_work_is_taken(section: str) -> None:
    parse_job(f"{BASE}checkpoint: {{{section}}}\n", "job.yaml")


def test_a_command_has_saves_in_memory_where_it_asks_for_them() -> None:
    job = parse_job("command: [python, own.py]\ncheckpoint: {memory: 2}\n", "job.yaml")
    assert job.spec.checkpoint.memory == 2
    with pytest.raises(SpecError, match="checkpoint: cannot be combined with command"):
        parse_job("command: [python, own.py]\ncheckpoint: {every: 2}\n", "job.yaml")
