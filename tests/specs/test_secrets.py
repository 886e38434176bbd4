"""Secret files: what is read, what is refused, and that no message holds a value."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.errors import SpecError
from hpcrun.specs.secrets import check_secret_files, read_secrets

VALUE = "s3cr3t-wörd"


@pytest.fixture
def secret(tmp_path: Path) -> Callable[..., Path]:
    """Write a file that holds a secret."""

    def write(data: str | bytes = f"{VALUE}\n", mode: int = 0o600) -> Path:
        path = tmp_path / "key"
        path.unlink(missing_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        path.chmod(mode)
        return path

    return write


def refused(path: Path) -> str:
    """What both faces say about a file."""
    (problem,) = check_secret_files({"TOKEN": str(path)})
    with pytest.raises(SpecError) as caught:
        read_secrets({"TOKEN": str(path)})
    assert caught.value.problems == (problem,)
    assert problem.key == "secrets.TOKEN"
    assert problem.text.startswith(f"{path}: ")
    assert VALUE not in str(problem)
    return problem.text.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (f"{VALUE}\n", VALUE),
        (VALUE, VALUE),
        (f"{VALUE}\r\n", VALUE),
        (f" {VALUE} \n\n", f" {VALUE} \n"),
        ("-----BEGIN KEY-----\nabc\n", "-----BEGIN KEY-----\nabc"),
        ("x" * 65_536, "x" * 65_536),
    ],
)
def test_a_value_is_the_file_without_its_last_line_break(
    data: str, value: str, secret: Callable[..., Path]
) -> None:
    path = secret(data)
    assert check_secret_files({"TOKEN": str(path)}) == []
    assert read_secrets({"TOKEN": str(path)}) == {"TOKEN": value}
    assert read_secrets({"TOKEN": str(secret(data, 0o400))}) == {"TOKEN": value}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_file_that_others_may_use_is_refused(mode: int, secret: Callable[..., Path]) -> None:
    path = secret(mode=mode)
    assert refused(path) == f"has mode {mode:04o}, others than you may use it; run: chmod 600 {path}"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is empty; write the value into it"),
        (b"\n", "is empty; write the value into it"),
        (b" \t\n\n", "holds blanks only; write the value into it"),
        (f"{VALUE}\0".encode(), "holds NUL bytes, which no environment can; it is to hold one value as text"),
        (VALUE.encode("latin-1"), "is not text in UTF-8; it is to hold one value as text"),
        (VALUE.encode() * 6000, "is larger than 64 KiB; it is to hold one value"),
    ],
)
def test_what_no_environment_can_hold_is_refused(data: bytes, text: str, secret: Callable[..., Path]) -> None:
    assert refused(secret(data)) == text


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent").startswith(
        "cannot be read: No such file or directory; write the value"
    )
    assert refused(tmp_path) == "is not a regular file; give a file that holds the value"
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert refused(tmp_path / "pipe") == "is not a regular file; give a file that holds the value"


def test_behind_a_link_the_file_itself_counts(tmp_path: Path, secret: Callable[..., Path]) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret())
    assert read_secrets({"TOKEN": str(link)}) == {"TOKEN": VALUE}
    secret(mode=0o644)
    assert "has mode 0644" in refused(link)


def test_the_file_of_another_user_is_refused(secret: Callable[..., Path]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away; run the tests as root")
    path = secret()
    os.chown(path, 4321, 4321)
    assert refused(path) == "belongs to user 4321, not to you (0); give a file of yours"


def test_every_file_is_looked_at(tmp_path: Path, secret: Callable[..., Path]) -> None:
    good = str(secret())
    found = check_secret_files({"A": str(tmp_path / "a"), "B": good, "C": str(tmp_path / "c")})
    assert [problem.key for problem in found] == ["secrets.A", "secrets.C"]
    assert check_secret_files({}) == []
