"""An object store, through fsspec: whole objects in and out, proved on arrival, tried again while it is busy.

Keys are relative to the store's URL. Credentials come from where AWS's own tools take them (environment,
profile, instance); none is ever written, printed, or taken from a URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import random
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from hpcrun.errors import SiteError
from hpcrun.files import make_directories

TRANSFER_BYTES = 16 << 20
"""What is sent or fetched at once; S3 wants at least 5 MiB of all pieces but the last."""
ObjectPresence = Literal["absent", "different", "same", "unproved"]
"""`unproved`: as long as it should be, but this store tells no checksum."""
_T = TypeVar("_T")
_TRANSIENT_ERRNOS = {
    errno.EBUSY,  # SlowDown, ServiceUnavailable
    errno.EREMOTEIO,  # InternalError
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.EPIPE,
    errno.ETIMEDOUT,
}
_DIRECTORY_SCHEMES = ("file", "local")
"""Schemes of stores that are directories."""


class ListedObject(NamedTuple):
    """An object as a listing shows it."""

    size_bytes: int
    changed: float | None
    """When it came, seconds since 1970; None where the store does not tell."""


PACKAGE_EXTRAS = {"s3": "hpcrun-slurm[s3]", "s3a": "hpcrun-slurm[s3]"}
"""What has to be installed for a scheme."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often a call is tried while the store is busy or out of reach, and how long it waits in between."""

    max_attempts: int = 8
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    response_timeout_s: float = 60.0
    """The longest silence of a store that speaks S3."""

    def pause(self, tried: int) -> float:
        """Doubled each time, and spread, so that the nodes of a job do not come back all at once."""
        longest = min(self.longest_pause_s, self.first_pause_s * 2 ** (tried - 1))
        return random.uniform(longest / 2, longest)


class ObjectStore:
    """Any store that fsspec knows; objects are written by its own writer, and it tells no checksums."""

    def __init__(self, url: str, endpoint: str | None, patience: RetryPolicy) -> None:
        self.url, self._endpoint, self._patience = url, endpoint, patience
        self._scheme = url.partition("://")[0]
        self._errors: tuple[type[Exception], ...] = (OSError, asyncio.TimeoutError)
        self._fs = self._connect()
        self._root = str(self._fs._strip_protocol(url)).rstrip("/")

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""

    def check(self) -> None:
        """SiteError, soon and in plain words, when the store cannot be used at all."""

    def list(self, prefix: str) -> dict[str, ListedObject]:
        """All objects whose keys begin with `prefix`, which ends with a slash."""
        entries = self._try(prefix, self._find, prefix)
        return {
            path.removeprefix(f"{self._root}/"): ListedObject(int(info["size"]), _modified_time(info))
            for path, info in entries.items()
            if info.get("type") == "file" and path.startswith(f"{self._root}/{prefix}")
        }

    def read(self, key: str, at: int = 0, size_bytes: int | None = None) -> bytes:
        """An object, or a range of it; FileNotFoundError when there is none."""
        end = None if size_bytes is None else at + size_bytes
        data: bytes = self._try(key, self._fs.cat_file, self._path(key), start=at, end=end)
        return data

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """An object in pieces of bounded size."""
        for at in range(0, size_bytes, TRANSFER_BYTES):
            yield self.read(key, at, min(TRANSFER_BYTES, size_bytes - at))

    def write(self, key: str, data: bytes) -> ObjectPresence:
        """A small object."""
        return self.send(key, lambda at, size: data[at : at + size], len(data), zlib.crc32(data))

    def send(
        self, key: str, read: Callable[[int, int], bytes], size_bytes: int, crc32: int
    ) -> ObjectPresence:
        """Store what `read(position, size)` gives, and look whether it arrived; SiteError when it did not."""
        try:
            self._try(key, self._put, key, read, size_bytes, crc32)
        except FileNotFoundError as error:
            raise SiteError(self._words(key, error, 1)) from None
        presence = self.presence(key, size_bytes, crc32)
        if presence not in ("same", "unproved"):
            raise SiteError(f"{self.url}/{key}: what is there now is not what was sent ({presence})")
        return presence

    def presence(self, key: str, size_bytes: int, crc32: int) -> ObjectPresence:
        """Whether an object is there, and is the one that has this size and this CRC-32."""
        try:
            info = self._try(key, self._tell, key)
        except FileNotFoundError:
            return "absent"
        if info[0] != size_bytes:
            return "different"
        return "unproved" if info[1] is None else "same" if info[1] == crc32 else "different"

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._try(key, self._fs.rm_file, self._path(key))

    def delete_prefix(self, prefix: str) -> None:
        """Remove everything whose key begins with `prefix`, which ends with a slash."""
        with contextlib.suppress(FileNotFoundError):
            self._try(prefix, self._fs.rm, self._path(prefix.rstrip("/")), recursive=True)

    def abort_incomplete_uploads(self, prefix: str) -> None:
        """Remove what interrupted uploads have left below `prefix` that is no object yet."""

    def _connect(self) -> Any:
        try:
            fsspec = importlib.import_module("fsspec")
            return fsspec.filesystem(self._scheme, **self._options())
        except (ImportError, ValueError) as error:
            of_all = PACKAGE_EXTRAS["s3"] if getattr(error, "name", None) == "fsspec" else None
            extra = PACKAGE_EXTRAS.get(self._scheme, of_all)
            remedy = f"pip install '{extra}'" if extra else "see fsspec's list of protocols for its package"
            raise SiteError(
                f"{self._scheme}:// needs a package that is not installed ({error}): {remedy}"
            ) from None

    def _options(self) -> dict[str, Any]:
        return {} if self._endpoint is None else {"endpoint_url": self._endpoint}

    def _path(self, key: str) -> str:
        if self._scheme in _DIRECTORY_SCHEMES:
            _check_levels(Path(self._root), key)
        return f"{self._root}/{key}"

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache()
        entries: dict[str, dict[str, Any]] = self._fs.find(self._path(prefix.rstrip("/")), detail=True)
        return entries

    def _tell(self, key: str) -> tuple[int, int | None]:
        self._fs.invalidate_cache()
        return int(self._fs.info(self._path(key))["size"]), None

    def _put(self, key: str, read: Callable[[int, int], bytes], size_bytes: int, _crc32: int) -> None:
        path = self._path(key)
        if self._scheme in _DIRECTORY_SCHEMES:
            make_directories(Path(path).parent)
        else:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._fs.open(path, "wb") as file:
            for at in range(0, size_bytes, TRANSFER_BYTES):
                file.write(read(at, min(TRANSFER_BYTES, size_bytes - at)))

    def _try(self, key: str, call: Callable[..., _T], *words: Any, **options: Any) -> _T:
        """The answer of a call; FileNotFoundError, or SiteError once patience is at its end."""
        tried = 0
        while True:
            tried += 1
            try:
                return call(*words, **options)
            except FileNotFoundError:
                raise
            except self._errors as error:
                if tried >= self._patience.max_attempts or not self._is_transient(error):
                    raise SiteError(self._words(key, error, tried)) from None
            time.sleep(self._patience.pause(tried))

    def _is_transient(self, error: Exception) -> bool:
        """Whether the same call may well succeed a little later."""
        if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
            return True
        return isinstance(error, asyncio.TimeoutError | TimeoutError | ConnectionError)

    def _words(self, key: str, error: Exception, tried: int) -> str:
        text = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
        times = f" (tried {tried} times)" if tried > 1 else ""
        return f"{self.url}/{key}: {text}{times}"


def _check_levels(root: Path, key: str) -> None:
    """SiteError where below a store in a directory stands a link, or what neither we nor its owner have made.

    Other users may be able to take names in it.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        owners, place = (os.geteuid(), root.stat().st_uid), root
        for name in filter(None, key.split("/")):
            place = place / name
            status = place.lstat()
            if stat.S_ISLNK(status.st_mode) or status.st_uid not in owners:
                raise SiteError(f"{place}: is a link, or belongs to another user; have it removed")
            if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022:
                raise SiteError(f"{place}: others can write it; run: chmod go-w {place}")


def _modified_time(info: dict[str, Any]) -> float | None:
    for name in ("LastModified", "mtime", "created", "updated"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
