"""Submits Python calls, pickled as submitit does: as jobs with the site's script, or in the background."""

from __future__ import annotations

import atexit
import os
import pickle
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from submitit.core.utils import DelayedSubmission, JobPaths

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

_UNLIMITED_MIN = 60 * 24 * 365 * 10
"""submitit's local controller needs a time limit; a run on this machine has none."""
_MAX_TIMEOUTS = 3
"""How often submitit resubmits a call that timed out."""


def require_private_file(path: Path) -> None:
    """UsageError unless a file and its folder belong to the user and only the user can write them.

    Loading a pickle runs code of its writer.
    """
    for place in (path.parent, path):
        require_private(place, place.stat())


class SubmittedScript(NamedTuple):
    """The result of a submission."""

    job: JobId
    """The job, or the whole array; its `cluster` is for -M."""
    script: str
    """The script as sbatch got it."""
    array: str | None = None
    """The value of --array."""


class TemplateExecutor:
    """Submits what submitit pickles with a script of the site's template.

    The context describes the job, its `launch` is what runs in it, and its log files are submitit's own in
    `folder`. `note` gets what a person should know, `detail` what else happened.
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
        note: SbatchNoteCallback = discard_note,
        detail: SbatchNoteCallback = discard_note,
    ) -> None:
        log_file_pattern(folder)
        self._folder = folder.absolute()
        self._render = partial(render_submission_script, library, template, note=note)
        self._context, self._note, self._detail = context, note, detail
        self._slurm_cluster, self._slurm_module = slurm_cluster, slurm_module

    def submit_task(self, fn: Callable[..., Any], *args: Any) -> SubmittedScript:
        """Submit one call as one job."""
        return self._send(self._dump(DelayedSubmission(fn, *args)), None)

    def submit_elements(
        self,
        fn: Callable[..., Any],
        *args: Any,
        elements: Sequence[int],
        offset: int = 0,
        throttle: int | None = None,
    ) -> SubmittedScript:
        """Submit the same call for each of these elements of a sweep, as one array with one pickle.

        The array's indices are the elements less `offset`; the template adds it again and puts the element
        into HPCRUN_ELEMENT. At most `throttle` run at one time.
        """
        indices = [element - offset for element in sorted(set(elements))]
        array = ArrayContext(indices=format_array_indices(indices, throttle), offset=offset)
        return self._send(self._dump(DelayedSubmission(fn, *args)), array, indices)

    def _dump(self, delayed: DelayedSubmission) -> Path:
        limit = self._context.directives.get("time", 0)
        # Without a limit in minutes each signal counts as a time-out, and those are limited in number.
        delayed.set_timeout(limit if isinstance(limit, int) else 0, _MAX_TIMEOUTS)
        return dump_private_pickle(delayed, self._folder)

    def _send(
        self, pickle_path: Path, array: ArrayContext | None, indices: Sequence[int] = ()
    ) -> SubmittedScript:
        """Submit, then put the pickle where each job, which waits for it for a minute, looks for it.

        After any error or interrupt neither a job nor a file is left.
        """
        script = self._folder / f".submission_file_{uuid.uuid4().hex}.sh"
        job, is_complete = None, False
        try:
            text = self._render(self._with_known_nodes(), self._folder, array)
            write_private_file(script, text.encode())
            job = submit_batch_script(
                script,
                slurm_cluster=self._slurm_cluster,
                slurm_module=self._slurm_module,
                deny=self._context.env_deny,
                note=self._note,
                detail=self._detail,
            )
            names = [f"{job.job}_{index}" for index in indices] if array else [str(job.job)]
            for name in names:
                link_or_copy(pickle_path, JobPaths(self._folder, name).submitted_pickle)
            # Slurm continues to show the path that it was given.
            paths = JobPaths(self._folder, str(job.job))
            paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
            is_complete = True
        finally:
            pickle_path.unlink(missing_ok=True)
            if not is_complete:
                if job is not None:
                    cancel_submitted_job(job, self._note)
                script.unlink(missing_ok=True)
        return SubmittedScript(job, text, array.indices if array else None)

    def _with_known_nodes(self) -> ScriptContext:
        hosts = self._context.directives.get("exclude")
        if not isinstance(hosts, str):
            return self._context
        remaining = drop_unknown_nodes(hosts, slurm_cluster=self._slurm_cluster, note=self._note)
        others = {name: value for name, value in self._context.directives.items() if name != "exclude"}
        directives = self._context.directives | {"exclude": remaining} if remaining else others
        return self._context.model_copy(update={"directives": directives})


_controllers: list[subprocess.Popen[bytes]] = []
"""submitit's controllers, which outlive this process."""


@atexit.register
def _detach_controllers() -> None:
    for controller in _controllers:
        if controller.poll() is None:
            # Python would warn of a child that is still running; this one is meant to outlive us.
            controller.returncode = 0


def submit_background(
    folder: Path, fn: Callable[..., Any], *args: Any, limit_min: int | None = None
) -> ProcessId:
    """Run one call in the background, without Slurm; return the process that supervises it.

    It outlives the command and the terminal that started it; its output is in the folder, as PID_0_log.out
    and .err. After `limit_min` minutes it is ended; it gets SIGUSR2 half a minute before.
    """
    limit_min = limit_min or _UNLIMITED_MIN
    delayed = DelayedSubmission(fn, *args)
    delayed.set_timeout(limit_min, _MAX_TIMEOUTS)
    source = dump_private_pickle(delayed, folder)
    is_complete, controller = False, None
    try:
        controller = _start_controller(folder, limit_min)
        _controllers.append(controller)
        source.rename(JobPaths(folder, str(controller.pid)).submitted_pickle)
        is_complete = True
    finally:
        if controller is not None and not is_complete:
            controller.send_signal(signal.SIGINT)
    identity = process.identify_process(controller.pid)
    assert identity is not None  # our child, which has not been waited for
    return identity


def _start_controller(folder: Path, limit_min: int) -> subprocess.Popen[bytes]:
    """Start submitit's local controller; its own way would share our terminal and hide the GPUs."""
    # -P: a file in the working directory must not become a module of ours.
    words = [sys.executable, "-P", "-u", "-m", "submitit.core._submit", str(folder)]
    own = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    variables = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_COMMAND": shlex.join(words),
        "SUBMITIT_LOCAL_NTASKS": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * limit_min),
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
        "SUBMITIT_STDERR_TO_STDOUT": "",
    }
    log_path = folder / "controller.log"
    log_path.touch(mode=0o600)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "submitit.local._local", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment_with_package(submission_environment(os.environ)[0] | own | variables),
            start_new_session=True,
            umask=0o077,
        )


def write_private_file(path: Path, data: bytes) -> None:
    """Write a new file that only the user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def dump_private_pickle(delayed: DelayedSubmission, folder: Path) -> Path:
    """Pickle a submission into a file that is private before anything is written to it.

    UsageError for what cannot be pickled.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / f"{uuid.uuid4().hex}.pkl"
    path.touch(mode=0o600, exist_ok=False)
    is_complete = False
    try:
        delayed.dump(path)
        is_complete = True
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        name = getattr(delayed.function, "__name__", type(delayed.function).__name__)
        raise UsageError(
            f"{name}: function and arguments must be picklable, to be sent to the job: {error}; leave out"
            " what lives in this process only, such as locks, open files and connections"
        ) from None
    finally:
        if not is_complete:
            path.unlink()
    return path


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file to another name, which is replaced; copy it where there are no hard links."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        write_private_file(target, source.read_bytes())
