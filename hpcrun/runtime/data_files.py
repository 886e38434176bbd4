"""Writes the data files of a save from the ranks themselves, laid out before their first byte.

The first rank of a file creates it, on all nodes at once, because on a large system that takes a while.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.commit import GenerationDraft
from hpcrun.checkpoint.format import Part, data_file_name
from hpcrun.checkpoint.lustre.storage import CheckpointStorage
from hpcrun.checkpoint.os_errors import explain_os_error
from hpcrun.checkpoint.part_writer import write_part
from hpcrun.errors import SiteError
from hpcrun.runtime.control import Control
from hpcrun.runtime.resharding import WritePlan
from hpcrun.runtime.stderr_notes import write_stderr_line
from hpcrun.specs.checkpoint import DurableSpec
from hpcrun.typed_json import dump_typed, parse_typed

StorageCall = Callable[[Path, Callable[[], Any]], Any]
"""Runs an action on a file, which may hang; SiteError after too long."""


@dataclass(frozen=True)
class PartResult:
    """The outcome of writing one rank's part."""

    problem: str
    errno: int | None
    """The system's error number, where the problem has one."""
    file: int
    part: Part | None
    """The part; None where there is a problem."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The layout of the file, from its first rank."""


class DataFileWriter:
    """Writes the parts of all ranks together."""

    def __init__(self, checkpoints: Path, spec: DurableSpec, control: Control) -> None:
        self._checkpoints, self._spec, self._control = checkpoints, spec, control

    def can_set_layout(self) -> bool:
        """Whether the file system lets us set a layout; one rank decides for all."""
        return self._storage.mount.kind == "lustre"

    def write(
        self,
        draft: GenerationDraft,
        plan: WritePlan,
        contents: Callable[[], Iterator[memoryview]],
        *,
        laid_out: bool,
        patiently: StorageCall,
    ) -> list[PartResult]:
        """Write this rank's part; return the results of all ranks, on each.

        `contents` returns the bytes of the plan's pieces and may be called again. `patiently` runs every
        request to storage.
        """
        path = draft.file(plan.file)

        def part(facts: dict[str, Any]) -> PartResult:
            try:
                result: PartResult = patiently(path, lambda: self._part(draft, plan, contents, facts))
                return result
            except SiteError as error:
                return PartResult(str(error), None, plan.file, None)

        facts, problem = dict[str, Any](), None
        if laid_out:
            try:
                facts = patiently(path, lambda: self._create_file(draft, plan))
            except OSError as error:
                problem = error
            except SiteError as error:
                problem = OSError(str(error))
            self._control.barrier()
        mine = self._failed(draft, plan, problem) if problem else part(facts)
        results = self._gather(mine)
        if not laid_out or all(result.errno != errno.ENOSPC for result in results):
            return results
        recreated = self._control.allgather(self._recreate_file(draft, plan, results))
        if plan.file not in (files := {file: facts for file, facts in recreated if facts is not None}):
            return self._gather(mine) if files else results
        return self._gather(part(files[plan.file] if plan.start == 0 else {}))

    def layout(self, results: list[PartResult]) -> dict[str, Any]:
        """Return the layout of the files by their names, for the manifest."""
        plain = {"file_system": self._storage.mount.kind or "unknown"}
        files = {data_file_name(result.file): plain for result in results}
        return files | {data_file_name(result.file): result.facts for result in results if result.facts}

    @functools.cached_property
    def _storage(self) -> CheckpointStorage:
        return CheckpointStorage(self._checkpoints, self._spec, self._warn)

    def _warn(self, text: str) -> None:
        """Warn on one rank only: all nodes have the same file system."""
        if self._control.rank == 0:
            write_stderr_line(text)

    def _create_file(self, draft: GenerationDraft, plan: WritePlan) -> dict[str, Any]:
        if plan.start:
            return {}
        return self._storage.prepare_file(draft.file(plan.file), *plan.file_needs)

    def _recreate_file(self, draft: GenerationDraft, plan: WritePlan, results: list[PartResult]) -> list[Any]:
        """Create this rank's file again on other targets, if it was full; return its number and layout."""
        is_full = any(result.errno == errno.ENOSPC and result.file == plan.file for result in results)
        if plan.start or not is_full:
            return [plan.file, None]
        try:
            return [plan.file, self._storage.retry_file(draft.file(plan.file), *plan.file_needs)]
        except OSError:
            return [plan.file, None]

    def _part(
        self,
        draft: GenerationDraft,
        plan: WritePlan,
        contents: Callable[[], Iterator[memoryview]],
        facts: dict[str, Any],
    ) -> PartResult:
        path = draft.file(plan.file)
        try:
            part = write_part(
                path,
                draft.generation,
                self._control.rank,
                plan.pieces,
                contents(),
                file=plan.file,
                start=plan.start,
            )
        except OSError as error:
            return self._failed(draft, plan, error)
        facts = facts | self._storage.layout_facts(path) if facts else {}
        return PartResult("", None, plan.file, part, facts)

    def _failed(self, draft: GenerationDraft, plan: WritePlan, error: OSError) -> PartResult:
        return PartResult(explain_os_error(error, draft.file(plan.file)), error.errno, plan.file, None)

    def _gather(self, mine: PartResult) -> list[PartResult]:
        return [parse_typed(PartResult, fields) for fields in self._control.allgather(dump_typed(mine))]
