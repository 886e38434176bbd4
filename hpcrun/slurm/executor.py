"""submitit's executor with the site's own script, and its local one for jobs in the background.

`TemplateExecutor.script_text` shows the script of a job without submitting it, and without loading submitit.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import submitit
from submitit.core.core import Job as AnyJob
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalJob

from hpcrun import process
from hpcrun.errors import UsageError
from hpcrun.files import require_private
from hpcrun.process import ProcessId, environment_with_package
from hpcrun.slurm.ids import JobId
from hpcrun.slurm.sbatch import (
    SbatchNoteCallback,
    cancel_submitted_job,
    discard_note,
    drop_unknown_nodes,
    format_array_indices,
    log_file_pattern,
    render_submission_script,
    submission_environment,
    submit_batch_script,
)
from hpcrun.slurm.script_context import ArrayContext, ScriptContext
from hpcrun.slurm.template import BatchTemplate, TemplateLibrary
from hpcrun.specs.fields import matches_any_pattern

_UNLIMITED_MIN = 60 * 24 * 365 * 10
"""submitit's local controller wants a time limit; a run of one's own machine has none."""


def require_private_file(path: Path) -> None:
    """UsageError unless a file and its folder are the user's and nobody else can write them.

    Whoever can write a pickle runs code as the one who loads it.
    """
    for place in (path.parent, path):
        require_private(place, place.stat())


class SubmittedScript(NamedTuple):
    """What came of a submission."""

    job: JobId
    """Of the whole array where it is one; its `cluster` is for -M."""
    script: str
    """The script as sbatch got it."""
    array: str | None = None
    """What --array said."""


class TemplateExecutor(submitit.SlurmExecutor):
    """Submits what submitit pickles with a script of the site's template.

    The context says everything about the job: `update_parameters` is refused. Its `launch` is what runs in
    the job, its log files are submitit's own in `folder`. `note` is told what a person should know, `detail`
    what else happened.
    """

    def __init__(
        self,
        folder: Path,
        library: TemplateLibrary,
        template: BatchTemplate,
        context: ScriptContext,
        *,
        slurm_cluster: str | None = None,
        slurm_module: str | None = None,
        max_num_timeout: int = 3,
        note: SbatchNoteCallback = discard_note,
        detail: SbatchNoteCallback = discard_note,
    ) -> None:
        log_file_pattern(folder)
        super().__init__(folder, max_num_timeout=max_num_timeout)
        self.template = template
        self._render = partial(render_submission_script, library, template, note=note)
        self._context, self._note, self._detail = context, note, detail
        self._slurm_cluster, self._slurm_module = slurm_cluster, slurm_module

    @classmethod
    def affinity(cls) -> int:
        """Always there: whether Slurm is shows at the submission, and a dry run needs none."""
        return 2

    def _internal_update_parameters(self, **kwargs: Any) -> NoReturn:
        names = ", ".join(kwargs)
        raise UsageError(f"{names}: the job's script is made from its spec; set it there, under `resources`")

    def script_text(self, array: ArrayContext | None = None) -> str:
        """The script of a job, or of an array, as it would be submitted."""
        return self._render(self._context, self.folder, array)

    def submit_task(self, fn: Callable[..., Any], *args: Any) -> SubmittedScript:
        """Submit one call as one job."""
        return self._send([(self._dump(DelayedSubmission(fn, *args)), None)], None)

    def submit_elements(
        self,
        fn: Callable[..., Any],
        *args: Any,
        elements: Sequence[int],
        offset: int = 0,
        throttle: int | None = None,
    ) -> SubmittedScript:
        """Submit the same call for each of these elements of a sweep, as one array with one pickle.

        The array's indices are the elements less `offset`; the template adds it again and says in
        HPCRUN_ELEMENT which element it is. No more than `throttle` run at one time.
        """
        source = self._dump(DelayedSubmission(fn, *args))
        indices = [element - offset for element in sorted(set(elements))]
        array = ArrayContext(indices=format_array_indices(indices, throttle), offset=offset)
        return self._send([(source, index) for index in indices], array)

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> NoReturn:
        # submitit's own would make a plain script, without the template.
        raise UsageError("a job of a template is submitted by submit_task or submit_elements")

    def _dump(self, delayed: DelayedSubmission) -> Path:
        limit = self._context.directives.get("time", 0)
        # Without a limit in minutes each signal counts as a time-out, and those are limited in number.
        delayed.set_timeout(limit if isinstance(limit, int) else 0, self.max_num_timeout)
        return dump_private_pickle(delayed, self.folder)

    def _send(
        self, pickles: Sequence[tuple[Path, int | None]], array: ArrayContext | None
    ) -> SubmittedScript:
        """Submit, then put each pickle where its job, which waits for it for a minute, will look.

        Whatever goes wrong, or an interrupt: no job and no files are left of it.
        """
        script = self.folder / f".submission_file_{uuid.uuid4().hex}.sh"
        job, is_whole = None, False
        try:
            text = self._render(self._with_known_nodes(), self.folder, array)
            write_private_file(script, text.encode())
            job = submit_batch_script(
                script,
                slurm_cluster=self._slurm_cluster,
                slurm_module=self._slurm_module,
                deny=self._context.env_deny,
                note=self._note,
                detail=self._detail,
            )
            for source, index in pickles:
                name = str(job.job) if index is None else f"{job.job}_{index}"
                link_or_copy(source, JobPaths(self.folder, name).submitted_pickle)
            # Slurm goes on naming the path that it was given.
            JobPaths(self.folder, str(job.job)).move_temporary_file(
                script, "submission_file", keep_as_symlink=True
            )
            is_whole = True
        finally:
            for source in {source for source, _ in pickles}:
                source.unlink(missing_ok=True)
            if not is_whole:
                if job is not None:
                    cancel_submitted_job(job, self._note)
                script.unlink(missing_ok=True)
        return SubmittedScript(job, text, array.indices if array else None)

    def _with_known_nodes(self) -> ScriptContext:
        hosts = self._context.directives.get("exclude")
        if not isinstance(hosts, str):
            return self._context
        known = drop_unknown_nodes(hosts, slurm_cluster=self._slurm_cluster, note=self._note)
        others = {name: value for name, value in self._context.directives.items() if name != "exclude"}
        directives = self._context.directives | {"exclude": known} if known else others
        return self._context.model_copy(update={"directives": directives})


class BackgroundExecutor(submitit.LocalExecutor):
    """submitit's local executor, whose jobs outlive the command and the terminal that started them."""

    def __init__(
        self,
        folder: Path,
        *,
        tasks: int = 1,
        limit_min: int | None = None,
        env: Mapping[str, str] = {},
        deny: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        # -P: a file in the working directory must not become a module of ours.
        super().__init__(folder, python=f"{shlex.quote(python)} -P")
        self._tasks, self._limit_min, self._env = tasks, limit_min or _UNLIMITED_MIN, dict(env)
        self._deny = tuple(deny)

    def _num_tasks(self) -> int:
        return self._tasks

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[AnyJob[Any]]:
        for delayed in delayed_submissions:
            delayed.set_timeout(self._limit_min, self.max_num_timeout)
        # All of them before the first starts: one of them may not be picklable.
        pickles = [dump_private_pickle(delayed, self.folder) for delayed in delayed_submissions]
        jobs: list[AnyJob[Any]] = []
        is_whole = False
        try:
            for source in pickles:
                jobs.append(self._submit_command(self._submitit_command_str))
                source.rename(jobs[-1].paths.submitted_pickle)
            is_whole = True
        finally:
            if not is_whole:
                for job in jobs:
                    job.cancel()
        return jobs

    def _submit_command(self, command: str) -> LocalJob[Any]:
        # submitit's own would share our terminal, and hide the GPUs from a job that names none.
        own = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PYTHON") and not matches_any_pattern(name, self._deny)
        }
        given = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": str(self._tasks),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self._limit_min),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
        }
        printed = self.folder / "controller.log"
        printed.touch(mode=0o600)
        with printed.open("ab") as log:
            controller = subprocess.Popen(
                [sys.executable, "-P", "-m", "submitit.local._local", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_with_package(
                    submission_environment(os.environ, self._deny)[0] | own | self._env | given
                ),
                start_new_session=True,
                umask=0o077,
            )
        _controllers.append(controller)
        return LocalJob(self.folder, str(controller.pid), list(range(self._tasks)), controller)


_controllers: list[subprocess.Popen[bytes]] = []
"""Nobody waits for them, and none of them is to be ended with its handle."""


@atexit.register
def _detach_controllers() -> None:
    for controller in _controllers:
        if controller.poll() is None:
            # It goes on without us, as it should: Python would warn of it.
            controller.returncode = 0


def submit_background(
    folder: Path, fn: Callable[..., Any], *args: Any, limit_min: int | None = None
) -> ProcessId:
    """Run one call in the background, without Slurm; the process that watches over it.

    It goes on when the command or the terminal that started it ends; what it prints lies in the folder,
    as PID_0_log.out and .err. After `limit_min` minutes it is ended; it gets SIGUSR2 half a minute before.
    """
    job = BackgroundExecutor(folder, limit_min=limit_min).submit(fn, *args)
    found = process.identify_process(int(job.job_id))
    assert found is not None  # our child, which nobody has waited for
    return found


def write_private_file(path: Path, data: bytes) -> None:
    """Write a new file that only the user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def dump_private_pickle(delayed: DelayedSubmission, folder: Path) -> Path:
    """Pickle a submission into the folder, made private before anything is in it.

    UsageError for what cannot be pickled.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / f"{uuid.uuid4().hex}.pkl"
    path.touch(mode=0o600, exist_ok=False)
    is_whole = False
    try:
        delayed.dump(path)
        is_whole = True
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        name = getattr(delayed.function, "__name__", type(delayed.function).__name__)
        raise UsageError(
            f"{name}: function and arguments must be picklable, to be sent to the job: {error}; leave out"
            " what lives in this process only, such as locks, open files and connections"
        ) from None
    finally:
        if not is_whole:
            path.unlink()
    return path


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file one more name, which may be taken; where there are no hard links, a copy of it."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        write_private_file(target, source.read_bytes())
