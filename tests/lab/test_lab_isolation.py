"""A lab touches nothing outside, leaves nothing behind however it ends, and bears a second one beside it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from tests.lab.__main__ import parse_racks
from tests.lab.cluster import CHECKOUT, Lab, Shape

KINDS = ("mnt", "net", "pid", "uts", "ipc")
START = """
import signal
from tests.lab.cluster import Lab, Shape
lab = Lab(Shape((1,))).__enter__()
print(*(space.pid for space in (lab.head, lab.login.space, lab.node("n01").space)), flush=True)
signal.pause()
"""


def namespaces(pid: int) -> set[str]:
    return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in KINDS}


@contextlib.contextmanager
def known(pids: Iterable[int]) -> Iterator[set[str]]:
    """The namespaces of these processes, held so that the kernel gives their numbers to no others."""
    with contextlib.ExitStack() as held:
        for pid in pids:
            for kind in KINDS:
                held.enter_context(Path(f"/proc/{pid}/ns/{kind}").open("rb"))
        yield {name for pid in pids for name in namespaces(pid)}


def inhabitants(spaces: set[str]) -> list[int]:
    """The processes of this machine that are in any of these namespaces."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if spaces & namespaces(int(folder.name)):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # It has just ended, or is not even root's to look at, as no process of a lab is.
    return found


def host() -> dict[str, object]:
    """What a lab must not change here."""
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
        "links": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "run": sorted(path.name for path in Path("/run").iterdir()),
        "hosts": Path("/etc/hosts").read_text(encoding="utf-8"),
        "etc": sorted(path.name for path in Path("/etc").iterdir()),
        "name": os.uname().nodename,
        "shm": sorted(path.name for path in Path("/dev/shm").glob("*munge*")),
        "cgroups": list(Path("/sys/fs/cgroup").rglob("*slurm*")),
        "programs": [path.exists() for path in map(Path, ("/usr/sbin/slurmctld-wlm", "/usr/sbin/munged"))],
    }


def test_a_lab_that_was_closed_leaves_nothing_and_two_do_not_collide(lab: Lab) -> None:
    before = host()
    held = contextlib.ExitStack()
    with Lab(Shape(racks=(2, 2, 2, 2))) as other:
        spaces = [other.head, *(node.space for node in (other.login, *other.nodes))]
        inside = held.enter_context(known([space.pid for space in spaces]))
        assert len(inside) == len(KINDS) * 10
        assert not inside & namespaces(os.getpid())
        assert inhabitants(inside)
        leaves = other.run(["scontrol", "show", "topology"]).require_success().stdout.splitlines()
        assert [line.split()[-1] for line in leaves[:4]] == [
            f"Nodes=n[{n:02d}-{n + 1:02d}]" for n in (1, 3, 5, 7)
        ]
        for each in (lab, other):
            shown = each.run(["srun", "--label", "-N8", "hostname"]).require_success().stdout
            assert sorted(shown.splitlines()) == [f"{rank}: n{rank + 1:02d}" for rank in range(8)]
        assert host() == before
    with held:
        assert inhabitants(inside) == []
    assert host() == before
    assert lab.run(["srun", "-wn08", "hostname"]).require_success().stdout.strip() == "n08"


def test_a_lab_dies_with_its_parent(lab_here: None) -> None:
    before = host()
    with subprocess.Popen(
        [sys.executable, "-c", START], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    ) as parent:
        assert parent.stdout
        with known([int(pid) for pid in parent.stdout.readline().split()]) as inside:
            assert len(inside) == len(KINDS) * 3
            assert inhabitants(inside)
            parent.kill()
            end = time.monotonic() + 20
            while inhabitants(inside) and time.monotonic() < end:
                time.sleep(0.1)
            assert inhabitants(inside) == []
    assert host() == before


@pytest.mark.parametrize(
    ("text", "racks"), [("2x4", (4, 4)), ("4x2", (2, 2, 2, 2)), ("4,2,2", (4, 2, 2)), ("3", (3,))]
)
def test_racks_are_written_as_people_say_them(text: str, racks: tuple[int, ...]) -> None:
    assert parse_racks(text) == racks


@pytest.mark.parametrize("text", ["", "x", "2x", "0x4", "2x-1", "a,b", "50x4", "4,,2"])
def test_other_racks_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write 2x4"):
        parse_racks(text)
