"""Tier `object` of a checkpoint worker: its node's share of a save goes to the object store.

It is read from the run directory, so that a slow store keeps no memory from the next save.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.format import MANIFEST_NAME, data_file_name
from hpcrun.checkpoint.objects.catalogue import prune_object_copies, run_key_prefix
from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.store import RetryPolicy
from hpcrun.checkpoint.objects.upload import (
    COMMIT_POLL_S,
    FileSource,
    UploadResult,
    commit_object_copy,
    upload_file,
)
from hpcrun.checkpoint.tier import InventoryEntry, NodeShards, TierName
from hpcrun.errors import SiteError, UsageError
from hpcrun.specs.checkpoint import ObjectSpec
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, read_saved_checkpoints


class ObjectTier:
    """Tier `object` of a node: its own data file; the node with part 0 commits and cleans up.

    A copy is always one of a generation that the run directory has, whose manifest and record it takes: what
    was not committed there is not copied.
    """

    name: TierName = "object"

    def __init__(
        self,
        spec: ObjectSpec,
        run_id: str,
        checkpoints: Path,
        *,
        patience_s: float = 600.0,
        hurry: threading.Event | None = None,
    ) -> None:
        """`hurry`: once it is set, nobody is waited for any more."""
        self._spec, self._run_id, self._checkpoints = spec, run_id, checkpoints
        self._patience_s, self._hurry = patience_s, hurry or threading.Event()

    def store(self, load: NodeShards) -> dict[str, Any]:
        """Copy this node's share, and commit where part 0 is ours; SiteError leaves no record."""
        saved = self._durable(load)
        manifest, record = (
            (saved.path / MANIFEST_NAME).read_bytes(),
            (saved.path / COMMIT_RECORD).read_bytes(),
        )
        done = UploadResult()
        facts: dict[str, Any] = {"url": self._spec.url}
        try:
            store = open_object_store(self._spec.url, self._spec.endpoint)
        except UsageError as error:
            raise SiteError(str(error)) from None
        with store:
            for number in sorted({shard.part.file for shard in load.parts}):
                with contextlib.closing(FileSource(saved.path / data_file_name(number))) as source:
                    done = done.plus(upload_file(store, self._run_id, saved, number, source))
            if load.parts[0].number == 0:
                commit_object_copy(
                    store, self._run_id, saved, manifest, record, self._patience_s, hurry=self._hurry
                )
                facts["committed"] = True
                try:
                    facts["removed_steps"] = [
                        copy.saved.step for copy in prune_object_copies(store, self._run_id, self._spec.keep)
                    ]
                except SiteError as error:  # the copy is safe; the next one tries again
                    facts["not_removed"] = str(error)
        return facts | vars(done)

    def prove(self) -> None:
        """Write and remove an object of this run; SiteError, soon, where that cannot be."""
        try:
            key = f"{run_key_prefix(self._run_id)}prove.{os.uname().nodename}.{os.getpid()}"
            with open_object_store(
                self._spec.url, self._spec.endpoint, RetryPolicy(max_attempts=2, response_timeout_s=10.0)
            ) as store:
                store.check()
                store.write(key, b"\0")
                store.delete(key)
        except UsageError as error:
            raise SiteError(str(error)) from None

    def holdings(self) -> Sequence[InventoryEntry]:
        """Nothing: all nodes see the store alike."""
        return ()

    def retain(self, generations: Collection[str]) -> None:
        """Nothing: the store keeps copies by its own count, and who commits one removes the oldest."""

    def _durable(self, load: NodeShards) -> SavedCheckpoint:
        """The save of the run directory that is of this generation; it may be committed by another node."""
        until = time.monotonic() + self._patience_s
        while True:
            for saved in read_saved_checkpoints(self._checkpoints)[0]:
                if saved.generation == load.stamp.generation:
                    return saved
            if self._hurry.is_set() or time.monotonic() >= until:
                raise SiteError(
                    f"{self._checkpoints}: has no save of step {load.stamp.step}, generation"
                    f" {load.stamp.generation}; only what is there is copied to {self._spec.url}"
                )
            self._hurry.wait(min(COMMIT_POLL_S, self._patience_s))
