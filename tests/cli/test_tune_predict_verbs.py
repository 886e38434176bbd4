"""`hpcrun tune predict` and `tune read`: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.tune import app
from hpcrun.errors import HpcrunError, UsageError

DATA = Path(__file__).parents[1] / "data"
SOCKETS = str(DATA / "tuning" / "nccl-2.29-sockets.log")
TREE = str(DATA / "topology" / "tree.conf")
PROFILE = """\
name: here
topology:
  levels:
    - {name: leaf, bandwidth_GBps: 25, latency_us: 1}
    - {name: spine, bandwidth_GBps: 25, oversubscription: 4, latency_us: 2}
"""


def call(*words: str) -> Result:
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, HpcrunError | SystemExit):
        raise result.exception
    return result


def refused(*words: str) -> str:
    result = call(*words)
    assert isinstance(result.exception, UsageError), result.output
    return str(result.exception)


def printed(*words: str) -> dict[str, Any]:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.exception
    content: dict[str, Any] = json.loads(result.stdout)
    assert content["schema_version"] == 2
    return content


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "here.yaml"
    path.write_text(PROFILE)
    return str(path)


def test_a_table_by_a_platform() -> None:
    result = call("predict", "--nodes", "4", "--platform", "h100-ib400", "--sizes", "64K,8M,8G")
    lines = result.stdout.splitlines()
    assert lines[0] == "allreduce, nccl: 32 ranks on 4 nodes"
    assert "graphs assumed, not read from a log" in lines[1]
    assert "Tree/LL " in lines[3]
    assert lines[3].endswith("by 45 %")
    assert lines[4].endswith("undecided, sweep it")
    assert lines[5].endswith("undecided, sweep it")
    assert "  380.5 " in lines[5]
    assert "model's error 40 %" in result.stdout
    assert "model's error 16 %" in result.stdout


def test_the_same_as_json() -> None:
    found = printed("predict", "--nodes", "4", "--platform", "h100-ib400", "--sizes", "8G")
    (row,) = found["rows"]
    assert row["winner"] == "Ring/Simple"
    assert row["busbw_GBps"] == pytest.approx(380.5, abs=0.1)
    assert row["model_error"] == 0.16
    assert (found["ranks"], found["order_only"]) == (32, False)


def test_a_table_by_a_log_agrees_with_what_was_taken() -> None:
    found = printed("predict", "--log", SOCKETS, "--collective", "broadcast", "--sizes", "1K..128M")
    winners = {row["size_bytes"]: row["winner"] for row in found["rows"]}
    assert winners[16384] == "Ring/LL"
    assert winners[32768] == winners[1048576] == "Ring/Simple"
    assert "NCCL 2.29.7" in found["basis"]
    assert found["notes"] == ["the GPUs are not known: taken as sm80 or newer"]


def test_another_version_of_nccl(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    graph = "{channels: 8, bw_intra: 40, bw_inter: 20}"
    path.write_text(
        f"about: x\nsource: x\ncapability: 90\ngpus_per_node: 8\nseveral_nodes: {{ring: {graph}}}\n"
    )
    words = ("predict", "--nodes", "2", "--platform", str(path), "--sizes", "64G")
    old, new, ancient = (printed(*words, "--nccl-version", name) for name in ("2.30.7", "2.31", "2.19"))
    # From 2.31 on a ring of two nodes goes by what a channel carries between them.
    assert old["rows"][0]["algbw_GBps"] == pytest.approx(2 * new["rows"][0]["algbw_GBps"], rel=0.01)
    assert old["notes"] == []
    assert ancient["notes"] == ["the constants are those of NCCL 2.30.7; NCCL 2.19 has some others"]
    assert "--nccl-version: 'two' is not a release" in refused(*words, "--nccl-version", "two")


def test_mpi_on_a_network_that_was_measured() -> None:
    words = ("predict", "--nodes", "8", "--ranks-per-node", "1", "--platform", "emulated-racks")
    found = printed(*words, "--library", "mpi", "--sizes", "1K,4M")
    assert [row["winner"] for row in found["rows"]] == ["recursive_doubling", "rabenseifner"]
    assert {row["model_error"] for row in found["rows"]} == {0.57}
    assert call(*words, "--library", "gloo").stdout.splitlines()[-1].startswith("The model's error here is")
    assert "NCCL's graphs for several nodes are not known" in refused(*words)


def test_an_unknown_platform_gives_only_the_order(profile: str) -> None:
    words = ("predict", "--nodes", "4", "--ranks-per-node", "2", "--topology", TREE, "--cluster", profile)
    result = call(*words, "--sizes", "1K,64M")
    assert result.exit_code == 0, result.exception
    assert "nothing is known of NCCL's graphs here" in result.stdout
    assert "order, the fastest first" in result.stdout
    assert "time us" not in result.stdout
    found = printed(*words)
    assert found["order_only"] is True
    assert "time_us" not in found["rows"][0]


def test_a_job_stands_where_it_would(profile: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: tiny\nresources: {nodes: 4, gpus_per_node: 2}\nparallel: {dp_shard: 8}\n"
        "data: {text: python-stdlib, seq_len: 32}\n"
    )
    words = ("predict", str(job), "--topology", TREE, "--cluster", profile, "--library", "gloo")
    found = printed(*words, "--sizes", "1M")
    assert (found["nodes"], found["ranks_per_node"]) == (4, 2)
    assert {*found["rows"][0]["order"]} == {"ring", "ring_chunked", "halving_doubling"}


def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    result = call("predict", "--nodes", "2", "--platform", "h100-ib400", "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_text().startswith("<svg")
    assert f"drawn in {path}" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("predict", "no ranks are given; give a JOB, or --nodes N"),
        ("predict --nodes 4 --platform nowhere", "--platform nowhere: is not known; there are"),
        ("predict --nodes 4 --collective allsum", "--collective allsum: is not known; use allreduce"),
        ("predict --nodes 4 --library nccll", "--library nccll: is not known; use nccl, mpi, gloo"),
        ("predict --nodes 4 --sizes 1Q", "--sizes 1Q: write 1K..1G"),
        ("predict --nodes 4 --library mpi --log x", "--log: an NCCL log says nothing of mpi"),
        ("predict --log nowhere", "nowhere: cannot be read: No such file"),
        ("predict --nodes 4 --platform h100-ib400 --collective alltoall", "NCCL has no algorithms"),
        ("predict --nodes 4 --platform h100-ib400 --plot /nowhere/x.svg", "cannot be written"),
        (
            "predict --nodes 400 --ranks-per-node 1 --library mpi --topology TREE --cluster PROFILE",
            "--nodes 400",
        ),
        ("predict --nodes 4 --platform h100-ib400 --library mpi", "does not say what its network's levels"),
        ("predict job.yaml --nodes 4", "--nodes: job.yaml says how many already"),
        ("read nowhere", "nowhere: cannot be read: No such file"),
    ],
)
def test_mistakes_are_one_line(words: str, told: str, profile: str) -> None:
    values = {"TREE": TREE, "PROFILE": profile}
    text = refused(*(values.get(word, word) for word in words.split()))
    assert told in text
    assert "\n" not in text


def test_what_a_log_tells() -> None:
    result = call("read", SOCKETS)
    assert result.exit_code == 0
    assert "version     NCCL 2.29.7" in result.stdout
    assert "connection  NET/Socket/0, 3 times" in result.stdout
    assert "set         NCCL_P2P_DISABLE=1" in result.stdout
    assert "used        Broadcast 1 MiB: Ring/Simple, 4 channels, 2 calls" in result.stdout


def test_warnings_with_meaning_and_remedy() -> None:
    result = call("read", str(DATA / "tuning" / "nccl-2.18.log"))
    assert "error       line 17, 1 times: NET/IB : Got completion" in result.stdout
    assert "means: the peer never acknowledged" in result.stdout
    assert "(confidence: medium)" in result.stdout
    assert "used        unknown" in result.stdout
    found = printed("read", str(DATA / "tuning" / "nccl-2.18.log"))
    assert [one["level"] for one in found["findings"]].count("harmless") == 3


def test_a_quiet_log_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("NCCL version 2.30.7+cuda13\na:1:1 [0] NCCL INFO Using network IB\n")
    assert "warnings    none that matters" in call("read", str(path)).stdout
    path.write_text("nothing\n")
    assert "no line of NCCL's in it" in call("read", str(path)).stdout


def test_a_log_beside_an_earlier_one(tmp_path: Path) -> None:
    old = tmp_path / "old.log"
    old.write_text(
        "NCCL version 2.22.3+cuda12.6\n"
        "a:1:1 [0] NCCL INFO Broadcast: 1048576 Bytes -> Algo 1 proto 0 time 9.3\n"
    )
    shown = call("read", SOCKETS, "--before", str(old)).stdout
    assert "changed     Broadcast 1 MiB: Ring/LL before, Ring/Simple now\n" in shown
    assert printed("read", SOCKETS, "--before", str(old))["changes"][0]["before"] == ["Ring/LL"]
    assert "changed     nothing that both logs have" in call("read", SOCKETS, "--before", SOCKETS).stdout
    old.write_text("NCCL version 2.18.5+cuda12.2\n")
    assert "changed     unknown: one of the logs" in call("read", SOCKETS, "--before", str(old)).stdout
