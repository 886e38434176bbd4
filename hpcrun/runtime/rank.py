"""The entry of a rank: connect, check that all ranks have the same job, train, and record the result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hpcrun import __version__
from hpcrun.data.corpus import inspect_corpus
from hpcrun.errors import EXIT_DONE, EXIT_RANKS_DIED, EXIT_SAVED, HpcrunError, UsageError
from hpcrun.launch import rank_shim
from hpcrun.launch.attempt_monitor import RunObserver
from hpcrun.launcher_world import World, detect_world
from hpcrun.runtime.connect import connect_ranks
from hpcrun.runtime.control import Control
from hpcrun.runtime.data_loader import TokenSource
from hpcrun.runtime.device import Device, choose_device
from hpcrun.runtime.loop import Trainer
from hpcrun.runtime.placement_check import assigned_gpu, check_rank_placement
from hpcrun.runtime.quiet_exit import await_idle_threads_at_exit
from hpcrun.runtime.store_rendezvous import GLOO_INTERFACE, check_node_connectivity, rank_address
from hpcrun.specs import rank_error
from hpcrun.specs.load import ResolvedJob, flatten_keys, load_run_job, render_job
from hpcrun.specs.records import write_atomically, write_json
from hpcrun.specs.reduced_plan import read_attempt_plan
from hpcrun.specs.run_lookup import RunUse, find_run, new_run
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.submission.prepare import PreparedJob, prepare_job


def main(run_dir: str, number: int, requests: rank_shim.RankRequests) -> int:
    """Run a rank of an attempt that our supervisor started, with the job of the run directory."""
    attempt = RunDir(Path(run_dir)).attempt(number)
    control = connect_ranks(detect_world(os.environ))
    return _run_guarded(
        control, attempt, lambda: _train(control, attempt, requests, _job_of_attempt(attempt))
    )


def _job_of_attempt(attempt: Attempt) -> ResolvedJob:
    """Return the job with this attempt's plan, which may have fewer replicas than the job's own."""
    resolved = load_run_job(attempt.run)
    plan = read_attempt_plan(attempt.plan, resolved.spec, resolved.training_plan)
    return ResolvedJob(resolved.spec, plan)


def join_world(
    job: Path | None,
    overrides: Sequence[str],
    resume: str | None,
    world: World,
    display: Callable[[int], RunObserver],
) -> int:
    """Run a rank of a world that mpiexec, srun or torchrun started; rank 0 has the display."""
    control = connect_ranks(world)
    prepared, problem = None, None
    try:
        until: Literal["plan", "launch"] = "launch" if control.rank == 0 else "plan"
        # One rank alone gives a copy its own identity.
        use: RunUse = "act" if control.rank == 0 else "plan"
        earlier = find_run(resume, use=use) if resume is not None else None
        prepared = prepare_job(job, overrides, resume=earlier, world_size=control.size, until=until)
        if prepared.plan is None:
            raise UsageError(
                "command: this is already a rank of a world; start the command itself, without us"
            )
    except HpcrunError as error:
        problem = [error.exit_code, str(error)]
    # All ranks leave together: the others would wait for one that leaves alone.
    problems = [(rank, *error) for rank, error in enumerate(control.allgather(problem)) if error]
    if problems or prepared is None:
        return _abort_with_message(control, *problems[0])
    run_path, number = control.everywhere(lambda: _open_run(prepared))
    attempt = RunDir(Path(run_path)).attempt(number)
    requests = rank_shim.enter_rank(attempt, world)
    rank_shim.exit_at_stop(attempt, requests)
    resolved = ResolvedJob(prepared.spec, prepared.plan)
    observer = display(prepared.spec.train.steps) if control.rank == 0 else None
    if observer is not None:
        observer.note(f"run {run_path}: {prepared.describe()}")
        observer.ranks_ready(control.size, 0.0)
    return _run_guarded(control, attempt, lambda: _train(control, attempt, requests, resolved, observer))


def _abort_with_message(control: Control, rank: int, code: int, text: str) -> int:
    """Print the problem of the first rank that has one, once, and return its exit code."""
    if control.rank == 0:
        who = f"rank {rank}: " if rank else ""
        sys.stderr.write("".join(f"hpcrun: {who}{line}\n" for line in text.splitlines()))
        sys.stderr.flush()
    control.barrier()
    return code


def _open_run(prepared: PreparedJob) -> list[Any]:
    earlier = prepared.resume
    with new_run(prepared.spec.name) if earlier is None else contextlib.nullcontext(earlier) as run:
        attempt = run.next_attempt()
        write_atomically(run.spec, render_job(prepared.spec))
        write_atomically(attempt.plan, prepared.training_plan.model_dump_json(indent=2) + "\n")
    return [str(run.path), attempt.number]


def _run_guarded(control: Control, attempt: Attempt, action: Callable[[], int]) -> int:
    """Run a rank's work; record any error, and end all ranks of the attempt with it."""
    try:
        return action()
    except HpcrunError as error:
        rank_error.report_error(attempt, control.rank, error)
        sys.stderr.write(f"rank {control.rank} on {control.node}: {error}\n")
        code = error.exit_code
    except BaseException as error:  # noqa: BLE001 - the outermost frame of a rank, for which others wait
        rank_error.report_error(attempt, control.rank, error)
        sys.excepthook(type(error), error, error.__traceback__)
        code = EXIT_RANKS_DIED
    if control.size > 1:
        control.abort(code)
    return code


def _train(
    control: Control,
    attempt: Attempt,
    requests: rank_shim.RankRequests,
    resolved: ResolvedJob,
    observer: RunObserver | None = None,
) -> int:
    job, plan = resolved.spec, resolved.training_plan
    assert job.data is not None
    corpus = inspect_corpus(job.data)
    check_same_job(control, resolved, corpus.fingerprint)
    if plan.degrees.world_size != control.size:
        raise UsageError(
            f"parallel: {plan.degrees} is {plan.degrees.world_size} ranks, but this world has {control.size};"
            " change a degree, or start as many ranks"
        )
    device = choose_device(job.device, control, assigned_gpu(attempt, control.rank))
    prepare_torch(job.train.seed, control)
    open_process_groups(control, device)
    rank_shim.record_shared_memory(attempt, control.rank)
    source = TokenSource(job.data, corpus)
    trainer = Trainer(job, plan, attempt, control, device, source, requests, observer)
    check_rank_placement(control, attempt, trainer.coordinate, device)
    result = trainer.run()
    control.barrier()
    if control.rank == 0:
        record = {"attempt": attempt.number, "world_size": control.size, **result}
        write_json(attempt.result, record)
    control.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return EXIT_DONE if result["status"] == "done" else EXIT_SAVED


def check_same_job(control: Control, resolved: ResolvedJob, data: str) -> None:
    """UsageError with the ranks that differ, unless all have the same job, data and code."""
    code = {"hpcrun": __version__, "torch": torch.__version__, "files of the data": data}
    view = resolved.spec.model_dump(mode="json") | code
    digest = hashlib.sha256(json.dumps(view, sort_keys=True).encode()).hexdigest()
    digests = control.allgather(digest)
    if len(set(digests)) == 1:
        return
    usual, _ = Counter(digests).most_common(1)[0]
    views = [flatten_keys(other) for other in control.allgather(view)]
    reference = views[digests.index(usual)]
    lines = []
    for rank, other in enumerate(views):
        keys = [key for key in reference.keys() | other.keys() if reference.get(key) != other.get(key)]
        for key in sorted(keys):
            lines.append(f"rank {rank} has {key} = {other.get(key)!r}, the others {reference.get(key)!r}")
    raise UsageError("the ranks have different jobs: " + "; ".join(lines[:8]))


def prepare_torch(seed: int, control: Control) -> None:
    """Set random state and threads, and silence a known warning."""
    torch.manual_seed((seed * 1_000_003 + control.rank) % 2**63)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // control.local_size))
    # It warns that a dimension sharded over two axes takes two gathers, which is intended.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def open_process_groups(control: Control, device: Device) -> None:
    """Open torch's process groups over the ranks of this control."""
    await_idle_threads_at_exit()
    if control.size == 1 and not device.is_cuda:
        # FSDP needs a group for mixed precision even for one rank; a store in memory is enough.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return
    here = rank_address(control)
    if not control.one_node:
        check_node_connectivity(control, here)
    if here.interface:
        os.environ.setdefault(GLOO_INTERFACE, here.interface)
    dist.init_process_group(
        device.backend,
        store=control.store(),
        rank=control.rank,
        world_size=control.size,
        device_id=device.torch_device if device.is_cuda else None,
    )
