"""A setting is applied only where a line proves it."""

from __future__ import annotations

import pytest

from hpcrun.specs.settings import CommSetting, CommSettings
from hpcrun.tuning.log.applied_settings import check_applied_settings

HEAD = "n1:4711:4711 [0] NCCL INFO "
ENV = f"{HEAD}NCCL_IB_TC set by environment to 106."
OTHER = f"{HEAD}NCCL_IB_SL set by environment to 0."
BOOT = f"{HEAD}Bootstrap : Using ib0:10.1.0.7<0>"
SOCKET = f"{HEAD}NET/Socket : Using [0]eth0:10.0.0.7<0>"
USING = f"{HEAD}NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB ib0:10.1.0.7<0>"
WIDE = f"{HEAD}NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_10:1/RoCE [RO]; OOB ib0:10.1.0.7<0>"
NONE = f"{HEAD}NET/IB : No device found."
HARMLESS = f"{HEAD}NET/Plugin: Failed to find ncclNetPlugin_v8 symbol."


def setting(name: str, value: str, needs: str = "") -> CommSetting:
    return CommSetting(name, value, "because", "profile", needs)


REFUSED = f"{HEAD}Invalid value x for NCCL_IB_TC, using default -1."
IFNAME = f"{HEAD}NCCL_SOCKET_IFNAME set by environment to =ib0"
HCAS = f"{HEAD}NCCL_IB_HCA set to =mlx5_0,mlx5_1"
OLD = "NCCL version 2.19.3+cuda12.3"
UCX = "parser.c:2036 UCX  INFO  UCX_* env variables: UCX_TLS=rc UCX_IB_SL=3"
UNUSED = "parser.c:2033 UCX  WARN  unused environment variable: UCX_IB_SLL (maybe: UCX_IB_SL?)"
SILENT = f"the log tells of other variables and not of this one: {OTHER}"
RING = f"{HEAD}AllReduce: 8388608 Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..15}}"
ALGO = f"{HEAD}NCCL_ALGO set by environment to allreduce:tree"
ALGO_SET = f"{HEAD}NCCL_ALGO set by environment to ring,tree;allgather:^pat"
BUFFER = f"{HEAD}NCCL_BUFFSIZE set by environment to 8388608."
TC, IF, HCA = "NCCL_IB_TC", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"


@pytest.mark.parametrize(
    ("one", "lines", "verdict", "proof"),
    [
        (setting(TC, "106"), [HARMLESS, ENV], "applied", ENV),
        (setting(TC, "96"), [ENV], "ignored", ENV),
        (setting(TC, "106"), [OTHER], "unknown", SILENT),
        (setting(TC, "106"), [], "unknown", None),
        (setting(TC, "x"), [REFUSED], "ignored", None),
        (setting("NCCL_BUFFSIZE", "0x800000"), [BUFFER], "applied", BUFFER),
        (setting("NCCL_ALGO", "allreduce:tree"), [ALGO, RING], "ignored", RING),
        (setting("NCCL_ALGO", "ring,tree;allgather:^pat"), [ALGO_SET, RING], "applied", ALGO_SET),
        (setting("NCCL_PROTO", "^simple"), [RING], "ignored", RING),
        (setting(HCA, "=mlx5_0:1,mlx5_1:1"), [USING], "applied", USING),
        (setting(HCA, "=mlx5_0:2,mlx5_1"), [USING], "ignored", USING),
        (setting(IF, "=ib0"), [BOOT], "applied", BOOT),
        (setting(IF, "=ib0"), [SOCKET], "ignored", SOCKET),
        (setting(IF, "=ib0"), [IFNAME, SOCKET], "ignored", SOCKET),
        (setting(HCA, "=mlx5_0,mlx5_1"), [HCAS, USING], "applied", HCAS),
        (setting(HCA, "=mlx5_0,mlx5_1"), [USING], "applied", USING),
        (setting(HCA, "=mlx5_0,mlx5_1"), [WIDE], "ignored", WIDE),
        (setting(HCA, "=mlx5_0"), [NONE], "ignored", NONE),
        (setting("NCCL_IB_ADDR_FAMILY", "AF_INET6", "NCCL 2.21"), [OLD], "ignored", OLD),
        (setting("UCX_IB_SL", "3"), [UCX], "applied", UCX),
        (setting("UCX_IB_SLL", "3"), [UNUSED], "ignored", UNUSED),
        (setting("UCX_IB_SL", "3"), [ENV], "unknown", None),
        (setting("GLOO_SOCKET_IFNAME", "ib0"), [BOOT], "unknown", "no log tells of it"),
    ],
)
def test_verdicts(one: CommSetting, lines: list[str], verdict: str, proof: str | None) -> None:
    (found,) = check_applied_settings(CommSettings((one,)), "\n".join(lines))
    assert found.verdict == verdict
    assert proof is None or found.line == proof
    assert verdict == "unknown" or found.line in lines


@pytest.mark.parametrize("label", ["", "3: ", "[1,3]<stdout>:", "2026-09-01T10:00:00 "])
def test_a_node_s_own_value_is_looked_for_on_that_node(label: str) -> None:
    settings = CommSettings(
        (setting("NCCL_IB_HCA", "=mlx5_0,mlx5_1"),), {"n2": (setting("NCCL_IB_HCA", "=mlx5_0"),)}
    )
    there = f"{label}n2.some.domain:1:1 [0] NCCL INFO NCCL_IB_HCA set to =mlx5_0"
    log = f"{label}{HEAD}NCCL_IB_HCA set to =mlx5_0,mlx5_1\n{there}\n"
    everywhere, own = check_applied_settings(settings, log)
    assert (everywhere.verdict, everywhere.node) == ("applied", None)
    assert (own.verdict, own.node, own.line) == ("applied", "n2", there)
    assert own.as_json()["verdict"] == "applied"
