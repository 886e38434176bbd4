"""hpcrun: distributed training on Slurm clusters, from the login node to the last checkpoint."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcrun.launch.watch.progress import progress as progress
    from hpcrun.runtime.checkpointer import Checkpointer as Checkpointer
    from hpcrun.submission.functions import submit as submit
    from hpcrun.submission.functions import submit_array as submit_array

__version__ = "0.1.0"

_ROOMS = {
    "submit": "hpcrun.submission.functions",
    "submit_array": "hpcrun.submission.functions",
    "progress": "hpcrun.launch.watch.progress",
    "Checkpointer": "hpcrun.runtime.checkpointer",
}
"""The public names, and where each is found on its first use: importing the package loads nothing."""


def __getattr__(name: str) -> object:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_ROOMS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
