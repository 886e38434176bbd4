"""Saves that ranks write themselves lie on Lustre as those of the checkpoint workers do."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.lustre.storage import CheckpointStorage
from hpcrun.errors import SiteError
from hpcrun.runtime import data_files
from hpcrun.runtime.control import LoneControl
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
from hpcrun.specs.checkpoint import DurableSpec
from hpcrun.specs.saves import resumable_checkpoints
from tests.checkpoint.lustre_stand_in import Emulated, ost

STATE = {"model.x": torch.arange(1000.0)}
WIDE = DurableSpec(keep_default_below="0", stripes=2)


@pytest.fixture
def lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    emulated = Emulated(tmp_path)
    monkeypatch.setenv("PATH", emulated.path)
    monkeypatch.setattr(
        data_files, "CheckpointStorage", partial(CheckpointStorage, mountinfo=emulated.mountinfo)
    )
    return emulated


def save(root: Path) -> dict[str, Any]:
    """Save a step; what its manifest says of its one data file."""
    DirectCheckpointer(root, LoneControl(), attempt=1, keep=1, durable=WIDE).save(2, 8, STATE)
    (saved,) = resumable_checkpoints(root)
    with GenerationReader(saved) as generation:
        found: dict[str, Any] = generation.manifest.layout["data-00000.bin"]
    loaded = {"model.x": torch.zeros(1000)}
    DirectCheckpointer(root, LoneControl(), attempt=2, keep=1).restore(loaded, {"model.x": (1000,)})
    assert torch.equal(loaded["model.x"], STATE["model.x"])
    return found


def fill_once(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> list[int]:
    """The file system has no room, so many times."""
    true, left = vars(data_files)["write_part"], [0] * times

    def full(*words: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(*words, **options)

    monkeypatch.setattr(data_files, "write_part", full)
    return left


def test_files_are_laid_out_before_their_first_byte_and_the_layout_recorded(lustre: Emulated) -> None:
    facts = save(lustre.mount / "checkpoints")
    assert facts["file_system"] == "lustre"
    assert facts["asked"][:2] == ["-c", "2"]
    assert [one["stripes"] for one in facts["layout"]] == [2]


def test_a_file_on_a_full_target_is_written_again_on_others(
    lustre: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = fill_once(monkeypatch)
    facts = save(lustre.mount / "checkpoints")
    assert left == []
    assert [call[0] for call in lustre.get("calls")].count("setstripe") == 2
    first, again = [call for call in lustre.get("calls") if call[0] == "setstripe"]
    assert first != again
    assert facts["asked"] == again[1:-1]


def test_where_no_other_target_has_room_the_save_fails_as_a_whole(
    lustre: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    lustre.set(osts=[ost(0, free=1 << 20), ost(1, free=1 << 20)])
    fill_once(monkeypatch, 2)
    with pytest.raises(SiteError, match=r"rank 0 cannot write step 2: .*No space left"):
        save(lustre.mount / "checkpoints")
    assert list((lustre.mount / "checkpoints").iterdir()) == []


def test_without_lfs_the_save_is_made_and_says_what_was_wrong(
    lustre: Emulated, capsys: pytest.CaptureFixture[str]
) -> None:
    (lustre.mount.parent / "bin" / "lfs").unlink()
    facts = save(lustre.mount / "checkpoints")
    assert "files of saves get the layout of their directory" in facts["warning"]
    assert capsys.readouterr().err.count("files of saves get the layout of their directory") == 1


def test_elsewhere_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert save(tmp_path / "checkpoints").keys() == {"file_system"}
