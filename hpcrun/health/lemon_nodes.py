"""Lemon nodes: faults that the user's runs saw on nodes, across jobs, and which nodes are avoided for them.

Every run appends to one file next to the user's list of bad nodes. A fault counts less over time (half after
FAULT_HALF_LIFE_S); a node whose score is at LEMON_THRESHOLD or above is avoided at the next submission. A
run's own problem must not empty the cluster: a fault that follows a run from node to node does not count, and
only a small share of a partition is ever avoided.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcrun.errors import SiteError, UsageError
from hpcrun.files import UntrustedFileError, open_multiuser
from hpcrun.hostlist import expand_hosts
from hpcrun.specs.badnodes import BadNode, BadNodeList, append_synced_lines
from hpcrun.specs.profiles import config_directories
from hpcrun.typed_json import parse_typed

FAULT_HALF_LIFE_S = 3 * 86400.0
"""After this time a fault counts half."""
LEMON_THRESHOLD = 1.0
"""From this sum on a node is avoided."""
CAUSE_WEIGHTS = {"node lost": 2.0, "preflight": 1.5, "hang": 0.8, "crash": 0.6, "straggler": 0.4}
"""How much each cause weighs when it is new: a lost node is avoided for 3 days, a failed check for less than
two; ranks that died first, hung alone or were slow must have done so there more than once."""
FORGOTTEN_CAUSE = "forgotten"
"""The cause of an entry with which the user clears all earlier faults of a node."""
MAX_AVOIDED_SHARE = 0.1
"""The largest share of a partition's nodes that is avoided; of 4 to 9 nodes one, of fewer none."""
_FOLLOWS = 3
"""A fault on this many nodes of one run, or of all runs together, is a fault of the run."""
_WAIT_S, _TRY_S = 5.0, 0.05
_MAX_AGE_S = 10 * FAULT_HALF_LIFE_S
_MAX_TEXT_LENGTH = 300


@dataclass(frozen=True)
class NodeFault:
    """One fault that a run saw on a node."""

    node: str
    time: float
    """Seconds since 1970."""
    cause: str = ""
    """One of WEIGHTS, or FORGOTTEN."""
    run: str = ""
    attempt: int = 0
    evidence: str = ""
    """One line."""
    log: str = ""
    """Where to read more."""
    signature: str = ""
    """Identifies the same fault on several nodes: the message without the parts that vary."""
    job: int | None = None
    """The run's job in Slurm."""

    @property
    def weight(self) -> float:
        """When it was new."""
        return CAUSE_WEIGHTS.get(self.cause, 0.0)


@dataclass(frozen=True)
class LemonScore:
    """What all faults of a node amount to."""

    score: float
    causes: Mapping[str, int]
    """How often each cause counts."""
    seen: tuple[NodeFault, ...]
    """What counts, newest first."""
    until: float | None = None
    """When the score falls below THRESHOLD; None where it is below."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        last = self.seen[0]
        return {
            "score": round(self.score, 3),
            "avoided_until": self.until,
            "causes": dict(self.causes),
            "last": {"time": last.time, "run": last.run, "evidence": last.evidence, "log": last.log},
        }


@dataclass(frozen=True)
class NodeFaultHistory:
    """All entries of the file, and notes about what could not be read."""

    entries: tuple[NodeFault, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _FaultGroups:
    """The nodes on which the same fault was seen: in one run, at one moment, and by all runs."""

    nodes: dict[tuple[Any, ...], set[str]] = field(default_factory=dict)

    def add(self, fault: NodeFault) -> None:
        for key in self._keys(fault):
            self.nodes.setdefault(key, set()).add(fault.node)

    def follows(self, fault: NodeFault) -> bool:
        return any(len(self.nodes[key]) >= _FOLLOWS for key in self._keys(fault))

    @staticmethod
    def _keys(fault: NodeFault) -> list[tuple[Any, ...]]:
        # Over a long run nodes are lost, and checks fail, one by one; together it is the switch, or the run.
        if fault.cause in ("node lost", "preflight"):
            return [(fault.cause, fault.run, fault.attempt, fault.signature)]
        return [
            (fault.cause, fault.run, fault.signature),
            *([(fault.cause, fault.signature)] if fault.signature else []),
        ]


def node_fault_file() -> Path:
    """Where the user's runs write what they saw; it need not exist."""
    return config_directories()["user"] / "node-faults.jsonl"


def score_nodes(entries: Iterable[NodeFault], now: float) -> dict[str, LemonScore]:
    """Score the nodes by their faults, highest score first; `entries` are in the order of the file. Pure.

    The same cause counts once for a node and attempt. A fault that follows a run across nodes does not count,
    nor does one from before the node was forgotten.
    """
    faults = list(entries)
    # Before and after by the order of the lines: they are written on many hosts, each with its own clock.
    cleared = {fault.node: place for place, fault in enumerate(faults) if fault.cause == FORGOTTEN_CAUSE}
    once: dict[tuple[str, str, str, int], tuple[int, NodeFault]] = {}
    groups = _FaultGroups()
    for place, fault in enumerate(faults):
        if fault.weight and now - fault.time < _MAX_AGE_S:
            groups.add(fault)
            key = (fault.node, fault.cause, fault.run, fault.attempt)
            newest = max(once.get(key, (place, fault))[1], fault, key=lambda each: each.time)
            once[key] = place, newest
    by_node: dict[str, list[NodeFault]] = {}
    for place, fault in once.values():
        if place > cleared.get(fault.node, -1) and not groups.follows(fault):
            by_node.setdefault(fault.node, []).append(fault)
    scores = {node: _score_node(seen, now) for node, seen in by_node.items()}
    return dict(sorted(scores.items(), key=lambda item: (-item[1].score, item[0])))


def _score_node(seen: Sequence[NodeFault], now: float) -> LemonScore:
    # A clock ahead of ours must not make a fault count more than when it was new.
    total = math.fsum(
        fault.weight * 0.5 ** (max(0.0, now - fault.time) / FAULT_HALF_LIFE_S) for fault in seen
    )
    until = now + FAULT_HALF_LIFE_S * math.log2(total / LEMON_THRESHOLD) if total >= LEMON_THRESHOLD else None
    newest = tuple(sorted(seen, key=lambda fault: (-fault.time, fault.cause, fault.run)))
    return LemonScore(total, Counter(fault.cause for fault in newest), newest, until)


def max_avoided_nodes(nodes: int, needed: int = 0) -> int:
    """Return how many of a partition's nodes may be avoided for faults, when a job needs this many of
    them."""
    most = max(int(nodes * MAX_AVOIDED_SHARE), 1 if nodes >= 4 else 0)
    return max(0, min(most, nodes - needed))


def select_nodes_to_avoid(
    scores: Mapping[str, LemonScore], nodes: Collection[str], bad: Collection[str] = (), needed: int = 0
) -> BadNodeList:
    """The worst of a partition's nodes as entries for its --exclude, each with its reason and its end.

    `bad` are avoided anyway; `needed`: how many nodes the job takes.
    """
    left = [node for node in nodes if node not in bad]
    candidates = [node for node in left if node in scores and scores[node].until is not None]
    candidates.sort(key=lambda node: -scores[node].score)
    most = max_avoided_nodes(len(nodes), needed + len(nodes) - len(left))
    chosen, spared = candidates[:most], candidates[most:]
    entries = tuple(
        BadNode((node,), _avoidance_reason(scores[node]), None, scores[node].until) for node in chosen
    )
    if not spared:
        return BadNodeList(entries)
    note = f"seen as bad, but not avoided: {', '.join(spared)}: no more than {most} of {len(nodes)} nodes are"
    return BadNodeList(entries, (f"{note} for what runs saw; see `hpcrun fabric nodes`",))


def _avoidance_reason(score: LemonScore) -> str:
    causes = ", ".join(f"{cause} {count}x" for cause, count in score.causes.items())
    last = score.seen[0]
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(score.until))
    return f"{causes} in your runs, last in {last.run}: {last.evidence} (until {end})"


def load_node_faults(path: Path) -> NodeFaultHistory:
    """Load all faults; damaged lines are skipped and noted, with file and line."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return NodeFaultHistory()
    except OSError as error:
        return NodeFaultHistory(
            (), (f"{path}: cannot be read ({error.strerror}), so what runs saw does not count",)
        )
    entries, damaged = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            fault = _parse_node_fault(line)
            entries += [fault] if fault else []
            damaged += [] if fault else [number]
    if not damaged:
        return NodeFaultHistory(tuple(entries))
    lines = f"{len(damaged)} lines, the first is {damaged[0]}" if len(damaged) > 1 else f"line {damaged[0]}"
    return NodeFaultHistory(tuple(entries), (f"{path}: no entries, and skipped: {lines}",))


def _parse_node_fault(line: str) -> NodeFault | None:
    try:
        fault = parse_typed(NodeFault, json.loads(line), allow_extra=True)
        (node,) = expand_hosts(fault.node, "node")
    except (ValueError, UsageError, RecursionError):
        return None
    # The texts are printed, and become part of a command for an admin.
    texts: dict[str, Any] = {
        name: _clean_line(value) for name, value in vars(fault).items() if isinstance(value, str)
    }
    return replace(fault, **texts | {"node": node}) if 0 <= fault.time < 1e11 else None


def _clean_line(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(shown.split())[:_MAX_TEXT_LENGTH]


def append_node_faults(path: Path, entries: Iterable[NodeFault]) -> None:
    """Append entries, whole lines even where several jobs do so at once; SiteError where that fails.

    A file system that stalls is waited for a few seconds only.
    """
    lines = "".join(
        f"{json.dumps(_fault_as_json(fault), ensure_ascii=False)}\n" for fault in entries
    ).encode()
    failed: list[str] = []

    def write() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _append_locked(path, lines)
        except OSError as error:
            failed.append(f"{path}: cannot be written: {error.strerror}")
        except UntrustedFileError as error:
            failed.append(str(error))

    if lines:
        writer = threading.Thread(target=write, name="node faults", daemon=True)
        writer.start()
        writer.join(_WAIT_S)
        if writer.is_alive():
            raise SiteError(f"{path}: is not written within {_WAIT_S:g} s")
    if failed:
        raise SiteError(failed[0])


def _append_locked(path: Path, lines: bytes) -> None:
    """Under a lock, as appending from several hosts is not whole on NFS; without one where there is none."""
    lock = open_multiuser(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + _WAIT_S / 2
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_TRY_S)
            except OSError:
                break
        append_synced_lines(path, lines)
    finally:
        os.close(lock)


def _fault_as_json(fault: NodeFault) -> dict[str, Any]:
    values = {key: value for key, value in vars(fault).items() if value not in ("", None)}
    kept = {key: _clean_line(value) if isinstance(value, str) else value for key, value in values.items()}
    return kept | {"weight": fault.weight}


def forget_node_faults(path: Path, nodes: Iterable[str], now: float) -> None:
    """Clear all faults of these nodes so far; SiteError if that cannot be written."""
    append_node_faults(path, [NodeFault(node, now, FORGOTTEN_CAUSE) for node in nodes])


def select_scores(scores: Mapping[str, LemonScore], words: Sequence[str]) -> dict[str, LemonScore]:
    """The scores of named nodes, without names of those that are avoided; UsageError for none."""
    if not words:
        avoided = {node: score for node, score in scores.items() if score.until is not None}
        if not avoided:
            raise UsageError(
                "no node is avoided for what your runs saw; name nodes, see `hpcrun fabric nodes`"
            )
        return avoided
    named = dict.fromkeys(node for word in words for node in expand_hosts(word, "NODES"))
    if unseen := [node for node in named if node not in scores]:
        raise UsageError(
            f"{', '.join(unseen)}: nothing was seen there; seen were: {', '.join(scores) or 'none'}"
        )
    return {node: scores[node] for node in named}


def load_nodes_to_avoid(nodes: Collection[str], bad: Collection[str], needed: int, now: float) -> BadNodeList:
    """Return the nodes that a job should avoid for the faults that the user's runs saw, with notes."""
    history = load_node_faults(node_fault_file())
    chosen = select_nodes_to_avoid(score_nodes(history.entries, now), nodes, bad, needed)
    return BadNodeList(chosen.entries, (*history.notes, *chosen.notes))


def record_node_faults(entries: Iterable[NodeFault]) -> str:
    """Append to the user's file; return why that failed, or an empty text: it never stops a run."""
    try:
        append_node_faults(node_fault_file(), entries)
    except SiteError as error:
        return f"what was seen of the nodes is not kept: {error}"
    return ""
