"""The object store of a run: the one that its job names, or another, and the copies of the run in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from hpcrun.checkpoint.objects.catalogue import BrokenObjectCopy, ObjectCopy, list_generation_copies
from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.store import ObjectStore
from hpcrun.errors import HpcrunError, UsageError
from hpcrun.specs.load import load_run_job
from hpcrun.specs.rundir import RunDir


class RunCopies(NamedTuple):
    """The copies of a run in its object store; or why they are unknown."""

    store: ObjectStore | None = None
    copies: tuple[ObjectCopy, ...] = ()
    broken: tuple[BrokenObjectCopy, ...] = ()
    unknown: str | None = None


@contextmanager
def open_run_store(run: RunDir, url: str | None, endpoint: str | None) -> Iterator[ObjectStore]:
    """The store at `url`, or the job's; UsageError without either."""
    if url is None:
        default = _job_store(run)
        if default is None:
            raise UsageError(f"{run.id}: its job has no checkpoint.object; say where with --url (or --from)")
        url, endpoint = default[0], endpoint or default[1]
    with open_object_store(url, endpoint) as store:
        store.check()
        yield store


def open_run_copies(run: RunDir, url: str | None, endpoint: str | None, stack: ExitStack) -> RunCopies:
    """The copies of a run, with their store open until the stack is; none where the job has no store.

    With a `url` errors are raised; without one they are returned as `unknown`.
    """
    try:
        if url is None and _job_store(run) is None:
            return RunCopies()
        store = stack.enter_context(open_run_store(run, url, endpoint))
        copies, broken = list_generation_copies(store, run.run_id)
        return RunCopies(store, tuple(copies), tuple(broken))
    except HpcrunError as error:
        if url is not None:
            raise
        return RunCopies(unknown=str(error))


def choose_copy(store: ObjectStore, run: RunDir, step: int | None) -> ObjectCopy:
    """The newest whole copy of a run, or that of a step; UsageError where there is none."""
    copies, _ = list_generation_copies(store, run.run_id)
    chosen = [copy for copy in copies if copy.problem is None and step in (None, copy.saved.step)]
    if not chosen:
        steps = ", ".join(f"{copy.saved.step}{' (damaged)' * bool(copy.problem)}" for copy in copies)
        wanted = "whole copy" if step is None else f"whole copy of step {step}"
        raise UsageError(f"{store.url}: has no {wanted} of {run.id} (copies: {steps or 'none'})")
    return chosen[-1]


def _job_store(run: RunDir) -> tuple[str, str | None] | None:
    """URL and endpoint in the run's job."""
    spec = load_run_job(run).spec.checkpoint.object if run.spec.exists() else None
    return None if spec is None else (spec.url, spec.endpoint)
