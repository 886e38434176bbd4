"""Settings as a value: what somebody else has set stands, and all of it comes back from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.specs.settings import (
    CommSetting,
    CommSettings,
    OverriddenSetting,
    read_comm_settings,
    write_comm_settings,
)

TC = CommSetting("NCCL_IB_TC", "106", "the lossless class", "profile: network.traffic_class", "NCCL 2.3")
HCA = CommSetting("NCCL_IB_HCA", "=mlx5_0,mlx5_1", "the adapters", "profile: network.hcas")
FEWER = CommSetting("NCCL_IB_HCA", "=mlx5_0", "the other one is down", "doctor")
ALL = CommSettings((TC, HCA), {"n2": (FEWER,)}, (), ("a note",))


def test_they_print() -> None:
    assert str(TC) == (
        "NCCL_IB_TC=106  # the lossless class (profile: network.traffic_class, needs NCCL 2.3)"
    )
    assert str(HCA) == "NCCL_IB_HCA==mlx5_0,mlx5_1  # the adapters (profile: network.hcas)"


def test_they_come_back(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    assert read_comm_settings(path) is None
    given = ALL.without_variables({"NCCL_IB_TC": "0"}, "env of the job")
    write_comm_settings(path, given)
    assert read_comm_settings(path) == given
    path.write_text('{"settings": [{"name": 1}]}')
    with pytest.raises(UsageError, match=r"settings\.json: holds no settings"):
        read_comm_settings(path)


def test_what_somebody_has_set_stands_and_is_told() -> None:
    left = ALL.without_variables({"NCCL_IB_HCA": "mlx5_7", "PATH": "/bin"}, "env of the job")
    assert (left.environment(), left.of_node("n2")) == ({"NCCL_IB_TC": "106"}, {})
    assert left.overruled == (OverriddenSetting("NCCL_IB_HCA", "mlx5_7", "=mlx5_0", "env of the job"),)
    assert left.notes == ALL.notes
    assert ALL.without_variables({}, "nobody") == ALL


def test_of_a_node() -> None:
    assert ALL.of_node("n2.cluster.site") == {"NCCL_IB_HCA": "=mlx5_0"}
    assert ALL.of_node("n20") == {}
    assert ALL.all() == (TC, HCA, FEWER)
