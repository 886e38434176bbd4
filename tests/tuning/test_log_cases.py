"""Logs of whole jobs: what is the cause, what follows, what is harmless, and how much was understood."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpcrun.cli.tune import app
from hpcrun.tuning.log.checks import check_nccl_log
from hpcrun.tuning.log.diagnosis import LogDiagnoses, diagnose_nccl_log
from hpcrun.tuning.log.nccl_log import parse_nccl_log

DATA = Path(__file__).parents[1] / "data" / "tuning"


def judged(text: str) -> LogDiagnoses:
    return diagnose_nccl_log(parse_nccl_log(text))


def ids(text: str) -> list[tuple[str, str, int]]:
    return [(one.meaning.id, one.meaning.level, one.line) for one in judged(text).found]


def case(name: str) -> str:
    return (DATA / "logs" / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "async-event-new",
            [("port-event", "error", 1), ("port-event", "error", 2), ("gid-changed", "slow", 3)],
        ),
        ("folded", [("modify-qp-gid", "error", 1), ("modify-qp-value", "error", 2)]),
        ("loopback-two-nodes", [("loopback", "error", 2), ("refused", "follows", 4)]),
        ("named-plugin-missing", [("plugin-named-missing", "error", 2), ("network-not-found", "error", 3)]),
        ("nvls-place", [("nvls-bind", "error", 1)]),
        ("one-node-socket", [("no-ib-one-node", "harmless", 1)]),
        ("prefix-without-blank", []),
        ("retry-exc-named", [("status-12", "error", 2), ("status-5", "follows", 3)]),
        ("socket-no-route", [("no-route", "error", 1), ("no-route", "error", 2)]),
        ("torch-last-error", [("modify-qp", "error", 4), ("torch-passes-on", "follows", 1)]),
    ],
)
def test_a_case_is_told_as_it_is(name: str, told: list[tuple[str, str, int]]) -> None:
    assert ids(case(name)) == told


WARN = "n1:4:5 [0] {place}:12 NCCL WARN {text}\n"


def warn(text: str, place: str = "misc/socket.cc") -> str:
    return WARN.format(place=place, text=text)


def test_the_same_from_many_ranks_is_one_finding_and_another_cause_a_second() -> None:
    text = "NET/IB: Got completion from peer 10.0.0.{0}<{0}> with status={1} opcode=1 len={0} vendor err 129"
    lines = [warn(text.format(number, 12), "transport/net_ib.cc") for number in range(5)]
    found = judged("".join([*lines, warn(text.format(9, 9)), warn(text.format(8, 10))])).found
    assert [(one.meaning.id, one.times) for one in found] == [
        ("status-12", 5),
        ("status-remote", 1),
        ("status-remote", 1),
    ]
    reasons = ["No space left on device", "Permission denied"]
    found = judged("".join(warn(f"Call to shm_open failed : {one}") for one in reasons)).found
    assert [one.text.rpartition(": ")[2] for one in found] == reasons


GID_ATTRS = "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (warn("NET/IB: read failed in ncclIbRoceGetVersionNum: Invalid argument"), "gid-type"),
        (warn(f"read failed {GID_ATTRS}/types/3: Invalid argument"), "gid-type"),
        (warn(f"open failed {GID_ATTRS}/ndevs/0: No such file or directory"), "gid-type"),
        (f"n1:1:2 [0] NCCL INFO read of {GID_ATTRS}/types/3 failed: Invalid argument\n", "gid-type"),
        (f"OSError: [Errno 22] Invalid argument: '{GID_ATTRS}/types/2'\n", "gid-type"),
        (
            "W2025 util_rdma.h:547] NET/IB: read failed in ncclIbRoceGetVersionNum: Invalid argument",
            "gid-type",
        ),
        ("NCCL version 2.22.3\nn1:1:2 [0] NCCL INFO transport/net_ib.cc:285 -> 2\n", "gid-type"),
        ("NCCL version 2.27.3\nn1:1:2 [0] NCCL INFO transport/net_ib.cc:285 -> 2\n", None),
        (warn("Got completion with status 4 vendor 81"), "status-4"),
        (warn("status 4 vendor 81"), "status-4"),
        (
            warn("Got completion from peer a with status=IBV_WC_LOC_PROT_ERR(4) opcode=1 vendor_err=81"),
            "status-4",
        ),
        ("Failed status 4: wr_id 0 syndrom 0x51\n", "status-4"),
        (warn("Got completion from peer a<4> with status=1 opcode=4 len=4 vendor err 105"), "status-length"),
        (
            warn("Got completion from peer a<4> with error 9, opcode 4, len 4, vendor err 138"),
            "status-remote",
        ),
        (warn("Got CQE with IBV_WC_REM_ACCESS_ERR(10), vendor_err=136"), "status-remote"),
        (warn("Got completion from peer a with status=2 opcode=4 len=4 vendor err 104"), "status-local"),
        (warn("Got completion from peer a with status=21 opcode=4 len=4 vendor err 4"), "status-fatal"),
        (warn("Got completion from peer a with status=13 opcode=4 len=4 vendor err 135"), "status-13"),
        (
            warn("Got completion from peer a with status=10 len=4 vendor err 136 then error 4"),
            "status-remote",
        ),
        ("CQE ERROR wr_id=7 status=12(transport retry counter exceeded) vendor_err=0xa\n", "status-12"),
        (warn("Got completion from peer a with status=3 opcode=4 len=4 vendor err 12"), "status-other"),
        ("the job ended with error 4\n", None),
    ],
)
def test_verbs_errors_in_whichever_words_they_stand(line: str, told: str | None) -> None:
    found = judged(line).found
    assert [one.meaning.id for one in found] == ([told] if told else [])
    if told in ("status-4", "gid-type"):
        wanted = {
            "status-4": ("ACS", "GPUDirect", "NCCL_NET_GDR_LEVEL"),
            "gid-type": ("2.26", "NCCL_IB_GID_INDEX"),
        }
        assert all(word in f"{found[0].meaning.meaning} {found[0].meaning.remedy}" for word in wanted[told])


@pytest.mark.parametrize(
    ("place", "text", "told"),
    [
        ("transport/nvls.cc", "Cuda failure 1 'invalid argument'", ("nvls-bind", "error", "nvls")),
        ("transport/p2p.cc", "Cuda failure 101 'invalid device'", ("p2p-ipc", "error", "p2p")),
        ("/build/src/transport/nvls.cc", "Cuda failure 1 'x'", ("nvls-bind", "error", "nvls")),
        ("transport/nvls.cc", "something nobody knows", ("unknown", "unknown", "nvls")),
        ("transport/net_ib/quite_new.cc", "something nobody knows", ("unknown", "unknown", "ib")),
        ("hipify/src/misc/socket.cc", "something nobody knows", ("unknown", "unknown", "socket")),
        ("nowhere/else.cc", "something nobody knows", ("unknown", "unknown", None)),
        ("group.cc", "HIP failure 'out of memory'", ("cuda-oom", "error", "argument")),
        (
            "transport/nvls.cc",
            "Cuda failure 700 'an illegal memory access'",
            ("cuda-other", "follows", "nvls"),
        ),
        ("transport/net.cc", "Cuda failure 1 'invalid argument'", ("cuda-call", "error", "proxy")),
        ("enqueue.cc", "Cuda failure 999 'unknown error'", ("cuda-other", "follows", "argument")),
        ("transport/shm.cc", "Cuda failure 1 'invalid argument'", ("cuda-shm", "error", "shm")),
        (
            "enqueue.cc",
            "Cuda failure 214 'uncorrectable ECC error'",
            ("gpu-memory-broken", "error", "argument"),
        ),
        (
            "transport/net_ib.cc",
            "NET/IB : Got async event : local catastrophic error",
            ("nic-fatal", "error", "ib"),
        ),
        ("transport/net_ib.cc", "NET/IB : Got async event : GID table change", ("gid-changed", "slow", "ib")),
        ("transport/net_ib.cc", "NET/IB : Got async event : SM change", ("subnet-manager", "slow", "ib")),
        (
            "transport/net_ib.cc",
            "NET/IB : Got async event : last WQE reached",
            ("qp-notice", "harmless", "ib"),
        ),
    ],
)
def test_the_place_of_a_line_is_evidence(place: str, text: str, told: tuple[str, str, str | None]) -> None:
    (found,) = judged(warn(text, place)).found
    assert (found.meaning.id, found.meaning.level, found.subsystem) == told
    assert found.place == place.rpartition("src/")[2]


def test_a_warning_of_the_table_without_an_entry_is_placed() -> None:
    (found,) = judged(warn("P2p schedule creation has bugs.", "init.cc")).found
    assert (found.meaning.id, found.meaning.level, found.whose) == ("placed", "error", "ours")
    assert found.meaning.remedy
    assert judged(warn("P2p schedule creation has bugs.", "init.cc")).understood == 1


INFO = "n1:4:5 [0] NCCL INFO {}\n"
MISSING = "NET/Plugin: Could not find: {}. Using internal network plugin."


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([MISSING.format("libnccl-net.so")], "plugin-absent"),
        (["NCCL_NET_PLUGIN set by environment to none", MISSING.format("libnccl-net.so")], "plugin-absent"),
        (
            ["NCCL_NET_PLUGIN set by environment to spcx", MISSING.format("libnccl-net.so")],
            "plugin-named-missing",
        ),
        ([MISSING.format("aws-ofi libnccl-net-aws-ofi.so")], "plugin-named-missing"),
        (["TUNER/Plugin: Could not find: libnccl-tuner.so libnccl-net.so. Using internal"], "plugin-absent"),
        (["TUNER/Plugin: Could not find: mine libnccl-tuner-mine.so."], "tuner-named-missing"),
        (["NET/Plugin: Could not find: /opt/site/libnccl-net.so."], "plugin-named-missing"),
        (
            ["NET/Plugin: libfabric.so.1: cannot open shared object file: No such file"],
            "plugin-library-missing",
        ),
        (["External network plugin libnccl-net-x.so is unsupported"], "plugin-unsupported"),
        (["GPU Direct RDMA Disabled for GPU 0 / HCA 1 (distance 7 > 5)"], "gdr-off"),
        (
            ["GPU Direct RDMA Enabled for GPU 0 / HCA 0", "GPU Direct RDMA Disabled for GPU 0 / HCA 1"],
            "gdr-far",
        ),
        (["NET/IB : No device found."], "no-ib"),
        (["NET/IB : No device found.", "Using network Libfabric"], "no-ib-other-network"),
        (["NET/IB : No device found.", "comm 0x1 rank 0 nranks 1 cudaDev 0 - Init"], "no-ib-one-node"),
        (["NET/IB : No device found.", "comm 0x1 rank 0 nranks 2 cudaDev 0 - Init"], "no-ib"),
    ],
)
def test_the_whole_log_decides(lines: list[str], told: str) -> None:
    assert [one.meaning.id for one in judged("".join(map(INFO.format, lines))).found] == [told]


@pytest.mark.parametrize(
    ("used", "id_"),
    [
        ("Bootstrap : Using lo:127.0.0.1<0>", "loopback"),
        ("Bootstrap: Using lo:::1<0>", "loopback"),
        ("NET/Socket : Using [0]lo:127.0.0.1<0>", "loopback"),
        ("Bootstrap : Using docker0:172.17.0.1<0>", "bridge"),
        ("Bootstrap : Using [0]virbr0:192.168.122.1<0>", "bridge"),
    ],
)
def test_an_interface_of_one_node_is_an_error_between_nodes_alone(used: str, id_: str) -> None:
    here, there = INFO.format(used), INFO.format(used).replace("n1", "n2")
    assert {one.meaning.id for one in judged(here + there).found} == {id_}
    assert ids(here) == []
    one_node = INFO.format("comm 0x1 rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0 MNNVL 0")
    assert ids(here + one_node) == []


LAST = """\
[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "train.py", line 3, in <module>
[rank{0}]: torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:219, NCCL version 2.21.5
[rank{0}]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed.
[rank{0}]: Last error:
[rank{0}]: {1}
"""


def test_last_errors_of_ranks_that_write_at_once_are_kept_apart() -> None:
    texts = [
        "Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)",
        "socketProgress: Connection closed by remote peer n2<1>",
    ]
    pairs = [LAST.format(rank, text).splitlines() for rank, text in enumerate(texts)]
    mixed = "".join(f"{line}\n" for lines in zip(*pairs, strict=True) for line in lines)
    found = judged(mixed).found
    assert [(one.meaning.id, one.text) for one in found if one.meaning.id != "torch-passes-on"] == [
        ("shm-full", texts[0]),
        ("peer-gone", texts[1]),
    ]
    assert parse_nccl_log(mixed).version == "2.21.5"


def test_a_last_error_has_its_second_line_and_not_what_follows() -> None:
    text = "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'x'."
    log = LAST.format(0, text) + "[rank0]: This is usually caused by a system error.\n[rank0]: Epoch 3\n"
    found = judged(log).found[0]
    assert found.meaning.id == "nvls-bind"
    assert found.text == f"{text} This is usually caused by a system error."


@pytest.mark.parametrize(
    "prefix", ["3: ", "node01: ", "(worker pid=1, ip=10.0.0.1) ", "[1,0]<stderr>:", "0: [rank0]: "]
)
def test_a_last_error_is_found_behind_any_prefix(prefix: str) -> None:
    log = f"{prefix}ncclRemoteError: x\n{prefix}Last error:\n{prefix}NET/IB: a text of tomorrow\n"
    assert ("unknown", "NET/IB: a text of tomorrow") in [(d.meaning.id, d.text) for d in judged(log).found]


@pytest.mark.parametrize("between", ["", "[rank0]: \n", "Last error:\n"])
def test_an_unknown_last_error_is_unknown(between: str) -> None:
    told = judged(f"[rank0]: Last error:\n[rank0]: a text of tomorrow\n{between}")
    assert [(one.meaning.id, one.text) for one in told.found] == [("unknown", "a text of tomorrow")]
    assert (told.understood, told.unknown) == (0, 1)


@pytest.mark.parametrize(
    ("line", "id_"),
    [
        (
            "[rank3]:[E1 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout",
            "torch-watchdog",
        ),
        ("[E ProcessGroupNCCL.cpp:475] Some NCCL operations have failed or timed out.", "torch-passes-on"),
        ('[rank0]:[W1 TCPStore.cpp:115] Failed to check the "should dump" flag on TCPStore', "torch-store"),
        ("RuntimeError: NCCL Error 2: unhandled system error", "torch-passes-on"),
        ("RuntimeError: NCCL error in: x.cpp:1, invalid usage, NCCL version 2.14.3", "torch-passes-on"),
    ],
)
def test_pytorch_s_own_words_follow(line: str, id_: str) -> None:
    ((found, level, _),) = ids(line)
    assert (found, level) == (id_, "follows")


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        ("NET/OFI Couldn't find any optimal provider", "ofi-provider"),
        (
            "NET/OFI Unable to register memory (type = 2). RC: -12, Error: Cannot allocate memory",
            "ofi-memory",
        ),
        (
            "NET/OFI Request 0x7f completed with error. RC: 107. Error: 14 (Unresponsive receiver)",
            "ofi-completion",
        ),
        ("NET/OFI something of tomorrow", "ofi-other"),
        ("MSCCL: Failed to load the schedule", "rccl-msccl"),
        ('Missing "HSA_FORCE_FINE_GRAIN_PCIE=1" from environment', "rccl-system"),
    ],
)
def test_warnings_of_plugins_and_of_rccl(text: str, id_: str) -> None:
    for line in (f"n1:4:5 [0] nccl_net_ofi_init:88 NCCL WARN {text}", f"[0] RCCL WARN {text}"):
        (found,) = judged(line).found
        assert found.meaning.id == id_


def test_read_says_how_much_it_has_understood(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        warn("a text of tomorrow", "nowhere.cc") + warn("FP8 reduction support begins") + "hello\n"
    )
    shown = CliRunner().invoke(app, ["read", str(path)]).stdout
    assert "read        3 lines, 2 of NCCL's: 1 warnings understood, 1 not understood" in shown
    assert "none that matters" not in shown
    told = json.loads(CliRunner().invoke(app, ["read", str(path), "--json"]).stdout)
    assert told["warnings"] == {"understood": 1, "unknown": 1}
    assert told["lines"] == {"read": 3, "of_nccl": 2, "errors_elsewhere": 0}
    assert [one["place"] for one in told["findings"]] == ["misc/socket.cc", "nowhere.cc"]


@pytest.mark.parametrize(
    "text",
    [
        "NCCL version 2.30.7\nTraceback (most recent call last):\nKeyError: 'x'\n",
        "NCCL version 2.30.7\n",
        "slurmstepd: error: Detected 1 oom_kill event\n",
        INFO.format("Using network IB") + "Segmentation fault (core dumped)\n",
        case("torch-last-error"),
    ],
)
def test_what_is_not_understood_is_never_told_as_healthy(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    shown = CliRunner().invoke(app, ["read", str(path)]).stdout
    assert "none that matters" not in shown
    assert "error" in shown or "unknown: NCCL has printed its version alone" in shown


@pytest.mark.parametrize("path", sorted((DATA / "healthy").rglob("*.log")), ids=lambda path: path.stem)
def test_healthy_logs_do_not_alarm(path: Path) -> None:
    log = parse_nccl_log(path.read_text(encoding="utf-8"))
    assert [one for one in diagnose_nccl_log(log).found if one.meaning.level != "harmless"] == []
    assert check_nccl_log(log) == ()
    assert log.errors == []
    assert log.nodes == (
        1 if path.stem.endswith("one") else 2 if log.release and log.release >= (2, 20) else None
    )


def test_the_table_is_made_by_words_and_files() -> None:
    from hpcrun.tuning.log.nccl_messages import find_nccl_message, load_nccl_messages

    assert len(load_nccl_messages()) > 700
    assert all(len(one.fragment.split()) <= 7 and one.first <= one.last for one in load_nccl_messages())
    found = find_nccl_message("Trying to send to self without a matching recv", "enqueue.cc")
    assert found is not None
    assert (found.subsystem, found.whose, found.meaning) == ("argument", "ours", "call-order")


@pytest.mark.process
def test_the_script_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(place))
    spec = importlib.util.spec_from_file_location("log_knowledge", place / "log_knowledge.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "log_knowledge", script)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["log_knowledge.py"])
    assert script.main() == 0
    told = capsys.readouterr().out
    assert "false alarms on 26 healthy logs of 13 releases: 0 (target 0): met" in told
    assert "public environment blocks of 13 repositories: 0 (target 0): met" in told
    assert told.count("of public threads") == 4
    assert "missed" not in told
    monkeypatch.setattr(sys, "argv", ["log_knowledge.py", "--nccl", "/nowhere"])
    assert script.main() == 1
