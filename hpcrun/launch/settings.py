"""An attempt's communication settings: chosen, written down with their reasons, and given to its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hpcrun.errors import UsageError
from hpcrun.launch.nodevalues import render_table, table_of
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.records import write_whole
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.settings import Settings, write_settings
from hpcrun.tuning.host import nccl_files
from hpcrun.tuning.job import advise_job, follow


def settle(
    attempt: Attempt,
    spec: JobSpec,
    cluster: ClusterSpec | None,
    placement: Placement,
    environ: Mapping[str, str],
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Choose an attempt's settings and write them down; gives what every rank's environment gets.

    What the job or the shell has set stands, and `note` is told. A profile that is wrong here costs the
    settings, not the job.
    """
    try:
        nodes = placement.nodes
        here = os.uname().nodename.partition(".")[0] in {node.partition(".")[0] for node in nodes}
        files = nccl_files(Path("/"), environ) if here else {}
        settings = advise_job(spec, cluster, nodes, here=here, stands={**files, **environ})
        settings = settings.but_for(environ, "environment").but_for(files, "nccl.conf of this node")
        settings = follow(settings)
    except UsageError as error:
        settings = Settings(notes=(f"no settings: {error}",))
        note(settings.notes[0])
    for lost in settings.overruled:
        if lost.value != lost.ours:
            note(str(lost))
    write_settings(attempt.settings, settings)
    write_whole(table_of(attempt), render_table(settings, placement))
    return settings.environment()
