"""Real agents on this host, each for a node of its own name, and the supervisor's side of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcrun import __version__, process
from hpcrun.checkpoint.flush.arena import SHM, locate_arena
from hpcrun.checkpoint.worker_messages import TakeInventory
from hpcrun.errors import SiteError
from hpcrun.launch.agents import agent_pool as crews
from hpcrun.launch.agents.agent_nodes import AgentNodes
from hpcrun.launch.agents.agent_pool import AgentPool
from hpcrun.launch.agents.connection import AgentConnectionError, AgentIdentity, connect_to_supervisor
from hpcrun.launch.attempt_events import NodeLost, RankEnded
from hpcrun.launch.ports import choose_port
from hpcrun.launch.rendezvous import RendezvousRequest
from hpcrun.process import environment_with_package
from hpcrun.runs.lease import LEADER_TIMEOUT_S, FencedError, Leadership, claim_epoch, read_leader
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import RunDir

NODES = ("n01", "n02", "n03")
RANK = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


@dataclass
class Place:
    """A run, its agents, and whoever leads it."""

    run: RunDir
    agents: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)
    opened: list[AgentPool] = field(default_factory=list)

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "hpcrun", "_agent", str(self.run.path)]

    def environ(self, node: str) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**environment_with_package(kept), "SLURMD_NODENAME": node}

    def agent(self, node: str, **more: str) -> subprocess.Popen[bytes]:
        self.run.agent_logs.mkdir(exist_ok=True)
        child = subprocess.Popen(self.command(), stdin=subprocess.PIPE, env={**self.environ(node), **more})
        self.agents.setdefault(node, []).append(child)
        return child

    def lead(
        self, *nodes: str, missing: str = "", gone: tuple[str, ...] = (), epoch: int | None = None
    ) -> AgentNodes:
        crew = AgentPool(self.run, Leadership(self.run, epoch), "127.0.0.1", nodes, missing, gone)
        self.opened.append(crew)
        crew.adopt()
        return AgentNodes(crew, self.run)

    def launch(self, nodes: AgentNodes, number: int, *placed: str) -> list[int]:
        """Start a rank on each of these nodes by its agent; their pids."""
        attempt = self.run.attempt(number).create()
        nodes.watch(attempt, Placement(placed), f"hpcrun-{os.urandom(8).hex()}")
        for rank, node in enumerate(placed):
            mark = self.run.path / f"pid-{number}-{rank}"
            words = [
                "env",
                f"HPCRUN_RUN_ID={self.run.run_id}",
                f"HPCRUN_ATTEMPT={number}",
                f"PMI_RANK={rank}",
            ]
            nodes.start(node, [*words, sys.executable, "-c", RANK, str(mark)], self.run.path / "log")
            until(lambda mark=mark: mark.exists() and mark.read_text() != "")  # type: ignore[misc]
        return [int((self.run.path / f"pid-{number}-{rank}").read_text()) for rank in range(len(placed))]


def test_a_spare_loads_once_what_ranks_load(tmp_path: Path, place: Place) -> None:
    place.agent("n01")
    nodes = place.lead("n01")
    agent = place.agents["n01"][0]

    def loading() -> list[process.ProcessId]:
        below = process.descendants(agent.pid)
        return [
            one
            for one, words in process.command_lines()
            if one in below and "hpcrun.runtime.rank" in words[-1]
        ]

    for number in (1, 2):
        nodes.watch(place.run.attempt(number).create(), Placement(()), f"hpcrun-{os.urandom(8).hex()}")
        nodes.warm(["n01"])
        if number == 1:
            until(loading)
    # The answer to a later order: by now the second one has been obeyed too.
    nodes.dump(0.1)
    assert loading() == []


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(crews, "_SILENCE_TIMEOUT_S", 5.0)
    monkeypatch.setattr(crews, "_RECONNECT_S", 4.0)
    monkeypatch.setattr(crews, "_SUSPECT_PARTITION_S", 2.5)
    monkeypatch.setattr(crews, "_FAILOVER_S", 2.0)
    made = Place(RunDir(tmp_path / "run"))
    made.run.path.mkdir()
    yield made
    for crew in made.opened:
        crew.close()
    for child in [child for each in made.agents.values() for child in each]:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()
    process.kill_processes(process.processes_with_env("HPCRUN_RUN_ID", made.run.run_id))


def is_alive(pid: int) -> bool:
    found = process.identify_process(pid)
    return found is not None and process.is_alive(found)


def news(nodes: AgentNodes) -> list[Any]:
    return list(nodes.news(look=True))


def test_orders_reach_the_node_and_its_ranks_deaths_come_back(place: Place) -> None:
    for node in NODES[:2]:
        place.agent(node)
    nodes = place.lead(*NODES[:2])
    assert nodes.alive == NODES[:2]
    pids = place.launch(nodes, 1, "n01", "n02")
    time.sleep(0.3)  # for the agents to take hold of them
    os.kill(pids[1], signal.SIGKILL)
    ended = until(lambda: [one for one in news(nodes) if isinstance(one, RankEnded)])
    assert [(one.rank, one.pid) for one in ended] == [(1, pids[1])]
    assert nodes.clear(5, 0) == []
    assert not is_alive(pids[0])
    nodes.close()
    place.opened.clear()
    assert [place.agents[node][0].wait(5) for node in NODES[:2]] == [0, 0]


def test_a_connection_that_breaks_is_made_again(place: Place) -> None:
    place.agent("n01")
    nodes = place.lead("n01")
    pids = place.launch(nodes, 1, "n01")
    member = place.opened[0].members["n01"]
    first = member.session.channel
    assert first is not None
    first._connection.shutdown(2)
    until(lambda: news(nodes) or member.session.channel not in (first, None))
    assert nodes.lost == []
    assert is_alive(pids[0])
    nodes.kill()
    assert until(lambda: news(nodes))[0].pid == pids[0]


def test_a_dead_agent_is_lost_after_the_grace(place: Place) -> None:
    for node in NODES:
        place.agent(node)
    nodes = place.lead(*NODES)
    place.launch(nodes, 1, "n01", "n02")
    place.agents["n02"][0].kill()
    lost = until(lambda: [one for one in news(nodes) if isinstance(one, NodeLost)])
    assert [one.node for one in lost] == ["n02"]
    assert nodes.alive == ("n01", "n03")


def test_a_silent_agent_is_lost_and_comes_back_for_the_next_attempt(place: Place) -> None:
    for node in NODES:
        place.agent(node)
    nodes = place.lead(*NODES)
    second = place.launch(nodes, 1, "n01", "n02")[1]
    place.agents["n02"][0].send_signal(signal.SIGSTOP)
    lost = until(lambda: [one for one in news(nodes) if isinstance(one, NodeLost)])
    assert [one.node for one in lost] == ["n02"]
    place.agents["n02"][0].send_signal(signal.SIGCONT)
    until(lambda: news(nodes) or "n02" in nodes.alive)
    # It was told to clear up what it had of the attempt that went on without it.
    until(lambda: not is_alive(second))
    nodes.clear(5, 0)
    assert place.launch(nodes, 2, "n02")


def test_of_two_agents_of_a_node_the_newest_stays(place: Place) -> None:
    old = place.agent("n01")
    nodes = place.lead("n01")
    (pid,) = place.launch(nodes, 1, "n01")
    new = place.agent("n01")
    lost = until(lambda: [one for one in news(nodes) if isinstance(one, NodeLost)])
    assert lost[0].why == "another agent has come in its place"
    assert old.wait(10) == 0
    assert not is_alive(pid)
    until(lambda: news(nodes) or place.opened[0].members["n01"].has_answered)
    assert place.launch(nodes, 2, "n01")
    assert new.poll() is None
    leader, replaced = read_leader(place.run), place.opened[0].members["n01"].replaced
    assert leader is not None
    (late,) = replaced - {""}
    refused: list[str] = []

    def come_late() -> None:
        try:
            connect_to_supervisor(
                (leader.address, leader.port), leader.secret, AgentIdentity(place.run.id, 1, "n01", late, 0)
            )
        except AgentConnectionError as error:
            refused.append(str(error))

    caller = threading.Thread(target=come_late)
    caller.start()
    until(lambda: news(nodes) or refused)
    caller.join()
    assert new.poll() is None


def test_a_new_supervisor_finds_cleared_nodes_and_the_old_one_stops(place: Place) -> None:
    for node in NODES[:2]:
        place.agent(node)
    old = place.lead(*NODES[:2])
    pids = place.launch(old, 1, "n01", "n02")
    assert claim_epoch(place.run, 2)
    with pytest.raises(FencedError):
        old.verify()
    new = place.lead(*NODES, missing="n03", epoch=2)
    assert new.alive == NODES[:2]
    assert [one.node for one in new.lost] == ["n03"]
    assert not any(map(is_alive, pids))
    assert old.clear(1, 0) == []
    # The old one lets go of what is not its own any more.
    old.close()
    assert place.launch(new, 2, "n02", "n01")


def test_nodes_that_were_lost_before_are_not_waited_for_nor_lost_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "_ADOPT_TIMEOUT_S", 600.0)
    place.agent("n02")
    nodes = place.lead(*NODES, missing="n01", gone=("n01", "n03"), epoch=2)
    assert nodes.alive == ("n02",)
    assert [one.node for one in nodes.lost] == ["n01"]
    place.agent("n03")
    until(lambda: news(nodes) or "n03" in nodes.alive)


def test_last_words_are_those_that_were_said_to_this_supervisor(place: Place) -> None:
    place.run.agent_logs.mkdir()
    log = place.run.agent_logs / "n01.log"
    log.write_text("hpcrun: the supervisor does not answer\n")
    place.agent("n01")
    place.lead("n01")
    member = place.opened[0].members["n01"]
    assert member.last_words() == ""
    with log.open("a") as file:
        file.write("Out of memory\n")
    assert member.last_words() == "; last output: Out of memory"


def test_whoever_loses_most_of_its_agents_waits_for_a_successor(place: Place) -> None:
    for node in NODES:
        place.agent(node)
    nodes = place.lead(*NODES)
    place.launch(nodes, 1, "n01", "n02", "n03")
    for node in NODES[1:]:
        place.agents[node][0].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    paused: list[bool] = []
    crew = place.opened[0]
    pump = crew.pump

    def watched(timeout_s: float) -> Any:
        paused.append(crew._leadership.is_paused)
        return pump(timeout_s)

    crew.pump = watched  # type: ignore[method-assign]
    lost: list[str] = []

    def both_lost() -> bool:
        lost.extend(one.node for one in news(nodes) if isinstance(one, NodeLost))
        return len(lost) > 1

    until(both_lost)
    # Nobody came: they have failed, and it goes on deciding by itself.
    assert sorted(lost) == ["n02", "n03"]
    assert time.monotonic() - began > 3
    assert any(paused)
    assert not crew._leadership.is_paused
    for node in NODES[1:]:
        place.agents[node][0].send_signal(signal.SIGCONT)
    place.opened.remove(crew)
    nodes.close()
    # Who comes back only now hears that it may go, too.
    assert [place.agents[node][0].wait(10) for node in NODES] == [0, 0, 0]


def test_a_supervisor_in_doubt_steps_back_when_another_has_come(place: Place) -> None:
    for node in NODES:
        place.agent(node)
    nodes = place.lead(*NODES)
    for node in NODES[1:]:
        place.agents[node][0].send_signal(signal.SIGSTOP)
    assert claim_epoch(place.run, 2)
    with pytest.raises(FencedError):
        until(lambda: [one for one in news(nodes) if isinstance(one, NodeLost)])
    assert nodes.lost == []
    for node in NODES[1:]:
        place.agents[node][0].send_signal(signal.SIGCONT)


def test_agents_outside_of_a_batch_job_end_with_their_supervisor(place: Place) -> None:
    child = place.agent("n01")
    nodes = place.lead("n01")
    (pid,) = place.launch(nodes, 1, "n01")
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(10) == 0
    assert not is_alive(pid)


def test_where_slurm_ends_the_job_ranks_without_a_supervisor_end_at_once(place: Place) -> None:
    agent = place.agent("n01")
    nodes = place.lead("n01")
    (pid,) = place.launch(nodes, 1, "n01")
    agent.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert is_alive(pid)  # what the signal means is the supervisor's to say
    for pulse in place.opened[0]._heartbeats:
        pulse.stop()
    until(lambda: not is_alive(pid), LEADER_TIMEOUT_S - 2)


def test_where_slurm_ends_the_job_an_agent_without_a_supervisor_gives_memory_back(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\ncat {tmp_path}/job\n")
    scontrol.chmod(0o755)
    record = (
        "JobId=7 JobName=t\n   JobState={} Reason=None\n   Restarts=0 RunTime=00:00:09 TimeLimit=01:00:00\n"
    )
    (tmp_path / "job").write_text(record.format("RUNNING"))
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n01", "SUBMITIT_EXECUTOR": "slurm"}
    agent = place.agent("n01", **batch)
    nodes = place.lead("n01")
    (pid,) = place.launch(nodes, 1, "n01")
    arena = locate_arena(SHM, place.run.run_id, "n01")
    nodes.send_to_worker("n01", TakeInventory(1))

    def told() -> list[Any]:
        nodes.rest(0.1)
        return nodes.worker_messages()

    until(told)
    arena.mkdir(parents=True, exist_ok=True)
    for pulse in place.opened[0]._heartbeats:
        pulse.stop()
    agent.send_signal(signal.SIGTERM)
    until(lambda: not is_alive(pid), LEADER_TIMEOUT_S - 2)
    assert agent.poll() is None  # the job runs: somebody may take over
    (tmp_path / "job").write_text(record.format("CANCELLED"))
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(20) == 0
    assert not arena.exists()


def test_what_ranks_have_left_in_memory_goes_before_the_next_attempt(place: Place) -> None:
    place.agent("n01")
    nodes = place.lead("n01")
    left = Path(f"/dev/shm/mpich_shm_{os.urandom(4).hex()}_0")
    left.touch()
    try:
        record = place.run.attempt(1).create().rank_record(0)
        record.write_text(json.dumps({"node": os.uname().nodename, "shm": [str(left)], "started": 0.0}))
        place.launch(nodes, 2, "n01")
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_agents_say_where_they_are_reached_and_try_each_other(place: Place) -> None:
    for node in NODES[:2]:
        place.agent(node)
    nodes = place.lead(*NODES[:2])
    request = RendezvousRequest(1, NODES[:2], "lo", seed=7, wants_port=True)
    points = nodes.resolve_rendezvous(request)
    assert {node: (one.address, one.interface) for node, one in points.items()} == dict.fromkeys(
        NODES[:2], ("127.0.0.1", "lo")
    )
    # Rank 0's node alone has a port, and keeps it from others.
    assert (points["n01"].port > 0, points["n02"].port) == (True, 0)
    with closing(choose_port(7)) as lease:
        assert lease.number != points["n01"].port
    nodes.watch(place.run.attempt(1).create(), Placement(NODES[:2]), f"hpcrun-{os.urandom(8).hex()}")
    assert nodes.try_connections() == ("", ())
    assert nodes.try_connections() == ("", ())


OTHER_VERSION = "import hpcrun; hpcrun.__version__ = '0.0.9'; from hpcrun.cli.main import main; main()"


def test_an_agent_of_another_version_is_refused_at_once_and_named(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = AgentPool(place.run, Leadership(place.run, None), "127.0.0.1", ["n01"])
    place.opened.append(pool)
    command = [sys.executable, "-P", "-c", OTHER_VERSION, "_agent", str(place.run.path)]
    words = f"the agent on n01 runs hpcrun 0.0.9, the supervisor {__version__}; install one version on all"
    with pytest.raises(SiteError, match=re.escape(words)):
        pool.start({("n01",): command}, place.environ("n01"))
    assert capfd.readouterr().err.count(words) == 1
    log = place.run.agent_logs / "n01.log"
    until(lambda: f"the supervisor runs hpcrun {__version__}, the agent on n01 0.0.9" in log.read_text())
