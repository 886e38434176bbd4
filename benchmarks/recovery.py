"""What faults cost in the lab of tests/lab: detection, relaunch, first new step, and work lost.

Six nodes with a rank each (dp 3, pp 2) and two spares train while ranks are killed and stopped and nodes, the
batch host too, lose their power or their network. Times come from the run's own events. `seen` is from the
fault to the first event, `decided` from there to the decision to go on, `started` from there to the first
rank of the next attempt, `back` from the decision to the first step beyond all before; `cold` is from the
first launch of that run to its first step. Beside it the same faults under plain `srun` with requeue, and
under torchrun with restarts, around a plain torch loop that saves as often.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

from hpcrun.errors import HpcrunError, SiteError
from hpcrun.runs.ledger import read_ledger
from hpcrun.specs.metrics import MetricRecord, StepMetric, read_metrics
from hpcrun.specs.records import read_json, read_json_lines
from hpcrun.specs.rundir import RunDir

if TYPE_CHECKING:
    from tests.lab.cluster import Lab

ROOT = Path(__file__).parents[1]
LOOP = ROOT / "benchmarks" / "plain_loop.py"
NODES, SPARES, SAVE_EVERY = 6, 2, 5
PEER_S = 420.0
SEEN_RANK_S, SEEN_NODE_S, STARTED_S, COLD_STARTS, OTHER = 1.0, 10.0, 5.0, 1.2, 0.02
JOB = f"""
name: recovery
model: {{vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}}
data: {{text: python-stdlib, pattern: "a*.py", seq_len: 32, holdout: 0}}
parallel: {{dp_shard: 3, pp: 2}}
train: {{steps: 100000, mbs: 1, gbs: 6}}
checkpoint: {{every: {SAVE_EVERY}}}
retry: {{crash: 1000, hang: 1000}}
watch: {{floor: 10s}}
resources: {{nodes: {NODES}, spares: {SPARES}, ranks_per_node: 1, mem: 1G}}
"""


@dataclass(frozen=True)
class Cost:
    """What one fault cost, in seconds."""

    seen: float
    decided: float
    started: float
    back: float
    cold: float
    lost: int
    """Steps that were done again."""

    @property
    def cold_starts(self) -> float:
        """From the decision to new progress, in cold starts of the same world."""
        return self.back / self.cold


class Bench:
    """A lab, and one of our runs in it at a time."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.env = {"HPCRUN_ROOT": str(folder / "runs"), "XDG_CONFIG_HOME": str(folder / "config")}
        (folder / "job.yaml").write_text(JOB)

    def start(self) -> RunDir:
        """A run that makes progress."""
        words = [sys.executable, "-m", "hpcrun", "submit", "job.yaml"]
        done = self.lab.run(words, env=self.env, cwd=self.folder, timeout_s=120).require_success()
        run = RunDir(self.folder / "runs" / done.stdout.strip())
        self.wait(lambda: newest_step(run) > SAVE_EVERY, 180)
        return run

    def stop(self, run: RunDir) -> None:
        """End a run, and make the lab whole again."""
        job = str(read_json(run.job)["submissions"][-1]["job"])
        self.lab.run(["scancel", job]).require_success()
        self.lab.mend()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """SiteError when it does not come true in time."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise SiteError(f"waited {timeout_s:g} s in vain; {self.folder}")
            time.sleep(0.1)


def steps(run: RunDir) -> list[MetricRecord]:
    """The lines of steps."""
    return [record for record in read_metrics(run) if isinstance(record.metric, StepMetric)]


def newest_step(run: RunDir) -> int:
    """The highest step so far."""
    return max((record.metric.step for record in steps(run)), default=0)


def strike(bench: Bench, run: RunDir, fault: str) -> Cost:
    """Let a fault happen to a run, and wait until it is back."""
    attempt = run.attempts()[-1]
    bench.wait(lambda: any(record.attempt == attempt.number for record in steps(run)), 180)
    time.sleep(2.0)
    before = newest_step(run)
    at = FAULTS[fault](bench, run)
    reached = max(before, newest_step(run))
    bench.wait(
        lambda: any(
            record.metric.step > reached and record.attempt > attempt.number for record in steps(run)
        ),
        240,
    )
    return cost_of(run, attempt.number, at)


def cost_of(run: RunDir, number: int, at: float) -> Cost:
    """The times between the events of a fault that happened then, in this attempt."""
    events = [one for one in read_json_lines(run.events) if one["time"] >= at]
    seen = first(events, "rank_ended", "rank_stopped", "node_lost", "hang", "failover")
    # The next supervisor is started when its agent has given the former one up.
    seen = min([seen, *(one["claimed"] for one in events if one.get("claimed"))])
    decided = first(events, "relaunch")
    started = first(events, "rank_started")
    records = steps(run)
    old = max(record.metric.step for record in records if record.attempt <= number)
    later = [record for record in records if record.attempt > number]
    back = min(record.time for record in later if record.metric.step > old)
    launch = next(one["time"] for one in read_json_lines(run.events) if one["event"] == "launch")
    cold = records[0].time - launch
    lost = old - (min(record.metric.step for record in later) - 1)
    return Cost(seen - at, decided - seen, started - decided, back - decided, cold, lost)


def first(events: Sequence[dict[str, Any]], *names: str) -> float:
    """When the first of these events happened."""
    found: float = next(one["time"] for one in events if one["event"] in names)
    return found


def of_rank(run: RunDir, rank: int) -> dict[str, Any]:
    """A rank's record in the newest attempt."""
    found: dict[str, Any] = read_json(run.attempts()[-1].rank_record(rank))
    return found


def signal_rank(name: str) -> Callable[[Bench, RunDir], float]:
    """A rank in the middle gets a signal."""

    def do(bench: Bench, run: RunDir) -> float:
        record = of_rank(run, 3)
        at = time.time()
        bench.lab.node(record["node"]).run(["kill", f"-{name}", str(record["pid"])]).require_success()
        return at

    return do


def worker(run: RunDir) -> str:
    """The node of the last rank, which is not the supervisor's."""
    host = read_json(run.attempts()[-1].supervisor)["host"]
    nodes: list[str] = read_json(run.attempts()[-1].placement)["nodes"]
    return [node for node in nodes if node != host][-1]


def power_off_worker(bench: Bench, run: RunDir) -> float:
    """A node of the ranks."""
    node = bench.lab.node(worker(run))
    at = time.time()
    node.power_off()
    return at


def power_off_batch_host(bench: Bench, run: RunDir) -> float:
    """The node of the supervisor."""
    node = bench.lab.node(read_json(run.attempts()[-1].supervisor)["host"])
    at = time.time()
    node.power_off()
    return at


def cut_off(bench: Bench, run: RunDir) -> float:
    """A node of the ranks loses its network, and goes on by itself."""
    node = bench.lab.node(worker(run))
    at = time.time()
    node.cut_link()
    return at


FAULTS: dict[str, Callable[[Bench, RunDir], float]] = {
    "killed rank": signal_rank("KILL"),
    "stopped rank": signal_rank("STOP"),
    "powered-off worker": power_off_worker,
    "powered-off batch host": power_off_batch_host,
    "partitioned node": cut_off,
}
PER_RUN = {"killed rank": 100, "stopped rank": 2, "powered-off worker": 2, "powered-off batch host": 1}
"""How many of them a run can take: a node less each, and two spares."""


def measure(bench: Bench, report: harness.Report, fault: str, count: int) -> tuple[list[Cost], list[float]]:
    """One kind of fault, so many times; the share of `other` in the ledger of each run."""
    costs: list[Cost] = []
    others: list[float] = []
    while len(costs) < count:
        run = bench.start()
        for _ in range(min(PER_RUN.get(fault, 2), count - len(costs))):
            costs.append(strike(bench, run, fault))
        requeued = [one for one in read_json_lines(run.events) if one["event"] == "requeue"]
        if requeued:
            report.claim(f"{fault}: requeues while a spare was left", len(requeued), "0", False)
        ledger = read_ledger(run, now=time.time())
        others.append(ledger.buckets["other"] / ledger.wall_s)
        bench.stop(run)
    report.row(
        fault=fault,
        n=len(costs),
        seen_s=harness.spread([one.seen for one in costs]),
        decided_s=harness.spread([one.decided for one in costs]),
        started_s=harness.spread([one.started for one in costs]),
        back_s=harness.spread([one.back for one in costs]),
        cold_s=harness.spread([one.cold for one in costs]),
        lost_steps=harness.spread([one.lost for one in costs]),
    )
    return costs, others


def claims(report: harness.Report, fault: str, costs: Sequence[Cost], others: Sequence[float]) -> None:
    """The targets of one kind of fault; a stopped rank is seen by its learnt limit, which is no target."""
    seen = [one.seen for one in costs]
    if fault != "stopped rank":
        target = SEEN_RANK_S if fault == "killed rank" else SEEN_NODE_S
        median = statistics.median(seen)
        report.claim(f"{fault}: seen after, s", harness.spread(seen), f"{target:g}", median <= target)
    started = [one.started for one in costs]
    report.claim(
        f"{fault}: decision to first rank, s",
        harness.spread(started),
        f"{STARTED_S:g}",
        statistics.median(started) <= STARTED_S,
    )
    ratios = [one.cold_starts for one in costs]
    report.claim(
        f"{fault}: decision to first new step, cold starts",
        harness.spread(ratios),
        f"{COLD_STARTS:g}",
        statistics.median(ratios) <= COLD_STARTS,
    )
    report.claim(f"{fault}: share of `other` in the ledger", max(others), f"{OTHER:g}", max(others) <= OTHER)


OF_PEERS = ("killed rank", "powered-off worker", "powered-off batch host")
"""The faults that peers are measured with, once each."""
PEERS = {
    "srun and requeue": (
        "srun --kill-on-bad-exit=1 --input=none {python} {loop} {folder} 100000"
        " || scontrol requeue $SLURM_JOB_ID"
    ),
    "torchrun with restarts": (
        "srun --input=none {python} -m torch.distributed.run --nnodes=$((SLURM_NNODES - 1)):$SLURM_NNODES"
        " --nproc-per-node=1 --max-restarts=9 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
        " --rdzv-endpoint=$MASTER_ADDR:29511 {loop} {folder} 100000"
    ),
}


def measure_peer(bench: Bench, report: harness.Report, name: str, fault: str) -> None:
    """The same fault under what one would use without us; how long until there is a new step."""
    folder = Path(tempfile.mkdtemp(prefix="peer-", dir=bench.folder))
    words = PEERS[name].format(python=sys.executable, loop=LOOP, folder=folder)
    script = folder / "job.sh"
    head = f"#!/bin/sh\n#SBATCH --nodes={NODES} --ntasks-per-node=1 --mem=1G --requeue --open-mode=append\n"
    script.write_text(f"{head}export MASTER_ADDR=$(hostname) MASTER_PORT=29510\n{words}\n")
    job = bench.lab.run(["sbatch", "--parsable", str(script)], cwd=folder).require_success().stdout.strip()
    lines = folder / "steps.jsonl"
    try:
        bench.wait(lambda: len(list(read_json_lines(lines))) > 2 * SAVE_EVERY, 180)
        hosts = bench.lab.run(["scontrol", "show", "hostnames", _nodes_of(bench, job)]).stdout.split()
        node = bench.lab.node(hosts[0 if fault == "powered-off batch host" else 3])
        before = max(line["step"] for line in read_json_lines(lines))
        at = time.time()
        if fault == "killed rank":
            # But not torchrun's agent, whose command line names the loop too.
            node.run(["pkill", "-KILL", "-f", f"^{sys.executable} (-u )?{LOOP}"]).require_success()
        else:
            node.power_off()
        try:
            # Whoever died writes nothing more; a moment for those that had written already.
            time.sleep(1.0)
            before = max(line["step"] for line in read_json_lines(lines))
            bench.wait(lambda: max(line["step"] for line in read_json_lines(lines)) > before, PEER_S)
            back = (
                f"{next(line['time'] for line in read_json_lines(lines) if line['step'] > before) - at:.1f}"
            )
        except SiteError:
            back = f"not within {PEER_S:g}"
    finally:
        bench.lab.run(["scancel", job])
        bench.lab.mend()
    report.row(
        fault=f"{fault}, {name}",
        n=1,
        seen_s="",
        decided_s="",
        started_s="",
        back_s=back,
        cold_s="",
        lost_steps="",
    )


def _nodes_of(bench: Bench, job: str) -> str:
    return bench.lab.run(["squeue", "-h", "-j", job, "-o", "%N"]).require_success().stdout.strip()


def main() -> int:
    """Print the table and one line a claim."""
    parser = harness.options(__doc__)
    parser.add_argument("--fault", choices=list(FAULTS), action="append", help="only this one (repeatable)")
    parser.add_argument(
        "--peer", choices=list(PEERS), action="append", help="only the faults under this peer (repeatable)"
    )
    parser.add_argument("--count", type=int, metavar="N", help="how often each; default 5, with --quick 1")
    arguments = parser.parse_args()
    sys.path.append(str(ROOT))
    from tests.lab.cluster import Lab
    from tests.lab.packages import NoLabError

    report = harness.Report("recovery")
    report.header()
    count = arguments.count or (1 if arguments.quick else 5)
    folder = Path(tempfile.mkdtemp(prefix="hpcrun-recovery-"))
    try:
        with Lab() as lab:
            bench = Bench(lab, folder)
            for fault in arguments.fault or (() if arguments.peer else FAULTS):
                claims(report, fault, *measure(bench, report, fault, count))
            for name in arguments.peer or (() if arguments.quick or arguments.fault else PEERS):
                for fault in OF_PEERS:
                    measure_peer(bench, report, name, fault)
    except (NoLabError, HpcrunError) as error:
        return harness.fail(str(error))
    shutil.rmtree(folder)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
