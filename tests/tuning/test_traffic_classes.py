"""Traffic classes, there and back, and whether two libraries mean the same one."""

from __future__ import annotations

import pytest

from hpcrun.errors import UsageError
from hpcrun.tuning.lint.traffic_classes import (
    check_class_agreement,
    check_lossless_class,
    decode_traffic_class,
    encode_traffic_class,
    traffic_class_of_priority,
)


@pytest.mark.parametrize(
    ("tc", "dscp", "ecn", "priority"),
    [
        (106, 26, "ECT(0)", 3),
        (104, 26, "not-ECT", 3),
        (96, 24, "not-ECT", 3),
        (41, 10, "ECT(1)", 1),
        (52, 13, "not-ECT", 1),
        (84, 21, "not-ECT", 2),
        (224, 56, "not-ECT", 7),
        (192, 48, "not-ECT", 6),
    ],
)
def test_published_classes(tc: int, dscp: int, ecn: str, priority: int) -> None:
    one = decode_traffic_class(tc)
    assert (one.dscp, one.ecn, one.priority) == (dscp, ecn, priority)
    assert encode_traffic_class(dscp, ecn) == one


def test_every_byte_comes_back() -> None:
    assert all(
        encode_traffic_class(decode_traffic_class(tc).dscp, decode_traffic_class(tc).ecn).tc == tc
        for tc in range(256)
    )
    assert all(traffic_class_of_priority(n).priority == n for n in range(8))
    assert traffic_class_of_priority(3).tc == 106


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: decode_traffic_class(256),
        lambda: encode_traffic_class(64),
        lambda: encode_traffic_class(3, "yes"),
        lambda: traffic_class_of_priority(8),
    ],
)
def test_what_is_none(wrong: object) -> None:
    with pytest.raises(UsageError):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("environ", "forced", "agree"),
    [
        ({}, None, False),
        ({"NCCL_IB_TC": "106"}, None, True),
        ({"NCCL_IB_TC": "104"}, None, True),
        ({"NCCL_IB_TC": "96"}, None, False),
        ({"NCCL_IB_TC": "96", "UCX_IB_TRAFFIC_CLASS": "96"}, None, True),
        ({"NCCL_IB_TC": "96"}, 96, True),
        ({"UCX_IB_TRAFFIC_CLASS": "0"}, None, True),
        ({"NCCL_IB_TC": "-1", "UCX_IB_TRAFFIC_CLASS": "auto"}, None, False),
        ({}, 106, True),
    ],
)
def test_agreement(environ: dict[str, str], forced: int | None, agree: bool) -> None:
    assert (check_class_agreement(environ, "mlx5_0:1", uses_ucx=True, forced=forced) == []) is agree
    assert check_class_agreement(environ, "mlx5_0:1", uses_ucx=False, forced=forced) == []


def test_traffic_outside_the_protected_priorities() -> None:
    (one,) = check_lossless_class(0, (3,), "dscp", None, "ens1")
    assert str(one) == (
        "ens1: traffic runs in TC 0 = DSCP 0, not-ECT, priority 0, PFC protects priority 3;"
        " set network.traffic_class: 106 in the profile"
    )
    assert check_lossless_class(106, (3,), "dscp", None, "ens1") == []
    assert check_lossless_class(106, (), "dscp", None, "ens1") == []
    assert check_lossless_class(106, (3,), "pcp", 3, "ens1") == []
    assert check_lossless_class(106, (3,), "pcp", None, "ens1")[0].remedy == "ask for trust dscp"
    assert check_lossless_class(0, (3,), "", None, "ens1")[0].confidence == "medium"
