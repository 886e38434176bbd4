"""Why an attempt failed: of everything that was seen, the one thing that came first, in one line."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun import process
from hpcrun.errors import EXIT_DONE, EXIT_RANKS_DIED, EXIT_SAVED
from hpcrun.launch.attempt_events import LauncherEnded, NodeLost, RankEnded
from hpcrun.launch.fault_class import FaultClass, classify_crash, classify_hang
from hpcrun.launch.launchers import read_rank_wait_statuses
from hpcrun.launch.watch.stacks import StackGroup
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt

# What ranks say when it was a peer that went away.
_COLLATERAL = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|timed out waiting"
    r"|peer (closed|went away)|process (has )?failed|remote (error|process exited)",
    re.IGNORECASE,
)
_FATAL_ERROR = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_LOG_TAIL_BYTES = 65536
_SIMULTANEOUS_S = 0.3


@dataclass(frozen=True)
class FailureCause:
    """One line that names rank, node and cause, and the exit code that goes with it."""

    message: str
    exit_code: int = EXIT_RANKS_DIED
    rank: int | None = None
    kind: FaultClass = "unknown"


def explain_failure(
    attempt: Attempt,
    ranks: int,
    ended: Sequence[RankEnded],
    launcher: LauncherEnded | None,
    lost: Sequence[NodeLost] = (),
    launcher_name: str = "mpiexec",
) -> FailureCause:
    """Find the cause among the ranks' own records and the order in which their processes ended.

    A rank that vanished without a word is the cause, unless another had reported a trouble of its own before;
    whoever then loses the connection to it is not.
    """
    # The launcher notices the loss of a node first, and takes all ranks with it.
    if lost:
        first = lost[0]
        who = f"node {first.node} is lost: {first.why}"
        log = attempt.run.agent_logs / f"{first.node}.log"
        return FailureCause(f"{who}; log: {log}", kind="infrastructure")
    records = (read_json(attempt.error_record(rank)) for rank in range(ranks))
    ahead_s = {rank_ended.node: rank_ended.ahead_s for rank_ended in ended}

    def moment(record: dict[str, Any]) -> float:
        """By the supervisor's clock: ranks stamp what they report with their node's."""
        return float(record["time"]) - ahead_s.get(record["node"], 0.0)

    errors = sorted((record for record in records if record), key=moment)
    own = [record for record in errors if not _COLLATERAL.search(record["message"])]
    reported = {record["rank"] for record in errors}
    silent = [
        rank_ended
        for rank_ended in ended
        if rank_ended.rank not in reported and not _ended_well(attempt, rank_ended.rank)
    ]
    if launcher and os.WIFSIGNALED(launcher.wait_status):
        # It took with it all who had not gone before.
        silent = [rank_ended for rank_ended in silent if rank_ended.time < launcher.time - _SIMULTANEOUS_S]
    if silent and not any(moment(record) <= silent[0].time for record in own):
        return _explain_silent_death(attempt, silent[0])
    if errors:
        return _explain_reported_error(attempt, (own or errors)[0])
    return _explain_launcher_end(attempt, launcher, launcher_name)


def explain_hang(
    attempt: Attempt, what: str, groups: Sequence[StackGroup], odd: StackGroup | None
) -> FailureCause:
    """The line about ranks that make no more progress: who stands apart, and where the others wait."""
    others = [group for group in groups if group != odd]
    texts = [str(group) for group in ([odd] if odd else []) + others[::-1]]
    where = f" on node {', '.join(odd.nodes)}" if odd else ""
    who = f"rank {odd.ranks[0]}{where} stands apart: " if odd and len(odd.ranks) == 1 else ""
    message = f"{what}; {who}{'; '.join(texts[:3])}; stacks: {attempt.stacks}"
    return FailureCause(message, rank=odd.ranks[0] if odd else None, kind=classify_hang(odd))


def _ended_well(attempt: Attempt, rank: int) -> bool:
    """Whether a command has said for itself that nothing was wrong on this rank."""
    record = read_json(attempt.exit_record(rank))
    return isinstance(record, dict) and record.get("exit_code") in (EXIT_DONE, EXIT_SAVED)


def _explain_silent_death(attempt: Attempt, death: RankEnded) -> FailureCause:
    status = death.wait_status
    if status is None:
        status = read_rank_wait_statuses(attempt.launcher_log).get(death.rank)
    how = "ended" if status is None else process.describe_status(status)
    crash = _FATAL_ERROR.findall(_log_tail(attempt, death.rank))
    if crash and (status is None or os.WIFSIGNALED(status)):
        how += f": {crash[-1]}"
    elif status is None or os.WIFEXITED(status):
        how += " before the run was done"
    who = f"rank {death.rank} on node {death.node}" + (f" (pid {death.pid})" if death.pid else "")
    log = attempt.log(death.rank)
    # Before the shim has moved its output, a rank's last words are in the launcher's log.
    where = log if log.exists() else attempt.launcher_log
    return FailureCause(f"{who} {how}; log: {where}", rank=death.rank, kind=classify_crash(None, status))


def _explain_reported_error(attempt: Attempt, record: dict[str, Any]) -> FailureCause:
    rank = record["rank"]
    who = f"rank {rank} on node {record['node']}"
    lines = str(record["message"]).strip().splitlines() or ["no message"]
    if record.get("expected"):
        message = f"{who}: " + "\n".join(lines)
    else:
        message = f"{who}: {record['kind']}: {lines[0]}; log: {attempt.log(rank)}"
    return FailureCause(message, record.get("exit_code") or EXIT_RANKS_DIED, rank, classify_crash(record))


def _explain_launcher_end(attempt: Attempt, launcher: LauncherEnded | None, name: str) -> FailureCause:
    if launcher is None:
        return FailureCause(
            f"the ranks did not finish, and none of them said why; logs: {attempt.path / 'logs'}"
        )
    statuses = read_rank_wait_statuses(attempt.launcher_log)
    # Hydra ends the others with SIGKILL, so a rank that ended in another way is the more telling one.
    for rank, status in sorted(statuses.items(), key=lambda item: item[1] == signal.SIGKILL):
        if status:
            how = process.describe_status(status)
            return FailureCause(
                f"rank {rank} {how} before it had started; log: {attempt.launcher_log}", rank=rank
            )
    how = process.describe_status(launcher.wait_status)
    lines = [
        line
        for line in attempt.launcher_log.read_text(errors="replace").splitlines()
        if line.strip()
        and not line.startswith(
            ("[mpiexec@", "HYDRA_LAUNCH", "YOUR APPLICATION", "This typically", "Please see")
        )
    ]
    last = f"; last output: {lines[-1].strip()[:300]}" if lines else ""
    return FailureCause(f"{name} {how} before the run was done{last}; log: {attempt.launcher_log}")


def _log_tail(attempt: Attempt, rank: int) -> str:
    try:
        with attempt.log(rank).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
