"""A rank without torch, for tests of the launcher: rank_program.py MODE RUN_DIR ATTEMPT."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcrun.errors import NotANumberError
from hpcrun.launch import rank_shim
from hpcrun.launch.watch.progress import progress
from hpcrun.launcher_world import detect_world
from hpcrun.specs import rank_error
from hpcrun.specs.metrics import MetricRecord, StepMetric
from hpcrun.specs.records import JsonLineWriter, write_json
from hpcrun.specs.rundir import Attempt, RunDir

GIVE_UP_S = 30.0


def main(mode: str, run_dir: str, number: str) -> None:
    attempt = RunDir(Path(run_dir)).attempt(int(number))
    world = detect_world(os.environ)
    assert world is not None
    rank = world.rank
    if mode == "killed-before-shim" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "slow-to-come-up":
        time.sleep(0.6)
    requests = rank_shim.enter_rank(attempt, world)
    print(f"hello from rank {rank}")
    if mode == "never-meets":
        time.sleep(GIVE_UP_S)

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank_shim.record_shared_memory(attempt, rank)
    comm.Barrier()

    def result(status: str, step: int) -> None:
        comm.Barrier()
        if rank == 0:
            write_json(attempt.result, {"attempt": attempt.number, "status": status, "step": step})
        comm.Barrier()

    if mode == "done" or mode == f"wait-until-{number}":
        if rank == 0:
            metrics = JsonLineWriter(attempt.run.metrics)
            for step in (1, 2, 3):
                metric = StepMetric(step, 3.0 - step, 0.5, 1e-3, 1e3, 0.1, {}, None, None)
                metrics.write(MetricRecord(attempt.number, time.time(), metric).as_json())
            metrics.close()
        result("done", 3)
    elif mode == "crash-after-result":
        result("done", 3)
        if rank == 1:
            os._exit(9)
    elif mode == "environment":
        names = ("OMP_NUM_THREADS", "SLURM_PROCID", "HYDRA_HOST_FILE", "HPCRUN_RUN_ID", "FROM_JOB")
        write_json(attempt.path / f"environ-{rank}.json", {name: os.environ.get(name) for name in names})
        result("done", 3)
    elif mode in ("hang-in-python", "stops-itself", "slow-save"):
        steps(mode, rank, attempt)
        result("done", 3)
    elif mode == "fork":
        child_ends_of_term()
        result("saved" if requests.stop else "done", 3)
    elif mode == "quiet":
        comm.Barrier()
    elif mode in ("error", "crash", "segfault", "leave") and rank == 1:
        fail(mode, attempt)
    else:
        wait(mode, requests, result)


def steps(mode: str, rank: int, attempt: Attempt) -> None:
    """Steps that are told; in the first attempt something goes wrong after them, on rank 1."""
    for step in range(1, 13):
        progress(step)
        time.sleep(0.06)
    if mode == "slow-save":
        progress(12, "checkpoint")
        time.sleep(2.5)
    elif attempt.number > 1:
        return
    elif rank != 1:
        wait_for_the_others()
    elif mode == "stops-itself":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        read_the_next_batch()


def wait_for_the_others() -> None:
    time.sleep(GIVE_UP_S)


def read_the_next_batch() -> None:
    end = time.monotonic() + GIVE_UP_S
    while time.monotonic() < end:
        pass


def child_ends_of_term() -> None:
    """A data worker that a rank forks must still end when it is told to."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"up")
        time.sleep(GIVE_UP_S)
        os._exit(0)
    # Python drops the signals that come while it forks.
    os.read(reader, 2)
    os.kill(child, signal.SIGUSR1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(f"child ended with wait status {status}")


def fail(mode: str, attempt: Attempt) -> None:
    if mode == "error":
        rank_error.report_error(attempt, 1, NotANumberError("step 7: loss is nan"))
        os._exit(4)
    if mode == "crash":
        try:
            raise ValueError("no such layer")
        except ValueError as error:
            rank_error.report_error(attempt, 1, error)
        os._exit(1)
    if mode == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    os._exit(0)


def wait(mode: str, requests: rank_shim.RankRequests, result: Callable[[str, int], None]) -> None:
    """Until asked to stop; a stubborn rank does not care."""
    end = time.monotonic() + GIVE_UP_S
    told = False
    while time.monotonic() < end:
        if requests.save and not told:
            print("was asked to save")
            told = True
        if requests.stop and mode != "stubborn":
            print(f"was asked to stop, interrupted: {requests.interrupted}")
            result("saved", 2)
            return
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
