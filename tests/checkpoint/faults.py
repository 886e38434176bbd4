"""Faults of files and writers, each with what a restore makes of it: the real restore, the real files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.commit import (
    apply_retention,
    begin_generation,
    commit_generation,
    delete_generation,
    discard_draft,
    find_garbage,
    quarantine_generation,
)
from hpcrun.checkpoint.format import MANIFEST_NAME, DamagedError
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.part_writer import write_part
from hpcrun.checkpoint.restore.repair import repair_generation
from hpcrun.checkpoint.restore.sources import DirectoryCopy
from hpcrun.errors import HpcrunError
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, read_saved_checkpoints
from tests.checkpoint import tracing
from tests.checkpoint.generations import SHAPES, content_of, pieces_of, save
from tests.checkpoint.injuries import INJURIES, flip


class SkippedError(Exception):
    """A case that this machine cannot play, and why."""


@dataclass
class Told:
    """What came of a case."""

    happened: str
    faults: int = 0
    recovered: dict[str, int] = field(default_factory=dict)
    """How often what was loaded, and from which tier."""
    silent: int = 0
    """How often something was loaded that is not what was saved."""

    def loaded(self, what: str) -> None:
        """Count a restore."""
        self.recovered[what] = self.recovered.get(what, 0) + 1


Case = Callable[[Path, bool], Told]
"""Plays a fault below a directory, fewer of its kind where it should be quick."""


def restore(root: Path, told: Told) -> int | None:
    """Restore as training does; the step, and None where nothing was whole. Counts what is wrong in it."""
    import torch

    from hpcrun.runtime.connect import connect_ranks
    from hpcrun.runtime.direct_checkpoint import DirectCheckpointer

    state = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
    try:
        found = DirectCheckpointer(root, connect_ranks(None), attempt=9, keep=9).restore(state, dict(SHAPES))
    except HpcrunError as error:
        told.happened = told.happened or str(error)
        told.loaded("nothing, and says so")
        return None
    if found is None:
        told.loaded("nothing, and says so")
        return None
    if found.passed_over:
        told.happened = told.happened or found.passed_over[0].replace(f"{root}/", "")
    for name, tensor in state.items():
        told.silent += tensor.numpy().tobytes() != whole_of(name, found.step)
    told.loaded(f"step {found.step} from durable")
    return found.step


def whole_of(name: str, step: int, ranks: int = 2) -> bytes:
    """What `save` has put into a tensor."""
    pieces = [piece for rank in range(ranks) for piece in pieces_of(rank, ranks) if piece.tensor == name]
    return b"".join(content_of(piece, step) for piece in pieces)


def _two(root: Path) -> tuple[SavedCheckpoint, SavedCheckpoint]:
    return save(root, 2, files=2), save(root, 4, files=2)


def injured(name: str) -> Case:
    """One of INJURIES, to the newer of two saves."""

    def play(root: Path, _quick: bool) -> Told:
        older, newer = _two(root)
        told = Told("", 1)
        INJURIES[name](newer.path, older.path)
        restore(root, told)
        return told

    return play


def repaired(root: Path, _quick: bool) -> Told:
    """Every injury, repaired from a copy, and restored."""
    told = Told("each of the injuries above")
    for number, injury in enumerate(INJURIES.values()):
        place = root / str(number)
        older, newer = _two(place)
        shutil.copytree(newer.path, root / f"{number}-copy")
        injury(newer.path, older.path)
        told.faults += 1
        repair_generation(newer.path, [DirectoryCopy(root / f"{number}-copy")])
        restore(place, told)
    return told


def flipped(root: Path, quick: bool) -> Told:
    """One byte anywhere; read chunk by chunk, as every reader does."""
    saved = save(root, 4)
    chance, told = random.Random(1), Told("header or chunk does not match its hash")
    for name in (COMMIT_RECORD, MANIFEST_NAME, "data-00000.bin"):
        path = saved.path / name
        size = path.stat().st_size
        for at in sorted(chance.sample(range(size), min(size, 150 if quick else 1500))):
            flip(path, at)
            told.faults += 1
            told.loaded(_read_all(root, told))
            flip(path, at)
    return told


def _read_all(root: Path, told: Told) -> str:
    saves, _ = read_saved_checkpoints(root)
    try:
        for saved in saves:
            with GenerationReader(saved) as generation:
                for tensor in generation.manifest.tensors.values():
                    for piece, place in tensor.chunks:
                        into = bytearray(piece.size_bytes)
                        generation.read(piece, place, memoryview(into))
                        told.silent += bytes(into) != content_of(piece, saved.step)
    except HpcrunError:
        saves = []
    return "refused" if not saves else "whole (nothing that counts was hit)"


def cut_short(root: Path, quick: bool) -> Told:
    """Every file at many lengths."""
    saved = save(root, 4, files=2)
    told = Told("the size is not that of the record")
    for name in (COMMIT_RECORD, MANIFEST_NAME, "data-00000.bin", "data-00001.bin"):
        path = saved.path / name
        whole = path.read_bytes()
        for size in range(0, len(whole), max(1, len(whole) // (20 if quick else 200))):
            path.write_bytes(whole[:size])
            told.faults += 1
            told.loaded(_read_all(root, told))
            path.write_bytes(whole)
    return told


def _save_and_retire(root: Path) -> None:
    """What rank 0 does: all of it or nothing."""
    draft = begin_generation(root, 6, 1)
    try:
        save_into(root, draft.file(0).parent)
    except (OSError, HpcrunError):
        discard_draft(draft)
        raise
    apply_retention(root, 2)


def save_into(root: Path, aside: Path) -> None:
    """A save of step 6, in the place that `begin` has made."""
    shutil.rmtree(aside)
    save(root, 6, files=2)


def struck(how: tracing.How, error: int = errno.ENOSPC) -> Case:
    """Every system call of a save in turn: killed there, or refused by the system."""

    def play(root: Path, quick: bool) -> Told:
        if reason := tracing.why_not():
            raise SkippedError(reason)
        word = "SIGKILL" if how != "failing" else errno.errorcode[error]
        base = root / "base"
        _two(base)
        shutil.copytree(base, root / "undisturbed")
        calls = tracing.run(lambda: _save_and_retire(root / "undisturbed")).calls
        told = Told(f"{word} at each of {len(calls)} calls: {', '.join(sorted(set(calls)))}")
        wanted = [at for at, call in enumerate(calls, start=1) if how != "halfway" or tracing.is_write(call)]
        for at in wanted[:: 3 if quick else 1]:
            place = root / str(at)
            shutil.copytree(base, place)
            tracing.run(lambda place=place: _save_and_retire(place), at, how, error)  # type: ignore[misc]
            told.faults += 1
            restore(place, told)
            save(place, 8, files=2)  # and the next save works
            shutil.rmtree(place)
        return told

    return play


@contextmanager
def _mounted(place: Path, *options: str) -> Iterator[Path]:
    if os.getuid() != 0:
        raise SkippedError("mounting a small file system needs root; run as root")
    place.mkdir(parents=True)
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SkippedError(f"no such file system here: {done.stderr.strip().splitlines()[0]}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def full_disk(root: Path, quick: bool) -> Told:
    """A file system with so many pages left, from none up to enough: full at every stage of a save."""
    told = Told("ENOSPC by a real full file system, at every page of a save")
    with _mounted(root / "small", "-t", "tmpfs", "-o", "size=256k", "none") as small:
        run = small / "run"
        _two(run)
        for pages in range(0, 14, 3 if quick else 1):
            free = os.statvfs(small).f_bavail
            ballast = small / "ballast"
            ballast.write_bytes(bytes(4096 * max(0, free - pages)))
            _try_to_save(run, told)
            ballast.unlink()
    return told


def _try_to_save(run: Path, told: Told) -> None:
    told.faults += 1
    try:
        save(run, 6, files=2)
    except OSError:
        for leftover in run.glob(".step-*"):
            delete_generation(leftover)
    step = restore(run, told)
    if step == 6:
        delete_generation(run / "step-00000006")


def quota(root: Path, quick: bool) -> Told:
    """A quota group of btrfs with ever more room: used up at every stage of a save."""
    maker, tool = shutil.which("mkfs.btrfs"), shutil.which("btrfs")
    if maker is None or tool is None:
        raise SkippedError("a real quota needs mkfs.btrfs and btrfs; apt-get install btrfs-progs")
    image = root / "image"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    _call(maker, "-q", str(image))
    told = Told("the quota of this file system did not hold")
    with _mounted(root / "disk", "-o", "loop", str(image)) as disk:
        _call(tool, "quota", "enable", str(disk))
        for size in range(16, 512, 96 if quick else 16):
            run = disk / str(size)
            _call(tool, "subvolume", "create", str(run))
            _two(run)
            os.sync()
            _call(tool, "qgroup", "limit", f"{size}k", str(run))
            told.faults += 1
            try:
                save(run, 6, files=2)
            except OSError as error:
                if error.errno == errno.EDQUOT:
                    told.happened = "EDQUOT by a real quota, with ever more room"
            restore(run, told)
    return told


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SkippedError(f"{command[0]}: {(done.stderr or done.stdout).strip().splitlines()[0]}")


def slow_writer(root: Path, quick: bool) -> Told:
    """Restore and clean up while a save takes its time."""
    _two(root)
    told = Told("a save that writes a piece every 20 ms, beside restores and gc")
    child = os.fork()
    if child == 0:
        true = os.pwritev

        def slow(descriptor: int, buffers: Any, position: int, flags: int = 0) -> int:
            time.sleep(0.02)
            return true(descriptor, [bytes(buffers[0])[:64]], position, flags)

        os.pwritev = slow
        save(root, 6, files=2)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        told.faults += 1
        restore(root, told)
        for one in find_garbage(root, 2, in_flight=True, damaged=False)[0]:
            delete_generation(one.path)
        time.sleep(0.3 if quick else 0.05)
    if restore(root, told) != 6:
        told.silent += 1
    return told


def stopped_writer(root: Path, _quick: bool) -> Told:
    """A writer that is lost in the middle: stopped, then gone."""
    _two(root)
    told = Told("stopped in the middle of a save, then killed; its files go with the next save", 1)
    child = os.fork()
    if child == 0:
        draft = begin_generation(root, 6, 1)
        pieces = pieces_of(0, 2)
        write_part(draft.file(0), draft.generation, 0, pieces, [content_of(p, 6) for p in pieces])
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    restore(root, told)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    restore(root, told)
    save(root, 8, files=2)
    restore(root, told)
    if list(root.glob(".step-*")):
        told.silent += 1
    return told


def missing_rank(root: Path, _quick: bool) -> Told:
    """A rank was killed before it wrote its part; nobody commits without it."""
    _two(root)
    told = Told("", 1)
    draft = begin_generation(root, 6, 1)
    pieces = pieces_of(0, 2)
    part = write_part(draft.file(0), draft.generation, 0, pieces, [content_of(p, 6) for p in pieces])
    other = type(part)(1, 0, 4096, 64, 64, "0" * 16)
    try:
        commit_generation(draft, [part, other], "[]", "", step=6, position=48, world_size=2, attempt=1)
        told.silent += 1
    except DamagedError as error:
        told.happened = str(error).replace(f"{root}/", "")
        discard_draft(draft)
    restore(root, told)
    return told


def concurrent_gc(root: Path, quick: bool) -> Told:
    """One process saves and retires as fast as it can, another restores."""
    save(root, 2, files=2)
    told = Told("saves are deleted while they are read")
    child = os.fork()
    if child == 0:
        for step in range(4, 60 if quick else 200, 2):
            save(root, step, files=2)
            apply_retention(root, 2)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        told.faults += 1
        before = dict(told.recovered)
        restore(root, told)
        changed = [what for what in told.recovered if told.recovered[what] != before.get(what, 0)]
        told.recovered = before
        told.loaded("a whole save from durable" if changed[0].startswith("step") else changed[0])
    return told


def read_only(root: Path, _quick: bool) -> Told:
    """The file system was mounted read-only under the run."""
    with _mounted(root / "disk", "-t", "tmpfs", "-o", "size=1m", "none") as disk:
        _two(disk / "run")
        command = ["mount", "-o", "remount,ro", str(disk)]
        subprocess.run(command, check=True, capture_output=True)
        told = Told("", 1)
        try:
            save(disk / "run", 6, files=2)
            told.silent += 1
        except OSError as error:
            told.happened = os.strerror(error.errno or 0)
        restore(disk / "run", told)
    return told


def stale_files(root: Path, _quick: bool) -> Told:
    """What earlier deaths have left: half a save, half a deletion, a damaged save set aside."""
    _two(root)
    told = Told("half a save, half a deletion and a set-aside save lie beside", 3)
    shutil.copytree(root / "step-00000004", root / ".step-00000009.1")
    (root / ".step-00000001.deleted").mkdir()
    quarantine_generation(save(root, 6, files=2).path)
    restore(root, told)
    save(root, 8, files=2)
    restore(root, told)
    return told


CASES: dict[str, Case] = {
    **{name: injured(name) for name in INJURIES},
    "all of these, repaired": repaired,
    "one byte flipped": flipped,
    "cut short": cut_short,
    "killed before a call": struck("before"),
    "killed in a write": struck("halfway"),
    "ENOSPC at a call": struck("failing", errno.ENOSPC),
    "EDQUOT at a call": struck("failing", errno.EDQUOT),
    "EIO at a call": struck("failing", errno.EIO),
    "disk really full": full_disk,
    "quota really used up": quota,
    "slow writer": slow_writer,
    "writer stopped and lost": stopped_writer,
    "rank killed before its part": missing_rank,
    "concurrent gc": concurrent_gc,
    "read-only directory": read_only,
    "stale temporary files": stale_files,
}
