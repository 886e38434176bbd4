"""What a run has in an object store: brought home where nothing nearer is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.objects.catalogue import list_whole_copies
from hpcrun.checkpoint.objects.download import download_generation
from hpcrun.checkpoint.restore.decide import ObjectCandidate, decide_restore
from hpcrun.checkpoint.restore_plan import RestorePlan
from hpcrun.errors import SiteError, UsageError
from hpcrun.launch.checkpointing.pumping import run_while_pumping
from hpcrun.launch.checkpointing.suspect_saves import read_suspect_saves
from hpcrun.specs.checkpoint import ObjectSpec
from hpcrun.specs.descent import lineage_order
from hpcrun.specs.events.checkpoint import CheckpointStoredEvent
from hpcrun.specs.events.log import read_events
from hpcrun.specs.rundir import RunDir


class ObjectStoreSource:
    """The copies of a run; the nodes are heard while the store is asked."""

    def __init__(
        self, run: RunDir, spec: ObjectSpec, rest: Callable[[float], None], note: Callable[[str], None]
    ) -> None:
        self._run, self._spec, self._rest, self._note = run, spec, rest, note

    def find_newer(self, plan: RestorePlan, nodes: Sequence[str]) -> RestorePlan:
        """A plan for a newer copy, which is a save of the run directory on return; else the given one.

        SiteError where nothing else is left and the store, which has a copy, cannot be asked.
        """
        try:
            copies = self._copies()
        except (SiteError, UsageError) as error:
            if plan.stamp is None and self._has_stored():
                raise SiteError(f"all that is left of this run is in the object store: {error}") from None
            self._note(f"copies in the object store are not considered: {error}")
            return plan
        newest = plan.lost_steps + (plan.stamp.step if plan.stamp else 0)
        while True:
            far = decide_restore([], [], [], copies, read_suspect_saves(self._run), nodes)
            if far.stamp is None or (
                plan.stamp is not None and lineage_order(far.stamp) <= lineage_order(plan.stamp)
            ):
                return plan
            stamp = far.stamp
            self._note(f"step {stamp.step} is fetched from {far.copy}: nothing nearer is whole")
            try:
                home = run_while_pumping(self._rest, partial(self._download, stamp.generation))
            except (SiteError, UsageError, DamagedError, OSError) as error:
                self._note(f"step {stamp.step} cannot be fetched: {error}")
                copies = [copy for copy in copies if copy.stamp != stamp]
                plan = replace(plan, passed_over=(*plan.passed_over, f"{far.copy}: {error}"))
                continue
            lost = max(0, newest - stamp.step)
            return replace(far, save=home, lost_steps=lost, passed_over=plan.passed_over)

    def _copies(self) -> list[ObjectCandidate]:
        copies = run_while_pumping(
            self._rest, lambda: list_whole_copies(self._spec.url, self._run.run_id, self._spec.endpoint)
        )
        return [ObjectCandidate(copy.stamp, copy.url) for copy in copies]

    def _download(self, generation: str) -> str:
        url, endpoint = self._spec.url, self._spec.endpoint
        return str(
            download_generation(url, endpoint, self._run.run_id, generation, self._run.checkpoints).path
        )

    def _has_stored(self) -> bool:
        """Whether an earlier attempt has told of a copy."""
        return any(
            isinstance(record.event, CheckpointStoredEvent) and record.event.tier == "object"
            for record in read_events(self._run.events)
        )
