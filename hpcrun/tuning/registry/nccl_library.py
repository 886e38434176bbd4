"""Which release of NCCL a job would load, from package metadata and file names; torch is never imported."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcrun.errors import UsageError
from hpcrun.local_identity import expand_path
from hpcrun.tuning.registry.registry import Version, format_version, parse_version

if TYPE_CHECKING:
    from hpcrun.specs.cluster import ClusterSpec
    from hpcrun.specs.job import JobSpec

_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_REQUIRED = re.compile(r"(nvidia-nccl-cu\d+)\s*(?:\(==|==)\s*([\w.]+)")
_FILE = re.compile(r"libnccl\.so\.(2\.\d+\.\d+)")


class NcclLibrary(NamedTuple):
    """A release, and how it is known."""

    version: Version
    how: str

    def __str__(self) -> str:
        return f"NCCL {format_version(self.version)} ({self.how})"


_CUDA = re.compile(r"nvidia-nccl-cu(\d+)")


class NcclLibraryChoice(NamedTuple):
    """The release that counts, and what else there is that might be loaded instead."""

    library: NcclLibrary | None
    others: tuple[NcclLibrary, ...] = ()

    @property
    def version(self) -> Version | None:
        """The release that counts."""
        return self.library.version if self.library else None

    @property
    def cuda(self) -> Version | None:
        """The CUDA it was built for, as far as its package's name tells."""
        match = _CUDA.search(self.library.how) if self.library else None
        return (int(match[1]),) if match else None


def find_nccl_library(
    given: str | None = None,
    *,
    python: Path | None = None,
    environ: Mapping[str, str] | None = None,
    is_contained: bool = False,
) -> NcclLibraryChoice:
    """The release named, else of the python's packages, else of the library path, else of an image's word.

    `python`: the interpreter of the ranks; without it the one that runs here. `environ`: what the ranks get.
    `is_contained`: they run in a container, where nothing of what is here is loaded.
    """
    libraries = [] if is_contained else list(_libraries_on_path(environ or {}))
    packaged = _library_of_packages(_site_packages(python), str(python) if python else "this python")
    if packaged and not is_contained:
        libraries.insert(0, packaged)
    image_release = (environ or {}).get("NCCL_VERSION")
    if image_release and not libraries:
        with contextlib.suppress(UsageError):
            libraries.append(
                NcclLibrary(parse_version(image_release, "NCCL_VERSION"), "NCCL_VERSION, as the image says")
            )
    if given is not None:
        libraries.insert(0, NcclLibrary(parse_version(given), "--nccl-version"))
        return NcclLibraryChoice(libraries[0])
    if not libraries:
        return NcclLibraryChoice(None)
    return NcclLibraryChoice(
        libraries[0], tuple(library for library in libraries[1:] if library.version != libraries[0].version)
    )


def find_job_nccl_library(
    spec: JobSpec,
    cluster: ClusterSpec | None,
    given: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> NcclLibraryChoice:
    """The release that a job loads: by its python, or its profile's."""
    named = spec.python or (cluster.python.path if cluster else None)
    python = Path(expand_path(named)) if named else None
    return find_nccl_library(given, python=python, environ=environ, is_contained=spec.container is not None)


def _site_packages(python: Path | None) -> list[str] | None:
    """Where an interpreter keeps packages; None for the one that runs."""
    if python is None:
        return None
    prefix = python.parent.parent
    return [str(path) for path in sorted(prefix.glob("lib*/python3*/site-packages"))]


def _library_of_packages(sites: list[str] | None, whose: str) -> NcclLibrary | None:
    required = _required_wheels(sites)
    for wheel in sorted(_WHEELS, key=lambda name: name not in required):
        release = _wheel_release(wheel, sites)
        if release:
            return NcclLibrary(release, f"{wheel} of {whose}")
    for wheel, release in required.items():
        return NcclLibrary(release, f"{wheel}, which torch of {whose} asks for")
    return None


def _required_wheels(sites: list[str] | None) -> dict[str, Version]:
    """The wheels that torch asks for, and their releases."""
    torch = _distribution("torch", sites)
    lines = torch.requires or [] if torch else []
    return {match[1]: parse_version(match[2]) for line in lines if (match := _REQUIRED.match(line))}


def _wheel_release(name: str, sites: list[str] | None) -> Version | None:
    distribution = _distribution(name, sites)
    try:
        return parse_version(distribution.version) if distribution else None
    except UsageError:
        return None


def _distribution(name: str, sites: list[str] | None) -> metadata.Distribution | None:
    if sites is None:
        return next(iter(metadata.distributions(name=name)), None)
    return next(iter(metadata.distributions(name=name, path=sites)), None)


def _libraries_on_path(environ: Mapping[str, str]) -> Iterator[NcclLibrary]:
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        for word in re.split("[: ]", environ.get(name, "")):
            if not word:
                continue
            path = Path(word) if name == "LD_PRELOAD" else Path(word) / "libnccl.so.2"
            if path.name.startswith("libnccl.so") and path.is_file():
                match = _FILE.fullmatch(path.resolve().name)
                if match:
                    yield NcclLibrary(parse_version(match[1]), f"{path} by {name}")
