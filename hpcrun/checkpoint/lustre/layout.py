"""How a file of a save is laid out over Lustre's object storage targets (OSTs), and why.

Pure: from what the file system says of itself to the words of `lfs setstripe`. A layout is fixed before the
first byte. Small files keep what the site gives; large ones are striped by size and by how many write them;
no file is put where it does not fit: one full OST ends a save though all the others have room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcrun.checkpoint.lustre.lfs import FileLayout, LustreTarget
from hpcrun.specs.checkpoint import DurableSpec
from hpcrun.units import format_bytes

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
MAX_PLANNED_STRIPES = 450
"""OLCF asks for no more on Orion, which has 1349 OSTs (docs.olcf.ornl.gov, Orion, file striping)."""
MAX_WRITERS_PER_OST = 8
"""512 files at once on 32 OSTs, 16 each, crawled on LUMI-G and not on Orion (ornladios/ADIOS2#4621)."""
_MAX_STRIPES_PER_OST = 32
"""Stripes of one file on an OST (lfs-setstripe(1), -C)."""
_MARGIN = 1.1
"""An OST must have this much more than is put on it: others write too."""
_LARGE, _LARGE_STRIPE, _SMALL_STRIPE = GIB, 16 * MIB, 4 * MIB
"""OLCF stripes large files in 16 MiB; 4 MiB is what Lustre gives."""


class StripingRule(NamedTuple):
    """What a site advises for files from a size on."""

    least_bytes: int
    is_shared: bool | None
    """For files that several processes write, that one writes, or (None) both."""
    stripes: int
    source: str


_OLCF = "OLCF, Orion: file striping"
_NERSC = "NERSC, Perlmutter scratch: one shared file"
_WIKI = "wiki.lustre.org, Lustre Striping Best Practices: one client"
STRIPING_RULES = (
    StripingRule(16 * TIB, None, 128, _OLCF),
    StripingRule(8 * TIB, None, 64, _OLCF),
    StripingRule(TIB, None, 16, _OLCF),
    StripingRule(512 * GIB, None, 8, _OLCF),
    StripingRule(100 * 10**9, True, 72, _NERSC),
    StripingRule(10 * 10**9, True, 24, _NERSC),
    StripingRule(10**9, True, 8, _NERSC),
    StripingRule(GIB, False, 4, _WIKI),
)


@dataclass(frozen=True)
class FileRequirement:
    """A file that will be written."""

    size_bytes: int
    writers: int = 1
    """Processes that write to it at the same time."""
    files: int = 1
    """How many such files are written at the same time, itself among them."""
    number: int = 0
    """Which of them it is: they are spread over the OSTs by it."""


@dataclass(frozen=True)
class Striping:
    """How a file is to be laid out."""

    arguments: tuple[str, ...]
    """Of `lfs setstripe`; none: as the directory has it."""
    stripes: int | None
    stripe_bytes: int | None
    pool: str | None
    osts: tuple[int, ...]
    """Those that it is put on; empty where the file system chooses."""
    fits: bool | None
    """Whether the OSTs have room for it; None: unknown."""
    reasons: tuple[str, ...]


def choose_pool(spec: DurableSpec, default: FileLayout | None, size_bytes: int) -> str | None:
    """The pool in which a file of this size will mostly lie: the job's, else the directory's."""
    if spec.pool is not None or default is None:
        return spec.pool
    return max(
        default.components,
        key=lambda component: _bytes_in_component(component.start, component.end, size_bytes),
    ).pool


def select_usable_osts(
    osts: Sequence[LustreTarget], avoid: Collection[int] = ()
) -> tuple[list[LustreTarget], list[str]]:
    """The OSTs that take new files, and in words why others are avoided; degraded ones only if need be."""
    why: dict[str, list[int]] = {}
    good, degraded = list[LustreTarget](), list[LustreTarget]()
    for ost in osts:
        if ost.index in avoid:
            why.setdefault("out of space in this save", []).append(ost.index)
        elif ost.problem is not None:
            why.setdefault(f"silent ({ost.problem})", []).append(ost.index)
        elif problems := [words for flag, words in _UNUSABLE_FLAGS.items() if flag in ost.flags]:
            why.setdefault(", ".join(problems), []).append(ost.index)
        elif "D" in ost.flags:
            degraded.append(ost)
        else:
            good.append(ost)
    if good and degraded:
        why["degraded"] = [ost.index for ost in degraded]
    reasons = [f"OST {_format_ranges(indices)} avoided: {words}" for words, indices in why.items()]
    return (good or degraded), reasons


_UNUSABLE_FLAGS = {"N": "takes no new files", "R": "read-only", "S": "out of space", "I": "out of inodes"}


def plan_striping(
    need: FileRequirement,
    spec: DurableSpec,
    default: FileLayout | None,
    osts: Sequence[LustreTarget] | None,
    avoid: Collection[int] = (),
) -> Striping:
    """How to lay out a file; `osts` are those of its pool (None: unknown), `avoid` have failed it already."""
    pool = choose_pool(spec, default, need.size_bytes)
    good, reasons = (
        select_usable_osts(osts, avoid) if osts is not None else (None, ["space on the OSTs is unknown"])
    )
    below = _parse_bytes(spec.keep_default_below)
    if spec.stripes is None and spec.pool is None and need.size_bytes < below and not avoid:
        room = _default_layout_fits(need.size_bytes, default, good)
        size = f"{format_bytes(need.size_bytes)} are less than keep_default_below ({spec.keep_default_below})"
        if room is not False:
            kept = f": {default}" if default else ""
            kind = "progressive layout" if default and default.is_progressive else "layout"
            reasons.append(f"{size}: the {kind} of the directory stays{kept}")
            return Striping((), None, None, pool, (), room, tuple(reasons))
        reasons.append(f"{size}, but an OST that the layout of the directory could take has no room for it")
    count, overstriped, why = _choose_stripe_count(need, spec, len(good) if good is not None else None)
    reasons += why
    if good is None:
        return _make_striping(need, count, overstriped, pool, (), None, reasons)
    return _fit_to_free_space(need, count, overstriped, pool, good, bool(avoid), reasons)


def _parse_bytes(text: str) -> int:
    """Bytes of 64G or 1.5T; the spec has seen to the form."""
    power = "KMGT".find(text[-1]) + 1
    return int(float(text.rstrip("KMGT")) * 1024**power)


def _bytes_in_component(start: int, end: int | None, size: int) -> int:
    """How much of a file of this size lies in a component."""
    return max(0, min(size, size if end is None else end) - start)


def _default_layout_fits(
    size: int, default: FileLayout | None, good: Sequence[LustreTarget] | None
) -> bool | None:
    """Whether each OST that may be given to the file has room for its share."""
    if default is None or good is None:
        return None
    if not good:
        return False
    shares = [
        _bytes_in_component(component.start, component.end, size)
        / (component.stripes if component.stripes > 0 else len(good) if component.stripes else 1)
        for component in default.components
        if "mdt" not in component.pattern
    ]
    return max(shares, default=0) * _MARGIN <= min(ost.free for ost in good)


def _choose_stripe_count(
    need: FileRequirement, spec: DurableSpec, osts: int | None
) -> tuple[int, bool, list[str]]:
    """(stripes, whether several on an OST, reasons), before anybody looks at free space."""
    most = min(MAX_PLANNED_STRIPES, osts or MAX_PLANNED_STRIPES)
    if spec.stripes is not None:
        count = min(spec.stripes, MAX_PLANNED_STRIPES)
        why = [f"durable.stripes: {spec.stripes}"]
        if count < spec.stripes:
            why.append(f"no more than {MAX_PLANNED_STRIPES} stripes")
        return count, osts is not None and count > osts, why
    if osts and need.writers > osts:
        per_ost = min(MAX_WRITERS_PER_OST, _MAX_STRIPES_PER_OST)
        count = min(need.writers, per_ost * osts, MAX_PLANNED_STRIPES)
        return count, count > osts, [f"{need.writers} writers over {osts} OSTs: several stripes on an OST"]
    count, why = 1, ["no rule asks for more than one stripe"]
    for rule in STRIPING_RULES:
        applies = rule.is_shared is None or rule.is_shared == (need.writers > 1)
        if applies and need.size_bytes >= rule.least_bytes and rule.stripes > count:
            count, why = (
                rule.stripes,
                [f"{format_bytes(need.size_bytes)}: {rule.stripes} stripes ({rule.source})"],
            )
    if count > most:
        count = most
        why.append(f"no more than {most}: {'all OSTs that take files' if osts == most else 'the limit'}")
    if need.writers > 1 and (even := _balance_stripes(count, need.writers)) != count:
        count = even
        why.append(f"{even} stripes divide evenly among {need.writers} writers")
    if osts and need.files * count > MAX_WRITERS_PER_OST * osts:
        count = max(1, MAX_WRITERS_PER_OST * osts // need.files)
        each = -(-need.files * count // osts)
        why.append(
            f"{need.files} files at once over {osts} OSTs: {count} stripes each, {each} writers on an OST"
        )
    return count, False, why


def _balance_stripes(count: int, writers: int) -> int:
    """At most as many stripes, so that each writer has as many OSTs, or each OST as many writers."""
    if count >= writers:
        return count - count % writers
    return max(divisor for divisor in range(1, count + 1) if writers % divisor == 0)


def _fit_to_free_space(
    need: FileRequirement,
    count: int,
    overstriped: bool,
    pool: str | None,
    good: Sequence[LustreTarget],
    must_choose: bool,
    reasons: list[str],
) -> Striping:
    """Other stripes, or chosen OSTs, where what is free asks for it."""
    if overstriped and good:
        share = need.size_bytes / count * -(-count // len(good)) * _MARGIN
        choice = (count, share) if all(ost.free >= share for ost in good) else None
    else:
        choice = _stripes_with_room(need.size_bytes, count, good)
    if choice is None:
        reasons.append(f"no choice of {len(good)} OSTs has room for {format_bytes(need.size_bytes)}")
        return _make_striping(need, count, overstriped, pool, (), False, reasons)
    first, (count, share) = count, choice
    roomy = [ost for ost in good if ost.free >= share]
    if count != min(first, len(good)) and not overstriped:
        reasons.append(f"{count} stripes rather than {first}, so that each OST has room for its share")
    # Targets with a flag the file system avoids by itself, and it balances better than anybody from outside.
    if overstriped or (len(roomy) == len(good) and not must_choose):
        return _make_striping(need, count, overstriped, pool, (), True, reasons)
    if len(roomy) < len(good):
        small = [ost.index for ost in good if ost not in roomy]
        reasons.append(f"OST {_format_ranges(small)} avoided: less than {format_bytes(share)} free")
    at = need.number * count
    ring = sorted(ost.index for ost in roomy)
    chosen = sorted({ring[(at + step) % len(ring)] for step in range(count)})
    reasons.append(f"on OST {_format_ranges(chosen)} of the {len(ring)} that have room")
    return _make_striping(need, count, False, pool, tuple(chosen), True, reasons)


def _stripes_with_room(size: int, max_count: int, good: Sequence[LustreTarget]) -> tuple[int, float] | None:
    """(stripes, what an OST needs for one): as many as wanted, else more, else fewer; None: all too many."""
    most = min(len(good), MAX_PLANNED_STRIPES)
    max_count = min(max_count, most)
    for count in (*range(max(1, max_count), most + 1), *range(max_count - 1, 0, -1)):
        share = size / count * _MARGIN
        if sum(ost.free >= share for ost in good) >= count:
            return count, share
    return None


def _make_striping(
    need: FileRequirement,
    count: int,
    overstriped: bool,
    pool: str | None,
    osts: tuple[int, ...],
    fits: bool | None,
    reasons: Sequence[str],
) -> Striping:
    size = _LARGE_STRIPE if need.size_bytes >= _LARGE else _SMALL_STRIPE
    words = ["-C" if overstriped else "-c", str(count), "-S", f"{size // MIB}M"]
    if osts:
        # They are of the pool already; a pool besides them is not taken by every version.
        words += ["-o", ",".join(map(str, osts))]
    else:
        words += ["-i", "-1", *(["-p", pool] if pool else [])]
    return Striping(tuple(words), count, size, pool, osts, fits, tuple(reasons))


def _format_ranges(numbers: Sequence[int]) -> str:
    """1-3,7 of 1, 2, 3, 7."""
    ordered, pieces = sorted(numbers), list[list[int]]()
    for number in ordered:
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)
