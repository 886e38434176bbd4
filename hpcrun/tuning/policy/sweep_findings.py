"""What the times of nccl-tests say: how far from what the hardware can do, and whether in steps or in bytes.

A collective's time is a fixed part, spent in its steps one after the other, and a part that grows with the
bytes. What the fixed part is the largest sizes tell, where the bytes grow and the steps do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpcrun.finding import Finding, sort_findings
from hpcrun.tuning.log.nccl_log import NcclLog
from hpcrun.tuning.model.platforms import PlatformSpec, find_platform
from hpcrun.tuning.policy.nccl_tests import NcclTestTimings, TimedCall
from hpcrun.units import format_bytes

_ENOUGH = 0.7
"""Share of the expected bandwidth that is enough; ring, protocol and switches take the rest."""
_LATENCY = 0.5
"""The share of the largest size's time from which on its fixed part is what holds it back."""
_ASYMPTOTIC = 0.8
"""Share of the expected bandwidth from which on a slope is good."""
_APART = 1.9
"""A slope needs sizes that differ by this factor."""
_SPEED = re.compile(
    r"NET/IB ?: ?\[\d+\] (?P<name>[\w.+-]+):[^:/\s]*:(?P<port>\d+)/\S+ .*?\bspeed=(?P<speed>\d+)\b"
)
_MADE = re.compile(r"Made virtual device \[\d+\] name=(?P<name>\S+) speed=(?P<speed>\d+)")
_STEPS: Mapping[str, tuple[int, int]] = {
    "allreduce": (2, -2),
    "allgather": (1, -1),
    "reducescatter": (1, -1),
    "broadcast": (1, -1),
    "reduce": (1, -1),
}
"""Steps of a ring of n ranks, a·n + b."""
_GPUS = (
    (re.compile(r"H100 80GB HBM3|\bH200\b|\bH20\b"), "h100-ib400"),
    (re.compile(r"\bB200\b"), "b200-ib400"),
    (re.compile(r"A100-SXM4"), "a100-ib200"),
)
"""GPUs whose links inside a node the table of platforms knows."""


@dataclass(frozen=True)
class ExpectedBandwidth:
    """What the bus bandwidth of large messages should come near to, and how that is known."""

    busbw_GBps: float
    source: str


@dataclass(frozen=True)
class TimeSplit:
    """The time of the largest size in its two parts."""

    size_bytes: int
    time_us: float
    busbw_GBps: float
    fixed_us: float
    slope_GBps: float
    """Bus bandwidth of the bytes alone, between the two largest sizes."""

    @property
    def fixed_share(self) -> float:
        """The share of the time that does not depend on the bytes."""
        return self.fixed_us / self.time_us


def expected_bandwidth(
    timings: NcclTestTimings, log: NcclLog, platform: PlatformSpec | None = None
) -> ExpectedBandwidth | None:
    """By the log's adapters, else the platform that was said, else what NCCL plans, else the GPUs."""
    nodes = len(timings.nodes) or log.nodes or 0
    speeds = _adapters(log)
    if nodes > 1 and speeds:
        total = sum(speeds.values()) / 8000
        kinds = sorted({*speeds.values()})
        rates = "/".join(f"{speed / 1000:g}" for speed in kinds)
        return ExpectedBandwidth(total, f"{len(speeds)} adapters of {rates} Gb/s in a node, as the log says")
    if platform is not None and nodes and (ring := _ring_bandwidth(platform, nodes)):
        return ExpectedBandwidth(ring, f"platform: {platform.about}")
    if graph := log.graphs.get("ring"):
        bandwidth = graph.channels * (graph.bw_inter if nodes > 1 else graph.bw_intra)
        return ExpectedBandwidth(
            bandwidth, "NCCL's own plan in the log, which knows the links and not their state"
        )
    platform_name = next(
        (name for pattern, name in _GPUS if timings.gpu and pattern.search(timings.gpu)), None
    )
    if platform_name is not None and nodes == 1:
        own = find_platform(platform_name)
        if timings.ranks == own.gpus_per_node and (ring := _ring_bandwidth(own, 1)):
            return ExpectedBandwidth(
                ring, f"platform table, {platform_name}: {own.gpus_per_node} {timings.gpu} in one node"
            )
    return None


def _ring_bandwidth(platform: PlatformSpec, nodes: int) -> float | None:
    spec = (platform.one_node if nodes == 1 else platform.several_nodes).get("ring")
    return None if spec is None else spec.channels * (spec.bw_intra if nodes == 1 else spec.bw_inter)


def _adapters(log: NcclLog) -> dict[str, int]:
    """The adapters in use with their speed in Mb/s; none where one of them does not tell it."""
    speeds_by_name: dict[str, int] = {}
    for line in log.lines:
        if match := _SPEED.search(line.text):
            speeds_by_name[f"{match['name']}:{match['port']}"] = int(match["speed"])
        elif match := _MADE.search(line.text):
            speeds_by_name[match["name"]] = int(match["speed"])
    used = [nic.partition("/")[0] for nic in log.nics if ":" in nic and "<" not in nic]
    speeds = {name: speeds_by_name.get(name) or speeds_by_name.get(name.rpartition(":")[0]) for name in used}
    known_speeds = {name: speed for name, speed in speeds.items() if speed}
    return known_speeds if len(known_speeds) == len(speeds) else {}


def split_time(timings: NcclTestTimings, collective: str) -> TimeSplit | None:
    """The parts of a collective's time, by its two largest sizes out of place; None for a single size."""
    calls = sorted(call for call in timings.times_us if call.collective == collective and not call.in_place)
    last = calls[-1]
    before = [call for call in calls if call.size_bytes * _APART <= last.size_bytes]
    if not before:
        return None
    time_us, busbw = timings.median_us(last), _measured_bus_bandwidth(timings, last)
    more_us = time_us - timings.median_us(before[-1])
    more_bytes = last.size_bytes - before[-1].size_bytes
    # Times that do not grow are all fixed.
    per_byte = max(more_us, 0.0) / more_bytes
    fixed = min(max(time_us - per_byte * last.size_bytes, 0.0), time_us)
    factor = busbw * time_us / last.size_bytes
    return TimeSplit(last.size_bytes, time_us, busbw, fixed, factor / per_byte if per_byte else float("inf"))


def _measured_bus_bandwidth(timings: NcclTestTimings, call: TimedCall) -> float:
    rates = sorted(timings.busbw_GBps[call])
    return rates[len(rates) // 2]


def check_sweep(
    timings: NcclTestTimings, log: NcclLog, platform: PlatformSpec | None = None
) -> tuple[Finding, ...]:
    """What every collective of an output reaches; nothing where there are no times in it."""
    names = dict.fromkeys(call.collective for call in timings.times_us if not call.in_place)
    return sort_findings(
        finding for name in names for finding in _check_collective(timings, log, platform, name)
    )


def _check_collective(
    timings: NcclTestTimings, log: NcclLog, platform: PlatformSpec | None, collective: str
) -> Iterator[Finding]:
    name = collective or "collective"
    parts = split_time(timings, collective)
    last = max(call for call in timings.times_us if call.collective == collective and not call.in_place)
    reached = f"{_measured_bus_bandwidth(timings, last):.4g} GB/s at {format_bytes(last.size_bytes)}"
    steps = _ring_steps(collective, timings.ranks)
    parts_text = (
        _describe_parts(parts, steps)
        if parts
        else "one size alone does not tell steps from bytes: -b 1M -e 8G -f 2"
    )
    aim = expected_bandwidth(timings, log, platform) if steps else None
    if aim is None:
        why = "what this collective should reach is not known"
        if steps:
            why = "what this hardware should reach is not known: --platform says it, or NCCL_DEBUG=INFO"
        yield Finding("unknown", "bandwidth", name, f"reaches {reached}; {parts_text}", why)
        return
    share = _measured_bus_bandwidth(timings, last) / aim.busbw_GBps
    text = f"reaches {reached}, {share:.0%} of {aim.busbw_GBps:.4g} ({aim.source}); {parts_text}"
    if share >= _ENOUGH:
        yield Finding("note", "bandwidth", name, text)
    elif parts is None:
        yield Finding("warning", "bandwidth", name, text, "run a sweep of sizes to see which", "medium")
    elif parts.slope_GBps >= _ASYMPTOTIC * aim.busbw_GBps or parts.fixed_share >= _LATENCY:
        remedy = (
            "larger sizes reach more; if jobs send such sizes, look at CPU binding of the proxy threads, the"
            " network's latency and hops, and NCCL_ALGO and NCCL_PROTO that are left over"
        )
        yield Finding("warning", "bandwidth", name, f"{text}: latency holds it back", remedy, "medium")
    else:
        yield Finding("warning", "bandwidth", name, f"{text}: bandwidth is missing", _missing(log), "medium")


def _describe_parts(parts: TimeSplit, steps: int) -> str:
    each = f", {parts.fixed_us / steps:.3g} us in each of {steps} steps" if steps else ""
    slope = "no time" if parts.slope_GBps == float("inf") else f"{parts.slope_GBps:.4g} GB/s"
    return (
        f"{parts.time_us:.4g} us are {parts.fixed_us:.3g} us for any size"
        f" ({parts.fixed_share:.0%}{each}) and the bytes at {slope}"
    )


def _ring_steps(collective: str, ranks: int | None) -> int:
    """The number of steps of a ring; 0 where it is not known."""
    of = _STEPS.get(re.sub(r"[^a-z]", "", collective.lower()))
    return of[0] * ranks + of[1] if of and ranks and ranks > 1 else 0


def _missing(log: NcclLog) -> str:
    """Where to look, by what the log says of the ways."""
    if log.network == "Socket":
        return "NCCL goes by TCP: see why no verbs device is used"
    ways = [way for way in log.ways if way.startswith("NET/IB")]
    if ways and not any("GDRDMA" in way for way in ways):
        return "no connection uses GPUDirect (GDRDMA): nvidia-peermem or DMA-BUF, ACS, NCCL_NET_GDR_LEVEL"
    return (
        "count the adapters in use against those of the node (NCCL_IB_HCA, one port of a bond), then `hpcrun"
        " doctor` for PCIe width, ACS and pauses, and `hpcrun doctor pairs` for a slow node"
    )
