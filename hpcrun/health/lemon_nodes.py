"""Lemons: what the user's runs have seen nodes do, across jobs, and which nodes are avoided for it.

Every run appends to one file beside the user's list of bad nodes. What was seen weighs less as time goes by
(half of it after HALF_LIFE_S); a node whose sum is at THRESHOLD or above is kept away from at the next
submission. A run's own trouble must not empty the cluster: what follows a run from node to node counts
nothing, and no more than a small share of a partition is ever avoided for it.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.errors import SiteError, UsageError
from hpcrun.files import UntrustedFileError, open_multiuser
from hpcrun.hostlist import expand_hosts
from hpcrun.specs.badnodes import BadNode, BadNodeList, append_synced_lines
from hpcrun.specs.profiles import config_directories

FAULT_HALF_LIFE_S = 3 * 86400.0
"""After so long what was seen weighs half."""
LEMON_THRESHOLD = 1.0
"""From this sum on a node is avoided."""
CAUSE_WEIGHTS = {"node lost": 2.0, "preflight": 1.5, "hang": 0.8, "crash": 0.6, "straggler": 0.4}
"""How much each cause weighs when it is new: a lost node is avoided for 3 days, a failed check for less than
two; ranks that died first, hung alone or were slow must have done so there more than once."""
FORGOTTEN_CAUSE = "forgotten"
"""The cause of an entry with which a person clears a node of all that was seen before."""
MAX_AVOIDED_SHARE = 0.1
"""Of a partition, no more nodes than this are avoided; of 4 to 9 nodes one, of fewer none."""
_FOLLOWS = 3
"""What was seen on so many nodes of one run, or by all runs together, is the run's trouble."""
_WAIT_S, _TRY_S = 5.0, 0.05
_MAX_AGE_S = 10 * FAULT_HALF_LIFE_S
_MAX_TEXT_LENGTH = 300


@dataclass(frozen=True)
class NodeFault:
    """One thing that a run saw a node do."""

    node: str
    time: float
    """Seconds since 1970."""
    cause: str
    """One of WEIGHTS, or FORGOTTEN."""
    run: str = ""
    attempt: int = 0
    evidence: str = ""
    """One line."""
    log: str = ""
    """Where to read more."""
    signature: str = ""
    """What makes two of them the same trouble: the message without what differs from time to time."""
    job: int | None = None
    """The run's job in Slurm."""

    @property
    def weight(self) -> float:
        """When it was new."""
        return CAUSE_WEIGHTS.get(self.cause, 0.0)


@dataclass(frozen=True)
class LemonScore:
    """What all that was seen of a node amounts to."""

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
    """All entries of the file, and what of it could not be read."""

    entries: tuple[NodeFault, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _FaultGroups:
    """On which nodes the same trouble was seen: in one run, at one moment, and by all runs."""

    nodes: dict[tuple[Any, ...], set[str]] = field(default_factory=dict)

    def add(self, one: NodeFault) -> None:
        for key in self._keys(one):
            self.nodes.setdefault(key, set()).add(one.node)

    def follows(self, one: NodeFault) -> bool:
        return any(len(self.nodes[key]) >= _FOLLOWS for key in self._keys(one))

    @staticmethod
    def _keys(one: NodeFault) -> list[tuple[Any, ...]]:
        # Over a long run nodes are lost, and checks fail, one by one; together it is the switch, or the run.
        if one.cause in ("node lost", "preflight"):
            return [(one.cause, one.run, one.attempt, one.signature)]
        return [(one.cause, one.run, one.signature), *([(one.cause, one.signature)] if one.signature else [])]


def node_fault_file() -> Path:
    """Where the user's runs write what they saw; it need not exist."""
    return config_directories()["user"] / "node-faults.jsonl"


def score_nodes(entries: Iterable[NodeFault], now: float) -> dict[str, LemonScore]:
    """What is known against each node, highest score first; pure. `entries` are in the order of the file.

    The same cause counts once for a node and attempt; what follows a run across nodes, and what came before a
    node was forgotten, does not count.
    """
    known = list(entries)
    # Before and after by the order of the lines: they are written on many hosts, each with its own clock.
    cleared = {one.node: place for place, one in enumerate(known) if one.cause == FORGOTTEN_CAUSE}
    once: dict[tuple[str, str, str, int], tuple[int, NodeFault]] = {}
    groups = _FaultGroups()
    for place, one in enumerate(known):
        if one.weight and now - one.time < _MAX_AGE_S:
            groups.add(one)
            key = (one.node, one.cause, one.run, one.attempt)
            newest = max(once.get(key, (place, one))[1], one, key=lambda each: each.time)
            once[key] = place, newest
    by_node: dict[str, list[NodeFault]] = {}
    for place, one in once.values():
        if place > cleared.get(one.node, -1) and not groups.follows(one):
            by_node.setdefault(one.node, []).append(one)
    scores = {node: _score_node(seen, now) for node, seen in by_node.items()}
    return dict(sorted(scores.items(), key=lambda item: (-item[1].score, item[0])))


def _score_node(seen: Sequence[NodeFault], now: float) -> LemonScore:
    # A clock that is ahead of ours must not make anything weigh more than when it was new.
    total = math.fsum(one.weight * 0.5 ** (max(0.0, now - one.time) / FAULT_HALF_LIFE_S) for one in seen)
    until = now + FAULT_HALF_LIFE_S * math.log2(total / LEMON_THRESHOLD) if total >= LEMON_THRESHOLD else None
    newest = tuple(sorted(seen, key=lambda one: (-one.time, one.cause, one.run)))
    return LemonScore(total, Counter(one.cause for one in newest), newest, until)


def max_avoided_nodes(nodes: int, needed: int = 0) -> int:
    """How many of a partition's nodes may be avoided for what was seen, when a job needs so many of them."""
    most = max(int(nodes * MAX_AVOIDED_SHARE), 1 if nodes >= 4 else 0)
    return max(0, min(most, nodes - needed))


def select_nodes_to_avoid(
    scores: Mapping[str, LemonScore], nodes: Collection[str], bad: Collection[str] = (), needed: int = 0
) -> BadNodeList:
    """The worst of a partition's nodes as entries for its --exclude, each with its reason and its end.

    `bad` are avoided anyway; `needed`: how many nodes the job takes.
    """
    left = [node for node in nodes if node not in bad]
    wanted = [node for node in left if node in scores and scores[node].until is not None]
    wanted.sort(key=lambda node: -scores[node].score)
    most = max_avoided_nodes(len(nodes), needed + len(nodes) - len(left))
    chosen, spared = wanted[:most], wanted[most:]
    entries = tuple(
        BadNode((node,), _avoidance_reason(scores[node]), None, scores[node].until) for node in chosen
    )
    if not spared:
        return BadNodeList(entries)
    told = f"seen as bad, but not avoided: {', '.join(spared)}: no more than {most} of {len(nodes)} nodes are"
    return BadNodeList(entries, (f"{told} for what runs saw; see `hpcrun fabric nodes`",))


def _avoidance_reason(found: LemonScore) -> str:
    causes = ", ".join(f"{cause} {count}x" for cause, count in found.causes.items())
    last = found.seen[0]
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.until))
    return f"{causes} in your runs, last in {last.run}: {last.evidence} (until {end})"


def load_node_faults(path: Path) -> NodeFaultHistory:
    """All that was seen; what is damaged is skipped and told, with file and line."""
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
            one = _parse_node_fault(line)
            entries += [one] if one else []
            damaged += [] if one else [number]
    if not damaged:
        return NodeFaultHistory(tuple(entries))
    lines = f"{len(damaged)} lines, the first is {damaged[0]}" if len(damaged) > 1 else f"line {damaged[0]}"
    return NodeFaultHistory(tuple(entries), (f"{path}: no entries, and skipped: {lines}",))


def _parse_node_fault(line: str) -> NodeFault | None:
    try:
        found = json.loads(line)
        (node,) = expand_hosts(str(found["node"]), "node")
        moment, attempt = float(found["time"]), int(found.get("attempt", 0))
    except (ValueError, TypeError, KeyError, UsageError, RecursionError, OverflowError):
        return None
    texts = {key: found.get(key, "") for key in ("cause", "run", "evidence", "log", "signature")}
    if not 0 <= moment < 1e11 or not all(isinstance(text, str) for text in texts.values()):
        return None
    # It is printed, and made into a line for an admin's shell: nothing but text.
    texts = {key: _clean_line(text) for key, text in texts.items()}
    job = found.get("job")
    return NodeFault(node, moment, attempt=attempt, job=job if isinstance(job, int) else None, **texts)


def _clean_line(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(shown.split())[:_MAX_TEXT_LENGTH]


def append_node_faults(path: Path, entries: Iterable[NodeFault]) -> None:
    """Append entries, whole lines even where several jobs do so at once; SiteError where that fails.

    A file system that stalls is waited for a few seconds only.
    """
    lines = "".join(f"{json.dumps(_fault_as_json(one), ensure_ascii=False)}\n" for one in entries).encode()
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


def _fault_as_json(one: NodeFault) -> dict[str, Any]:
    values = {key: value for key, value in vars(one).items() if value not in ("", None)}
    kept = {key: _clean_line(value) if isinstance(value, str) else value for key, value in values.items()}
    return kept | {"weight": one.weight}


def forget_node_faults(path: Path, nodes: Iterable[str], now: float) -> None:
    """Clear nodes of all that was seen of them so far; SiteError where that cannot be written."""
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
    """Those nodes that a job is to keep away from for what the user's runs saw, and what to tell of it."""
    found = load_node_faults(node_fault_file())
    chosen = select_nodes_to_avoid(score_nodes(found.entries, now), nodes, bad, needed)
    return BadNodeList(chosen.entries, (*found.notes, *chosen.notes))


def record_node_faults(entries: Iterable[NodeFault]) -> str:
    """Append to the user's file; says why that failed, or nothing: it never stops a run."""
    try:
        append_node_faults(node_fault_file(), entries)
    except SiteError as error:
        return f"what was seen of the nodes is not kept: {error}"
    return ""
