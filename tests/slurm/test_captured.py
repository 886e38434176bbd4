"""Every captured output goes through a parser; and no parser breaks on what mutilation leaves of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrun.hostlist import expand_hosts
from hpcrun.slurm import answers, ids, jobs, limits, nodes, output_formats, states, topology, versions
from hpcrun.units import parse_slurm_memory, parse_slurm_time

CAPTURED = Path(__file__).parents[1] / "data" / "slurm"
FILES = sorted(CAPTURED.rglob("*.txt"))
Captured = Callable[[str, str], str]

SCONTROL_JOBS = ("running", "failed", "cancelled", "requeued", "array")
UNEVENTFUL = ("requeue", "scancel", "signal-unknown-job")
TROUBLES = {
    "err-array": "refused",
    "err-crlf": "refused",
    "err-exclude": "refused",
    "err-gres": "refused",
    "err-mem": "refused",
    "err-option": "refused",
    "err-partition": "refused",
    "err-segment-not-dividing": "refused",
    "err-shebang": "refused",
    "err-time": "refused",
    "requeue-twice": "pending",
    "sacct": "no-accounting",
    "show-job-unknown": "no-job",
}
READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(TROUBLES, answers.parse_slurm_problem),
    **{f"show-job-{name}": jobs.parse_scontrol_jobs for name in SCONTROL_JOBS},
    "squeue-format": jobs.parse_squeue,
    "show-node-drained": nodes.parse_scontrol_nodes,
    "show-nodes-oneline": nodes.parse_scontrol_nodes,
    "sinfo-N": nodes.parse_sinfo,
    "sinfo-drain": lambda text: nodes.parse_node_state(text.partition("|")[2].partition("|")[0]),
    "show-partition": limits.parse_partitions,
    "show-topology": topology.parse_topology,
    "show-topology-block-default": topology.parse_topology,
    "show-topology-name": topology.parse_topology,
    "show-topology-nodearg": topology.parse_topology,
    "show-topology-unit": topology.parse_topology,
    "show-topoconf": topology.parse_topoconf,
    "version": versions.parse_slurm_version,
    "sbatch-parsable": answers.parse_sbatch_answer,
    "sbatch-submitted": answers.parse_sbatch_answer,
    "err-nodes": answers.parse_sbatch_answer,
    "hostnames": lambda text: expand_hosts(",".join(text.split())),
    "job-environment": lambda text: [line for line in text.splitlines() if "switch.switch.node" in line],
    "job-topology-addr-block": lambda text: [
        topology.split_topology_address(*line.split()[1:]) for line in text.splitlines()
    ],
}
"""Which parser finds something in which file; the files that depend on the release are looked at below."""
BY_RELEASE = {"err-segment", "hostnames-suffix", "show-nodes-json", "show-topology-node"}


def test_no_file_is_left_unread() -> None:
    assert {path.stem for path in FILES} == {*READERS, *BY_RELEASE, *UNEVENTFUL}


@pytest.mark.parametrize("path", [path for path in FILES if path.stem in READERS], ids=lambda path: path.stem)
def test_every_file_says_something(captured: Captured, path: Path) -> None:
    assert READERS[path.stem](captured(path.parent.name, path.stem))


def test_trouble_is_recognised(captured: Captured, version: str) -> None:
    for name, kind in TROUBLES.items():
        if (CAPTURED / version / f"{name}.txt").exists():
            found = answers.parse_slurm_problem(captured(version, name))
            assert found is not None
            assert (name, found.kind) == (name, kind)
            assert found.remedy
    for name in UNEVENTFUL:
        assert answers.parse_slurm_problem(captured(version, name)) is None


def test_submissions(captured: Captured, version: str) -> None:
    said = {
        name: answers.parse_sbatch_answer(captured(version, name))
        for name in ("sbatch-submitted", "sbatch-parsable")
    }
    number = 13 if version == "22.05.8" else 12
    assert [found.job for found in said.values()] == [number, number + 2]
    # 99 nodes of 8 are accepted: that such a job cannot start shows only in its pending reason
    assert answers.parse_sbatch_answer(captured(version, "err-nodes")).job is not None


def test_what_depends_on_the_release_agrees_with_the_table(captured: Captured, version: str) -> None:
    release = versions.parse_slurm_version(captured(version, "version"))
    assert str(release) == version
    has_segment = answers.parse_sbatch_answer(*[captured(version, "err-segment")] * 2).job is not None
    assert has_segment is versions.has_feature(release, "segment")
    expanded = answers.parse_slurm_problem(captured(version, "hostnames-suffix")) is None
    assert expanded is versions.has_feature(release, "hostlist-suffix")
    is_json = captured(version, "show-nodes-json").lstrip().startswith("{")
    assert is_json is versions.has_feature(release, "scontrol-json")
    bare = bool(topology.parse_topology(captured(version, "show-topology-node")))
    assert bare is versions.has_feature(release, "topology-bare-unit")
    assert expand_hosts("n[01-02]-ib") == ("n01-ib", "n02-ib")


def test_hostnames_agree_with_scontrol(captured: Captured, version: str) -> None:
    assert expand_hosts("n[01-03,05],gpu-a[1-2]") == tuple(captured(version, "hostnames").split())


def mutilated(text: str, rng: random.Random) -> str:
    """The text with some of its characters lost, doubled or replaced by what parsers stumble over."""
    junk = [
        "",
        "\n",
        " ",
        "|",
        "=",
        "[",
        "]",
        "+",
        "9" * 30,
        "\0",
        "é",
        "١",
        "(null)",
        "JobId=",
        ",",
        "{",
        '"',
        "%",
        "-",
    ]
    pieces = list(text)
    for _ in range(rng.randint(1, 12)):
        at = rng.randrange(len(pieces) + 1)
        end = at + rng.choice((0, 1, 1, 3, 40))
        pieces[at:end] = [rng.choice(junk), *rng.choices(text or " ", k=rng.randint(0, 2))]
    cut = rng.choice((None, None, rng.randint(0, len(pieces))))
    return "".join(pieces[:cut])


PARSERS: tuple[Callable[[str], Any], ...] = (
    answers.parse_sbatch_answer,
    answers.parse_slurm_problem,
    limits.parse_slurm_configuration,
    limits.parse_partitions,
    jobs.parse_sacct,
    jobs.parse_scontrol_jobs,
    jobs.parse_squeue,
    nodes.parse_scontrol_nodes,
    nodes.parse_sinfo,
    topology.parse_topoconf,
    topology.parse_topology,
    versions.parse_slurm_version,
)
WORDS: tuple[Callable[[str], Any], ...] = (
    ids.parse_job_id,
    nodes.parse_gpus,
    nodes.parse_node_state,
    output_formats.leading_integer,
    parse_slurm_memory,
    parse_slurm_time,
    states.parse_pending_reason,
    states.parse_job_state,
)


def test_mutilated_output_breaks_no_parser() -> None:
    rng = random.Random(20)
    for path in FILES:
        text = path.read_text(encoding="utf-8").split("\n", 1)[1].rpartition("[exit ")[0]
        own = READERS.get(path.stem)
        if path.stem in ("hostnames", "job-environment", "job-topology-addr-block"):
            own = None
        for _ in range(12 if len(text) < 5000 else 2):
            damaged = mutilated(text[:40_000], rng)
            for parse in {rng.choice(PARSERS), own or rng.choice(PARSERS)}:
                parse(damaged)
            for word in rng.sample(damaged.split(), k=min(5, len(damaged.split()))):
                for parse in WORDS:
                    parse(word.partition("=")[2] or word)
