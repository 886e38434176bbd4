"""Which NCCL is in use, from package metadata and file names."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.specs.cluster import parse_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.tuning.registry.nccl_library import find_job_nccl_library, find_nccl_library


def package(site: Path, name: str, version: str, requires: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(lines + (f"Requires-Dist: {requires}\n" if requires else ""))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter of a virtual environment that has no packages yet."""
    (tmp_path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    return tmp_path / "bin" / "python"


def site(python: Path) -> Path:
    return python.parent.parent / "lib" / "python3.11" / "site-packages"


def test_the_wheel_that_torch_asks_for_counts(python: Path) -> None:
    assert find_nccl_library(python=python).library is None
    package(site(python), "torch", "2.8.0", 'nvidia-nccl-cu12 (==2.27.3) ; platform_system == "Linux"')
    asked = find_nccl_library(python=python)
    assert asked.version == (2, 27, 3)
    assert "which torch of" in str(asked.library)
    package(site(python), "nvidia-nccl-cu13", "2.28.9")
    package(site(python), "nvidia-nccl-cu12", "2.27.5")
    assert str(find_nccl_library(python=python).library) == f"NCCL 2.27.5 (nvidia-nccl-cu12 of {python})"
    package(site(python), "nvidia-nccl-cu11", "2.21.5")
    assert find_nccl_library(python=python).version == (2, 27, 5)


def test_what_was_given_beats_what_is_there(python: Path) -> None:
    package(site(python), "nvidia-nccl-cu12", "2.27.5")
    assert find_nccl_library("2.21.5", python=python).version == (2, 21, 5)
    with pytest.raises(UsageError, match="--nccl-version: 'newest' is not a release"):
        find_nccl_library("newest", python=python)


def test_a_second_library_on_the_path_is_told(python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nccl"
    folder.mkdir()
    (folder / "libnccl.so.2.21.5").touch()
    (folder / "libnccl.so.2").symlink_to("libnccl.so.2.21.5")
    environ = {"LD_LIBRARY_PATH": f"/nowhere::{folder}"}
    alone = find_nccl_library(python=python, environ=environ)
    assert alone.version == (2, 21, 5)
    package(site(python), "nvidia-nccl-cu12", "2.27.5")
    both = find_nccl_library(python=python, environ=environ)
    assert both.version == (2, 27, 5)
    assert [one.version for one in both.others] == [(2, 21, 5)]
    preloaded = {"LD_PRELOAD": str(folder / "libnccl.so.2")}
    assert [one.version for one in find_nccl_library(python=python, environ=preloaded).others] == [(2, 21, 5)]


def test_the_word_of_an_image_comes_last(python: Path) -> None:
    environ = {"NCCL_VERSION": "2.26.5-1"}
    assert find_nccl_library(python=python, environ=environ).version == (2, 26, 5)
    assert find_nccl_library(python=python, environ={"NCCL_VERSION": "?"}).library is None
    package(site(python), "nvidia-nccl-cu12", "2.27.5")
    assert find_nccl_library(python=python, environ=environ).version == (2, 27, 5)


def test_a_job_s_python_counts_and_a_container_hides_what_is_here(python: Path) -> None:
    package(site(python), "nvidia-nccl-cu12", "2.27.5")
    path = {"LD_LIBRARY_PATH": str(site(python)), "NCCL_VERSION": "2.26.2-1"}
    assert find_job_nccl_library(JobSpec(command=["a"], python=str(python)), None).version == (2, 27, 5)
    profile = parse_cluster(f"name: c\npython: {{path: {python}}}\n", "c.yaml")
    assert find_job_nccl_library(JobSpec(command=["a"]), profile).version == (2, 27, 5)
    inside = JobSpec.model_validate({"command": ["a"], "container": {"image": "x.sif"}})
    assert find_job_nccl_library(inside, profile).library is None
    assert find_job_nccl_library(inside, profile, environ=path).version == (2, 26, 2)
    assert find_job_nccl_library(inside, profile, "2.21.5").version == (2, 21, 5)
