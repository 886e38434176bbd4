"""How often a run that is well is taken for one that hangs: short runs with stalls, real ones with pauses.

The short ones are programs of two ranks that report their steps; now and then one stalls, for less than what
a step may take by then. The real ones train, with a save and a first step (as compilation would make it) that
take a minute each. Every run that needs a second attempt was ended without reason.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness

from hpcrun.specs.rundir import RunDir

SHORT_RUNS, AT_ONCE, SHORT_S, REAL_RUNS, PAUSE_S = 100, 10, 20.0, 3, 60.0
STEP_S, FLOOR_S, FACTOR = 0.2, 2.0, 5.0
SHORT = """
import os, random, sys, time
import hpcrun
chance = random.Random(f"{sys.argv[1]} {os.environ['RANK']}")
end = time.monotonic() + float(sys.argv[2])
step = 0
while time.monotonic() < end:
    step += 1
    hpcrun.progress(step)
    time.sleep(0.2 * chance.uniform(0.5, 1.5))
    if step > 5 and chance.random() < 0.1:
        # A limit is five times the longest step, at least two seconds: this is below either.
        time.sleep(chance.uniform(0.5, 1.5))
    if step % 20 == 0:
        hpcrun.progress(step, "checkpoint")
        time.sleep(chance.uniform(0.5, 4.0))
hpcrun.progress(step, "end")
"""
PAUSES = f"""
import importlib.abc, sys, time

class Pauses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "hpcrun.runtime.loop":
            sys.meta_path.remove(self)
            import hpcrun.runtime.direct_checkpoint as checkpoint, hpcrun.runtime.sharded_model as sharded
            save, work = checkpoint.Checkpointer.save, sharded.ShardedModel.forward_backward
            done = []
            def slow_save(self, *words):
                time.sleep({PAUSE_S})
                return save(self, *words)
            def slow_first(self, *words):
                if not done:
                    done.append(1)
                    time.sleep({PAUSE_S})
                return work(self, *words)
            checkpoint.Checkpointer.save, sharded.ShardedModel.forward_backward = slow_save, slow_first
        return None

sys.meta_path.insert(0, Pauses())
"""
REAL = (
    "model={vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}",
    "data={text: python-stdlib, seq_len: 32}",
    "parallel={dp_shard: 2}",
    "train={steps: 400, mbs: 1, gbs: 4}",
    "checkpoint={every: 390, at_end: false}",
)


def attempts_of(words: list[str], root: Path, extra: dict[str, str]) -> tuple[int, int]:
    """Run one of our commands; its exit code, and how many attempts it took."""
    environ = {**os.environ, "HPCRUN_ROOT": str(root), "OMP_NUM_THREADS": "1", **extra}
    argv = [sys.executable, "-m", "hpcrun", "train", *words]
    done = subprocess.run(argv, env=environ, cwd=root, capture_output=True, text=True, check=False)
    (run,) = (path for path in root.iterdir() if path.is_dir() and (path / "spec.yaml").exists())
    return done.returncode, len(RunDir(run).attempts())


def short(folder: Path, number: int) -> tuple[int, int]:
    """A program that reports its steps, and stalls."""
    root = folder / f"short-{number}"
    root.mkdir()
    (root / "program.py").write_text(SHORT)
    watch = f"watch={{floor: {FLOOR_S:g}s, slow: 30s, factor: {FACTOR}}}"
    words = ["name=short", watch, "parallel.dp_replicate=2", "retry={hang: 3}"]
    return attempts_of(
        [*words, "--", sys.executable, "program.py", str(number), str(SHORT_S)],
        root,
        {"PYTHONPATH": _package()},
    )


def real(folder: Path, number: int) -> tuple[int, int]:
    """Training with pauses of a minute."""
    root = folder / f"real-{number}"
    (root / "pauses").mkdir(parents=True)
    (root / "pauses" / "sitecustomize.py").write_text(PAUSES)
    (root / "job.yaml").write_text(f"name: real\ntrain: {{seed: {random.Random(number).randrange(1000)}}}\n")
    path = f"{root / 'pauses'}{os.pathsep}{_package()}"
    return attempts_of(["job.yaml", *REAL], root, {"PYTHONPATH": path})


def _package() -> str:
    return str(Path(__file__).parents[1])


def main() -> int:
    """Print the table and one line a claim."""
    arguments = harness.options(__doc__).parse_args()
    report = harness.Report("false_kills")
    report.header()
    folder = Path(tempfile.mkdtemp(prefix="hpcrun-false-kills-"))
    began = time.monotonic()
    for what, one, count in (
        ("short runs with stalls", short, AT_ONCE if arguments.quick else SHORT_RUNS),
        ("real runs with pauses of a minute", real, 0 if arguments.quick else REAL_RUNS),
    ):
        if not count:
            continue
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(lambda number, one=one: one(folder, number), range(count)))
        failed = [code for code, _ in found if code]
        if failed:
            return harness.fail(f"{len(failed)} of {count} {what} ended with {failed[:3]}; see {folder}")
        again = sum(attempts - 1 for _, attempts in found)
        report.row(what=what, runs=count, attempts=count + again, seconds=time.monotonic() - began)
        report.claim(f"ended without reason, of {count} {what}", str(again), "0", again == 0)
    shutil.rmtree(folder)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
