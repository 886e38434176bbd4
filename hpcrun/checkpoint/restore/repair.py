"""Making a damaged generation whole again from whatever copies there are, chunk by chunk, each by its hash.

The repaired files are written beside the damaged ones, proved, and get the name of the step by one rename.
Where a chunk is nowhere whole, nothing is changed.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from hpcrun.checkpoint.commit import DAMAGED_PREFIX, quarantine_generation
from hpcrun.checkpoint.format import (
    CHUNK_FRAME,
    END_FRAME,
    HEADER_BYTES,
    MANIFEST_NAME,
    PART_FRAME,
    TAIL_FRAME,
    ChunkLocation,
    ChunkSpec,
    DamagedError,
    Part,
    align_size,
    compute_structure_digest,
    data_file_name,
    pack_header,
    parse_manifest,
    parse_tail,
    plan_part_layout,
    render_tail,
)
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.part_writer import write_synced_file
from hpcrun.checkpoint.restore.sources import (
    DirectoryCopy,
    GenerationCopy,
    identify_generation,
    read_chunk_digests,
    read_verified_tail,
    rebuild_manifest,
)
from hpcrun.checkpoint.tier import CheckpointId
from hpcrun.specs.records import sync_directory
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import (
    COMMIT_RECORD,
    SavedCheckpoint,
    read_saved_checkpoints,
    render_commit_record,
    step_of_directory,
)

_Chunks = list[tuple[ChunkSpec, ChunkLocation]]


@dataclass
class RepairReport:
    """What came of a damaged generation."""

    path: Path
    """Where the damaged files lie, or lay."""
    generation: str | None = None
    step: int = -1
    problem: str | None = None
    """Why it cannot be repaired; None where it was, or could be."""
    mended: list[tuple[str, str]] = field(default_factory=list)
    """What was damaged, and where it was taken from."""
    missing: list[str] = field(default_factory=list)
    """What no copy has whole."""
    taken: Counter[str] = field(default_factory=Counter)
    """Bytes from each copy."""
    repaired: Path | None = None
    """The committed generation; None where nothing was changed."""


def find_repair_candidates(checkpoints: Path, step: int | None = None) -> list[Path]:
    """What may need repair: every save, and what was set aside and has no other save in its place."""
    saves, unreadable = read_saved_checkpoints(checkpoints)
    paths = [*(saved.path for saved in saves), *(save.path for save in unreadable)]
    taken = {step_of_directory(path) for path in paths}
    aside = sorted(
        checkpoints.glob(f"{DAMAGED_PREFIX}*"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    paths += [path for path in aside if _parse_directory_step(path) not in taken]
    return [path for path in paths if step in (None, _parse_directory_step(path))]


def repair_generation(
    path: Path,
    others: Sequence[GenerationCopy] = (),
    stamps: Sequence[CheckpointId] = (),
    *,
    dry_run: bool = False,
    progress: Callable[[int], None] = lambda _size: None,
) -> RepairReport | None:
    """Repair one generation from other copies; None where there is nothing wrong with it.

    Copies of other generations are left out. `stamps` tell of generations whose commit
    record is lost. OSError where the repaired files cannot be written.
    """
    step = _parse_directory_step(path)
    report = RepairReport(path, identify_generation(path, step), step)
    if report.generation is None:
        report.problem = "no file says which generation it is of"
        return report
    own = DirectoryCopy(path, "its own files")
    copies: list[GenerationCopy] = [own, *_sibling_copies(path, report.generation)]
    copies += [copy for copy in others if copy.generation in (None, report.generation)]
    metadata = _RecoveredMetadata(report, copies, stamps)
    if metadata.saved is None or metadata.manifest is None:
        return report
    work = _GenerationRepair(report, metadata.saved, metadata.manifest, copies, progress)
    whole = work.survey() and not report.mended and path.name.startswith("step-")
    if whole:
        return None
    if report.missing:
        count = len(report.missing)
        report.problem = f"{count} piece{'s are' if count > 1 else ' is'} whole in no copy"
    elif path.name != (name := f"step-{step:08d}") and (path.parent / name).exists():
        report.problem = f"{name} is there too, and it is repaired first"
    elif not dry_run:
        report.repaired = work.commit()
    return report


def _parse_directory_step(path: Path) -> int:
    """Which step a directory was named after, also when it was set aside."""
    return step_of_directory(Path(path.name.removeprefix(DAMAGED_PREFIX).partition(".")[0]))


def _sibling_copies(path: Path, generation: str) -> list[GenerationCopy]:
    """Other directories of the same generation, in the same place."""
    around = [*path.parent.glob("step-*"), *path.parent.glob(f"{DAMAGED_PREFIX}*")]
    return [
        DirectoryCopy(entry, entry.name)
        for entry in sorted(around)
        if entry != path and entry.is_dir() and identify_generation(entry) == generation
    ]


class _RecoveredMetadata:
    """Record and manifest of a generation, from wherever they can be had."""

    def __init__(
        self, report: RepairReport, copies: list[GenerationCopy], stamps: Sequence[CheckpointId]
    ) -> None:
        assert report.generation is not None
        self._told, self._copies = report, copies
        self.manifest: bytes | None = None
        self.saved = self._record()
        stamp = next((stamp for stamp in stamps if stamp.generation == report.generation), None)
        if self.saved is None and stamp is None:
            report.problem = f"{COMMIT_RECORD} is damaged, and no other copy has it"
            return
        digest = self.saved.manifest_hash if self.saved else None
        self.manifest = self._manifest(bytes.fromhex(report.generation), digest)
        if self.manifest is None:
            report.problem = (
                f"{MANIFEST_NAME} is damaged, in no other copy, and cannot be made again from the parts"
            )
        elif self.saved is None and stamp is not None:
            self.saved = _rebuild_record(stamp, report.path, self.manifest)
            report.mended.append((COMMIT_RECORD, "made again from what a node keeps"))

    def _record(self) -> SavedCheckpoint | None:
        for copy in self._copies:
            saved, expected = copy.record(), (self._told.step, self._told.generation)
            if saved is not None and (saved.step, saved.generation) == expected:
                if copy is not self._copies[0]:
                    self._told.mended.append((COMMIT_RECORD, copy.name))
                return saved
        return None

    def _manifest(self, generation: bytes, digest: str | None) -> bytes | None:
        for copy in self._copies:
            data = copy.manifest()
            if data is None or not _is_manifest(data, generation, digest):
                continue
            if copy is not self._copies[0]:
                self._told.mended.append((MANIFEST_NAME, copy.name))
            return data
        data = rebuild_manifest(generation, self._copies, digest)
        if data is not None:
            self._told.mended.append((MANIFEST_NAME, "made again from the parts"))
        return data


def _is_manifest(data: bytes, generation: bytes, digest: str | None) -> bool:
    if digest is not None:
        return xxh3_64_hexdigest(data) == digest
    try:
        return parse_manifest(data).generation == generation
    except DamagedError:
        return False


def _rebuild_record(stamp: CheckpointId, path: Path, data: bytes) -> SavedCheckpoint:
    """A commit record made again; when it was written is not known any more."""
    manifest, sizes = parse_manifest(data), dict[int, int]()
    for part in manifest.parts:
        sizes[part.file] = max(sizes.get(part.file, 0), part.start + part.size_bytes)
    return SavedCheckpoint(
        path,
        stamp.step,
        stamp.position,
        stamp.world_size,
        stamp.attempt,
        generation=stamp.generation,
        structure=compute_structure_digest(manifest.tensors),
        run_id=RunDir(path.parent.parent).run_id,
        descent=stamp.descent,
        manifest_bytes=len(data),
        manifest_hash=xxh3_64_hexdigest(data),
        file_bytes=tuple(sizes[number] for number in range(len(sizes))),
    )


@dataclass
class _PartRepairPlan:
    """How one part can be made whole."""

    number: int
    part: Part
    tail: bytes
    digests: dict[ChunkLocation, int]
    chunks: _Chunks
    source: dict[ChunkLocation, GenerationCopy]


class _GenerationRepair:
    """The repair of one generation of which record and manifest are known."""

    def __init__(
        self,
        report: RepairReport,
        saved: SavedCheckpoint,
        manifest: bytes,
        copies: list[GenerationCopy],
        progress: Callable[[int], None],
    ) -> None:
        self._told, self._saved, self._copies, self._progress = report, saved, copies, progress
        self._data, self._manifest = manifest, parse_manifest(manifest)
        self._plans: dict[int, _PartRepairPlan] = {}
        self._touched: set[int] = set()
        """Files that cannot stay as they are."""

    def survey(self) -> bool:
        """Look for every chunk, first in its own place; True where each was found somewhere."""
        self._check_sizes()
        chunks: list[_Chunks] = [[] for _ in self._manifest.parts]
        for tensor in self._manifest.tensors.values():
            for piece, place in tensor.chunks:
                chunks[place.part].append((piece, place))
        for number, own in enumerate(chunks):
            self._survey_part(number, sorted(own, key=lambda item: item[1]))
        return not self._told.missing

    def _check_sizes(self) -> None:
        for file, size in enumerate(self._saved.file_bytes):
            path = self._told.path / data_file_name(file)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                self._touched.add(file)
                self._told.mended.append((data_file_name(file), "written again in its right size"))

    def _survey_part(self, number: int, chunks: _Chunks) -> None:
        part = self._manifest.parts[number]
        tail = self._tail(number, part, chunks)
        if tail is None:
            self._told.missing.append(f"the list of chunks of part {number} ({data_file_name(part.file)})")
            return
        digests = {place: digest for _, place, digest in parse_tail(tail, number)}
        plan = self._plans[number] = _PartRepairPlan(number, part, tail, digests, chunks, {})
        if not self._frame_is_whole(plan):
            self._touched.add(part.file)
            self._told.mended.append((f"headers of part {number}", "made again"))
        for piece, place in chunks:
            source = self._chunk(plan, piece, place)
            self._progress(piece.size_bytes)
            if source is None:
                self._told.missing.append(f"{piece} (part {number}, {data_file_name(part.file)})")
                continue
            plan.source[place] = source
            self._told.taken[source.name] += piece.size_bytes
            if source is not self._copies[0]:
                self._touched.add(part.file)
                self._told.mended.append((str(piece), source.name))

    def _tail(self, number: int, part: Part, chunks: _Chunks) -> bytes | None:
        for copy in self._copies:
            if (tail := read_verified_tail(copy, number, part)) is not None:
                if copy is not self._copies[0]:
                    self._touched.add(part.file)
                    self._told.mended.append((f"tail of part {number}", copy.name))
                return tail
        digests: dict[ChunkLocation, int] = {}
        for copy in reversed(self._copies):
            digests |= read_chunk_digests(copy, self._manifest.generation, number, part, chunks)
        if len(digests) == len(chunks):
            listed = plan_part_layout(number, [piece for piece, _ in chunks]).listed
            tail = render_tail(number, listed, [digests[place] for _, place in chunks])
            if xxh3_64_hexdigest(tail) == part.tail_hash:
                self._touched.add(part.file)
                self._told.mended.append((f"tail of part {number}", "made again from its chunks' headers"))
                return tail
        return None

    def _frame_is_whole(self, plan: _PartRepairPlan) -> bool:
        """Whether every header in the part's own file is the right one."""
        own, header = self._copies[0], memoryview(bytearray(HEADER_BYTES))
        return all(
            own.read(plan.number, plan.part, at, header) and bytes(header) == expected
            for at, expected in self._headers(plan)
        )

    def _headers(self, plan: _PartRepairPlan) -> Iterator[tuple[int, bytes]]:
        number, part, owner = plan.number, plan.part, self._manifest.generation
        yield 0, pack_header(PART_FRAME, ChunkLocation(number, 0), owner, part.size_bytes, 0)
        for piece, place in plan.chunks:
            yield place.at, pack_header(CHUNK_FRAME, place, owner, piece.size_bytes, plan.digests[place])
        at = ChunkLocation(number, part.tail_at)
        yield part.tail_at, pack_header(TAIL_FRAME, at, owner, part.tail_bytes, int(part.tail_hash, 16))
        end = part.size_bytes - HEADER_BYTES
        yield end, pack_header(END_FRAME, ChunkLocation(number, end), owner, part.tail_at, 0)

    def _chunk(self, plan: _PartRepairPlan, piece: ChunkSpec, place: ChunkLocation) -> GenerationCopy | None:
        """The first copy that has the chunk whole."""
        into = memoryview(bytearray(piece.size_bytes))
        for copy in self._copies:
            if self._read(plan, copy, place, into):
                return copy
        return None

    def _read(
        self, plan: _PartRepairPlan, copy: GenerationCopy, place: ChunkLocation, into: memoryview
    ) -> bool:
        return (
            place in plan.digests
            and copy.read(plan.number, plan.part, place.at + HEADER_BYTES, into)
            and xxh3_64_intdigest(into) == plan.digests[place]
        )

    def commit(self) -> Path:
        """Write what is damaged beside it, prove all of it, and let it take its step's name."""
        root, name = self._told.path.parent, f"step-{self._saved.step:08d}"
        aside, final = root / f".{name}.repair", root / name
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        try:
            for file in range(len(self._saved.file_bytes)):
                self._place_file(aside, file)
            write_synced_file(aside / MANIFEST_NAME, self._data)
            write_synced_file(aside / COMMIT_RECORD, render_commit_record(self._saved).encode())
            sync_directory(aside)
            self._prove(aside)
            if final.exists():
                quarantine_generation(final)
            aside.rename(final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_directory(root)
        return final

    def _place_file(self, aside: Path, file: int) -> None:
        """A file that is whole is linked: nobody ever writes to it again."""
        own, target = self._told.path / data_file_name(file), aside / data_file_name(file)
        if file not in self._touched:
            try:
                os.link(own, target)
            except OSError:  # a file system without links
                self._touched.add(file)
            else:
                return
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, self._saved.file_bytes[file])
            for plan in self._plans.values():
                if plan.part.file == file:
                    self._write_part(descriptor, plan)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _write_part(self, descriptor: int, plan: _PartRepairPlan) -> None:
        for at, header in self._headers(plan):
            _write_at(descriptor, plan.part.start + at, memoryview(header))
        at = plan.part.start + plan.part.tail_at + HEADER_BYTES
        _write_at(descriptor, at, memoryview(plan.tail).cast("B"))
        zeros = bytes(align_size(len(plan.tail)) - len(plan.tail))
        _write_at(descriptor, at + len(plan.tail), memoryview(zeros))
        for piece, place in plan.chunks:
            into = memoryview(bytearray(piece.size_bytes))
            if not self._read(plan, plan.source[place], place, into):
                raise DamagedError(f"{self._told.path}: {piece}: was whole a moment ago; repair again")
            _write_at(descriptor, plan.part.start + place.at + HEADER_BYTES, into)

    def _prove(self, aside: Path) -> None:
        with GenerationReader(replace(self._saved, path=aside)) as generation:
            for number, chunks in enumerate(generation.chunks_by_part()):
                if self._manifest.parts[number].file in self._touched:
                    for damage in generation.damages_of_part(number, chunks):
                        raise DamagedError(f"{damage}; what was repaired does not hold, nothing was changed")


def _write_at(descriptor: int, at: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count
