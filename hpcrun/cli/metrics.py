"""`hpcrun metrics`: a run's metrics for Prometheus, a dashboard for Grafana, alert rules."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hpcrun.cli.options import AsJson, OptionalRuns, make_app
from hpcrun.cli.output import print_json
from hpcrun.errors import UsageError
from hpcrun.files import check_output
from hpcrun.runs.run_state import read_sweep_elements
from hpcrun.specs.run_lookup import find_runs
from hpcrun.specs.shipped import shipped_file

app = make_app()


@app.command()
def metrics(
    names: OptionalRuns = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.prom", help="Write this file atomically, for the node_exporter."),
    ] = None,
    as_json: AsJson = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Print the dashboard to import into Grafana.")
    ] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="Print alert rules for Prometheus.")] = False,
) -> None:
    """Print metrics of runs in Prometheus's text format.

    Finished runs are included; for a sweep, its elements are listed. The supervisor of a running run exports
    them itself where the job or the profile says `telemetry: {port: 9850}` or `telemetry: {textfile: DIR}`;
    this verb is for cron jobs and finished runs.
    """
    if dashboard or alerts:
        if names or (dashboard and alerts) or as_json or out:
            raise UsageError("metrics: --dashboard and --alerts stand alone")
        shipped = "monitoring/dashboard.json" if dashboard else "monitoring/alerts.yaml"
        print(shipped_file(shipped).read_text(encoding="utf-8"), end="")
        return
    if not names:
        raise UsageError("metrics: name a run, or several; or give --dashboard or --alerts")
    if out is not None and as_json:
        raise UsageError("metrics: --out is for Prometheus's text; give it or --json")
    from hpcrun.telemetry.prometheus_exporter import read_run_metrics
    from hpcrun.telemetry.prometheus_metrics import metric_samples, render_exposition

    figures = [
        read_run_metrics(part)
        for run in find_runs(names)
        for part in (read_sweep_elements(run) if run.sweep.is_file() else [run])
    ]
    if as_json:
        samples = [
            {"name": name, "labels": labels, "value": value}
            for name, labels, value in metric_samples(figures)
        ]
        print_json(time=time.time(), samples=samples)
        return
    text = render_exposition(figures)
    if out is None:
        print(text, end="")
        return
    from hpcrun.specs.records import write_atomically

    check_output(out)
    write_atomically(out, text, 0o644)
