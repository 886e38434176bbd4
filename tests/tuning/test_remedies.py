"""Remedies that lint proposes: each is linted itself, and none makes something as bad as what it mends."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrun.finding import Finding
from hpcrun.tuning.lint.environment import layer_from_environment
from hpcrun.tuning.lint.lint import LintReport, lint_layers
from hpcrun.tuning.registry.registry import Version, value_in_release, variable_registry

_LEVELS = ("error", "warning", "note")
VALUES = [
    "", "0", "1", "2", "-1", "true", "no", "Off", "yes ", "0x10", "010", "4M", "1M", "1.5KiB", "512k", "9G",
    "99999999999999999999999", "ERROR", "error", "warning", "Warn", "INF", "TRACES", "NETWORK", "INIT,NETT",
    "phb", "NVLINK", "nvl", "SYS ", "af_inet", "AF_INET ", "AFINET6", "10.0.0.5", "fd02::1", "10.0.0.0/99",
    "localhost", "~/x", "Tree", "tree,", "ring,treee", "^ring", "allreduce:tree", "nvls", "NVLS,Tree",
    "LL128", "^LL128", "LL128,Simple", "^LL", "ll12", "Simple", "allreduce:LL128", "mlx5", "mlx5_0", "mlx5_1",
    "mlx5_1:1,mlx5_2:1", "^mlx5_1", "=^mlx5_1", "=^=mlx5_1", "mlx5_0,mlx5_1,mlx5_10", "ens1,en,ib,bond",
    "ens1", "eth0,ens1f0", "^docker0,lo", "lo", "bond0,bond0", "eth 1", "eth1,=eth2", "eth1:1", "/tmp/log",
    "MAX:0", "Socket", "GROUP", "DEBUG_LOCAL", "words and words", "x" * 40,
]  # fmt: skip
"""For every rule some that it takes and some that it does not."""
RELEASES: list[Version | None] = [None, (2, 19, 3), (2, 27, 5), (2, 31, 1)]


def check(environment: dict[str, str], version: Version | None = (2, 27, 5)) -> LintReport:
    return lint_layers([layer_from_environment(environment)], version)


def told(environment: dict[str, str], version: Version | None = (2, 27, 5)) -> str:
    return "\n".join(
        f"{one.severity} {one.subject}: {one.message}" for one in check(environment, version).findings
    )


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Every fault with a value of its own that a rule makes, also one whose remedy is then left out."""
    made: list[Finding] = []
    real = Finding.__init__

    def note_down(finding: Finding, *values: Any, **fields: Any) -> None:
        real(finding, *values, **fields)
        if finding.proposal is not None and not finding.where:
            made.append(finding)

    monkeypatch.setattr(Finding, "__init__", note_down)
    return made


def rules() -> dict[str, str]:
    """One variable for every rule there is."""
    found: dict[str, str] = {}
    for known in variable_registry().variables.values():
        rule = value_in_release(known.values, None)
        if rule and known.kind != "undocumented":
            found.setdefault(rule.partition(" ")[0], known.name)
    special = ("NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_NET_GDR_LEVEL")
    more = ("NCCL_DEBUG_FILE", "UCX_NET_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_SOCKET_FAMILY")
    return found | {name: name for name in (*special, *more)}


def test_no_remedy_leaves_something_as_bad(proposed: list[Finding]) -> None:
    shown = left_out = 0
    for name in rules().values():
        for version in RELEASES if name in ("NCCL_ALGO", "NCCL_PROTO") else [(2, 27, 5)]:
            for value in VALUES:
                proposed.clear()
                findings = [one for one in check({name: value}, version).findings if one.subject == name]
                for fault in list(proposed):
                    hits = [
                        one
                        for one in findings
                        if (one.severity, one.message) == (fault.severity, fault.message)
                    ]
                    if not hits or fault.proposal is None:
                        left_out += not hits
                        continue
                    shown += 1
                    bad = _LEVELS[: _LEVELS.index(fault.severity) + 1]
                    again = check({name: fault.proposal}, version).findings
                    left = [str(one) for one in again if one.subject == name and one.severity in bad]
                    assert left == [], (name, value, fault, version)
    assert shown > 100
    assert left_out > 3


@pytest.mark.parametrize(
    ("environment", "words", "never"),
    [
        ({"NCCL_SOCKET_IFNAME": "ens1,en,ib,bond"}, "", "=ens1"),
        ({"NCCL_SOCKET_IFNAME": "ens1,ib"}, "'ens1' also takes ens10 and ens1.100", "write"),
        ({"NCCL_IB_HCA": "mlx5_1,bnxt"}, "'mlx5_1' also takes mlx5_10 to mlx5_19", "write"),
        ({"NCCL_IB_HCA": "mlx5_1:1,mlx5_2:1"}, "write '=mlx5_1:1,mlx5_2:1'", ""),
        ({"NCCL_IB_HCA": "^mlx5_1"}, "write '^=mlx5_1'", ""),
        ({"NCCL_IB_HCA": "mlx5_0"}, "", "also takes"),
        ({"NCCL_IB_HCA": "mlx5_0,mlx5_3,mlx5_1"}, "warning NCCL_IB_HCA: 'mlx5_1' also takes", ""),
        ({"NCCL_IB_HCA": "mlx5_0,mlx5_3,mlx5_10"}, "note NCCL_IB_HCA: 'mlx5_3' also takes", "warning"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker0"}, "", "also"),
        ({"NCCL_IB_HCA": "mlx5_0:1"}, "", "also takes"),
        ({"NCCL_IB_HCA": "mlx5_12,mlx5_13"}, "", "also takes"),
        ({"NCCL_IB_HCA": "mlx5_1,mlx5_10,mlx5_11"}, "", "also takes"),
        ({"NCCL_IB_HCA": "mlx5,mlx5_1"}, "", "also takes"),
        ({"NCCL_IB_HCA": "mlx5_1,mlx5_10,mlx5_2"}, "'mlx5_2' also takes mlx5_20", ""),
        ({"NCCL_P2P_NET_CHUNKSIZE": "1M"}, "units are not read, it counts as 1 bytes; write 1048576", ""),
        ({"NCCL_P2P_NET_CHUNKSIZE": "512K"}, "write 524288", ""),
        ({"NCCL_DEBUG": "ERROR"}, "'ERROR' is not known; allowed: ", "did you mean"),
        ({"NCCL_DEBUG": "QUIET"}, "'QUIET' is not known; allowed: ", "did you mean"),
        ({"NCCL_DEBUG": "WRAN"}, "did you mean WARN?", ""),
        ({"NCCL_NET_GDR_LEVEL": "OFF"}, "allowed: LOC", "did you mean"),
        ({"NCCL_ALGO": "Star"}, "'Star' is not known", "did you mean"),
    ],
)
def test_a_remedy_keeps_what_the_rest_means(environment: dict[str, str], words: str, never: str) -> None:
    text = told(environment)
    assert words in text
    assert not never or never not in text, text


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_NET": "AWS Libfabric", "NCCL_PROTO": "^LL128"},
        {"NCCL_PROTO": "^LL128"},
        {"NCCL_PROTO": "^ll128"},
        {"NCCL_PROTO": "LL,Simple"},
        {"NCCL_PROTO": "Simple,LL"},
        {
            "FI_PROVIDER": "efa",
            "NCCL_PROTO": "simple",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "FI_EFA_FORK_SAFE": "1",
        },
        {"NCCL_ALGO": "^NVLS"},
        {"NCCL_ALGO": "Ring,Tree"},
        {"FI_PROVIDER": "cxi", "FI_CXI_DISABLE_HOST_REGISTER": "1", "NCCL_PROTO": "^LL128"},
        {"NCCL_FASTRAK_NUM_FLOWS": "2", "NCCL_ALGO": "Ring,Tree", "NCCL_PROTO": "Simple"},
        {"NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"},
        {"NCCL_TOPO_FILE": "/opt/ndv4.xml", "NCCL_IB_PCI_RELAXED_ORDERING": "1"},
    ],
)
def test_what_protects_or_is_asked_for_is_not_left_over(environment: dict[str, str]) -> None:
    assert "left over" not in told(environment)
    assert "LL128" not in told(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_PROTO": "Simple"},
        {"NCCL_PROTO": "LL"},
        {"NCCL_ALGO": "Ring"},
        {"NCCL_PROTO": "LL", "FI_PROVIDER": "efa"},
        {"NCCL_P2P_DISABLE": "1", "NCCL_FASTRAK_NUM_FLOWS": "2"},
    ],
)
def test_what_nobody_asks_for_still_is(environment: dict[str, str]) -> None:
    assert "left over" in told(environment)


def test_a_protocol_that_is_forced_is_still_told() -> None:
    assert "forces LL128" in told({"NCCL_PROTO": "LL128"})
    assert "forces LL128" in told({"NCCL_PROTO": "^Simple"})
    assert "LL128" not in told({"NCCL_PROTO": "Simple"})
