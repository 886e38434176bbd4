"""Making parity and making a lost block again, in GB/s of the data that is read, beside a copy in memory.

One thread. Both sides of a pair go through the same bytes, in the checkpoint worker's windows, and
alternate; the copy goes into memory that was written to before. A copy reads and writes each byte; XOR of D
chunks reads D and writes one, so it can come out ahead of the copy. Nothing goes over a network here.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import harness

from hpcrun.checkpoint.parity.erasure import WINDOW_BYTES, erasure_code_for
from hpcrun.errors import SiteError

SHAPES = ((1, 1), (3, 1), (7, 1), (3, 2), (6, 2), (14, 2))
"""Chunks and parities of a stripe."""
CLAIMED = {(7, 1): ("XOR, 8 nodes", 0.5), (6, 2): ("Reed-Solomon, 8 nodes", 0.25)}


class Stripe:
    """The pieces of a stripe in memory, and their parities."""

    def __init__(self, data: int, parity: int, size_bytes: int) -> None:
        import numpy

        draw = numpy.random.default_rng(data)
        self.each = max(WINDOW_BYTES, size_bytes // data // WINDOW_BYTES * WINDOW_BYTES)
        self.pieces = [draw.integers(0, 256, self.each, dtype=numpy.uint8).data for _ in range(data)]
        self.code = erasure_code_for(data, parity)
        self.parities = [memoryview(bytearray(self.each)) for _ in range(parity)]
        self.into = numpy.frombuffer(bytearray(b"\1" * self.each * data), numpy.uint8)
        self.read_bytes = self.each * data
        self.again = memoryview(bytearray(self.each))
        self.encode()
        self.rebuild()
        if bytes(self.again) != bytes(self.pieces[0]):
            raise SiteError("what was made again is not what was there")

    def copy(self) -> None:
        """The limit: as many bytes from the same place to warm memory."""
        import numpy

        for number, piece in enumerate(self.pieces):
            begin = number * self.each
            for at in range(0, self.each, WINDOW_BYTES):
                source = numpy.frombuffer(piece[at : at + WINDOW_BYTES], numpy.uint8)
                self.into[begin + at : begin + at + WINDOW_BYTES] = source

    def encode(self) -> None:
        """Make all parities."""
        for at in range(0, self.each, WINDOW_BYTES):
            made = self.code.encode([piece[at : at + WINDOW_BYTES] for piece in self.pieces])
            for parity, part in zip(self.parities, made, strict=True):
                parity[at : at + WINDOW_BYTES] = part

    def rebuild(self) -> None:
        """Make the first chunk again, from the others and as many parities as there are for that."""
        data = len(self.pieces)
        left = dict(enumerate(self.pieces)) | {data + n: one for n, one in enumerate(self.parities)}
        # The last pieces: with two parities also two chunks are missing.
        used = dict(list(left.items())[-data:])
        for at in range(0, self.each, WINDOW_BYTES):
            pieces = {number: piece[at : at + WINDOW_BYTES] for number, piece in used.items()}
            self.again[at : at + WINDOW_BYTES] = self.code.rebuild(pieces, 0)


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(report: harness.Report, stripe: Stripe, data: int, parity: int, pairs: int) -> None:
    """Alternate copy and work, for encoding and for rebuilding."""
    for what, work in (("encode", stripe.encode), ("rebuild", stripe.rebuild)):
        stripe.copy()
        work()
        speeds: list[float] = []
        limits: list[float] = []
        for pair in range(pairs):
            sides = [(limits, stripe.copy), (speeds, work)]
            for found, side in sides if pair % 2 == 0 else sides[::-1]:
                found.append(stripe.read_bytes / timed(side) / 1e9)
        ratios = [speed / limit for speed, limit in zip(speeds, limits, strict=True)]
        report.row(
            what=what,
            chunks=data,
            parities=parity,
            MiB=stripe.read_bytes >> 20,
            GBps=harness.spread(speeds),
            copy_GBps=harness.spread(limits),
            ratio=harness.spread(ratios),
        )
        if (data, parity) in CLAIMED:
            name, target = CLAIMED[data, parity]
            middle = statistics.median(ratios)
            figure = f"{harness.spread(ratios)}, {statistics.median(speeds):.1f} GB/s, n = {pairs}"
            report.claim(
                f"{what}, {name}, over a copy in memory", figure, f"at least {target}", middle >= target
            )


def main() -> int:
    """Print the table and one line a claim."""
    parser = harness.options(__doc__)
    parser.add_argument("--pairs", type=int, help="pairs a case; default 15, quick 5")
    parser.add_argument("--mib", type=int, help="data of a stripe; default 512, quick 64")
    arguments = parser.parse_args()
    report = harness.Report("erasure")
    report.header()
    pairs = arguments.pairs or (5 if arguments.quick else 15)
    size = (arguments.mib or (64 if arguments.quick else 512)) << 20
    for data, parity in SHAPES:
        try:
            measure(report, Stripe(data, parity, size), data, parity, pairs)
        except SiteError as error:
            return harness.fail(str(error))
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
