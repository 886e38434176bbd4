"""Saving and restoring against the limits of memory and disk, and against torch's own distributed checkpoint.

One process, one thread, and its node's checkpoint worker. The limit of a copy into memory is one memcpy of as
many bytes into a buffer that was used before; that of what the worker does from then on, until the save is
hashed, synced and committed, is plain writes and one fsync.

Both sides of a pair move the same bytes from and to the same memory, in files of the same count and size;
pairs alternate, with a sync before each side. Restores begin with cold caches on both sides (the kernel is
told to drop the files' pages). A save that is written at once starts the disk earlier than its limit, while
it still hashes, and may come out ahead. Figures of a small or shared machine say little about a parallel file
system; the ratios do.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness

PERSIST, RESTORE, SMALL, DECIDE_S = 0.85, 0.85, 2.0, 2.0
COPY = {32 << 20: 0.8, 1 << 20: 0.8, 128 << 10: 0.6}
"""Of memcpy, by the size of the tensors."""
COPIES = "copy into memory against memcpy, tensors of {} KiB"
CALLS = "save() and fence() against memcpy, tensors of {} KiB"
BESIDE = "hash, write and commit by the worker against raw write and fsync, tensors of {} KiB"
WORKER = "worker: a save of many small tensors over one of few large"
BLOCK = 16 << 20


class Bench:
    """A directory, a state of `count` tensors of `size_bytes` each, and the ways to save and load it."""

    def __init__(self, root: Path, count: int, size_bytes: int) -> None:
        import torch

        from hpcrun.runtime.connect import connect_ranks

        self.root, self.total = root, count * size_bytes
        flat: Any = torch.empty(self.total // 4).uniform_()
        self.state: dict[str, torch.Tensor] = {
            f"model.{n}": part for n, part in enumerate(flat.split(size_bytes // 4))
        }
        self.blank = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.blob = memoryview(flat.numpy()).cast("B")
        self.into = bytearray(self.total)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.state.items()}
        self.control = connect_ranks(None)
        self.step = 0
        self.saver = self.checkpointer()

    def checkpointer(self) -> Any:
        """A new one, as a new attempt would have; saves of any step are kept."""
        from hpcrun.runtime.direct_checkpoint import DirectCheckpointer

        return DirectCheckpointer(self.root / "ours", self.control, attempt=1, keep=1)

    def write_raw(self) -> float:
        """The limit: large writes of one blob, and an fsync."""
        path = self.root / "raw"
        path.unlink(missing_ok=True)
        return timed(lambda: write_blob(path, self.blob))

    def save_ours(self) -> float:
        """A whole save with hashes and commit; what was there before is removed first, as by the others."""
        self.step += 1
        shutil.rmtree(self.root / "ours", ignore_errors=True)
        return timed(lambda: self.saver.save(self.step, 0, self.state))

    def save_torch(self) -> float:
        """A whole save of torch's, synced as ours is."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self.root / "torch"
        shutil.rmtree(path, ignore_errors=True)
        writer = FileSystemWriter(path, sync_files=True)
        return timed(lambda: save(dict(self.state), storage_writer=writer, no_dist=True))

    def read_raw(self) -> float:
        """The limit: large reads of the blob into warm memory."""
        path = self.root / "raw"
        drop([path])
        return timed(lambda: read_blob(path, self.into))

    def restore_ours(self) -> float:
        """A whole restore into the state's own memory: decision, manifest, every hash."""
        drop((self.root / "ours").rglob("*"))
        reader = self.checkpointer()
        return timed(lambda: reader.restore(self.blank, self.shapes))

    def restore_torch(self) -> float:
        """Torch's load of the same, which checks nothing."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        path = self.root / "torch"
        drop(path.rglob("*"))
        return timed(lambda: load(dict(self.blank), storage_reader=FileSystemReader(path), no_dist=True))

    def check(self) -> None:
        """What was measured did what it should."""
        import torch

        for name, tensor in self.state.items():
            if not torch.equal(tensor, self.blank[name]):
                raise RuntimeError(f"{name} came back wrong")


class Behind:
    """Saves through the memory of this node and its checkpoint worker, as anybody's trainer makes them."""

    def __init__(self, directory: Path, **options: Any) -> None:
        from hpcrun.runtime.checkpointer import Checkpointer

        self.copy_s = 0.0
        """Of the last save, the copying into memory alone."""
        self._stored = set[int]()
        self.saves = Checkpointer(directory, on_record=self._hear, keep=1, **options)

    def is_stored(self, step: int) -> bool:
        """Whether a save is in the directory, synced and committed."""
        self.saves.fence()
        return step in self._stored

    def wait(self, step: int) -> None:
        """Until it is; between looks the core is free."""
        while not self.is_stored(step):
            time.sleep(0.001)

    def _hear(self, record: dict[str, Any]) -> None:
        if record["kind"] == "save" and record["copy_s"] is not None:
            self.copy_s = record["copy_s"]
        elif record["kind"] == "stored" and record["level"] == "durable":
            self._stored.add(record["step"])
        elif record["kind"] != "stored":
            raise RuntimeError(f"a save went wrong: {record}")


def timed(action: Callable[[], Any]) -> float:
    """Seconds, with nothing left to write from before."""
    os.sync()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def write_blob(path: Path, blob: memoryview) -> None:
    """One file, 16 MiB at a time, synced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for at in range(0, len(blob), BLOCK):
        os.pwrite(descriptor, blob[at : at + BLOCK], at)
    os.fsync(descriptor)
    os.close(descriptor)


def read_blob(path: Path, into: bytearray) -> None:
    """One file, 16 MiB at a time, into memory that is there already."""
    view = memoryview(into)
    descriptor = os.open(path, os.O_RDONLY)
    for at in range(0, len(view), BLOCK):
        os.preadv(descriptor, [view[at : at + BLOCK]], at)
    os.close(descriptor)


def drop(paths: Iterable[Path]) -> None:
    """Forget the cached pages of files."""
    for path in paths:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def pairs(
    limit: Callable[[], float], candidate: Callable[[], float], count: int
) -> list[tuple[float, float]]:
    """(limit, candidate) in seconds; which comes first changes from pair to pair."""
    found = []
    for number in range(count):
        if number % 2:
            second = candidate()
            found.append((limit(), second))
        else:
            found.append((limit(), candidate()))
    return found


def ratios(found: list[tuple[float, float]]) -> list[float]:
    """How much of the limit each candidate reached."""
    return [limit / candidate for limit, candidate in found]


def measure(report: harness.Report, root: Path, total: int, count: int) -> None:
    """All figures of saving and restoring."""
    large = Bench(root / "large", 16, total // 16)
    small = Bench(root / "small", total // (128 << 10), 128 << 10)
    for bench in (large, small):
        bench.root.mkdir()
        for warm in (bench.write_raw, bench.save_ours, bench.save_torch, bench.read_raw, bench.restore_ours):
            warm()
        bench.check()
    sides: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "persist against raw write and fsync": (large.write_raw, large.save_ours),
        "restore against raw read, cold": (large.read_raw, large.restore_ours),
        "save against torch's, 16 tensors": (large.save_torch, large.save_ours),
        "save against torch's, tensors of 128 KiB": (small.save_torch, small.save_ours),
        "restore against torch's, tensors of 128 KiB": (small.restore_torch, small.restore_ours),
        "save of few large over many small": (small.save_ours, large.save_ours),
        "restore of few large over many small": (small.restore_ours, large.restore_ours),
    }
    found = {}
    for name, (limit, candidate) in sides.items():
        found[name] = ratios(pairs(limit, candidate, count))
        report.row(what=name, MiB=total >> 20, ratio=harness.spread(found[name]), pairs=count)
    for name, target in (
        ("persist against raw write and fsync", PERSIST),
        ("restore against raw read, cold", RESTORE),
        ("save against torch's, 16 tensors", 1.0),
        ("save against torch's, tensors of 128 KiB", 1.0),
    ):
        median = statistics.median(found[name])
        report.claim(name, harness.spread(found[name]), f"at least {target}", median >= target)
    for name in ("save", "restore"):
        values = found[f"{name} of few large over many small"]
        claim = f"{name} of {total >> 17} tensors of 128 KiB over one of 16 large tensors"
        met = statistics.median(values) <= SMALL
        report.claim(claim, harness.spread(values), f"at most {SMALL}", met)


def through_memory(report: harness.Report, root: Path, total: int, count: int) -> None:
    """All figures of saves through memory: the copy, the calls of a trainer, and the worker's part."""
    import torch

    flat: Any = torch.empty(total // 4).uniform_()
    warm: Any = torch.zeros_like(flat)
    blob, raw = memoryview(flat.numpy()).cast("B"), root / "raw"

    def limits() -> tuple[float, float]:
        raw.unlink(missing_ok=True)
        return timed(lambda: warm.copy_(flat)), timed(lambda: write_blob(raw, blob))

    lanes = [Lane(root, flat, size) for size in COPY]
    found: dict[str, list[float]] = {}
    for number in range(-2, count):  # the first two fill both slots, and are not counted
        row, persisted = dict[str, float](), dict[int, float]()
        for lane in lanes[:: -1 if number % 2 else 1]:
            before = limits() if number % 2 else None
            copy_s, calls_s, persisted[lane.size_bytes] = lane.save()
            memcpy_s, raw_s = before or limits()
            row[COPIES.format(lane.size_bytes >> 10)] = memcpy_s / copy_s
            row[CALLS.format(lane.size_bytes >> 10)] = memcpy_s / calls_s
            row[BESIDE.format(lane.size_bytes >> 10)] = raw_s / persisted[lane.size_bytes]
        row[WORKER] = persisted[min(COPY)] / persisted[max(COPY)]
        for name, value in row.items() if number >= 0 else ():
            found.setdefault(name, []).append(value)
    for name, values in sorted(found.items()):
        report.row(what=name, MiB=total >> 20, ratio=harness.spread(values), pairs=count)
    least = {COPIES.format(size >> 10): target for size, target in COPY.items()}
    for name, target in (least | {BESIDE.format(max(COPY) >> 10): PERSIST}).items():
        met = statistics.median(found[name]) >= target
        report.claim(name, harness.spread(found[name]), f"at least {target}", met)
    met = statistics.median(found[WORKER]) <= SMALL
    report.claim(WORKER, harness.spread(found[WORKER]), f"at most {SMALL}", met)
    for lane in lanes:
        lane.behind.saves.close()


class Lane:
    """Saves of one blob, cut into tensors of one size."""

    def __init__(self, root: Path, flat: Any, size_bytes: int) -> None:
        self.size_bytes, self.step = size_bytes, 0
        self.state = {f"model.{n}": part for n, part in enumerate(flat.split(size_bytes // 4))}
        self.behind = Behind(root / f"memory-{size_bytes}", flush_duty=0)

    def save(self) -> tuple[float, float, float]:
        """Seconds of the copy, of the calls, and from then on until the save is stored."""
        self.step += 1
        saves = self.behind.saves
        self.state["model.0"][:1] += 1  # a save of the same bytes again would be warned of

        def calls() -> None:
            saves.save(self.step, self.state)
            saves.fence()

        calls_s = timed(calls)
        begin = time.perf_counter()
        self.behind.wait(self.step)
        return self.behind.copy_s, calls_s, time.perf_counter() - begin


def decide(report: harness.Report, root: Path, count: int) -> None:
    """A restart's decision over a thousand generations of 4,096 tensors in 8 files each."""
    from hpcrun.runtime.connect import connect_ranks
    from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
    from hpcrun.specs.saves import COMMIT_RECORD, render_commit_record

    control = connect_ranks(None)
    saved = eight_files(root / "decide")
    for step in range(1, 1000):
        path = saved.path.with_name(f"step-{step:08d}")
        path.mkdir()
        for file in saved.path.iterdir():
            os.link(file, path / file.name) if file.name != COMMIT_RECORD else None
        (path / COMMIT_RECORD).write_text(render_commit_record(replace(saved, step=step)))
    seconds = []
    for _ in range(count):
        drop((root / "decide").rglob("*.json"))
        reader = DirectCheckpointer(root / "decide", control, attempt=2, keep=1)
        seconds.append(timed(reader.choose))
    report.row(what="decision over 1,000 generations, s", MiB=0, ratio=harness.spread(seconds), pairs=count)
    met = statistics.median(seconds) <= DECIDE_S
    claim = "listing 1,000 generations of 4,096 tensors on 8 nodes and deciding, in s"
    report.claim(claim, harness.spread(seconds), f"at most {DECIDE_S}", met)


def eight_files(checkpoints: Path) -> Any:
    """A generation of 4,096 small tensors, each in eight pieces of eight ranks on eight nodes."""
    from hpcrun.checkpoint.commit import begin_generation, commit_generation
    from hpcrun.checkpoint.format import ChunkSpec, collect_tensors, compute_structure_digest, render_tensors
    from hpcrun.checkpoint.generation import read_part_tail
    from hpcrun.checkpoint.part_writer import write_part

    draft, parts = begin_generation(checkpoints, 0, 1), []
    for rank in range(8):
        pieces = [ChunkSpec(f"model.{n}", "float32", (8, 4), (rank, 0), (1, 4)) for n in range(4096)]
        contents = (bytes(16) for _ in pieces)
        parts.append(write_part(draft.file(rank), draft.generation, rank, pieces, contents, file=rank))
    tails = (read_part_tail(draft.file(part.file), part, n, draft.generation) for n, part in enumerate(parts))
    tensors = collect_tensors(tails)
    digest = compute_structure_digest(tensors)
    return commit_generation(
        draft, parts, render_tensors(tensors), digest, step=0, position=0, attempt=0, world_size=8
    )


def arguments_of(parser: ArgumentParser) -> Any:
    """The options of this script."""
    parser.add_argument("--dir", type=Path, help="where to write; default the temporary directory")
    parser.add_argument("--mib", type=int, help="size of the state; default 512, with --quick 256")
    return parser.parse_args()


def main() -> int:
    """Print the table and one line a claim."""
    arguments = arguments_of(harness.options(__doc__))
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's save in one process warns of just that
    count = 5 if arguments.quick else 9
    total = (arguments.mib or (256 if arguments.quick else 512)) << 20
    report = harness.Report("checkpoint")
    report.header()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        root = Path(name)
        free = shutil.disk_usage(root).free
        if free < 8 * total:
            return harness.fail(f"{root} has {free >> 20} MiB free, {8 * total >> 20} are needed; use --dir")
        through_memory(report, root, total, count)
        measure(report, root, total, count)
        decide(report, root, count)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
