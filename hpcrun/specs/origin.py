"""A run's origin, written down when its directory is made: who, where, and which code."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import hpcrun
from hpcrun import local_identity, process
from hpcrun.errors import SiteError
from hpcrun.masking import Masker
from hpcrun.specs.cluster import ClusterSpec, render_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.specs.provenance import Provenance, write_provenance
from hpcrun.specs.records import write_atomically
from hpcrun.specs.rundir import RunDir

_MAX_DIFF_BYTES = 16 * 2**20
_GIT_S = 20


def record_provenance(
    run: RunDir,
    spec: JobSpec,
    *,
    cluster: str | None = None,
    profile: ClusterSpec | None = None,
    template: Path | None = None,
) -> Provenance:
    """Write job.json, the profile, and code.diff where the working directory differs from its commit."""
    if profile is not None:
        write_atomically(run.cluster, render_cluster(profile))
    commit = (_describe_git_state("rev-parse", "HEAD") or "").strip() or None
    diff = _describe_git_state("diff", "HEAD", "--binary") if commit else None
    if diff and len(diff) <= _MAX_DIFF_BYTES:
        write_atomically(run.code_diff, diff)
    record = Provenance(
        kind="sweep" if spec.sweep else "train" if spec.command is None else "command",
        name=spec.name,
        ranks=spec.ranks,
        steps=None if spec.command else spec.train.steps,
        created=time.time(),
        user=local_identity.user_name(),
        host=os.uname().nodename,
        directory=str(local_identity.working_directory()),
        argv=Masker().mask_words(sys.argv),
        hpcrun=hpcrun.__version__,
        python=sys.version.split()[0],
        commit=commit,
        is_dirty=bool(diff),
        cluster=cluster,
        template=None if template is None else str(template),
    )
    write_provenance(run, record)
    return record


def _describe_git_state(*words: str) -> str | None:
    """What git says about the working directory; None without git, or outside of a repository."""
    with suppress(SiteError):
        done = process.run(["git", *words], timeout_s=_GIT_S)
        if done.exit_code == 0:
            return done.stdout
    return None
