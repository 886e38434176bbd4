"""The secrets of a run, so that what others get to read can be masked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hpcrun.errors import HpcrunError, SpecError
from hpcrun.masking import is_secret_name
from hpcrun.specs.cluster import load_cluster
from hpcrun.specs.fields import set_variables
from hpcrun.specs.load import load_run_job
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.secrets import read_secrets


def known_secrets(run: RunDir) -> Iterator[str]:
    """The values of a run that must not get out, as far as they can be known here."""
    owner = run.sweep_of_element or run
    for attempt in run.attempts():
        yield from _read_run_secrets(attempt.peers)
    yield from _read_run_secrets(run.leader)
    environments: list[Mapping[str, str]] = [os.environ]
    with suppress(HpcrunError, OSError):
        spec = load_run_job(run).spec
        environments.append(set_variables(spec.env))
        for name, path in spec.secrets.items():
            with suppress(SpecError):
                yield from read_secrets({name: path}).values()
    with suppress(HpcrunError, OSError):
        environments.append(set_variables(load_cluster(owner.cluster).env))
    for environment in environments:
        yield from (value for name, value in environment.items() if is_secret_name(name))


def _read_run_secrets(path: Path) -> Iterator[str]:
    """The secret with which the processes of a run know each other, where it stands."""
    with suppress(HpcrunError, OSError):
        record = read_json(path)
        if isinstance(record, dict) and isinstance(record.get("secret"), str):
            yield record["secret"]
