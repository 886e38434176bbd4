"""Which release has what, and how releases are named."""

from __future__ import annotations

import pytest

from hpcrun.errors import UsageError
from hpcrun.slurm.versions import (
    RELEASES_OF_FEATURE,
    SlurmFeature,
    SlurmVersion,
    has_feature,
    parse_slurm_version,
    require_feature,
)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm 22.05.8", SlurmVersion(22, 5, 8)),
        ("slurm-wlm 22.05.8\n", SlurmVersion(22, 5, 8)),
        ("22.05.7-Atos.1.1", SlurmVersion(22, 5, 7)),
        ("slurm 23.11.0-0rc1", SlurmVersion(23, 11, 0)),
        ("a banner\nslurm 25.11.7", SlurmVersion(25, 11, 7)),
        ("24.05", SlurmVersion(24, 5)),
        ("", None),
        ("newest", None),
        ("sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host", None),
        ("slurm 22.06.1", None),
        ("error at 10.77.0.254:6817", None),
    ],
)
def test_versions(text: str, version: SlurmVersion | None) -> None:
    assert parse_slurm_version(text) == version


@pytest.mark.parametrize(
    ("feature", "has", "has_not"),
    [
        ("segment", ["24.05", "25.11", "26.05"], ["22.05", "23.11"]),
        ("spread-segments", ["25.11"], ["25.05"]),
        ("segment-of-several-blocks", ["25.11"], ["24.11", "25.05"]),
        ("exclusive-topo", ["24.05"], ["23.11"]),
        ("requeue-expedite", ["25.11"], ["25.05"]),
        ("nodelist-longer-than-nodes", ["23.02"], ["22.05"]),
        ("hostlist-suffix", ["23.11"], ["22.05", "23.02"]),
        ("hostlist-functions", ["24.11"], ["24.05"]),
        ("cpus-per-task-reaches-srun", ["21.08", "23.11", "25.11"], ["22.05", "23.02"]),
        ("topology-bare-unit", ["22.05", "24.11"], ["25.05", "25.11"]),
        ("topology-unit-argument", ["25.05"], ["24.11"]),
        ("topoconf", ["25.05"], ["24.11"]),
        ("partition-topology", ["25.05"], ["24.11"]),
        ("block-topology", ["23.11"], ["23.02"]),
        ("block-size-shown", ["24.11"], ["24.05"]),
        ("ring-topology", ["26.05"], ["25.11"]),
        ("scontrol-json", ["23.02", "25.11"], ["22.05"]),
    ],
)
def test_the_table(feature: SlurmFeature, has: list[str], has_not: list[str]) -> None:
    assert [has_feature(parse_slurm_version(text), feature) for text in has] == [True] * len(has)
    assert [has_feature(parse_slurm_version(text), feature) for text in has_not] == [False] * len(has_not)


def test_of_an_unknown_release_nothing_is_known() -> None:
    assert {has_feature(None, feature) for feature in RELEASES_OF_FEATURE} == {None}
    for feature in RELEASES_OF_FEATURE:
        require_feature(None, feature, "job.yaml")


def test_what_a_release_does_not_have_is_refused_in_words() -> None:
    require_feature(SlurmVersion(24, 5), "segment", "job.yaml:7 segment")
    with pytest.raises(
        UsageError,
        match=r"^job.yaml:7 segment: Slurm 22.05.8 does not have sbatch --segment; .* from 24.05 on$",
    ):
        require_feature(SlurmVersion(22, 5, 8), "segment", "job.yaml:7 segment")
    with pytest.raises(UsageError, match=r"it exists before 22.05 and from 23.11 on$"):
        require_feature(SlurmVersion(23, 2), "cpus-per-task-reaches-srun", "x")
    with pytest.raises(UsageError, match=r"it exists before 25.05$"):
        require_feature(SlurmVersion(25, 5), "topology-bare-unit", "x")
