"""sbatch as it is called here: in a clean environment, patiently, and never twice for one script."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.errors import HpcrunError, SiteError, SpecError, UsageError
from hpcrun.hostlist import expand_hosts, fold_hosts
from hpcrun.slurm.answers import SbatchAnswer, SlurmProblem, parse_sbatch_answer, parse_slurm_problem
from hpcrun.slurm.client import KEPT_VARIABLES, cluster_option, run_slurm_client
from hpcrun.slurm.contract import check_rendered_script, render_script, replaced_directives
from hpcrun.slurm.ids import JobId
from hpcrun.slurm.queue import JobQuery, cancel_job
from hpcrun.slurm.script_context import ArrayContext, ScriptContext
from hpcrun.slurm.template import BatchTemplate, TemplateLibrary
from hpcrun.specs.fields import matches_any_pattern

PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Between the tries, when the controller is busy or does not answer."""
_SBATCH_S = 300
"""sbatch itself retries for about two minutes when the controller accepts no jobs."""
_QUERY_S = 60
_LATE_S = 2.0
"""The controller may take this long to show a job that it has just accepted."""
_PATIENCE_S = 300
"""Past this nothing is tried again."""

_OF_A_JOB = re.compile(
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|PMI2?|PMIX|OMPI|PRTE|MPI|TORCHELASTIC|SUBMITIT)_.*|(HYDRA|HYDI).*"
    r"|PMI|MASTER_(ADDR|PORT)|((LOCAL|GROUP|NODE|ROLE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE"
    r"|HPCRUN_(?!(ROOT|SITE)$).*"
)
_WHETHER = "look with `squeue --me` whether the job is there"
_TRANSIENT = re.compile(r"Unable to contact slurm controller|Connection refused")

SbatchNoteCallback = Callable[[str], None]
"""Takes one line for the person."""


def discard_note(text: str) -> None:
    """A callback that drops its note."""


def submission_environment(
    environ: Mapping[str, str], deny: Sequence[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment that a job is submitted in, and the names that were dropped from it.

    Variables of a job or its ranks (this process may be inside one) would give the new job the old one's
    nodes, memory and processors; exported shell functions break scripts. `deny`: patterns of further names to
    drop.
    """
    safe = process.scrubbed_environment(environ)
    kept = {
        name: value
        for name, value in environ.items()
        if name in safe
        and (name in KEPT_VARIABLES or not (_OF_A_JOB.fullmatch(name) or matches_any_pattern(name, deny)))
    }
    return kept, tuple(sorted(name for name in environ if name not in kept))


def log_file_pattern(folder: Path, is_array: bool = False, ending: str = "out") -> str:
    """Return the path of a task's log as sbatch and srun take it and submitit expects it; `%t` is the
    task."""
    text = str(folder)
    if re.search(r"%[jtAa]", text) or not text.isprintable():
        raise UsageError(
            f"{text!r}: cannot be used for a job: its name contains %j, %t, %A, %a or a control character;"
            " set HPCRUN_ROOT to another place"
        )
    return f"{text.replace('%', '%%')}/{'%A_%a' if is_array else '%j'}_%t_log.{ending}"


def format_array_indices(indices: Sequence[int], throttle: int | None = None) -> str:
    """Format indices for sbatch --array: 0-39, or 3,7,12-14%8 if at most 8 may run at once."""
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{listed}%{throttle}" if throttle else listed


def render_submission_script(
    library: TemplateLibrary,
    template: BatchTemplate,
    context: ScriptContext,
    folder: Path,
    array: ArrayContext | None = None,
    note: SbatchNoteCallback = discard_note,
) -> str:
    """Render the script exactly as it is submitted from `folder`: the context with its log files filled in.

    `note` is called with what a site's template overrides. Needs no Slurm. Errors go into the output file if
    the context has no stderr. SpecError lists all violations of the contract by a site's template.
    """
    is_array = array is not None
    final: dict[str, Any] = {"array": array, "stdout": log_file_pattern(folder, is_array)}
    if context.stderr is not None:
        final["stderr"] = log_file_pattern(folder, is_array, "err")
    whole = ScriptContext.model_validate(dict(context) | final)
    text = render_script(library, template, whole)
    problems = check_rendered_script(library, template, whole, text)
    if problems:
        raise SpecError(problems)
    for line in replaced_directives(whole, text):
        note(f"{library.file_location(template)}: {line}")
    return text


def submit_batch_script(
    path: Path,
    *,
    slurm_cluster: str | None = None,
    slurm_module: str | None = None,
    deny: Sequence[str] = (),
    note: SbatchNoteCallback = discard_note,
    detail: SbatchNoteCallback = discard_note,
) -> JobId:
    """Submit a script with sbatch; SiteError with sbatch's own words if it is not accepted.

    When the controller is busy or away, sbatch is retried, but only if the job is not in the queue already:
    the answer may have been lost. `deny`: patterns of variables that the job must not inherit; `detail` is
    called with those that were dropped.
    """
    environ, dropped = submission_environment(os.environ, deny)
    if dropped:
        detail(f"left out of the job's environment: {', '.join(dropped)}")
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        remedy = f"`module load {slurm_module}` first" if slurm_module else "load the module that holds Slurm"
        raise SiteError(
            f"sbatch: no such command, so there is no Slurm here; on a login node of the cluster, {remedy}"
        )
    where = cluster_option(slurm_cluster)
    try:
        return _submit_with_retries(path, where, environ, slurm_cluster or "", note)
    except HpcrunError:
        raise
    except BaseException:
        # An interrupt: the controller may have accepted the job without anybody knowing.
        _cancel_unacknowledged(path, where, slurm_cluster or "", note)
        raise


def _submit_with_retries(
    path: Path, where: Sequence[str], environ: Mapping[str, str], cluster: str, note: SbatchNoteCallback
) -> JobId:
    words = [*_user_locale_options(environ), "sbatch", "--parsable", *where, str(path)]
    problem: SlurmProblem | None = None
    jobs: list[int] | None = []
    end = time.monotonic() + _PATIENCE_S
    for pause in (0.0, *PAUSES_S):
        if problem is not None:
            if time.monotonic() > end:
                break
            note(f"sbatch: {problem.text}; looking again in {pause:g} s")
            time.sleep(pause)
            jobs = _find_jobs_of_script(path, where)
            if jobs:
                note(f"the job is in the queue nevertheless: {jobs[0]}")
                return JobId(jobs[0], cluster=cluster)
            if jobs is None:  # The job may exist: another submission could make a second one.
                continue
        answer = _run_sbatch(words, environ)
        if answer.job is not None:
            if answer.trouble:
                note(f"sbatch: {answer.trouble.text}")
            return JobId(answer.job, cluster=answer.cluster or cluster)
        problem = answer.trouble or SlurmProblem("unknown", "sbatch printed nothing")
        if not _is_transient(problem):
            break
    assert problem is not None
    if problem.kind == "unknown" or _is_transient(problem):
        jobs = _find_jobs_of_script(path, where)
        if jobs:
            note(f"sbatch: {problem.text}; the job is in the queue nevertheless: {jobs[0]}")
            return JobId(jobs[0], cluster=cluster)
    left = f"; {problem.remedy}" if problem.remedy else ""
    if _is_transient(problem):
        left = f"; {_WHETHER if jobs is None else 'the job is not there'}, and try again in a while"
    elif jobs is None:
        left += f"; {_WHETHER}"
    raise SiteError(f"sbatch did not take the job: {problem.text}{left}")


def _cancel_unacknowledged(path: Path, where: Sequence[str], cluster: str, note: SbatchNoteCallback) -> None:
    note("interrupted; looking whether Slurm has taken the job")
    for pause in (0.0, _LATE_S):
        time.sleep(pause)
        jobs = _find_jobs_of_script(path, where)
        for job in jobs or ():
            cancel_submitted_job(JobId(job, cluster=cluster), note)
        if jobs:
            return
    if jobs is None:
        note(_WHETHER)


def cancel_submitted_job(job: JobId, note: SbatchNoteCallback) -> None:
    """Cancel a job that was submitted in vain; where that fails, say so."""
    try:
        cancel_job(JobQuery(job.job, cluster=job.cluster), "now")
        note(f"job {job.job} was cancelled")
    except SiteError as error:
        note(f"job {job.job} was submitted in vain and could not be cancelled: {error}")


def _user_locale_options(environ: Mapping[str, str]) -> list[str]:
    """process.run makes commands speak English, but the job must get the user's own language."""
    own = environ.get("LC_ALL")
    return ["env", "-u", "LC_ALL", *([f"LC_ALL={own}"] if own else [])]


def _run_sbatch(words: Sequence[str], environ: Mapping[str, str]) -> SbatchAnswer:
    try:
        done = process.run(words, timeout_s=_SBATCH_S, env=environ)
    except SiteError as error:
        return SbatchAnswer(None, trouble=SlurmProblem("busy", str(error)))
    return parse_sbatch_answer(done.stdout, done.stderr)


def _is_transient(trouble: SlurmProblem) -> bool:
    return trouble.kind == "busy" or bool(_TRANSIENT.search(trouble.text))


def _find_jobs_of_script(script: Path, where: Sequence[str]) -> list[int] | None:
    """The jobs that were made of a script, whose name no other script has; None without an answer."""
    words = ["squeue", "-h", "-a", "-t", "all", "-u", str(os.getuid()), "-o", "%F|%o", *where]
    done = _query_output(words)
    if done is None:
        return None
    rows = (line.split("|", 1) for line in done.splitlines() if "|" in line)
    # Not the whole path: it may have been shown with its symbolic links resolved.
    named = (job for job, command in rows if Path(command.strip()).name == script.name)
    return sorted({int(job) for job in named if job.isdigit()})


def drop_unknown_nodes(
    hosts: str, *, slurm_cluster: str | None = None, note: SbatchNoteCallback = discard_note
) -> str:
    """A list of hosts without those that the cluster does not have: sbatch would refuse the whole job."""
    where = cluster_option(slurm_cluster)
    answer = _query_output(["sinfo", "-h", "-a", "-N", "-o", "%N", *where])
    existing = set((answer or "").split())
    excluded = expand_hosts(hosts, "exclude")
    missing = [host for host in excluded if host not in existing]
    if not existing or not missing:
        return hosts
    note(f"exclude: {fold_hosts(missing)}: no such node (any more); left out")
    return (
        fold_hosts([host for host in excluded if host in existing], suffixes=False)
        if existing & set(excluded)
        else ""
    )


def _query_output(words: Sequence[str]) -> str | None:
    """What a command that only reads prints; None where it fails."""
    try:
        done = run_slurm_client(words, timeout_s=_QUERY_S)
    except SiteError:
        return None
    trouble = parse_slurm_problem(done.stderr)
    return done.stdout if done.exit_code == 0 and trouble is None else None
