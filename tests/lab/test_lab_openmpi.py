"""Open MPI in the lab: mpi4py over two nodes, started by srun's PMIx and by mpirun in a batch job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.cluster import OPENMPI_LIBRARY, Lab, Shape
from tests.lab.desk import Desk, records, story
from tests.lab.packages import OPENMPI, NoLabError, overlay

HELLO = """\
import socket
from mpi4py import MPI
world = MPI.COMM_WORLD
mine = (world.rank, socket.gethostname(), MPI.Get_library_version().split()[0])
everyone = world.gather(mine)
if world.rank == 0:
    print(*sorted(everyone), sep="\\n", flush=True)
"""


JOB = """\
name: open
model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}
data: {text: python-stdlib, pattern: "a*.py", seq_len: 32, holdout: 0}
parallel: {dp_shard: 2, pp: 2}
train: {steps: 3, mbs: 1, gbs: 8}
resources: {nodes: 2, mem: 2G}
"""


@pytest.fixture(scope="module")
def lab(lab_here: None) -> Iterator[Lab]:
    """A small lab of this file's own, with Open MPI."""
    pytest.importorskip("mpi4py", reason="pip install 'hpcrun-slurm[train]'")
    try:
        overlay(OPENMPI)
    except NoLabError as reason:
        pytest.skip(str(reason))
    with Lab(Shape((2,)), openmpi=True) as lab:
        yield lab


def told(nodes: list[str]) -> str:
    return "".join(f"({rank}, '{node}', 'Open')\n" for rank, node in enumerate(nodes))


def test_srun_starts_ranks_through_pmix(lab: Lab) -> None:
    argv = ["srun", "--mpi=pmix", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-c", HELLO]
    done = lab.run(argv, env={"MPI4PY_LIBMPI": OPENMPI_LIBRARY})
    assert done.require_success().stdout == told(["n01", "n01", "n02", "n02"])


def test_mpirun_starts_ranks_where_its_rank_file_says(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    nodes = ["n02", "n01", "n02", "n01"]
    lines = (f"rank {rank}={node} slot=*\n" for rank, node in enumerate(nodes))
    (tmp_path / "ranks").write_text("".join(lines))
    # The job has one task, as ours have, so that Slurm lends Open MPI a single slot.
    command = f"mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none --rankfile {tmp_path}/ranks"
    wrap = f"--wrap={command} -n 4 {sys.executable} {tmp_path}/hello.py"
    argv = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/said", wrap]
    lab.run(argv, env={"MPI4PY_LIBMPI": OPENMPI_LIBRARY}).require_success()
    assert (tmp_path / "said").read_text() == told(nodes)


def test_our_training_runs_under_mpirun(lab: Lab, tmp_path: Path) -> None:
    desk = Desk(lab, tmp_path)
    library = f"libmpi: /usr/lib/x86_64-linux-gnu/{OPENMPI_LIBRARY}"
    desk.profile(f"mpi: {{launcher: mpirun, library: openmpi, pmi: pmix, {library}}}\n")
    (tmp_path / "job.yaml").write_text(JOB)
    run = desk.submit("job.yaml")
    assert desk.ended(run)["status"] == "done", story(run)
    placed = records(run, "attempts/1/ranks/rank-?.json")
    assert [record["node"] for record in placed] == ["n01", "n01", "n02", "n02"]
