"""A node that is lost while an attempt is made ready, such as during a rebuild."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrun.launch.agents.local_node import LocalNode
from hpcrun.launch.checkpointing.coordinator import CheckpointCoordinator
from hpcrun.launch.rendezvous import RendezvousPoint, RendezvousRequest
from hpcrun.specs.records import read_json_lines
from hpcrun.submission.prepare import prepare_job
from tests.launch.pretended import pretend, supervise
from tests.launch.supervised import PROGRAM, Recorder, Site


def test_nothing_is_started_on_it_and_its_loss_is_the_cause(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = pretend("abc")
    usual = CheckpointCoordinator.prepare

    def lose_one(coordinator: CheckpointCoordinator, *words: Any) -> dict[str, str]:
        if there.pretended.alive == ("a", "b", "c"):
            there.pretended.where = ()  # no rank is there yet
            there.pretended.lose("b")
        return usual(coordinator, *words)

    monkeypatch.setattr(CheckpointCoordinator, "prepare", lose_one)
    overrides = ("resources={nodes: 2, spares: 1}", "parallel.dp_shard=2", "retry={node: 1, crash: 0}")
    job = prepare_job(site.job, overrides)
    outcome = supervise(there, job, Recorder(), [str(PROGRAM), "wait-until-2"])
    assert outcome.status == "done", outcome.message
    events = list(read_json_lines(outcome.run.events))
    lost = [(one["attempt"], one["node"]) for one in events if one["event"] == "node_lost"]
    assert lost[0] == (1, "b")
    assert [one["attempt"] for one in events if one["event"] == "launch"] == [2]
    (fault,) = [one for one in events if one["event"] == "fault"]
    assert (fault["cause"], fault["nodes"]) == ("node", ["b"])


def test_nor_is_a_program_whose_first_node_cannot_say_where_to_meet(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = pretend("abc")
    usual = LocalNode.resolve_rendezvous

    def lose_one(nodes: LocalNode, request: RendezvousRequest) -> dict[str, RendezvousPoint]:
        if request.attempt == 1:
            there.pretended.where = ()
            there.pretended.lose("a")
        return {node: one for node, one in usual(nodes, request).items() if node in nodes.alive}

    monkeypatch.setattr(LocalNode, "resolve_rendezvous", lose_one)
    words = ("resources={nodes: 2, spares: 1}", "retry={node: 1, crash: 0}", "name=t", "preflight=[]")
    outcome = supervise(there, prepare_job(None, words, command=["true"]), Recorder())
    events = list(read_json_lines(outcome.run.events))
    assert [one["attempt"] for one in events if one["event"] == "launch"] == [2], outcome.message
    assert next(one["node"] for one in events if one["event"] == "node_lost") == "a"
