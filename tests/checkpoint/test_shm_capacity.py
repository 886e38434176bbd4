"""How much fits into memory, read from trees of /proc and /sys as different sites have them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpcrun.checkpoint.policy.shm_capacity import measure_shm_capacity

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  {total} kB\nMemFree:  1 kB\nMemAvailable:  {free} kB\nHugePages_Total:       0\n"
SLURM_V2 = "system.slice/slurmstepd.scope/job_7"


def node(free_gib: int = 1000) -> dict[str, str]:
    return {"proc/meminfo": MEMINFO.format(total=1 << 40, free=free_gib << 20)}


def v2(path: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    top = f"sys/fs/cgroup/{path}"
    return {
        f"{top}/memory.max": f"{limit}\n",
        f"{top}/memory.current": f"{used}\n",
        f"{top}/memory.stat": f"anon 5\nfile 9\ninactive_file {cached}\n",
    }


def v1(path: str, limit: int, used: int, cached: int = 0) -> dict[str, str]:
    top = f"sys/fs/cgroup/memory/{path}"
    return {
        f"{top}/memory.limit_in_bytes": f"{limit}\n",
        f"{top}/memory.usage_in_bytes": f"{used}\n",
        f"{top}/memory.stat": f"inactive_file 0\ntotal_inactive_file {cached}\n",
    }


@pytest.mark.parametrize(
    ("files", "size_bytes", "bound"),
    [
        pytest.param(node(3), 3 * GIB, "memory available on this node", id="no cgroups at all"),
        pytest.param(
            node()
            | {"proc/self/cgroup": f"0::/{SLURM_V2}/step_0/user/task_1\n"}
            | v2(f"{SLURM_V2}/step_0/user/task_1", "max", 4 * GIB)
            | v2(f"{SLURM_V2}/step_0", "max", 4 * GIB)
            | v2(SLURM_V2, str(16 * GIB), 6 * GIB, 2 * GIB),
            11 * GIB,
            f"memory left in cgroup .*/{SLURM_V2}, limit 16 GiB",
            id="version 2: --mem stands above the step, and cached files give way",
        ),
        pytest.param(
            node()
            | {"proc/self/cgroup": "4:memory:/slurm/uid_0/job_7/step_0\n0::/\n"}
            | v1("slurm/uid_0/job_7/step_0", (1 << 63) - 4096, GIB)
            | v1("slurm/uid_0/job_7", 8 * GIB, 2 * GIB, GIB),
            int(6.5 * GIB),
            "slurm/uid_0/job_7, limit 8 GiB",
            id="version 1",
        ),
        pytest.param(
            node() | {"proc/self/cgroup": "4:memory:/outside/of/the/container\n"} | v1("", 4 * GIB, GIB),
            int(2.75 * GIB),
            "limit 4 GiB",
            id="a container that does not see where it stands",
        ),
        pytest.param(
            node() | {"proc/self/cgroup": "0::/job\n"} | v2("job", str(GIB), 2 * GIB),
            0,
            "cgroup .*/job",
            id="nothing left",
        ),
    ],
)
def test_the_narrowest_limit_counts(
    tmp_path: Path, files: dict[str, str], size_bytes: int, bound: str
) -> None:
    room = measure_shm_capacity(tmp_path, write(tmp_path / "tree", files))
    assert room.size_bytes == size_bytes
    assert re.search(bound, room.bound)


def test_the_file_system_itself_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 100, 10, 5, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    room = measure_shm_capacity(tmp_path, write(tmp_path / "tree", node()))
    assert str(room) == f"20 KiB (free in {tmp_path})"
    assert room.size_bytes == 5 * 4096


def test_this_very_machine_can_be_read(tmp_path: Path) -> None:
    assert measure_shm_capacity(tmp_path).size_bytes >= 0
