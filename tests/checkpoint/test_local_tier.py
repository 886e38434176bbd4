"""The node's own disk: sealed bytes as they are, whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpcrun.checkpoint.flush.local_tier import LocalTier
from hpcrun.checkpoint.tier import InventoryEntry
from hpcrun.errors import SiteError
from tests.checkpoint.loads import load_of, stamp_of


def steps(found: list[InventoryEntry]) -> list[int]:
    return [one.stamp.step for one in found]


def test_the_sealed_bytes_are_what_lies_there(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path), "sweep/3", "n1")
    load = load_of(2, (0, 1), 2, 0)
    facts = tier.store(load)
    assert facts["path"].startswith(str(tmp_path / "sweep+3" / "n1" / "step-00000002."))
    (held,) = LocalTier(str(tmp_path), "sweep/3", "n1").holdings()
    assert (held.stamp, held.tier, held.node) == (load.stamp, "local", "n1")
    for one, sealed in zip(held.parts, load.parts, strict=True):
        assert one.at % 4096 == 0
        assert one.part == sealed.part
        assert Path(one.path).read_bytes()[one.at :][: one.part.size_bytes] == sealed.image


def test_variables_and_home_are_known_and_unknown_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert LocalTier("$NVME/x", "r", "n").folder == tmp_path / "x" / "r" / "n"
    assert LocalTier("~/x", "r", "n").folder == tmp_path / "home" / "x" / "r" / "n"
    with pytest.raises(SiteError, match=r"checkpoint.local: \$NO_SUCH/x: names a variable that is not set"):
        LocalTier("$NO_SUCH/x", "r", "n")


def test_what_is_let_go_is_gone_and_so_is_what_nobody_knows(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path), "r", "n")
    for step in (2, 4, 6):
        tier.store(load_of(step, (0,), 1, 0))
    (tier.folder / "step-00000003.00ff.bin").write_bytes(b"x")
    tier.retain([stamp_of(step, 1).generation for step in (4, 6)])
    assert steps(tier.holdings()) == [4, 6]
    assert len(list(tier.folder.iterdir())) == 4


@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "record"])
def test_what_is_not_whole_is_not_held(tmp_path: Path, damage: str) -> None:
    tier = LocalTier(str(tmp_path), "r", "n")
    tier.store(load_of(2, (0,), 1, 0))
    path = Path(tier.store(load_of(4, (0,), 1, 0))["path"])
    match damage:
        case "truncated":
            os.truncate(path, path.stat().st_size - 1)
        case "longer":
            os.truncate(path, path.stat().st_size + 4096)
        case "missing":
            path.unlink()
        case _:
            record = path.with_suffix(".json")
            record.write_text(record.read_text().replace('"position": 32', '"position": 33'))
    assert steps(tier.holdings()) == [2]


def test_without_space_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LocalTier(str(tmp_path), "r", "n")
    tier.store(load_of(2, (0, 1), 2, 0))
    before = sorted(tier.folder.iterdir())
    true, calls = os.pwrite, []

    def full(descriptor: int, data: bytes, position: int) -> int:
        calls.append(position)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(descriptor, data, position)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            tier.store(load_of(4, (0, 1), 2, 0))
    assert sorted(tier.folder.iterdir()) == before
    (tier.folder / "step-00000003.00ff.aside").write_bytes(b"of a killed worker")
    tier.store(load_of(6, (0, 1), 2, 0))
    assert steps(tier.holdings()) == [2, 6]
    assert len(list(tier.folder.iterdir())) == 4


def test_when_nothing_is_kept_the_folder_goes_too(tmp_path: Path) -> None:
    one, other = (LocalTier(str(tmp_path), "r/1", node) for node in ("n1", "n2"))
    one.store(load_of(2, range(2), 2, 0))
    other.store(load_of(2, range(2), 2, 0))
    one.retain([])
    assert [path.name for path in (tmp_path / "r+1").iterdir()] == ["n2"]
    other.retain([])
    assert list(tmp_path.iterdir()) == []
