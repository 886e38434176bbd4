"""Where the files of saves are put on Lustre, and why."""

from __future__ import annotations

import pytest

from hpcrun.checkpoint.lustre.layout import (
    GIB,
    TIB,
    FileRequirement,
    Striping,
    choose_pool,
    plan_striping,
    select_usable_osts,
)
from hpcrun.checkpoint.lustre.lfs import FileLayout, LayoutComponent, LustreTarget
from hpcrun.specs.checkpoint import DurableSpec
from tests.checkpoint import lfs_grammar as lfsgrammar

ONE = FileLayout((LayoutComponent(0, None, 1, 1 << 20, "raid0", None, ()),))
ORION = FileLayout(
    (
        LayoutComponent(0, 256 << 10, 0, 256 << 10, "mdt", None, ()),
        LayoutComponent(256 << 10, 8 << 20, 1, 1 << 20, "raid0", "performance", ()),
        LayoutComponent(8 << 20, 128 * GIB, 1, 1 << 20, "raid0", "capacity", ()),
        LayoutComponent(128 * GIB, None, 8, 1 << 20, "raid0", "capacity", ()),
    )
)


def osts(*free: float, flags: str = "") -> list[LustreTarget]:
    """Targets with so many GiB free."""
    return [LustreTarget("OST", index, 4 * TIB, int(one * GIB), flags) for index, one in enumerate(free)]


def plan(
    size: float,
    targets: list[LustreTarget] | None,
    *,
    default: FileLayout | None = ONE,
    avoid: tuple[int, ...] = (),
    writers: int = 1,
    files: int = 1,
    number: int = 0,
    **spec: object,
) -> Striping:
    need = FileRequirement(int(size * GIB), writers, files, number)
    found = plan_striping(need, DurableSpec.model_validate(spec), default, targets, avoid)
    if found.arguments:
        lfsgrammar.parse_lfs_command(["setstripe", *found.arguments, "/f"])
    return found


def said(striping: Striping) -> str:
    return "; ".join(striping.reasons)


def test_a_file_below_the_threshold_keeps_the_progressive_layout_of_the_site() -> None:
    found = plan(50, osts(*[1000] * 8), default=ORION)
    assert (found.arguments, found.fits, found.pool) == ((), True, "capacity")
    assert "less than keep_default_below (64G): the progressive layout of the directory stays" in said(found)


def test_a_small_file_is_kept_off_an_ost_without_room_though_the_others_have_much() -> None:
    # 53 GB onto one stripe, with one OST almost full: it ended a save with 459 GB free elsewhere.
    found = plan(53, osts(400, 3, 400, 400))
    assert found.arguments[-2:] == ("-o", "0,2,3")
    assert found.fits
    assert "no room" in said(found)
    assert "OST 1 avoided: less than" in said(found)


def test_more_stripes_where_no_ost_has_room_for_a_large_share() -> None:
    found = plan(200, osts(*[60] * 8), stripes=2)
    assert (found.stripes, found.fits) == (4, True)
    assert "4 stripes rather than 2, so that each OST has room" in said(found)
    assert "-o" not in found.arguments


def test_what_fits_nowhere_is_said_and_left_to_the_file_system() -> None:
    found = plan(200, osts(*[20] * 8))
    assert (found.fits, found.osts) == (False, ())
    assert "no choice of 8 OSTs has room for 200 GiB" in said(found)
    assert plan(200, []).fits is False


@pytest.mark.parametrize(
    ("size", "writers", "stripes"),
    [(100, 1, 4), (600, 1, 8), (2 * 1024, 1, 16), (9 * 1024, 1, 64), (20 * 1024, 1, 128), (100, 8, 72)],
)
def test_stripes_by_size_and_writers(size: float, writers: int, stripes: int) -> None:
    found = plan(size, osts(*[4000] * 500), writers=writers)
    assert found.arguments == ("-c", str(stripes), "-S", "16M", "-i", "-1")
    assert found.reasons[0].startswith(f"{size / 1024:.4g} TiB" if size >= 1024 else f"{size} GiB")


def test_stripes_divide_evenly_among_the_writers_of_a_file() -> None:
    assert plan(100, osts(*[4000] * 100), writers=16).stripes == 64
    assert plan(70, osts(*[4000] * 5), writers=4).stripes == 4
    found = plan(70, osts(*[4000] * 30), writers=28)
    assert (found.stripes, "divide evenly among 28 writers" in said(found)) == (14, True)
    assert plan(2, osts(*[4000] * 30), writers=28, keep_default_below="1G").stripes == 7


def test_more_writers_than_osts_get_several_stripes_on_each() -> None:
    found = plan(100, osts(*[4000] * 4), writers=16)
    assert found.arguments[:2] == ("-C", "16")
    assert plan(100, osts(*[4000] * 4), writers=64).arguments[:2] == ("-C", "32")


def test_many_files_at_once_do_not_crowd_the_osts() -> None:
    found = plan(600, osts(*[4000] * 32), files=64)
    assert found.stripes == 4
    assert "64 files at once over 32 OSTs: 4 stripes each, 8 writers on an OST" in said(found)
    assert plan(600, osts(*[4000] * 32), files=512).stripes == 1


def test_never_more_than_the_limit_and_all_osts() -> None:
    found = plan(100, osts(*[4000] * 500), stripes=1000)
    assert (found.stripes, "no more than 450 stripes" in said(found)) == (450, True)
    found = plan(20 * 1024, osts(*[4000] * 12))
    assert (found.stripes, "no more than 12: all OSTs that take files" in said(found)) == (12, True)
    assert plan(100, osts(*[4000] * 4), stripes=8).arguments[:2] == ("-C", "8")


def test_a_pool_of_the_job_or_of_the_directory() -> None:
    found = plan(10, osts(*[4000] * 8), pool="flash")
    assert found.arguments[-2:] == ("-p", "flash")
    assert plan(600, osts(*[4000] * 8), default=ORION).arguments[-2:] == ("-p", "capacity")
    spec = DurableSpec()
    assert [choose_pool(spec, ORION, size) for size in (1 << 20, 1 * GIB)] == ["performance", "capacity"]


def test_targets_with_flags_or_silent_are_avoided_and_degraded_ones_only_if_others_suffice() -> None:
    targets = [
        *osts(100, 100, 100),
        LustreTarget("OST", 3, 1, 1, "N"),
        LustreTarget("OST", 4, 1, 1, "S"),
        LustreTarget("OST", 5, 1, 1, "DR"),
        LustreTarget("OST", 6, 1, 1, "D"),
        LustreTarget("OST", 7, 0, 0, problem="Input/output error"),
    ]
    good, why = select_usable_osts(targets, avoid=(1,))
    assert [one.index for one in good] == [0, 2]
    assert why == [
        "OST 1 avoided: out of space in this save",
        "OST 3 avoided: takes no new files",
        "OST 4 avoided: out of space",
        "OST 5 avoided: read-only",
        "OST 7 avoided: silent (Input/output error)",
        "OST 6 avoided: degraded",
    ]
    assert [one.index for one in select_usable_osts(osts(1, 1, flags="D"))[0]] == [0, 1]


def test_files_are_spread_over_the_osts_that_have_room() -> None:
    targets = osts(3, *[400] * 8)
    chosen = [plan(100, targets, stripes=2, number=number).osts for number in range(5)]
    assert chosen == [(1, 2), (3, 4), (5, 6), (7, 8), (1, 2)]


def test_a_second_try_goes_to_other_osts() -> None:
    found = plan(10, osts(*[400] * 4), avoid=(0, 1))
    assert found.osts
    assert not set(found.osts) & {0, 1}
    assert plan(10, osts(*[400] * 2), avoid=(0, 1)).fits is False


def test_without_figures_the_default_stays_or_the_size_decides() -> None:
    assert plan(50, None, default=None).arguments == ()
    found = plan(600, None, default=None)
    assert found.arguments == ("-c", "8", "-S", "16M", "-i", "-1")
    assert (found.fits, found.reasons[0]) == (None, "space on the OSTs is unknown")


@pytest.mark.parametrize(("text", "kept"), [("0", False), ("1.5G", True), ("2048M", True), ("1G", False)])
def test_the_threshold_is_read_in_powers_of_1024(text: str, kept: bool) -> None:
    assert (plan(1.4, osts(*[400] * 8), keep_default_below=text).arguments == ()) is kept
