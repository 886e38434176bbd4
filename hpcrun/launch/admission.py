"""Which nodes are let into an attempt: what every node's preflight has found, and what follows from it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from hpcrun.errors import EXIT_SITE, UsageError
from hpcrun.finding import Finding
from hpcrun.health.lemon_nodes import NodeFault
from hpcrun.health.node_checks import judge_clock
from hpcrun.health.preflight import PreflightReport, PreflightRequest
from hpcrun.hostlist import fold_hosts
from hpcrun.launch import recovery
from hpcrun.launch.agents.nodes import NodeQueries
from hpcrun.launch.attempt_events import NodeLost
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.events.supervisor import PreflightEvent
from hpcrun.specs.job import JobSpec
from hpcrun.specs.preflight import selected_preflight_checks
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.tuning.job_settings import advise_job
from hpcrun.tuning.registry.device_names import parse_device_list

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
        for node, finding in self.found:
            if finding.severity == "error":
                failed.setdefault(node, []).append(finding)
        return failed

    @property
    def blamed(self) -> list[NodeFinding]:
        """Failures that are a node's own: not those that all nodes have, nor those of what nodes share."""
        failed = [(node, finding) for node, finding in self.found if finding.severity == "error"]
        where: dict[str, set[str]] = {}
        for node, finding in failed:
            where.setdefault(finding.check, set()).add(node)
        if len(self.nodes) < 2:
            return [
                (node, finding)
                for node, finding in failed
                if finding.check in _NODE_OWN_CHECKS and not finding.is_shared
            ]
        return [(node, finding) for node, finding in failed if len(where[finding.check]) < len(self.nodes)]

    def notes(self, *, warnings: bool = True) -> Iterator[str]:
        """Lines for the person, the same words of several nodes in one."""
        nodes_by_text: dict[str, list[str]] = {}
        for node, finding in self.found:
            if finding.severity == "error" or (warnings and finding.severity == "warning"):
                out = "; the node is left out" if finding.severity == "error" else ""
                nodes_by_text.setdefault(f"{finding.check}: {finding}{out}", []).append(node)
        for text, nodes in nodes_by_text.items():
            yield f"{_MESSAGE_PREFIX}{fold_hosts(nodes)}: {text}"

    def as_event(self) -> PreflightEvent:
        """As it stands in the run's events."""
        findings = tuple(replace(finding, where=node) for node, finding in self.found)
        return PreflightEvent(len(self.nodes), round(self.seconds, 3), findings, tuple(sorted(self.refused)))

    def node_faults(self, attempt: Attempt, job: int, now: float) -> list[NodeFault]:
        """What is to be remembered against nodes, for the jobs that come after."""
        log, number = str(attempt.run.events), attempt.number
        return [
            NodeFault(
                node,
                now,
                "preflight",
                attempt.run.id,
                number,
                f"{finding.check}: {finding}",
                log,
                finding.check,
                job,
            )
            for node, finding in self.blamed
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
    local = [
        file_system.path
        for file_system in cluster.file_systems.values()
        if not file_system.shared or file_system.kind == "local"
    ]
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
    stands = next((setting.value for setting in settings.overruled if setting.name == "NCCL_IB_HCA"), None)
    hcas_by_node = {}
    for node in nodes:
        value = settings.of_node(node).get("NCCL_IB_HCA") if stands is None else stands
        if value is not None:
            named = parse_device_list(value)
            extra = named.names if named.exact and not named.excludes else ()
            used = dict.fromkeys([*filter(named.takes, hcas), *extra])
            hcas_by_node[node.partition(".")[0]] = tuple(used)
    return hcas_by_node


def run_preflight(ask: PreflightRequest, nodes: NodeQueries) -> PreflightResult:
    """Have every node look at itself, and judge what they say."""
    sent, began = time.time(), time.monotonic()
    answers = nodes.preflight(ask)
    seconds = time.monotonic() - began
    return evaluate_preflight(ask, nodes.alive, answers, sent, sent + seconds)


def evaluate_preflight(
    ask: PreflightRequest,
    alive: Sequence[str],
    answers: Mapping[str, PreflightReport],
    sent: float,
    received: float,
) -> PreflightResult:
    """The answers of the nodes that live; one that gives none is unknown, and stays."""
    findings: list[NodeFinding] = []
    for node in alive:
        answer = answers.get(node)
        if answer is None:
            findings.append((node, Finding("unknown", "preflight", "", "the node gave no answer in time")))
            continue
        findings += [(node, finding) for finding in answer.checks]
        if "clock" in ask.checks:
            clock = judge_clock(sent, received, answer.time, answer.seconds)
            findings += [(node, finding) for finding in clock]
    return PreflightResult(tuple(alive), received - sent, tuple(findings))


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
    failed = {f"is lost: {node_lost.why}": [node_lost.node] for node_lost in lost}
    gone = [node_lost.node for node_lost in lost]
    for node, checks in admission.refused.items():
        for check in checks:
            failed.setdefault(f"{check.check}: {check}", []).append(node)
    why = "; ".join(f"{fold_hosts(nodes)}: {text}" for text, nodes in failed.items())
    names = ", ".join(dict.fromkeys(check.check for checks in admission.refused.values() for check in checks))
    requirement = "1 node is" if needed == 1 else f"{needed} nodes are"
    remaining = f"{len(left)} {'is' if len(left) == 1 else 'are'} left"
    message = f"{_MESSAGE_PREFIX}{requirement} needed, and {remaining}: {why}"
    if names:
        message += f" (to continue anyway: preflight=[{names}] leaves these checks out)"
    blamed = tuple(dict.fromkeys([*gone, *(node for node, _ in admission.blamed)]))
    if _count_failed_preflights(attempt.run) + 1 >= _MAX_FAILED_IN_A_ROW:
        message, blamed = f"{message}; this is the {_MAX_FAILED_IN_A_ROW}rd attempt in a row", ()
    return AttemptOutcome(attempt.run, attempt.number, "failed", EXIT_SITE, message, None, lost=blamed)


def _count_failed_preflights(run: RunDir) -> int:
    """How many attempts before this one have ended with their preflight."""
    before = reversed(recovery.read_outcomes(run))
    return len(
        [*takewhile(lambda outcome: str(outcome.get("message", "")).startswith(_MESSAGE_PREFIX), before)]
    )
