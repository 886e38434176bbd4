"""Nodes that are not well are left out of an attempt, a spare steps in, and what was seen is remembered."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun.finding import Finding
from hpcrun.health.lemon_nodes import NodeFault, load_node_faults, node_fault_file
from hpcrun.health.preflight import PreflightReport, PreflightRequest
from hpcrun.launch import run_context as places
from hpcrun.launch.admission import PreflightResult, build_preflight_request, evaluate_preflight
from hpcrun.launch.agents.local_node import LocalNode
from hpcrun.launch.agents.messages import AGENT_MESSAGES
from hpcrun.launch.agents.nodes import Nodes
from hpcrun.launch.attempt_events import NodeLost
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.failover.state import FailoverState
from hpcrun.launch.fault_nodes import attribute_node_faults
from hpcrun.launch.launchers import HydraLauncher, Launcher
from hpcrun.launch.recovery import restart_cause
from hpcrun.launch.requeue_exclusion import apply_requeue_exclusion, build_requeue_exclusion
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.runs.event_text import format_events
from hpcrun.runs.ledger import read_ledger
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.cluster import parse_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import load_job
from hpcrun.specs.placement import Placement, write_placement
from hpcrun.specs.records import read_json, read_json_lines, write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.prepare import prepare_job
from hpcrun.typed_json import WrongValue
from tests.launch.supervised import LIMITS, PROGRAM, Recorder, Site

FULL = Finding("error", "space", "/tmp", "0 B are free")
HOT = Finding("warning", "site", "/etc/x", "warm")
DEAF = Finding("unknown", "gpu", "", "gave no answer within 6 s")
NODES = ("n01", "n02", "n03")
JOB = Allocation(61, NODES, "61", is_batch=True)
ALL = PreflightRequest(("space", "clock"))

Answers = Mapping[str, PreflightReport]


def said(*checks: Finding, time: float = 100.1) -> PreflightReport:
    return PreflightReport(1, time, 0.1, checks)


def judged(answers: Answers, nodes: Sequence[str] = NODES, ask: PreflightRequest = ALL) -> PreflightResult:
    return evaluate_preflight(ask, nodes, answers, 100.0, 100.2)


def test_only_an_explicit_failure_keeps_a_node_out() -> None:
    found = judged({"n01": said(HOT, DEAF), "n02": said(FULL, HOT)})
    assert found.refused == {"n02": [Finding("error", "space", "/tmp", "0 B are free")]}
    assert [(node, one.check, one.severity) for node, one in found.found] == [
        ("n01", "site", "warning"),
        ("n01", "gpu", "unknown"),
        ("n02", "space", "error"),
        ("n02", "site", "warning"),
        ("n03", "preflight", "unknown"),
    ]
    assert [*found.notes()] == [
        "preflight: n[01-02]: site: /etc/x: warm",
        "preflight: n02: space: /tmp: 0 B are free; the node is left out",
    ]
    assert [*found.notes(warnings=False)] == [
        "preflight: n02: space: /tmp: 0 B are free; the node is left out"
    ]
    event = found.as_event()
    assert (event.nodes, event.excluded, event.found[1].where) == (3, ("n02",), "n01")


def test_a_report_with_what_is_no_finding_is_refused() -> None:
    right = vars(FULL)
    odds: list[Any] = [
        None,
        [],
        {},
        {**right, "severity": "dead"},
        {**right, "text": 3},
        {**right, "more": 1},
    ]
    report = {"kind": "preflight_report", "attempt": 1, "time": 1.0, "seconds": 0.1, "checks": [right]}
    assert AGENT_MESSAGES.parse(report) == PreflightReport(1, 1.0, 0.1, (FULL,))
    for odd in odds:
        with pytest.raises(WrongValue, match="preflight_report: checks: "):
            AGENT_MESSAGES.parse(report | {"checks": [odd]})


def test_a_clock_that_is_far_off_is_told_and_can_be_left_out() -> None:
    answers = {node: said(time=100.1 + 10 * (node == "n02")) for node in NODES}
    (found,) = judged(answers).found
    assert (found[0], found[1].check, found[1].severity) == ("n02", "clock", "warning")
    assert judged(answers, ask=PreflightRequest(("space",))).found == ()


@pytest.mark.parametrize(
    ("answers", "blamed"),
    [
        ({"n01": said(FULL)}, ["n01"]),
        ({"n01": said(FULL), "n02": said(FULL), "n03": said()}, ["n01", "n02"]),
        ({node: said(FULL) for node in NODES}, []),
        ({node: said(replace(FULL, subject=node, text="0 MiB")) for node in NODES}, []),
    ],
)
def test_what_all_nodes_have_is_no_node_s_fault(answers: Answers, blamed: list[str]) -> None:
    assert [node for node, _ in judged(answers).blamed] == blamed


def test_of_one_node_alone_only_its_own_trouble_is_its_fault() -> None:
    common = replace(FULL, is_shared=True)
    assert judged({"n01": said(FULL)}, ["n01"]).blamed
    assert not judged({"n01": said(common)}, ["n01"]).blamed
    assert not judged({"n01": said(replace(FULL, check="interface"))}, ["n01"]).blamed


PROFILE = """
name: c
network: {interface: ib0, hcas: [mlx5_0]}
file_systems:
  home: {path: /home, kind: nfs}
  scratch: {path: /local/$USER, shared: false}
preflight: {checks: [/etc/hpcrun/fans], timeout_s: 2}
"""


def test_the_job_and_the_profile_say_what_is_looked_at() -> None:
    cluster = parse_cluster(PROFILE, "c.yaml")

    def spec(*words: str) -> JobSpec:
        return load_job(None, list(words), command=["true"]).spec

    assert build_preflight_request(spec("preflight=false"), cluster, 1, is_alone=False) is None
    ask = build_preflight_request(
        spec("preflight=[gpu]", "resources.gpus_per_node=4"), cluster, 2, is_alone=False
    )
    assert ask is not None
    assert "gpu" not in ask.checks
    assert "nic" in ask.checks
    assert (ask.attempt, ask.gpus, ask.scratch) == (2, 4, ["/local/$USER"])
    assert (ask.interface, ask.hcas) == ("ib0", ["mlx5_0"])
    assert (ask.programs, ask.program_s) == (["/etc/hpcrun/fans"], 2)
    alone = build_preflight_request(spec(), cluster, 1, is_alone=True)
    assert alone is not None
    assert alone.interface is None
    assert build_preflight_request(spec(), None, 1, is_alone=True) is not None


class Pretended(LocalNode):
    """Nodes with names of their own, all on this host, that answer as they are told, attempt by attempt."""

    def __init__(self, run: RunDir, names: Sequence[str], answers: list[Answers]) -> None:
        super().__init__(run)
        self._names, self._answers = tuple(names), answers

    @property
    def alive(self) -> tuple[str, ...]:
        return self._names

    def preflight(self, ask: PreflightRequest) -> dict[str, PreflightReport]:
        here = super().preflight(ask)[os.uname().nodename]
        told = self._answers.pop(0) if self._answers else {}
        return {node: replace(here, checks=told.get(node, said()).checks) for node in self._names}


@dataclass(frozen=True)
class Rack(places.RunContext):
    """An allocation of such nodes."""

    answers: list[Answers] = field(default_factory=list)

    def launcher(self, spec: JobSpec) -> Launcher:
        return HydraLauncher()

    @contextmanager
    def nodes(self, run: RunDir, spec: JobSpec, succession: FailoverState | None = None) -> Iterator[Nodes]:
        assert self.allocation is not None
        yield Pretended(run, self.allocation.nodes, self.answers)


SCONTROL = """case "$1" in
requeue) echo "$2" >>{asked} ;;
update) [ -e {asked} ] && echo "$3" >>{asked} ;;
show) echo 'JobId=61 JobName=t\n   JobState=RUNNING Partition=main ExcNodeList=n[19-20]' ;;
esac
"""


@pytest.fixture
def requeues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for Slurm's commands; the file exists after a requeue."""
    tools, asked = tmp_path / "tools", tmp_path / "requeued"
    tools.mkdir()
    scripts = {"scontrol": SCONTROL.format(asked=asked), "squeue": "exit 1", "sinfo": "seq -f n%02g 20"}
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return asked


def run(
    site: Site, *answers: Answers, mode: str = "done", resume: RunDir | None = None, words: Sequence[str] = ()
) -> tuple[AttemptOutcome, Recorder]:
    """Two ranks on three nodes."""
    wanted = ["resources={nodes: 2, spares: 1}", "parallel.dp_replicate=2", "retry={}", *words]
    prepared = prepare_job(site.job, [] if resume else wanted, resume=resume)
    rack = Rack(JOB, answers=list(answers))
    observer = Recorder()

    def command(attempt: Any) -> list[str]:
        return [sys.executable, str(PROGRAM), mode, str(attempt.run.path), str(attempt.number)]

    with SignalQueue() as inbox:
        supervisor = Supervisor(prepared, inbox, observer, site=rack, command=command, limits=LIMITS)
        return supervisor.run(), observer


def seen() -> list[NodeFault]:
    return list(load_node_faults(node_fault_file()).entries)


def test_a_spare_takes_the_place_of_a_node_that_is_not_well(site: Site, requeues: Path) -> None:
    outcome, observer = run(site, {"n02": said(FULL), "n03": said(HOT)})
    assert outcome.status == "done"
    assert read_json(outcome.run.attempt(1).placement)["nodes"] == ["n01", "n03"]
    assert "preflight: n02: space: /tmp: 0 B are free; the node is left out" in observer.notes
    event = next(read_json_lines(outcome.run.events))
    assert (event["event"], event["excluded"], event["attempt"]) == ("preflight", ["n02"], 1)
    (one,) = seen()
    assert (one.node, one.cause, one.run, one.attempt, one.job) == (
        "n02", "preflight", outcome.run.id, 1, 61
    )  # fmt: skip
    assert (one.evidence, one.log) == ("space: /tmp: 0 B are free", str(outcome.run.events))
    told = [entry.text for entry in format_events(outcome.run)]
    assert told[0] == (
        "preflight of 3 nodes; excluded: n02: n02: space: /tmp: 0 B are free; n03: site: /etc/x: warm"
    )
    assert not requeues.exists()


def test_without_preflight_nobody_is_asked(site: Site, requeues: Path) -> None:
    outcome, _ = run(site, {"n02": said(FULL)}, words=["preflight=false"])
    assert read_json(outcome.run.attempt(1).placement)["nodes"] == ["n01", "n02"]
    assert "preflight" not in [one["event"] for one in read_json_lines(outcome.run.events)]
    assert seen() == []


def test_where_too_few_nodes_are_left_the_job_is_queued_again_but_not_for_ever(
    site: Site, requeues: Path
) -> None:
    down = replace(FULL, check="nic", subject="mlx5_0", text="port 1 is 1: DOWN")
    ill = {"n02": said(FULL), "n03": said(down)}
    outcome, observer = run(site, ill)
    assert (outcome.status, outcome.exit_code, outcome.attempt) == ("failed", 3, 1)
    assert outcome.message == (
        "preflight: 2 nodes are needed, and 1 is left: n02: space: /tmp: 0 B are free; n03: nic: mlx5_0:"
        " port 1 is 1: DOWN (to continue anyway: preflight=[space, nic] leaves these checks out)"
    )
    assert requeues.read_text() == "61\nExcNodeList=n[02-03,19-20]\n"
    assert "job 61 now excludes n[02-03,19-20]" in observer.notes
    assert outcome.run.read_exit() is None, "it is in the queue"
    assert read_json(outcome.run.attempt(1).outcome)["requeued"] == "node"
    assert {one.node for one in seen()} == {"n02", "n03"}
    events = [one["event"] for one in read_json_lines(outcome.run.events)]
    assert events == ["preflight", "exit", "requeue"]
    run(site, ill, resume=outcome.run)
    third, _ = run(site, ill, resume=outcome.run)
    assert requeues.read_text() == "61\nExcNodeList=n[02-03,19-20]\n" * 2
    assert "this is the 3rd attempt in a row" in third.message
    ended = third.run.read_exit()
    assert ended is not None
    assert ended["exit_code"] == 3
    assert read_ledger(outcome.run).wall_s >= 0
    assert run(site, resume=outcome.run)[0].status == "done"


def test_what_all_nodes_have_ends_the_run_and_blames_none(site: Site, requeues: Path) -> None:
    missing = Finding("error", "interface", "ib0", "there is no such network interface")
    outcome, _ = run(site, {node: said(missing) for node in NODES})
    assert outcome.exit_code == 3
    assert "0 are left: n[01-03]: interface: ib0: there is no such network interface" in outcome.message
    assert outcome.run.read_exit() is not None
    assert not requeues.exists()
    assert seen() == []


def test_a_list_that_cannot_be_written_stops_no_run(site: Site, requeues: Path, tmp_path: Path) -> None:
    (tmp_path / "config").touch()
    outcome, observer = run(site, {"n02": said(FULL)})
    assert outcome.status == "done"
    assert [note for note in observer.notes if "what was seen of the nodes is not kept" in note]


def outcome_of(
    run: RunDir, message: str, rank: int | None = None, lost: tuple[str, ...] = ()
) -> AttemptOutcome:
    return AttemptOutcome(run, 1, "failed", 5, message, None, lost=lost, rank=rank)


@pytest.fixture
def fallen() -> RunDir:
    made = create_run("t")
    attempt = made.attempt(1).create()
    spec = load_job(None, ["resources={nodes: 2}"], command=["true"]).spec
    write_placement(attempt.placement, Placement(("n01", "n02")), spec.degrees)
    return made


def test_lost_nodes_and_ranks_that_die_without_a_word_speak_against_a_node(fallen: RunDir) -> None:
    lost = outcome_of(fallen, "node n02 is lost: silent; log: /x", lost=("n02",))
    (one,) = attribute_node_faults(lost, "node", 61)
    assert (one.node, one.cause, one.evidence) == ("n02", "node lost", "node n02 is lost: silent")
    assert one.log == str(fallen.agent_logs / "n02.log")
    died = "rank {} on node n0{} (pid 4{}) was killed by signal 7 (SIGBUS); log: /x"
    found = [
        attribute_node_faults(outcome_of(fallen, died.format(rank, rank, rank), rank), "crash", 61)[0]
        for rank in (0, 1)
    ]
    assert [one.node for one in found] == ["n01", "n02"]
    assert found[0].signature == found[1].signature
    assert (
        attribute_node_faults(outcome_of(fallen, "mpiexec was killed by signal 9 (SIGKILL)"), "crash", 61)
        == []
    )


def test_a_program_that_says_what_is_wrong_speaks_against_no_node(fallen: RunDir) -> None:
    record = fallen.attempt(1).error_record(1)
    write_json(record, {"rank": 1, "message": "IndexError: 7", "time": 1.0})
    assert (
        attribute_node_faults(outcome_of(fallen, "rank 1 on node n02: IndexError: 7", 1), "crash", 61) == []
    )
    write_json(record, {"rank": 1, "message": "the command was killed by signal 11", "time": 1.0})
    assert attribute_node_faults(
        outcome_of(fallen, "rank 1 on node n02: the command was killed", 1), "crash", 61
    )


def test_a_crash_is_remembered_by_the_supervisor(site: Site, requeues: Path) -> None:
    outcome, _ = run(site, mode="segfault", words=["retry={crash: 0}"])
    (one,) = seen()
    assert (one.node, one.cause, one.run) == ("n02", "crash", outcome.run.id)
    assert "SIGSEGV" in one.evidence


def test_lost_nodes_count_where_the_preflight_has_nothing_to_say(fallen: RunDir) -> None:
    from hpcrun.launch.admission import preflight_failure_outcome

    gone = [NodeLost("n02", "its agent ended", 0.0)]
    outcome = preflight_failure_outcome(fallen.attempt(1), PreflightResult(("n01",), 0.1), ["n01"], 2, gone)
    assert outcome.message == ("preflight: 2 nodes are needed, and 1 is left: n02: is lost: its agent ended")
    assert restart_cause(outcome) == "node"


@pytest.mark.parametrize(
    ("nodes", "needed", "excluded"),
    [
        (["n02"], 2, "n[02,19-20]"),
        (["n02", "n03", "n04"], 2, "n[02-03,19-20]"),
        (["n19"], 2, ""),
        (["x01"], 2, ""),
        (["n02"], 18, ""),
        (["n02", "n03"], 17, "n[02,19-20]"),
        ([], 2, ""),
    ],
)
def test_a_job_in_the_queue_again_asks_for_other_nodes_as_long_as_enough_are_left(
    requeues: Path, nodes: list[str], needed: int, excluded: str
) -> None:
    assert build_requeue_exclusion(JOB, nodes, needed) == excluded


def test_a_refusal_to_change_the_job_is_told(requeues: Path) -> None:
    assert (
        apply_requeue_exclusion(JOB, "n02")
        == "job 61 may be given the same nodes again: ExcNodeList=n02: exit code 1"
    )
    requeues.touch()
    assert apply_requeue_exclusion(JOB, "n02") == "job 61 now excludes n02"
