"""`hpcrun metrics`: the figures of runs for Prometheus, and what Grafana and Prometheus make of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from hpcrun.errors import UsageError
from hpcrun.files import check_output
from hpcrun.specs.run_lookup import find_runs
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.shipped import shipped_file

SCHEMA_VERSION = 1

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def metrics(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Runs, also such as are over; of a sweep, its elements."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.prom", help="Write there, whole or not at all, for the node_exporter."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Print the dashboard, to be imported by Grafana.")
    ] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="Print alert rules for Prometheus.")] = False,
) -> None:
    """The figures of runs in Prometheus's text format: hpcrun metrics RUN

    While a run goes on, its supervisor shows them by itself where the job or the profile says
    `telemetry: {port: 9850}` or `telemetry: {textfile: DIR}`; this is for cron, and for runs that are over.
    """
    if dashboard or alerts:
        if names or (dashboard and alerts) or as_json or out:
            raise UsageError("metrics: --dashboard and --alerts stand alone")
        place = "monitoring/dashboard.json" if dashboard else "monitoring/alerts.yaml"
        print(shipped_file(place).read_text(encoding="utf-8"), end="")
        return
    if not names:
        raise UsageError("metrics: name a run, or several; or give --dashboard or --alerts")
    if out is not None and as_json:
        raise UsageError("metrics: --out is for Prometheus's text; give it or --json")
    from hpcrun.telemetry.prometheus_exporter import read_run_metrics
    from hpcrun.telemetry.prometheus_metrics import metric_samples, render_exposition

    figures = [read_run_metrics(part) for run in find_runs(names) for part in _run_parts(run)]
    if as_json:
        found = [
            {"name": name, "labels": labels, "value": value}
            for name, labels, value in metric_samples(figures)
        ]
        print(json.dumps({"schema_version": SCHEMA_VERSION, "time": time.time(), "samples": found}))
        return
    text = render_exposition(figures)
    if out is None:
        print(text, end="")
        return
    from hpcrun.specs.records import write_atomically

    check_output(out)
    write_atomically(out, text, 0o644)


def _run_parts(run: RunDir) -> list[RunDir]:
    if not run.sweep.is_file():
        return [run]
    from hpcrun.runs.run_state import read_sweep_elements

    return read_sweep_elements(run)
