"""Times and memory: what people write and read, what Slurm prints, and what Slurm is told.

Seconds are floats with `math.inf` for no limit; memory is in MiB. The `parse_` functions read what a person
wrote and raise UsageError; the `read_` functions read what Slurm printed, with None where it says nothing.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from hpcrun.errors import UsageError

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365.25 * 86400
_SHORT_UNIT_SECONDS = {"d": _DAY, "h": _HOUR, "m": _MINUTE, "s": 1}
_SHORT_TIME = re.compile(
    r"(?=\d)" + "".join(rf"(?:(?P<{unit}>\d{{1,9}}){unit})?" for unit in _SHORT_UNIT_SECONDS), re.I | re.A
)
_SLURM_TIME = re.compile(
    r"(?:(?P<days>\d{1,9})-)?(?P<fields>\d{1,9}(?::\d{1,9}){0,2})(?P<fraction>\.\d+)?", re.A
)
_NO_LIMIT = {"unlimited", "infinite", "-1"}
_TIME_FORMS = "90m, 2h, 1d12h, H:M:S, D-H:M:S or UNLIMITED"

_BINARY = {"": 2**20, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_NUMBER = r"(?P<number>\d{1,18}(?:\.\d{1,18})?)"
_MEMORY = re.compile(_NUMBER + r"(?:(?P<unit>[KMGTP])(?:i?B)?|(?P<bytes>B))?", re.I | re.A)
_SIZE = re.compile(_NUMBER + r"\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?", re.I | re.A)
_PRINTED_MEMORY = re.compile(_NUMBER + r"(?P<unit>[KMGTP]?)B?(?P<per>[nc]?)\+?", re.I | re.A)


class TimeLimit(NamedTuple):
    """A time as a person wrote it, and what to tell that person about it (empty when all is clear)."""

    seconds: float
    warning: str = ""

    @property
    def minutes(self) -> int | None:
        """Whole minutes, rounded up as Slurm does; None for no limit."""
        return None if math.isinf(self.seconds) else math.ceil(self.seconds / _MINUTE)


def parse_time(text: str, where: str = "time") -> TimeLimit:
    """A time limit: Slurm's six forms, UNLIMITED, INFINITE and -1, and `90m`, `2h`, `1d12h`.

    A bare number is minutes, as in Slurm; `where` begins the error's line.
    """
    text = text.strip()
    if text.lower() in _NO_LIMIT:
        return TimeLimit(math.inf)
    sugared = _SHORT_TIME.fullmatch(text)
    if sugared and any(sugared.groups()):
        seconds: float | None = sum(
            int(sugared[unit] or 0) * size for unit, size in _SHORT_UNIT_SECONDS.items()
        )
    else:
        seconds = _slurm_seconds(text) if "." not in text else None
    if seconds is None:
        raise UsageError(f"{where}: {text!r} is not a time; write {_TIME_FORMS}")
    if seconds == 0:
        return TimeLimit(
            math.inf, f"{where}: Slurm takes {text} for no limit at all; write UNLIMITED for that"
        )
    return TimeLimit(seconds, _short_time_warning(text, seconds, where))


def _short_time_warning(text: str, seconds: float, where: str) -> str:
    """M:S looks like hours and minutes; it is neither."""
    if text.count(":") != 1 or "-" in text:
        return ""
    minutes, rest = divmod(int(seconds), _MINUTE)
    amount = f"{minutes} minute{'s' * (minutes != 1)}" + (f" {rest} seconds" if rest else "")
    clear = render_time(seconds)
    return f"{where}: {text} is {amount}; write {text}:00 for hours and minutes, {clear} to be clear"


def _slurm_seconds(text: str) -> float | None:
    """M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for anything else."""
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        return None
    fields = [int(field) for field in match["fields"].split(":")]
    units = [_HOUR, _MINUTE, 1]
    # Behind days come hours; without days a field or two are minutes and seconds.
    sizes = units if match["days"] is not None or len(fields) == 3 else units[1:]
    whole = sum(field * size for field, size in zip(fields, sizes, strict=False))
    return int(match["days"] or 0) * _DAY + whole + float(match["fraction"] or 0)


def parse_slurm_time(text: str) -> float | None:
    """Seconds that Slurm printed, inf for no limit; None where it says no time (N/A, Partition_Limit, …)."""
    text = text.strip()
    if text.lower() in _NO_LIMIT:
        return math.inf
    return _slurm_seconds(text)


def render_time(seconds: float) -> str:
    """What Slurm takes and nobody misreads: HH:MM:SS or D-HH:MM:SS, rounded up; UNLIMITED for inf."""
    if math.isinf(seconds):
        return "UNLIMITED"
    days, rest = divmod(math.ceil(seconds), _DAY)
    clock = f"{rest // _HOUR:02}:{rest % _HOUR // _MINUTE:02}:{rest % _MINUTE:02}"
    return f"{days}-{clock}" if days else clock


def bytes_to_mib(size_bytes: float) -> int:
    """Bytes as whole MiB, rounded up."""
    return math.ceil(size_bytes / 2**20)


def parse_memory(text: str, where: str = "mem") -> int:
    """MiB, rounded up, of `512M`, `1.5G`, `64GiB`, `1000000B`; a bare number is MiB, as in Slurm.

    Units are powers of 1024 in every spelling, as in Slurm. 0 means all the memory of a node.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{where}: {text.strip()!r} is not an amount of memory; write 512M, 1.5G or 64GiB, or 0 for all"
        )
    unit = (match["unit"] or match["bytes"] or "").upper()
    return _exact_mib(match["number"], _BINARY[unit])


def _exact_mib(number: str, unit_bytes: int) -> int:
    """A decimal times a unit in MiB, rounded up without a float in between."""
    whole, _, decimals = number.partition(".")
    scaled = int(whole + decimals) * unit_bytes
    parts_per_mib: int = 10 ** len(decimals) * 2**20
    return -(-scaled // parts_per_mib)


class SlurmMemory(NamedTuple):
    """Memory that Slurm printed: MiB, and what it counts for (`node`, `cpu`, empty where it does not say)."""

    mib: int
    per: str = ""


def parse_slurm_memory(text: str) -> SlurmMemory | None:
    """`8G`, `62.50G`, `64000`, `0n`, `4000Mc`, `64000+`; None for UNLIMITED, N/A and other text."""
    match = _PRINTED_MEMORY.fullmatch(text.strip())
    if match is None:
        return None
    per = {"n": "node", "c": "cpu"}.get(match["per"].lower(), "")
    return SlurmMemory(_exact_mib(match["number"], _BINARY[match["unit"].upper()]), per)


def render_memory(amount_mib: int) -> str:
    """The form that `sbatch --mem` takes: a whole number with a unit."""
    return f"{amount_mib // 1024}G" if amount_mib and amount_mib % 1024 == 0 else f"{amount_mib}M"


def parse_bytes(text: str, where: str) -> int:
    """Bytes of `5GB`, `500MB`, `2GiB`: powers of 1000 without an i, of 1024 with it."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match:
        power = " KMGT".index(match["unit"].upper() or " ")
        size = int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)
    if size < 1:
        raise UsageError(f"{where} {text}: is not a size; write 5GB or 500MB")
    return size


def format_bytes(size_bytes: float) -> str:
    """Bytes for people, in binary units: 512 B, 1.5 KiB, 64 MiB, 1.234 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"


def format_bandwidth(bytes_per_s: float) -> str:
    """Bandwidth for people, decimal as networks and disks are sold: 12.5 GB/s."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def format_duration(seconds: float) -> str:
    """A duration for people, in its two largest units: 0.4 s, 43 s, 12 min 5 s, 1 h 12 min, 7 years."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.01 or seconds <= 0 else f"{seconds * 1e3:.2g} ms"
    if seconds >= 2 * _YEAR:
        return f"{seconds / _YEAR:.3g} years"
    whole = round(seconds)
    units = (("d", _DAY), ("h", _HOUR), ("min", _MINUTE), ("s", 1))
    largest = next(index for index, (_, size) in enumerate(units) if whole >= size)
    parts = []
    for unit, size in units[largest : largest + 2]:
        count, whole = divmod(whole, size)
        parts += [f"{count} {unit}"] if count else []
    return " ".join(parts)
