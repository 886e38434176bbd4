"""MPI ping-pong between pairs of ranks, and timed allreduces: what a network's levels cost.

    srun ... python -m hpcrun.bench.pingpong links OUT.json NAME:0-1,2-3 [NAME:...]
    srun ... python -m hpcrun.bench.pingpong allreduce OUT.json SIZE:REPETITIONS [...]

`links` lets one pair of each name play ping-pong while all others sleep, which gives the way's own latency
and bandwidth; then all pairs exchange messages, both directions at once, until the slowest pair is through:
that is what a round of a collective finds, in which everybody is at work and uplinks are shared. Rank 0
writes the seconds. Ranks nap between polls, as they do where cores are fewer than ranks: who spins there
takes the core from whom it waits for.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcrun.errors import HpcrunError, UsageError
from hpcrun.files import write_output
from hpcrun.units import format_bandwidth

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL_BYTES = 8
LARGE_BYTES = (16_384, 262_144, 4_194_304)
SMALL_REPEATS, LARGE_REPEATS, WARM_UP_REPEATS = 40, 6, 1
POLL_INTERVAL_S = 0.0002
"""Between polls."""


class LatencyBandwidth(NamedTuple):
    """What a message costs: seconds = latency + bytes / bandwidth."""

    latency_s: float
    bandwidth_Bps: float


class MessageCostModel(NamedTuple):
    """Two lines: MPI libraries and networks treat small messages otherwise than large ones."""

    small: LatencyBandwidth
    large: LatencyBandwidth
    up_to_bytes: int
    """The largest of the small ones."""


def lower_quartile(times: Sequence[float]) -> float:
    """The lower one: what other work on the machine does to a time is only ever to add to it."""
    return statistics.quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def fit_message_cost(seconds_by_size: Mapping[int, Sequence[float]]) -> MessageCostModel:
    """A line through the two smallest sizes, and one through the two largest."""
    points = sorted((size, lower_quartile(times)) for size, times in seconds_by_size.items())
    if len(points) < 4:
        raise UsageError(f"ping-pong: {len(points)} sizes are too few for two lines; use 4")
    (first, latency), (second, later), *_, (near, low), (far, high) = points
    if high <= low:
        raise UsageError(f"ping-pong: {far} bytes took no longer than {near}; measure again, with more calls")
    bandwidth = (far - near) / (high - low)
    large = LatencyBandwidth(max(0.0, low - near / bandwidth), bandwidth)
    # What is lost in the grain of the polls is taken to go as the large ones do.
    small = LatencyBandwidth(latency, (second - first) / (later - latency) if later > latency else bandwidth)
    return MessageCostModel(small, large, second)


def parse_pairs(words: Sequence[str], ranks: int) -> dict[str, list[tuple[int, int]]]:
    """`near:0-1,2-3` and so on; UsageError for a rank that is not there, or twice in one name."""
    times = {}
    for word in words:
        name, _, rest = word.partition(":")
        try:
            pairs = [(int(a), int(b)) for a, b in (pair.split("-") for pair in rest.split(","))]
        except ValueError:
            raise UsageError(f"{word}: write NAME:0-1,2-3") from None
        used = [rank for pair in pairs for rank in pair]
        if len({*used}) < len(used) or not all(0 <= rank < ranks for rank in used):
            raise UsageError(f"{word}: each of the ranks 0 to {ranks - 1} may be in one pair")
        times[name] = pairs
    return times


def time_half_round_trip(comm: MPI.Comm, peer: int, first: bool, out: bytearray, into: bytearray) -> float:
    """Seconds of one way, half of there and back."""
    begin = time.perf_counter()
    if first:
        wait_for_request(comm.Isend(out, peer))
    wait_for_request(comm.Irecv(into, peer))
    if not first:
        wait_for_request(comm.Isend(out, peer))
    return (time.perf_counter() - begin) / 2


def time_exchange(comm: MPI.Comm, peer: int, first: bool, out: bytearray, into: bytearray) -> float:
    """Seconds until both directions are through; who is first does not matter."""
    begin = time.perf_counter()
    coming, going = comm.Irecv(into, peer), comm.Isend(out, peer)
    wait_for_request(coming)
    wait_for_request(going)
    return time.perf_counter() - begin


def wait_for_request(request: MPI.Request) -> None:
    """Until it is done."""
    while not request.Test():
        time.sleep(POLL_INTERVAL_S)


def measure_links(comm: MPI.Comm, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, Any]:
    """By name: `one` pair's ping-pong, and `all` pairs' exchange; seconds by size, of the slowest at work."""
    return {
        name: {
            "one": _measure_pairs(comm, chosen[:1], time_half_round_trip),
            "all": _measure_pairs(comm, chosen, time_exchange),
            "pairs": len(chosen),
        }
        for name, chosen in pairs.items()
    }


_TimedTransfer = Callable[["MPI.Comm", int, bool, bytearray, bytearray], float]


def _measure_pairs(
    comm: MPI.Comm, pairs: Sequence[tuple[int, int]], trip: _TimedTransfer
) -> dict[int, list[float]]:
    partner = {a: (b, True) for a, b in pairs} | {b: (a, False) for a, b in pairs}
    results = {}
    for size, times in ((SMALL_BYTES, SMALL_REPEATS), *((large, LARGE_REPEATS) for large in LARGE_BYTES)):
        out, into = bytearray(size), bytearray(size)
        mine: list[float] = []
        for _ in range(times + WARM_UP_REPEATS):
            # As a round of a collective: all start together, and links have had a moment's rest.
            wait_for_request(comm.Ibarrier())
            if comm.rank in partner:
                mine.append(trip(comm, *partner[comm.rank], out, into))
        gathered = [each[WARM_UP_REPEATS:] for each in comm.gather(mine) or [] if each]
        results[size] = [max(each) for each in zip(*gathered, strict=True)]
    return results


def measure_reduce_s_per_byte(comm: MPI.Comm) -> float:
    """What adding up floats costs a byte while every rank does it: the slowest rank's median."""
    import numpy as np
    from mpi4py import MPI

    mine, received = np.ones(1 << 18, dtype=np.float32), np.ones(1 << 18, dtype=np.float32)
    spent = []
    wait_for_request(comm.Ibarrier())
    for _ in range(10):
        begin = time.perf_counter()
        MPI.SUM.Reduce_local(mine, received)
        spent.append(time.perf_counter() - begin)
    median: float = comm.allreduce(statistics.median(spent), MPI.MAX)
    return median / mine.nbytes


def measure_allreduce(comm: MPI.Comm, calls: Mapping[int, int]) -> dict[int, list[float]]:
    """Seconds until the last rank is through, of every call; single precision, out of place."""
    import numpy as np

    results = {}
    for size, times in calls.items():
        mine = np.ones(size // 4, dtype=np.float32)
        result = np.empty_like(mine)
        spent = []
        for number in range(times + 1):
            wait_for_request(comm.Ibarrier())
            begin = time.perf_counter()
            wait_for_request(comm.Iallreduce(mine, result))
            took = time.perf_counter() - begin
            if number:
                spent.append(took)
        if result[0] != comm.size:
            raise UsageError(f"allreduce of {size} bytes: the sum is {result[0]}, not {comm.size}")
        results[size] = [max(each) for each in zip(*comm.allgather(spent), strict=True)]
    return results


def render_links(links: Mapping[str, Any]) -> str:
    """What the times say of each name, a line each; for the levels of a platform file."""
    lines = []
    for name, fits in links.items():
        for mode, words in (("one", "one pair"), ("all", f"{fits['pairs']} pairs both ways")):
            try:
                line = fit_message_cost({int(size): times for size, times in fits[mode].items()})
            except UsageError as error:
                lines.append(f"{name}, {words}: unknown: {error}")
                continue
            parts = (
                f"{which} {1e6 * fit.latency_s:.4g} us, {format_bandwidth(fit.bandwidth_Bps)}"
                for which, fit in ((f"up to {line.up_to_bytes} B:", line.small), ("above:", line.large))
            )
            lines.append(f"{name}, {words}: {'; '.join(parts)}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """See the module."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    modes: dict[str, Callable[[Sequence[str]], Any]] = {
        "links": lambda words: {
            "links": measure_links(comm, parse_pairs(words, comm.size)),
            "reduce_s_per_byte": measure_reduce_s_per_byte(comm),
        },
        "allreduce": lambda words: measure_allreduce(
            comm, {int(size): int(times) for size, _, times in (word.partition(":") for word in words)}
        ),
    }
    if len(argv) < 3 or argv[0] not in modes:
        raise UsageError(f"pingpong: write {' or '.join(modes)}, then a file, then what to measure")
    results = modes[argv[0]](argv[2:])
    if comm.rank == 0:
        write_output(Path(argv[1]), json.dumps(results))
        if argv[0] == "links":
            sys.stdout.write(render_links(results["links"]) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HpcrunError as error:
        # All ranks have read the same words.
        sys.stderr.write(f"pingpong: {error}\n")
        sys.exit(error.exit_code)
