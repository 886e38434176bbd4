"""Python functions as jobs: submit one, or one for each set of arguments, and have the results back.

As a program this module runs in such a job, once a task: `python -m hpcrun.launch.submit.functions FOLDER`.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, HpcrunError, Problem, SiteError, SpecError, UsageError
from hpcrun.process import python_path
from hpcrun.specs.rundir import RunDir, create_run

if TYPE_CHECKING:
    from submitit import Job
    from submitit.core.job_environment import JobEnvironment

    from hpcrun.slurm.executor import BackgroundExecutor, TemplateExecutor
    from hpcrun.slurm.inputs import Inputs
    from hpcrun.slurm.live import LiveCluster
    from hpcrun.specs.cluster import ClusterSpec
    from hpcrun.specs.job import JobSpec
    from hpcrun.specs.provenance import Submission
    from hpcrun.specs.yaml import Document

R = TypeVar("R")

Spec = str | Path | Mapping[str, Any] | None
"""A job file, or its keys and values."""
KEYS = ("name", "resources", "env", "env_deny", "modules", "python", "cluster")
"""What can be said of a function."""
_LOCAL = "local"
_PICKLE_S = 60
"""The job may be quicker than the one that submits it."""


def submit(fn: Callable[..., R], *args: Any, spec: Spec = None, **kwargs: Any) -> Job[R]:
    """Run `fn(*args, **kwargs)` as a job; the handle's result() waits for what it returns.

    `spec` is a job file or a mapping with the keys name, resources, env, modules, python and cluster. The
    function runs nodes times ranks_per_node times, and results() then has as many entries. Without Slurm it
    runs here, in the background. UsageError or SiteError when it cannot be submitted: then nothing is left.
    """
    _check_calls(fn, [(args, kwargs)])
    return _submitted(fn, spec, lambda executor: [executor.submit(fn, *args, **kwargs)])[0]


def submit_array(fn: Callable[..., R], *iterables: Iterable[Any], spec: Spec = None) -> list[Job[R]]:
    """The same for each set of arguments that the iterables give together, as for map(): one array."""
    sets = list(zip(*iterables, strict=False))
    if not sets:
        return []
    _check_calls(fn, [(one, {}) for one in sets])
    columns = list(zip(*sets, strict=True))
    return _submitted(fn, spec, lambda executor: executor.map_array(fn, *columns))


def _check_calls(fn: Callable[..., Any], calls: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> None:
    """UsageError for what is no function, or is not called so: the job would find out hours later."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if not callable(fn):
        raise UsageError(f"submit: a {name} is no function; give a function and then its arguments")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some of those written in C have none
        return
    for args, kwargs in calls:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{name}: {error}; it is called as {name}{signature}") from None


def _submitted(
    fn: Callable[..., Any],
    spec: Spec,
    send: Callable[[TemplateExecutor | BackgroundExecutor], list[Job[R]]],
) -> list[Job[R]]:
    from hpcrun.launch.submit.script import root_of
    from hpcrun.launch.submit.snapshot import record_origin
    from hpcrun.launch.submit.submission import tell_what_waits_for_ever
    from hpcrun.slurm.inputs import Inputs, read_inputs
    from hpcrun.slurm.sbatch import log_pattern
    from hpcrun.specs.load import render_job
    from hpcrun.specs.provenance import write_provenance
    from hpcrun.specs.records import write_whole

    job, cluster, is_local, document = _resolved(spec)
    root, log = root_of(cluster), logging.getLogger("hpcrun")
    log_pattern(root)
    inputs = Inputs() if is_local else read_inputs(job, cluster, os.environ)
    job = job.model_copy(update={"resources": job.resources.model_copy(update=dict(inputs.resources))})
    live = None if is_local else _live(job, cluster, root, document, inputs)
    run = create_run(job.name, root)
    executor: TemplateExecutor | BackgroundExecutor
    jobs: list[Job[R]] = []
    handed_over = False
    try:
        write_whole(run.spec, render_job(job))
        if is_local:
            executor, template = _here(job, run), None
        else:
            executor = _on_cluster(job, run, cluster, live, hasattr(fn, "checkpoint"), inputs)
            template = executor.template.path
        name = _LOCAL if is_local else cluster.name if cluster else None
        origin = record_origin(run, job, cluster=name, template=template)
        jobs = send(executor)
        made = _local_submissions(jobs) if is_local else [_submission(jobs)]
        origin = replace(origin, kind="function", steps=None, inputs=dict(inputs.sources))
        write_provenance(run, origin.submitted(*made))
        handed_over = True
    except OSError as error:
        place, reason = error.filename or run.path, error.strerror or error
        raise SiteError(f"{place}: cannot be written: {reason}; nothing was submitted") from None
    finally:
        if not handed_over:
            _take_back(jobs, is_local)
            shutil.rmtree(run.path, ignore_errors=True)
    if not is_local:
        tell_what_waits_for_ever(made, log.warning)
    return jobs


def _take_back(jobs: list[Job[R]], is_local: bool) -> None:
    """End jobs that are on no record: one call is enough for a whole array."""
    from hpcrun.slurm.ids import JobId
    from hpcrun.slurm.sbatch import take_back

    if is_local:
        for job in jobs:
            job.cancel()
    elif jobs:
        made = _submission(jobs)
        assert made.job is not None
        take_back(JobId(made.job, cluster=made.cluster), logging.getLogger("hpcrun").warning)


def _live(
    job: JobSpec, cluster: ClusterSpec | None, root: Path, document: Document, inputs: Inputs
) -> LiveCluster | None:
    """What the cluster says now; SpecError for a job that does not fit it, the rest is logged."""
    from hpcrun.launch.submit.request import ask_live, check_cluster

    log = logging.getLogger("hpcrun")
    for text in inputs.notes:
        log.warning(text)
    live = ask_live((cluster.slurm_cluster if cluster else None) or inputs.slurm_cluster, log.warning)
    refused = []
    for finding in [*inputs.findings, *check_cluster(job, cluster, live, root)]:
        where = document.where(finding.key) if finding.key else ""
        problem = Problem(finding.key, finding.text, where)
        if finding.refuse:
            refused.append(problem)
        else:
            log.warning(str(problem))
    if refused:
        raise SpecError(refused)
    return live


def _resolved(spec: Spec) -> tuple[JobSpec, ClusterSpec | None, bool, Document]:
    """The job, the profile, whether it runs here, and where its keys stand; SpecError lists every mistake."""
    from pydantic import ValidationError

    from hpcrun.specs.cluster import find_cluster
    from hpcrun.specs.job import JobSpec
    from hpcrun.specs.mistakes import nearest, problems_of
    from hpcrun.specs.yaml import Document, load_document

    if isinstance(spec, str | Path):
        document = load_document(Path(spec))
    else:
        document = Document(dict(spec or {}), {"": "spec"})
    given = document.values
    problems = [
        Problem(key, f"is not for a function{nearest(key, KEYS)}") for key in given if key not in KEYS
    ]
    known = {"name": "function"} | {
        key: value for key, value in given.items() if key in KEYS and value is not None
    }
    try:
        job = JobSpec.model_validate(known)
    except ValidationError as error:
        problems += problems_of(error, JobSpec)
    if problems:
        raise SpecError([Problem(one.key, one.text, document.where(one.key)) for one in problems])
    cluster = None if job.cluster == _LOCAL else find_cluster(job.cluster)
    is_local = cluster is None and (job.cluster == _LOCAL or shutil.which("sbatch") is None)
    if is_local and job.resources.nodes > 1:
        raise SiteError(f"resources.nodes: {job.resources.nodes}, but this runs here without Slurm; use 1")
    return job, cluster, is_local, document


def _here(job: JobSpec, run: RunDir) -> BackgroundExecutor:
    from hpcrun.slurm.executor import BackgroundExecutor
    from hpcrun.specs.fields import given, taken_away
    from hpcrun.units import parse_time

    limit = parse_time(job.resources.time).minutes if job.resources.time else None
    if job.modules:
        logging.getLogger("hpcrun").warning("modules: not loaded, because this runs here without Slurm")
    python = job.python or sys.executable
    env = given(job.env)
    return BackgroundExecutor(
        run.submitit,
        tasks=job.ranks_per_node,
        limit_min=limit,
        env=env | {"PYTHONPATH": _path_of_modules(env)},
        deny=[*job.env_deny, *taken_away(job.env)],
        python=python,
    )


def _path_of_modules(env: Mapping[str, str]) -> str:
    """What can be imported here, such as a module beside the script that submits, can be so in the job."""
    known = env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    return python_path(known, str(Path(sys.path[0]).absolute()))


def _on_cluster(
    job: JobSpec,
    run: RunDir,
    cluster: ClusterSpec | None,
    live: LiveCluster | None,
    saves: bool,
    inputs: Inputs,
) -> TemplateExecutor:
    from hpcrun.launch.submit.request import without_uncounted_memory
    from hpcrun.launch.submit.script import python_of, script_context
    from hpcrun.slurm.executor import TemplateExecutor
    from hpcrun.slurm.template import Library
    from hpcrun.slurm.versions import parse_version

    version = (live and live.version) or parse_version((cluster and cluster.slurm_version) or "")
    context, notes = script_context(job, run, cluster, version)
    log = logging.getLogger("hpcrun")
    for note in notes:
        log.warning(note)
    context = without_uncounted_memory(context, job, cluster, live, log.warning)
    launch = [python_of(job, cluster), "-P", "-u", "-m", "hpcrun.launch.submit.functions", str(run.submitit)]
    env = context.env | {"PYTHONPATH": _path_of_modules(context.env)}
    library = Library()
    return TemplateExecutor(
        run.submitit,
        library,
        library.find("function"),
        # submitit queues it again by itself, and only what can save itself.
        context.model_copy(update={"launch": launch, "env": env, "requeue": saves}),
        slurm_cluster=(cluster.slurm_cluster if cluster else None) or inputs.slurm_cluster,
        slurm_module=cluster.slurm_module if cluster else None,
        tasks=job.resources.nodes * job.ranks_per_node,
        note=log.warning,
        detail=log.info,
    )


def _local_submissions(jobs: list[Job[R]]) -> list[Submission]:
    from hpcrun.process import identify
    from hpcrun.specs.provenance import Submission

    now, host = time.time(), os.uname().nodename
    found = [identify(int(one.job_id)) for one in jobs]
    return [Submission(now, host=host, pid=one.pid, start_ticks=one.start_ticks) for one in found if one]


def _submission(jobs: list[Job[R]]) -> Submission:
    from hpcrun.slurm.sbatch import array_indices
    from hpcrun.specs.provenance import Submission

    number, _, element = jobs[0].job_id.partition("_")
    array = array_indices(range(len(jobs))) if element else None
    return Submission(time.time(), int(number), getattr(jobs[0], "cluster", ""), array)


def run_task(folder: Path) -> None:
    """Run what was submitted from a folder as this task of the job, and put down its result."""
    from submitit.core.job_environment import JobEnvironment
    from submitit.core.submission import process_job

    from hpcrun.slurm.executor import check_private

    os.environ["SUBMITIT_FOLDER"] = str(folder)
    here = JobEnvironment()
    paths = here.paths
    # An attempt that was killed while it wrote one of these has left its beginning, which submitit refuses.
    for path in (paths.result_pickle, *([] if here.global_rank else [paths.submitted_pickle])):
        path.with_suffix(f"{path.suffix}.save_tmp").unlink(missing_ok=True)
    end = time.monotonic() + _PICKLE_S
    while not paths.submitted_pickle.exists():
        if time.monotonic() > end:
            raise SiteError(
                f"{paths.submitted_pickle}: did not appear in {_PICKLE_S} s; is the folder on a file system"
                " that this node shares with the one that submitted?"
            )
        time.sleep(0.1)
    check_private(paths.submitted_pickle)
    try:
        process_job(folder)
    except Exception:
        _record_end(folder, here, EXIT_CHECK_FAILED)
        raise
    _record_end(folder, here, EXIT_DONE)


def _record_end(folder: Path, here: JobEnvironment, code: int) -> None:
    """Note that this task has ended; who finds that all tasks of all elements have, records the run's end."""
    from hpcrun.specs.records import read_json, write_json

    write_json(folder / f"{here.job_id}_{here.global_rank}_exit.json", {"exit_code": code})
    ended = [read_json(path) for path in folder.glob(f"{here.job_id.partition('_')[0]}*_exit.json")]
    if len(ended) < here.num_tasks * int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1")):
        return
    worst = max(record["exit_code"] for record in ended)
    count = sum(record["exit_code"] == EXIT_DONE for record in ended)
    end = {"status": "failed" if worst else "done", "exit_code": worst, "ended": time.time()}
    told = {"message": f"{count} of {len(ended)} calls returned", "attempt": None, "step": None}
    write_json(RunDir(folder.parent).exit, end | told)


if __name__ == "__main__":
    try:
        run_task(Path(sys.argv[1]))
    except HpcrunError as error:
        sys.exit(f"hpcrun: {error}")
