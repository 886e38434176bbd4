"""How long it takes to decide what a run goes on from: many generations, on nodes and in the run directory.

Everything is read as a supervisor reads it: the commit record of every save from a file, and what every node
holds from the line of JSON that its checkpoint worker has sent, parts and parity of each generation. Then the
decision is made. The state has so many tensors, cut over so many ranks; the newest save that a decision falls
upon is opened as well, which makes its cheap checks and reads its manifest.

The cases: everything whole; a node lost, so that the newest is rebuilt from parity; nothing whole in memory
but the oldest; nothing in memory, so that the newest save of the run directory is taken.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Report, options, spread

from hpcrun.checkpoint.commit import begin_generation, commit_generation
from hpcrun.checkpoint.format import (
    ChunkSpec,
    Part,
    collect_tensors,
    compute_structure_digest,
    render_tensors,
)
from hpcrun.checkpoint.generation import GenerationReader, read_part_tail
from hpcrun.checkpoint.part_writer import write_part
from hpcrun.checkpoint.restore.decide import decide_restore
from hpcrun.checkpoint.restore.inventory import InventoryReader, gc_paused
from hpcrun.checkpoint.restore_plan import RestorePlan
from hpcrun.checkpoint.tier import CheckpointId, HeldParity, HeldPart, InventoryEntry, SetMember
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, read_saved_checkpoints, render_commit_record

NODES, TENSORS, LIMIT_S = 8, 4096, 2.0


def pieces_of(rank: int, tensors: int) -> list[ChunkSpec]:
    """A rank's rows of every tensor."""
    return [ChunkSpec(f"model.{n}", "float32", (NODES, 4), (rank, 0), (1, 4)) for n in range(tensors)]


def one_save(checkpoints: Path, step: int, tensors: int) -> SavedCheckpoint:
    """A committed generation with a part for each node."""
    draft, parts = begin_generation(checkpoints, step, 1), list[Part]()
    for rank in range(NODES):
        pieces = pieces_of(rank, tensors)
        contents = (bytes(piece.size_bytes) for piece in pieces)
        parts.append(write_part(draft.file(rank), draft.generation, rank, pieces, contents, file=rank))
    tails = (read_part_tail(draft.file(n), part, n, draft.generation) for n, part in enumerate(parts))
    found = collect_tensors(tails)
    facts: dict[str, Any] = {"step": step, "position": 8 * step, "world_size": NODES, "attempt": 1}
    return commit_generation(draft, parts, render_tensors(found), compute_structure_digest(found), **facts)


def run_directory(root: Path, generations: int, tensors: int) -> list[SavedCheckpoint]:
    """So many committed saves; the files of all but the newest are links to those of one."""
    first = one_save(root, 1, tensors)
    for step in range(2, generations):
        path = root / f"step-{step:08d}"
        path.mkdir()
        for name in os.listdir(first.path):  # noqa: PTH208
            if name != COMMIT_RECORD:
                os.link(first.path / name, path / name)
        told = {**vars(first), "path": path, "step": step, "generation": os.urandom(16).hex()}
        (path / COMMIT_RECORD).write_text(render_commit_record(SavedCheckpoint(**told)))
    one_save(root, generations, tensors)
    return read_saved_checkpoints(root)[0]


def told_by_nodes(stamps: Sequence[CheckpointId]) -> list[str]:
    """What each node says: its part of every generation, and its parity in one set of all nodes."""
    names = [f"n{number:02}" for number in range(NODES)]
    lines: list[list[InventoryEntry]] = [[] for _ in names]
    for stamp in stamps:
        parts = [Part(n, 0, 1 << 20, 1 << 19, 4096, f"{stamp.step:08x}{n:08x}") for n in range(NODES)]
        members = tuple(SetMember(name, ((n, parts[n]),)) for n, name in enumerate(names))
        for n, name in enumerate(names):
            held = HeldPart(n, f"/dev/shm/hpcrun-1000/run/{name}/slot-{n}-0.bin", 0, parts[n])
            parity = HeldParity(f"/dev/shm/hpcrun-1000/run/{name}/parity.bin", members, 1, n, ("0" * 16,))
            lines[n] += [
                InventoryEntry(stamp, "memory", name, (held,)),
                InventoryEntry(stamp, "parity", name, (), parity),
            ]
    return [json.dumps([one.as_json() for one in line]) for line in lines]


def check(saved: SavedCheckpoint) -> str | None:
    """The cheap checks of the save that it comes down to."""
    GenerationReader(saved).close()
    return None


def decided(lines: Sequence[str], checkpoints: Path, nodes: Sequence[str]) -> RestorePlan:
    """All that a supervisor does from the answers of the nodes on."""
    reader = InventoryReader()
    with gc_paused():
        told = (json.loads(line) for line in lines)
        holdings = [one for each in told for one in reader.read(each) if isinstance(one, InventoryEntry)]
    saves, unreadable = read_saved_checkpoints(checkpoints)
    return decide_restore(holdings, saves, unreadable, [], {}, nodes, check)


def main() -> int:
    """Measure, print, and write."""
    args = options(__doc__).parse_args()
    generations, rounds = (200, 3) if args.quick else (1000, 7)
    report = Report("restart_decision")
    report.header()
    print(f"# {generations} generations of {TENSORS} tensors on {NODES} nodes; seconds, median [min, max]")
    names = [f"n{number:02}" for number in range(NODES)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        saves = run_directory(root, generations, TENSORS)
        stamps = [CheckpointId(one.generation, one.step + 1, one.position, NODES, 1) for one in saves]
        whole, oldest = told_by_nodes(stamps), told_by_nodes(stamps)
        # Of all but the oldest, two nodes of the set have nothing: more than its parity makes up for.
        oldest = [json.dumps(json.loads(line)[:2]) if n < 2 else line for n, line in enumerate(oldest)]
        cases: list[tuple[str, list[str], Path, list[str]]] = [
            ("all is whole", whole, root, names),
            ("a node is lost", whole[1:], root, names[1:]),
            ("only the oldest is whole", oldest, Path(folder) / "none", names),
            ("the run directory alone", [], root, names),
        ]
        worst = 0.0
        for what, lines, checkpoints, living in cases:
            seconds, plan = list[float](), None
            for _ in range(rounds):
                start = time.perf_counter()
                plan = decided(lines, checkpoints, living)
                seconds.append(time.perf_counter() - start)
            assert plan is not None
            assert plan.stamp is not None, what
            tiers = "+".join(plan.tiers)
            report.row(case=what, seconds=spread(seconds), step=plan.stamp.step, tiers=tiers)
            worst = max(worst, statistics.median(seconds))
    scale = f"{generations} generations of {TENSORS} tensors on {NODES} nodes"
    report.claim(f"restart decision, {scale}, worst case, s", worst, f"at most {LIMIT_S:g}", worst <= LIMIT_S)
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
