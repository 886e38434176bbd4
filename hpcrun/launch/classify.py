"""Which kind of fault it was that took an attempt down: what to do about it depends on that."""

from __future__ import annotations

import re
import signal
from typing import Any, Literal

from hpcrun.launch.health.xids import is_of_the_program
from hpcrun.launch.watch.stacks import Group

Kind = Literal["deterministic", "data", "infrastructure", "preemption", "time limit", "unknown"]
"""deterministic: it will happen again; data: in reading them; infrastructure: it is not the job's."""

_MACHINE = re.compile(
    r"CUDA error|CUDA out of memory|uncorrectable|\bECC\b|\bXid\b|NCCL (?:error|WARN)|ncclSystemError"
    r"|ncclRemoteError|Input/output error|Stale file handle|No space left|Disk quota|Cannot allocate memory"
    r"|Transport retry|ibv_|mlx[0-9]_",
    re.IGNORECASE,
)
_DATA = re.compile(r'File ".*/hpcrun/(?:runtime/data|specs/corpus)\.py"|DataLoader worker|in collate\b')
_BY_OTHERS = (signal.SIGKILL, signal.SIGBUS)
"""What nobody sends to himself: memory ran out, a file or a page behind a mapping is gone, an admin."""


def kind_of_crash(record: dict[str, Any] | None, wait_status: int | None = None) -> Kind:
    """The kind of a rank's death, by its own error record, else by how its process ended."""
    if record is None:
        ended_by = (wait_status or 0) & 0x7F
        return "infrastructure" if ended_by in _BY_OTHERS else "unknown"
    said = f"{record.get('message', '')}\n{record.get('traceback', '')}"
    if _MACHINE.search(said):
        return "unknown" if is_of_the_program(said) else "infrastructure"
    return "data" if _DATA.search(said) else "unknown"


def kind_of_hang(odd: Group | None) -> Kind:
    """The kind of a hang, by those who stand apart: stopped, waiting for a device, or without an answer."""
    place = odd.place if odd else ""
    is_machine = place.startswith(("stopped", "waits for a disk", "its node gave no answer"))
    return "infrastructure" if is_machine else "unknown"
