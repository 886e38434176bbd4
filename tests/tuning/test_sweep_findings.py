"""What the times of nccl-tests say of latency and bandwidth."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hpcrun.cli.tune import app
from hpcrun.finding import Finding
from hpcrun.tuning.log.nccl_log import parse_nccl_log
from hpcrun.tuning.model.platforms import find_platform
from hpcrun.tuning.policy.nccl_tests import parse_nccl_tests
from hpcrun.tuning.policy.sweep_findings import check_sweep

HEAD = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
H100 = "NVIDIA H100 80GB HBM3"


def output(
    fixed_us: float,
    GBps: float,
    *,
    nodes: int = 2,
    gpu: str = H100,
    powers: range = range(20, 34),
    name: str = "all_reduce",
) -> str:
    """A sweep whose time is a fixed part and bytes at a bus bandwidth, on 8 GPUs a node."""
    ranks = 8 * nodes
    factor = 2 * (ranks - 1) / ranks
    lines = [f"# Collective test starting: {name}_perf"]
    lines += [
        f"#  Rank {at:2} Group 0 Pid {at} on n{at // 8} device {at % 8} [0000:1b:00] {gpu}"
        for at in range(ranks)
    ]
    lines.append(HEAD)
    for power in powers:
        size = 2**power
        time = fixed_us + size * factor / (GBps * 1e3)
        half = f"{time:.2f} {size / time / 1e3:.2f} {size * factor / time / 1e3:.2f} 0"
        lines.append(f"{size} {size // 4} float sum -1 {half} {half}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK"])


NICS = "n0:1:2 [0] NCCL INFO NET/IB : Using " + " ".join(f"[{at}]mlx5_{at}:1/IB" for at in range(8)) + "\n"
NICS += "".join(
    f"n0:1:2 [0] NCCL INFO NET/IB: [{at}] mlx5_{at}:uverbs{at}:1/IB provider=Mlx5 speed=400000 context=0x1\n"
    for at in range(9)
)


def judged(text: str, platform: str | None = None) -> Finding:
    spec = find_platform(platform) if platform else None
    (one,) = check_sweep(parse_nccl_tests(text), parse_nccl_log(text), spec)
    return one


def test_half_of_what_the_adapters_carry_is_missing_bandwidth() -> None:
    one = judged(NICS + output(60, 190))
    assert (one.severity, one.subject, one.confidence) == ("warning", "all_reduce", "medium")
    assert one.text.startswith(
        "reaches 189.9 GB/s at 8 GiB, 47% of 400 (8 adapters of 400 Gb/s in a node, as the log says); 8."
    )
    assert "60 us for any size (0%, 2 us in each of 30 steps) and the bytes at 190 GB/s" in one.text
    assert one.text.endswith(": bandwidth is missing")
    assert "doctor pairs" in one.remedy
    ways = "n0:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n"
    assert "no connection uses GPUDirect" in judged(NICS + ways + output(60, 190)).remedy


def test_half_of_it_by_a_fixed_time_is_latency() -> None:
    one = judged(NICS + output(2500, 380, powers=range(20, 29)))
    assert one.text.endswith(": latency holds it back")
    assert "83.3 us in each of 30 steps) and the bytes at 380 GB/s" in one.text


def test_what_is_near_to_it_is_well() -> None:
    assert judged(NICS + output(60, 380)).severity == "note"


@pytest.mark.parametrize(
    ("text", "platform", "level", "words"),
    [
        (output(60, 190), None, "unknown", "what this hardware should reach is not known"),
        (output(60, 190), "h100-ib400", "warning", "49% of 384 (platform: 8 H100 or H200"),
        (output(60, 180, nodes=1), None, "warning", "50% of 360 (platform table, h100-ib400: 8 NVIDIA H100"),
        (output(60, 340, nodes=1), None, "note", "94% of 360"),
        (output(60, 180, nodes=1, gpu="Some GPU 9000"), None, "unknown", "--platform says it"),
        (output(60, 180, nodes=1, gpu="NVIDIA H100 PCIe"), None, "unknown", "--platform says it"),
        (
            output(60, 24, name="alltoall"),
            "h100-ib400",
            "unknown",
            "this collective should reach is not known",
        ),
        (
            "n0:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 8, bw 48.000000/48.000000, type NVL/PXN,"
            " sameChannels 1\n" + output(60, 190),
            None,
            "warning",
            "49% of 384 (NCCL's own plan in the log",
        ),
        (NICS.replace("speed=400000", "speed=0") + output(60, 190), None, "unknown", "not known"),
        (NICS + output(60, 190, powers=range(33, 34)), None, "warning", "one size alone does not tell"),
    ],
)
def test_hardware_that_is_known_and_that_is_not(
    text: str, platform: str | None, level: str, words: str
) -> None:
    one = judged(text, platform)
    assert one.severity == level
    assert words in str(one)


def test_an_output_without_a_line_of_nccl_is_read(tmp_path: object) -> None:
    path = f"{tmp_path}/out.txt"
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(output(60, 180, nodes=1))
    told = CliRunner().invoke(app, ["read", path]).stdout
    assert told.startswith("warning      bandwidth  all_reduce: reaches ")
    assert "no line of NCCL's" not in told


def test_no_times_say_nothing() -> None:
    assert check_sweep(parse_nccl_tests("nothing"), parse_nccl_log("")) == ()
