"""Two logs of one job, such as before and after an upgrade: which calls go by another algorithm now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from hpcrun.errors import UsageError
from hpcrun.tuning.log.nccl_log import NcclLog, machine_from_log
from hpcrun.tuning.model.nccl_model import NcclCollective
from hpcrun.tuning.model.predict import predict_nccl


@dataclass(frozen=True)
class AlgorithmChange:
    """One kind of call that both logs have, and that took other ways."""

    collective: str
    size_bytes: int
    before: tuple[str, ...]
    """Algorithm and protocol, such as Tree/LL128."""
    now: tuple[str, ...]
    expected_before: str | None
    """What NCCL's table of the earlier log has as the fastest; None where it has none."""
    expected_now: str | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def compare_algorithms(before: NcclLog, now: NcclLog) -> tuple[AlgorithmChange, ...]:
    """Where the choice differs; calls that only one of the logs has are no change."""
    old, new = _algorithms_by_call(before), _algorithms_by_call(now)
    return tuple(
        AlgorithmChange(
            call,
            size,
            old[call, size],
            new[call, size],
            _fastest(before, call, size),
            _fastest(now, call, size),
        )
        for call, size in sorted(old.keys() & new.keys())
        if old[call, size] != new[call, size]
    )


def _algorithms_by_call(log: NcclLog) -> dict[tuple[str, int], tuple[str, ...]]:
    ways_of_call: dict[tuple[str, int], set[str]] = {}
    for choice in log.chosen:
        ways_of_call.setdefault((choice.collective, choice.size_bytes), set()).add(
            f"{choice.algo}/{choice.proto}"
        )
    return {key: tuple(sorted(ways)) for key, ways in ways_of_call.items()}


def _fastest(log: NcclLog, call: str, size: int) -> str | None:
    collectives: Sequence[NcclCollective] = get_args(NcclCollective)
    collective = next((name for name in collectives if name == call.lower()), None)
    table = log.expectations(collective) if collective else {}
    if collective is None or not table or not size:
        return None
    try:
        machine, _ = machine_from_log(log, "log", None, None, None)
    except UsageError:
        return None
    return predict_nccl(machine, collective, [size], lambda _: None, "", table).rows[0].winner
