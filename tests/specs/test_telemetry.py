"""What a job and a profile may say of telemetry and hooks, and which of the two holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.errors import SpecError
from hpcrun.specs.cluster import parse_cluster, render_cluster
from hpcrun.specs.load import load_job, render_job
from hpcrun.specs.telemetry import SiteTelemetrySpec, TelemetrySpec

JOB = "command: [train.sh]\n"


def job(tmp_path: Path, more: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + more, encoding="utf-8")
    return path


def test_a_job_says_who_is_told(tmp_path: Path) -> None:
    more = "telemetry: {port: 9850, tensorboard: true, wandb: {}}\n"
    more += "hooks: [{command: [tell, '$(x)'], on: [done]}]\n"
    spec = load_job(job(tmp_path, more)).spec
    assert (spec.telemetry.port, spec.telemetry.tensorboard, spec.telemetry.textfile) == (9850, True, None)
    assert spec.telemetry.wandb is not None
    assert [(one.command, one.on) for one in spec.hooks] == [(["tell", "$(x)"], ["done"])]
    again = tmp_path / "again.yaml"
    again.write_text(render_job(spec), encoding="utf-8")
    assert load_job(again).spec == spec
    assert load_job(job(tmp_path, "")).spec.telemetry == TelemetrySpec()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("telemetry: {port: 0}", "telemetry.port: must be at least 1, not 0"),
        ("telemetry: {textfile: here}", 'telemetry.textfile: "here" is not allowed'),
        ("telemetry: {prometheus: 1}", "telemetry.prometheus: unknown key"),
        ("telemetry: {wandb: {mode: on}}", "telemetry.wandb.mode: "),
        ("hooks: [{command: []}]", "hooks.0.command: must have at least 1 item"),
        ("hooks: [{command: ['']}]", "hooks.0.command: its first word is the program to call"),
        (
            "hooks: [{command: [a], on: [end]}]",
            'hooks.0.on.0: "end" is not allowed; did you mean saved? allowed: ',
        ),
        ("hooks: [tell.sh]", "hooks.0: must be a mapping"),
        ("hooks: [" + "{command: [a]}, " * 9 + "]", "hooks: must have at most 8 items"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, more: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(job(tmp_path, more + "\n"))
    (line,) = str(caught.value).splitlines()
    assert told in line


def test_the_job_holds_and_the_profile_fills_in() -> None:
    site = SiteTelemetrySpec(textfile="/var/prom", port=9000)
    both = TelemetrySpec(port=9850, tensorboard="/logs").at(site)
    assert (both.textfile, both.port, both.tensorboard) == ("/var/prom", 9850, "/logs")
    assert TelemetrySpec(port=1).at(None) == TelemetrySpec(port=1)


def test_a_profile_has_hooks_of_its_own() -> None:
    text = (
        "name: c\ntelemetry: {port: 9850, targets: /shared}\nhooks: [{command: [/opt/tell], on: [fault]}]\n"
    )
    cluster = parse_cluster(text, "c.yaml")
    assert (cluster.telemetry.targets, cluster.hooks[0].command) == ("/shared", ["/opt/tell"])
    assert parse_cluster(render_cluster(cluster), "c.yaml") == cluster
    with pytest.raises(SpecError, match=r"telemetry\.wandb: unknown key"):
        parse_cluster("name: c\ntelemetry: {wandb: {}}\n", "c.yaml")
