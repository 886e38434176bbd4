"""A live cluster, asked through scontrol and sinfo: what it has, and what it did not say."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass

from hpcrun.errors import SiteError, UsageError
from hpcrun.slurm.answers import parse_trouble
from hpcrun.slurm.client import cluster_to_ask, run_client
from hpcrun.slurm.limits import Configuration, Partition, parse_config, parse_partitions
from hpcrun.slurm.nodes import SINFO_FORMAT, NodeRecord, parse_scontrol_nodes, parse_sinfo
from hpcrun.slurm.states import UNKNOWN
from hpcrun.slurm.topology import Unit, parse_topology
from hpcrun.slurm.versions import Version, parse_version

QUESTIONS: dict[str, tuple[str, ...]] = {
    "version": ("scontrol", "--version"),
    "config": ("scontrol", "show", "config"),
    # -a: a partition that is hidden from lists still takes jobs
    "partitions": ("scontrol", "-a", "show", "partition"),
    "nodes": ("scontrol", "-a", "-o", "show", "node"),
    "topology": ("scontrol", "show", "topology"),
    "sinfo": ("sinfo", "-a", "-N", "-h", "-o", SINFO_FORMAT),
}
"""What is asked, by the name of the answer; sinfo only where scontrol names no node."""
_READERS: dict[str, Callable[[str], Sized]] = {
    "version": lambda text: parse_version(text) or (),
    "config": lambda text: parse_config(text).values,
    "partitions": parse_partitions,
    "nodes": parse_scontrol_nodes,
    "topology": parse_topology,
    "sinfo": parse_sinfo,
}
"""Nothing comes out of these where an answer is none."""
_FLAT = {"default", "flat", "none"}
SAYS_FLAT = "No topology information available"
"""What scontrol says of a cluster without switches and blocks."""
_CLUSTER = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_REMEDY = (
    "run this on a login node of the cluster, and load the module that holds Slurm where the site has one"
)


@dataclass(frozen=True)
class LiveCluster:
    """What Slurm says about itself now; a part that it does not say is empty or None."""

    version: Version | None
    """Of the commands here, which decides what sbatch accepts; else of the controller."""
    config: Configuration
    partitions: tuple[Partition, ...]
    nodes: tuple[NodeRecord, ...]
    units: tuple[Unit, ...]
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


def ask_cluster(slurm_cluster: str | None = None, timeout_s: float = 30.0) -> LiveCluster:
    """Ask the cluster that -M names, else the one that the environment names, else the one here.

    SiteError without Slurm, or when it does not answer. `timeout_s` holds for each command.
    """
    slurm_cluster = cluster_to_ask(slurm_cluster)
    if slurm_cluster is not None and not _CLUSTER.fullmatch(slurm_cluster):
        raise UsageError(f"{slurm_cluster!r}: is no name of a cluster; `sacctmgr show cluster` lists them")
    answers: dict[str, str] = {}
    for name in QUESTIONS:
        if name == "sinfo" and parse_scontrol_nodes(answers["nodes"]):
            continue
        answers[name] = _ask(_command(name, slurm_cluster), timeout_s)
        _require_an_answer(name, answers[name], slurm_cluster)
    return read_cluster(answers, slurm_cluster)


def ask_topology(slurm_cluster: str | None = None, timeout_s: float = 30.0) -> LiveCluster:
    """What Slurm says about its switches, and nothing else; a Slurm that does not answer says nothing."""
    try:
        answers = {"topology": _ask(_command("topology", slurm_cluster), timeout_s)}
    except SiteError as error:
        answers = {"topology": str(error)}
    return read_cluster(answers, slurm_cluster)


def _command(name: str, slurm_cluster: str | None) -> list[str]:
    command, *words = QUESTIONS[name]
    where = ["-M", slurm_cluster] if slurm_cluster and name != "version" else []
    return [command, *where, *words]


def _ask(argv: Sequence[str], timeout_s: float) -> str:
    """Everything that a command prints: its exit code says little."""
    if shutil.which(argv[0]) is None:
        raise SiteError(f"{argv[0]}: no such command, so there is no Slurm here; {_REMEDY}")
    try:
        done = run_client(argv, timeout_s=timeout_s)
    except SiteError as error:
        # Without its configuration Slurm goes on looking for it, for a minute and longer.
        raise SiteError(f"{error}; is the controller up, and is its slurm.conf found here?") from None
    return f"{done.stdout}\n{done.stderr}"


def _require_an_answer(name: str, answer: str, slurm_cluster: str | None) -> None:
    """SiteError where there is no controller to ask, and where there are no partitions to speak of."""
    # Only what was not understood may be trouble: a node's reason holds any words.
    if _READERS[name](answer):
        return
    trouble, asked = parse_trouble(answer), " ".join(_command(name, slurm_cluster))
    if trouble and trouble.kind in ("unreachable", "busy"):
        remedy = trouble.remedy if trouble.kind == "unreachable" else "try again in a moment"
        raise SiteError(f"`{asked}`: {trouble.text}; {remedy}")
    if name == "partitions":
        raise SiteError(f"`{asked}` named no partition: {_words(answer)}")


def read_cluster(answers: Mapping[str, str], slurm_cluster: str | None = None) -> LiveCluster:
    """The answers to QUESTIONS, put together; one that is missing or not understood counts as unknown."""
    config = parse_config(answers.get("config", ""))
    nodes = parse_scontrol_nodes(answers.get("nodes", "")) or parse_sinfo(answers.get("sinfo", ""))
    units = parse_topology(answers.get("topology", ""))
    version = parse_version(answers.get("version", "")) or config.version
    plugin = config.values.get("TopologyPlugin", "").removeprefix("topology/")
    says_flat = plugin in _FLAT or SAYS_FLAT in answers.get("topology", "")
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
    asked = " ".join(_command(name, slurm_cluster))
    return f"unknown: `{asked}` said: {_words(answers.get(name, ''))}"


def _words(answer: str) -> str:
    """An answer that was not understood, short enough for one line."""
    words = " ".join(word for word in answer.split() if word.isprintable())
    return f"{words[:200]}..." if len(words) > 200 else words or "nothing"
