"""Internal verbs: the processes that hpcrun starts itself, on this machine and on the nodes of a job."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.errors import EXIT_DONE, SiteError

if TYPE_CHECKING:
    from hpcrun.launch.failover.guardian import SupervisorCrash


def _run_rank(run_dir: str, number: str) -> int:
    """`_rank RUN ATTEMPT`: a rank of an attempt; the shim comes first, to log all later errors."""
    from hpcrun.launch import rank_shim
    from hpcrun.launcher_world import World, detect_world
    from hpcrun.specs import rank_error
    from hpcrun.specs.rundir import RunDir

    attempt = RunDir(Path(run_dir)).attempt(int(number))
    world = detect_world(os.environ) or World("single", 0, 1, 0, 1)
    requests = rank_shim.enter_rank(attempt, world)
    try:
        code = int(importlib.import_module("hpcrun.runtime.entry").main(run_dir, int(number), requests))
        rank_shim.ignore_request_signals()
        return code
    except BaseException as error:  # noqa: BLE001 - the outermost frame of a rank
        rank_error.report_error(attempt, world.rank, error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly exit would wait in MPI_Finalize for the others.
        os._exit(rank_error.exit_code_of(error))


def _run_agent(run_dir: str, called: str = "") -> int:
    """`_agent RUN [called]`: the agent that the supervisor starts on each node of an allocation."""
    from hpcrun.launch.agents.agent import Agent
    from hpcrun.specs.rundir import RunDir

    Agent(RunDir(Path(run_dir)), is_called_back=bool(called)).serve()
    return EXIT_DONE


def _run_successor(run_dir: str, epoch: str) -> int:
    """`_failover RUN EPOCH`: the supervisor that an agent starts after a failover."""
    from hpcrun.launch.signal_queue import block_signals

    block_signals()
    return int(importlib.import_module("hpcrun.launch.failover.failover_main").run_failover(run_dir, epoch))


def _run_batch_task(folder: str) -> int:
    """`_task FOLDER`: a submitted job; signals stay blocked until the supervisor can read them."""
    from hpcrun.launch.failover.guardian import supervise_with_restarts
    from hpcrun.launch.signal_queue import block_signals

    block_signals()
    return supervise_with_restarts(lambda crash: _run_supervisor(folder, crash))


def _run_supervisor(folder: str, crash: SupervisorCrash | None) -> int:
    """The supervisor of a submitted job, a child of the process that the batch script waits for."""
    try:
        task = importlib.import_module("hpcrun.launch.batch_task")
        importlib.import_module("submitit")
    except ImportError as error:
        remedy = "the job's python, or python.path in the profile, must be one that has hpcrun installed"
        raise SiteError(f"{sys.executable} on {os.uname().nodename}: {error}; {remedy}") from None
    return int(task.run_submitted(folder, crash))


def _run_function_call() -> int:
    """`_call`: a rank of a function's run."""
    return int(importlib.import_module("hpcrun.submission.function_call").main())


def _execute_injection(run_dir: str, order: str) -> int:
    """`_chaos RUN ORDER`: the injector that chaos starts on the target's node."""

    from hpcrun.chaos.injector import execute_injection
    from hpcrun.specs.rundir import RunDir

    return execute_injection(RunDir(Path(run_dir)), order)


def _run_sidecar(run_dir: str, name: str = "") -> int:
    """`_beside RUN [NAME]`: a telemetry sidecar, or without a name the manager of all."""
    return int(importlib.import_module("hpcrun.telemetry.sidecar").main(run_dir, name))


def _run_checkpoint_worker(root: str = "") -> int:
    """`_checkpoint_worker [ROOT]`: the checkpoint worker of a node, a child of its agent."""
    importlib.import_module("hpcrun.checkpoint.flush.worker").main(root)
    return EXIT_DONE


def _run_connectivity_step(interface: str) -> int:
    """`_reach INTERFACE`: a node's part of the connectivity test."""
    from hpcrun.health.connectivity import run_connectivity_step

    run_connectivity_step(interface)
    return EXIT_DONE


INTERNAL_VERBS: dict[str, Callable[..., int]] = {
    "_rank": _run_rank,
    "_agent": _run_agent,
    "_task": _run_batch_task,
    "_call": _run_function_call,
    "_chaos": _execute_injection,
    "_beside": _run_sidecar,
    "_reach": _run_connectivity_step,
    "_checkpoint_worker": _run_checkpoint_worker,
    "_failover": _run_successor,
}
"""Each takes the words after the verb and returns the exit code."""
