"""Repair of a run's checkpoints from every copy that this machine can read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from hpcrun.checkpoint.objects.run_store import open_run_copies
from hpcrun.checkpoint.restore.outside_copies import (
    ObjectStoreCopy,
    find_local_inventory,
    rebuild_parts_locally,
)
from hpcrun.checkpoint.restore.repair import RepairReport, repair_generation
from hpcrun.checkpoint.restore.sources import DirectoryCopy, GenerationCopy, NodeCopy
from hpcrun.checkpoint.tier import InventoryEntry
from hpcrun.specs.load import load_run_job
from hpcrun.specs.rundir import RunDir


class RunRepair:
    """Repairs checkpoints from directories, nodes' memory and disks, the object store, and parity.

    Copies stay open, and rebuilt files exist, until the stack is closed.
    """

    def __init__(
        self,
        run: RunDir,
        directories: Sequence[Path],
        url: str | None,
        endpoint: str | None,
        stack: ExitStack,
    ) -> None:
        self._stack = stack
        self._inventory = read_run_inventory(run)
        stored = open_run_copies(run, url, endpoint, stack)
        self.unknown_store = stored.unknown
        """Why the copies in the object store are unknown; None where they are known."""
        self._copies: list[GenerationCopy] = [DirectoryCopy(directory) for directory in directories]
        self._copies += [NodeCopy(entry) for entry in self._inventory]
        if stored.store is not None:
            self._copies += [ObjectStoreCopy(stored.store, copy) for copy in stored.copies]

    def repair(self, path: Path, dry_run: bool, progress: Callable[[int], None]) -> RepairReport | None:
        """Repair a checkpoint; None where it is whole. Parity is used where copies are not enough."""
        stamps = [entry.stamp for entry in self._inventory]
        report = repair_generation(path, self._copies, stamps, dry_run=dry_run, progress=progress)
        if report is not None and report.missing and (rebuilt := self._rebuild(report)):
            copies = [*self._copies, *rebuilt]
            report = repair_generation(path, copies, stamps, dry_run=dry_run, progress=progress)
        return report

    def _rebuild(self, report: RepairReport) -> list[GenerationCopy]:
        """What parity in the memory of nodes rebuilds of a checkpoint."""
        if report.generation is None or not any(entry.parity for entry in self._inventory):
            return []
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcrun-repair-")))
        parts = rebuild_parts_locally(self._inventory, report.path, report.generation, folder)
        return [NodeCopy(entry) for entry in parts]


def read_run_inventory(run: RunDir) -> list[InventoryEntry]:
    """What nodes keep of a run's generations, as far as it can be read from here."""
    local = load_run_job(run).spec.checkpoint.local if run.spec.exists() else None
    return find_local_inventory(run.run_id, local)
