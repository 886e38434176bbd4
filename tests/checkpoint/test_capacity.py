"""Whether saves and files fit on a file system, by what it says of itself."""

from __future__ import annotations

import os
from pathlib import Path

from hpcrun.checkpoint.policy.capacity import check_free_space


def room(free: int, files: int) -> os.statvfs_result:
    fields = (4096, 4096, 10**9, free // 4096, free // 4096, 10**6, files, files, 0, 255)
    return os.statvfs_result(fields)


def test_room_for_saves_and_for_files() -> None:
    assert check_free_space(Path("/x"), room(10**10, 10**5), 10**9, ranks=8, runs=10) == []
    assert (
        "476.8 MiB are free, but the saves need 953.7 MiB"
        in check_free_space(Path("/x"), room(5 * 10**8, 10**5), 10**9, ranks=8, runs=1)[0].text
    )
    found = check_free_space(Path("/x"), room(10**10, 500), 10**9, ranks=8, runs=10)
    assert found[0].text.startswith("/x: 500 more files are possible, but about 520 are needed")
    endless = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    assert check_free_space(Path("/x"), endless, 10**9, ranks=8, runs=1) == [], "it does not know its size"
