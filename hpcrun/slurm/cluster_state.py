"""Queries a live cluster through scontrol and sinfo: what it has, and what it did not report."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass

from hpcrun.errors import SiteError, UsageError
from hpcrun.slurm.answers import parse_slurm_problem
from hpcrun.slurm.client import choose_cluster, cluster_option, run_slurm_client
from hpcrun.slurm.limits import Partition, SlurmConfiguration, parse_partitions, parse_slurm_configuration
from hpcrun.slurm.nodes import SINFO_FORMAT, NodeRecord, parse_scontrol_nodes, parse_sinfo
from hpcrun.slurm.states import UNKNOWN
from hpcrun.slurm.topology import TopologyUnit, parse_topology
from hpcrun.slurm.versions import SlurmVersion, parse_slurm_version

CLUSTER_QUERIES: dict[str, tuple[str, ...]] = {
    "version": ("scontrol", "--version"),
    "config": ("scontrol", "show", "config"),
    # -a: a partition that is hidden from lists still takes jobs
    "partitions": ("scontrol", "-a", "show", "partition"),
    "nodes": ("scontrol", "-a", "-o", "show", "node"),
    "topology": ("scontrol", "show", "topology"),
    "sinfo": ("sinfo", "-a", "-N", "-h", "-o", SINFO_FORMAT),
}
"""The commands, by the name of the answer; sinfo only where scontrol names no node."""
_PARSERS: dict[str, Callable[[str], Sized]] = {
    "version": lambda text: parse_slurm_version(text) or (),
    "config": lambda text: parse_slurm_configuration(text).values,
    "partitions": parse_partitions,
    "nodes": parse_scontrol_nodes,
    "topology": parse_topology,
    "sinfo": parse_sinfo,
}
"""These return something empty for an answer that holds nothing."""
_FLAT = {"default", "flat", "none"}
FLAT_TOPOLOGY_ANSWER = "No topology information available"
"""scontrol's answer on a cluster without switches and blocks."""
_CLUSTER = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_REMEDY = (
    "run this on a login node of the cluster, and load the module that holds Slurm where the site has one"
)


@dataclass(frozen=True)
class LiveCluster:
    """What Slurm reports about itself now; what it does not report is empty or None."""

    version: SlurmVersion | None
    """Of the commands here, which decides what sbatch accepts; else of the controller."""
    config: SlurmConfiguration
    partitions: tuple[Partition, ...]
    nodes: tuple[NodeRecord, ...]
    units: tuple[TopologyUnit, ...]
    is_flat: bool | None
    """Whether Slurm knows no switches and no blocks; None where it did not say."""
    plugin: str
    """TopologyPlugin, such as tree, or `unknown`."""
    unknown: Mapping[str, str]
    """What it did not say, by the name of the answer, in one line each."""
    slurm_cluster: str | None = None
    """The name that was given to -M."""

    def nodes_of(self, partition: str) -> list[NodeRecord]:
        """The nodes of a partition."""
        return [node for node in self.nodes if partition in node.partitions]


def query_cluster(slurm_cluster: str | None = None, timeout_s: float = 30.0) -> LiveCluster:
    """Ask the cluster that -M names, else the one that the environment names, else the one here.

    SiteError without Slurm, or when it does not answer. `timeout_s` holds for each command.
    """
    slurm_cluster = choose_cluster(slurm_cluster)
    if slurm_cluster is not None and not _CLUSTER.fullmatch(slurm_cluster):
        raise UsageError(f"{slurm_cluster!r}: is not a cluster's name; `sacctmgr show cluster` lists them")
    answers: dict[str, str] = {}
    for name in CLUSTER_QUERIES:
        if name == "sinfo" and parse_scontrol_nodes(answers["nodes"]):
            continue
        answers[name] = _run_query(_command(name, slurm_cluster), timeout_s)
        _require_an_answer(name, answers[name], slurm_cluster)
    return parse_cluster_answers(answers, slurm_cluster)


def query_topology(slurm_cluster: str | None = None, timeout_s: float = 30.0) -> LiveCluster:
    """Query Slurm's switches only; a Slurm that does not answer counts as one that reports nothing."""
    try:
        answers = {"topology": _run_query(_command("topology", slurm_cluster), timeout_s)}
    except SiteError as error:
        answers = {"topology": str(error)}
    return parse_cluster_answers(answers, slurm_cluster)


def _command(name: str, slurm_cluster: str | None) -> list[str]:
    command, *words = CLUSTER_QUERIES[name]
    where = cluster_option(slurm_cluster) if name != "version" else []
    return [command, *where, *words]


def _run_query(argv: Sequence[str], timeout_s: float) -> str:
    """Return all output of a command: its exit code is not reliable."""
    if shutil.which(argv[0]) is None:
        raise SiteError(f"{argv[0]}: no such command, so there is no Slurm here; {_REMEDY}")
    try:
        done = run_slurm_client(argv, timeout_s=timeout_s)
    except SiteError as error:
        # Without its configuration Slurm searches for it for a minute and longer.
        raise SiteError(f"{error}; is the controller up, and is its slurm.conf found here?") from None
    return f"{done.stdout}\n{done.stderr}"


def _require_an_answer(name: str, answer: str, slurm_cluster: str | None) -> None:
    """SiteError if there is no controller to query, or no partition."""
    # Only an answer that was not understood may report a problem: a node's reason may contain any words.
    if _PARSERS[name](answer):
        return
    trouble, command = parse_slurm_problem(answer), " ".join(_command(name, slurm_cluster))
    if trouble and trouble.kind in ("unreachable", "busy"):
        remedy = trouble.remedy if trouble.kind == "unreachable" else "try again in a moment"
        raise SiteError(f"`{command}`: {trouble.text}; {remedy}")
    if name == "partitions":
        raise SiteError(f"`{command}` named no partition: {_shorten_answer(answer)}")


def parse_cluster_answers(answers: Mapping[str, str], slurm_cluster: str | None = None) -> LiveCluster:
    """The answers to QUESTIONS, put together; one that is missing or not understood counts as unknown."""
    config = parse_slurm_configuration(answers.get("config", ""))
    nodes = parse_scontrol_nodes(answers.get("nodes", "")) or parse_sinfo(answers.get("sinfo", ""))
    units = parse_topology(answers.get("topology", ""))
    version = parse_slurm_version(answers.get("version", "")) or config.version
    plugin = config.values.get("TopologyPlugin", "").removeprefix("topology/")
    says_flat = plugin in _FLAT or FLAT_TOPOLOGY_ANSWER in answers.get("topology", "")
    is_flat = False if units else True if says_flat else None
    missing = {
        "version": version is None,
        "config": not config.values,
        "nodes": not nodes,
        "topology": is_flat is None,
    }
    return LiveCluster(
        version=version,
        config=config,
        partitions=tuple(parse_partitions(answers.get("partitions", ""))),
        nodes=tuple(nodes),
        units=tuple(units),
        is_flat=is_flat,
        plugin=config.topology or ("none" if plugin == "none" else UNKNOWN),
        unknown={name: _unknown(name, answers, slurm_cluster) for name in missing if missing[name]},
        slurm_cluster=slurm_cluster,
    )


def _unknown(name: str, answers: Mapping[str, str], slurm_cluster: str | None) -> str:
    command = " ".join(_command(name, slurm_cluster))
    return f"unknown: `{command}` said: {_shorten_answer(answers.get(name, ''))}"


def _shorten_answer(answer: str) -> str:
    """An answer that was not understood, short enough for one line."""
    words = " ".join(word for word in answer.split() if word.isprintable())
    return f"{words[:200]}..." if len(words) > 200 else words or "nothing"
