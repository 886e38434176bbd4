"""From a job and a cluster's profile to the template of its batch script, and to what the template gets."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import hpcrun
from hpcrun.errors import SpecError, SpecProblem, UsageError
from hpcrun.local_identity import expand_path
from hpcrun.process import python_path
from hpcrun.slurm.directives import build_directives, requested_gpus_per_node
from hpcrun.slurm.script_context import ContainerContext, ScriptContext, context_from_profile
from hpcrun.slurm.versions import SlurmVersion
from hpcrun.specs.cluster import ClusterSpec, ContainerSpec
from hpcrun.specs.fields import set_variables, unset_variables
from hpcrun.specs.job import JobSpec
from hpcrun.specs.resources import RESERVED_OPTIONS, RetrySpec
from hpcrun.specs.run_lookup import runs_root
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.validation import problems_of_validation_error
from hpcrun.units import parse_time

CALL_ARGUMENTS = ("-u", "-P", "-m", "hpcrun", "_call")
"""What follows the interpreter in the command of a function's ranks; see submission.function_call."""


def choose_template_name(job: JobSpec, cluster: ClusterSpec | None) -> str:
    """The template for this kind of job: train, command, their container variants, or a sweep's array."""
    if job.sweep is not None:
        return "array"
    kind = "train" if job.command is None else "command"
    runtime = container_runtime(job, cluster)
    return kind if runtime is None else f"{kind}-{'pyxis' if runtime == 'pyxis' else 'apptainer'}"


def job_python(job: JobSpec, cluster: ClusterSpec | None) -> str:
    """The interpreter of the compute nodes: the job's, else the profile's, else the one that submits."""
    profile = cluster.python.path if cluster else None
    return job.python or (expand_path(profile) if profile else None) or sys.executable


def cluster_runs_root(cluster: ClusterSpec | None) -> Path:
    """Return where runs on this cluster are created: HPCRUN_ROOT, else the profile's root, else ./runs."""
    if os.environ.get("HPCRUN_ROOT") or cluster is None or cluster.root is None:
        return runs_root()
    root = Path(expand_path(cluster.root))
    if not root.is_absolute():
        text = f"{root} is not an absolute path here; set the variable that it names, or HPCRUN_ROOT"
        raise UsageError(f"root of the profile {cluster.name}: {text}")
    return root


def build_script_context(
    job: JobSpec,
    run: RunDir,
    cluster: ClusterSpec | None,
    version: SlurmVersion | None,
    dependency: str = "",
    leaves: int | None = None,
) -> tuple[ScriptContext, tuple[str, ...]]:
    """Build what a template gets for this job, and notes for the user.

    SpecError for values that a script cannot contain. The array of a sweep is filled in later.
    """
    options, notes = build_directives(job, cluster, version, leaves=leaves)
    _refuse_backticks(options)
    site = context_from_profile(cluster)
    env = {**(cluster.env if cluster else {}), **job.env}
    values: dict[str, Any] = site | {
        "name": job.name,
        "run_id": run.id,
        "run_dir": str(run.path),
        # -P: a file where the job was submitted must not become a module of ours.
        "launch": [job_python(job, cluster), "-P", "-u", "-m", "hpcrun", "_task", str(run.submitit)],
        "stdout": f"{run.submitit}/%j_%t_log.out",
        "stderr": f"{run.submitit}/%j_%t_log.err",
        "directives": options | ({"dependency": dependency} if dependency else {}),
        "requeue": job.retries is not None,
        "grace_s": _grace_s(job),
        "ranks_per_node": job.ranks_per_node,
        "modules": [*site.get("modules", []), *job.modules],
        "env": _with_source_tree(set_variables(env)),
        "env_unset": unset_variables(env),
        "env_deny": [*site.get("env_deny", []), *job.env_deny],
        "slurm_version": str(version) if version else None,
    }
    try:
        values["container"] = _container_context(job, cluster)
        return ScriptContext.model_validate(values), notes
    except ValidationError as error:
        raise explain_script_error(error) from None


def _grace_s(job: JobSpec) -> int:
    """Return how long before the time limit the job is signalled: its own, else two minutes or less.

    Slurm may signal a minute early, which would be the beginning of a job of three minutes.
    """
    grace = parse_time((job.retry or RetrySpec()).grace).seconds
    limit = parse_time(job.resources.time).seconds if job.resources.time else math.inf
    return math.ceil(grace if job.retry else min(grace, limit / 4))


def _refuse_backticks(options: Mapping[str, object]) -> None:
    """There is no way to write one that sbatch reads as it is and bash never runs."""
    for option, value in options.items():
        if "`" in str(value):
            key = RESERVED_OPTIONS.get(option) or f"resources.sbatch.{option}"
            raise SpecError([SpecProblem(key, "must not contain a backtick; leave it out")])


def explain_script_error(error: ValidationError) -> SpecError:
    """List values that are valid in a job but that a script cannot contain, one line each."""
    problems = problems_of_validation_error(error, ScriptContext)
    return SpecError([SpecProblem(f"batch script: {problem.key}", problem.text) for problem in problems])


def container_runtime(job: JobSpec, cluster: ClusterSpec | None) -> str | None:
    """Return the runtime of the job's container: its own, else the profile's; None if it has no container."""
    if job.container is None:
        return None
    runtime = job.container.runtime or (cluster.container.runtime if cluster else "none")
    if runtime == "none":
        reason = f"the profile {cluster.name} names none" if cluster else "there is no profile that names one"
        raise UsageError(f"container.runtime: is missing, and {reason}; use pyxis, apptainer or singularity")
    return runtime


def _container_context(job: JobSpec, cluster: ClusterSpec | None) -> ContainerContext | None:
    runtime, own = container_runtime(job, cluster), job.container
    if runtime is None or own is None:
        return None
    site = cluster.container if cluster else ContainerSpec()
    # Words for one runtime mean nothing to another.
    options = site.options if site.runtime == runtime else []
    return ContainerContext.model_validate(
        {
            "runtime": runtime,
            "image": own.image,
            "mounts": [*_expand_mounts(site.mounts), *own.mounts],
            "workdir": own.workdir,
            "options": [*options, *own.options],
            "gpus": requested_gpus_per_node(job, cluster) > 0,
        }
    )


def _expand_mounts(mounts: Iterable[str]) -> list[str]:
    return [":".join(expand_path(part) for part in mount.split(":")) for mount in mounts]


def _with_source_tree(env: dict[str, str]) -> dict[str, str]:
    """Add the source tree to PYTHONPATH, if the package runs from one: compute nodes need it too."""
    package = Path(hpcrun.__file__).parent.parent
    if package.name in ("site-packages", "dist-packages"):
        own = env.get("PYTHONPATH")
        return env if own is None else env | {"PYTHONPATH": python_path(own)}
    before = env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    return env | {"PYTHONPATH": python_path(str(package), before)}
