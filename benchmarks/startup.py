"""How long a command takes before it does anything: milliseconds over `python -c pass`.

Verbs are measured in turn with the bare interpreter, so that a drifting machine touches both alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

from hpcrun.specs.metrics import MetricRecord, StepMetric

LIGHT_MS, JOB_FILE_MS, SCRIPT_MS = 150, 450, 600


def milliseconds(command: list[str], environment: dict[str, str]) -> float:
    """Wall time of one run of a command."""
    begin = time.perf_counter()
    subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
    return 1000 * (time.perf_counter() - begin)


def finished_run(root: Path) -> str:
    """A run directory as a finished run leaves it, for the verbs that look at one."""
    run = root / "startup-0101-000000-0000"
    (run / "attempts" / "1" / "logs").mkdir(parents=True)
    (run / "attempts" / "1" / "logs" / "rank-0.log").write_text("ready\n")
    (run / "spec.yaml").write_text("name: startup\n")
    (run / "job.json").write_text('{"pid": 1, "start_ticks": 0, "host": "elsewhere", "steps": 10}\n')
    step = StepMetric(10, 2.5, 0.5, 1e-3, 1000.0, 1.0, {}, None, None)
    (run / "metrics.jsonl").write_text(json.dumps(MetricRecord(1, 1e9, step).as_json()) + "\n")
    (run / "exit.json").write_text('{"status": "done", "exit_code": 0, "attempt": 1, "step": 10}\n')
    return run.name


def main() -> int:
    """Print the table and one line a claim."""
    parser = harness.options(__doc__)
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else 21
    report = harness.Report("startup")
    report.header()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        run = finished_run(root)
        job = root / "job.yaml"
        job.write_text("model: tiny\ndata: {text: python-stdlib}\n")
        environment = os.environ | {"HPCRUN_ROOT": str(root)}
        verbs = {
            "--help": (["--help"], LIGHT_MS),
            "status": (["status", run], LIGHT_MS),
            "logs": (["logs", run], LIGHT_MS),
            "list": (["list"], LIGHT_MS),
            "cancel": (["cancel", run], LIGHT_MS),
            "train --print-spec": (["train", str(job), "--print-spec"], JOB_FILE_MS),
            "submit --dry-run": (["submit", str(job), "--dry-run"], SCRIPT_MS),
        }
        for verb, (words, limit) in verbs.items():
            over = []
            command = [sys.executable, "-m", "hpcrun", *words]
            for _ in range(rounds):
                bare = milliseconds([sys.executable, "-c", "pass"], environment)
                over.append(milliseconds(command, environment) - bare)
            report.row(verb=verb, ms_over_bare=harness.spread(over), runs=rounds)
            median = statistics.median(over)
            report.claim(f"start of `{verb}` in ms over bare python", median, f"{limit}", median <= limit)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
