"""Saves of format 1 are read as what others have written is: nothing that stands in them is run."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpcrun.errors import SiteError, UsageError
from hpcrun.runtime import torchformat
from hpcrun.runtime.direct_checkpoint import load_weights
from hpcrun.specs.records import write_json
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, read_saved_checkpoints

STATE = {"model.a": torch.arange(6.0).reshape(2, 3), "optimizer.b": torch.ones(4)}


@pytest.fixture
def old(tmp_path: Path) -> SavedCheckpoint:
    path = tmp_path / "step-00000003"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(dict(STATE), checkpoint_id=path, no_dist=True)
    write_json(
        path / COMMIT_RECORD, {"format_version": 1, "step": 3, "position": 30, "world_size": 1, "attempt": 1}
    )
    (saved,) = read_saved_checkpoints(tmp_path)[0]
    return saved


def test_it_is_still_read(old: SavedCheckpoint) -> None:
    assert torchformat.stored_shapes(old) == {"model.a": (2, 3), "optimizer.b": (4,)}
    found = load_weights(old)
    assert found.keys() == {"a"}
    assert torch.equal(found["a"], STATE["model.a"])


class Harm:
    """Makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "read", [torchformat.stored_shapes, load_weights, lambda old: torchformat.load(old, {})]
)
def test_a_list_of_tensors_that_is_more_than_that_is_refused_and_not_run(
    read: Any, old: SavedCheckpoint, tmp_path: Path
) -> None:
    (old.path / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with pytest.raises(UsageError, match=r"\.metadata: is refused: it names posix\.mkdir"):
        read(old)
    assert not (tmp_path / "harm").exists()


def test_one_that_is_cut_short_is_damaged(old: SavedCheckpoint) -> None:
    os.truncate(old.path / ".metadata", 40)
    with pytest.raises(SiteError, match=r"\.metadata: is damaged"):
        torchformat.stored_shapes(old)
