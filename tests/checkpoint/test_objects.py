"""Copies in an object store: a real S3 server, and stores of other kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.checkpoint.download import damages, download
from hpcrun.checkpoint.objects import Copy, list_copies
from hpcrun.checkpoint.store import Patience, Store, open_store
from hpcrun.checkpoint.upload import Sent, upload
from hpcrun.specs.saves import RECORD, Saved
from tests.checkpoint.generations import save
from tests.checkpoint.object_store import CREDENTIALS, Bucket, new_bucket, serving

QUICK = Patience(tries=4, first_pause_s=0.01)
LEAST = 4096
"""Objects of 4 KiB and more, so that small saves have many."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    pytest.importorskip("s3fs", reason="pip install 'hpcrun-slurm[s3]'")
    pytest.importorskip("moto", reason="pip install 'moto[server]'")
    with serving() as found:
        yield found


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return new_bucket(endpoint)


@pytest.fixture
def s3(bucket: Bucket) -> Iterator[Store]:
    with open_store(bucket.url, bucket.endpoint, QUICK) as store:
        yield store


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def send(store: Store, saved: Saved) -> Sent:
    return upload(store, "run-1", saved, least=LEAST)


def only_copy(store: Store) -> Copy:
    copies, unreadable = list_copies(store, "run-1")
    assert not unreadable
    (copy,) = copies
    return copy


def files_of(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


def test_a_save_comes_back_as_it_was(s3: Store, checkpoints: Path, tmp_path: Path) -> None:
    saved = save(checkpoints, 16, files=2)
    sent = send(s3, saved)
    assert (sent.sent_objects, sent.kept_objects, sent.unproved_objects) == (2, 0, 0)
    copy = only_copy(s3)
    assert (copy.problem, copy.saved.level, copy.saved.generation) == (None, "object", saved.generation)
    assert damages(s3, copy) == []
    home = download(s3, copy, tmp_path / "other")
    assert home.path == tmp_path / "other" / "step-00000016"
    assert files_of(home.path) == files_of(saved.path)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["step-00000016"]
    assert RECORD in files_of(home.path)
