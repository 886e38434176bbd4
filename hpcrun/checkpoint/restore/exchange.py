"""A generation out of its run and into another: a copy of its files, each byte proved on the way."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpcrun.checkpoint.commit import begin_generation, discard_draft, replacing_generation
from hpcrun.checkpoint.format import MANIFEST_NAME, DamagedError, data_file_name
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.part_writer import write_all, write_synced_file
from hpcrun.checkpoint.verify import default_verify_jobs, find_generation_damages
from hpcrun.errors import SiteError, UsageError
from hpcrun.files import allowed_file_directories, open_regular
from hpcrun.specs.base_model import copy_base_model
from hpcrun.specs.hf_directory import HF_CONFIG_FILE, SAFETENSORS_INDEX_FILE
from hpcrun.specs.load import render_portable_job
from hpcrun.specs.records import sync_directory, write_atomically
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, render_commit_record, resumable_checkpoints
from hpcrun.specs.sha256sums import SHA256SUMS_FILE
from hpcrun.units import format_bytes

_BLOCK = 16 << 20
_PARTIAL = ".partial"
_MAX_BYTES = {
    COMMIT_RECORD: 16 << 20,
    SHA256SUMS_FILE: 16 << 20,
    "hpcrun.json": 1 << 20,
    "spec.yaml": 1 << 20,
    HF_CONFIG_FILE: 1 << 20,
    SAFETENSORS_INDEX_FILE: 256 << 20,
    ".metadata": 1 << 30,
}
"""Of files from elsewhere that are read whole."""


def check_import_source(source: Path) -> None:
    """UsageError where a directory from elsewhere holds what is no file, leads out of it, or is too large."""
    if source.name.startswith(".") and source.name.endswith(_PARTIAL):
        raise UsageError(f"{source}: is an export that was never finished; export again")
    homes = allowed_file_directories(source.resolve())
    try:
        with os.scandir(source) as entries:
            for entry in entries:
                path = source / entry.name
                if entry.is_symlink() and Path(entry.path).resolve().parent not in homes:
                    raise UsageError(
                        f"{path}: is a link that leads out of {source}; put the file itself there"
                    )
                if entry.is_dir():
                    continue
                if not entry.is_file():
                    raise UsageError(f"{path}: is not a regular file; remove it")
                most = _MAX_BYTES.get(entry.name)
                if most is not None and entry.stat().st_size > most:
                    raise UsageError(f"{path}: is larger than {format_bytes(most)}; it is not imported")
    except (FileNotFoundError, NotADirectoryError):
        return  # kind_of says so
    except OSError as error:
        raise UsageError(
            f"{source}: cannot be read: {error.strerror}; give a directory that exists"
        ) from None


@contextmanager
def atomic_directory(directory: Path | str) -> Iterator[Path]:
    """A directory to write into, which gets its name when all is well, or disappears.

    UsageError where something is there already, SiteError where it cannot be written.
    """
    target = Path(directory).resolve()
    aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_PARTIAL}")
    is_made = False
    try:
        if target.exists() and not target.is_dir():
            raise UsageError(f"{target}: is a file; give a new directory")
        if target.is_dir() and any(target.iterdir()):
            raise UsageError(f"{target}: is not empty; give a new directory or empty this one first")
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        is_made = True
        yield aside
        sync_directory(aside)
        aside.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise SiteError(f"{target}: cannot be written: {error}") from None
    finally:
        if is_made:
            shutil.rmtree(aside, ignore_errors=True)


def copy_generation_out(
    saved: SavedCheckpoint,
    directory: Path,
    progress: Callable[[int], None] = lambda _size: None,
    *,
    jobs: int | None = None,
    owner: SaveOwner | None = None,
) -> None:
    """The files of a committed generation into an empty directory; DamagedError where one is damaged.

    `owner`: whose it is from here on.
    """
    names = [MANIFEST_NAME, *(data_file_name(number) for number in range(len(saved.file_bytes)))]
    for name in names:
        try:
            source = open_regular(saved.path / name)
        except FileNotFoundError:
            raise DamagedError(f"{saved.path / name}: is missing") from None
        try:
            _copy_synced(source, directory / name)
        finally:
            os.close(source)
    record = replace(saved, **asdict(owner)) if owner else saved
    write_synced_file(directory / COMMIT_RECORD, render_commit_record(record).encode())
    # What was written is read again, mostly from memory: it proves the copy, and so what it was made from.
    with GenerationReader(replace(saved, path=directory)) as copy:
        damages = find_generation_damages(copy, jobs or default_verify_jobs(), progress)
    if damages:
        raise DamagedError(f"{saved.path}: {damages[0].removeprefix(f'{directory}/')}")
    sync_directory(directory)


def export_generation(
    run: RunDir, saved: SavedCheckpoint, directory: Path, progress: Callable[[int], None]
) -> list[str]:
    """Copy a generation, and what describes its job, into a new directory; the keys left out of the job."""
    with atomic_directory(directory) as aside, copy_base_model(run.path, aside):
        copy_generation_out(saved, aside, progress)
        if not run.spec.exists():
            return []
        text, left_out = render_portable_job(run.spec)
        write_atomically(aside / "spec.yaml", text)
    return left_out


def copy_generation_in(
    saved: SavedCheckpoint,
    checkpoints: Path,
    progress: Callable[[int], None] = lambda _size: None,
    *,
    jobs: int | None = None,
) -> SavedCheckpoint:
    """A generation from elsewhere as the newest of a run, the same to the last bit but for whose it is."""
    needed, free = sum(saved.file_bytes), shutil.disk_usage(checkpoints.parent).free
    if needed > free:
        raise SiteError(
            f"{checkpoints}: the state takes {format_bytes(needed)}, and there are {format_bytes(free)} free"
        )
    owner = SaveOwner.for_next_start(checkpoints)
    draft = begin_generation(checkpoints, saved.step, owner.attempt)
    try:
        copy_generation_out(saved, draft.aside, progress, jobs=jobs, owner=owner)
        own = replace(saved, **asdict(owner))
        with replacing_generation(own, draft.final) as replaced:
            draft.aside.rename(draft.final)
    except BaseException:
        discard_draft(draft)
        raise
    for path in replaced:
        shutil.rmtree(path, ignore_errors=True)
    sync_directory(checkpoints)
    return replace(own, path=draft.final)


@dataclass(frozen=True)
class SaveOwner:
    """Whose a save is, and where it stands in that run's line of descent."""

    run_id: str
    attempt: int
    descent: str

    @classmethod
    def for_next_start(cls, checkpoints: Path) -> SaveOwner:
        """Of a save from elsewhere, as if the start that has made the newest save had made it, too."""
        line = resumable_checkpoints(checkpoints)
        attempt, descent = (line[-1].attempt, line[-1].descent) if line else (0, "")
        return cls(RunDir(checkpoints.parent).run_id, attempt, descent)


def check_would_be_newest(checkpoints: Path, step: int) -> None:
    """UsageError unless a save of this step would be the one that the run continues from."""
    newest = max((saved.step for saved in resumable_checkpoints(checkpoints)), default=-1)
    if newest >= step:
        raise UsageError(
            f"{checkpoints}: has a save of step {newest}, from which the run would resume, not from step"
            f" {step}; import into a run of its own with --name"
        )


def _copy_synced(source: int, target: Path) -> None:
    """A file, synced."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while data := os.read(source, _BLOCK):
            write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
