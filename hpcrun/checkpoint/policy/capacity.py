"""Whether the saves of a job fit: in its run directory, and in the memory of its nodes.

Everything here is computed before the job runs. What is free in the memory of a running node is measured by
`hpcrun.checkpoint.policy.shm_capacity`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.checkpoint.lustre.lfs import LfsClient
from hpcrun.checkpoint.lustre.storage import StorageFinding, StoragePlan, make_storage_plan
from hpcrun.checkpoint.parity.erasure import parity_memory_bytes
from hpcrun.checkpoint.parity.sets import ErasureSets
from hpcrun.checkpoint.policy.size import (
    SaveSizes,
    SourcedValue,
    compute_save_sizes,
    max_kept_saves,
    whole_save_bytes,
)
from hpcrun.errors import SiteError
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.plan import Plan
from hpcrun.units import format_bytes, parse_memory

_MAX_TOTAL_S, _ANSWER_TIMEOUT_S = 10.0, 4.0
"""The longest wait for a file system before a job; after it, what it would say is unknown."""
_FILES_OF_A_RUN, _FILES_OF_A_RANK = 20, 4


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a node, and what saves take of it; in bytes."""

    slots: SourcedValue
    parity: SourcedValue
    there: SourcedValue
    """That the job may use on a node."""

    @property
    def left(self) -> float | None:
        """The memory left for everything else; None if one of them is not known."""
        parts = (self.there.value, self.slots.value, self.parity.value)
        return None if None in parts else parts[0] - parts[1] - parts[2]  # type: ignore[operator]


def compute_memory_budget(
    spec: JobSpec, cluster: ClusterSpec | None, sizes: SaveSizes, sets: ErasureSets | None
) -> MemoryBudget:
    """What the slots and the parity of a node take, against the memory that the job may use there."""
    count, node = spec.checkpoint.memory, sizes.node.value
    if not count:
        slots = SourcedValue(0.0, "checkpoint.memory: 0, so ranks write by themselves")
    else:
        source = f"checkpoint.memory: {count}, of what a node writes"
        slots = SourcedValue(None if node is None else count * node, source)
    return MemoryBudget(slots, _parity_bytes(sizes, sets), _node_memory(spec, cluster))


def _parity_bytes(sizes: SaveSizes, sets: ErasureSets | None) -> SourcedValue:
    if sets is None or not sets.sets:
        return SourcedValue(0.0, "no parity")
    if sizes.node.value is None:
        return SourcedValue(None, sizes.node.source)
    node = int(sizes.node.value)
    most = max(
        parity_memory_bytes(node, len(nodes), k) for nodes, k in zip(sets.sets, sets.parity, strict=True)
    )
    words = f"{sets.scheme}: {most / max(node, 1):.0%} of what a node writes, for two saves of other nodes"
    return SourcedValue(float(most), words)


def _node_memory(spec: JobSpec, cluster: ClusterSpec | None) -> SourcedValue:
    """Return the memory that a job may use on each node: what it requests, else all of the node's."""
    resources = spec.resources
    if resources.mem is not None and (amount := parse_memory(resources.mem)) > 0:
        return SourcedValue(amount * 2.0**20, f"resources.mem: {resources.mem}")
    if cluster is None:
        return SourcedValue(None, "no profile, and the job asks for none (resources.mem)")
    name = resources.partition or cluster.default_partition
    partition = cluster.partitions.get(name) if name else None
    if partition is None or partition.mem_per_node is None:
        return SourcedValue(None, f"profile {cluster.name} has no mem_per_node for partition {name}")
    source = f"profile {cluster.name}: mem_per_node of {name}"
    return SourcedValue(parse_memory(partition.mem_per_node) * 2.0**20, source)


def find_storage_problems(
    jobs: Sequence[tuple[JobSpec, Plan | None]], place: Path, *, held: int | None = None
) -> list[StorageFinding]:
    """Find out whether the files and saves of these jobs fit below a directory, which need not exist.

    `held`: how many saves a resumed run has there already; None for new runs. Only reads; the findings are
    warnings and refusals.
    """
    existing = next(path for path in (place, *place.absolute().parents) if os.access(path, os.F_OK))
    need_bytes = sum(_kept_bytes(spec, is_new=held is None) for spec, plan in jobs if plan is not None)
    spec, plan = jobs[0]
    findings = check_free_space(existing, os.statvfs(existing), need_bytes, spec.ranks, len(jobs))
    storage = None if findings else plan_save_storage_in_time(spec, plan, place, held=held or 0)
    if storage is None:
        return findings
    if storage.refusal is not None:
        text = f"{place}: no save can be kept here: {storage.refusal}"
        return [StorageFinding("refused", f"{text}; make room, or set HPCRUN_ROOT to another place")]
    if storage.kind not in ("lustre", "unknown"):
        return []
    warnings = [finding for finding in storage.findings if finding.level == "warning"]
    return [StorageFinding("warning", f"saves in {place}: {finding.text}") for finding in warnings]


def _kept_bytes(spec: JobSpec, *, is_new: bool) -> int:
    """The space that the saves of a run need at most at one time; a resumed run has most of it already."""
    every = spec.checkpoint.every_steps or spec.checkpoint.every == "auto"
    count = max_kept_saves(spec, with_milestones=False) if every or spec.checkpoint.at_end else 0
    return whole_save_bytes(spec) * (count if is_new else min(count, 1))


def check_free_space(
    place: Path, status: os.statvfs_result, need_bytes: int, ranks: int, runs: int
) -> list[StorageFinding]:
    """Check the free space of a file system for the saves and files of `runs` runs, where it counts them."""
    free, findings = status.f_bavail * status.f_frsize, []
    if status.f_blocks and free < need_bytes:
        text = f"{place}: {format_bytes(free)} are free, but the saves need {format_bytes(need_bytes)}"
        findings.append(f"{text}; set HPCRUN_ROOT to a larger disk, or lower checkpoint.keep")
    files = runs * (_FILES_OF_A_RUN + _FILES_OF_A_RANK * ranks)
    if status.f_files and status.f_favail < files:
        text = f"{place}: {status.f_favail} more files are possible, but about {files} are needed"
        findings.append(f"{text}; remove some, or set HPCRUN_ROOT to another place")
    return [StorageFinding("refused", text) for text in findings]


def plan_save_storage(
    spec: JobSpec, sizes: SaveSizes, place: Path, *, held: int = 0, lfs: LfsClient | None = None
) -> StoragePlan | None:
    """Plan the storage of saves in a directory; None if the size of a save is not known.

    `held`: how many saves are there already.
    """
    if sizes.whole.value is None:
        return None
    checkpoint = spec.checkpoint
    return make_storage_plan(
        place,
        checkpoint.durable,
        save_bytes=int(sizes.whole.value),
        nodes=spec.resources.nodes,
        keep=max_kept_saves(spec) - 1,
        held=held,
        writers=1 if checkpoint.memory else spec.ranks_per_node,
        lfs=lfs,
    )


def plan_save_storage_in_time(
    spec: JobSpec, plan: Plan | None, place: Path, *, held: int = 0, most_s: float = _MAX_TOTAL_S
) -> StoragePlan | None:
    """Do the same within a time limit: a file system that does not answer becomes a warning.

    None also for a job that is saved at a signal only, which may never come.
    """
    if not spec.checkpoint.every and not spec.checkpoint.at_end:
        return None
    plans: list[StoragePlan | None] = []

    def look() -> None:
        try:
            plans.append(
                plan_save_storage(
                    spec, compute_save_sizes(spec, plan), place, held=held, lfs=LfsClient(_ANSWER_TIMEOUT_S)
                )
            )
        except (OSError, SiteError) as error:
            plans.append(_unresponsive_storage(place, str(error)))

    thread = threading.Thread(target=look, name="place for saves", daemon=True)
    thread.start()
    thread.join(most_s)
    return plans[0] if plans else _unresponsive_storage(place, f"it has not answered in {most_s:g} s")


def _unresponsive_storage(place: Path, why: str) -> StoragePlan:
    text = f"{place}: whether saves fit there is not known: {why}"
    return StoragePlan(place, "unknown", None, (), (StorageFinding("warning", text),))
