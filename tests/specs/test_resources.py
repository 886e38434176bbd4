"""What a job asks of a cluster: the keys that say which nodes."""

from __future__ import annotations

import pytest

from hpcrun.errors import SpecError
from hpcrun.specs.load import parse_job
from hpcrun.specs.resources import ResourcesSpec


def resources(text: str) -> ResourcesSpec:
    return parse_job(f"command: [x]\nresources: {{{text}}}\n", "job.yaml").spec.resources


def test_a_job_that_says_nothing_is_packed_and_names_nothing() -> None:
    found = resources("nodes: 4")
    assert (found.placement, found.switches_wait, found.topo_exclusive) == ("pack", "10m", False)
    assert (found.nodelist, found.switches, found.segment) == (None, None, None)


def test_every_key_is_taken() -> None:
    found = resources("nodes: 4, switches: 2, switches_wait: 1h, segment: 2, topo_exclusive: true")
    assert (found.switches, found.switches_wait, found.segment, found.topo_exclusive) == (2, "1h", 2, True)
    assert resources("nodes: 2, placement: pin, nodelist: 'n[01-02]'").nodelist == "n[01-02]"


def test_a_bare_number_is_what_it_is_to_slurm() -> None:
    found = resources("time: 10, mem: 0")
    assert (found.time, found.mem) == ("10", "0")
    assert resources("time: '10', mem: 4000").mem == "4000"
    spec = parse_job("command: [x]\nresources: {time: 10, mem: 0}\n", "job.yaml")
    assert parse_job(spec.render(), "spec.yaml").spec.resources == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("placement: packed", "job.yaml:2 resources.placement: "),
        (
            "placement: pin, nodelist: 'switch{leaf1}'",
            "resources.nodelist: 'switch{leaf1}' names a switch or",
        ),
        ("placement: pin, nodelist: ''", "resources.nodelist: "),
        ("switches: 0", "resources.switches: "),
        ("segment: 0", "resources.segment: "),
        ("time: 0", "resources.time: 0 is no limit at all to Slurm"),
        ("time: 1.5", "resources.time: must be text"),
        ("mem: true", "resources.mem: must be text"),
        ("mem: -1", "resources.mem: '-1' is not an amount of memory"),
        ("switches_wait: soon", "resources.switches_wait: 'soon' is not a time"),
        ("switches_wait: UNLIMITED", "resources.switches_wait: UNLIMITED has no end"),
        ("switches_wait: '0'", "resources.switches_wait: 0 has no end, and the job could wait for ever"),
        ("sbatch: {switches: 1}", "resources.sbatch.switches: has a key of its own, resources.switches"),
        ("sbatch: {segment: 1}", "resources.sbatch.segment: has a key of its own, resources.segment"),
        ("sbatch: {nodelist: n1}", "resources.sbatch.nodelist: has a key of its own, resources.nodelist"),
    ],
)
def test_a_mistake_is_told_in_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        resources(text)
    (problem,) = caught.value.problems
    assert message in str(problem)
