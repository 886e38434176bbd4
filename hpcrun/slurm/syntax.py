"""Checks shell text with bash, without running it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hpcrun import process
from hpcrun.specs.cluster import ClusterSpec

_TIMEOUT_S = 20


def find_bash_syntax_error(text: str) -> str:
    """The first of bash's complaints, as `line 3: ...`; empty where it can read the text."""
    with tempfile.TemporaryDirectory(prefix="hpcrun-check-") as folder:
        path = Path(folder) / "script.sh"
        path.write_text(text, encoding="utf-8")
        # Not by the PATH of the caller alone: the script itself names this one.
        done = process.run([shutil.which("bash") or "/bin/bash", "-n", str(path)], timeout_s=_TIMEOUT_S)
    if done.exit_code == 0:
        return ""
    first = next(iter(done.stderr.splitlines()), "it cannot be read")
    return first.removeprefix(f"{path}: ")


def find_profile_syntax_errors(cluster: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield the keys of a profile whose lines bash cannot parse, with bash's message."""
    parts = {"modules.init": cluster.modules.init, "setup": cluster.setup, "teardown": cluster.teardown}
    for key, lines in parts.items():
        if lines and (complaint := find_bash_syntax_error("\n".join([*lines, ""]))):
            yield key, f"bash -n: {complaint}"
