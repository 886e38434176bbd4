"""Runs that make no more progress: seen by limits that are learnt, looked into, ended, gone on with."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrun.launch.agents.messages import AGENT_MESSAGES, NodeReport
from hpcrun.launch.attempt_events import RankProgress
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.launch.watch.progress import ProgressReporter
from hpcrun.launch.watch.progress_listener import ProgressListener
from hpcrun.launch.watch.stacks import (
    RankStack,
    StackGroup,
    find_outlier,
    group_stacks,
    parse_stack_frames,
    parse_stack_lines,
)
from hpcrun.launch.watch.stragglers import StragglerDetector
from hpcrun.launch.watch.watchdog import HangWatchdog
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.records import read_json, read_json_lines
from hpcrun.specs.watch import WatchSpec
from hpcrun.submission.prepare import prepare_job
from hpcrun.typed_json import render_typed
from tests.launch.pretended import PretendedNodes, PretendedSite, supervise
from tests.launch.supervised import LIMITS, PROGRAM, Recorder, Site

NODE = os.uname().nodename
QUICK = ("watch={floor: 1s, slow: 20s}", "retry={hang: 1, crash: 0}")


def events_of(site: Site, name: str) -> list[dict[str, Any]]:
    return [one for one in read_json_lines(site.only_run.events) if one["event"] == name]


def test_a_rank_that_loops_is_found_by_its_stack_and_the_run_goes_on(site: Site) -> None:
    observer = Recorder()
    outcome = site.run("hang-in-python", *QUICK, ranks=4, observer=observer)
    assert (outcome.status, outcome.attempt) == ("done", 2)
    first = read_json(outcome.run.attempt(1).outcome)
    assert first["relaunched"] == "hang"
    assert "no progress in step 12 for " in first["message"]
    assert (
        f"rank 1 on node {NODE} stands apart: rank 1: read_the_next_batch (rank_program.py) < steps"
        in (first["message"])
    )
    assert "ranks 0, 2, 3: wait_for_the_others (rank_program.py)" in first["message"]
    assert "most recent call first" in outcome.run.attempt(1).stack(1).read_text()
    (hang,), (dump,) = events_of(site, "hang"), events_of(site, "stacks")
    assert hang["ranks"] == [0, 1, 2, 3]
    assert [one["ranks"] for one in dump["groups"]] == [[1], [0, 2, 3]]
    assert any("going on from step" in note for note in observer.notes)


def test_a_rank_that_is_stopped_is_named_though_it_can_write_nothing(site: Site) -> None:
    outcome = site.run("stops-itself", *QUICK, ranks=2)
    first = read_json(outcome.run.attempt(1).outcome)
    assert f"rank 1 on node {NODE} stands apart: rank 1: stopped by a signal" in first["message"]
    assert (outcome.status, outcome.attempt) == ("done", 2)


class FadingNodes(PretendedNodes):
    """Two nodes; one of them is lost while the ranks are looked into."""

    def __init__(self, falls: str) -> None:
        super().__init__(("a", "b"))
        self._falls = falls

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        seen = super().dump(timeout_s)
        self.lose(self._falls)
        return seen


class FadingSite(PretendedSite):
    def place(self, spec: JobSpec, *_: object, **__: object) -> Placement:
        return Placement(("a", "b"))


@pytest.mark.parametrize(
    ("falls", "cause", "nodes"), [("a", "hang", ["b"]), ("b", "node", ["b"])], ids=["another", "the same"]
)
def test_a_node_that_goes_after_a_hang_is_told_and_explains_it_only_where_it_can(
    site: Site, falls: str, cause: str, nodes: list[str]
) -> None:
    there = FadingSite(Allocation(1, ("a", "b"), "1", is_batch=False), None, pretended=FadingNodes(falls))
    spread = ("parallel.dp_replicate=2", "resources.nodes=2", "watch.floor=1s", "retry={hang: 0, node: 0}")
    prepared = prepare_job(site.job, [*spread, "watch.slow=20s"])
    outcome = supervise(there, prepared, Recorder(), (str(PROGRAM), "stops-itself"))
    (fault,), (lost,) = events_of(site, "fault"), events_of(site, "node_lost")
    assert (fault["cause"], fault["nodes"], lost["node"]) == (cause, nodes, falls)
    assert ("no progress" in outcome.message) == (cause == "hang")
    assert fault["rank"] == (1 if cause == "hang" else None)


def test_a_long_save_is_no_hang(site: Site) -> None:
    outcome = site.run("slow-save", "watch={floor: 1s, slow: 20s}")
    assert (outcome.status, outcome.attempt) == ("done", 1)


def test_nobody_is_watched_where_the_job_does_not_want_it(site: Site) -> None:
    (site.path / "quiet.py").write_text(
        "import hpcrun, time\n"
        "for step in range(9):\n    hpcrun.progress(step); time.sleep(0.06)\n"
        "time.sleep(2.5)\n"
    )
    for watch, status in (("{hangs: false, floor: 1s}", "done"), ("{floor: 1s}", "failed")):
        words = [sys.executable, str(site.path / "quiet.py")]
        prepared = prepare_job(None, [f"watch={watch}", "retry={hang: 0}", "name=own"], command=words)
        with SignalQueue() as inbox:
            outcome = Supervisor(prepared, inbox, Recorder(), limits=LIMITS).run()
        assert outcome.status == status, outcome.message
    assert "no progress in step 8 for " in outcome.message
    assert "<module> (quiet.py)" in outcome.message


def test_progress_outside_of_a_run_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import hpcrun

    monkeypatch.delenv("HPCRUN_PROGRESS", raising=False)
    hpcrun.progress(3)
    hpcrun.progress(section="checkpoint")


def reported(listener: ProgressListener) -> list[tuple[int, str, int | None]]:
    return [(one.rank, one.section, one.step) for one in listener.hear()]


def spoken(**odd: Any) -> bytes:
    """A message of rank 0, with other values for some of its own."""
    right = {"rank": 0, "section": "step", "step": 4, "longest_s": {}, "can_dump": False, "probe_s": None}
    return json.dumps(right | odd).encode()


def test_what_strangers_send_is_not_taken() -> None:
    name = f"hpcrun-test-{os.urandom(8).hex()}"
    listener = ProgressListener(name, [0, 1])
    good = ProgressReporter(1, name)
    good.report("step", 4)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0{name}")
    for text in (
        b"\xff\xfe", b"{", b"[]", b"7", b"x" * 9000, spoken(rank=9), spoken(rank=[1]), spoken(section=5),
        spoken(longest_s=[]), spoken(longest_s={"step": -1}), spoken(longest_s={"step": math.nan}),
        spoken(step="4"), spoken(step=-1), spoken(probe_s=True), spoken(can_dump=1), spoken(more=1),
    ):  # fmt: skip
        stranger.send(text)
    assert reported(listener) == [(1, "step", 4)]
    stranger.send(spoken())
    assert reported(listener) == [(0, "step", 4)]
    good.report("x" * 5000, True)  # a program may say anything
    assert reported(listener) == [(1, "x" * 40, None)]
    stranger.close()
    listener.close()
    good.report("eval", 5)
    good.close()


def test_a_second_listener_under_a_name_hears_nothing_and_harms_nobody() -> None:
    name = f"hpcrun-test-{os.urandom(8).hex()}"
    first, second = ProgressListener(name, [0]), ProgressListener(name, [0])
    reporter = ProgressReporter(0, name)
    reporter.report("init")
    assert (reported(second), reported(first)) == ([], [(0, "init", None)])
    for one in (reporter, first, second):
        one.close()


def test_a_rank_whose_listener_does_not_read_is_not_held_up() -> None:
    name = f"hpcrun-test-{os.urandom(8).hex()}"
    listener = ProgressListener(name, [0])
    reporter = ProgressReporter(0, name)
    for step in range(5000):
        reporter.report("step" if step % 2 else "checkpoint", step)
    (newest,) = listener.hear()
    assert newest.longest_s.keys() == {"step", "checkpoint"}
    reporter.report("eval", 5000)
    assert reported(listener) == [(0, "eval", 5000)]
    reporter.close()
    listener.close()


def test_the_first_steps_say_nothing_about_the_others() -> None:
    name = f"hpcrun-test-{os.urandom(8).hex()}"
    listener = ProgressListener(name, [0])
    reporter = ProgressReporter(0, name)
    for step, seconds in enumerate((0.3, 0.1, 0.1, 0.06, 0.06)):
        reporter.report("step", step)
        time.sleep(seconds)
    reporter.report("eval", 5)
    longest = listener.hear()[0].longest_s["step"]
    assert 0.05 < longest < 0.3
    reporter.close()
    listener.close()


def progress_at(rank: int, at: int, section: str = "step", **longest: float) -> RankProgress:
    return RankProgress(rank, f"n{rank}", section, at, longest)


def dog(**watch: Any) -> HangWatchdog:
    return HangWatchdog(JobSpec(watch=WatchSpec(**watch)))


def test_limits_are_learnt_and_sections_have_their_own() -> None:
    watchdog = dog(factor=3.0, floor="10s", slow="1m")
    assert (watchdog.limit_s("step", 0), watchdog.limit_s("eval", 0)) == (60.0, 60.0)
    watchdog.heard(progress_at(0, 5, step=8.0, checkpoint=30.0), 0.0)
    assert [watchdog.limit_s(one, 0) for one in ("step", "checkpoint", "eval")] == [24.0, 90.0, 60.0]
    watchdog.begin()
    # Another attempt compiles again, and knows what the last one has learnt.
    assert watchdog.limit_s("step", 0) == 60.0
    watchdog.heard(progress_at(0, 5, step=1.0), 0.0)
    assert watchdog.limit_s("step", 0) == 24.0


def test_a_long_first_step_is_no_hang_when_another_rank_has_told_of_the_next_ones_first() -> None:
    watchdog = dog(floor="30s", slow="10m")
    for rank in (0, 1):
        watchdog.heard(progress_at(rank, 1), 0.0)
    # Compiled for a minute; then ten steps in a second, of which one rank has reported.
    watchdog.heard(progress_at(1, 11, step=0.1), 61.0)
    assert watchdog.hang(61.1) is None
    watchdog.heard(progress_at(0, 11, step=0.1), 61.2)
    for now in range(62, 91, 2):
        assert watchdog.hang(now) is None
    assert str(watchdog.hang(92.0)).startswith("no progress in step 11 for 31 s")


def test_who_is_late_first_is_told_first() -> None:
    watchdog = dog(floor="10s")
    for rank in range(3):
        watchdog.heard(progress_at(rank, 7, step=0.5), float(rank))
    for now in range(3, 12):
        hang = watchdog.hang(float(now))
        assert (hang is None) == (now < 11)
    assert hang is not None
    assert (hang.ranks, hang.step, hang.silent_s, hang.limit_s, hang.learnt_s) == ((0,), 7, 11.0, 10.0, 0.5)
    assert str(hang) == "no progress in step 7 for 11 s (10 s are allowed, it took 0.5 s at most)"


def test_a_rank_that_moves_is_not_late_and_a_supervisor_that_slept_blames_nobody() -> None:
    watchdog = dog(floor="10s")
    watchdog.heard(progress_at(0, 7, step=0.5), 0.0)
    assert watchdog.hang(4.0) is None
    assert watchdog.hang(500.0) is None
    watchdog.heard(progress_at(0, 8), 504.0)
    assert watchdog.hang(504.5) is None
    assert [watchdog.hang(504.0 + one) is None for one in range(1, 13)] == [True] * 10 + [False] * 2


def test_a_stopped_rank_has_the_limit_of_a_step_whatever_it_did() -> None:
    watchdog = dog(floor="10s", slow="10m")
    watchdog.heard(progress_at(0, 7, "checkpoint"), 0.0)
    watchdog.heard(progress_at(1, 7, "checkpoint"), 0.0)
    watchdog.stopped(1, True, 2.0)
    assert [watchdog.hang(float(now)) is None for now in range(1, 14)] == [True] * 12 + [False]
    hang = watchdog.hang(14.0)
    assert hang is not None
    assert (hang.ranks, hang.section, hang.step) == ((1,), "checkpoint", 7)
    watchdog.stopped(1, False, 14.5)
    assert watchdog.hang(15.0) is None


def test_ranks_that_never_report_are_watched_as_processes_alone() -> None:
    watchdog = dog(floor="1s", slow="1s")
    assert [watchdog.hang(float(now)) for now in range(100)] == [None] * 100


FAULTHANDLER = """\
Thread 0x00007f0a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 622 in run

Current thread 0x00007f0b (most recent call first):
  File "/x/hpcrun/runtime/loop.py", line 150 in _step
  File "<frozen runpy>", line 88 in _run_code
"""
PY_SPY = """\
Process 2387: python train.py
Python v3.11.9 (/usr/bin/python3.11)

Thread 2387 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2501)
    step (train.py:12)
Thread 2390 (idle): "Thread-1"
    wait (threading.py:324)
"""


def test_both_kinds_of_dumps_are_read() -> None:
    assert parse_stack_frames(FAULTHANDLER) == (("loop.py", "_step"), ("<frozen runpy>", "_run_code"))
    assert parse_stack_frames(PY_SPY) == (("distributed_c10d.py", "all_reduce"), ("train.py", "step"))
    assert parse_stack_frames(FAULTHANDLER + FAULTHANDLER.replace("_step", "_save"))[0] == (
        "loop.py",
        "_save",
    )
    assert parse_stack_frames("nothing\n  File 'x'\n") == ()
    assert (parse_stack_lines(FAULTHANDLER), parse_stack_lines(PY_SPY)) == ((150, 88), (2501, 12))


def test_who_stands_apart() -> None:
    def stack(rank: int, *functions: str, state: str = "S") -> RankStack:
        return RankStack(rank, f"n{rank // 2}", state, "", tuple(("a.py", one) for one in functions))

    many = [stack(rank, "reduce") for rank in range(4)]
    groups = group_stacks([*many, stack(4, "read")])
    assert groups[0] == StackGroup((4,), ("n2",), "read (a.py)")
    assert find_outlier(groups) == groups[0]
    assert find_outlier(group_stacks(many)) is None
    # Two that differ from the rest in two ways: nobody can say who of them it was.
    assert find_outlier(group_stacks([*many, stack(4, "read"), stack(5, "write")])) is None
    stopped = find_outlier(group_stacks([stack(0, "reduce"), stack(1, state="T")]))
    assert stopped is not None
    assert stopped.ranks == (1,)
    silent = find_outlier(group_stacks([*many, RankStack(4, "n2")]))
    assert silent is not None
    assert silent.place == "its node gave no answer"


def test_who_stands_apart_by_the_line_alone() -> None:
    deep = ("reduce", "wait", "sync", "layer", "step")

    def stack(rank: int, *lines: int, state: str = "S", functions: tuple[str, ...] = deep) -> RankStack:
        frames = tuple(("a.py", one) for one in functions[-len(lines) :])
        return RankStack(rank, f"n{rank}", state, "", frames, lines)

    one = group_stacks([stack(0, 7), stack(1, 7), stack(2, 9), stack(3, 7)])
    assert find_outlier(one) == StackGroup((2,), ("n2",), "step (a.py:9)")
    assert str(one[1]) == "ranks 0, 1, 3: step (a.py:7)"
    # Where they differ may be far out, and is shown all the same.
    far = group_stacks([stack(rank, 1, 2, 3, 4, 60 if rank == 1 else 50) for rank in range(4)])
    assert find_outlier(far) == far[0]
    assert far[0].place == "reduce (a.py:1) < wait (a.py:2) < sync (a.py:3) < … < step (a.py:60)"
    # By their functions first: a line is told only where these say nothing.
    mixed = group_stacks([stack(0, 7), stack(1, 7), stack(2, 9), stack(3, 7), stack(4, 1, 7)])
    assert find_outlier(mixed) == StackGroup((4,), ("n4",), "layer (a.py) < step (a.py)")
    halves = [
        *(stack(rank, 7) for rank in range(4)),
        *(stack(rank, 1, 7) for rank in range(4, 7)),
        stack(7, 2, 7),
    ]
    assert find_outlier(group_stacks(halves)) == StackGroup((7,), ("n7",), "layer (a.py:2) < step (a.py:7)")
    # All alike, two each, or polling in turn: nobody.
    assert find_outlier(group_stacks([stack(rank, 7) for rank in range(4)])) is None
    assert find_outlier(group_stacks([stack(rank, 7 + rank % 2) for rank in range(4)])) is None
    assert [str(two) for two in group_stacks([stack(0, 7), stack(1, 8)])] == [
        "rank 0: step (a.py:7)",
        "rank 1: step (a.py:8)",
    ]
    polls = [
        RankStack(rank, "n", "S", "", (("mpi_control.py", "_wait"),), (140 + (rank == 2),))
        for rank in range(4)
    ]
    assert find_outlier(group_stacks(polls)) is None
    # A stopped rank is what it is, wherever it stands.
    stopped = group_stacks([stack(0, 7), stack(1, 7), stack(2, 9, state="T"), stack(3, 7)])
    assert find_outlier(stopped) == StackGroup((2,), ("n2",), "stopped by a signal")


def probes(node: int, *times: float, rank: int | None = None) -> RankProgress:
    return RankProgress(node if rank is None else rank, f"n{node}", "step", 1, {}, list(times))


def test_a_slow_node_is_named_once_and_again_after_it_was_fine() -> None:
    stragglers = StragglerDetector()
    for node in range(3):
        stragglers.heard(probes(node, *[0.001] * 9))
    assert stragglers.new() == []
    stragglers.heard(probes(1, *[0.002] * 12))
    (slow,) = stragglers.new()
    assert (slow.node, slow.score) == ("n1", 0.5)
    assert str(slow).startswith("node n1 takes 2.00 times as long as the others for the same work")
    assert stragglers.new() == []
    stragglers.heard(probes(1, *[0.001] * 12))
    assert stragglers.new() == []
    stragglers.heard(probes(1, *[0.002] * 12))
    assert [one.node for one in stragglers.new()] == ["n1"]


def test_one_bad_measurement_or_one_node_alone_says_nothing() -> None:
    stragglers = StragglerDetector()
    stragglers.heard(probes(0, *[0.001] * 9))
    assert stragglers.new() == []
    stragglers.heard(probes(1, *[0.001] * 7, 0.5, 0.4))
    assert stragglers.new() == []
    # Two far apart, in a window that is full.
    stragglers.heard(probes(1, *[0.001] * 5, 0.5, *[0.001] * 8, 0.4))
    assert stragglers.new() == []


def test_what_only_some_measurements_show_names_a_node_all_the_same() -> None:
    stragglers = StragglerDetector()
    stragglers.heard(probes(0, *[0.001] * 9))
    stragglers.heard(probes(1, *[0.001, 0.004, 0.001] * 3))
    assert [one.node for one in stragglers.new()] == ["n1"]


def test_progress_travels_as_a_line() -> None:
    one = progress_at(3, 7, step=0.5)
    assert AGENT_MESSAGES.parse(json.loads(render_typed(NodeReport(1, one)))) == NodeReport(1, one)


def test_stacks_are_found_at_their_place(tmp_path: Path, site: Site) -> None:
    run = site.run("done").run
    assert run.attempt(1).stacks == run.path / "attempts" / "1" / "stacks"
