"""How often ranks under torchrun end by a signal when their script is through, on a busy node.

The script ends with a collective, as many do; a thread of gloo that is late then meets an interpreter that is
being taken down. Busy processes take the cores, and gloo's threads have the lowest class of the scheduler, so
that they are late more often than chance would have it. For reference the same without hpcrun.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

RUNS, QUICK_RUNS, BUSY = 100, 5, 4
SCRIPT = """\
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
weights = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
if sys.argv[1] != "alone":
    import hpcrun
    with hpcrun.Checkpointer(sys.argv[1]) as saves:
        saves.save(1, {"weights": weights}, wait=True)
for task in os.listdir("/proc/self/task"):
    if open(f"/proc/self/task/{task}/comm").read().startswith("pt_gloo"):
        os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
weights.full_tensor().sum().item()
dist.barrier()
dist.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def ended(place: Path, number: int, *, alone: bool) -> str:
    """How the two ranks of a run have ended: `well`, or torchrun's words."""
    done = subprocess.run(
        [*TORCHRUN, "script.py", "alone" if alone else str(place / f"saves-{number}")],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode == 0:
        return "well"
    codes = [line.split()[2] for line in done.stderr.splitlines() if line.strip().startswith("exitcode")]
    return f"exit code {codes[0]}" if codes else f"torchrun ended with {done.returncode}"


def main() -> int:
    """Measure."""
    parser = harness.options(__doc__)
    parser.add_argument("--runs", type=int, help=f"with hpcrun; default {RUNS}")
    parser.add_argument("--busy", type=int, default=BUSY, help="processes that take the cores meanwhile")
    args = parser.parse_args()
    runs = args.runs or (QUICK_RUNS if args.quick else RUNS)
    report = harness.Report("quiet exit")
    report.header()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            (place / "script.py").write_text(SCRIPT)
            found = {
                kind: [ended(place, number, alone=kind == "torch alone") for number in range(count)]
                for kind, count in (("torch alone", max(1, runs // 5)), ("with hpcrun.Checkpointer", runs))
            }
    finally:
        for one in busy:
            one.kill()
            one.wait()
    for kind, ends in found.items():
        bad = [one for one in ends if one != "well"]
        report.row(script=kind, runs=len(ends), failed=len(bad), ends=", ".join(sorted({*bad})) or "-")
    failed = sum(one != "well" for one in found["with hpcrun.Checkpointer"])
    report.claim(f"ranks ended by a signal after their script, {runs} runs", failed, "0", failed == 0)
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
