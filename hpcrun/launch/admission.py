"""Which nodes are let into an attempt: what every node's preflight has found, and what follows from it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from hpcrun.errors import EXIT_SITE, UsageError
from hpcrun.finding import Finding
from hpcrun.health.lemon_nodes import NodeFault
from hpcrun.health.node_checks import judge_clock
from hpcrun.health.preflight import PreflightRequest
from hpcrun.hostlist import fold_hosts
from hpcrun.launch import recovery
from hpcrun.launch.agents.nodes import Nodes
from hpcrun.launch.attempt_events import NodeLost
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.events.supervisor import PreflightEvent
from hpcrun.specs.job import JobSpec
from hpcrun.specs.preflight import selected_preflight_checks
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.tuning.job_settings import advise_job
from hpcrun.tuning.registry.device_names import parse_device_list
from hpcrun.typed_json import WrongValue, parse_typed

_MESSAGE_PREFIX = "preflight: "
_MAX_FAILED_IN_A_ROW = 3
_NODE_OWN_CHECKS = ("space", "write", "leftovers", "sums", "gpu", "nic")
"""Of one node alone nobody can compare: these are its own trouble all the same."""

NodeFinding = tuple[str, Finding]
"""A node, and what was found there."""


@dataclass(frozen=True)
class PreflightResult:
    """What the preflight of an attempt has found."""

    nodes: tuple[str, ...]
    """Those that were looked at."""
    seconds: float
    found: tuple[NodeFinding, ...] = ()
    """All that is not well, node by node."""

    @property
    def refused(self) -> dict[str, list[Finding]]:
        """The nodes that are left out, with the checks that failed."""
        failed: dict[str, list[Finding]] = {}
        for node, one in self.found:
            if one.severity == "error":
                failed.setdefault(node, []).append(one)
        return failed

    @property
    def blamed(self) -> list[NodeFinding]:
        """Failures that are a node's own: not those that all nodes have, nor those of what nodes share."""
        failed = [(node, one) for node, one in self.found if one.severity == "error"]
        where: dict[str, set[str]] = {}
        for node, one in failed:
            where.setdefault(one.check, set()).add(node)
        if len(self.nodes) < 2:
            return [
                (node, one) for node, one in failed if one.check in _NODE_OWN_CHECKS and not one.is_shared
            ]
        return [(node, one) for node, one in failed if len(where[one.check]) < len(self.nodes)]

    def notes(self, *, warnings: bool = True) -> Iterator[str]:
        """Lines for the person, the same words of several nodes in one."""
        said: dict[str, list[str]] = {}
        for node, one in self.found:
            if one.severity == "error" or (warnings and one.severity == "warning"):
                out = "; the node is left out" if one.severity == "error" else ""
                said.setdefault(f"{one.check}: {one}{out}", []).append(node)
        for text, nodes in said.items():
            yield f"{_MESSAGE_PREFIX}{fold_hosts(nodes)}: {text}"

    def as_event(self) -> PreflightEvent:
        """As it stands in the run's events."""
        found = tuple(replace(finding, where=node) for node, finding in self.found)
        return PreflightEvent(len(self.nodes), round(self.seconds, 3), found, tuple(sorted(self.refused)))

    def node_faults(self, attempt: Attempt, job: int, now: float) -> list[NodeFault]:
        """What is to be remembered against nodes, for the jobs that come after."""
        log, number = str(attempt.run.events), attempt.number
        return [
            NodeFault(
                node, now, "preflight", attempt.run.id, number, f"{one.check}: {one}", log, one.check, job
            )
            for node, one in self.blamed
        ]


def build_preflight_request(
    spec: JobSpec, cluster: ClusterSpec | None, attempt: int, nodes: Sequence[str] = (), *, is_alone: bool
) -> PreflightRequest | None:
    """What the nodes are asked to look at; None where the job wants no preflight."""
    checks = selected_preflight_checks(spec.preflight)
    if not checks:
        return None
    if cluster is None:
        return PreflightRequest(checks, attempt, gpus=spec.resources.gpus_per_node or 0)
    local = [one.path for one in cluster.file_systems.values() if not one.shared or one.kind == "local"]
    return PreflightRequest(
        checks,
        attempt,
        scratch=local,
        interface=None if is_alone else cluster.network.interface,
        hcas=cluster.network.hcas,
        hcas_of=rank_adapters(spec, cluster, nodes, os.environ),
        gpus=spec.resources.gpus_per_node or 0,
        xids={str(code): action for code, action in cluster.preflight.xids.items()},
        programs=cluster.preflight.checks,
        program_s=cluster.preflight.timeout_s,
    )


def rank_adapters(
    spec: JobSpec, cluster: ClusterSpec, nodes: Sequence[str], environ: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """The adapters that the ranks of a node will use, where these are not all that the profile names.

    What the settings leave out on a node is no reason to leave out the node; what they name has to work.
    """
    try:
        settings = advise_job(spec, cluster, tuple(nodes)).without_variables(environ, "environment")
    except UsageError:
        return {}  # the attempt tells what is wrong with the profile, and has no settings
    hcas = cluster.network.hcas
    stands = next((one.value for one in settings.overruled if one.name == "NCCL_IB_HCA"), None)
    found = {}
    for node in nodes:
        value = settings.of_node(node).get("NCCL_IB_HCA") if stands is None else stands
        if value is not None:
            named = parse_device_list(value)
            more = named.names if named.exact and not named.excludes else ()
            used = dict.fromkeys([*filter(named.takes, hcas), *more])
            found[node.partition(".")[0]] = tuple(used)
    return found


def run_preflight(ask: PreflightRequest, nodes: Nodes) -> PreflightResult:
    """Have every node look at itself, and judge what they say."""
    sent, began = time.time(), time.monotonic()
    answers = nodes.preflight(ask)
    seconds = time.monotonic() - began
    return evaluate_preflight(ask, nodes.alive, answers, sent, sent + seconds)


def evaluate_preflight(
    ask: PreflightRequest,
    alive: Sequence[str],
    answers: Mapping[str, Mapping[str, Any]],
    sent: float,
    received: float,
) -> PreflightResult:
    """The answers of the nodes that live; one that gives none is unknown, and stays."""
    found: list[NodeFinding] = []
    for node in alive:
        said = answers.get(node)
        if said is None:
            found.append((node, Finding("unknown", "preflight", "", "the node gave no answer in time")))
            continue
        found += [(node, finding) for finding in _parse_findings(said.get("checks", ()))]
        if "clock" in ask.checks:
            clock = judge_clock(sent, received, float(said["time"]), float(said["seconds"]))
            found += [(node, finding) for finding in clock]
    return PreflightResult(tuple(alive), received - sent, tuple(found))


def _parse_findings(values: Iterable[Any]) -> Iterator[Finding]:
    """The findings in a node's answer; what is none is left out."""
    for value in values:
        with contextlib.suppress(WrongValue):
            yield parse_typed(Finding, value)


def preflight_failure_outcome(
    attempt: Attempt,
    admission: PreflightResult,
    left: Collection[str],
    needed: int,
    lost: Iterable[NodeLost] = (),
) -> AttemptOutcome:
    """How the attempt ends for which too few nodes are left; it names every check that failed.

    Another place in the queue may help where the trouble is the nodes' own, but not for ever. `lost`: the
    nodes that do not answer any more.
    """
    failed = {f"is lost: {one.why}": [one.node] for one in lost}
    gone = [one.node for one in lost]
    for node, checks in admission.refused.items():
        for one in checks:
            failed.setdefault(f"{one.check}: {one}", []).append(node)
    why = "; ".join(f"{fold_hosts(nodes)}: {text}" for text, nodes in failed.items())
    names = ", ".join(dict.fromkeys(one.check for checks in admission.refused.values() for one in checks))
    wanted = "1 node is" if needed == 1 else f"{needed} nodes are"
    message = (
        f"{_MESSAGE_PREFIX}{wanted} needed, and {len(left)} {'is' if len(left) == 1 else 'are'} left: {why}"
    )
    if names:
        message += f" (to go on all the same: preflight=[{names}] leaves these checks out)"
    blamed = tuple(dict.fromkeys([*gone, *(node for node, _ in admission.blamed)]))
    if _count_failed_preflights(attempt.run) + 1 >= _MAX_FAILED_IN_A_ROW:
        message, blamed = f"{message}; this is the {_MAX_FAILED_IN_A_ROW}rd attempt in a row", ()
    return AttemptOutcome(attempt.run, attempt.number, "failed", EXIT_SITE, message, None, lost=blamed)


def _count_failed_preflights(run: RunDir) -> int:
    """How many attempts before this one have ended with their preflight."""
    before = reversed(recovery.read_outcomes(run))
    return len([*takewhile(lambda one: str(one.get("message", "")).startswith(_MESSAGE_PREFIX), before)])
