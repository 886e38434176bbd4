"""Prefixes of launchers, containers and clocks come off; the message stays whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.tuning.log.line import split_log_prefix, strip_log_prefix
from hpcrun.tuning.log.nccl_log import parse_nccl_log
from hpcrun.tuning.policy.nccl_tests import TimedCall, parse_nccl_tests

DATA = Path(__file__).parents[1] / "data" / "tuning"
MESSAGES = (
    "NCCL version 2.21.5+cuda12.4",
    "# nccl-tests version 2.18.0 nccl-headers=22907 nccl-library=22907",
    "sled2:88:99 [0] NCCL INFO Using network IB",
    "     2097152        524288     float     sum      -1   437.05    4.80    4.80       0",
    "  1073741824     268435456     float     sum      -1   437.05    4.80    4.80       0",
    "RCCL version 2.27.7-HEAD:abc",
    "sled2:88:99 [0] /build/src/misc/socket.cc:12 RCCL WARN x",
    "Last error:",
)
PREFIXES = (
    "",
    "[default0]:",
    "[default10]: ",
    "[1,0]<stdout>:",
    "[1,0]<stderr>: ",
    "[host:123,0]<stdout>:",
    "[prterun-n1-1@1,0]<stdout>: ",
    "[1]<stdout>:",
    "Thu Jan  1 00:00:00 2026[1,0]<stdout>:",
    "0: ",
    "0:",
    "12: ",
    " 3: ",
    "0: [default3]:",
    "0: 2026-01-01 10:00:00 ",
    "n1: [1,0]<stdout>:",
    "node01: ",
    "[node1:0]:",
    "[rank5]:",
    "[rank5]: ",
    "[0] ",
    "[0]:",
    "2026-01-01T00:00:00.123Z ",
    "2026-01-01T00:00:00.123456789Z stdout F ",
    "2026-01-01T00:00:00+0000 n1 prog[1]: ",
    "2026-01-01 00:00:00,123 ",
    "2026/01/01 00:00:00 ",
    "01-01-2026 00:00:00 ",
    "[2026-01-01 00:00:00,123] ",
    "[2026-01-01 00:00:00] ",
    "[12:13:14.123] ",
    "12:13:14 ",
    "[1700000000.123] ",
    "Jan  1 00:00:00 ",
    "Jan  1 00:00:00 node01 slurmd[123]: ",
    "<30>Jan  1 00:00:00 node01 slurmd[123]: ",
    "\x1b[36m(worker pid=1, ip=10.0.0.1)\x1b[0m ",
    "(RayTrainWorker pid=123) ",
    "(EngineCore_0 pid=44) ",
    "\x1b[1m0: \x1b[0m",
    "[pod/a/b] ",
    "worker-1  | ",
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_comes_off_every_message(prefix: str) -> None:
    for message in MESSAGES:
        assert strip_log_prefix(prefix + message).strip() == message.strip()


@pytest.mark.parametrize(
    "message",
    [
        "",
        "   ",
        "socketProgress: Connection closed by remote peer",
        "[Service thread] Accept failed Too many open files",
        "[Proxy Service 3] Failed to execute operation Setup from rank 3, retcode 2",
        "Call to ibv_modify_qp failed with 110 Connection timed out",
        "NET/IB : Got completion from peer",
        "10.0.0.7:12:13 [0] NCCL INFO x",
        "c1:90:90 [0] NCCL INFO  Algorithm   |            Tree",
        "12 34",
    ],
)
def test_what_is_no_prefix_stays(message: str) -> None:
    assert split_log_prefix(message) == ("", message)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_logs_and_timings_are_read_alike_behind_any_prefix(prefix: str) -> None:
    def prefixed(text: str) -> str:
        return "".join(f"{prefix}{line}\n" for line in text.splitlines())

    text = (DATA / "nccl-2.29-sockets.log").read_text(encoding="utf-8")
    plain, found = parse_nccl_log(text), parse_nccl_log(prefixed(text))
    assert found.as_json() == plain.as_json()
    assert [line[:4] for line in found.lines] == [line[:4] for line in plain.lines]
    timings = (DATA / "nccl-tests" / "all-reduce-2.17.txt").read_text(encoding="utf-8")
    assert parse_nccl_tests(prefixed(timings)) == parse_nccl_tests(timings)


def test_tagged_timings_have_the_collective_s_own_name() -> None:
    tagged = (DATA / "nccl-tests" / "tagged-2.18.txt").read_text(encoding="utf-8")
    for text in (tagged, tagged.replace("[1,0]<stdout>:", "0: "), tagged.replace("[1,0]<stdout>:", "")):
        found = parse_nccl_tests(text)
        assert set(found.times_us) == {
            TimedCall("all_reduce", 2097152, False),
            TimedCall("all_reduce", 2097152, True),
        }
        assert found.nodes == ("sled1", "sled2")
        assert found.nccl == (2, 29, 7)


def test_a_version_behind_a_tag_and_a_line_behind_another() -> None:
    found = parse_nccl_log((DATA / "logs" / "prefix-without-blank.log").read_text(encoding="utf-8"))
    assert (found.library, found.version, found.network, found.read) == ("NCCL", "2.21.5", "IB", 2)
