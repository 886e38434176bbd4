"""Copies in an object store: a real S3 server, and stores of other kinds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.format import ChunkSpec, DamagedError
from hpcrun.checkpoint.objects.catalogue import (
    ObjectCopy,
    generation_key_prefix,
    list_generation_copies,
    list_whole_copies,
    parse_object_index,
    prune_object_copies,
    run_key_prefix,
    split_into_objects,
)
from hpcrun.checkpoint.objects.download import (
    download_copy,
    download_generation,
    find_copy_damages,
    find_whole_save,
)
from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.store import ListedObject, ObjectStore, RetryPolicy
from hpcrun.checkpoint.objects.upload import UploadResult, upload_save
from hpcrun.errors import SiteError, UsageError
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, read_saved_checkpoints, render_commit_record
from tests.checkpoint.generations import save
from tests.checkpoint.object_store import ROOT, Bucket

RUN = "run-1"
LEAST = 4096
"""Objects of 4 KiB and more, so that small saves have many."""
BIG = [[ChunkSpec("model.big", "float32", (512, 40), (0, 0), (512, 40))]]
"""A save of 80 KiB."""


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture(params=["memory", "file"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    """Stores that tell no checksums."""
    with open_object_store(f"{request.param}://{tmp_path}/store/deeper") as store:
        yield store


def send(store: ObjectStore, saved: SavedCheckpoint) -> UploadResult:
    return upload_save(store, RUN, saved, least=LEAST)


def only_copy(store: ObjectStore) -> ObjectCopy:
    copies, unreadable = list_generation_copies(store, RUN)
    assert not unreadable
    (copy,) = copies
    return copy


def files_of(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


def check_round_trip(
    store: ObjectStore, checkpoints: Path, elsewhere: Path, saved: SavedCheckpoint, sent: int
) -> None:
    done = send(store, saved)
    assert (done.sent_objects, done.kept_objects) == (sent, 0)
    copy = only_copy(store)
    assert (copy.problem, copy.saved.tier, copy.saved.generation) == (None, "object", saved.generation)
    assert find_copy_damages(store, copy) == []
    assert find_whole_save(copy, elsewhere) is None
    home = download_copy(store, copy, elsewhere)
    assert home.path == elsewhere / saved.path.name
    assert find_whole_save(copy, elsewhere) == home
    assert files_of(home.path) == files_of(saved.path)
    assert [path.name for path in elsewhere.iterdir()] == [saved.path.name]
    again = send(store, saved)
    assert (again.sent_objects, again.kept_objects) == (0, sent)


def test_a_save_comes_back_as_it_was(s3: ObjectStore, checkpoints: Path, tmp_path: Path) -> None:
    saved = save(checkpoints, 16, files=3, ranks=3)
    check_round_trip(s3, checkpoints, tmp_path / "other", saved, 3)


def test_stores_without_checksums_do_as_well(plain: ObjectStore, checkpoints: Path, tmp_path: Path) -> None:
    saved = save(checkpoints, 16, shares=BIG)
    check_round_trip(plain, checkpoints, tmp_path / "other", saved, 20)


def test_large_objects_go_in_pieces_and_the_server_proves_the_whole(
    s3: ObjectStore, bucket: Bucket, checkpoints: Path, tmp_path: Path
) -> None:
    shares = [[ChunkSpec("model.big", "uint8", (40 << 20,), (0,), (40 << 20,))]]
    saved = save(checkpoints, 1, shares=shares)
    done = upload_save(s3, RUN, saved)
    assert (done.sent_objects, done.unproved_objects) == (1, 0)
    posts = bucket.requests("POST", "data-00000.bin")
    assert len(posts) == 2, "one begins, one ends"
    assert len(bucket.requests("PUT", "data-00000.bin")) == 3
    home = download_copy(s3, only_copy(s3), tmp_path / "other")
    assert files_of(home.path) == files_of(saved.path)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 8191, 8192, 123_457, 1 << 20, (1 << 24) + 5, 1 << 28])
def test_objects_are_neither_small_nor_large_and_make_up_the_file(size: int) -> None:
    extents = split_into_objects(size, LEAST)
    assert [one.number for one in extents] == list(range(len(extents)))
    position = 0
    for one in extents:
        assert one.start == position
        assert min(size, LEAST) <= one.size_bytes <= 8 * LEAST
        position += one.size_bytes
    assert position == size


def test_after_a_kill_only_what_is_missing_is_sent(
    s3: ObjectStore, bucket: Bucket, checkpoints: Path, tmp_path: Path
) -> None:
    saved = save(checkpoints, 16, shares=BIG)
    bucket.tell("stall?after=5")
    program = Path(__file__).with_name("interrupted_upload.py")
    with subprocess.Popen(
        [sys.executable, str(program), bucket.url, bucket.endpoint, str(checkpoints)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as uploader:
        for _ in range(300):
            if len(bucket.requests("PUT")) > 5 and len(bucket.all_keys()) == 5:
                break
            time.sleep(0.05)
        uploader.kill()
    there = set(bucket.all_keys())
    assert len(there) == 5
    assert list_generation_copies(s3, RUN) == ([], [])
    bucket.tell("reset")
    done = send(s3, saved)
    assert (done.sent_objects, done.kept_objects) == (15, 5)
    sent = {path.removeprefix(f"/{bucket.name}/") for path in bucket.requests("PUT", ".bin.")}
    assert len(sent) == 15
    assert not sent & there
    assert files_of(download_copy(s3, only_copy(s3), tmp_path / "other").path) == files_of(saved.path)


def test_pieces_that_a_killed_upload_has_left_are_removed(
    s3: ObjectStore, bucket: Bucket, checkpoints: Path
) -> None:
    saved = save(checkpoints, 16)
    place = f"/{bucket.name}/runs/here/{generation_key_prefix(RUN, 16, saved.generation)}"
    bucket.ask("POST", f"{place}data-00000.bin.00000.{'0' * 16}?uploads")
    assert b"<UploadId>" in bucket.ask("GET", f"/{bucket.name}?uploads")
    send(s3, saved)
    assert b"<UploadId>" not in bucket.ask("GET", f"/{bucket.name}?uploads")


@pytest.mark.parametrize("checked", [True, False])
def test_an_object_with_other_bytes_is_sent_again(
    s3: ObjectStore, bucket: Bucket, checkpoints: Path, checked: bool
) -> None:
    saved = save(checkpoints, 16, shares=BIG)
    send(s3, saved)
    key = bucket.only(".bin.00007.")
    bucket.put(key, bytes(len(bucket.get(key))), checked=checked)
    bucket.tell("reset")
    done = send(s3, saved)
    assert len(bucket.requests("GET", ".bin.")) == (0 if checked else 1)
    assert (done.sent_objects, done.kept_objects) == (1, 19)
    assert find_copy_damages(s3, only_copy(s3)) == []


def test_what_the_store_has_damaged_is_found_by_reading_back_and_by_download(
    s3: ObjectStore, bucket: Bucket, checkpoints: Path, tmp_path: Path
) -> None:
    send(s3, save(checkpoints, 16, shares=BIG))
    key = bucket.only(".bin.00007.")
    data = bucket.get(key)
    bucket.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    copy = only_copy(s3)
    assert copy.problem is None, "sizes cannot show it"
    expected = f"{bucket.url}/{key.removeprefix('runs/here/')}: its bytes do not match their hash"
    assert find_copy_damages(s3, copy) == [expected]
    with pytest.raises(DamagedError, match=r"00007.*its bytes do not match their hash"):
        download_copy(s3, copy, tmp_path / "other")
    assert read_saved_checkpoints(tmp_path / "other") == ([], [])
    # The store is put right: what was whole is not fetched again.
    bucket.put(key, data)
    bucket.tell("reset")
    download_copy(s3, copy, tmp_path / "other")
    assert len(bucket.requests("GET", ".bin.")) < 20
    assert [one.step for one in read_saved_checkpoints(tmp_path / "other")[0]] == [16]


@pytest.mark.parametrize("part", [".bin.00003.", "data-00000.json", "manifest.json"])
def test_what_is_missing_is_named(s3: ObjectStore, bucket: Bucket, checkpoints: Path, part: str) -> None:
    send(s3, save(checkpoints, 16, shares=BIG))
    bucket.delete(bucket.only(part))
    copy = only_copy(s3)
    assert copy.problem is not None
    assert any("is missing" in damage for damage in find_copy_damages(s3, copy))
    assert list_whole_copies(bucket.url, RUN, bucket.endpoint) == []
    with pytest.raises(DamagedError, match="is missing"):
        download_copy(s3, copy, checkpoints.with_name("other"))


def test_damaged_small_objects_are_told_apart(s3: ObjectStore, bucket: Bucket, checkpoints: Path) -> None:
    saved = save(checkpoints, 16)
    send(s3, saved)
    manifest, index = bucket.only("manifest.json"), bucket.only("data-00000.json")
    whole = bucket.get(index)
    bucket.put(index, whole.replace(b'"file": 0', b'"file": 1'))
    assert find_copy_damages(s3, only_copy(s3))[0].endswith("is not the index of this file, or is damaged")
    bucket.put(index, whole)
    bucket.put(manifest, bucket.get(manifest).replace(b"float32", b"float64"))
    assert find_copy_damages(s3, only_copy(s3))[0].endswith("does not match the hash in the commit record")
    record = bucket.only(COMMIT_RECORD)
    bucket.put(record, bucket.get(record).replace(b'"step": 16', b'"step": 17'))
    copies, (unreadable,) = list_generation_copies(s3, RUN)
    assert copies == []
    assert unreadable.problem == f"{COMMIT_RECORD} does not match the hash in it"


def test_without_its_record_it_does_not_exist(s3: ObjectStore, bucket: Bucket, checkpoints: Path) -> None:
    send(s3, save(checkpoints, 16))
    bucket.delete(bucket.only(COMMIT_RECORD))
    assert list_generation_copies(s3, RUN) == ([], [])


def test_a_record_of_another_generation_proves_nothing(
    s3: ObjectStore, bucket: Bucket, checkpoints: Path
) -> None:
    one, other = (save(checkpoints, step) for step in (16, 17))
    for saved in (one, other):
        send(s3, saved)
    record = bucket.get(bucket.only(f"{one.generation}/{COMMIT_RECORD}"))
    bucket.put(bucket.only(f"{other.generation}/{COMMIT_RECORD}"), record)
    copies, (unreadable,) = list_generation_copies(s3, RUN)
    assert [copy.saved.step for copy in copies] == [16]
    assert unreadable.problem == f"{COMMIT_RECORD} is the record of another generation"


def test_a_damaged_save_is_not_copied(s3: ObjectStore, bucket: Bucket, checkpoints: Path) -> None:
    saved = save(checkpoints, 16)
    path = saved.path / "data-00000.bin"
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="a damaged save is not copied"):
        send(s3, saved)
    assert bucket.all_keys() == []


def test_two_who_send_the_same_generation_do_no_harm(
    s3: ObjectStore, checkpoints: Path, tmp_path: Path
) -> None:
    saved = save(checkpoints, 16, shares=BIG)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(send, s3, saved) for _ in range(2)]
        assert sum(one.result().sent_objects for one in both) >= 20
    assert files_of(download_copy(s3, only_copy(s3), tmp_path / "other").path) == files_of(saved.path)


@pytest.mark.parametrize("status", [503, 500, 400, 502, 429])
def test_a_busy_store_is_asked_again(s3: ObjectStore, bucket: Bucket, checkpoints: Path, status: int) -> None:
    bucket.tell(f"busy?count=3&method=PUT&status={status}")
    done = send(s3, save(checkpoints, 16))
    assert done.sent_objects == 1
    assert len(bucket.requests("PUT")) == 4 + 3
    assert find_copy_damages(s3, only_copy(s3)) == []


def test_a_store_that_stays_busy_gets_no_record(s3: ObjectStore, bucket: Bucket, checkpoints: Path) -> None:
    bucket.tell("busy?count=1000&method=PUT")
    with pytest.raises(SiteError, match=r"reduce your request rate.*\(tried 4 times\)"):
        send(s3, save(checkpoints, 16))
    assert bucket.all_keys() == []


def test_a_thousand_copies_are_listed_by_their_records_alone(plain: ObjectStore, checkpoints: Path) -> None:
    saved = save(checkpoints, 1)
    for step in range(1, 1001):
        one = replace(saved, step=step, generation=f"{step:032x}")
        place = generation_key_prefix(RUN, step, one.generation)
        plain.write(f"{place}{COMMIT_RECORD}", render_commit_record(one).encode())
        plain.write(f"{place}manifest.json", b"")
    copies, broken = list_generation_copies(plain, RUN)
    assert [copy.saved.step for copy in copies] == list(range(1, 1001))
    assert {copy.problem for copy in copies} == {"data-00000.json is missing"}
    assert broken == []
    assert [copy.stamp.step for copy in list_generation_copies(plain, RUN, newest=3)[0]] == [998, 999, 1000]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_reading_is_as_patient(s3: ObjectStore, bucket: Bucket, checkpoints: Path, method: str) -> None:
    saved = save(checkpoints, 16)
    send(s3, saved)
    bucket.tell(f"busy?count=2&method={method}")
    assert find_copy_damages(s3, only_copy(s3)) == []
    assert send(s3, saved).kept_objects == 1


def test_a_store_that_says_nothing_is_given_up(bucket: Bucket, checkpoints: Path) -> None:
    bucket.tell("stall?after=0")
    impatient = RetryPolicy(max_attempts=2, first_pause_s=0.01, response_timeout_s=1.0)
    with open_object_store(bucket.url, bucket.endpoint, impatient) as store:
        with pytest.raises(SiteError, match=r"cannot be reached \(tried 2 times\): (Read|Connect) timeout"):
            send(store, save(checkpoints, 16))
        bucket.tell("reset")
        assert list_generation_copies(store, RUN) == ([], [])


def test_listing_is_one_listing_and_a_record_each(s3: ObjectStore, bucket: Bucket, checkpoints: Path) -> None:
    for step in (1, 2, 3):
        send(s3, save(checkpoints, step, files=2))
    bucket.tell("reset")
    assert [copy.saved.step for copy in list_generation_copies(s3, RUN)[0]] == [1, 2, 3]
    assert len(bucket.requests("GET")) == 1 + 3
    assert bucket.requests("HEAD") == []


def test_more_keys_than_one_answer_holds(s3: ObjectStore, bucket: Bucket, checkpoints: Path) -> None:
    for number in range(1001):
        bucket.put(f"runs/here/{RUN}/step-00000001.{'a' * 32}/data-00000.bin.{number:05d}.{'0' * 16}", b"")
    send(s3, save(checkpoints, 16))
    bucket.tell("reset")
    assert only_copy(s3).saved.step == 16
    assert len(bucket.requests("GET")) == 2 + 1


def test_the_newest_copies_stay_and_so_does_what_is_on_its_way(
    s3: ObjectStore, bucket: Bucket, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        send(s3, save(checkpoints, step))
    place = f"runs/here/{RUN}/step"
    old, ahead = f"{place}-00000002.{'b' * 32}/manifest.json", f"{place}-00000009.{'c' * 32}/manifest.json"
    strange = f"{place}-00000001.not-ours/manifest.json"
    for key in (old, ahead, strange):
        bucket.put(key, b"{}")
    assert [copy.saved.step for copy in prune_object_copies(s3, RUN, 2)] == [1]
    assert [copy.saved.step for copy in list_generation_copies(s3, RUN)[0]] == [2, 3]
    assert {old, ahead, strange} <= set(bucket.all_keys()), "it may be on its way"
    # Our clock says nothing of the store's: only what has been added there shows how time goes.
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert prune_object_copies(s3, RUN, 2) == []
    assert old in bucket.all_keys()
    listed = s3.list

    def two_days_later(prefix: str) -> dict[str, ListedObject]:
        found = listed(prefix)
        later = {
            key: one._replace(changed=(one.changed or 0.0) + 2 * 24 * 3600) for key, one in found.items()
        }
        return {key: later[key] if "step-00000003" in key else one for key, one in found.items()}

    monkeypatch.setattr(s3, "list", two_days_later)
    assert [copy.saved.step for copy in prune_object_copies(s3, RUN, 1)] == [2]
    left = set(bucket.all_keys())
    assert {ahead, strange} <= left
    assert old not in left
    assert prune_object_copies(s3, RUN, 1) == []
    assert only_copy(s3).problem is None


def test_a_damaged_copy_does_not_count_as_kept(s3: ObjectStore, bucket: Bucket, checkpoints: Path) -> None:
    for step in (1, 2):
        send(s3, save(checkpoints, step))
    (newest,) = [key for key in bucket.all_keys() if "step-00000002" in key and "manifest" in key]
    bucket.delete(newest)
    assert prune_object_copies(s3, RUN, 1) == []
    assert [(one.saved.step, one.problem is None) for one in list_generation_copies(s3, RUN)[0]] == [
        (1, True),
        (2, False),
    ]


def test_plain_stores_forget_too(plain: ObjectStore, checkpoints: Path) -> None:
    for step in (1, 2):
        send(plain, save(checkpoints, step))
    assert [copy.saved.step for copy in prune_object_copies(plain, RUN, 1)] == [1]
    assert all("step-00000002." in key for key in plain.list(f"{RUN}/"))


@pytest.mark.parametrize("run_id", ["", "..", "../x", "a/../../b b", "a\nb", ".hidden", "a?b", "a#b", "-x"])
def test_a_run_id_is_no_path(run_id: str) -> None:
    with pytest.raises(UsageError, match="is not a run's id that can be part of a key"):
        run_key_prefix(run_id)


def test_a_run_of_a_sweep_has_a_place_of_its_own() -> None:
    assert run_key_prefix("sweep-1/0") == "sweep-1+0/"


@pytest.mark.parametrize("name", ["../../etc/passwd", "data-00001.bin.00000.0000000000000000", "/etc/passwd"])
def test_an_index_leads_to_nothing_else(name: str) -> None:
    told = {"generation": "0" * 32, "file": 0, "objects": [[name, 0, 1, 0, "0" * 16]]}
    told["check"] = xxh3_64_hexdigest(json.dumps(told, sort_keys=True).encode())
    with pytest.raises(DamagedError, match="does not belong there"):
        parse_object_index(json.dumps(told).encode(), "0" * 32, 0)


def test_a_generation_is_brought_home_by_its_id(
    plain: ObjectStore, checkpoints: Path, tmp_path: Path
) -> None:
    saved = save(checkpoints, 16)
    send(plain, saved)
    assert [one.stamp.generation for one in list_whole_copies(plain.url, RUN)] == [saved.generation]
    for _ in range(2):
        home = download_generation(plain.url, None, RUN, saved.generation, tmp_path / "other")
        assert files_of(home.path) == files_of(saved.path)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["step-00000016"]
    with pytest.raises(DamagedError, match="has no copy of generation 0000"):
        download_generation(plain.url, None, RUN, "0" * 32, tmp_path / "other")


def test_a_save_that_stands_in_the_way_is_set_aside(s3: ObjectStore, checkpoints: Path) -> None:
    saved = save(checkpoints, 16)
    send(s3, saved)
    (saved.path / "data-00000.bin").write_bytes(b"")
    home = download_copy(s3, only_copy(s3), checkpoints)
    assert home.path == saved.path
    assert [one.generation for one in read_saved_checkpoints(checkpoints)[0]] == [saved.generation]
    assert len(list(checkpoints.glob("damaged-step-00000016.*"))) == 1
