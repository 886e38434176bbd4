"""The measured policy of a cluster: raw times with and without settings, and what they support for a job.

A row keeps the times of runs that alternated, in pairs;
the gain is computed from them whenever it is asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from hpcrun.formulas import median_interval, min_samples_for_median
from hpcrun.specs.fields import SingleLineText, SpecSection, SystemName, VariableName
from hpcrun.specs.settings import CommSetting
from hpcrun.specs.yaml import YamlDocument, load_yaml, parse_yaml
from hpcrun.tuning.lint.conflicts import find_conflicts
from hpcrun.tuning.lint.environment import VariableAssignment as Assigned
from hpcrun.tuning.lint.lint import check_assignment
from hpcrun.tuning.model.platforms import validate_document
from hpcrun.tuning.registry.nccl_grammar import FORCED_LL128_DANGER, forces_ll128
from hpcrun.tuning.registry.registry import Version, format_version, parse_version
from hpcrun.units import format_bytes

FEWEST_PAIRS = min_samples_for_median()
"""With fewer there is no 95 % interval."""
GAIN, LOSS = 1.05, 0.97
"""A setting has to be this much faster at some size, and at none slower than this."""
GainVerdict = Literal["faster", "slower", "no difference", "too few pairs"]


class _PolicySection(SpecSection):
    model_config = ConfigDict(populate_by_name=True)


class MeasurementSpec(_PolicySection):
    """Times of one kind of call, by pairs of runs."""

    collective: SystemName = Field(description="such as all_reduce")
    size_bytes: int = Field(ge=1)
    in_place: bool = Field(default=False)
    nodes: int | None = Field(default=None, ge=1, description="default: the row's, where that is one number")
    with_us: list[float] = Field(min_length=1, description="microseconds with the settings, in order")
    without_us: list[float] = Field(min_length=1, description="without them; of the same pairs")
    checked: bool = Field(
        default=False, description="whether nccl-tests compared the results of all these runs (#wrong 0)"
    )

    @model_validator(mode="after")
    def _in_pairs(self) -> Self:
        ours, theirs = len(self.with_us), len(self.without_us)
        if ours != theirs:
            raise ValueError(f"with_us has {ours} times and without_us {theirs}; they are taken in pairs")
        if min(*self.with_us, *self.without_us) <= 0:
            raise ValueError("a time must be above 0")
        return self

    def __str__(self) -> str:
        where = f" on {self.nodes} node{'' if self.nodes == 1 else 's'}" if self.nodes else ""
        return f"{self.collective} of {format_bytes(self.size_bytes)}{' in place' * self.in_place}{where}"


class PolicyRowSpec(_PolicySection):
    """Settings that were measured together, and where."""

    values: dict[VariableName, SingleLineText] = Field(
        alias="set", min_length=1, description="variables, by name"
    )
    nccl: str = Field(
        pattern=r"^\d{1,3}(\.\d{1,3}){1,3}$", description="the release that ran, such as 2.27.5"
    )
    nodes: list[int] = Field(min_length=2, max_length=2, description="[least, most] that were measured")
    ranks_per_node: int = Field(ge=1)
    measured: list[MeasurementSpec] = Field(min_length=1)
    when: SingleLineText = Field(description="the day, such as 2026-11-30")
    by: SingleLineText = Field(description="who has measured it")

    @model_validator(mode="after")
    def _ends_are_measured(self) -> Self:
        least, most = self.nodes
        if not 1 <= least <= most:
            raise ValueError(f"nodes is [{least}, {most}]; write [least, most]")
        node_counts = {call.nodes or (least if least == most else 0) for call in self.measured}
        if 0 in node_counts:
            raise ValueError(f"nodes is {least} to {most}, so each of `measured` has to say its own `nodes`")
        if (min(node_counts), max(node_counts)) != (least, most):
            measured = f"{min(node_counts)} to {max(node_counts)}"
            text = f"nodes is {least} to {most}, and what is measured is on {measured}; let them agree"
            raise ValueError(text)
        return self

    @property
    def release(self) -> Version:
        """Major and minor, by which a measurement holds."""
        return parse_version(self.nccl)[:2]

    @property
    def assignments(self) -> str:
        """The settings as they are written in a shell."""
        return " ".join(f"{name}={value}" for name, value in self.values.items())

    def distance(self, nodes: int) -> int:
        """The distance of a number of nodes from the nearest that was measured."""
        return min(abs((call.nodes or self.nodes[0]) - nodes) for call in self.measured)


class _PolicySpec(_PolicySection):
    rows: list[PolicyRowSpec] = Field(default_factory=list)


class MeasuredGain(NamedTuple):
    """What the pairs of one kind of call say: how many times as fast it is with the settings."""

    call: MeasurementSpec
    pairs: int
    median: float
    low: float
    high: float
    """The ends of the median's 95 % interval."""

    @property
    def says(self) -> GainVerdict:
        """The verdict in a word."""
        if self.pairs < FEWEST_PAIRS:
            return "too few pairs"
        return "faster" if self.low > GAIN else "slower" if self.high < LOSS else "no difference"

    def __str__(self) -> str:
        return (
            f"{self.median:.3g} times as fast in {self.call} (95 %: {self.low:.3g} to {self.high:.3g},"
            f" {self.pairs} pairs)"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        keys = {"collective", "size_bytes", "in_place", "nodes"}
        figures = {"pairs": self.pairs, "median": self.median, "low": self.low, "high": self.high}
        return self.call.model_dump(include=keys) | figures | {"says": self.says}


@dataclass(frozen=True)
class PolicyRequest:
    """A job, as far as a policy asks."""

    nccl: Version | None
    nodes: int
    ranks_per_node: int
    stands: Mapping[str, str] = field(default_factory=dict)
    """What is set already, by others."""


def load_policy(path: Path) -> tuple[PolicyRowSpec, ...]:
    """Read a policy; SpecError lists every mistake with file, line and key."""
    return _parse_rows(load_yaml(path))


def parse_policy(text: str, name: str) -> tuple[PolicyRowSpec, ...]:
    """Parse the text of a policy; errors as in load_policy."""
    return _parse_rows(parse_yaml(text, name))


def _parse_rows(document: YamlDocument) -> tuple[PolicyRowSpec, ...]:
    # A key with nothing after it stands for its default.
    given = {key: value for key, value in document.values.items() if value is not None}
    return tuple(validate_document(replace(document, values=given), _PolicySpec).rows)


def measured_gains(row: PolicyRowSpec) -> tuple[MeasuredGain, ...]:
    """The gain of every call in a row, from the ratios of its pairs."""
    gains = []
    for call in row.measured:
        ratios = [theirs / ours for ours, theirs in zip(call.with_us, call.without_us, strict=True)]
        gains.append(MeasuredGain(call, len(ratios), statistics.median(ratios), *median_interval(ratios)))
    return tuple(gains)


def why_inconclusive(row: PolicyRowSpec) -> str:
    """Why a row's times support nothing, for whichever job; empty: they do."""
    unchecked = next((call for call in row.measured if not call.checked), None)
    if unchecked:
        return f"results were not checked for {unchecked}; run nccl-tests with -c 1"
    gains = measured_gains(row)
    few = [gain for gain in gains if gain.says == "too few pairs"]
    if few:
        return f"{few[0].pairs} pairs of {few[0].call}; it takes {FEWEST_PAIRS}"
    slower = min(
        (gain for gain in gains if gain.says == "slower"), key=lambda gain: gain.median, default=None
    )
    if slower:
        return f"{slower}, and a variable acts on every size"
    best = max(gains, key=lambda gain: gain.low)
    if best.says != "faster":
        return f"at most {best}, where more than {GAIN} is asked for"
    return ""


def lint_objections(row: PolicyRowSpec, nccl: Version | None) -> str:
    """What lint has against a row's settings; empty: nothing."""
    settings = {name: Assigned(name, value, "measured", "policy") for name, value in row.values.items()}
    faults = [fault for setting in settings.values() for fault in check_assignment(setting, nccl)]
    faults += find_conflicts(settings, nccl)
    if corrupting := [name for name, value in row.values.items() if forces_ll128(name, value, nccl)]:
        return f"{corrupting[0]}: {FORCED_LL128_DANGER}"
    return "; ".join(map(str, (fault for fault in faults if fault.severity == "error")))


def why_not_applicable(row: PolicyRowSpec, demand: PolicyRequest) -> str:
    """Why a row says nothing about a job; empty: it does."""
    release, (least, most) = format_version(row.release), row.nodes
    if demand.nccl is None:
        return f"which NCCL the job loads is not known, and it was measured with {release}"
    if demand.nccl[:2] != row.release:
        return f"it was measured with NCCL {release}, this is {format_version(demand.nccl)}"
    if not least <= demand.nodes <= most:
        span = str(least) if least == most else f"{least} to {most}"
        return f"it was measured on {span} nodes, the job has {demand.nodes}"
    if demand.ranks_per_node != row.ranks_per_node:
        return f"it was measured with {row.ranks_per_node} ranks a node, the job has {demand.ranks_per_node}"
    taken = {name for name, value in row.values.items() if demand.stands.get(name, value) != value}
    if len(row.values) > 1 and taken:
        name = min(taken)
        return f"{name} stands as {demand.stands[name]}, and they were measured together"
    return ""


def choose_measured_settings(
    rows: Sequence[PolicyRowSpec], demand: PolicyRequest, source: str
) -> tuple[tuple[CommSetting, ...], tuple[str, ...]]:
    """What a policy supports for a job, with its figures; and the notes on what it does not."""
    notes: list[str] = []
    fitting, kept = [], []
    for number, row in enumerate(rows, 1):
        why = why_not_applicable(row, demand)
        if not why:
            fitting.append(row)
            why = why_inconclusive(row) or lint_objections(row, demand.nccl)
        if why:
            notes.append(f"{row.assignments} is not set ({source}, row {number}): {why}")
        else:
            kept.append((number, row))
    kept.sort(key=lambda item: item[1].distance(demand.nodes))
    banned = dict(_find_contradictions([row for _, row in kept], fitting, demand.nodes))
    notes += banned.values()
    chosen: dict[str, CommSetting] = {}
    for number, row in kept:
        if banned.keys() & row.values.keys():
            continue
        set_already = [name for name in row.values if name in chosen]
        if not set_already:
            chosen |= {setting.name: setting for setting in _row_settings(row, f"{source}, row {number}")}
        elif any(chosen[name].value != row.values[name] for name in set_already):
            nearer = chosen[set_already[0]].source
            notes.append(
                f"{row.assignments} is not set ({source}, row {number}): {nearer} is nearer in nodes"
            )
    return tuple(chosen.values()), tuple(notes)


def _find_contradictions(
    kept: Sequence[PolicyRowSpec], fitting: Iterable[PolicyRowSpec], nodes: int
) -> Iterator[tuple[str, str]]:
    """Variables on which rows that are equally near do not agree."""
    for name in dict.fromkeys(name for row in kept for name in row.values):
        about = [row for row in kept if name in row.values]
        nearest = min(row.distance(nodes) for row in about)
        values = {row.values[name] for row in about if row.distance(nodes) == nearest}
        if len(values) > 1:
            listed = " and ".join(sorted(values))
            yield (
                name,
                f"{name} is not set: rows that are equally near support {listed}; measure them together",
            )
        for other in fitting:
            same = any(row.values == other.values for row in about)
            slower = next((gain for gain in measured_gains(other) if gain.says == "slower"), None)
            if same and slower and other.distance(nodes) <= nearest:
                yield name, f"{name} is not set: one row supports it, another says {slower} ({other.when})"


def _row_settings(row: PolicyRowSpec, source: str) -> Iterator[CommSetting]:
    gains = measured_gains(row)
    best = max(gains, key=lambda gain: gain.low)
    others = f"; none of {len(gains)} is slower" if len(gains) > 1 else ""
    least, most = row.nodes
    nodes = str(least) if least == most else f"{least} to {most}"
    where = f"{source}: {row.when} by {row.by}, {nodes} nodes x {row.ranks_per_node} ranks, NCCL {row.nccl}"
    for name, value in row.values.items():
        yield CommSetting(name, value, f"{best}{others}", where, f"NCCL {format_version(row.release)}")
