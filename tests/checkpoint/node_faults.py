"""Faults of nodes and workers, each with what a restore makes of it from memory, parity and older saves."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.commit import quarantine_generation
from hpcrun.checkpoint.distributed_reader import DistributedReader
from hpcrun.checkpoint.flush.durable_tier import CommitTimeouts, DurableTier
from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.parity.peers import PeerClient
from hpcrun.checkpoint.parity.rebuild import rebuild_members
from hpcrun.checkpoint.part_check import find_damaged_parts
from hpcrun.checkpoint.restore.decide import decide_restore
from hpcrun.checkpoint.restore.intact_parts import find_intact_parts
from hpcrun.checkpoint.restore_plan import RestorePlan
from hpcrun.checkpoint.tier import InventoryEntry, NodeShards, parse_inventory_entry
from hpcrun.errors import HpcrunError, SiteError
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import SavedCheckpoint, resumable_checkpoints
from tests.checkpoint.faults import Case, Told, restore
from tests.checkpoint.generations import content_of, save
from tests.checkpoint.nodes import Node, Nodes, flip
from tests.checkpoint.workers import Host, ranks_of

STEP, RANKS = 4, (1, 2, 1, 2)


def _losses(root: Path, parity: int, count: int, told: Told, quick: bool) -> Told:
    """So many of four nodes lost, in every way there is; an older save lies in the run directory."""
    saved = save(root / "run", 2)
    with closing(Nodes(root / "nodes", len(RANKS), parity)) as nodes:
        loads = _stored(nodes)
        ways = list(itertools.combinations(range(len(RANKS)), count))
        for dead in ways[:2] if quick else ways:
            told.faults += 1
            living = [node for number, node in enumerate(nodes.every) if number not in dead]
            _go_on(nodes, living, loads[0], saved, told)
            for path in (root / "nodes").rglob("rebuilt-*"):
                path.unlink()
    return told


def _stored(nodes: Nodes) -> list[NodeShards]:
    loads = nodes.loads(STEP, RANKS)
    for stored in nodes.store(loads):
        stored.result()
    return loads


def _go_on(
    nodes: Nodes, living: Sequence[Node], load: NodeShards, saved: SavedCheckpoint, told: Told
) -> None:
    """Decide, rebuild and read, as a restart does on the nodes that are left."""
    names = [node.name for node in living]
    plan = decide_restore(_held(living, load), [saved], [], [], {}, names)
    for order in plan.rebuilds:
        (where,) = [node for node in living if node.name == order.node]
        assert where.peers is not None
        rebuild_members(order, where.peers, where.name, where.folder)
    if plan.rebuilds:
        plan = decide_restore(_held(living, load), [saved], [], [], {}, names)
    if plan.save is not None:
        told.happened = told.happened or plan.passed_over[0]
        restore(saved.path.parent, told)
        return
    here = living[0]
    addresses = {node.name: (node.server.address, node.server.port) for node in living}
    _read(plan, here.name, PeerClient(here.who, addresses, timeout_s=5.0), told)


def _held(living: Sequence[Node], load: NodeShards) -> list[InventoryEntry]:
    found = [one for node in living for one in node.held()]
    return [one for one in found if one.stamp.generation == load.stamp.generation]


def _read(plan: RestorePlan, here: str, remote: Any, told: Told) -> bool:
    """All of a plan's generation, compared with what was saved; False where it is refused."""
    try:
        with DistributedReader(plan, here, remote) as generation:
            for tensor in generation.manifest.tensors.values():
                for piece, place in tensor.chunks:
                    into = bytearray(piece.size_bytes)
                    generation.read(piece, place, memoryview(into))
                    told.silent += bytes(into) != content_of(piece, generation.stamp.step)
    except (DamagedError, HpcrunError) as error:
        told.happened = told.happened or str(error)
        return False
    told.loaded(f"step {generation.stamp.step} from {' and '.join(plan.tiers)}")
    return True


class Direct:
    """Reads what other nodes hold straight from their files."""

    def __init__(self, plan: RestorePlan) -> None:
        self._plan = plan

    def read(self, _node: str, request: dict[str, Any], into: memoryview) -> None:
        """Fill a buffer."""
        source = self._plan.sources[request["number"]]
        begin = source.at + request["at"]
        into[:] = Path(source.path).read_bytes()[begin : begin + len(into)]

    def close(self) -> None:
        """Nothing is open."""


def lost_node(root: Path, quick: bool) -> Told:
    """Each node of a set that survives one loss."""
    return _losses(root, 1, 1, Told("each of 4 nodes in turn; xor"), quick)


def lost_rack(root: Path, quick: bool) -> Told:
    """Two nodes at once, of a set that survives two losses: a rack that holds two members of it."""
    return _losses(root, 2, 2, Told("every 2 of 4 nodes at once; Reed-Solomon"), quick)


def lost_too_many(root: Path, quick: bool) -> Told:
    """Two nodes at once, of a set that survives one loss."""
    return _losses(root, 1, 2, Told(""), quick)


def replaced_node(root: Path, _quick: bool) -> Told:
    """A node is lost, and one that was in no set comes in its place."""
    told, saved = Told("one of 4 nodes lost, a new one in its place", 1), save(root / "run", 2)
    with closing(Nodes(root / "nodes", len(RANKS), 1)) as nodes:
        loads = _stored(nodes)
        spare = Node(root / "nodes", "spare")
        spare.join([*nodes.every, spare], 1)
        lost = nodes.every.pop(1)
        lost.die()
        nodes.every.insert(0, spare)
        _go_on(nodes, nodes.every, loads[0], saved, told)
    return told


def permuted_hosts(root: Path, quick: bool) -> Told:
    """After a requeue the same nodes are there in another order, under the others' names."""
    told = Told("4 nodes under one another's names")
    with closing(Nodes(root / "nodes", len(RANKS), 1)) as nodes:
        held = _held(nodes.every, _stored(nodes)[0])
        names = [node.name for node in nodes.every]
        orders = list(itertools.permutations(names))[1:]
        for order in orders[:5] if quick else orders:
            told.faults += 1
            renamed = dict(zip(names, order, strict=True))
            moved = [replace(one, node=renamed[one.node], parity=None) for one in held if one.parts]
            plan = decide_restore(moved, [], [], [], {}, names)
            if not _read(plan, order[0], Direct(plan), told):
                told.loaded("nothing, and says so")
    return told


def damaged_memory(root: Path, quick: bool) -> Told:
    """A byte of a node's memory flips after it was sealed; parity makes up for it after one failed load."""
    told, saved = Told("a byte flips in a node's memory; xor"), save(root / "run", 2)
    with closing(Nodes(root / "nodes", len(RANKS), 1)) as nodes:
        loads = _stored(nodes)
        slots = [Path(part.path) for one in _held(nodes.every, loads[0]) for part in one.parts]
        places = [(path, at) for path in slots for at in range(3, path.stat().st_size, 977 if quick else 101)]
        for path, at in places:
            told.faults += 1
            flip(path, at)
            names = [node.name for node in nodes.every]
            held = _held(nodes.every, loads[0])
            plan = decide_restore(held, [saved], [], [], {}, names)
            if not _read(plan, names[0], Direct(plan), told):
                _mend(nodes, loads[0], saved, told)
            flip(path, at)
    return told


def _mend(nodes: Nodes, load: NodeShards, saved: SavedCheckpoint, told: Told) -> None:
    """As after a load that has failed: nodes read what they hold, and what does not prove itself is lost."""
    generation = load.stamp.generation
    for node in nodes.every:
        node.damages = find_damaged_parts(node.held(), {generation})
    assert any(node.damages for node in nodes.every)
    _go_on(nodes, nodes.every, load, saved, told)
    for node in nodes.every:
        node.damages = {}
    for path in nodes.folder.rglob("rebuilt-*"):
        path.unlink()


def _go_on_mixed(
    nodes: Nodes, lost: Node, load: NodeShards, older: SavedCheckpoint, told: Told, *, prove: bool
) -> None:
    """As a restart does without that node and without parity, with whole parts out of the run directory."""
    checkpoints, living = older.path.parent, [node for node in nodes.every if node != lost]
    held = [one for one in _held(living, load) if one.parity is None]
    search = partial(find_intact_parts, checkpoints, prove=prove)
    plan = decide_restore(held, [older], [], [], {}, [node.name for node in living], find_intact_parts=search)
    if plan.save is not None:
        restore(checkpoints, told)
    else:
        _read(plan, living[0].name, Direct(plan), told)


def lost_and_damaged(root: Path, quick: bool) -> Told:
    """A node is lost without parity, and a byte of a save has changed; ranks have set it aside for that."""
    told, older = (
        Told("each of 4 nodes lost, and a byte changed in a file of the save"),
        save(root / "run", 2),
    )
    checkpoints = older.path.parent
    with closing(Nodes(root / "nodes", len(RANKS), 1)) as nodes, ThreadPoolExecutor(len(RANKS)) as pool:
        loads = _stored(nodes)
        for stored in [pool.submit(DurableTier(checkpoints, keep=9).store, load) for load in loads]:
            stored.result()
        aside = quarantine_generation(checkpoints / f"step-{STEP:08d}")
        ways = list(itertools.product(nodes.every, sorted(aside.glob("data-*.bin"))))
        for lost, path in ways[:2] if quick else ways:
            told.faults += 1
            flip(path, 100)
            _go_on_mixed(nodes, lost, loads[0], older, told, prove=True)
            flip(path, 100)
    return told


def never_committed(root: Path, _quick: bool) -> Told:
    """A node has written its part of a save and is lost before the others have; they hold theirs."""
    told, older = (
        Told("each of 4 nodes lost after it alone had written its part of a save"),
        save(root / "run", 2),
    )
    checkpoints = older.path.parent
    with closing(Nodes(root / "nodes", len(RANKS), 1)) as nodes:
        loads = _stored(nodes)
        for lost, load in zip(nodes.every, loads, strict=True):
            told.faults += 1
            patience = CommitTimeouts(peer_timeout_s=0.01, first_poll_s=0.005)
            with suppress(SiteError):
                DurableTier(checkpoints, keep=9, patience=patience).store(load)
            _go_on_mixed(nodes, lost, loads[0], older, told, prove=False)
            shutil.rmtree(checkpoints / f".step-{STEP:08d}.1")
    return told


def _with_worker(root: Path, delays: Sequence[float], *, agent: bool) -> Told:
    """Kill a real worker, or the process that hosts it, some time after it was given a save."""
    who = "agent (its pipe to the worker closes)" if agent else "checkpoint worker"
    told = Told(f"the {who} is killed while a save is under way")
    for number, delay in enumerate(delays):
        run = RunDir(root / str(number) / "run")
        run.checkpoints.mkdir(parents=True)
        local = str(root / str(number) / "disk")
        host = _worker(root / str(number), run, local)
        ranks = ranks_of(host, (0, 1), 2)
        for rank in ranks:
            rank.save(2, ["local", "durable"])
        for rank in ranks:
            rank.wait("store_result", tier="durable")
        for rank in ranks:
            rank.save(STEP, ["local", "durable"], 2)
        signal.sigtimedwait([], delay)
        host.end() if agent else host.kill()
        told.faults += 1
        restore(run.checkpoints, told)
        again = _worker(root / str(number), run, local)
        held = [parse_inventory_entry(one) for one in again.holdings()]
        whole = [one for one in held if len(one.parts) == 2]
        plan = decide_restore(whole, [], [], [], {}, ["n1"])
        if not _read(plan, "n1", None, told):
            told.loaded("nothing, and says so")
        again.kill()
    return told


def _worker(root: Path, run: RunDir, local: str) -> Host:
    host = Host(root, run, "n1")
    host.configure(1, local=local)
    return host


def killed_worker(root: Path, quick: bool) -> Told:
    """A real checkpoint worker, by SIGKILL."""
    return _with_worker(root, (0.0, 0.02) if quick else (0.0, 0.002, 0.01, 0.02, 0.05, 0.1), agent=False)


def killed_agent(root: Path, quick: bool) -> Told:
    """The host of a real checkpoint worker is gone: the end of its input."""
    return _with_worker(root, (0.0,) if quick else (0.0, 0.005, 0.02, 0.05), agent=True)


def killed_rank(root: Path, _quick: bool) -> Told:
    """One rank of a node has filled its slot, the other never does."""
    told, run = Told("one of 2 ranks dies before it has filled its slot", 1), RunDir(root / "run")
    run.checkpoints.mkdir(parents=True)
    host = _worker(root, run, str(root / "disk"))
    ranks = ranks_of(host, (0, 1), 2)
    for rank in ranks:
        rank.save(2, ["durable"])
    for rank in ranks:
        rank.wait("store_result", tier="durable")
    ranks[0].save(STEP, ["durable"], 2)
    ranks[1].close()
    os.sched_yield()
    host.kill()
    if [one.step for one in resumable_checkpoints(run.checkpoints)] != [2]:
        told.silent += 1
    restore(run.checkpoints, told)
    return told


NODE_CASES: dict[str, Case] = {
    "lost node": lost_node,
    "lost rack": lost_rack,
    "more lost than the parity survives": lost_too_many,
    "one replacement node": replaced_node,
    "permuted hosts": permuted_hosts,
    "flipped byte in a node's memory": damaged_memory,
    "lost node and a damaged save": lost_and_damaged,
    "lost node and half a save": never_committed,
    "killed worker": killed_worker,
    "killed agent": killed_agent,
    "killed rank": killed_rank,
}
