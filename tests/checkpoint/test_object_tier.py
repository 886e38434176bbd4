"""What can be wrong with a store before a byte is sent, and the object tier as checkpoint workers use it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.objects.catalogue import list_generation_copies
from hpcrun.checkpoint.objects.download import find_copy_damages
from hpcrun.checkpoint.objects.object_tier import ObjectTier
from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.store import ObjectStore, RetryPolicy
from hpcrun.checkpoint.tier import CheckpointId, NodeShards, SealedPart
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.specs.checkpoint import ObjectSpec
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint
from tests.checkpoint.generations import save
from tests.checkpoint.object_store import CREDENTIALS, Bucket

QUICK = RetryPolicy(max_attempts=2, first_pause_s=0.01)


def words_of(url: str, endpoint: str | None = None) -> str:
    """The one line that a person gets."""
    with pytest.raises(HpcrunError) as found, open_object_store(url, endpoint, QUICK) as store:
        store.check()
    told = str(found.value)
    assert "\n" not in told
    assert not any(secret in told for secret in (CREDENTIALS["AWS_SECRET_ACCESS_KEY"], "hunter2"))
    return told


def test_a_bucket_that_is_missing(bucket: Bucket) -> None:
    told = words_of("s3://no-such-bucket-here/x", bucket.endpoint)
    assert told.startswith(f"s3://no-such-bucket-here/x at {bucket.endpoint}: there is no bucket")


def test_an_endpoint_where_nobody_listens(bucket: Bucket) -> None:
    assert "cannot be reached (tried 2 times)" in words_of(bucket.url, "http://127.0.0.1:9")


def test_no_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert "no credentials were found; set AWS_PROFILE" in words_of(bucket.url, bucket.endpoint)


def test_a_profile_that_is_not_there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "nobody" in words_of(bucket.url, bucket.endpoint)


def test_credentials_that_are_refused(bucket: Bucket) -> None:
    bucket.tell("refuse?code=InvalidAccessKeyId")
    told = words_of(bucket.url, bucket.endpoint)
    assert "refused: no such key; are these the right credentials for this bucket?" in told


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("s3://me:hunter2@bucket/x", None),
        ("s3://bucket/x", "https://me:hunter2@store.example"),
        ("s3://bucket/x?secret=hunter2", None),
    ],
)
def test_credentials_have_no_place_in_a_url(url: str, endpoint: str | None) -> None:
    assert "credentials belong into the environment" in words_of(url, endpoint)


@pytest.mark.parametrize("url", ["nothing", "s3://", "://x", "s3://bucket/../x", "file:///a/./b"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UsageError):
        open_object_store(url)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(known._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "pip install 'hpcrun-slurm[s3]'" in words_of("s3://bucket/x")
    assert "wibble:// needs a package" in words_of("wibble://bucket/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert "pip install 'hpcrun-slurm[s3]'" in words_of("file:///somewhere")


def loads_of(saved: SavedCheckpoint, shares: Sequence[Sequence[int]]) -> list[NodeShards]:
    """What each node's worker has in memory of a save, by the numbers of its parts."""
    with GenerationReader(saved) as generation:
        parts = generation.manifest.parts
    stamp = CheckpointId(saved.generation, saved.step, saved.position, saved.world_size, saved.attempt)
    loads = []
    for numbers in shares:
        sealed = []
        for number in numbers:
            part = parts[number]
            data = (saved.path / f"data-{part.file:05d}.bin").read_bytes()
            image = memoryview(data[part.start : part.start + part.size_bytes])
            sealed.append(SealedPart(number, part, image, "/dev/shm/slot"))
        loads.append(NodeShards(stamp, tuple(sealed)))
    return loads


def tier(bucket: Bucket, checkpoints: Path, patience_s: float = 0.0, keep: int = 2) -> ObjectTier:
    spec = ObjectSpec(url=bucket.url, endpoint=bucket.endpoint, keep=keep)
    return ObjectTier(spec, "run-1", checkpoints, patience_s=patience_s)


def test_each_node_sends_its_own_file_and_the_one_with_part_0_commits(
    s3: ObjectStore, bucket: Bucket, tmp_path: Path
) -> None:
    saved = save(tmp_path, 16, files=2, ranks=4)
    first, second = loads_of(saved, [(0, 1), (2, 3)])
    with pytest.raises(SiteError, match=r"data-00001\.json is missing; its node has not sent all"):
        tier(bucket, tmp_path).store(first)
    assert list_generation_copies(s3, "run-1") == ([], [])
    facts = tier(bucket, tmp_path).store(second)
    assert (facts["sent_objects"], "committed" in facts) == (1, False)
    assert list_generation_copies(s3, "run-1") == ([], [])
    facts = tier(bucket, tmp_path).store(first)
    assert (facts["sent_objects"], facts["kept_objects"], facts["committed"]) == (0, 1, True)
    ((copy,), _) = list_generation_copies(s3, "run-1")
    assert find_copy_damages(s3, copy) == []
    for name in ("data-00000.bin", "data-00001.bin"):
        assert bucket.get(bucket.only(f"{name}.00000.")) == (saved.path / name).read_bytes()
    assert bucket.get(bucket.only(COMMIT_RECORD)) == (saved.path / COMMIT_RECORD).read_bytes()


def test_a_save_that_is_not_in_the_run_directory_is_not_copied(bucket: Bucket, tmp_path: Path) -> None:
    saved = save(tmp_path / "a", 16)
    (load,) = loads_of(saved, [(0, 1)])
    save(tmp_path / "b", 16)
    with pytest.raises(SiteError, match=f"has no save of step 16, generation {saved.generation}"):
        tier(bucket, tmp_path / "b").store(load)
    assert bucket.all_keys() == []


def test_the_station_keeps_so_many_copies(s3: ObjectStore, bucket: Bucket, tmp_path: Path) -> None:
    removed = []
    for step in (1, 2, 3):
        (load,) = loads_of(save(tmp_path, step), [(0, 1)])
        removed.append(tier(bucket, tmp_path, keep=2).store(load)["removed_steps"])
    assert removed == [[], [], [1]]
    assert [copy.saved.step for copy in list_generation_copies(s3, "run-1")[0]] == [2, 3]
    assert tier(bucket, tmp_path).holdings() == ()


def test_a_file_that_was_cut_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    saved = save(tmp_path, 16)
    (load,) = loads_of(saved, [(0, 1)])
    os.truncate(saved.path / "data-00000.bin", 100)
    with pytest.raises(SiteError, match=r"data-00000.bin: 100 bytes are at hand, the record has"):
        tier(bucket, tmp_path).store(load)
    assert bucket.all_keys() == []


def test_a_store_that_cannot_be_used_is_the_site_s_fault(tmp_path: Path) -> None:
    (load,) = loads_of(save(tmp_path, 16), [(0, 1)])
    with pytest.raises(SiteError, match="credentials belong"):
        ObjectTier(ObjectSpec(url="s3://me:x@bucket/x"), "run-1", tmp_path, patience_s=0.0).store(load)
