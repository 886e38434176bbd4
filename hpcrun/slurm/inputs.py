"""sbatch's input environment variables (SBATCH_ACCOUNT and so on): what each becomes in a job of ours.

sbatch would let them win over the script. Here they fill what the job and the profile leave open; what they
contradict is refused, with both values; the others are named, each with the reason why it is not used. The
list is that of sbatch's manual page and of its binaries, 22.05 to 25.11.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from hpcrun.errors import UsageError
from hpcrun.finding import Finding
from hpcrun.slurm.client import cluster_from_environment
from hpcrun.slurm.directives import find_partition_spec
from hpcrun.slurm.precheck import make_refusal
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.resources import ResourcesSpec
from hpcrun.specs.validation import problems_of_validation_error
from hpcrun.units import parse_memory, parse_time

RESOURCE_KEY_OF_VARIABLE: dict[str, str] = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_REQ_SWITCH": "switches",
    "SBATCH_WAIT4SWITCH": "switches_wait",
    "SBATCH_SEGMENT_SIZE": "segment",
    "SBATCH_GPUS_PER_NODE": "gpus_per_node",
    "SBATCH_GPUS": "gpus_per_node",
    "SBATCH_GPUS_PER_TASK": "gpus_per_node",
    "SBATCH_GRES": "gpus_per_node",
}
"""What has a key under `resources`."""
OPTION_OF_VARIABLE: dict[str, str] = {
    "SBATCH_ACCTG_FREQ": "acctg-freq",
    "SBATCH_BATCH": "batch",
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CLUSTER_CONSTRAINT": "cluster-constraint",
    "SBATCH_CONSOLIDATE_SEGMENTS": "consolidate-segments",
    "SBATCH_CORE_SPEC": "core-spec",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_DELAY_BOOT": "delay-boot",
    "SBATCH_GPU_FREQ": "gpu-freq",
    "SBATCH_GRES_FLAGS": "gres-flags",
    "SBATCH_HINT": "hint",
    "SLURM_HINT": "hint",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_NETWORK": "network",
    "SBATCH_POWER": "power",
    "SBATCH_PROFILE": "profile",
    "SBATCH_SPREAD_JOB": "spread-job",
    "SBATCH_SPREAD_SEGMENTS": "spread-segments",
    "SBATCH_STEPMGR": "stepmgr",
    "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_USE_MIN_NODES": "use-min-nodes",
    "SBATCH_WCKEY": "wckey",
}
"""What goes under `resources.sbatch`."""
_FLAGS = {"spread-job", "use-min-nodes", "stepmgr", "spread-segments", "consolidate-segments"}
"""Options whose variable counts by being set, whatever its value."""
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
"""Options of which Slurm accepts one only."""
_OWN = "hpcrun sets this itself"
_STEPS = "hpcrun starts the ranks itself, and this would change how"
REFUSED_VARIABLES: dict[str, str] = {
    "SBATCH_ARRAY_INX": "arrays come from `sweep` in the job",
    "SBATCH_CONTAINER": "containers come from `container` in the job",
    "SBATCH_CONTAINER_ID": "containers come from `container` in the job",
    "SBATCH_CPUS_PER_GPU": "use resources.cpus_per_rank",
    "SBATCH_DEBUG": "it only makes sbatch more verbose",
    "SBATCH_DISTRIBUTION": _STEPS,
    "SBATCH_ERROR": _OWN,
    "SBATCH_EXPORT": "jobs get the environment that env and env_deny describe",
    "SBATCH_GET_USER_ENV": "jobs get the environment that env and env_deny describe",
    "SBATCH_GPU_BIND": "gpus.bind in the profile says this",
    "SBATCH_GPUS_PER_SOCKET": "use resources.gpus_per_node",
    "SBATCH_IGNORE_PBS": "the script has no #PBS lines",
    "SBATCH_INPUT": _OWN,
    "SBATCH_JOB_NAME": "use name in the job",
    "SBATCH_MEM_BIND": _STEPS,
    "SBATCH_NO_KILL": _OWN,
    "SBATCH_NO_REQUEUE": "use retry in the job",
    "SBATCH_OPEN_MODE": _OWN,
    "SBATCH_OUTPUT": _OWN,
    "SBATCH_OVERCOMMIT": _STEPS,
    "SBATCH_REQUEUE": "use retry in the job",
    "SBATCH_SIGNAL": "use retry.grace in the job",
    "SBATCH_TRES_BIND": _STEPS,
    "SBATCH_TRES_PER_TASK": "use resources.gpus_per_node and resources.cpus_per_rank",
    "SBATCH_WAIT": "use --follow, or `hpcrun wait`",
    "SBATCH_WAIT_ALL_NODES": "hpcrun waits for the nodes itself",
}
"""What is left out, and why."""
_CLUSTER = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
_BY_SLURM = ("SBATCH_MEM_BIND", "SBATCH_CPU_BIND", "SLURM_HINT")
"""Inside a job Slurm itself sets these, for that job."""
_GPUS = re.compile(r"(?:gres/)?(?:gpu(?::|$))?(?:(?P<kind>[A-Za-z][\w.-]*):)?(?P<count>[0-9]+)?", re.ASCII)


@dataclass(frozen=True)
class SbatchInputs:
    """What the caller's environment requests for a job."""

    resources: Mapping[str, Any] = field(default_factory=dict)
    """Keys under `resources` that job and profile leave open, with the values that they get."""
    slurm_cluster: str | None = None
    """For -M."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The variables that are used: name to value."""
    by_key: Mapping[str, str] = field(default_factory=dict)
    """The variable that has set each key under `resources`."""
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What contradicts the job or the profile."""


def read_sbatch_inputs(job: JobSpec, cluster: ClusterSpec | None, environ: Mapping[str, str]) -> SbatchInputs:
    """Return what SBATCH_* and SLURM_CLUSTERS mean for this job; UsageError if two of them name two
    clusters."""
    reader = _SbatchInputReader(job, cluster)
    in_job = "SLURM_JOB_ID" in environ
    # The profile's values of the other keys depend on the partition.
    for name, value in sorted(environ.items(), key=lambda pair: (pair[0] != "SBATCH_PARTITION", pair[0])):
        is_input = name.startswith("SBATCH_") or name == "SLURM_HINT"
        if name in _CLUSTER or not is_input or (in_job and name.startswith(_BY_SLURM)):
            continue
        reader.take(name, value.strip())
    variable = cluster_from_environment(environ)
    if variable is not None:
        reader.take_cluster(*variable)
    return reader.result()


class _SbatchInputReader:
    """Applies one variable after the other to the job."""

    def __init__(self, job: JobSpec, cluster: ClusterSpec | None) -> None:
        self._job, self._cluster = job, cluster
        self._sources: dict[str, str] = {}
        self._set_by: dict[str, str] = {}
        """Keys below `resources` that are set, and the variable that has set them."""
        self._slurm_cluster: str | None = None
        self._notes: list[str] = []
        self._findings: list[Finding] = []

    def result(self) -> SbatchInputs:
        names = dict.fromkeys(key.partition(".")[0] for key in self._set_by)
        resources = {name: getattr(self._job.resources, name) for name in names}
        notes, findings = tuple(self._notes), tuple(self._findings)
        return SbatchInputs(resources, self._slurm_cluster, self._sources, self._set_by, notes, findings)

    def take(self, name: str, value: str) -> None:
        if name in REFUSED_VARIABLES:
            self._notes.append(f"{name} is not used: {REFUSED_VARIABLES[name]}")
        elif name in OPTION_OF_VARIABLE:
            option = OPTION_OF_VARIABLE[name]
            if option in _FLAGS or value:
                self._take_option(name, option, True if option in _FLAGS else value)
        elif name not in RESOURCE_KEY_OF_VARIABLE:
            self._notes.append(
                f"{name} is not used: it is not known here; if it is an option of sbatch, give it"
                " under resources.sbatch"
            )
        elif name == "SBATCH_GRES" and not re.search(r"(^|[,/])gpu(:|,|$)", value):
            self._take_option(name, "gres", value)
        elif value or name == "SBATCH_EXCLUSIVE":
            key = RESOURCE_KEY_OF_VARIABLE[name]
            try:
                self._take_key(name, key, self._read(name, key, value), value, f"resources.{key}=")
            except UsageError as error:
                self._refuse(key, str(error))

    def take_cluster(self, name: str, value: str) -> None:
        current = self._cluster.slurm_cluster if self._cluster else None
        if current is None:
            self._slurm_cluster = value
            self._use(name, value, f"-M {value}")
        elif current != value:
            text = f"the profile {self._cluster.name if self._cluster else ''} is of the cluster {current}"
            remedy = f"unset {name}, or name another profile"
            self._findings.append(make_refusal("cluster", f"{text}, but {name} is {value}; {remedy}"))

    def _use(self, name: str, value: str, shown: str) -> None:
        self._sources[name] = value
        self._notes.append(f"{shown}: from {name}")

    def _take_option(self, name: str, option: str, value: str | bool) -> None:
        shown = f"--{option}" + ("" if value is True else "=")
        self._take_key(name, f"sbatch.{option}", value, str(value), shown)

    def _take_key(self, name: str, key: str, value: Any, text: str, shown: str) -> None:
        """Set a key that is not set, or refuse a value that contradicts the current one."""
        current, owner = self._current(key)
        is_same = current is not None and _is_same_value(key, current, value)
        if current is None:
            current, owner = self._competing_memory_request(key.removeprefix("sbatch."))
        if current is None:
            resources, (section, _, option) = self._job.resources, key.partition(".")
            update = {section: resources.sbatch | {option: value} if option else value}
            self._job = self._job.model_copy(update={"resources": resources.model_copy(update=update)})
            self._set_by[key] = name
            self._use(name, text, shown if value is True and option else f"{shown}{value}")
        elif not is_same:
            instead = f"give resources.{key}={value}" if owner.startswith("the profile") else ""
            self._refuse(key, _conflict_message(name, text, current, owner, instead))

    def _competing_memory_request(self, option: str) -> tuple[Any, str]:
        """Another of the three requests for memory, if one is made already, and its variable."""
        requested: dict[str, Any] = {"mem": self._job.resources.mem}
        requested |= {other: self._job.resources.sbatch.get(other) for other in _MEMORY[1:]}
        for other, value in requested.items():
            if option in _MEMORY and other != option and value is not None:
                variable = self._set_by.get(other, self._set_by.get(f"sbatch.{other}", ""))
                return f"{other} {value}", variable
        return None, ""

    def _current(self, key: str) -> tuple[Any, str]:
        """The value of a key, and what set it: a variable, the profile, or "" for the job."""
        option, resources = key.partition(".")[2], self._job.resources
        if option:
            value = resources.sbatch.get(option)
            is_left_out = value is None and option in resources.sbatch
            return "left out" if is_left_out else value, self._set_by.get(key, "")
        value = getattr(resources, key)
        if value != ResourcesSpec.model_fields[key].default:
            return value, self._set_by.get(key, "")
        if self._cluster is None:
            return None, ""
        partition = find_partition_spec(self._job, self._cluster)
        of_profile = {
            "account": self._cluster.account,
            "partition": self._cluster.default_partition,
            "qos": partition.qos,
            "exclusive": partition.exclusive or None,
            "gpus_per_node": partition.gpus_per_node,
        }
        return of_profile.get(key), f"the profile {self._cluster.name}"

    def _read(self, name: str, key: str, text: str) -> Any:
        """Parse the value for its key; UsageError for one that the key does not take."""
        value: Any = text
        if key == "gpus_per_node":
            value = self._gpus(name, text)
        elif key == "exclusive":
            if text.lower() not in ("", "exclusive", "true", "yes", "1"):
                raise UsageError(f"{name} is {text}, which a job cannot be given here; unset {name}")
            value = True
        elif key in ("switches", "segment") and text.isascii() and text.isdecimal():
            value = int(text)
            # Where it is set for everybody, a smaller job cannot be under more switches than it has nodes.
            value = min(value, self._job.resources.all_nodes) if key == "switches" else value
        try:
            ResourcesSpec.model_validate({key: value})
        except ValidationError as error:
            (problem, *_) = problems_of_validation_error(error, ResourcesSpec)
            raise UsageError(f"{name} is {text}: {problem.text}; unset {name}, or correct it") from None
        return value

    def _gpus(self, name: str, text: str) -> int:
        """Return the GPUs of a node that a request in any of Slurm's forms asks for."""
        match, nodes = _GPUS.fullmatch(text), self._job.resources.all_nodes
        kind = match["kind"] if match else None
        partition = find_partition_spec(self._job, self._cluster)
        if match is None or (kind and kind.lower() != str(partition.gpu_type).lower()):
            raise UsageError(
                f"{name} is {text}, which a job cannot request here; unset {name}, and use"
                " resources.gpus_per_node, and gpu_type in the profile"
            )
        count = int(match["count"] or 1)
        if name == "SBATCH_GPUS_PER_TASK":
            return count * self._job.ranks_per_node
        if name != "SBATCH_GPUS":
            return count
        if count % nodes:
            text = f"{name} is {text}, which {nodes} nodes cannot share evenly"
            raise UsageError(f"{text}; unset {name}, or ask for other nodes")
        return count // nodes

    def _refuse(self, key: str, text: str) -> None:
        self._findings.append(make_refusal(f"resources.{key}", text))


def _conflict_message(name: str, value: str, current: Any, owner: str, instead: str) -> str:
    who = f"{owner} says {current}" if owner else f"is {current}"
    remedy = f"unset {name}, or {instead or 'make the two the same'}"
    return f"{who}, but {name} in your environment is {value}; {remedy}"


def _is_same_value(key: str, current: Any, value: Any) -> bool:
    readers: dict[str, Callable[[Any], Any]] = {
        "time": lambda text: parse_time(text).seconds,
        "switches_wait": lambda text: parse_time(text).seconds,
        "mem": parse_memory,
        "partition": lambda text: {name.strip() for name in text.split(",")},
    }
    read = readers.get(key, str)
    return bool(read(current) == read(value))
