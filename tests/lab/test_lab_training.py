"""A job of ours as the ranks of a Slurm step, on nodes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hpcrun.specs.records import read_json_lines
from tests.lab.cluster import Lab

JOB = """
name: step
model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}
data: {text: python-stdlib, pattern: "a*.py", seq_len: 32}
parallel: {dp_shard: 2, pp: 2}
train: {steps: 4, mbs: 1, gbs: 4, eval: {sequences: 4}}
"""


def test_srun_starts_the_ranks_of_a_job_on_four_nodes(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    command = [sys.executable, "-m", "hpcrun", "train", "job.yaml"]
    environ = {"HPCRUN_ROOT": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    done = lab.run(["srun", "-N4", "-n4", "--mpi=pmi2", *command], env=environ, cwd=tmp_path, timeout_s=200)
    assert done.exit_code == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    records = [json.loads(path.read_text()) for path in (run / "attempts/1/ranks").glob("rank-*.json")]
    assert {record["node"] for record in records} == {"n01", "n02", "n03", "n04"}
    assert [line["step"] for line in read_json_lines(run / "metrics.jsonl") if line["kind"] == "step"] == [
        1,
        2,
        3,
        4,
    ]
    assert [line for line in done.stderr.splitlines() if line.startswith("hpcrun: step 4/4")]
