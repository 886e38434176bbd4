"""What our verbs cost over Slurm's own, in the lab of tests/lab: a real Slurm of eight nodes on this machine.

Submitting is compared in pairs, ours and plain `sbatch` of the very script that ours has rendered, in turn;
calls of Slurm's commands are counted by wrappers that come first on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

from hpcrun.errors import HpcrunError
from hpcrun.specs.provenance import Provenance, SubmissionRecord, write_provenance
from hpcrun.specs.run_lookup import create_run

if TYPE_CHECKING:
    from tests.lab.cluster import Lab

ROOT = Path(__file__).parents[1]
OVER_SBATCH_S, JOBS, ELEMENTS = 0.7, 500, 1000
JOB = "model: tiny\ndata: {text: python-stdlib}\nresources: {time: 5m, sbatch: {hold: true}}\n"
SWEEP = f"sweep: {{grid: {{train.seed: {list(range(ELEMENTS))}}}}}\n"
COUNTED = ("squeue", "sacct", "sbatch")


class Site:
    """The lab's login node, with a root for runs and wrappers that count calls."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.runs = folder / "runs"
        wrappers = folder / "bin"
        wrappers.mkdir()
        self.env = {"HPCRUN_ROOT": str(self.runs), "PATH": f"{wrappers}:{lab.environ['PATH']}"}
        for name in COUNTED:
            real = lab.run(["sh", "-c", f"command -v {name}"]).require_success().stdout.strip()
            path = wrappers / name
            path.write_text(f'#!/bin/sh\necho {name} >> {folder}/calls\nexec {real} "$@"\n')
            path.chmod(0o755)

    def hpcrun(self, *words: str) -> tuple[float, str]:
        """Seconds and output of one of our verbs; SiteError when it fails."""
        done = self.lab.run(
            [sys.executable, "-m", "hpcrun", *words], env=self.env, timeout_s=300
        ).require_success()
        return done.duration_s, done.stdout

    def sbatch(self, script: Path) -> float:
        """Seconds of plain sbatch."""
        return self.lab.run(["sbatch", str(script)], timeout_s=60).require_success().duration_s

    def calls(self) -> dict[str, int]:
        """How often each command was called since the last time."""
        path = self.folder / "calls"
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return {name: names.count(name) for name in COUNTED}


def measure_submit(site: Site, report: harness.Report, pairs: int) -> None:
    """A training job, ours and plain sbatch in turn."""
    job = site.folder / "job.yaml"
    job.write_text(JOB)
    ours, plain = [], []
    _, name = site.hpcrun("submit", str(job))
    for _ in range(pairs):
        seconds, name = site.hpcrun("submit", str(job))
        ours.append(seconds)
        plain.append(site.sbatch(site.runs / name.strip() / "job.sbatch"))
    over = [one - other for one, other in zip(ours, plain, strict=True)]
    report.row(what="hpcrun submit, s", figure=harness.spread(ours), runs=pairs)
    report.row(what="sbatch of its script, s", figure=harness.spread(plain), runs=pairs)
    report.row(what="more, s", figure=harness.spread(over), runs=pairs)
    median = statistics.median(over)
    report.claim(
        "`hpcrun submit` over plain sbatch in s", median, f"{OVER_SBATCH_S}", median <= OVER_SBATCH_S
    )


def measure_status(site: Site, report: harness.Report) -> None:
    """Many runs that wait, looked at in one go."""
    script = f"for number in $(seq {JOBS}); do sbatch --parsable --hold --wrap true; done"
    jobs = site.lab.run(["sh", "-c", script], timeout_s=300).require_success().stdout.split()
    # The jobs are real; their records are written here, because submitting them all would take minutes.
    words: dict[str, Any] = dict.fromkeys(("name", "user", "host", "directory", "hpcrun", "python"), "x")
    origin = Provenance(kind="train", ranks=1, steps=4, created=1.0, argv=[], **words)
    names = []
    for job in jobs:
        run = create_run("many", site.runs)
        run.spec.write_text("name: many\n")
        write_provenance(run, origin.submitted(SubmissionRecord(time.time(), job=int(job))))
        names.append(run.id)
    site.calls()
    seconds, out = site.hpcrun("status", "--json", *names)
    calls, states = site.calls(), {one["state"] for one in json.loads(out)["runs"]}
    report.row(what=f"status of {JOBS} jobs, s", figure=seconds, runs=1)
    report.claim(
        f"squeue calls of `status` on {JOBS} queued jobs",
        calls["squeue"],
        "1",
        calls["squeue"] == 1 and states == {"queued"},
    )


def measure_sweep(site: Site, report: harness.Report) -> None:
    """One job file with a thousand elements."""
    job = site.folder / "sweep.yaml"
    job.write_text(JOB + SWEEP)
    site.calls()
    seconds, name = site.hpcrun("submit", str(job))
    calls = site.calls()["sbatch"]
    seen, out = site.hpcrun("status", "--json", name.strip())
    told = json.loads(out)
    report.row(what=f"submit of {ELEMENTS} elements, s", figure=seconds, runs=1)
    report.row(what=f"status of {ELEMENTS} elements, s", figure=seen, runs=1)
    report.claim(
        f"array submissions of a sweep with {ELEMENTS} elements",
        calls,
        "1",
        calls == 1 and told["elements"] == {"queued": ELEMENTS},
    )


def main() -> int:
    """Print the table and one line a claim."""
    arguments = harness.options(__doc__).parse_args()
    sys.path.append(str(ROOT))
    from tests.lab.cluster import Lab
    from tests.lab.packages import NoLabError

    report = harness.Report("submit")
    report.header()
    folder = Path(tempfile.mkdtemp(prefix="hpcrun-submit-"))
    try:
        with Lab() as lab:
            site = Site(lab, folder)
            measure_submit(site, report, 5 if arguments.quick else 21)
            lab.run(["scancel", f"--user={os.environ.get('USER', 'root')}"])
            measure_status(site, report)
            measure_sweep(site, report)
    except (NoLabError, HpcrunError) as error:
        return harness.fail(str(error))
    finally:
        shutil.rmtree(folder)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
