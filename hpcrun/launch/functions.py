"""Python functions as jobs: submit one, or one for each set of arguments, and have the results back.

As a program this module is what runs in such a job, once a task: `python -m hpcrun.launch.functions FOLDER`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, HpcrunError, Problem, SiteError, SpecError
from hpcrun.specs.rundir import RunDir, create_run, runs_root

if TYPE_CHECKING:
    from submitit import Job
    from submitit.core.job_environment import JobEnvironment

    from hpcrun.slurm.executor import BackgroundExecutor, TemplateExecutor
    from hpcrun.specs.cluster import ClusterSpec
    from hpcrun.specs.job import JobSpec
    from hpcrun.specs.provenance import Submission

R = TypeVar("R")

Spec = str | Path | Mapping[str, Any] | None
"""A job file, or its keys and values."""
KEYS = ("name", "resources", "env", "modules", "python", "cluster")
"""What can be said of a function."""
_LOCAL = "local"
_PICKLE_S = 60
"""The job may be quicker than the one that submits it."""


def submit(fn: Callable[..., R], *args: Any, spec: Spec = None, **kwargs: Any) -> Job[R]:
    """Run `fn(*args, **kwargs)` as a job; the handle's result() waits for what it returns.

    `spec` is a job file or a mapping with the keys name, resources, env, modules, python and cluster. The
    function runs nodes times ranks_per_node times, and results() then has as many entries. Without Slurm it
    runs here, in the background. UsageError or SiteError when it cannot be submitted.
    """
    return _submitted(fn, spec, lambda executor: [executor.submit(fn, *args, **kwargs)])[0]


def submit_array(fn: Callable[..., R], *iterables: Iterable[Any], spec: Spec = None) -> list[Job[R]]:
    """The same for each set of arguments that the iterables give together, as for map(): one array."""
    sets = list(zip(*iterables, strict=False))
    if not sets:
        return []
    columns = list(zip(*sets, strict=True))
    return _submitted(fn, spec, lambda executor: executor.map_array(fn, *columns))


def _submitted(
    fn: Callable[..., Any],
    spec: Spec,
    send: Callable[[TemplateExecutor | BackgroundExecutor], list[Job[R]]],
) -> list[Job[R]]:
    from hpcrun.launch.snapshot import record_origin
    from hpcrun.specs.load import render_job
    from hpcrun.specs.provenance import write_provenance
    from hpcrun.specs.records import write_json, write_whole

    job, cluster, is_local = _resolved(spec)
    run = create_run(job.name, _root(cluster))
    write_whole(run.spec, render_job(job))
    executor: TemplateExecutor | BackgroundExecutor
    try:
        if is_local:
            executor, template = _here(job, run), None
        else:
            executor = _on_cluster(job, run, cluster, hasattr(fn, "checkpoint"))
            template = executor.template.path
        jobs = send(executor)
    except HpcrunError as error:
        failed = {"status": "failed", "exit_code": error.exit_code, "message": str(error)}
        write_json(run.exit, failed | {"attempt": None, "step": None, "ended": time.time()})
        raise
    name = _LOCAL if is_local else cluster.name if cluster else None
    origin = record_origin(run, job, cluster=name, template=template)
    made = _local_submissions(jobs) if is_local else [_submission(jobs)]
    write_provenance(run, replace(origin, kind="function", steps=None).submitted(*made))
    return jobs


def _resolved(spec: Spec) -> tuple[JobSpec, ClusterSpec | None, bool]:
    """The job, the profile, and whether it runs here; SpecError lists every mistake."""
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
    return job, cluster, is_local


def _root(cluster: ClusterSpec | None) -> Path:
    from hpcrun.slurm.precheck import expand_place

    if os.environ.get("HPCRUN_ROOT") or cluster is None or cluster.root is None:
        return runs_root()
    return Path(expand_place(cluster.root))


def _here(job: JobSpec, run: RunDir) -> BackgroundExecutor:
    from hpcrun.slurm.executor import BackgroundExecutor
    from hpcrun.units import parse_time

    limit = parse_time(job.resources.time).minutes if job.resources.time else None
    if job.modules:
        logging.getLogger("hpcrun").warning("modules: not loaded, because this runs here without Slurm")
    python = job.python or sys.executable
    return BackgroundExecutor(
        run.submitit, tasks=job.ranks_per_node, limit_min=limit, env=job.env, python=python
    )


def _on_cluster(job: JobSpec, run: RunDir, cluster: ClusterSpec | None, saves: bool) -> TemplateExecutor:
    from hpcrun.launch.script import python_of, script_context
    from hpcrun.slurm.executor import TemplateExecutor
    from hpcrun.slurm.template import Library
    from hpcrun.slurm.versions import parse_version

    version = parse_version((cluster and cluster.slurm_version) or "")
    context, notes = script_context(job, run, cluster, version)
    log = logging.getLogger("hpcrun")
    for note in notes:
        log.warning(note)
    launch = [python_of(job, cluster), "-u", "-m", "hpcrun.launch.functions", str(run.submitit)]
    # What can be imported here, such as a module beside the script that submits, can be so there.
    known = context.env.get("PYTHONPATH") or os.environ.get("PYTHONPATH") or ""
    path = dict.fromkeys([*filter(None, known.split(os.pathsep)), str(Path(sys.path[0]).absolute())])
    env = context.env | {"PYTHONPATH": os.pathsep.join(path)}
    library = Library()
    return TemplateExecutor(
        run.submitit,
        library,
        library.find("function"),
        # submitit queues it again by itself, and only what can save itself.
        context.model_copy(update={"launch": launch, "env": env, "requeue": saves}),
        slurm_cluster=cluster.slurm_cluster if cluster else None,
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
