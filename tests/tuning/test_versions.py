"""Releases held against each other, and what is said where nothing is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.specs.cluster import NetworkSpec
from hpcrun.specs.yaml import load_yaml
from hpcrun.tuning import versions
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.checks import check_host
from hpcrun.tuning.host.node_report import read_host_report
from hpcrun.tuning.versions import check_versions, list_compatible_pairs, parse_versions
from tests.tuning.trees import lay_out

NCCL = "NCCL version {0}+cuda{1}\nn1:1:2 [0] NCCL INFO cudaDriverVersion {2}\n"
OFI = "n1:1:2 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl {0}\n"
FABRIC = "[default0]:n1:1:2 [0] NCCL INFO NET/OFI Using Libfabric version {0}\n"


def told(text: str) -> list[str]:
    return [f"{one.severity} {one.subject}: {one.text}" for one in check_versions(parse_versions(text))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            NCCL.format("2.22.3", "12.4", 12040) + OFI.format("1.14.2") + FABRIC.format("1.20"),
            "error aws-ofi-nccl 1.14.2: needs libfabric 1.22.0, and this is 1.20 (aws/aws-ofi-nccl v1.14.2",
        ),
        (
            NCCL.format("2.16.5", "11.8", 11080) + OFI.format("1.10.0-aws") + FABRIC.format("1.20"),
            "error aws-ofi-nccl 1.10.0: needs nccl 2.17.1, and this is 2.16.5",
        ),
        (
            NCCL.format("2.28.9", "12.9", 12090) + OFI.format("1.9.2-aws") + FABRIC.format("1.22"),
            "unknown aws-ofi-nccl 1.9.2: its release notes name nccl up to 2.21.5, this is 2.28.9",
        ),
        (NCCL.format("2.27.7", "13.0", 12080), "error cuda 13.0: needs cuda-driver 13.0, and this is 12.8"),
        (NCCL.format("2.27.7", "12.8", 11020), "error cuda 12.8: needs cuda-driver 12.0, and this is 11.2"),
        (
            "NCCL version 2.27.7+cuda12.8\n| Driver Version: 515.65.01    CUDA Version: 11.7 |",
            "error cuda 12.8: needs driver 525, and this is 515.65.01",
        ),
        (
            OFI.format("1.30.0") + FABRIC.format("1.22"),
            "unknown aws-ofi-nccl 1.30.0: nothing on record says whether it goes with libfabric 1.22",
        ),
        (OFI.format("1.14.0"), "unknown aws-ofi-nccl 1.14.0: which libfabric it runs with is not told"),
        (
            FABRIC.format("1.22") + FABRIC.format("1.18"),
            "warning libfabric: is 1.18 and 1.22 on different ranks",
        ),
        (
            NCCL.format("2.35.1", "14.1", 14010),
            "unknown cuda 14.1: nothing on record says whether it goes with cuda-",
        ),
    ],
)
def test_what_a_log_tells_is_held_against_the_table(text: str, said: str) -> None:
    assert any(line.startswith(said) for line in told(text)), told(text)


def test_releases_that_go_together_are_no_matter_and_named_with_their_source() -> None:
    text = NCCL.format("2.26.2", "12.8", 12080) + OFI.format("1.14.2") + FABRIC.format("1.22")
    assert told(text) == []
    lines = list(list_compatible_pairs(parse_versions(text)))
    assert lines[0] == (
        "aws-ofi-nccl 1.14.2 goes with libfabric 1.22 (aws/aws-ofi-nccl v1.14.2 RELEASENOTES.md:12 (built for"
        " AWS), src/nccl_ofi_net.c:643)"
    )
    assert len(lines) == 4
    assert parse_versions("an aws-ofi-nccl GitHub-dev build of some version") == {}


def test_every_row_has_a_source_and_no_two_are_of_the_same_release() -> None:
    rows = load_yaml(Path(versions.__file__).with_name("versions.yaml")).values["rows"]
    assert all(row["source"] for row in rows)
    for one in rows:
        release = tuple(map(int, one["from"].split(".")))
        found = versions._load_requirements()
        assert sum(row.of == one["of"] and row.first <= release < row.before for row in found) == 1, one


def test_a_node_s_driver_and_libfabric_are_held_against_its_nccl(tmp_path: Path) -> None:
    root = lay_out("roce-healthy", tmp_path)
    (root / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  515.65.01  Wed Jul 20 14:00:58 UTC 2022\n"
    (root / "proc/driver/nvidia/version").write_text(line)
    (root / "commands/fi_info --version").write_text("fi_info: 1.22.0amzn4.0\nlibfabric: 1.22.0amzn4.0\n")
    host = read_host_report(root)
    assert parse_versions(host.libfabric) == {"libfabric": ((1, 22, 0),)}
    asked = HostCheckInput(host, NetworkSpec(), (2, 27, 7), cuda=(12,))
    (one,) = [found for found in check_host(asked) if found.check == "versions"]
    assert str(one).startswith("cuda 12: needs driver 525, and this is 515.65.01 (docs.nvidia.com/deploy")
    assert not [one for one in check_host(replace(asked, cuda=(11,))) if one.check == "versions"]
