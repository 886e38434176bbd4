"""Those who tell others of a run: started beside it by its supervisor, which waits for them only at the end.

All they know they read in the run directory. One process looks after the rest and is the only one that the
supervisor has: neither a sink that hangs nor one that dies can be felt by the run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.address import LOOPBACK
from hpcrun.errors import SiteError
from hpcrun.launch.run_context import RunContext
from hpcrun.launcher_world import without_rank_variables
from hpcrun.local_identity import expand_path, working_directory
from hpcrun.masking import Masker
from hpcrun.process import environment_with_package
from hpcrun.specs.fields import set_variables
from hpcrun.specs.job import JobSpec
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.telemetry import TelemetrySpec
from hpcrun.telemetry.shared_files import SharedFile
from hpcrun.telemetry.sidecar import ALL_DELIVERED, CONFIG_FILE, FINAL_DELIVERY_S, TEXTFILE_SUFFIX

_EXIT_WAIT_S = 5.0
_REQUIRED_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class _SidecarProcess:
    """The process that looks after all the others, or nobody."""

    def __init__(self, run: RunDir, orders: dict[str, Any], note: Callable[[str], None]) -> None:
        self._run, self._orders, self._note = run, orders, note
        self._child: subprocess.Popen[bytes] | None = None
        if orders:
            try:
                self._child = _start_sidecars(run, orders)
            except OSError as error:
                note(f"telemetry: {error}; the run continues without it")

    def detach_for_successor(self) -> None:
        """Tell nothing more, not even that the supervisor is gone: another one has the run, and tells."""
        child, self._child = self._child, None
        if child is None:
            return
        process.kill_child(child)
        child.communicate()
        textfile = self._orders.get("exporter", {}).get("textfile")
        if textfile is not None:
            # The figures of the run are shown elsewhere.
            with suppress(OSError):
                SharedFile(self._run, textfile, TEXTFILE_SUFFIX, self._note).remove()

    def end(self) -> None:
        """Have the rest told."""
        if self._child is not None:
            _end_sidecars(self._child, self._note)


@contextmanager
def telemetry_session(
    run: RunDir, spec: JobSpec, site: RunContext, note: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Have everybody told whom the job or the site names, for as long as the block lasts.

    Gives what ends it before, to be called where another supervisor has the run.
    """
    beside = _SidecarProcess(run, _sidecar_configs(run, spec, site, note), note)
    try:
        yield beside.detach_for_successor
    finally:
        beside.end()


def _start_sidecars(run: RunDir, orders: dict[str, Any]) -> subprocess.Popen[bytes]:
    run.telemetry.mkdir(mode=0o700, exist_ok=True)
    write_json(run.telemetry / CONFIG_FILE, orders)
    return process.protect_from_reaper(
        subprocess.Popen(
            [sys.executable, "-P", "-m", "hpcrun", "_beside", str(run.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_with_package(without_rank_variables(os.environ)),
            start_new_session=True,
        )
    )


def _end_sidecars(child: subprocess.Popen[bytes], note: Callable[[str], None]) -> None:
    """Nothing more will happen: let it tell the rest, and go."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):
        child.stdin.close()
    try:
        child.wait(FINAL_DELIVERY_S + _EXIT_WAIT_S)
        # Its exit code may have been reaped with that of the ranks.
        if child.stdout.read().decode() != ALL_DELIVERED:
            note("telemetry: the exporter process died; metrics are incomplete")
    except subprocess.TimeoutExpired:
        note("telemetry: what was still to be told took too long, and was dropped")
        process.kill_child(child)
        child.wait()
    finally:
        child.stdout.close()


def _sidecar_configs(
    run: RunDir, spec: JobSpec, site: RunContext, note: Callable[[str], None]
) -> dict[str, Any]:
    """What each of them is to do, by its name; empty where there is nothing to be done."""
    cluster = site.cluster
    targets = spec.telemetry.at(cluster.telemetry if cluster else None)
    orders: dict[str, Any] = {}
    if targets.textfile or targets.port:
        orders["exporter"] = {
            "textfile": _expand_path(targets.textfile),
            "port": targets.port,
            "targets": _expand_path(targets.targets),
            "address": _exporter_address(site),
            "suffix": cluster.network.fabric_suffix if cluster else "",
        }
    if targets.tensorboard:
        place = run.tensorboard
        if isinstance(targets.tensorboard, str):
            place = Path(_expand_path(targets.tensorboard) or "") / run.shared_name
        orders["tensorboard"] = {"directory": str(place)}
    if targets.wandb is not None:
        orders["wandb"] = _wandb_config(run, spec, targets)
    hooks = [{**hook.model_dump(), "whose": "job"} for hook in spec.hooks]
    hooks += [{**hook.model_dump(), "whose": "site"} for hook in (cluster.hooks if cluster else ())]
    if hooks:
        orders["hooks"] = {"hooks": hooks, "directory": str(working_directory())}
    for name, package in _REQUIRED_PACKAGES.items():
        if name in orders and not _is_installed(package):
            note(
                f"telemetry.{name}: {sys.executable} has no package {package}; the run continues without it;"
                f" to have it: pip install {package}"
            )
            del orders[name]
    return orders and orders | {"about": _run_labels(run, spec, site)}


def _run_labels(run: RunDir, spec: JobSpec, site: RunContext) -> dict[str, Any]:
    job = str(site.allocation.job) if site.allocation else ""
    return {
        "run": run.id,
        "name": spec.name,
        "ranks": spec.ranks,
        "slurm_job": job,
        "host": os.uname().nodename,
    }


def _wandb_config(run: RunDir, spec: JobSpec, targets: TelemetrySpec) -> dict[str, Any]:
    assert targets.wandb is not None
    sweep = run.sweep_of_element
    return {
        **targets.wandb.model_dump(),
        "group": targets.wandb.group or (sweep.id if sweep else None),
        "env": {name: value for name, value in set_variables(spec.env).items() if name.startswith("WANDB_")},
        "secrets": {name: path for name, path in spec.secrets.items() if name.startswith("WANDB_")},
        "config": Masker().mask_record(
            spec.model_dump(mode="json", exclude={"env", "secrets", "hooks", "telemetry"})
        ),
    }


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a directory of that name, such as the one W&B itself makes, is none."""
    spec_of_package = importlib.util.find_spec(package)
    return spec_of_package is not None and spec_of_package.origin is not None


def _expand_path(place: str | None) -> str | None:
    return None if place is None else expand_path(place)


def _exporter_address(site: RunContext) -> str:
    """Where /metrics is served: on this machine alone, and in an allocation on the interface of its jobs."""
    if site.allocation is None:
        return LOOPBACK
    try:
        return site.address_here.text
    except SiteError:
        return LOOPBACK
