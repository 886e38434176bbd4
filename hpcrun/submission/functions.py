"""Python functions as jobs: submits one, or one for each set of arguments, and returns their results.

A function is the program of a run like any other: the same supervisor starts, watches, stops and requeues it,
and `hpcrun list`, `status`, `logs`, `wait`, `stop` and `submit --resume` work on it.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hpcrun import local_identity
from hpcrun.errors import FunctionError, SpecError, SpecProblem, UsageError
from hpcrun.runs.run_handle import Run
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.function_call import FunctionCall, find_import_paths, load_call_result

if TYPE_CHECKING:
    from hpcrun.submission.request import SubmissionRequest

R = TypeVar("R")

Spec = str | Path | Mapping[str, Any] | None
"""A job file, or its keys and values."""
FUNCTION_JOB_KEYS = (
    "name", "resources", "env", "env_deny", "modules", "python", "cluster", "retry", "secrets", "watch",
    "preflight", "telemetry", "hooks",
)  # fmt: skip
"""The keys of a job that apply to functions."""
_RESULT_GRACE_S = 15.0
"""A result may become visible here this much later (NFS) than the record that its run has ended well."""
_POLL_S = 0.2
_GRACE_S = 120


@dataclass(frozen=True)
class FunctionJob(Run, Generic[R]):
    """A function that was submitted: its run, and what it returns."""

    ranks: int
    job_id: str
    """Slurm's, as 123 or 123_4; of a local one the pid of its supervisor."""

    def result(self) -> R:
        """What the function returned, once it is over; FunctionError where it raised, or has not run."""
        if self.ranks > 1:
            raise UsageError(f"{self.id}: runs {self.ranks} times; use results()")
        return self.results()[0]

    def results(self) -> list[R]:
        """The result of every rank, in order."""
        state = self._wait(None)
        attempts = self.files.attempts()
        results: list[R] = []
        for rank in range(self.ranks if attempts else 0):
            end = time.monotonic() + (_RESULT_GRACE_S if state.state == "done" else 0)
            path = attempts[-1].call_result(rank)
            while not path.exists() and time.monotonic() < end:
                time.sleep(_POLL_S)
            if path.exists():
                results.append(load_call_result(attempts[-1], rank))
        if state.state != "done" or len(results) < self.ranks:
            raise FunctionError(f"{self.id} is {state.state}{state.message and f': {state.message}'}")
        return results

    def exception(self) -> FunctionError | None:
        """Why there is no result, once it is over; None where there is one."""
        try:
            self.results()
        except FunctionError as error:
            return error
        return None


def submit(fn: Callable[..., R], *args: Any, spec: Spec = None, **kwargs: Any) -> FunctionJob[R]:
    """Run `fn(*args, **kwargs)` as a job; the handle's result() waits for what it returns.

    `spec` is a job file or a mapping with some of FUNCTION_JOB_KEYS. The function runs nodes times
    ranks_per_node times, and results() has as many entries. Without Slurm it runs here, in the background.
    Before the time limit, and on `hpcrun stop`, a function with a method `checkpoint`, as for submitit, is
    asked for the call to continue with. UsageError or SiteError if it cannot be submitted: then nothing is
    left.
    """
    return _submit_calls(fn, [(args, kwargs)], spec, is_array=False)[0]


def submit_array(fn: Callable[..., R], *iterables: Iterable[Any], spec: Spec = None) -> list[FunctionJob[R]]:
    """Submit one call for each set of arguments that the iterables give together, as for map().

    The calls are the elements of one sweep; without Slurm one runs after the other.
    """
    calls: _Arguments = [(args, {}) for args in zip(*iterables, strict=False)]
    return _submit_calls(fn, calls, spec, is_array=len(calls) > 1) if calls else []


_Arguments = Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]


def _check_calls(fn: Callable[..., Any], calls: _Arguments) -> None:
    """UsageError for what is not a function, or is not called so: the job would find out hours later."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if not callable(fn):
        raise UsageError(f"submit: a {name} is not a function; give a function and then its arguments")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some of those written in C have none
        return
    for args, kwargs in calls:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{name}: {error}; it is called as {name}{signature}") from None


def _submit_calls(
    fn: Callable[..., R], calls: _Arguments, spec: Spec, *, is_array: bool
) -> list[FunctionJob[R]]:
    from hpcrun.submission.submit import submit_job as hand_over

    local_identity.open_missing_descriptors()
    _check_calls(fn, calls)
    log, request = logging.getLogger("hpcrun"), _build_request(fn, calls, spec, is_array)
    done = hand_over(request, log.warning, log.info)
    assert request.resolved is not None
    ranks = request.resolved.spec.ranks
    jobs = []
    for number in range(len(calls)):
        run, index = done.run, ""
        submission = done.submissions[0]
        if is_array:
            run = done.run.element(number)
            submission = [each for each in done.submissions if each.offset <= number][-1]
            index = "" if submission.job is None else f"_{number - submission.offset}"
        jobs.append(FunctionJob[R](run, ranks, f"{submission.job or submission.pid}{index}"))
    return jobs


def _build_request(
    fn: Callable[..., Any], calls: _Arguments, spec: Spec, is_array: bool
) -> SubmissionRequest:
    """The function as a job whose command makes the call; SpecError lists every mistake."""
    from hpcrun.specs.load import resolve_job
    from hpcrun.specs.validation import suggest_allowed
    from hpcrun.specs.yaml import YamlDocument, load_yaml
    from hpcrun.submission.batch_script import job_python
    from hpcrun.submission.request import SubmissionRequest, load_job_profile

    if isinstance(spec, str | Path):
        document, base = load_yaml(Path(spec)), local_identity.absolute_path(spec).parent
    else:
        document, base = YamlDocument(dict(spec or {}), {"": "spec"}), local_identity.working_directory()
    given = document.values
    wrong = [key for key in given if key not in FUNCTION_JOB_KEYS]
    made = [FunctionCall(fn, args, kwargs, find_import_paths()) for args, kwargs in calls]
    values = _command_section(given, made[0].can_save, len(calls) if is_array else 0)
    document = YamlDocument(values, document.places)
    problems = [
        SpecProblem(
            key, f"is not for a function{suggest_allowed(key, FUNCTION_JOB_KEYS)}", document.where(key)
        )
        for key in wrong
    ]
    try:
        resolved = resolve_job(document, base)
        python = job_python(resolved.spec, load_job_profile(resolved.spec))
        if python != sys.executable:
            document.values["command"][0] = python
            resolved = resolve_job(document, base)
    except SpecError as error:
        raise SpecError([*problems, *error.problems]) from None
    if problems:
        raise SpecError(problems)

    def furnish(run: RunDir) -> None:
        for number, call in enumerate(made):
            call.write((run.element(number) if is_array else run).call)

    return SubmissionRequest(resolved=resolved, furnish=furnish)


def _grace_s(resources: object) -> int:
    """Return how many seconds before its time limit a function has to save, unless its spec says so."""
    from hpcrun.units import parse_time

    limit = resources.get("time") if isinstance(resources, dict) else None
    try:
        return int(min(_GRACE_S, parse_time(str(limit)).seconds / 4)) if limit else _GRACE_S
    except UsageError:  # reported with the job's other mistakes
        return _GRACE_S


def _command_section(given: Mapping[str, Any], can_save: bool, elements: int) -> dict[str, Any]:
    from hpcrun.submission.batch_script import CALL_ARGUMENTS

    values = {key: value for key, value in given.items() if key in FUNCTION_JOB_KEYS and value is not None}
    values.setdefault("name", "function")
    resources = values.get("resources")
    if resources is None or isinstance(resources, dict):
        # A function runs once a node, whatever GPUs the node has, unless the spec says otherwise.
        values["resources"] = {"ranks_per_node": 1, **(resources or {})}
    if can_save and "retry" not in values:
        values["retry"] = {"grace": f"{_grace_s(values['resources'])}s"}
    values["command"] = [sys.executable, *CALL_ARGUMENTS]
    if elements:
        values["sweep"] = {"list": [{} for _ in range(elements)]}
    return values
