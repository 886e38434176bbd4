"""The data files of a save that ranks write themselves, laid out before their first byte.

The first of a file's ranks makes it; all nodes do so at once, because on a large system that takes a while.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
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
from hpcrun.specs.checkpoint import DurableSpec

StorageCall = Callable[[Path, Callable[[], Any]], Any]
"""Does something with a file that may hang; SiteError after too long."""


@dataclass(frozen=True)
class PartResult:
    """What came of one rank's part."""

    problem: str
    number: int | None
    """Of the problem, as the system counts errors."""
    file: int
    part: list[Any]
    """The fields of a Part; nothing where there is a problem."""
    facts: dict[str, Any] = field(default_factory=dict)
    """How the file lies, from the first of its ranks."""


class DataFileWriter:
    """Writes the parts of all ranks together."""

    def __init__(self, checkpoints: Path, spec: DurableSpec, control: Control) -> None:
        self._checkpoints, self._spec, self._control = checkpoints, spec, control
        self._known: CheckpointStorage | None = None

    def can_set_layout(self) -> bool:
        """Whether the file system lets us say how; to be asked on one rank alone, for all."""
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
        """Write this rank's part; what came of the parts of all ranks, the same on each.

        `contents` gives the bytes of the plan's pieces, again if need be. `patiently`: for all that storage
        is asked for.
        """
        path = draft.file(plan.file)

        def part(facts: dict[str, Any]) -> PartResult:
            try:
                found: PartResult = patiently(path, lambda: self._part(draft, plan, contents, facts))
                return found
            except SiteError as error:
                return PartResult(str(error), None, plan.file, [])

        facts, problem = dict[str, Any](), None
        if laid_out:
            try:
                facts = patiently(path, lambda: self._made(draft, plan))
            except OSError as error:
                problem = error
            except SiteError as error:
                problem = OSError(str(error))
            self._control.barrier()
        mine = self._failed(draft, plan, problem) if problem else part(facts)
        every = self._gather(mine)
        if not laid_out or all(one.number != errno.ENOSPC for one in every):
            return every
        anew = self._control.allgather(self._recreate_file(draft, plan, every))
        if plan.file not in (files := {file: facts for file, facts in anew if facts is not None}):
            return self._gather(mine) if files else every
        return self._gather(part(files[plan.file] if plan.start == 0 else {}))

    def layout(self, every: list[PartResult]) -> dict[str, Any]:
        """What is known of the files, by their names, for the manifest."""
        plain = {"file_system": self._storage.mount.kind or "unknown"}
        found = {data_file_name(one.file): plain for one in every}
        return found | {data_file_name(one.file): one.facts for one in every if one.facts}

    @property
    def _storage(self) -> CheckpointStorage:
        if self._known is None:
            self._known = CheckpointStorage(self._checkpoints, self._spec, self._warn)
        return self._known

    def _warn(self, text: str) -> None:
        """Once is enough: all nodes have the same file system."""
        if self._control.rank == 0:
            sys.stderr.write(f"hpcrun: {text}\n")
            sys.stderr.flush()

    def _made(self, draft: GenerationDraft, plan: WritePlan) -> dict[str, Any]:
        if plan.start:
            return {}
        return self._storage.prepare_file(draft.file(plan.file), *plan.file_needs)

    def _recreate_file(self, draft: GenerationDraft, plan: WritePlan, every: list[PartResult]) -> list[Any]:
        """Which file is there again, empty and on other targets, and how it lies; None where it is not."""
        is_full = any(one.number == errno.ENOSPC and one.file == plan.file for one in every)
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
        where: dict[str, int] = {"file": plan.file, "start": plan.start}
        try:
            part = write_part(path, draft.generation, self._control.rank, plan.pieces, contents(), **where)
        except OSError as error:
            return self._failed(draft, plan, error)
        facts = facts | self._storage.layout_facts(path) if facts else {}
        return PartResult("", None, plan.file, list(astuple(part)), facts)

    def _failed(self, draft: GenerationDraft, plan: WritePlan, error: OSError) -> PartResult:
        return PartResult(explain_os_error(error, draft.file(plan.file)), error.errno, plan.file, [])

    def _gather(self, mine: PartResult) -> list[PartResult]:
        return [PartResult(*fields) for fields in self._control.allgather(list(astuple(mine)))]


def parts_by_rank(every: list[PartResult]) -> list[Part]:
    """The parts by rank, where all were written."""
    return [Part(*one.part) for one in every]
