"""The place for saves: what it is, whether they fit, how their files are made; and all without `lfs`, too."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.flush.durable_tier import DurableTier
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.lustre.layout import GIB, TIB
from hpcrun.checkpoint.lustre.lfs import LfsClient, LfsError, LustreQuota
from hpcrun.checkpoint.lustre.storage import (
    CheckpointStorage,
    SaveRequirement,
    StoragePlan,
    check_quota_space,
    check_total_space,
    make_storage_plan,
)
from hpcrun.mounts import find_mount, parse_mounts
from hpcrun.process import CompletedCommand
from hpcrun.specs.checkpoint import DurableSpec
from hpcrun.specs.saves import resumable_checkpoints
from tests.checkpoint import lfs_grammar as lfsgrammar
from tests.checkpoint.killed_writer import whole_steps
from tests.checkpoint.loads import load_of
from tests.checkpoint.lustre_stand_in import RAID0, Emulated, main, ost


@pytest.fixture
def lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    emulated = Emulated(tmp_path)
    monkeypatch.setenv("PATH", emulated.path)
    return emulated


@pytest.fixture
def warned() -> list[str]:
    return []


def storage(lustre: Emulated, warned: list[str], **spec: Any) -> CheckpointStorage:
    return CheckpointStorage(
        lustre.mount, DurableSpec.model_validate(spec), warned.append, mountinfo=lustre.mountinfo
    )


def look(lustre: Emulated, save: float = 100, **more: Any) -> StoragePlan:
    """A save of so many GiB, one file a node."""
    spec = DurableSpec.model_validate(more.pop("spec", {}))
    values: dict[str, Any] = {"nodes": 4, "keep": 2, "lfs": LfsClient(timeout_s=30)} | more
    return make_storage_plan(
        lustre.mount / "runs" / "new", spec, save_bytes=int(save * GIB), mountinfo=lustre.mountinfo, **values
    )


def levels(plan: StoragePlan) -> dict[str, str]:
    """The level of each finding, by what it is about."""
    return {one.text.partition(":")[0]: one.level for one in plan.findings}


def test_the_file_system_of_a_path_is_that_of_the_deepest_and_last_mount() -> None:
    text = (
        "21 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 21 0:40 / /lus rw - autofs systemd-1 rw\n"
        "31 21 0:41 / /lus rw,noatime shared:9 master:2 - lustre 10.0.0.1@o2ib:10.0.0.2@o2ib:/fs rw\n"
        "32 21 0:42 / /lus\\040two rw - nfs4 server:/x rw\n"
    )
    assert [mount.kind for mount in parse_mounts(text)] == ["ext4", "autofs", "lustre", "nfs4"]
    assert parse_mounts(text)[3].point == Path("/lus two")
    assert find_mount(Path("/nowhere"), Path("/no/such/file")).kind == ""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/lus/a/b", "lustre"), ("/lustre", "ext4"), ("/lus two/a", "nfs4"), ("/lus", "lustre")],
)
def test_a_path_below_a_mount(tmp_path: Path, path: str, kind: str) -> None:
    file = tmp_path / "mountinfo"
    file.write_text(
        "21 1 254:0 / / rw - ext4 /dev/vda rw\n30 21 0:40 / /lus rw - autofs systemd-1 rw\n"
        "31 21 0:41 / /lus rw - lustre 10.0.0.1@o2ib:/fs rw\n"
        "32 21 0:42 / /lus\\040two rw - nfs4 server:/x rw\n"
    )
    assert find_mount(Path(path), file).kind == kind


def test_a_large_file_is_laid_out_before_its_first_byte_and_the_layout_recorded(
    lustre: Emulated, warned: list[str]
) -> None:
    file = lustre.mount / "data-00002.bin"
    facts = storage(lustre, warned).prepare_file(file, 600 * GIB)
    assert facts["file_system"] == "lustre"
    assert facts["asked"] == ["-c", "8", "-S", "16M", "-i", "-1"]
    assert [one["stripes"] for one in facts["layout"]] == [8]
    assert json.loads(json.dumps(facts))["layout"][0]["stripe_bytes"] == 16 << 20
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (0, 0o600)
    assert warned == []
    assert [call[0] for call in lustre.get("calls")] == ["getstripe", "df", "setstripe", "getstripe"]


def test_a_small_file_keeps_the_layout_of_its_directory_which_is_recorded_too(
    lustre: Emulated, warned: list[str]
) -> None:
    lustre.set(default=[RAID0 | {"end": 1 << 30}, RAID0 | {"stripes": 4}])
    file = lustre.mount / "data-00000.bin"
    facts = storage(lustre, warned).prepare_file(file, 10 * GIB)
    assert (facts["asked"], len(facts["layout"])) == ([], 2)
    assert file.stat().st_mode & 0o777 == 0o600
    assert "progressive layout of the directory stays" in facts["reasons"][0]


def test_a_file_that_exists_is_left_as_it_is(lustre: Emulated, warned: list[str]) -> None:
    file = lustre.mount / "data-00000.bin"
    file.write_bytes(b"bytes")
    facts = storage(lustre, warned).prepare_file(file, 600 * GIB)
    assert "asked" not in facts
    assert facts["layout"]
    assert (file.read_bytes(), warned) == (b"bytes", [])


def test_a_full_ost_is_avoided_and_after_enospc_others_are_taken(lustre: Emulated, warned: list[str]) -> None:
    lustre.set(osts=[ost(0, free=3 * GIB), ost(1), ost(2, free=2 * GIB), *[ost(n) for n in range(3, 8)]])
    place, file = storage(lustre, warned, stripes=2), lustre.mount / "data-00000.bin"
    facts = place.prepare_file(file, 53 * GIB)
    assert facts["layout"][0]["osts"] == (1, 3)
    file.write_bytes(b"some of it")
    again = place.retry_file(file, 53 * GIB)
    assert again is not None
    assert not {1, 3, 0, 2} & set(again["layout"][0]["osts"])
    assert (file.stat().st_size, warned) == (0, [])


def test_where_no_other_ost_has_room_the_file_stays(lustre: Emulated, warned: list[str]) -> None:
    lustre.set(osts=[ost(0), ost(1, free=GIB)])
    place, file = storage(lustre, warned), lustre.mount / "data-00000.bin"
    place.prepare_file(file, 53 * GIB)
    file.write_bytes(b"some of it")
    assert place.retry_file(file, 53 * GIB) is None
    assert file.read_bytes() == b"some of it"


def test_osts_that_fill_up_between_the_look_and_the_making_are_left_out(
    lustre: Emulated, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lustre.set(osts=[ost(0, free=GIB), *[ost(n) for n in range(1, 6)]])
    real, tried = LfsClient.create, list[str]()

    def create(self: LfsClient, file: Path, arguments: Any) -> None:
        # The first OSTs that were chosen take nothing, though nothing was to be seen of that.
        tried.append(arguments[-1])
        if len(tried) == 1:
            raise LfsError("No space left on device", errno.ENOSPC)
        real(self, file, arguments)

    monkeypatch.setattr(LfsClient, "create", create)
    facts = storage(lustre, warned, stripes=2).prepare_file(lustre.mount / "data-00000.bin", 53 * GIB)
    assert (tried, facts["layout"][0]["osts"], warned) == (["1,2", "3,4"], (3, 4), [])


def test_who_may_not_lay_out_files_still_records_the_layout_that_they_get(
    lustre: Emulated, warned: list[str]
) -> None:
    not_allowed(lustre)
    place, file = storage(lustre, warned), lustre.mount / "data-00000.bin"
    facts = place.prepare_file(file, 600 * GIB)
    assert facts == {"file_system": "lustre", "warning": warned[0]}
    file.write_bytes(b"written")
    assert [one["stripes"] for one in place.layout_facts(file)["layout"]] == [1]
    assert len(warned) == 1
    assert "Operation not permitted" in warned[0]


def not_allowed(lustre: Emulated) -> None:
    lustre.set(gids=[os.getgid() + 1])


def says(verb: str, out: str, code: int = 0) -> Any:
    def change(lustre: Emulated) -> None:
        lustre.set(says={verb: {"out": out, "code": code, "err": "lfs: broken\n" if code else ""}})

    return change


def absent(lustre: Emulated) -> None:
    (lustre.mount.parent / "bin" / "lfs").unlink()


def hangs(lustre: Emulated) -> None:
    (lustre.mount.parent / "bin" / "lfs").write_text("#!/bin/sh\nexec sleep 60\n")


FAILURES = [
    not_allowed,
    absent,
    hangs,
    says("getstripe", "something new: 1\n"),
    says("getstripe", "", 22),
    says("df", "no figures\n"),
    says("setstripe", "", 28),
    says("df", "", 5),
]


@pytest.mark.parametrize("break_it", FAILURES)
def test_whatever_lfs_does_saves_go_on_as_on_any_file_system_with_one_warning(
    lustre: Emulated, warned: list[str], break_it: Any
) -> None:
    break_it(lustre)
    place = CheckpointStorage(
        lustre.mount,
        DurableSpec(),
        warned.append,
        lfs=LfsClient(timeout_s=0.3 if break_it is hangs else 30),
        mountinfo=lustre.mountinfo,
    )
    for number in range(3):
        file = lustre.mount / f"data-{number:05d}.bin"
        assert place.prepare_file(file, 600 * GIB)["file_system"] == "lustre"
        file.write_bytes(b"written")
        place.layout_facts(file)
    (line,) = warned
    assert "files of saves get the layout of their directory" in line
    assert "\n" not in line


@pytest.mark.parametrize("break_it", [absent, says("df", "no figures\n"), says("quota", "odd\n")])
def test_a_look_without_lfs_has_one_warning_and_the_figures_of_any_file_system(
    lustre: Emulated, break_it: Any
) -> None:
    break_it(lustre)
    plan = look(lustre, save=0.001)
    assert [one.level for one in plan.findings].count("warning") == 1
    assert {"space", "inodes"} <= set(levels(plan))
    assert plan.refusal is None


def test_elsewhere_than_on_lustre_nothing_is_asked_or_made(lustre: Emulated, warned: list[str]) -> None:
    lustre.mountinfo.write_text("21 1 254:0 / / rw - ext4 /dev/vda rw\n")
    file = lustre.mount / "data-00000.bin"
    assert storage(lustre, warned).prepare_file(file, 600 * GIB) == {"file_system": "ext4"}
    assert not file.exists()
    assert (lustre.get("calls"), warned) == ([], [])
    plan = look(lustre, save=0.001)
    assert (plan.kind, plan.layout, lustre.get("calls")) == ("ext4", None, [])
    assert levels(plan) == {"space": "ok", "inodes": "ok", "quota": "unknown"}


def test_a_look_tells_space_inodes_quotas_and_layout(lustre: Emulated) -> None:
    row = {"row": [0, 0, 8 << 30, 10, 0, 1000]}
    lustre.set(quotas={"-u": row, "-g": {"row": [0] * 6}, "-p": row}, project=4711)
    plan = look(lustre, save=4 * 600)
    assert plan.layout == "lfs setstripe -c 8 -S 16M -i -1"
    assert plan.reasons == ("600 GiB: 8 stripes (OLCF, Orion: file striping)",)
    assert plan.refusal is None
    found = levels(plan)
    assert {"ok"} == set(found.values())
    assert {"space", "inodes", "quota of the user, space", "quota of the project, inodes"} <= set(found)
    text = next(one.text for one in plan.findings if one.text.startswith("space"))
    assert text == "space: 8 TiB free on 8 OSTs, 3 saves of 2.344 TiB need 7.031 TiB"
    assert json.loads(json.dumps(plan.as_json()))["findings"][0]["level"] == "ok"


def test_a_look_warns_and_refuses_where_saves_do_not_fit(lustre: Emulated) -> None:
    assert levels(look(lustre, save=3 * 1024))["space"] == "warning"
    plan = look(lustre, save=9 * 1024)
    assert plan.refusal == "space: 8 TiB free on 8 OSTs, one save needs 9 TiB"
    assert (
        levels(look(lustre, save=3 * 1024, held=1))["space"] == "ok" or look(lustre, held=2).refusal is None
    )
    lustre.set(inodes=10)
    assert look(lustre).refusal == "inodes: 10 free, one save needs 11"
    lustre.set(quotas={"-u": {"row": [900 << 20, 0, 950 << 20, 10, 0, 0]}}, inodes=10**8)
    assert look(lustre).refusal == "quota of the user, space: 50 GiB free, one save needs 100 GiB"


def test_a_pool_without_osts_is_refused_and_a_silent_ost_named(lustre: Emulated) -> None:
    plan = look(lustre, spec={"pool": "flash"})
    assert plan.refusal is not None
    assert plan.refusal.startswith("checkpoint.durable.pool: flash has no OSTs here")
    lustre.set(pools={"flash": [1, 2]}, osts=[ost(0), ost(1), ost(2, state="failing"), ost(3, state="dead")])
    plan = look(lustre, spec={"pool": "flash"})
    assert plan.refusal is None
    assert ("warning", "OST 2 avoided: silent (Input/output error)") in [
        (one.level, one.text) for one in plan.findings
    ]


def test_one_full_ost_is_no_refusal_but_all_of_them_are(lustre: Emulated) -> None:
    lustre.set(osts=[ost(0, free=GIB), *[ost(n) for n in range(1, 8)]])
    assert look(lustre, save=4 * 53).refusal is None
    lustre.set(osts=[ost(n, free=20 * GIB) for n in range(8)])
    assert look(lustre, save=159, nodes=1).refusal == (
        "no OSTs have room for a file of a save; the fullest has 20 GiB left"
    )


def test_quotas_soft_hard_and_inexact() -> None:
    need = SaveRequirement(GIB, 10, 3)

    def found(**values: Any) -> list[tuple[str, str]]:
        row = {
            "used_bytes": 0,
            "soft_bytes": None,
            "hard_bytes": None,
            "used_inodes": 0,
            "soft_inodes": None,
            "hard_inodes": None,
            "is_exact": True,
        }
        return [
            (one.level, one.text) for one in check_quota_space("user", LustreQuota(**(row | values)), need)
        ]

    assert [level for level, _ in found()] == ["ok", "ok"]
    assert found(soft_bytes=2 * GIB)[0] == (
        "warning",
        "quota of the user, space: 2 GiB are exceeded for a grace time only",
    )
    assert found(soft_bytes=4 * GIB)[0][0] == "ok"
    assert found(hard_bytes=2 * GIB)[0][0] == "warning"
    assert found(hard_bytes=GIB, used_bytes=2 * GIB)[0][0] == "refused"
    assert found(hard_inodes=29)[1][0] == "warning"
    assert found(is_exact=False)[-1][0] == "unknown"


def test_a_file_system_that_does_not_count_inodes_says_so() -> None:
    found = os.statvfs_result((4096, 4096, 100, 100, 100, 0, 0, 0, 0, 255))
    assert [
        (one.level, one.text.partition(":")[0])
        for one in check_total_space(found, SaveRequirement(4096, 5, 3))
    ] == [
        ("ok", "space"),
        ("unknown", "inodes"),
    ]


def test_memory_of_a_node_is_no_place_for_durable_saves(lustre: Emulated) -> None:
    lustre.mountinfo.write_text("21 1 0:2 / / rw - tmpfs tmpfs rw\n")
    texts = [one.text for one in look(lustre, save=0.001).findings if one.level == "warning"]
    assert texts == ["tmpfs is memory of this node: it is lost with it"]
    lustre.mountinfo.write_text("")
    assert ("unknown", "which file system this is") in [
        (one.level, one.text) for one in look(lustre, save=0.001).findings
    ]


def test_every_command_line_that_is_given_is_legal(
    lustre: Emulated, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(argv: list[str], *, timeout_s: float) -> CompletedCommand:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = main(str(lustre.mount.parent / "lustre.json"), argv[1:])
        return CompletedCommand(tuple(argv), code, out.getvalue(), "", 0.0)

    monkeypatch.setattr("hpcrun.process.run", run)
    lustre.set(
        pools={"flash": [0, 1, 2]},
        quotas={"-u": {"row": [0] * 6}, "-g": {"row": [0] * 6}, "-p": {"row": [0] * 6}},
        project=7,
    )
    number = 0
    for spec in ({}, {"pool": "flash"}, {"stripes": 3}, {"stripes": 40}, {"pool": "flash", "stripes": 2}):
        for free in (TIB, 30 * GIB):
            lustre.set(osts=[ost(0, free=5 * GIB), *[ost(n, free=free) for n in range(1, 6)]])
            look(lustre, spec=spec)
            for size in (GIB, 70 * GIB, 600 * GIB):
                for writers in (1, 16):
                    number += 1
                    file = lustre.mount / f"data-{number:05d}.bin"
                    storage(lustre, warned, **spec).prepare_file(file, size, 4, writers)
                    storage(lustre, warned, **spec).retry_file(file, size, 4, writers)
    calls = lustre.get("calls")
    assert {call[0] for call in calls} == set(lfsgrammar.LFS_VERBS)
    for call in calls:
        lfsgrammar.parse_lfs_command(call)
    assert warned == []


def tier(lustre: Emulated, **options: Any) -> DurableTier:
    """The durable level on the emulated Lustre, every file striped."""
    spec = DurableSpec(keep_default_below="0")
    place = CheckpointStorage(lustre.mount / "checkpoints", spec, mountinfo=lustre.mountinfo)
    told = {
        "prepare_file": place.prepare_file,
        "retry_file": place.retry_file,
        "layout_facts": place.layout_facts,
    } | options
    return DurableTier(lustre.mount / "checkpoints", keep=2, **told)


@pytest.mark.parametrize("direct", [False, True])
def test_a_committed_save_tells_the_layout_of_its_files(lustre: Emulated, direct: bool) -> None:
    facts = tier(lustre, direct=direct).store(load_of(2, range(2), 2, 0))
    (saved,) = resumable_checkpoints(lustre.mount / "checkpoints")
    told = GenerationReader(saved).manifest.layout["data-00000.bin"]
    assert told["asked"] == ["-c", "1", "-S", "4M", "-i", "-1"]
    assert told["layout"][0]["osts"] == [0]
    assert ("direct_bytes" in told) is direct
    assert facts["layout"]["data-00000.bin"]["file_system"] == "lustre"


def test_of_a_progressive_layout_what_the_file_has_grown_into_is_told(lustre: Emulated) -> None:
    lustre.set(default=[RAID0 | {"end": 4096}, RAID0 | {"end": 1 << 30, "stripes": 2}, RAID0])
    place = CheckpointStorage(lustre.mount, DurableSpec(), mountinfo=lustre.mountinfo)
    hooks: dict[str, Any] = {"prepare_file": place.prepare_file, "layout_facts": place.layout_facts}
    tier(lustre, **hooks).store(load_of(2, range(2), 2, 0))
    (saved,) = resumable_checkpoints(lustre.mount / "checkpoints")
    told = GenerationReader(saved).manifest.layout["data-00000.bin"]
    assert [one["osts"] for one in told["layout"]] == [[0], [1, 2], []]


@pytest.mark.parametrize("direct", [False, True])
def test_an_ost_that_is_full_in_the_middle_of_a_save_is_left_for_another(
    lustre: Emulated, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    real, seen = os.pwrite, list[int]()

    def full(descriptor: int, data: memoryview, position: int) -> int:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        layout = lustre.get("files").get(str(path))
        if layout and layout[0]["osts"] == [0]:
            seen.append(position)
            if len(seen) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    tier(lustre, direct=direct).store(load_of(2, range(2), 2, 0))
    (saved,) = resumable_checkpoints(lustre.mount / "checkpoints")
    told = GenerationReader(saved).manifest.layout["data-00000.bin"]
    assert told["layout"][0]["osts"] == [1]
    assert "OST 0 avoided: out of space in this save" in told["reasons"]
    assert whole_steps(lustre.mount / "checkpoints") == ([2], [])


def test_where_all_osts_are_full_the_save_fails_and_leaves_nothing(
    lustre: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lustre.set(osts=[ost(0)])
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        tier(lustre).store(load_of(2, range(2), 2, 0))
    assert not list((lustre.mount / "checkpoints").rglob("data-*"))
