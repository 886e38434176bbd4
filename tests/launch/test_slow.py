"""A node that is made slow in rehearsal is the one that is named, and no other."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpcrun.chaos.faults import InjectedFault, SupervisorProcess
from hpcrun.chaos.inject import Injection, InjectionTarget
from hpcrun.launch.attempt_events import AttemptEvent, RankProgress
from hpcrun.runs.run_lock import read_supervisor_record
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.records import read_json_lines
from hpcrun.submission.prepare import prepare_job
from hpcrun.typed_json import parse_typed
from tests.launch.pretended import PretendedNodes, PretendedSite, supervise
from tests.launch.supervised import Recorder, Site

HOST = os.uname().nodename
UNDISTURBED_S = 12.0


class NamedNodes(PretendedNodes):
    """The ranks speak from the nodes that they are said to stand on."""

    def news(self, *, look: bool) -> Iterator[AttemptEvent]:
        for one in super().news(look=look):
            yield replace(one, node=self.where[one.rank]) if isinstance(one, RankProgress) else one


def test_a_slowed_node_is_named_and_the_others_are_not(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    slowed, named = list[float](), list[tuple[float, str]]()
    strikes = list[Injection]()

    def slow() -> None:
        slowed.append(time.monotonic())
        run = site.only_run
        fault = InjectedFault("slow", node=HOST, share=0.6, for_s=60.0)
        supervisor = parse_typed(SupervisorProcess, read_supervisor_record(run), allow_extra=True)
        strikes.append(Injection(InjectionTarget(run, fault, 1, HOST, (1,), supervisor)))

    def note(text: str) -> None:
        if text.startswith("node "):
            named.append((time.monotonic(), text.split()[1]))
            os.kill(os.getpid(), signal.SIGTERM)

    timers = [threading.Timer(UNDISTURBED_S, slow)]
    timers.append(threading.Timer(UNDISTURBED_S + 60, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    observer = Recorder(on_ready=lambda: [timer.start() for timer in timers], on_note=note)  # type: ignore
    there = PretendedSite(Allocation(1, ("a", "b"), "1", is_batch=False), None, pretended=NamedNodes("ab"))
    words = ("resources={nodes: 2, ranks_per_node: 1}", "parallel.dp_replicate=2", "train.steps=1000000")
    outcome = supervise(there, prepare_job(site.job, [*words, "checkpoint.at_end=false"]), observer)
    for timer in timers:
        timer.cancel()
    for strike in strikes:
        strike.close()
    assert [node for _, node in named] == ["b"], outcome.message
    assert named[0][0] > slowed[0]
    told = [one["node"] for one in read_json_lines(outcome.run.events) if one["event"] == "straggler"]
    assert told == ["b"]
    assert outcome.status == "saved"
