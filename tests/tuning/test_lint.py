"""What lint says of environments as people have them; the cases that users of NCCL have run into."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.tuning.lint.environment import (
    EnvironmentLayer,
    VariableAssignment,
    layer_from_environment,
    parse_environment_dump,
    parse_nccl_conf,
    read_user_file,
)
from hpcrun.tuning.lint.lint import LintReport, lint_layers
from hpcrun.tuning.lint.rank_environments import compare_rank_environments, parse_rank_environment
from hpcrun.tuning.lint.script_exports import parse_script_exports
from hpcrun.tuning.registry.registry import Version, parse_version

DATA = Path(__file__).parents[1] / "data" / "tuning"
NEW = (2, 27, 5)


def check(settings: str, version: str | None = "2.27.5") -> LintReport:
    """Lint of NAME=VALUE words, the common prefix left out."""
    pairs = [pair.partition("=") for pair in settings.split()]
    known = ("UCX_", "GLOO_", "OMPI_", "TORCH_", "FI_", "RDMAV_", "LD_", "CUDA_")
    names = {name if name.startswith(known) else f"NCCL_{name}": value for name, _, value in pairs}
    return lint_layers([layer_from_environment(names)], parse_version(version) if version else None)


def lines(report: LintReport) -> str:
    return "\n".join(
        f"{one.severity} {one.subject.removeprefix('NCCL_')}: {one.message}" for one in report.findings
    )


@pytest.mark.parametrize(
    ("settings", "version", "words"),
    [
        # an interface that leads nowhere; a bridge with the same address everywhere
        ("SOCKET_IFNAME=lo", "2.27.5", "warning SOCKET_IFNAME: 'lo' leads to no other host"),
        ("SOCKET_IFNAME=docker0", "2.27.5", "warning SOCKET_IFNAME: 'docker0' leads to no other host"),
        # mlx5_1 also picks mlx5_10
        ("IB_HCA=mlx5_1", "2.27.5", "warning IB_HCA: 'mlx5_1' also takes mlx5_10 to mlx5_19"),
        # a fixed GID index, by release
        ("IB_GID_INDEX=3", "2.21.5", "warning IB_GID_INDEX: NCCL finds it; a fixed index differs"),
        ("IB_GID_INDEX=3", None, "warning IB_GID_INDEX: from 2.21 on NCCL finds it"),
        (
            "IB_ADDR_FAMILY=AF_INET6",
            "2.20.5",
            "warning IB_ADDR_FAMILY: does nothing: it is read from 2.21 on",
        ),
        ("IB_GID_INDEX=3 IB_ADDR_RANGE=10.0.0.0/8", "2.27.5", "warning IB_ADDR_RANGE: is not looked at"),
        # a field of three bits; a traffic class, decoded
        ("IB_RETRY_CNT=15", "2.27.5", "error IB_RETRY_CNT: '15' is out of range; allowed: 0 to 7"),
        (
            "IB_TC=128",
            "2.27.5",
            "not-ECT, priority 4; the switches must map it; so that marking",
        ),
        (
            "IB_TC=106",
            "2.27.5",
            "note IB_TC: is TC 106 = DSCP 26, ECT(0), priority 3",
        ),
        ("IB_TC=106 UCX_IB_TRAFFIC_CLASS=96", "2.27.5", "warning UCX_IB_TRAFFIC_CLASS: NCCL sends in TC 106"),
        # how several queue pairs are used is the release's default
        ("IB_QPS_PER_CONNECTION=4", "2.19.3", "IB_SPLIT_DATA_ON_QPS is not set; 2.19.3 has 1 (split each"),
        (
            "IB_QPS_PER_CONNECTION=4",
            "2.27.5",
            "IB_SPLIT_DATA_ON_QPS is not set; 2.27.5 has 0 (take the pairs",
        ),
        (
            "IB_SPLIT_DATA_ON_QPS=1",
            "2.27.5",
            "warning IB_SPLIT_DATA_ON_QPS: does nothing with one queue pair",
        ),
        # pieces are cut to what a buffer takes; larger ones gave wrong results
        (
            "P2P_NET_CHUNKSIZE=1048576",
            "2.27.5",
            "note P2P_NET_CHUNKSIZE: 1048576 is cut to 524288, an eighth of",
        ),
        ("CHUNK_SIZE=2097152", "2.27.5", "warning CHUNK_SIZE: 2097152: from 1 MiB on results"),
        # no algorithm is left
        ("ALGO=Tree", "2.27.5", "error ALGO: leaves broadcast, reduce, allgather, reducescatter without"),
        (
            "ALGO=allreduce:tree PROTO=Simple",
            "2.31.1",
            "error ALGO: chooses nothing for allgather, broadcast",
        ),
        (
            "SYM_KERNEL=AllGather_LL",
            "2.31.1",
            "warning SYM_KERNEL: from 2.31 on leaves what it names without",
        ),
        ("ALGO=NVLS,Ring NVLS_ENABLE=0", "2.27.5", "warning ALGO: asks for nvls, which NCCL_NVLS_ENABLE"),
        ("ALGO=allreduce:nvls NVLS_ENABLE=0", "2.27.5", "error ALGO: asks for nvls"),
        (
            "ALGO=ring,collnetchain",
            "2.27.5",
            "asks for collnetchain, which NCCL_COLLNET_ENABLE has turned off",
        ),
        (
            "ALGO=ring;allreduce:nvls PROTO=LL",
            "2.27.5",
            "error PROTO: 'LL' leaves allreduce nothing: nvls know",
        ),
        # detours that gave wrong sums
        ("P2P_DISABLE=1", "2.15.5", "warning P2P_DISABLE: allreduce between nodes has given wrong results"),
        ("PXN_DISABLE=1", "2.15.5", "warning PXN_DISABLE: allreduce between nodes has given wrong results"),
        # releases whose RAS thread crashes
        ("RAS_TIMEOUT_FACTOR=2", "2.26.2", "note RAS_ENABLE: asking the RAS thread of 2.26.2 has ended jobs"),
        # IB_DISABLE is ignored beside a plugin
        (
            "IB_DISABLE=1 LD_LIBRARY_PATH=/opt/hpcx/nccl_rdma_sharp_plugin/lib:/usr/lib",
            "2.27.5",
            "warning IB_DISABLE: is ignored once a plugin is loaded",
        ),
        ("IB_DISABLE=1 NET=IB", "2.27.5", "error NET: is IB while NCCL_IB_DISABLE=1"),
        ("NET=gIB NET_PLUGIN=none", "2.27.5", "error NET: 'gIB' comes from a plugin"),
        ("IB_DISABLE=1 IB_TC=106", "2.27.5", "warning IB_TC: does nothing: NCCL_IB_DISABLE=1"),
        # more channels than the library has
        ("MIN_NCHANNELS=112", "2.27.5", "error MIN_NCHANNELS: '112' is out of range; allowed: 1 to 64"),
        ("MIN_CTAS=32 MAX_CTAS=16", "2.27.5", "error MIN_CTAS: 32 is above NCCL_MAX_CTAS=16"),
        # left over from a search for a fault
        (
            "P2P_DISABLE=1",
            "2.27.5",
            "warning P2P_DISABLE: '1': left over from an experiment? Hides broken ACS",
        ),
        ("PXN_DISABLE=1", "2.27.5", "gave wrong results in old releases"),
        ("NET=Socket", "2.27.5", "warning NET: 'Socket': left over"),
        ("DEBUG=TRACE", "2.27.5", "warning DEBUG: 'TRACE': left over"),
        ("PROTO=LL128,Simple", "2.27.5", "warning PROTO: forces LL128"),
        # rules files that are not read
        (
            "OMPI_MCA_coll_tuned_dynamic_rules_filename=/r",
            "2.27.5",
            "is not read: OMPI_MCA_coll_tuned_use_dynamic_rules is not 1",
        ),
        (
            "OMPI_MCA_coll_tuned_dynamic_rules_filename=/r OMPI_MCA_coll_tuned_use_dynamic_rules=1",
            "2.27.5",
            "note OMPI_MCA_coll_tuned_dynamic_rules_filename: from Open MPI 5 on HAN stands before",
        ),
        # names
        ("IB_TIMOUT=22", "2.27.5", "error IB_TIMOUT: is not known, and NCCL never complains about that; did"),
        ("WIBBLE=22", "2.27.5", "warning WIBBLE: is not known: no NCCL up to 2.32.3 reads it"),
        (
            "MIN_CHANNELS=8",
            "2.27.5",
            "warning MIN_CHANNELS: looks like one of NCCL's variables, and no release",
        ),
        ("BLOCKING_WAIT=1", "2.27.5", "warning BLOCKING_WAIT: is torch's old name, which NCCL never reads"),
        ("BLOCKING_WAIT=1 TORCH_NCCL_BLOCKING_WAIT=1", "2.27.5", "stands beside TORCH_NCCL_BLOCKING_WAIT"),
        (
            "FASTRAK_NUM_FLOWS=2",
            "2.27.5",
            "note FASTRAK_NUM_FLOWS: is not read by NCCL but by Google's TCPXO",
        ),
        ("NVLS=1", "2.27.5", "error NVLS: is not a variable but a subsystem"),
        (
            "TREE_THRESHOLD=0",
            "2.27.5",
            "error TREE_THRESHOLD: does nothing: it is not read from 2.5 on, and this",
        ),
        ("TREE_THRESHOLD=0", None, "warning TREE_THRESHOLD: is not read from 2.5 on; use NCCL_ALGO"),
        ("PSK=secret", "2.32.3", "does nothing: it is not yet read in 2.32.3"),
        ("LSA_TEAM_SIZE=8", "2.27.5", "note LSA_TEAM_SIZE: is read by the library and documented nowhere"),
        ("MIN_NCHANNELS=4", "2.27.5", "note MIN_NCHANNELS: is deprecated since 2.17; use NCCL_MIN_CTAS"),
        # the rest of what does not go together
        ("SOCKET_NTHREADS=16 NSOCKS_PERTHREAD=8", "2.27.5", "16 threads × 8 sockets are 128; 64 are allowed"),
        ("MNNVL_ENABLE=1 CUMEM_ENABLE=0", "2.27.5", "error CUMEM_ENABLE: is 0, and NVLink between nodes"),
        ("IB_AR_THRESHOLD=8388608", "2.27.5", "8388608 is above NCCL_BUFFSIZE 4194304"),
        (
            "IB_AR_THRESHOLD=0",
            "2.27.5",
            "warning IB_AR_THRESHOLD: 0: all messages cost a second work request",
        ),
        (
            "IB_AR_THRESHOLD=0",
            "2.27.5",
            "on RoCE it does nothing without NCCL_IB_ADAPTIVE_ROUTING=1; leave it",
        ),
        ("IB_AR_THRESHOLD=0 IB_ADAPTIVE_ROUTING=1", "2.27.5", "on RoCE NCCL_IB_ADAPTIVE_ROUTING=1 needs"),
        ("IB_AR_THRESHOLD=0 IB_ADAPTIVE_ROUTING=0", "2.27.5", "does nothing: NCCL_IB_ADAPTIVE_ROUTING=0"),
        ("IB_AR_THRESHOLD=0x400", "2.18.6", "1024: messages of 1024 to 8192 bytes cost"),
        ("IB_AR_THRESHOLD=0 IB_OOO_RQ=1", "2.30.7", "is not looked at: NCCL_IB_OOO_RQ=1"),
        ("GRAPH_MIXING_SUPPORT=1 GRAPH_STREAM_ORDERING=0", "2.30.7", "does not go with NCCL_GRAPH_MIXING"),
        ("MULTI_RANK_GPU_ENABLE=1 NVLS_ENABLE=1", "2.30.7", "fails at start with several ranks on a GPU"),
        ("IB_PKEY=1 IB_PKEY_VALUE=0x8111", "2.31.1", "is not looked at: NCCL_IB_PKEY_VALUE chooses"),
        ("DEBUG_SUBSYS=NET DEBUG=WARN", "2.27.5", "note DEBUG_SUBSYS: does nothing until NCCL_DEBUG is INFO"),
        ("DEBUG_FILE=/tmp/log", "2.27.5", "ranks write over each other's file; write '/tmp/log.%h.%p'"),
        ("GLOO_SOCKET_IFNAME==eth0", "2.27.5", "'=' is NCCL's sign, not gloo's"),
        (
            "GLOO_SOCKET_IFNAME=eth1 SOCKET_IFNAME==eth0",
            "2.27.5",
            "which NCCL_SOCKET_IFNAME '=eth0' leaves out",
        ),
        ("UCX_NET_DEVICES=mlx5_0", "2.27.5", "mlx5_0 has no port and matches nothing; write mlx5_0:1"),
        ("FI_EFA_USE_DEVICE_RDMA=1", "2.27.5", "Decided by itself from libfabric 1.18"),
    ],
)
def test_cases(settings: str, version: str | None, words: str) -> None:
    assert words in lines(check(settings, version))


@pytest.mark.parametrize(
    ("settings", "version"),
    [
        ("SOCKET_IFNAME==eth0 IB_HCA==mlx5_0,mlx5_1 IB_TC=106 CROSS_NIC=0", "2.27.5"),
        ("IB_GID_INDEX=3 IB_TC=106", "2.20.5"),
        ("ALGO=^NVLS", "2.27.5"),
        ("P2P_NET_CHUNKSIZE=1048576 BUFFSIZE=8388608", "2.27.5"),
        ("P2P_DISABLE=1", "2.19.3"),
        ("PXN_DISABLE=1", "2.19.3"),
        ("ALGO=allreduce:tree", "2.32.3"),
        ("ALGO=ring,tree;allreduce:tree PROTO=Simple", "2.32.3"),
        ("ALGO=allreduce:tree PROTO=allreduce:Simple", "2.32.3"),
        ("DEBUG=WARN DEBUG_SUBSYS=", "2.27.5"),
        ("IB_TIMEOUT=22 IB_RETRY_CNT=7", "2.14.3"),
        ("VERSION=2.27.7-1", "2.27.5"),
        ("", None),
    ],
)
def test_good_environments_are_not_complained_about(settings: str, version: str | None) -> None:
    found = [one for one in check(settings, version).findings if one.severity != "note"]
    assert [one for one in found if "left over" not in one.text] == []
    assert not check(settings, version).has_errors


def lint_file(name: str, version: Version = NEW) -> LintReport:
    return lint_layers([parse_environment_dump(read_user_file(DATA / name), name, "env")], version)


def test_a_recipe_from_the_web() -> None:
    found = {(one.severity, one.subject.removeprefix("NCCL_")) for one in lint_file("recipe.env").findings}
    assert found == {
        ("error", "IB_RETRY_CNT"),
        ("warning", "MIN_CHANNELS"),
        ("warning", "IB_NET_LATENCY"),
        ("warning", "DYNAMIC_CHUNK_SIZE"),
        ("warning", "TIMEOUT"),
        ("error", "BUFFSIZE"),
        ("warning", "IB_HCA"),
        ("note", "IB_TC"),
        ("warning", "IB_GID_INDEX"),
        ("warning", "ASYNC_ERROR_HANDLING"),
        ("warning", "DEBUG"),
        ("note", "VERSION"),
        ("note", "FASTRAK_CTRL_DEV"),
    }


@pytest.mark.parametrize("name", ["oci-h100.env", "spectrum-x.env"])
def test_what_clouds_publish_has_no_errors(name: str) -> None:
    report = lint_file(name)
    assert not report.has_errors, lines(report)
    assert {one.subject for one in report.findings if one.severity == "warning"} <= {
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_SPLIT_DATA_ON_QPS",
    }


def test_an_image_s_configuration_file_is_in_order() -> None:
    conf = parse_nccl_conf(read_user_file(DATA / "nccl.conf"), "/etc/nccl.conf")
    assert lint_layers([layer_from_environment({}), conf], NEW).findings == ()


def test_findings_say_where_and_who_wins() -> None:
    script = parse_script_exports(read_user_file(DATA / "job.sbatch"), "job.sbatch")
    conf = parse_nccl_conf("NCCL_DEBUG=INFO\nNCCL_IB_SL=1\n", "/etc/nccl.conf")
    report = lint_layers(
        [layer_from_environment({"NCCL_DEBUG": "INFO", "NCCL_P2P_LEVEL": "NVL"}), script, conf], NEW
    )
    told = [f"{one.severity} {one}" for one in report.findings]
    assert "error job.sbatch:10 NCCL_IB_TIMEOUT: is set without `export`, so that no rank sees it" in told
    assert "error job.sbatch:16 NCCL_P2P_LEVEL: 'nvl' is ignored; write NVL, capitals count" in told
    note = "note job.sbatch:9 NCCL_DEBUG: 'WARN' wins over 'INFO' (shell), 'INFO' (/etc/nccl.conf:1)"
    assert note in told
    assert "note job.sbatch:13 NCCL_IB_SL: is computed by the shell, so that its value is not checked" in told
    assert [fate for _, fate in report.chains["NCCL_IB_SL"].steps] == [
        "counts",
        "not looked at: job.sbatch:13 sets it",
    ]
    assert [one.severity for one in report.findings] == sorted(
        (one.severity for one in report.findings), key="ewn".find
    )
    assert report.notes == script.notes


def test_a_variable_that_the_shell_exports_stays_exported() -> None:
    script = parse_script_exports("NCCL_IB_TIMEOUT=22\n", "s")
    assert "without `export`" in lines(lint_layers([layer_from_environment({}), script], NEW))
    assert "without `export`" not in lines(
        lint_layers([layer_from_environment({"NCCL_IB_TIMEOUT": "20"}), script], NEW)
    )


def test_a_secret_is_never_printed() -> None:
    layers = [
        layer_from_environment({"NCCL_PSK": "hush-hush" * 4}),
        EnvironmentLayer("b", (VariableAssignment("NCCL_PSK", "psst", "b", "b"),)),
    ]
    report = lint_layers(layers, None)
    dumps = [parse_rank_environment(layer) for layer in layers]
    told = f"{lines(report)}{report.as_json()}{compare_rank_environments(dumps)}"
    assert "hush" not in told
    assert "psst" not in told


def ranks(*names: str) -> str:
    dumps = [
        parse_rank_environment(parse_environment_dump(read_user_file(DATA / name), name, "env"))
        for name in names
    ]
    return "\n".join(
        f"{one.severity} {one.subject}: {one.message}" for one in compare_rank_environments(dumps)
    )


def test_ranks_that_agree_give_nothing() -> None:
    assert ranks("rank-0.env", "rank-1.env", "rank-2.env", "rank-3.env") == ""


def test_the_odd_rank_is_told() -> None:
    told = ranks("rank-0.env", "rank-1.env", "rank-2.env", "rank-odd.env")
    assert "error NCCL_IB_TC: must be equal on all ranks and is not: '106' on rank-0.env (rank 0)" in told
    assert "unset on rank-odd.env (rank 4)" in told
    assert "warning NCCL_IB_HCA: has the same adapters in another order, so rails cross" in told
    assert "warning NCCL_IB_GID_INDEX: differs between nodes" in told
    assert "warning NCCL_SOCKET_IFNAME: differs between nodes" in told
    assert "error LD_LIBRARY_PATH: leads to different network plugins, which hangs where they meet" in told
    assert "NCCL_DEBUG_FILE" not in told


def dump(**values: str) -> EnvironmentLayer:
    return layer_from_environment(values, "-".join(values.values()))


def test_further_differences_between_ranks() -> None:
    one = parse_rank_environment(dump(HOSTNAME="a", RANK="0", NCCL_HOSTID="x", NCCL_SOCKET_IFNAME="eth0"))
    same_node = parse_rank_environment(
        dump(HOSTNAME="a", RANK="1", NCCL_HOSTID="x", NCCL_SOCKET_IFNAME="eth1")
    )
    other = parse_rank_environment(dump(HOSTNAME="b", RANK="2", NCCL_HOSTID="x", NCCL_SOCKET_IFNAME="eth0"))
    told = [str(found) for found in compare_rank_environments([one, same_node, other])]
    assert any("differs between ranks of one node (HOSTNAME=a)" in line for line in told)
    assert any(
        "'x' is the same on HOSTNAME=a, HOSTNAME=b: NCCL takes them for one node" in line for line in told
    )
    fewer = [
        parse_rank_environment(dump(HOSTNAME=host, NCCL_IB_HCA=hcas))
        for host, hcas in (("a", "=m0,m1"), ("b", "=m0"))
    ]
    assert "names different numbers of adapters" in str(compare_rank_environments(fewer)[0])
