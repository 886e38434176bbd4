"""Which kind of fault it was that took an attempt down: what to do about it depends on that."""

from __future__ import annotations

import re
import signal
from typing import Any, Literal

from hpcrun.health.xids import is_program_xid
from hpcrun.launch.watch.stacks import StackGroup

FaultClass = Literal["deterministic", "data", "infrastructure", "preemption", "time limit", "unknown"]
"""deterministic: it will happen again; data: in reading them; infrastructure: it is not the job's."""

_HARDWARE_ERRORS = re.compile(
    r"uncorrectable|\bECC\b|\bXid\b|fallen off the bus|GPU is lost|hardware stack error|nvlink error",
    re.IGNORECASE,
)
"""What no program can bring about, except for some Xids."""
_PROGRAM_ERRORS = re.compile(
    r"out of memory|OutOfMemoryError|ALLOC_FAILED|ERROR_OUT_OF_MEMORY|device-side assert"
    r"|Assertion .{0,200}failed|no kernel image|invalid device (?:ordinal|function)|illegal memory access"
    r"|misaligned address|illegal instruction|invalid (?:argument|configuration|resource handle)"
    r"|invalid (?:program counter|address space)"
    r"|too many resources requested|launch failure|stream is captur|peer access|NOT_SUPPORTED|INVALID_VALUE"
    r"|driver version is insufficient|PTX was compiled|Duplicate GPU|ncclInvalidUsage|ncclInvalidArgument"
    r"|invalid (?:usage|type|root|data ?type|reduction)|(?:dtype|data ?type|scalar type)s? .{0,40}"
    r"(?:not supported|mismatch|match|same)|Unconvertible NCCL type|must be (?:on the same|CUDA|contiguous)",
    re.IGNORECASE,
)
"""What the program, its size or its settings bring about; the words of CUDA, torch and NCCL for it."""
_SYSTEM_ERRORS = re.compile(
    r"CUDA error: (?:unknown error|system |no CUDA-capable|all CUDA-capable|initialization|MPS"
    r"|the launch timed out|driver shutting down|remote procedure)|CUDA-capable devices? (?:is|are) "
    r"(?:detected|busy)|NCCL (?:error|WARN)|ncclSystemError|ncclRemoteError|Input/output error"
    r"|Stale file handle|No space left|Disk quota|Transport retry|ibv_"
    r"|mlx[0-9]_[^\n]{0,120}(?:error|fail|down|time|async|completion|status)",
    re.IGNORECASE,
)
_DATA_ERRORS = re.compile(
    r'File ".*/hpcrun/(?:runtime/data_loader|data/corpus)\.py"|DataLoader worker|in collate\b'
)
_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGBUS)
"""What nobody sends to himself: memory ran out, a file or a page behind a mapping is gone, an admin."""


def classify_crash(record: dict[str, Any] | None, wait_status: int | None = None) -> FaultClass:
    """The kind of a rank's death, by its own error record, else by how its process ended."""
    if record is None:
        ended_by = (wait_status or 0) & 0x7F
        return "infrastructure" if ended_by in _EXTERNAL_SIGNALS else "unknown"
    text = f"{record.get('message', '')}\n{record.get('traceback', '')}"
    if _HARDWARE_ERRORS.search(text):
        return "unknown" if is_program_xid(text) else "infrastructure"
    if _PROGRAM_ERRORS.search(text):
        return "data" if _DATA_ERRORS.search(text) else "unknown"
    if _SYSTEM_ERRORS.search(text):
        return "infrastructure"
    return "data" if _DATA_ERRORS.search(text) else "unknown"


def classify_hang(odd: StackGroup | None) -> FaultClass:
    """The kind of a hang, by those who stand apart: stopped, waiting for a device, or without an answer."""
    place = odd.place if odd else ""
    is_machine = place.startswith(("stopped", "waits for a disk", "its node gave no answer"))
    return "infrastructure" if is_machine else "unknown"
