"""Cluster profiles: what they hold, every mistake with its line, and which one a job gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.errors import SpecError, UsageError
from hpcrun.specs.cluster import (
    ClusterSpec,
    find_cluster,
    load_cluster,
    parse_cluster,
    render_cluster,
)
from hpcrun.specs.profiles import config_directories
from hpcrun.specs.shipped import shipped_file


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's and the site's directory, with no profile in them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    user, site = tmp_path / "config" / "hpcrun", tmp_path / "site"
    for place in (user, site):
        (place / "profiles").mkdir(parents=True)
    return user, site


def add(place: Path, text: str, name: str = "a") -> Path:
    path = place / "profiles" / f"{name}.yaml"
    path.write_text(text)
    return path


def test_the_example_is_a_profile_and_survives_a_round_trip() -> None:
    cluster = load_cluster(shipped_file("profiles/example.yaml"))
    assert (cluster.name, cluster.default_partition, cluster.mpi.launcher) == ("example", "gpu", "hydra")
    assert cluster.partitions["gpu"].max_time == "2-00:00:00"
    assert [level.oversubscription for level in cluster.topology.levels] == [1.0, 2.0]
    assert parse_cluster(render_cluster(cluster), "again.yaml") == cluster


def test_a_name_is_enough() -> None:
    cluster = parse_cluster("name: small\npartitions:\n", "p.yaml")
    assert cluster == ClusterSpec(name="small")
    assert cluster.default_partition is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modules: {}\n", "p.yaml name: is missing"),
        ("name: a\npartitons: {}\n", "p.yaml:2 partitons: unknown key; did you mean partitions?"),
        (
            "name: a\npartitions:\n  gpu:\n    max_tme: 1h\n",
            "p.yaml:4 partitions.gpu.max_tme: unknown key; did you mean max_time? allowed: default, max_time",
        ),
        (
            "name: a\npartitions:\n  gpu: {max_nodes: 0}\n",
            "p.yaml:3 partitions.gpu.max_nodes: must be at least 1, not 0 (largest number of nodes per job)",
        ),
        (
            "name: a\npartitions:\n  gpu:\n    max_time: soon\n",
            "p.yaml:4 partitions.gpu.max_time: 'soon' is no",
        ),
        (
            "name: a\npartitions:\n  gpu:\n    mem_per_node: lots\n",
            "gpu.mem_per_node: 'lots' is not an amount of",
        ),
        (
            "name: a\ntopology:\n  levels:\n    - {name: leaf, bandwidth_GBps: 0}\n",
            "p.yaml:4 topology.levels.0.bandwidth_GBps: must be above 0.0, not 0 (bandwidth",
        ),
        (
            "name: a\ngpus: {request: gpu-per-node}\n",
            'gpus.request: "gpu-per-node" is not allowed; did you mean',
        ),
        (
            "name: a\nslurm_version: 24.05\n",
            "p.yaml:2 slurm_version: must be text (put it in quotes), not 24.05",
        ),
        ("name: a\nlog_roots: [scratch]\n", 'p.yaml:2 log_roots.0: "scratch" is not allowed'),
        ("name: a\nenv: {A B: x}\n", 'p.yaml:2 env.A B: "A B" is not allowed'),
        ('name: a\nmodules: {load: ["a\\nb"]}\n', 'modules.load.0: "a\\nb" is not allowed'),
        (
            "name: a\ntopology: {source: file}\n",
            "p.yaml:2 topology.file: is missing; topology.source is file",
        ),
        (
            "name: a\nmpi: {library: openmpi}\n",
            "mpi.launcher: hydra does not start openmpi; use srun or mpirun",
        ),
        (
            "name: a\nmpi: {launcher: srun, pmi: pmix}\n",
            "p.yaml:2 mpi.pmi: mpich does not speak pmix; use pmi2",
        ),
        (
            "name: a\npartitions:\n  x: {default: true}\n  y: {default: true}\n",
            "p.yaml:4 partitions.y.default: x is the default already",
        ),
        ("name: a\ngpus: {typed: true}\npartitions: {x: {gpus_per_node: 4}}\n", "x.gpu_type: is missing"),
    ],
)
def test_mistakes_name_file_line_and_key(text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_cluster(text, "p.yaml")
    (line,) = str(caught.value).splitlines()
    assert said in line


def test_all_mistakes_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_cluster("name: a b\nmpi: {pmi: pmi7}\nquota: df\n", "p.yaml")
    assert [problem.where for problem in caught.value.problems] == ["p.yaml:1", "p.yaml:2", "p.yaml:3"]


def test_no_profile_and_the_only_one_and_the_default(places: tuple[Path, Path]) -> None:
    user, site = places
    assert find_cluster() is None
    add(site, "name: one\n")
    assert (found := find_cluster()) is not None
    assert found.name == "one"
    add(site, "name: two\n", "b")
    with pytest.raises(
        UsageError, match="which is the cluster\\? name one of one, two, or set `default: true`"
    ):
        find_cluster()
    add(user, "name: three\ndefault: true\n", "c")
    assert (found := find_cluster()) is not None
    assert found.name == "three"


def test_a_cluster_by_name_and_by_path(places: tuple[Path, Path]) -> None:
    user, site = places
    add(site, "name: one\naccount: site\n")
    path = add(site, "name: two\n", "b")
    by_name, by_path = find_cluster("two"), find_cluster(str(path))
    assert by_name == by_path == ClusterSpec(name="two")
    with pytest.raises(UsageError, match="four: no profile of this name; there are: one, two"):
        find_cluster("four")
    add(user, "name: one\naccount: user\n")
    assert (found := find_cluster("one")) is not None
    assert found.account == "user", "the user's file hides the site's of the same name"


def test_where_things_are_kept(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(config_directories()) == ["user", "site", "shipped"]
    assert tuple(config_directories().values())[:2] == places
    monkeypatch.delenv("HPCRUN_SITE")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert config_directories()["user"] == Path("/home/someone/.config/hpcrun")
    assert config_directories()["site"] == Path("/etc/hpcrun")
