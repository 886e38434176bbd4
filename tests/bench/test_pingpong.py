"""The ping-pong: what is fitted to its times, whom it pairs, and a run of it with real MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.bench.pingpong import fit_message_cost, parse_pairs, render_links
from hpcrun.errors import UsageError

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def test_a_line_comes_back() -> None:
    def times(size: int) -> list[float]:
        """With two calls that something else has disturbed."""
        return [5e-6 + size / 2e9, 1.0, 5e-6 + size / 2e9, 6e-6 + size / 2e9, 5e-6 + size / 2e9]

    found = fit_message_cost({size: times(size) for size in (8, 65_536, 262_144, 4_194_304)})
    assert found.up_to_bytes == 65_536
    for line in (found.small, found.large):
        assert line.latency_s == pytest.approx(5e-6, rel=0.01)
        assert line.bandwidth_Bps == pytest.approx(2e9)


def test_small_messages_have_a_line_of_their_own() -> None:
    found = fit_message_cost({0: [1e-3], 1000: [2e-3], 10_000: [3e-3], 20_000: [5e-3]})
    assert found.small == pytest.approx((1e-3, 1e6))
    assert found.large == pytest.approx((1e-3, 5e6))
    coarse = fit_message_cost({0: [1e-3], 1000: [1e-3], 10_000: [3e-3], 40_000: [18e-3]})
    assert coarse.small == pytest.approx((1e-3, 2e6))
    assert coarse.large == pytest.approx((0, 2e6)), "no message takes less than no time"


def test_too_little_to_fit() -> None:
    with pytest.raises(UsageError, match="3 sizes are too few"):
        fit_message_cost({8: [1.0], 16: [2.0], 32: [3.0]})
    with pytest.raises(UsageError, match="16 bytes took no longer than 8"):
        fit_message_cost({1: [1.0], 2: [2.0], 8: [2.0], 16: [2.0]})


def test_links_in_words() -> None:
    times = {"8": [1e-6], "1000": [2e-6], "10000": [3e-6], "20000": [5e-6]}
    odd = {**times, "20000": [1e-6]}
    told = render_links({"rack": {"one": times, "all": odd, "pairs": 4}}).splitlines()
    assert told[0] == "rack, one pair: up to 1000 B: 1 us, 0.992 GB/s; above: 1 us, 5 GB/s"
    assert told[1].startswith("rack, 4 pairs both ways: unknown: ping-pong: 20000 bytes took no longer")


def test_pairs() -> None:
    assert parse_pairs(["near:0-1,2-3", "far:0-2"], 4) == {"near": [(0, 1), (2, 3)], "far": [(0, 2)]}
    for word in ("near", "near:0", "near:0-1,1-2", "near:0-4", "near:a-b", "near:-1-0"):
        with pytest.raises(UsageError, match=word):
            parse_pairs([word], 4)


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "hpcrun.bench.pingpong", "links", str(tmp_path / "out"), "rack:0-1"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "pingpong: rack:0-1: each of the ranks 0 to 0 may be in one pair\n"


@pytest.mark.parametrize(("mode", "words"), [("links", ["pair:0-1"]), ("allreduce", ["1024:3", "65536:2"])])
def test_with_mpi(mode: str, words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    program = [sys.executable, "-m", "hpcrun.bench.pingpong", mode, str(out), *words]
    done = subprocess.run(
        [str(BIN / "mpiexec"), "-launcher", "fork", "-n", "2", *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    if mode == "allreduce":
        assert {size: len(times) for size, times in found.items()} == {"1024": 3, "65536": 2}
    else:
        assert found["links"]["pair"]["pairs"] == 1
        assert "pair, 1 pairs both ways: " in done.stdout
        assert all(time > 0 for times in found["links"]["pair"]["one"].values() for time in times)
        assert found["reduce_s_per_byte"] > 0
