"""Host lists in Slurm's own words; benchmarks/host_lists.py does the same with 5,000 sets."""

from __future__ import annotations

from pathlib import Path

from hpcrun.hostlist import expand_hosts
from tests.lab.cluster import Lab
from tests.lab.hostlists import ask, differences


def test_what_slurm_folds_is_read_back(lab: Lab, tmp_path: Path) -> None:
    assert list(differences(lab, tmp_path, 300)) == []


def test_lists_that_people_write_mean_what_slurm_takes_them_for(lab: Lab, tmp_path: Path) -> None:
    lists = ["n[01-010]", "n[9-11,3]", "foo-[10-11]-[01-02]", "n[1-2,03]", "n[008-1002]", "n[000-002]"]
    for text, names in zip(lists, ask(lab, tmp_path, lists, "hostnames"), strict=True):
        assert list(expand_hosts(text)) == names
