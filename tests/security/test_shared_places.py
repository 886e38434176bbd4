"""Places where any user can take a name: what others plant is not used, not written over, not removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.flush.arena import (
    Arena,
    find_arena,
    locate_arena,
    make_arena_folder,
    remove_arena_folder,
)
from hpcrun.checkpoint.flush.local_tier import LocalTier
from hpcrun.checkpoint.flush.stale_memory import clean_up_stale_memory
from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.part_check import verify_part
from hpcrun.checkpoint.restore.outside_copies import find_local_inventory
from hpcrun.checkpoint.restore.sources import NodeCopy
from hpcrun.checkpoint.tier import InventoryEntry
from hpcrun.errors import SiteError
from hpcrun.files import UntrustedFileError, write_output
from hpcrun.health import probes
from hpcrun.shm_segments import remove_segments, stale_segments
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.identity import directory_digest
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry.prometheus_exporter import Exporter
from tests.checkpoint.loads import load_of
from tests.checkpoint.workers import Host
from tests.security.users import ATTACKER, VICTIM, as_user, in_namespace, needs_root

pytestmark = needs_root
SHM = Path("/dev/shm")
TOP = SHM / f"hpcrun-{VICTIM}"
PRECIOUS = Path(f"/tmp/home-{VICTIM}/precious")


def is_same(before: dict[str, bytes]) -> bool:
    return before == {str(path): path.read_bytes() for path in sorted(PRECIOUS.rglob("*")) if path.is_file()}


def precious(*names: str) -> dict[str, bytes]:
    """Files of the victim somewhere else, which an attacker cannot reach but by the victim's own hand."""
    for name in names:
        path = PRECIOUS / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(f"precious {name}".encode())
    return {str(path): path.read_bytes() for path in sorted(PRECIOUS.rglob("*")) if path.is_file()}


def played(attack: Callable[[], None], use: Callable[[], None]) -> None:
    """First the attacker plants something, then the victim works, in a /tmp and a /dev/shm of their own."""

    def planted() -> None:
        os.umask(0)
        attack()

    def body() -> None:
        as_user(VICTIM, lambda: None)  # has a home
        as_user(ATTACKER, planted)
        as_user(VICTIM, use)

    in_namespace(body)


def plant_top(kind: str) -> None:
    """Take the victim's name in shared memory; what it leads to are the victim's own files."""
    match kind:
        case "directory":
            TOP.mkdir(mode=0o777)
            (TOP / "r").symlink_to(PRECIOUS)
        case "closed directory":
            TOP.mkdir(mode=0o700)
        case "deep directory":
            (TOP / "r").mkdir(parents=True, mode=0o777)
            (TOP / "r" / "n1").symlink_to(PRECIOUS / "n1")
            (TOP / "r" / "run.json").write_text('"/nowhere"')
        case "link":
            TOP.symlink_to(PRECIOUS.parent)
        case "pipe":
            os.mkfifo(TOP)
        case _:
            TOP.touch()


@pytest.mark.parametrize("kind", ["directory", "closed directory", "deep directory", "link", "pipe", "file"])
def test_a_taken_name_in_shared_memory_costs_neither_files_nor_the_memory_tier(kind: str) -> None:
    def use() -> None:
        before = precious("n1/slot-0-0.bin", "n1/slot-0-0.json", "n1/replica-x", "r/n1/file", "run.json")
        said: list[str] = []
        assert find_arena(SHM, "r", "n1") is None
        remove_arena_folder(locate_arena(SHM, "r", "n1"))
        assert clean_up_stale_memory(SHM, lambda _: False) == {}
        assert find_local_inventory("r", None) == []
        assert is_same(before)
        folder = make_arena_folder(SHM, Path("/runs/r"), "r", "n1", said.append)
        assert re.fullmatch(rf"hpcrun-{VICTIM}\.[0-9a-f]{{16}}", folder.parents[1].name)
        assert len(said) == 1
        assert said[0].startswith(f"{TOP}: ")
        assert f"{folder.parents[1]} is used instead" in said[0]
        # The next worker, the next attempt, the agent and the clean-up find the same.
        assert make_arena_folder(SHM, Path("/runs/r"), "r", "n1", said.append) == folder
        assert locate_arena(SHM, "r", "n1") == folder
        Arena(folder).reserve({0: 4096}, 1, lambda _: False)
        assert list(clean_up_stale_memory(SHM, lambda _: False)) == [folder.parent]
        folder = make_arena_folder(SHM, Path("/runs/r"), "r", "n1")
        remove_arena_folder(locate_arena(SHM, "r", "n1"))
        assert not folder.parents[1].exists()
        assert is_same(before)
        assert os.path.lexists(TOP)

    played(lambda: plant_top(kind), use)


def test_a_worker_and_its_ranks_meet_where_the_name_is_taken() -> None:
    def use() -> None:
        run = RunDir(Path(f"/tmp/home-{VICTIM}/r"))
        run.path.mkdir()
        host = Host(SHM, run, "n1")
        try:
            ready = host.configure(memory=2)
            assert "is used instead" in host.wait("worker_log")["text"]
            assert Path(ready["socket"]).parent == host.arena
            assert host.arena.parents[1] != TOP
            assert Path(ready["socket"]).stat().st_mode & 0o777 == 0o600
        finally:
            host.kill()
        os.environ["HPCRUN_WORKER_SOCKET"] = str(TOP / run.run_id / "n1" / "worker.sock")
        from hpcrun.runtime.control import LoneControl
        from hpcrun.runtime.worker_client import RankWorkerClient
        from hpcrun.runtime.worker_endpoint import AgentWorker, OwnWorker

        assert AgentWorker(os.environ).socket() == host.arena / "worker.sock"
        # Under torchrun there is no agent.
        home = OwnWorker(run.path, CheckpointSpec.model_validate({"memory": 2}), LoneControl(), 1)
        try:
            path = home.socket()
            assert path.parent.stat().st_uid == VICTIM
            RankWorkerClient(path, 0).close()
        finally:
            home.close()
        assert not path.parent.exists()

    played(lambda: plant_top("directory"), use)


def test_shared_memory_that_others_may_rename_in_is_refused_at_once() -> None:
    def use() -> None:
        run = RunDir(Path(f"/tmp/home-{VICTIM}/r"))
        run.path.mkdir()
        host = Host(Path("/tmp/open"), run, "n1")
        try:
            host.say(kind="configure_worker", run=str(run.path), node="n1", attempt=1, spec={"memory": 2})
            assert "chmod +t /tmp/open" in host.wait("worker_error")["why"]
        finally:
            host.kill()

    played(lambda: Path("/tmp/open").mkdir(mode=0o777), use)


BASE = Path("/tmp/hpcrun")


def forged(folder: Path, step: int) -> None:
    """A save as one of the run would be, only newer."""
    LocalTier(str(folder.parents[1]), folder.parent.name, folder.name).store(load_of(step, (0,), 1, 0))


def steps(found: list[InventoryEntry]) -> list[int]:
    return [one.stamp.step for one in found]


@pytest.mark.parametrize("sticky", [True, False])
@pytest.mark.parametrize("kind", ["run", "link to a run", "link to the victim's", "file", "another name"])
def test_a_forged_save_on_a_nodes_disk_counts_for_nothing(kind: str, sticky: bool) -> None:
    def attack() -> None:
        BASE.mkdir(mode=0o777)
        BASE.chmod(0o1777 if sticky else 0o777)
        Path("/tmp/forged").mkdir()
        forged(Path("/tmp/forged/r/n1"), 9)
        for path in Path("/tmp/forged").rglob("*"):
            path.chmod(0o777)
        match kind:
            case "run":
                shutil.copytree("/tmp/forged/r", BASE / "r")
            case "link to a run":
                (BASE / "r").symlink_to("/tmp/forged/r")
            case "link to the victim's":
                (BASE / "r").symlink_to(PRECIOUS)
            case "another name":
                shutil.copytree("/tmp/forged/r", BASE / f"r.{'0' * 16}")
            case _:
                (BASE / "r").touch()

    def use() -> None:
        before = precious("n1/step-00000009.00ff.bin", "n1/step-00000009.00ff.json")
        said: list[str] = []
        station = LocalTier(str(BASE), "r", "n1", say=said.append)
        assert station.holdings() == find_local_inventory("r", str(BASE)) == []
        station.retain(["none"])
        station.store(load_of(2, (0,), 1, 0))
        station.store(load_of(4, (0,), 1, 0))
        assert station.folder.stat().st_uid == VICTIM
        assert len(said) == (kind != "another name")
        assert all("is used instead" in text and str(BASE / "r") in text for text in said)
        again = LocalTier(str(BASE), "r", "n1")
        assert steps(again.holdings()) == steps(find_local_inventory("r", str(BASE))) == [2, 4]
        again.retain([])
        assert again.holdings() == []
        assert is_same(before)

    played(attack, use)


def test_a_directory_swapped_after_it_was_looked_at_gives_nothing() -> None:
    """Whoever owns the base may rename what is in it: he can take saves away, but put none in their place."""

    def attack() -> None:
        BASE.mkdir(mode=0o777)
        BASE.chmod(0o777)

    def save() -> None:
        LocalTier(str(BASE), "r", "n1").store(load_of(2, (0,), 1, 0))

    def swap() -> None:
        os.umask(0)
        (BASE / "r").rename(BASE / "gone")
        forged(BASE / "r" / "n1", 2)
        for path in [BASE / "r", *(BASE / "r").rglob("*")]:
            path.chmod(0o777)

    def body() -> None:
        as_user(VICTIM, lambda: None)
        as_user(ATTACKER, attack)
        as_user(VICTIM, save)
        reader, writer = os.pipe()
        back, there = os.pipe()

        def use() -> None:
            (held,) = LocalTier(str(BASE), "r", "n1").holdings()
            os.write(writer, b".")
            os.read(back, 1)
            with pytest.raises(DamagedError, match="belongs to user"):
                verify_part(held.parts[0], bytes.fromhex(held.stamp.generation))
            copy = NodeCopy(held)
            assert not copy.read(0, held.parts[0].part, 0, memoryview(bytearray(64)))
            assert LocalTier(str(BASE), "r", "n1").holdings() == []
            # Saves of another run of ours, put under this run's name, are not this run's.
            LocalTier("/tmp/mine", "other", "n1").store(load_of(8, (0,), 1, 0))
            Path("/tmp/mine/other").rename("/tmp/mine/r")
            assert LocalTier("/tmp/mine", "r", "n1").holdings() == []

        victim = os.fork()
        if victim == 0:
            try:
                as_user(VICTIM, use)
            except BaseException as error:  # noqa: BLE001 - the outermost frame of this process
                os.write(2, str(error).encode())
                os._exit(1)
            os._exit(0)
        os.read(reader, 1)
        as_user(ATTACKER, swap)
        os.write(there, b".")
        assert os.waitpid(victim, 0)[1] == 0

    in_namespace(body)


def test_levels_that_others_may_write_and_files_of_others_are_not_saves() -> None:
    def use() -> None:
        station = LocalTier("/tmp/mine", "r", "n1")
        facts = station.store(load_of(2, (0,), 1, 0))
        folder = station.folder
        assert steps(station.holdings()) == [2]
        for level in (folder, folder.parent):
            level.chmod(0o770)
            assert station.holdings() == []
            level.chmod(0o700)
        os.link(facts["path"], "/tmp/mine/second")
        assert station.holdings() == []
        Path("/tmp/mine/second").unlink()
        Path(facts["path"]).rename("/tmp/mine/aside")
        Path(facts["path"]).symlink_to("/tmp/mine/aside")
        assert station.holdings() == []

    played(lambda: None, use)


def test_the_base_is_made_for_its_owner_alone_whatever_the_umask() -> None:
    def use() -> None:
        os.umask(0)
        LocalTier("/tmp/a/b/c", "r", "n1").store(load_of(2, (0,), 1, 0))
        for path in (Path("/tmp/a"), *Path("/tmp/a").rglob("*")):
            assert not path.stat().st_mode & 0o077, path

    played(lambda: None, use)


def test_a_store_in_a_shared_directory_follows_no_planted_names() -> None:
    def attack() -> None:
        Path("/tmp/shared").mkdir(mode=0o777)
        Path("/tmp/shared/r").symlink_to(PRECIOUS)

    def use() -> None:
        before = precious("step/file", "step/other")
        os.umask(0)
        with open_object_store("file:///tmp/mine/store") as mine:
            mine.write("r/step/file", b"own")
            assert mine.read("r/step/file") == b"own"
            assert list(mine.list("r/")) == ["r/step/file"]
            assert not Path("/tmp/mine/store/r").stat().st_mode & 0o077
            Path("/tmp/mine/store/r/step/link").symlink_to(PRECIOUS / "step/file")
            Path("/tmp/mine/store/r/open").mkdir()
            for key in ("r/step/link", "r/open/file"):
                with pytest.raises(SiteError, match=r"is a link|others can write it"):
                    mine.write(key, b"new")
        with open_object_store("file:///tmp/shared") as own:
            uses: list[Callable[[], object]] = [
                lambda: own.write("r/step/file", b"new"),
                lambda: own.delete("r/step/file"),
                lambda: own.delete_prefix("r/step/"),
                lambda: own.read("r/step/file"),
                lambda: own.list("r/step/"),
            ]
            for one in uses:
                with pytest.raises(SiteError, match="is a link, or belongs to another user"):
                    one()
        assert is_same(before)

    played(attack, use)


def test_a_planted_name_says_nothing_about_a_node() -> None:
    def attack() -> None:
        host = os.uname().nodename
        for number in range(os.getpid(), os.getpid() + 300):
            Path(f"/tmp/.preflight-{host}-{number}").symlink_to(PRECIOUS / "file")

    def use() -> None:
        before = precious("file")
        run = RunDir(Path(f"/tmp/home-{VICTIM}/r"))
        run.path.mkdir()
        names = set(Path("/tmp").iterdir())
        assert probes.probe_write(probes.CheckTarget(run=run, scratch=("/tmp/drop",))) == []
        for scratch in ("/tmp/closed", "/tmp/leads"):
            place = probes.CheckTarget(run=run, scratch=(scratch,))
            (found,) = probes.probe_write(place)
            assert found.severity == "warning"
            assert f"{scratch} belongs to another user" in found.text
            assert all(one.severity != "error" for one in probes.probe_space(place))
        assert set(Path("/tmp").iterdir()) == names
        assert not list(run.path.iterdir())
        assert is_same(before)

    def planted() -> None:
        attack()
        Path("/tmp/drop").mkdir()
        Path("/tmp/drop").chmod(0o1733)
        Path("/tmp/closed").mkdir(mode=0o755)
        Path("/tmp/leads").symlink_to("/proc")

    played(planted, use)


def test_only_our_own_segments_are_removed() -> None:
    def attack() -> None:
        (SHM / "mpich_shm_his").write_bytes(b"his")
        (SHM / "nccl-link").symlink_to(PRECIOUS / "file")
        (SHM / "torch_folder").mkdir()

    def use() -> None:
        before = precious("file")
        own = SHM / "torch_own"
        own.write_bytes(b"own")
        os.link(PRECIOUS / "file", PRECIOUS / "torch_escape")
        names = [
            str(SHM / name) for name in ("mpich_shm_his", "nccl-link", "torch_folder", "torch_own", "none")
        ]
        names += [f"{SHM}/../..{PRECIOUS}/torch_escape", f"{PRECIOUS}/torch_escape", str(SHM)]
        assert list(stale_segments(SHM, -1.0)) == [own]
        assert remove_segments(names, since=0.0) == [str(own)]
        assert sorted(path.name for path in SHM.iterdir()) == ["mpich_shm_his", "nccl-link", "torch_folder"]
        (PRECIOUS / "torch_escape").unlink()
        assert is_same(before)

    played(attack, use)


ORDERS: dict[str, Any] = {"textfile": "/tmp/shown", "targets": "/tmp/shown", "address": "127.0.0.1"}
SHOWN = f"hpcrun-r-{directory_digest(Path(f'/tmp/home-{VICTIM}/runs/r'))[:8]}"
ABOUT = {"run": "r", "name": "r", "slurm_job": "17", "host": "n01", "ranks": 1}


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_files_that_are_shown_to_others_leave_those_of_others_alone(kind: str) -> None:
    def attack() -> None:
        Path("/tmp/shown").mkdir(mode=0o777)
        for suffix in (".prom", ".json"):
            path = Path(f"/tmp/shown/{SHOWN}{suffix}")
            match kind:
                case "file":
                    path.write_text("his")
                case "link":
                    path.symlink_to(PRECIOUS / "file")
                case _:
                    os.mkfifo(path)
            old = Path(f"/tmp/shown/hpcrun-old-0123abcd{suffix}")
            old.write_text("his")
            os.utime(old, (1, 1))

    def use() -> None:
        before = precious("file")
        root = Path(f"/tmp/home-{VICTIM}/runs")
        os.environ["HPCRUN_ROOT"] = str(root)
        run = RunDir(root / "r")
        run.telemetry.mkdir(parents=True)
        planted = {path: path.lstat() for path in Path("/tmp/shown").iterdir()}
        exporter = Exporter(run, ABOUT, {**ORDERS, "port": 19_400, "suffix": ""})
        shown = [path for path in Path("/tmp/shown").iterdir() if path not in planted]
        assert sorted(path.suffix for path in shown) == [".json", ".prom"]
        for path in shown:
            assert re.fullmatch(SHOWN + r"\.[0-9a-f]{16}\.(json|prom)", path.name)
            assert path.stat().st_uid == VICTIM
        exporter._written = float("-inf")
        exporter.turn()
        assert sorted(shown) == sorted(path for path in Path("/tmp/shown").iterdir() if path not in planted)
        exporter.close()
        assert {path: path.lstat().st_ino for path in planted} == {
            path: status.st_ino for path, status in planted.items()
        }
        assert not any(path.exists() for path in shown)
        assert is_same(before)

    played(attack, use)


def test_a_directory_that_cannot_be_listed_is_written_all_the_same() -> None:
    def attack() -> None:
        Path("/tmp/shown").mkdir()
        Path("/tmp/shown").chmod(0o1733)

    def use() -> None:
        run = RunDir(Path(f"/tmp/home-{VICTIM}/runs/r"))
        run.telemetry.mkdir(parents=True)
        exporter = Exporter(run, ABOUT, {**ORDERS, "port": None, "suffix": ""})
        assert Path(f"/tmp/shown/{SHOWN}.prom").stat().st_uid == VICTIM
        exporter.close()
        assert not Path(f"/tmp/shown/{SHOWN}.prom").exists()

    played(attack, use)


def test_targets_of_a_run_that_lives_stay_however_old_they_are() -> None:
    def use() -> None:
        root = Path(f"/tmp/home-{VICTIM}/runs")
        os.environ["HPCRUN_ROOT"] = str(root)
        living, silent, ended, new = (create_run(name) for name in ("living", "silent", "ended", "new"))
        new.telemetry.mkdir()
        element = living.element(3)
        element.path.mkdir(parents=True)
        for run in (living, element, silent, ended):
            run.events.write_text("")
        os.utime(silent.events, (1, 1))
        write_json(ended.exit, {"status": "done"})
        Path("/tmp/shown").mkdir(mode=0o700)
        kept = {f"hpcrun-{run.shared_name.replace('/', '-')}" for run in (living, element)}
        others = [f"hpcrun-{run.shared_name}" for run in (silent, ended)]
        for name in (*kept, *others, f"hpcrun-{living.id}-0123abcd", "hpcrun-never-0123abcd"):
            for suffix in (".json", ".prom"):
                path = Path(f"/tmp/shown/{name}{suffix}")
                path.write_text("[]")
                os.utime(path, (time.time() - 3 * 86400,) * 2)
        Exporter(new, ABOUT, {**ORDERS, "port": None, "suffix": ""}).close()
        left = {path.name for path in Path("/tmp/shown").glob("*.json")}
        assert left == {f"{name}.json" for name in kept}

    played(lambda: None, use)


def test_outputs_that_a_person_has_named_go_into_nothing_of_another_user() -> None:
    def attack() -> None:
        Path("/tmp/out").mkdir(mode=0o777)
        os.mkfifo("/tmp/out/pipe")
        Path("/tmp/out/file").write_text("his")
        Path("/tmp/out/link").symlink_to(PRECIOUS / "file")
        Path("/tmp/out/train.sbatch.j2").symlink_to(PRECIOUS / "file")

    def use() -> None:
        before = precious("file")
        for name in ("pipe", "file", "link"):
            with pytest.raises(UntrustedFileError, match=f"{name}: belongs to user {ATTACKER}, not to you"):
                write_output(Path("/tmp/out") / name, "text")
        write_output(Path("/tmp/out/new"), "longer text")
        write_output(Path("/tmp/out/new"), "text")
        assert Path("/tmp/out/new").read_text() == "text"
        Path("/tmp/out/mine").symlink_to("/tmp/out/new")
        write_output(Path("/tmp/out/mine"), "through my own link")
        assert Path("/tmp/out/new").read_text() == "through my own link"
        write_output(Path("/dev/null"), "gone")
        os.environ["HPCRUN_ROOT"] = f"/tmp/home-{VICTIM}/runs"
        run = create_run("r")
        run.spec.write_text("name: r\n")
        for words in (
            ("template", "export", "train", "--to", "/tmp/out", "--force"),
            ("metrics", str(run.path), "--out", "/tmp/out/link"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "hpcrun", *words],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
            assert f"belongs to user {ATTACKER}" in done.stderr
        assert is_same(before)

    played(attack, use)
