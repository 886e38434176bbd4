"""Stand-ins for Slurm's commands: they answer as they are told, and note how they were called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Fake = Callable[..., Path]
"""A command's name and its replies, to the file in which its calls are noted."""


def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Make PATH a folder that has stand-ins only, and what puts one there.

    It answers its first call with the first reply, and so on, the last one for good. A reply is what it
    prints; one that begins with `!` goes to stderr, with exit code 1.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(name: str, *replies: str) -> Path:
        log = tmp_path / f"{name}.log"
        log.write_text("", encoding="utf-8")
        for number, reply in enumerate(replies, 1):
            (tmp_path / f"{name}.{number}").write_text(reply, encoding="utf-8")
        command = folder / name
        command.write_text(
            f"#!/bin/bash\nprintf '%s ' \"$@\" >>{log}; echo >>{log}\nenv -0 >{log}.env\n"
            f"number=$(wc -l <{log}); (( number <= {len(replies)} )) || number={len(replies)}\n"
            f"reply=$(<{tmp_path}/{name}.$number)\n"
            'if [[ $reply == !* ]]; then printf "%s\\n" "${reply#!}" >&2; exit 1; fi\n'
            'printf "%s\\n" "$reply"\n',
            encoding="utf-8",
        )
        command.chmod(0o755)
        return log

    return put


def calls(log: Path) -> list[str]:
    """The words of each call."""
    return [line.strip() for line in log.read_text(encoding="utf-8").splitlines()]


def environment(log: Path) -> dict[str, str]:
    """The environment of the last call."""
    entries = Path(f"{log}.env").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)
