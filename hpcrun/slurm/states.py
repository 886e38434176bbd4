"""Job states and pending reasons as Slurm prints them; anything not listed here is "unknown"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

JobPhase = Literal["pending", "running", "ended", "unknown"]
StartOutlook = Literal["waits", "held", "never", "unknown"]
"""waits: it starts by itself · held: somebody must act first · never: not as it was submitted."""

UNKNOWN = "unknown"

_STATES: dict[str, tuple[str, JobPhase]] = {
    "PENDING": ("PD", "pending"),
    "RUNNING": ("R", "running"),
    "SUSPENDED": ("S", "running"),
    "COMPLETED": ("CD", "ended"),
    "CANCELLED": ("CA", "ended"),
    "FAILED": ("F", "ended"),
    "TIMEOUT": ("TO", "ended"),
    "NODE_FAIL": ("NF", "ended"),
    # A preempted job that is requeued is PENDING again; this state alone is the end.
    "PREEMPTED": ("PR", "ended"),
    "BOOT_FAIL": ("BF", "ended"),
    "DEADLINE": ("DL", "ended"),
    "OUT_OF_MEMORY": ("OOM", "ended"),
    "REVOKED": ("RV", "ended"),
    "CONFIGURING": ("CF", "running"),
    "COMPLETING": ("CG", "running"),
    "RESIZING": ("RS", "running"),
    "SIGNALING": ("SI", "running"),
    "STAGE_OUT": ("SO", "running"),
    "STOPPED": ("ST", "running"),
    "REQUEUED": ("RQ", "pending"),
    "REQUEUE_FED": ("RF", "pending"),
    "REQUEUE_HOLD": ("RH", "pending"),
    "RESV_DEL_HOLD": ("RD", "pending"),
    "SPECIAL_EXIT": ("SE", "pending"),
    "EXPEDITING": ("", "pending"),
    "POWER_UP_NODE": ("", "running"),
    "UPDATE_DB": ("", "ended"),
    "LAUNCH_FAILED": ("", "ended"),
    "RECONFIG_FAIL": ("", "ended"),
}
_BASE = tuple(_STATES)[:12]
_COMPACT = {compact: name for name, (compact, _) in _STATES.items() if compact}


@dataclass(frozen=True)
class JobState:
    """A job's state: the base state where Slurm gave one, else the flag that it showed instead."""

    name: str
    flags: tuple[str, ...] = ()
    detail: str = ""
    """The text after the state, such as `by 0` (the uid) after CANCELLED."""

    @property
    def phase(self) -> JobPhase:
        """The phase of the job's life; a flag such as COMPLETING or REQUEUED outweighs the base state."""
        phases = {_STATES[name][1] if name in _STATES else UNKNOWN for name in (self.name, *self.flags)}
        order: tuple[JobPhase, ...] = ("pending", "running", "unknown", "ended")
        return next(phase for phase in order if phase in phases)

    @property
    def final(self) -> bool:
        """Whether the job has ended; an unknown state is not an end."""
        return self.phase == "ended"


def parse_job_state(text: str) -> JobState:
    """Parse a state as squeue, sacct and scontrol print it: long, compact, compound, or cut short."""
    head, _, behind = " ".join(text.split()).partition(" ")
    named = {_state_name(word): word for word in head.split("+") if word}
    if not any(named):
        return JobState(UNKNOWN, detail=" ".join(part for part in (head, behind) if part))
    base = next((name for name in named if name in _BASE), next(name for name in named if name))
    return JobState(base, tuple(name or word for name, word in named.items() if name != base), behind)


def _state_name(word: str) -> str:
    """The full name of a state from itself, its compact form or its clear beginning; empty for no state."""
    word = word.upper()
    if word in _STATES:
        return word
    if word in _COMPACT:
        return _COMPACT[word]
    begun = [name for name in _STATES if name.startswith(word)]
    return begun[0] if len(begun) == 1 and len(word) >= 3 else ""


@dataclass(frozen=True)
class PendingReason:
    """Why a job waits: Slurm's code, the same in words, and whether the job can start."""

    code: str
    words: str
    outlook: StartOutlook


_REASONS: dict[str, tuple[StartOutlook, str]] = {
    "None": ("waits", "no reason given"),
    "Resources": ("waits", "waits for nodes to become free"),
    "Priority": ("waits", "jobs with a higher priority come first"),
    "Dependency": ("waits", "waits for another job"),
    "DependencyNeverSatisfied": ("never", "the job that it depends on did not end as required"),
    "BeginTime": ("waits", "its start time has not come (after a requeue: about two minutes)"),
    "JobArrayTaskLimit": ("waits", "as many elements of the array run as its limit allows"),
    "Prolog": ("waits", "the nodes are being prepared"),
    "Cleaning": ("waits", "its former attempt is still being cleaned up"),
    "Licenses": ("waits", "waits for a licence"),
    "SchedDefer": ("waits", "cannot start at once, as it asked to"),
    "FedJobLock": ("waits", "waits for the other clusters of the federation"),
    "PowerNotAvail": ("waits", "waits for electrical power"),
    "PowerReserved": ("waits", "waits for electrical power"),
    "BurstBufferResources": ("waits", "waits for space in the burst buffer"),
    "BurstBufferStageIn": ("waits", "its data is being staged in"),
    "Reservation": ("waits", "waits for its reservation to begin"),
    "ReqNodeNotAvail": ("waits", "a node that it needs is down, drained or reserved"),
    "NodeDown": ("waits", "a node that it needs is down"),
    "FrontEndDown": ("waits", "no front end is up"),
    "PartitionDown": ("held", "the partition is down"),
    "PartitionInactive": ("held", "the partition starts no jobs"),
    "JobHeldUser": ("held", "held by its owner; `scontrol release` frees it"),
    "JobHeldAdmin": ("held", "held by an administrator"),
    "JobHoldMaxRequeue": ("held", "requeued too often; `scontrol release` frees it"),
    "job_requeued_in_held_state": ("held", "requeued and held; `scontrol release` frees it"),
    "launch_failed_requeued_held": ("held", "its launch failed; `scontrol release` tries again"),
    "user_env_retrieval_failed_requeued_held": ("held", "its environment could not be read at the launch"),
    "BurstBufferOperation": ("held", "staging data in or out failed"),
    "ReservationDeleted": ("held", "its reservation was deleted"),
    "QOSUsageThreshold": ("held", "the account's usage is past the limit of the QOS"),
    "AccountingPolicy": ("held", "an accounting policy keeps it back"),
    "PartitionNodeLimit": ("never", "asks for more or fewer nodes than the partition allows"),
    "PartitionTimeLimit": ("never", "asks for more time than the partition allows"),
    "PartitionConfig": ("never", "asks for what the partition does not allow"),
    "BadConstraints": ("never", "no node of the cluster has what it asks for"),
    "Constraints": ("never", "no node of the cluster has what it asks for"),
    "MaxMemPerLimit": ("never", "asks for more memory than the partition allows"),
    "InvalidAccount": ("never", "its account does not exist"),
    "AccountNotAllowed": ("never", "its account may not use the partition"),
    "InvalidQOS": ("never", "its QOS does not exist"),
    "QOSNotAllowed": ("never", "its QOS may not be used in the partition"),
    "ReservationInvalid": ("never", "its reservation does not exist"),
    "DeadLine": ("never", "cannot end before its deadline"),
    "NonZeroExitCode": ("never", "ended with an exit code other than 0"),
    "RaisedSignal": ("never", "was ended by a signal"),
    "TimeLimit": ("never", "reached its time limit"),
    "InactiveLimit": ("never", "was idle for too long"),
    "OutOfMemory": ("never", "ran out of memory"),
    "JobLaunchFailure": ("never", "could not be launched"),
    "SystemFailure": ("never", "the system failed"),
}
_LIMIT = re.compile(r"(?P<whose>Assoc|QOS|Max)(?P<kind>Grp|Max|Min)?(?P<what>\w*)")


def parse_pending_reason(text: str) -> PendingReason:
    """A reason as squeue and scontrol print it, with or without brackets and what follows a comma."""
    text = " ".join(text.split())
    whole = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    code, _, rest = whole.replace(" ", "_").partition(",")
    if code.startswith("Nodes_required_for_job_are_DOWN"):  # a sentence in place of a code
        code, rest = "ReqNodeNotAvail", ""
    if code in _REASONS:
        outlook, words = _REASONS[code]
        return PendingReason(code, f"{words}: {rest.strip('_')}" if rest else words, outlook)
    return _parse_limit_reason(code) or PendingReason(
        code or UNKNOWN, f"Slurm says {whole}" if whole else UNKNOWN, "unknown"
    )


def _parse_limit_reason(code: str) -> PendingReason | None:
    """The family of limits: a limit of each job never lifts by waiting, one that jobs share does."""
    match = _LIMIT.fullmatch(code)
    if match is None or not match["what"]:
        return None
    whose = {"Assoc": "the account", "QOS": "the QOS", "Max": "the account"}[match["whose"]]
    if match["kind"] == "Min":
        return PendingReason(code, f"asks for less than {whose} requires ({code})", "never")
    if "PerJob" in code or code.endswith("PerNode"):
        return PendingReason(code, f"asks for more than {whose} allows one job ({code})", "never")
    if code.startswith(("AssocGrp", "QOSGrp")) and "Minutes" in code and "RunMinutes" not in code:
        return PendingReason(code, f"what {whose} may use is used up ({code})", "held")
    return PendingReason(code, f"what {whose} may use at a time is in use ({code})", "waits")
