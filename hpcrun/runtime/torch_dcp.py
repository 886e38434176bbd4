"""Reads torch's distributed checkpoints without running code in them.

Their list of tensors is a pickle. Only the classes that torch's writer uses are instantiated; any other name
in it is refused, and so are files that another user could have written.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import stat
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.serialization import _get_layout

from hpcrun.errors import SiteError, UsageError
from hpcrun.files import is_plain_name, open_regular

METADATA_FILE = ".metadata"
_BLOCK = 1 << 20
_READ_ERRORS = (
    OSError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, RecursionError,
    MemoryError, OverflowError, NotImplementedError, RuntimeError
)  # fmt: skip
"""What a truncated or garbled pickle may raise."""
_ALLOWED_CLASSES = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


class TorchCheckpoint(FileSystemReader):
    """A directory that torch.distributed.checkpoint has written, opened for reading tensor by tensor.

    UsageError for a directory that cannot be trusted, SiteError where it is damaged.
    """

    def __init__(self, directory: Path) -> None:
        _check_owner(directory)
        super().__init__(directory)
        self.directory = directory
        self._metadata = _read_metadata(directory / METADATA_FILE)
        entries = self._metadata.state_dict_metadata
        self._tensors = {
            name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.others = sorted(entries.keys() - self._tensors.keys())
        """Names of entries that are not tensors; they could only be read as pickles."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of every tensor."""
        return {name: tuple(entry.size) for name, entry in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor."""
        return self._tensors[name].properties.dtype

    def read(self, name: str) -> Tensor:
        """Read a whole tensor; SiteError where pieces are missing or a checksum does not match."""
        entry = self._tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        # Torch itself does not compare the checksums.
        for index, info in self._metadata.storage_data.items():
            if index.fqn == name:
                _check_piece(self.directory / info.relative_path, name, info.offset, info.length)
        try:
            with warnings.catch_warnings(action="ignore"):
                dcp_load({name: tensor}, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            cause = str(next(iter(error.failures.values()))[0]).splitlines() or [""]
            raise SiteError(f"{self.directory}: is damaged: {name}: {cause[0]}") from None
        return tensor

    def read_metadata(self, *_words: Any, **_options: Any) -> Metadata:
        """Return the list of tensors, for torch's loader."""
        return self._metadata


def _check_owner(path: Path) -> None:
    """Refuse a checkpoint that somebody else could have written: its metadata is a pickle, which is code."""
    for item in (path, *path.iterdir()):
        status = item.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH:
            raise UsageError(
                f"{item}: belongs to another user or is writable by all; loading it could run their code."
                " Copy it to a directory of your own that only you may write"
            )


class _UnexpectedPickleError(Exception):
    """A pickle that is more than a list of tensors."""


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_CLASSES:
            return _ALLOWED_CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise _UnexpectedPickleError(f"it names {module}.{name}, which is not part of a list of tensors")


def _enum_member(owner: Any, name: str) -> Any:
    """Serve as getattr for members of an enumeration; nothing else needs it."""
    if owner is metadata._MEM_FORMAT_ENCODING and name in owner.__members__:
        return owner[name]
    raise _UnexpectedPickleError("it looks into an object, which a list of tensors does not do")


def _read_metadata(path: Path) -> Metadata:
    try:
        with os.fdopen(open_regular(path), "rb") as file, _unchanged_classes():
            listing = _RestrictedUnpickler(file).load()
    except _UnexpectedPickleError as error:
        raise UsageError(f"{path}: is refused: {error}; import only what torch has written") from None
    except (*_READ_ERRORS, pickle.UnpicklingError) as error:
        raise SiteError(f"{path}: is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(listing, Metadata) or not isinstance(listing.storage_data, dict):
        raise SiteError(f"{path}: is damaged: it is not a list of tensors")
    _check_metadata_types(path, listing)
    for info in listing.storage_data.values():
        if not is_plain_name(info.relative_path):
            raise UsageError(f"{path}: names {info.relative_path!r}, outside its directory; do not use it")
        if getattr(info, "transform_descriptors", None):
            raise UsageError(f"{path}: its files are compressed, which is not read; save it uncompressed")
    return listing


@contextmanager
def _unchanged_classes() -> Iterator[None]:
    """Undo and refuse changes to the classes that a pickle names, whose attributes it could set."""
    owners = [owner for owner in dict.fromkeys(_ALLOWED_CLASSES.values()) if hasattr(owner, "__dict__")]
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        changed = False
        for owner, attributes in before:
            now = dict(vars(owner))
            for name in now.keys() - attributes.keys():
                delattr(owner, name)
                changed = True
            for name in [name for name in attributes if now.get(name) is not attributes[name]]:
                setattr(owner, name, attributes[name])
                changed = True
    if changed:
        raise _UnexpectedPickleError("it changes a class, which a list of tensors does not do")


def _check_metadata_types(path: Path, listing: Metadata) -> None:
    """SiteError unless names, sizes and places have the types that torch writes."""

    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value < 1 << 62

    def is_sound(name: Any, entry: Any) -> bool:
        if not isinstance(entry, TensorStorageMetadata):
            return isinstance(name, str)
        dtype = getattr(entry.properties, "dtype", None)
        return isinstance(name, str) and all(map(is_count, entry.size)) and isinstance(dtype, torch.dtype)

    try:
        entries = listing.state_dict_metadata.items()
        places = listing.storage_data.items()
        is_whole = all(is_sound(name, entry) for name, entry in entries) and all(
            isinstance(index.fqn, str)
            and isinstance(info.relative_path, str)
            and is_count(info.offset)
            and is_count(info.length)
            for index, info in places
        )
    except (AttributeError, TypeError):
        is_whole = False
    if not is_whole:
        raise SiteError(f"{path}: is damaged: it is not a list of tensors")


def _check_piece(path: Path, name: str, offset: int, length: int) -> None:
    """Verify the checksums of a piece, which is a zip archive."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(_FileSlice(file, offset, length)) as archive:
            for member in archive.infolist():
                if member.CRC == 0:
                    continue  # empty, or its writer was told to leave the checksum out
                with archive.open(member) as content:
                    while content.read(_BLOCK):
                        pass  # the last read compares the checksum
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise SiteError(f"{path} at {offset}: {name}: is damaged: {error}") from None


class _FileSlice(io.RawIOBase):
    """A range of a file, as a file object."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length, self._at = file.fileno(), offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self._at = at + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        got = os.preadv(self._descriptor, [view[:count]], self._offset + self._at) if count else 0
        self._at += got
        return got
