"""Writing a part of a save past the page cache, beside the usual write and sync of the same bytes.

Both write the same memory, a slot's image, to a new file and sync it; they take turns, and which of them
goes first does too. What of the file is in the page cache afterwards is counted page by page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Report, fail, options, spread

from hpcrun.checkpoint.format import HEADER_BYTES
from hpcrun.checkpoint.lustre.direct import BATCH_BYTES, write_file_direct

TARGET = 0.85
_libc = ctypes.CDLL(None, use_errno=True)


def write_buffered(path: Path, image: memoryview) -> None:
    """The limit: one blob in large writes, synced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while at < len(image):
            at += os.pwrite(descriptor, image[at : at + BATCH_BYTES], at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cached(path: Path) -> float:
    """How much of a file is in the page cache, from 0 to 1."""
    size = path.stat().st_size
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    pages = -(-size // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), there) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(one & 1 for one in there) / pages


def write_past(path: Path, image: memoryview) -> None:
    """The candidate; nothing can be measured where the file system does not take direct writes."""
    done = write_file_direct(path, [(0, image)])
    if done.why_buffered:
        raise OSError(f"{done.why_buffered}; use --dir for another place")


def seconds(write: Callable[[Path, memoryview], None], path: Path, image: memoryview) -> float:
    """How long a write takes; what others have left to write is written before."""
    os.sync()
    started = time.perf_counter()
    write(path, image)
    return time.perf_counter() - started


def main() -> int:
    """Measure; 1 only when that was not possible."""
    parser = options(__doc__)
    parser.add_argument("--mib", type=int, help="size of the part (1024; with --quick 256)")
    parser.add_argument("--pairs", type=int, help="pairs of writes (9; with --quick 5)")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the files are written")
    arguments = parser.parse_args()
    size = (arguments.mib or (256 if arguments.quick else 1024)) << 20
    # Not a multiple of a block: the rest goes through memory of its own.
    size += HEADER_BYTES
    report = Report("direct writes")
    report.header()
    slot = mmap.mmap(-1, size)
    block = os.urandom(1 << 20)
    for at in range(0, size, len(block)):
        slot[at : min(size, at + len(block))] = block[: min(len(block), size - at)]
    image = memoryview(slot)
    ratios, left = list[float](), list[tuple[float, float]]()
    try:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            for pair in range(arguments.pairs or (5 if arguments.quick else 9)):
                usual, past = Path(folder, f"usual-{pair}"), Path(folder, f"direct-{pair}")
                times = {}
                for path in (usual, past) if pair % 2 else (past, usual):
                    write = write_buffered if path is usual else write_past
                    times[path] = seconds(write, path, image)
                ratios.append(times[usual] / times[past])
                left.append((cached(usual), cached(past)))
                report.row(
                    pair=pair,
                    buffered_GBps=size / times[usual] / 1e9,
                    direct_GBps=size / times[past] / 1e9,
                    ratio=ratios[-1],
                    buffered_cached=left[-1][0],
                    direct_cached=left[-1][1],
                )
                usual.unlink()
                past.unlink()
    except OSError as error:
        return fail(str(error))
    median = statistics.median(ratios)
    report.claim("direct to buffered write and sync", spread(ratios), f"at least {TARGET}", median >= TARGET)
    share = max(direct for _, direct in left)
    report.claim("of the file in the page cache after a direct write", share, "at most 0.01", share <= 0.01)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
