"""Headers of safetensors files: which tensors are in one, of which type and shape, without torch."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.files import open_regular

DTYPE_BITS = {
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8},
    **{"U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
"""Bits of an element, by the names that safetensors has for types."""
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that training can start from, and their names in torch."""
_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as its header says."""

    path: Path
    dtype: str
    """In the words of safetensors."""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """What its elements take."""
        return (math.prod(self.shape) * DTYPE_BITS.get(self.dtype, 8) + 7) // 8


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file; UsageError unless the file is as long as its header says.

    A link is followed: Hugging Face's cache is made of them. Whatever is not a regular file is refused.
    """
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(size - 8, _MOST_HEADER_BYTES) else b""
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; download or export it again") from None
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        tensors = {name: _parse_tensor_entry(path, entry) for name, entry in entries.items()}
        expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        problem = f"has {size} bytes, but not the header of a safetensors file"
    else:
        if size == expected:
            return tensors
        problem = f"has {size} bytes, by its header it should have {expected}"
    raise UsageError(
        f"{path}: is not a complete safetensors file: it {problem}; it is truncated or damaged, download or"
        " export it again"
    )


def _parse_tensor_entry(path: Path, entry: Any) -> StoredTensor:
    tensor = StoredTensor(path, entry["dtype"], tuple(entry["shape"]))
    begin, end = entry["data_offsets"]
    counts = (*tensor.shape, begin)
    if not isinstance(tensor.dtype, str) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(entry)
    if tensor.dtype in DTYPE_BITS and end - begin != tensor.size_bytes:
        raise ValueError(entry)
    return tensor
