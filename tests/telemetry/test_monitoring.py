"""The dashboard and the alert rules that come with hpcrun: sound, and about figures that there are."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import yaml

from hpcrun.runs.checkpoint_stats import CheckpointStats, TierStats
from hpcrun.runs.time_account import BUCKETS
from hpcrun.specs.shipped import shipped_file
from hpcrun.telemetry.prometheus_metrics import RunMetrics, metric_samples
from hpcrun.telemetry.run_counters import TELEMETRY_STATES, RunCounters

_METRIC = re.compile(r"\b(?:hpcrun|node|up)_[a-z_]+\b")
_LABEL = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_KINDS = {"stat", "timeseries", "table", "heatmap", "state-timeline"}


def dashboard() -> Any:
    return json.loads(shipped_file("monitoring/dashboard.json").read_text())


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(shipped_file("monitoring/alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def exported() -> dict[str, set[str]]:
    """The labels of every series there can be, by its name."""
    saves = CheckpointStats({"durable": TierStats(saves=1, lag_s=1.0, ratio=1.0)}, durable_since=1.0)
    tally = RunCounters(attempt=1, step=1, saved_step=1, saved_at=1.0, saves=saves)
    roles = dict.fromkeys(("active", "spare", "excluded"), 1)
    found: dict[str, set[str]] = {}
    for name, labels, _ in metric_samples(
        [RunMetrics("r", tally, nodes=roles, heartbeat_ages_s={"n01": 1.0}, now=2.0)]
    ):
        found.setdefault(name, set()).update(labels)
    return found


def expressions() -> list[str]:
    board = dashboard()
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    marked = [one["expr"] for one in board["annotations"]["list"]]
    chosen = [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    return [*shown, *marked, *chosen, *(rule["expr"] for rule in rules())]


@pytest.mark.parametrize("text", expressions())
def test_every_figure_that_is_shown_or_watched_exists(text: str) -> None:
    known = exported()
    names = set(_METRIC.findall(text))
    assert names
    assert names <= known.keys()
    labels = set().union(*(known[name] for name in names))
    assert {name for name, _, _ in _LABEL.findall(text)} <= labels
    for opening, closing in ("()", "[]", "{}"):
        assert text.count(opening) == text.count(closing)
    values = {"state": TELEMETRY_STATES, "bucket": BUCKETS, "role": ("active", "spare", "excluded")}
    for name, _, value in _LABEL.findall(text):
        if name in values:
            assert set(value.split("|")) <= set(values[name])


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert (board["uid"], board["title"]) == ("hpcrun-runs", "hpcrun: runs")
    assert board["schemaVersion"] >= 39
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert list(variables) == ["datasource", "run", "attempt", "node"]
    assert variables["datasource"]["type"] == "datasource"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["type"] for panel in panels} <= _KINDS
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    used = set(re.findall(r"\$(\w+)", json.dumps(board))) | set(re.findall(r"\$\{(\w+)\}", json.dumps(board)))
    assert used <= {*variables, "__rate_interval", "__all"}
    assert set(variables) <= used


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert all(one["x"] + one["w"] <= 24 for one in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


def test_every_rule_says_how_grave_and_about_which_run() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 8
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]


@pytest.mark.parametrize("figure", ["durable_age_seconds", "lag_seconds", "failures_total"])
def test_saves_that_do_not_get_where_they_should_are_shown_and_watched(figure: str) -> None:
    name = f"hpcrun_checkpoint_{figure}"
    assert any(name in rule["expr"] for rule in rules())
    assert any(name in target["expr"] for panel in dashboard()["panels"] for target in panel["targets"])
