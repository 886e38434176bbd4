"""The file system of the run directory: what it is, whether saves fit, and how their files are made on it.

On Lustre it is asked through `lfs`; when that fails, whatever the reason, one warning is given and the
directory is treated as any other. What nobody can tell is said to be unknown.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpcrun.checkpoint.lustre.layout import (
    FileRequirement,
    Striping,
    choose_pool,
    plan_striping,
    select_usable_osts,
)
from hpcrun.checkpoint.lustre.lfs import LfsClient, LfsError, LustreQuota, LustreTarget
from hpcrun.mounts import MOUNTINFO, find_mount
from hpcrun.specs.checkpoint import DurableSpec
from hpcrun.units import format_bytes

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_NUMBER = re.compile(r"data-(\d{5,})\.bin", re.A)

WarnCallback = Callable[[str], None]


@dataclass(frozen=True)
class StorageFinding:
    """One thing that was looked at before saves go to a directory."""

    level: Literal["ok", "unknown", "warning", "refused"]
    text: str


@dataclass(frozen=True)
class SaveRequirement:
    """What the saves of a run will take."""

    save_bytes: int
    """Of one save."""
    save_files: int
    """Of one save, directories among them."""
    saves: int = 3
    """How many more will lie there at the same time: those kept, and the one that is being written."""


@dataclass(frozen=True)
class StoragePlan:
    """What a person is told of the place for saves."""

    directory: Path
    kind: str
    layout: str | None
    """In words; None where the file system has no such thing, or it is unknown."""
    reasons: tuple[str, ...]
    findings: tuple[StorageFinding, ...]

    @property
    def refusal(self) -> str | None:
        """Why no save can succeed there; None where one can, or nobody knows."""
        return next((finding.text for finding in self.findings if finding.level == "refused"), None)

    def as_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self) | {"directory": str(self.directory)}


class CheckpointStorage:
    """A directory for saves. The methods never fail because of `lfs`.

    `warn` is told once, and what is returned then holds the `warning` too.
    """

    def __init__(
        self,
        directory: Path,
        spec: DurableSpec,
        warn: WarnCallback = lambda text: None,
        *,
        lfs: LfsClient | None = None,
        mountinfo: Path = MOUNTINFO,
    ) -> None:
        self._directory, self._spec, self._warn = directory, spec, warn
        self._lfs = lfs or LfsClient()
        self.mount = find_mount(directory, mountinfo)
        self._has_warned = False
        self._warning: str | None = None
        self._may_ask = self._may_stripe = self.mount.kind == "lustre"

    def prepare_file(self, path: Path, size_bytes: int, files: int = 1, writers: int = 1) -> dict[str, Any]:
        """Make the file of a save, empty and laid out; what is returned belongs into the save's record.

        So many files are written at once, each by so many processes. Elsewhere than on Lustre nothing is
        made. A file that exists is left as it is.
        """
        facts: dict[str, Any] = {"file_system": self.mount.kind or "unknown"}
        if self._may_stripe and not path.exists():
            try:
                striping = self._create(path, _file_requirement(path, size_bytes, files, writers), set())
                facts |= {"asked": list(striping.arguments), "reasons": list(striping.reasons)}
            except LfsError as error:
                # A file with the layout of its directory is a file too, and its layout can be recorded.
                self._give_up(error, asking=error.number not in (errno.ENOENT, None))
        return facts | self.layout_facts(path)

    def retry_file(
        self, path: Path, size_bytes: int, files: int = 1, writers: int = 1
    ) -> dict[str, Any] | None:
        """After ENOSPC: make the file anew, empty, on other OSTs; None where none have room: it stays."""
        if not self._may_stripe or not path.exists():
            return None
        need = _file_requirement(path, size_bytes, files, writers)
        try:
            avoid = set(self._lfs.layout(path).osts)
            if not self.plan(need, avoid, path.parent)[0].fits:
                return None
            path.unlink()
            striping = self._create(path, need, avoid)
        except LfsError as error:
            self._give_up(error)
            return None
        facts = {"file_system": self.mount.kind, "asked": list(striping.arguments)}
        return facts | {"reasons": list(striping.reasons)} | self.layout_facts(path)

    def layout_facts(self, path: Path) -> dict[str, Any]:
        """The layout that a file has; empty where nobody can tell. A progressive one grows with the file."""
        facts: dict[str, Any] = {}
        if self._may_ask and path.exists():
            try:
                facts["layout"] = self._lfs.layout(path).as_json()
            except LfsError as error:
                self._give_up(error)
        if self._warning is not None:
            facts["warning"], self._warning = self._warning, None
        return facts

    def _create(self, path: Path, need: FileRequirement, avoid: set[int]) -> Striping:
        """Lay the file out as planned; where the chosen OSTs are full meanwhile, once more without them."""
        for last in (False, True):
            striping = self.plan(need, avoid, path.parent)[0]
            if not striping.arguments:
                path.touch(mode=0o600, exist_ok=False)
                return striping
            try:
                self._lfs.create(path, striping.arguments)
            except LfsError as error:
                if last or error.number != errno.ENOSPC or not striping.osts:
                    raise
                avoid |= set(striping.osts)
            else:
                break
        path.chmod(0o600)
        return striping

    def plan(
        self, need: FileRequirement, avoid: Collection[int] = (), directory: Path | None = None
    ) -> tuple[Striping, list[LustreTarget]]:
        """How a file would be laid out, and the OSTs of its pool; LfsError."""
        place = _nearest_existing(directory or self._directory)
        default = self._lfs.default_layout(place)
        pool = choose_pool(self._spec, default, need.size_bytes)
        osts = [target for target in self._lfs.space(place, pool) if target.kind == "OST"]
        return plan_striping(need, self._spec, default, osts, avoid), osts

    def _give_up(self, error: LfsError, asking: bool = False) -> None:
        """Treat the directory as any other from now on, and say so the first time."""
        self._may_ask = self._may_ask and asking
        self._may_stripe = False
        if not self._has_warned:
            self._has_warned = True
            self._warning = f"{self._directory}: files of saves get the layout of their directory: {error}"
            self._warn(self._warning)

    def look(self, need: SaveRequirement, file: FileRequirement) -> StoragePlan:
        """Whether saves fit, and how their files would be laid out."""
        layout: str | None = None
        reasons, findings, has_space = tuple[str, ...](), list[StorageFinding](), False
        if self._may_ask:
            try:
                striping, osts = self.plan(file)
                requested = " ".join(striping.arguments)
                layout = f"lfs setstripe {requested}" if requested else "as the directory has it"
                reasons = striping.reasons
                findings += check_ost_space(osts, striping, need, self._spec.pool)
                has_space = True
                findings += self._inodes(need)
                findings += self._quotas(need)
            except LfsError as error:
                findings.append(StorageFinding("warning", f"what Lustre would tell is unknown: {error}"))
        if not has_space:
            findings += check_total_space(os.statvfs(_nearest_existing(self._directory)), need)
        if not any("quota" in finding.text for finding in findings):
            findings.append(
                StorageFinding("unknown", f"quota: not known on {self.mount.kind or 'this file system'}")
            )
        if self.mount.kind in _IN_MEMORY:
            findings.append(
                StorageFinding("warning", f"{self.mount.kind} is memory of this node: it is lost with it")
            )
        if not self.mount.kind:
            findings.append(StorageFinding("unknown", "which file system this is"))
        return StoragePlan(self._directory, self.mount.kind or "unknown", layout, reasons, tuple(findings))

    def _inodes(self, need: SaveRequirement) -> list[StorageFinding]:
        free = [
            target
            for target in self._lfs.inodes(_nearest_existing(self._directory))
            if target.problem is None
        ]
        metadata = [target.free for target in free if target.kind == "MDT"]
        if not metadata:
            return [StorageFinding("unknown", "inodes: no metadata server answered")]
        return [_check_free_space("inodes", sum(metadata), need.save_files, need.saves, str)]

    def _quotas(self, need: SaveRequirement) -> list[StorageFinding]:
        place = _nearest_existing(self._directory)
        owner = place.stat()
        project = self._project(place)
        quotas: list[tuple[Literal["user", "group", "project"], int]] = [
            ("user", os.getuid()),
            ("group", owner.st_gid if owner.st_mode & 0o2000 else os.getgid()),
        ]
        if project:
            quotas.append(("project", project))
        findings = []
        for kind, number in quotas:
            try:
                finding = check_quota_space(kind, self._lfs.quota(place, kind, number), need)
            except LfsError as error:
                if error.number != errno.ESRCH:
                    raise
                finding = [StorageFinding("ok", f"quota of the {kind}: there are none here")]
            findings += finding
        return findings

    def _project(self, place: Path) -> int:
        try:
            return self._lfs.project(place)
        except LfsError as error:
            if error.number not in (errno.ENOTTY, errno.EOPNOTSUPP):
                raise
            return 0


def check_ost_space(
    osts: Collection[LustreTarget], striping: Striping, need: SaveRequirement, pool: str | None
) -> list[StorageFinding]:
    """Whether the OSTs hold the saves, and whether each of them holds its share of a file."""
    good, why = select_usable_osts(list(osts))
    if not osts and pool is not None:
        return [
            StorageFinding("refused", f"checkpoint.durable.pool: {pool} has no OSTs here; `lfs df -p {pool}`")
        ]
    findings = [
        _check_free_space(
            "space",
            sum(target.free for target in good),
            need.save_bytes,
            need.saves,
            format_bytes,
            f" on {len(good)} OSTs",
        )
    ]
    findings += [StorageFinding("warning", text) for text in why if "silent" in text or "degraded" in text]
    if striping.fits is False:
        least = min((target.free for target in good), default=0)
        findings.append(
            StorageFinding(
                "refused",
                f"no OSTs have room for a file of a save; the fullest has {format_bytes(least)} left",
            )
        )
    return findings


def check_total_space(status: os.statvfs_result, need: SaveRequirement) -> list[StorageFinding]:
    """Whether saves fit on a file system that only tells its totals."""
    if status.f_blocks:
        free = status.f_bavail * status.f_frsize
        findings = [_check_free_space("space", free, need.save_bytes, need.saves, format_bytes)]
    else:
        findings = [StorageFinding("unknown", "space: this file system does not count it")]
    if status.f_files:
        findings.append(_check_free_space("inodes", status.f_favail, need.save_files, need.saves, str))
    else:
        findings.append(StorageFinding("unknown", "inodes: this file system does not count them"))
    return findings


def check_quota_space(kind: str, quota: LustreQuota, need: SaveRequirement) -> list[StorageFinding]:
    """What the quota of a user, group or project leaves."""
    findings = []
    rows = (
        ("space", quota.used_bytes, quota.soft_bytes, quota.hard_bytes, need.save_bytes, format_bytes),
        ("inodes", quota.used_inodes, quota.soft_inodes, quota.hard_inodes, need.save_files, str),
    )
    for what, used, soft, hard, each, shown in rows:
        name = f"quota of the {kind}, {what}"
        if hard is None and soft is None:
            findings.append(StorageFinding("ok", f"{name}: no limit"))
            continue
        worst = StorageFinding("ok", "")
        if hard is not None:
            worst = _check_free_space(name, max(0, hard - used), each, need.saves, shown)
        if soft is not None and used + each * need.saves > soft and worst.level == "ok":
            worst = StorageFinding("warning", f"{name}: {shown(soft)} are exceeded for a grace time only")
        findings.append(worst if worst.text else StorageFinding("ok", f"{name}: below {shown(soft or 0)}"))
    if not quota.is_exact:
        findings.append(
            StorageFinding("unknown", f"quota of the {kind}: a server is silent; more is used than said")
        )
    return findings


def _check_free_space(
    what: str, free: int, each: int, saves: int, shown: Callable[[int], str], where: str = ""
) -> StorageFinding:
    """Whether so many saves, or at least one, have room."""
    need = f"{shown(free)} free{where}, {saves} saves of {shown(each)} need {shown(each * saves)}"
    if free < each:
        return StorageFinding("refused", f"{what}: {shown(free)} free{where}, one save needs {shown(each)}")
    return StorageFinding("ok" if free >= each * saves else "warning", f"{what}: {need}")


def _file_requirement(path: Path, size_bytes: int, files: int, writers: int) -> FileRequirement:
    """Which of the files of a save it is shows in its name."""
    match = _NUMBER.fullmatch(path.name)
    return FileRequirement(size_bytes, writers, files, int(match[1]) if match else 0)


def _nearest_existing(path: Path) -> Path:
    """A directory, or the nearest above it that exists: at submission the run directory may not."""
    place = path.resolve()
    return next((parent for parent in (place, *place.parents) if parent.is_dir()), place)


def make_storage_plan(
    directory: Path,
    spec: DurableSpec,
    *,
    save_bytes: int,
    nodes: int,
    keep: int,
    held: int = 0,
    writers: int = 1,
    lfs: LfsClient | None = None,
    mountinfo: Path = MOUNTINFO,
) -> StoragePlan:
    """What a person is told before saves go to a directory: one file a node, `keep` saves and one in flight.

    `held` saves are there already, `writers` processes write to a file at once. Only reads.
    """
    # A data file and a list of its parts a node while it is written, the manifest, the record, the directory.
    need = SaveRequirement(save_bytes, 2 * nodes + 3, max(1, keep + 1 - held))
    storage = CheckpointStorage(directory, spec, lfs=lfs, mountinfo=mountinfo)
    return storage.look(need, FileRequirement(-(-save_bytes // nodes), writers, nodes))
