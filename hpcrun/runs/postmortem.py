"""One tar with what an engineer asks for when a run went wrong: records, logs, the story; and no secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hpcrun
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.files import temporary_name
from hpcrun.masking import Masker, is_secret_name
from hpcrun.runs.describe import compute_run_ledger
from hpcrun.runs.event_text import format_events
from hpcrun.runs.follow import format_run_state
from hpcrun.runs.known_secrets import known_secrets
from hpcrun.runs.run_state import read_run_states
from hpcrun.runs.snapshot import RunSnapshot
from hpcrun.slurm.client import run_slurm_client
from hpcrun.specs.provenance import Provenance, read_provenance
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.units import format_bytes

_MAX_FILE_BYTES = 2**20
"""Of each file this much is kept, the last."""
_MAX_EVENTS_BYTES = 16 * 2**20
"""The same of the files that are read whole or not at all: events and code.diff."""
_MAX_TOTAL_BYTES = 256 * 2**20
_COMMAND_TIMEOUT_S = 10.0
_PACKAGES = ("torch", "mpi4py", "mpich", "numpy", "submitit", "pydantic", "typer", "ClusterShell", "Jinja2")
_SACCT_FORMAT = "JobID,JobName%40,State%30,ExitCode,Submit,Start,End,Elapsed,NodeList%60,Reason,MaxRSS"

_RUN_FILES = ("spec.yaml", "exit.json", "events.jsonl", "chaos.jsonl", "metrics.jsonl")
_OWNER_FILES = ("job.json", "job.sbatch", "code.diff", "cluster.yaml")
"""Of a sweep these lie with the sweep itself."""
_ATTEMPT_FILES = (
    "plan.json",
    "placement.json",
    "settings.json",
    "settings.tsv",
    "hosts",
    "ranks.txt",
    "supervisor.json",
    "outcome.json",
    "result.json",
    "restore.json",
    "unrestored.json",
    "logs/*.log",
    "ranks/rank-*.json",
    "stacks/*.txt",
)
"""What goes into the tar; all else stays, and is named. peers.json and leader.json hold the run's secret."""
_PUBLIC_FIELDS = {
    "job.json": {one.name for one in fields(Provenance)},
    "supervisor.json": {"pid", "start_ticks", "host", "started", "slurm_job", "restarts", "taken_over"},
}
"""Records of which only these fields go."""


@dataclass(frozen=True)
class PostmortemArchive:
    """A tar that was written, and what is not in it."""

    path: Path
    files: list[str]
    left_out: list[str] = field(default_factory=list)
    """A line each."""


def write_postmortem(run: RunDir, out: Path | None = None) -> PostmortemArchive:
    """Write the tar of a run (default RUN-postmortem.tar.gz here); UsageError where it cannot be written.

    Whatever cannot be read is left out, and said: a run that broke may have broken its records, too.
    """
    if run.sweep.is_file():
        raise UsageError(f"{run.id} is a sweep: name one of its elements, such as {run.id}/0")
    path = out or Path(f"{run.id.replace('/', '-')}-postmortem.tar.gz")
    if path.exists():
        raise UsageError(f"{path}: exists already; remove it, or name another file with --out")
    aside = path.with_name(temporary_name(path.name))
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            bundle = _write_archive(run, path, file)
        aside.rename(path)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{path}: cannot be written: {why}; name another file with --out") from None
    finally:
        with suppress(OSError):
            aside.unlink()
    return bundle


def _write_archive(run: RunDir, path: Path, file: Any) -> PostmortemArchive:
    bundle = PostmortemArchive(path, [])
    owner = run.sweep_of_element or run
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        writer = _ArchiveWriter(tar, run.id.replace("/", "-"), Masker(known_secrets(run)), bundle)
        for name, source in _find_files(owner, run):
            writer.copy(name, source)
        bundle.left_out.extend(_list_excluded_files(run))
        writer.text("slurm.txt", _slurm_report(run, owner))
        writer.text("versions.txt", _package_versions())
        bundle.left_out.append(
            f"of {run.id}: checkpoints, traces, pickles, how its processes reach each other, and the files"
            " that secrets: names"
        )
        writer.text("summary.txt", _format_summary(run, bundle.left_out))
    return bundle


class _ArchiveWriter:
    """Puts masked text into a tar, up to a size."""

    def __init__(self, tar: tarfile.TarFile, folder: str, masker: Masker, bundle: PostmortemArchive) -> None:
        self._tar, self._folder, self._masker, self._bundle = tar, folder, masker, bundle
        self._left = _MAX_TOTAL_BYTES

    def copy(self, name: str, path: Path) -> None:
        """The end of a file, with a line that says what was cut off; what cannot be had is said."""
        try:
            whole = name in ("events.jsonl", "code.diff")
            data, cut = _read_tail(path, _MAX_EVENTS_BYTES if whole else _MAX_FILE_BYTES)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            self._bundle.left_out.append(f"{name}: {why}")
            return
        if len(data) > self._left:
            self._bundle.left_out.append(f"{name}: there are {format_bytes(_MAX_TOTAL_BYTES)} already")
            return
        self._left -= len(data)
        notice = f"hpcrun: the first {cut} bytes were left out\n" if cut else ""
        if cut:
            self._bundle.left_out.append(f"{name}: the first {cut} bytes")
        text = data.decode(errors="replace")
        if path.suffix in (".json", ".jsonl"):
            text = "".join(self._record(path.name, line) for line in _split_documents(path, text))
        self.text(name, notice + text)

    def _record(self, name: str, text: str) -> str:
        """A record without what must not get out; as text where it cannot be read."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return text
        public_fields = _PUBLIC_FIELDS.get(name)
        if public_fields is not None and isinstance(record, dict):
            record = {key: value for key, value in record.items() if key in public_fields}
        masked = self._masker.mask_record(record)
        return text if masked == json.loads(text) else json.dumps(masked) + "\n"

    def text(self, name: str, text: str) -> None:
        """A file of its own."""
        data = self._masker.mask(text).encode(errors="replace")
        member = tarfile.TarInfo(f"{self._folder}/{name}")
        member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
        self._tar.addfile(member, io.BytesIO(data))
        self._bundle.files.append(name)


def _split_documents(path: Path, text: str) -> list[str]:
    return text.splitlines(keepends=True) if path.suffix == ".jsonl" else [text]


def _read_tail(path: Path, most: int) -> tuple[bytes, int]:
    """The last piece of a file, from the beginning of a line, and how much stands before it."""
    # A link may lead to anybody's file, and nobody may write into a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        cut = max(0, status.st_size - most)
        file.seek(cut)
        data = file.read(most)
    if cut:
        torn = data.find(b"\n") + 1
        cut, data = cut + torn, data[torn:]
    return data, cut


def _find_files(owner: RunDir, run: RunDir) -> Iterator[tuple[str, Path]]:
    """What there is, by its name in the tar: records first, so that they find room."""
    named = [run.path / name for name in _RUN_FILES] + [owner.path / name for name in _OWNER_FILES]
    yield from ((path.name, path) for path in named if path.exists())
    attempts = list(reversed(run.attempts()))
    for are_logs in (False, True):
        for attempt in attempts:
            for path in _find_attempt_files(attempt):
                if (path.parent.name == "logs") == are_logs:
                    yield f"attempts/{attempt.number}/{path.relative_to(attempt.path)}", path
    yield from ((f"agents/{path.name}", path) for path in sorted(run.agent_logs.glob("*.log")))
    yield from ((f"telemetry/{path.name}", path) for path in sorted(run.telemetry.glob("*.log")))
    with suppress(UsageError):
        in_sweep = run.sweep_of_element is not None
        batch = (
            RunSnapshot(run, read_provenance(owner)).batch_logs()
            if in_sweep
            else owner.submitit.glob("*_log.*")
        )
        yield from ((f"batch/{path.name}", path) for path in sorted(batch) if path.suffix in (".out", ".err"))


def _find_attempt_files(attempt: Attempt) -> list[Path]:
    """The files of an attempt that go into the tar."""
    paths = (path for pattern in _ATTEMPT_FILES for path in attempt.path.glob(pattern))
    return sorted(path for path in paths if not path.is_dir())


def _list_excluded_files(run: RunDir) -> Iterator[str]:
    """A line for what lies in an attempt and stays: nobody knows what is in it, or all know."""
    for attempt in run.attempts():
        for path in sorted(set(attempt.path.glob("*")) | set(attempt.path.glob("*/*"))):
            inside = path.relative_to(attempt.path)
            if path.is_dir() or inside.parts[0] == "profile" or any(map(inside.match, _ATTEMPT_FILES)):
                continue
            why = "by its name it holds a secret" if _holds_secret(path) else "is not a usual record"
            yield f"attempts/{attempt.number}/{inside}: {why}"


def _holds_secret(path: Path) -> bool:
    return path.name == "peers.json" or is_secret_name(path.name)


def _slurm_report(run: RunDir, owner: RunDir) -> str:
    """What Slurm says of the job and of nodes that are down; in its own words, also when it has no answer."""
    try:
        job = RunSnapshot(run, read_provenance(owner)).job
    except UsageError as error:
        return f"{error}\n"
    if job is None:
        return "this run was no Slurm job\n"
    number, element, cluster = job
    name = str(number) if element is None else f"{number}_{element}"
    where = ["-M", cluster] if cluster else []
    commands = [
        ["scontrol", *where, "show", "job", "-d", name],
        ["sacct", *where, "-j", name, "-o", _SACCT_FORMAT],
        ["sinfo", *where, "-R"],
    ]
    return "\n".join(f"$ {' '.join(words)}\n{_command_output(words)}" for words in commands)


def _command_output(words: list[str]) -> str:
    try:
        done = run_slurm_client(words, timeout_s=_COMMAND_TIMEOUT_S)
    except SiteError as error:
        return f"{error}\n"
    return f"{done.stdout}{done.stderr}"


def _package_versions() -> str:
    """Of the host where the tar is made: the nodes' own versions stand in the logs."""
    lines = [
        f"host {platform.node()}",
        f"system {platform.platform()}",
        f"python {platform.python_version()}",
    ]
    lines.append(f"hpcrun {hpcrun.__version__}")
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    return "".join(f"{line}\n" for line in lines)


def _format_summary(run: RunDir, left_out: list[str]) -> str:
    """The first cause, the ledger and the story, then what is missing here."""
    (state,) = read_run_states([run])
    parts = {
        "run": lambda: [
            format_run_state(state),
            f"made {time.strftime('%Y-%m-%d %H:%M:%S %z')} on {platform.node()}",
        ],
        "first cause": lambda: _format_causes(run),
        "where the time went": lambda: compute_run_ledger(state).lines(),
        "story": lambda: [str(entry) for entry in format_events(run)],
        "left out": lambda: left_out,
    }
    return "\n".join(_format_section(title, lines) for title, lines in parts.items())


def _format_section(title: str, lines: Callable[[], list[str]]) -> str:
    try:
        content = lines()
    except (HpcrunError, OSError) as error:
        content = [f"cannot be told: {error}"]
    return "".join(f"{line}\n" for line in (f"== {title}", *(content or ["nothing"])))


def _format_causes(run: RunDir) -> list[str]:
    """How each attempt that did not end well has ended, the oldest first, and the run itself."""
    lines = []
    for attempt in run.attempts():
        record = read_json(attempt.outcome)
        if isinstance(record, dict) and record.get("status") not in ("done", "saved"):
            lines.append(f"attempt {attempt.number}: {record.get('status')}: {record.get('message')}")
    ended = run.read_exit()
    return [*lines, f"run: {ended.get('status')}: {ended.get('message')}"] if ended else lines
