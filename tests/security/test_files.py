"""Shared places: nothing is followed, waited for, read without end, or removed that is not ours."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from hpcrun.files import OwnedDirectory, UntrustedFileError, read_regular
from hpcrun.specs.records import JsonLineReader, read_json, write_atomically
from tests.security.users import ATTACKER, VICTIM, as_user, in_namespace, needs_root


def test_only_regular_files_are_read_and_none_without_end(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"x" * 100)
    assert read_regular(plain, 100) == b"x" * 100
    with pytest.raises(UntrustedFileError, match="larger than"):
        read_regular(plain, 99)
    (tmp_path / "link").symlink_to(plain)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/socket")
        for name in ("link", "pipe", "folder", "socket"):
            with pytest.raises(UntrustedFileError, match=f"{name}: is "):
                read_regular(tmp_path / name)
            with pytest.raises(UntrustedFileError):
                read_json(tmp_path / name)
            with pytest.raises(UntrustedFileError):
                JsonLineReader(tmp_path / name).read()
    assert read_regular(tmp_path / "link", follow=True) == b"x" * 100
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0b"])
def test_names_never_climb(tmp_path: Path, name: str) -> None:
    with OwnedDirectory.below(tmp_path) as folder:
        for use in (folder.folder, folder.read, folder.unlink, lambda one: folder.write_whole(one, b"")):
            with pytest.raises(UntrustedFileError, match="not a name of one file"):
                use(name)


def test_a_folder_writes_reads_and_removes(tmp_path: Path) -> None:
    with OwnedDirectory.below(tmp_path, "a", "b", make=True) as folder:
        assert folder.status().st_mode & 0o777 == 0o700
        folder.write_whole("one", b"1")
        folder.write_whole("one", b"22")
        assert folder.read("one") == b"22"
        assert folder.names() == ["one"]
        assert folder.size_bytes() == 2
        os.link(tmp_path / "a/b/one", tmp_path / "a/b/two")
        with pytest.raises(UntrustedFileError, match="not a file of yours alone"):
            folder.read("two")
        assert folder.unlink("two")
        assert not folder.unlink("two")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "a/link").symlink_to(tmp_path / "kept")
    (tmp_path / "a/loose").mkdir()
    (tmp_path / "a/loose").chmod(0o777)
    with OwnedDirectory.below(tmp_path) as folder:
        assert not folder.remove_tree("a")
        assert (tmp_path / "a/loose").is_dir()
        assert not (tmp_path / "a/b").exists()
        (tmp_path / "a/loose").chmod(0o700)
        assert folder.remove_tree("a")
        assert folder.remove_tree("never")
    assert (tmp_path / "kept/file").exists()


def test_a_level_that_becomes_a_link_meanwhile_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with OwnedDirectory.below(tmp_path, "mine", make=True) as folder:
        (tmp_path / "mine").rename(tmp_path / "moved")
        (tmp_path / "mine").symlink_to(tmp_path / "kept")
        folder.write_whole("file", b"x")
        with pytest.raises(UntrustedFileError, match="mine: is not a directory"):
            OwnedDirectory.below(tmp_path, "mine")
    assert not list((tmp_path / "kept").iterdir())
    assert (tmp_path / "moved/file").read_bytes() == b"x"


def test_a_whole_file_is_written_over_no_planted_name(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / f".record.{os.getpid()}").symlink_to(target)
    threads = [
        threading.Thread(target=write_atomically, args=(tmp_path / "record", f"{number}\n"))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() == "kept"
    assert (tmp_path / "record").read_text() in {f"{number}\n" for number in range(8)}


@needs_root
@pytest.mark.process
def test_what_another_user_has_made_is_neither_used_nor_removed() -> None:
    def attack() -> None:
        os.umask(0)
        Path("/tmp/shared/hpcrun").mkdir(parents=True)
        Path("/tmp/shared/hpcrun/planted").touch()

    def be_attacked() -> None:
        with OwnedDirectory.below(Path("/tmp/shared")) as shared:
            with pytest.raises(UntrustedFileError, match=f"belongs to user {ATTACKER}"):
                shared.folder("hpcrun", make=True)
            assert not shared.remove_tree("hpcrun")

    def body() -> None:
        as_user(ATTACKER, attack)
        as_user(VICTIM, be_attacked)
        assert Path("/tmp/shared/hpcrun/planted").exists()

    in_namespace(body)
