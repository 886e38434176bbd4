"""What `lfs` is asked and answers: parsers, the grammar table, and the emulated Lustre that obeys it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from hpcrun.checkpoint.lustre.lfs import (
    LfsClient,
    LfsError,
    LustreTarget,
    parse_getstripe,
    parse_lfs_df,
    parse_lfs_project,
    parse_lfs_quota,
)
from tests.checkpoint import lfs_grammar as lfsgrammar
from tests.checkpoint.lustre_stand_in import RAID0, Emulated, main, ost

DATA = Path(__file__).parents[1] / "data" / "lustre"


def text(name: str) -> str:
    return (DATA / f"{name}.txt").read_text(encoding="utf-8")


def test_a_plain_layout_with_its_pool_and_objects() -> None:
    layout = parse_getstripe(text("getstripe-plain"))
    (one,) = layout.components
    assert (one.start, one.end, one.stripes, one.stripe_bytes) == (0, None, 3, 16 << 20)
    assert (one.pool, one.osts, layout.osts) == ("flash", (5, 0, 12), (0, 5, 12))
    assert not layout.is_progressive


def test_a_progressive_layout_that_begins_on_the_metadata_server() -> None:
    layout = parse_getstripe(text("getstripe-progressive"))
    assert [(one.start, one.end, one.stripes, one.pool) for one in layout.components] == [
        (0, 256 << 10, 0, None),
        (256 << 10, 8 << 20, 1, "performance"),
        (8 << 20, 128 << 30, 1, "capacity"),
        (128 << 30, None, 8, "capacity"),
    ]
    assert layout.components[0].pattern == "mdt"
    assert layout.osts == (7, 30)
    assert layout.is_progressive
    assert str(layout).startswith("on the metadata server up to 256 KiB; 1 stripe of 1024 KiB in pool perf")


def test_components_as_a_list_and_one_that_extends_itself() -> None:
    layout = parse_getstripe(text("getstripe-listed"))
    assert [one.end for one in layout.components] == [1 << 30, None]
    assert layout.components[1].stripe_bytes == 64 << 20


def test_the_default_of_a_directory() -> None:
    (one,) = parse_getstripe(text("getstripe-directory")).components
    assert (one.stripes, one.pool, one.osts) == (-1, "capacity", ())


@pytest.mark.parametrize("said", ["", "has no stripe info\n", "a: [1\n", "lcm_entry_count: 0\n", "- 1\n"])
def test_what_is_no_layout_is_refused_in_one_line(said: str) -> None:
    with pytest.raises(LfsError, match="getstripe -y"):
        parse_getstripe(said)


def test_targets_with_their_flags_and_those_that_are_silent() -> None:
    targets = parse_lfs_df(text("df"), unit=1024)
    assert [(one.kind, one.index, one.flags) for one in targets] == [
        ("MDT", 0, ""),
        ("OST", 0, ""),
        ("OST", 1, "D"),
        ("OST", 10, "DR"),
        ("OST", 11, "NS"),
        ("OST", 12, ""),
        ("OST", 13, ""),
        ("OST", 14, ""),
    ]
    assert targets[1] == LustreTarget("OST", 0, 3865470566 << 10, 614150144 << 10)
    assert [one.problem for one in targets[-2:]] == ["inactive device", "Resource temporarily unavailable"]
    assert [(one.index, one.free) for one in parse_lfs_df(text("df-inodes"))] == [
        (0, 47600),
        (1, 47610),
        (0, 87900),
    ]
    with pytest.raises(LfsError, match="no target"):
        parse_lfs_df("filesystem_summary: 1 1 1 1% /lus\n")


def test_quotas_over_their_limit_wrapped_and_inexact() -> None:
    quota = parse_lfs_quota(text("quota"))
    assert (quota.used_bytes, quota.soft_bytes, quota.hard_bytes) == (1 << 30, 900 << 30, 1000 << 30)
    assert (quota.used_inodes, quota.soft_inodes, quota.hard_inodes) == (917504, None, 1 << 20)
    assert quota.is_exact
    wrapped = parse_lfs_quota(text("quota-wrapped"))
    assert (wrapped.used_bytes, wrapped.hard_bytes, wrapped.used_inodes) == (10200224 << 10, None, 17724)
    assert not wrapped.is_exact
    with pytest.raises(LfsError, match="no table"):
        parse_lfs_quota("Disk quotas for usr ada (uid 1001):\n")


def test_the_project_of_a_directory() -> None:
    assert parse_lfs_project("  4711 P /lus/testfs/climate\n") == 4711
    assert parse_lfs_project("    0 - /lus/testfs\n") == 0
    with pytest.raises(LfsError, match="no project"):
        parse_lfs_project("lfs: unknown command\n")


LEGAL = [
    "setstripe -c 4 -S 16M -i -1 /f",
    "setstripe -C -2 -S 1048576 -p flash /f",
    "setstripe --stripe-count=-1 --stripe-size=64K /f",
    "setstripe -S 64 /f",
    "setstripe -S 4M -o 1,3-5 -c 4 -i 3 /f",
    "setstripe -E 256K -L mdt -E 128G -c 1 -E eof -c 8 -p testfs.capacity /f",
    "setstripe -E -1 -z 64M -c 2 /f",
    "getstripe -dy /d",
    "df -l -p capacity /d",
    "df -li /d",
    "quota -q -u ada /d",
    "quota -p 4711 /d",
    "project -d /d",
]
ILLEGAL = {
    "": "no verb",
    "migrate -c 4 /f": "no verb",
    "setstripe /f": "needs one of",
    "setstripe -c 4": "one absolute path",
    "setstripe -c 4 f": "one absolute path",
    "setstripe -c 4 /f /g": "one absolute path",
    "setstripe -c": "-c needs a value",
    "setstripe -c four /f": "not from -1 to 2000",
    "setstripe -c 2001 /f": "not from -1 to 2000",
    "setstripe -C -33 /f": "not from -32 to 2000",
    "setstripe -c 2 -C 4 /f": "only one of -c -C",
    "setstripe -S 100000 /f": "multiple of 64 KiB",
    "setstripe -S 32 /f": "multiple of 64 KiB",
    "setstripe -S 16MB /f": "not a size",
    "setstripe -c 3 -o 1,2 /f": "does not agree",
    "setstripe -o 1,1 /f": "different OSTs",
    "setstripe -o 5-4 /f": "different OSTs",
    "setstripe -o 1,2 -i 3 /f": "not in -o",
    "setstripe -p a_name_that_is_too_long /f": "name of a pool",
    "setstripe -c 1 -z 64M /f": "-z needs -E",
    "setstripe -E 1G -E 512M /f": "must rise",
    "setstripe -E eof -E 1G /f": "must rise",
    "setstripe -c 1 -E 1G /f": "belong to no component",
    "getstripe --yaml=1 /f": "takes no value",
    "getstripe -x /f": "none of",
    "df -H /d": "none of",
    "quota /d": "needs one of",
    "quota -u ada -g staff /d": "only one of",
    "quota -p climate /d": "no project",
}


@pytest.mark.parametrize("line", LEGAL)
def test_the_table_takes_what_the_manual_allows(line: str) -> None:
    assert lfsgrammar.parse_lfs_command(line.split()).verb == line.split()[0]


@pytest.mark.parametrize(("line", "why"), ILLEGAL.items())
def test_the_table_and_the_stand_in_refuse_the_rest(
    line: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=why):
        lfsgrammar.parse_lfs_command(line.split())
    lustre = Emulated(tmp_path)
    assert main(str(tmp_path / "lustre.json"), line.split()) == 4
    assert capsys.readouterr().err.startswith("error: ")
    assert lustre.get("files") == {}


def test_every_option_and_exit_code_names_its_source() -> None:
    for name, verb in lfsgrammar.LFS_VERBS.items():
        assert verb.source, name
        assert {0, 1, 4} <= set(verb.exit_codes), name
        assert all(option.source.startswith("Documentation/") for option in verb.options), name


@pytest.fixture
def lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    emulated = Emulated(tmp_path, [ost(0), ost(1, flags="D"), ost(2, state="failing"), ost(3, state="dead")])
    monkeypatch.setenv("PATH", emulated.path)
    return emulated


@pytest.mark.process
def test_a_file_is_laid_out_and_its_layout_read_back(lustre: Emulated) -> None:
    file = lustre.mount / "data"
    LfsClient().create(file, ["-c", "2", "-S", "16M", "-i", "-1"])
    (one,) = LfsClient().layout(file).components
    assert (one.stripes, one.stripe_bytes, one.osts) == (2, 16 << 20, (0, 1))
    with pytest.raises(LfsError, match="stripe already set") as refused:
        LfsClient().create(file, ["-c", "2"])
    assert refused.value.number == errno.EEXIST


@pytest.mark.process
def test_a_dead_target_is_not_waited_for_and_a_failing_one_is_listed(lustre: Emulated) -> None:
    targets = LfsClient(timeout_s=30).space(lustre.mount)
    assert [(one.kind, one.index, one.problem) for one in targets] == [
        ("MDT", 0, None),
        ("OST", 0, None),
        ("OST", 1, None),
        ("OST", 2, "Input/output error"),
    ]
    # Without the lazy option the stand-in hangs, as lfs does.
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["lfs", "df", str(lustre.mount)], env={"PATH": lustre.path}, timeout=0.5, check=False)


@pytest.mark.process
def test_a_command_that_gives_no_answer_is_ended(lustre: Emulated, tmp_path: Path) -> None:
    (tmp_path / "bin" / "lfs").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(LfsError, match="gave no answer in"):
        LfsClient(timeout_s=0.2).default_layout(lustre.mount)


@pytest.mark.process
def test_a_quota_of_a_server_that_is_silent_is_read_in_part(lustre: Emulated) -> None:
    lustre.set(quotas={"-u": {"row": [5, 0, 100, 1, 0, 0], "inexact": True, "fails": True}})
    quota = LfsClient().quota(lustre.mount, "user", os.getuid())
    assert (quota.used_bytes, quota.is_exact) == (5 << 10, False)
    with pytest.raises(LfsError, match="not enabled") as off:
        LfsClient().quota(lustre.mount, "group", 1)
    assert off.value.number == errno.ESRCH


@pytest.mark.process
def test_a_refused_command_and_a_missing_one_are_told(
    lustre: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LfsError, match=r"setstripe -S 100000.*multiple of 64 KiB"):
        LfsClient().create(lustre.mount / "data", ["-S", "100000"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(LfsError, match="no `lfs` on PATH"):
        LfsClient().default_layout(lustre.mount)


@pytest.mark.process
def test_the_default_of_a_directory_may_be_progressive(lustre: Emulated) -> None:
    mdt = RAID0 | {"pattern": "mdt", "size": 1 << 20, "end": 1 << 20}
    lustre.set(default=[mdt, RAID0 | {"end": 1 << 30}, RAID0 | {"stripes": 8}])
    layout = LfsClient().default_layout(lustre.mount)
    assert [one.end for one in layout.components] == [1 << 20, 1 << 30, None]
