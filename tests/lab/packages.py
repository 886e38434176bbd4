"""Where the lab's programs come from, and why there may be no lab on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrun import process
from hpcrun.errors import SiteError


@dataclass(frozen=True)
class Bundle:
    """Debian packages that come together, and the programs that they bring."""

    what: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]


# libpmix-dev for its unversioned libpmix.so, which Slurm looks for.
SLURM = Bundle(
    "Slurm",
    (
        "slurmctld",
        "slurmd",
        "slurm-client",
        "slurm-wlm-basic-plugins",
        "libpmix-dev",
        "munge",
        "iproute2",
    ),
    ("munged", "slurmctld", "slurmd", "slurmstepd", "srun", "ip", "tc"),
)
ACCOUNTING = Bundle("slurmdbd and a database", ("slurmdbd", "mariadb-server-core"), ("slurmdbd", "mariadbd"))
OPENMPI = Bundle("Open MPI", ("openmpi-bin",), ("mpirun.openmpi", "orted"))
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONFIGURATIONS = Path("/etc")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcrun-lab"


class NoLabError(SiteError):
    """There can be no lab here; the message says why and what to do about it."""


def overlay(bundle: Bundle = SLURM) -> Path | None:
    """The folder to lay over /usr inside the lab; None where the host has every program itself."""
    check_machine()
    if not missing(bundle):
        return None
    folder = unpacked_folder(bundle)
    if missing(bundle, folder):
        try:
            with only_one():
                if missing(bundle, folder):
                    unpack(bundle, folder)
        except SiteError as problem:
            if os.environ.get("CI") != "true":
                raise NoLabError(
                    f"the lab needs {bundle.what} and could not unpack it ({problem}); run: make lab-deps"
                ) from problem
            install(bundle)
            return None
    return folder


def check_machine() -> None:
    """NoLabError unless this is root on a kernel that lets it make namespaces."""
    if os.geteuid() != 0:
        raise NoLabError(
            "the lab makes namespaces and networks, which needs root; run it as root (sudo make lab)"
        )
    trial = ["unshare", "-mnpuif", "--kill-child", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        process.run(trial, timeout_s=20).require_success()
    except SiteError as problem:
        raise NoLabError(
            f"the lab cannot make namespaces here ({problem}); in a container, start that with --privileged"
        ) from problem


def missing(bundle: Bundle, folder: Path | None = None) -> list[str]:
    """The programs that neither the host nor this folder has."""
    path = SYSTEM_PATH + (f":{folder}/usr/sbin:{folder}/usr/bin" if folder else "")
    return [name for name in bundle.programs if not shutil.which(name, path=path)]


def unpacked_folder(bundle: Bundle) -> Path:
    """One folder for each distribution, processor and list of packages, as its files fit no other."""
    release = platform.freedesktop_os_release()
    edition = hashlib.sha256(" ".join(bundle.packages).encode()).hexdigest()[:8]
    return CACHE / f"{release['ID']}-{release.get('VERSION_ID', 'rolling')}-{platform.machine()}-{edition}"


def refuse_on_a_cluster() -> None:
    """NoLabError where a Slurm configuration says that this machine is part of a cluster."""
    for configuration in sorted(CONFIGURATIONS.glob("slurm*/slurm.conf")):
        raise NoLabError(
            f"{configuration} exists, so no other Slurm is brought to this machine; run the lab elsewhere"
        )


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Let one process at a time unpack: another one's lab may run from that folder a moment later."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unpack(bundle: Bundle, folder: Path) -> None:
    """Fetch the packages that the host lacks and unpack them there, with nothing changed on the host."""
    refuse_on_a_cluster()
    if not shutil.which("apt-get"):
        raise SiteError("there is no apt-get here")
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        staging = Path(name)
        archives, tree = staging / "cache/archives", staging / "tree"
        fetch(bundle, staging, archives)
        for part in ("bin", "sbin", "lib", "lib64"):
            # A package that still ships /sbin/tc lands in /usr, as it does on a host of today.
            (tree / "usr" / part).mkdir(parents=True, exist_ok=True)
            (tree / part).symlink_to(f"usr/{part}")
        script = 'for deb do dpkg-deb --fsys-tarfile "$deb" | tar -xC "$tree" --keep-directory-symlink; done'
        debs = sorted(str(path) for path in archives.glob("*.deb"))
        environ = {"PATH": SYSTEM_PATH, "tree": str(tree)}
        process.run(["sh", "-euc", script, "sh", *debs], timeout_s=120, env=environ).require_success()
        for program in (tree / "usr/sbin").glob("*-wlm"):
            # The names that everybody uses are links that Debian makes only at installation.
            program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)
        if lacking := missing(bundle, tree):
            raise SiteError(f"{', '.join(bundle.packages)} hold no {', '.join(lacking)}")
        if folder.exists():
            shutil.rmtree(folder)
        tree.rename(folder)


def fetch(bundle: Bundle, staging: Path, archives: Path) -> None:
    """Download the packages and what they need, by the host's lists, else by fresh ones of our own."""
    (archives / "partial").mkdir(parents=True)
    options = [f"Dir::Cache={staging}/cache", "Debug::NoLocking=1", "APT::Sandbox::User=root"]
    install = ["-y", "--download-only", "--no-install-recommends", "install", *bundle.packages]
    if apt_get(options, install).exit_code == 0:
        return
    (staging / "lists/partial").mkdir(parents=True)
    options.append(f"Dir::State::lists={staging}/lists")
    apt_get(options, ["update"]).require_success()
    apt_get(options, install).require_success()


def apt_get(options: list[str], command: list[str]) -> process.CompletedCommand:
    words = [word for option in options for word in ("-o", option)]
    environ = dict(os.environ) | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    return process.run(["apt-get", "-q", *words, *command], timeout_s=300, env=environ)


def install(*bundles: Bundle) -> None:
    """Install packages on this machine itself: for CI and `make lab-deps` only."""
    check_machine()
    refuse_on_a_cluster()
    names = [name for bundle in bundles for name in bundle.packages]
    apt_get([], ["update"]).require_success()
    apt_get([], ["-y", "--no-install-recommends", "install", *names]).require_success()
    if lacking := [name for bundle in bundles for name in missing(bundle)]:
        raise SiteError(f"apt-get installed {', '.join(names)}, yet there is no {', '.join(lacking)}")
