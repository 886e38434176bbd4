"""hpcrun: distributed training on Slurm clusters, from the login node to the last checkpoint."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcrun.errors import FunctionError as FunctionError
    from hpcrun.errors import HpcrunError as HpcrunError
    from hpcrun.launch.watch.progress import progress as progress
    from hpcrun.runs.run_handle import Run as Run
    from hpcrun.runs.run_handle import find_run as find_run
    from hpcrun.runs.run_handle import list_runs as list_runs
    from hpcrun.runs.run_state import RunState as RunState
    from hpcrun.runtime.checkpointer import Checkpointer as Checkpointer
    from hpcrun.specs.job import JobSpec as JobSpec
    from hpcrun.specs.load import load_job as load_job
    from hpcrun.submission.functions import FunctionJob as FunctionJob
    from hpcrun.submission.functions import submit as submit
    from hpcrun.submission.functions import submit_array as submit_array

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "FunctionError",
    "FunctionJob",
    "HpcrunError",
    "JobSpec",
    "Run",
    "RunState",
    "find_run",
    "list_runs",
    "load_job",
    "progress",
    "submit",
    "submit_array",
]

_MODULES = {
    "Checkpointer": "hpcrun.runtime.checkpointer",
    "FunctionError": "hpcrun.errors",
    "FunctionJob": "hpcrun.submission.functions",
    "HpcrunError": "hpcrun.errors",
    "JobSpec": "hpcrun.specs.job",
    "Run": "hpcrun.runs.run_handle",
    "RunState": "hpcrun.runs.run_state",
    "find_run": "hpcrun.runs.run_handle",
    "list_runs": "hpcrun.runs.run_handle",
    "load_job": "hpcrun.specs.load",
    "progress": "hpcrun.launch.watch.progress",
    "submit": "hpcrun.submission.functions",
    "submit_array": "hpcrun.submission.functions",
}
"""The public names and their modules, loaded on first use; docs/python.md documents them."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
