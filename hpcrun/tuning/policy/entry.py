"""A row of the policy from outputs of nccl-tests: runs with settings and without, taken in pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from hpcrun.errors import UsageError
from hpcrun.files import check_output, read_regular
from hpcrun.specs.records import write_atomically
from hpcrun.specs.validation import problems_of_validation_error
from hpcrun.tuning.policy.nccl_tests import NcclTestTimings, TimedCall
from hpcrun.tuning.policy.policy import FEWEST_PAIRS, MeasurementSpec, PolicyRowSpec, parse_policy
from hpcrun.tuning.registry.registry import format_version, parse_version
from hpcrun.tuning.registry.values import is_same_value

_Value = TypeVar("_Value")
_NO_ROWS = re.compile(r"^rows:[^\n]*\n?", re.MULTILINE)
_ITEM = re.compile(r"^( *)- ", re.MULTILINE)


@dataclass(frozen=True)
class BenchmarkRun:
    """One output, with the name of its file."""

    name: str
    found: NcclTestTimings


@dataclass(frozen=True)
class StatedConditions:
    """What the user states besides the outputs; None and empty: the outputs say it."""

    settings: Mapping[str, str]
    when: str
    by: str
    nodes: int | None = None
    ranks_per_node: int | None = None
    nccl: str | None = None
    collective: str | None = None


def make_policy_row(
    ours: Sequence[BenchmarkRun], theirs: Sequence[BenchmarkRun], stated: StatedConditions
) -> PolicyRowSpec:
    """The row of outputs with settings (ours) and without (theirs); UsageError for what cannot be paired."""
    if len(ours) != len(theirs) or not ours:
        raise UsageError(
            f"{len(ours)} outputs with the settings and {len(theirs)} without: they are taken in pairs, in"
            " their order; give as many of each, from runs that alternated"
        )
    runs = [*ours, *theirs]
    for run in runs:
        _require_sound(run)
    _require_stated_settings(ours, theirs, stated.settings)
    _require_different(runs)
    releases = {run.name: run.found.nccl and format_version(run.found.nccl) for run in runs}
    nccl = _agreed_value(
        "NCCL", "--nccl X", releases, stated.nccl and format_version(parse_version(stated.nccl, "--nccl"))
    )
    per_node = _agreed_value(
        "ranks a node",
        "--ranks-per-node R",
        {run.name: run.found.ranks_per_node for run in runs},
        stated.ranks_per_node,
    )
    measured = list(_measurements(ours, theirs, stated))
    nodes = [measurement.nodes for measurement in measured if measurement.nodes]
    content = {
        "set": dict(stated.settings),
        "nccl": nccl,
        "nodes": [min(nodes), max(nodes)],
        "ranks_per_node": per_node,
        "measured": measured,
        "when": stated.when,
        "by": stated.by,
    }
    try:
        return PolicyRowSpec.model_validate(content)
    except ValidationError as error:
        problem = problems_of_validation_error(error, PolicyRowSpec)[0]
    raise UsageError(f"{problem.key}: {problem.text}")


def _require_sound(run: BenchmarkRun) -> None:
    timings = run.found
    if not timings.times_us:
        text = f"{run.name}: holds no times of nccl-tests; give what all_reduce_perf or another printed"
        raise UsageError(text)
    if timings.is_wrong:
        where = f" ({timings.wrong[0].size_bytes} bytes)" if timings.wrong else ""
        text = f"{run.name}: has wrong results{where}: #wrong is above 0; a wrong result is no gain"
        raise UsageError(text)
    if timings.mixed:
        raise UsageError(f"{run.name}: {timings.mixed}")


def _require_stated_settings(
    ours: Sequence[BenchmarkRun], theirs: Sequence[BenchmarkRun], settings: Mapping[str, str]
) -> None:
    """Where NCCL's own lines stand in an output, they tell what was set."""
    for name, value in settings.items():
        for run in ours:
            printed = run.found.env.get(name)
            if printed is not None and not is_same_value(printed, value):
                text = f"{run.name}: ran with {name}={printed}, not {value}; give its outputs to --without"
                raise UsageError(text)
        for run in theirs:
            printed = run.found.env.get(name)
            if printed is not None and is_same_value(printed, value):
                raise UsageError(f"{run.name}: ran with {name}={printed}; give its outputs to --with")


def _require_different(runs: Sequence[BenchmarkRun]) -> None:
    """No run counts twice: to the last digit no two are alike."""
    seen: dict[tuple[object, ...], str] = {}
    for run in runs:
        before = seen.setdefault(tuple(run.found.times_us.items()), run.name)
        if before != run.name:
            raise UsageError(f"{run.name}: has the very times of {before}; a run counts once, give another")
    if len(seen) < len(runs):
        raise UsageError(f"{len(runs)} outputs hold {len(seen)} different runs; name each of them once")


def _agreed_value(
    what: str, option: str, printed: Mapping[str, _Value | None], stated: _Value | None
) -> _Value:
    """The one value that all outputs tell, or that is said for those that do not."""
    values: dict[_Value, str] = {} if stated is None else {stated: option}
    for name, value in printed.items():
        if value is not None:
            values.setdefault(value, name)
    if not values:
        raise UsageError(f"{what}: no output tells it; say it with {option}")
    if len(values) > 1:
        (first, a), (second, b), *_ = values.items()
        raise UsageError(f"{what}: {first} by {a}, {second} by {b}; measure both sides alike, a row for each")
    return next(iter(values))


def _measurements(
    ours: Sequence[BenchmarkRun], theirs: Sequence[BenchmarkRun], stated: StatedConditions
) -> Iterator[MeasurementSpec]:
    times: dict[tuple[int, TimedCall], tuple[list[float], list[float]]] = {}
    unchecked: set[tuple[int, TimedCall]] = set()
    for mine, other in zip(ours, theirs, strict=True):
        node_counts = {run.name: len(run.found.nodes) or None for run in (mine, other)}
        nodes = _agreed_value("nodes", "--nodes N", node_counts, stated.nodes)
        lacking = set(mine.found.times_us) ^ set(other.found.times_us)
        if lacking:
            call = min(lacking)
            has, has_not = (mine, other) if call in mine.found.times_us else (other, mine)
            text = (
                f"{has_not.name}: has no {call.size_bytes} bytes{' in place' * call.in_place}, {has.name} has"
            )
            raise UsageError(f"{text}; run both with the same sizes")
        for call in mine.found.times_us:
            key = nodes, _find_call(call, mine, stated)
            pair = times.setdefault(key, ([], []))
            if not {call} <= mine.found.checked & other.found.checked:
                unchecked.add(key)
            pair[0].append(mine.found.median_us(call))
            pair[1].append(other.found.median_us(call))
    for (nodes, call), (with_us, without_us) in sorted(times.items()):
        if len(with_us) < FEWEST_PAIRS:
            text = f"{len(with_us)} pairs of {call.collective}, {call.size_bytes} bytes, on {nodes} nodes"
            raise UsageError(f"{text}: it takes {FEWEST_PAIRS}; run more, in turns")
        yield MeasurementSpec(
            collective=call.collective,
            size_bytes=call.size_bytes,
            in_place=call.in_place,
            nodes=nodes,
            with_us=with_us,
            without_us=without_us,
            checked=(nodes, call) not in unchecked,
        )


def _find_call(call: TimedCall, run: BenchmarkRun, stated: StatedConditions) -> TimedCall:
    name = call.collective or stated.collective
    if not name:
        raise UsageError(f"{run.name}: does not tell its collective; say it with --collective all_reduce")
    if stated.collective and _plain_collective(name) != _plain_collective(stated.collective):
        raise UsageError(
            f"{run.name}: ran {name}, and --collective says {stated.collective}; leave --collective out, or"
            " give outputs of that one"
        )
    return call._replace(collective=name)


def _plain_collective(collective: str) -> str:
    """The same text for all_reduce, all-reduce and AllReduce."""
    return re.sub(r"[_-]|perf|mpi", "", collective.lower())


def render_policy_row(row: PolicyRowSpec, indent: str = "") -> str:
    """A row as an item of a policy's YAML."""
    lines = [
        f"- set: {json.dumps(row.values)}",
        f'  nccl: "{row.nccl}"',
        f"  nodes: {row.nodes}",
        f"  ranks_per_node: {row.ranks_per_node}",
        f"  when: {json.dumps(row.when)}",
        f"  by: {json.dumps(row.by)}",
        "  measured:",
    ]
    for measurement in row.measured:
        lines += [
            f"    - {{collective: {measurement.collective}, size_bytes: {measurement.size_bytes},"
            f" in_place: {json.dumps(measurement.in_place)}, nodes: {json.dumps(measurement.nodes)},",
            f"       checked: {json.dumps(measurement.checked)},",
            f"       with_us: {measurement.with_us},",
            f"       without_us: {measurement.without_us}}}",
        ]
    return "".join(f"{indent}{line}\n" for line in lines)


def insert_policy_row(text: str, row: PolicyRowSpec, name: str) -> str:
    """A policy's text with one more row and all else as it was; UsageError where that cannot be done."""
    has_values = any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())
    before = parse_policy(text, name) if has_values else ()
    first = _ITEM.search(text)
    kept = text if before else _NO_ROWS.sub("", text)
    start = (kept.rstrip("\n") + "\n").lstrip("\n") + ("" if before else "rows:\n")
    after = start + render_policy_row(row, first[1] if before and first else "  ")
    if parse_policy(after, name) != (*before, row):
        raise UsageError(
            f"{name}: its rows do not stand at its end, one after the other; add this one by hand"
        )
    return after


def append_policy_row(path: Path, row: PolicyRowSpec) -> tuple[PolicyRowSpec, ...]:
    """Put a row behind those of a file, which is made where there is none; gives all of them."""
    try:
        check_output(path)
        before = read_regular(path, follow=True).decode() if path.exists() else ""
        after = insert_policy_row(before, row, str(path))
        write_atomically(path, after, 0o644)
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not text") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return parse_policy(after, str(path))
