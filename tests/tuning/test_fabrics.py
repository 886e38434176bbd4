"""Kinds of fabrics: the data hang together, and a checklist says everything and does nothing."""

from __future__ import annotations

import pytest

from hpcrun.errors import UsageError
from hpcrun.tuning.fabrics import find_fabric_kind, load_fabric_kinds, render_fabric_checklist
from hpcrun.tuning.lint.traffic_classes import decode_traffic_class

NAMES = [
    "infiniband", "roce-spectrum", "spectrum-x", "roce-broadcom", "roce-arista", "azure-nd", "aws-efa", "gcp",
    "oci", "tcp",
]  # fmt: skip


def test_the_kinds() -> None:
    assert list(load_fabric_kinds()) == NAMES
    assert all(
        one.transport in ("infiniband", "roce", "efa", "tcp") and one.source
        for one in load_fabric_kinds().values()
    )


@pytest.mark.parametrize("name", NAMES)
def test_class_dscp_and_priority_agree(name: str) -> None:
    kind = load_fabric_kinds()[name]
    if kind.data is None or kind.traffic_class is None:
        assert kind.transport != "roce"
        return
    assert decode_traffic_class(kind.traffic_class).dscp == kind.data["dscp"]
    assert decode_traffic_class(kind.traffic_class).priority == kind.data["priority"]


@pytest.mark.parametrize("name", NAMES)
def test_checklists_are_to_review(name: str) -> None:
    text = render_fabric_checklist(load_fabric_kinds()[name])
    assert text.startswith(
        f"# {load_fabric_kinds()[name].title}: a checklist to review; nothing of it is applied\n"
    )
    assert "[ ]" in text


@pytest.mark.parametrize("name", ["roce-spectrum", "roce-broadcom", "roce-arista"])
def test_a_checklist_of_roce_has_every_topic(name: str) -> None:
    text = render_fabric_checklist(load_fabric_kinds()[name])
    for topic in ("PFC", "ECN", "Kmin", "CNP", "trust", "MTU", "DCQCN", "lossless buffers"):
        assert topic in text


def test_commands_follow_from_the_class() -> None:
    spectrum = render_fabric_checklist(load_fabric_kinds()["roce-spectrum"])
    assert "mlnx_qos -i IF --trust dscp --pfc 0,0,0,1,0,0,0,0\n" in spectrum
    assert "cma_roce_tos -d DEVICE -t 106\n" in spectrum
    assert "roce_rp/enable/3\n" in spectrum
    assert "-s 26 -p 48 -r 3 -c 7\n" in render_fabric_checklist(load_fabric_kinds()["roce-broadcom"])


def test_a_kind_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"^profile x: spectrumx: no such fabric; did you mean spectrum-x\?"):
        find_fabric_kind("spectrumx", "profile x")
