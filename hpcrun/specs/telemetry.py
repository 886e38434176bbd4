"""Who else is told of a run: Prometheus, TensorBoard, W&B, and programs that are called when it changes."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from hpcrun.specs.fields import ExpandablePath, NoNulText, SingleLineText, SpecSection

RunChange = Literal[
    "starting", "running", "fault", "relaunched", "requeued", "done", "saved", "failed", "interrupted", "lost"
]
"""The states of a run that a hook is told of; lost: its supervisor is gone without a word."""
RUN_CHANGES: tuple[str, ...] = get_args(RunChange)
_MOST_HOOKS = 8


def _program_first(command: list[str]) -> list[str]:
    if not command[0]:
        raise ValueError("its first word is the program to call, and is empty")
    return command


class HookSpec(SpecSection):
    """A program that is called when the state of a run changes, with a JSON document on its stdin."""

    command: Annotated[list[NoNulText], Field(min_length=1), AfterValidator(_program_first)] = Field(
        description="program and arguments, as a list of words; no shell is involved"
    )
    on: list[RunChange] = Field(default=[], description=f"of {', '.join(RUN_CHANGES)}; empty: every change")


HookList = Annotated[list[HookSpec], Field(max_length=_MOST_HOOKS)]


class SiteTelemetrySpec(SpecSection):
    """Where Prometheus finds the metrics of runs."""

    textfile: ExpandablePath | None = Field(
        default=None, description="textfile directory of the node_exporter on the supervisor's host"
    )
    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="HTTP port of /metrics; if it is taken, one of the next ports",
    )
    targets: ExpandablePath | None = Field(
        default=None, description="file_sd directory: one JSON file per run with the address of its /metrics"
    )


class WandbSpec(SpecSection):
    """A run in Weights & Biases that continues through relaunches and requeues."""

    project: Annotated[SingleLineText, Field(min_length=1)] | None = Field(
        default=None, description="W&B project"
    )
    entity: Annotated[SingleLineText, Field(min_length=1)] | None = Field(
        default=None, description="user or team"
    )
    group: Annotated[SingleLineText, Field(min_length=1)] | None = Field(
        default=None, description="W&B group"
    )
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="default: online if there is a key (WANDB_API_KEY, ~/.netrc)"
    )


class TelemetrySpec(SiteTelemetrySpec):
    """Where metrics go besides the run directory; a failure here never stops the run."""

    tensorboard: bool | ExpandablePath = Field(
        default=False, description="event files: true (RUN/tensorboard), or a directory with one for each run"
    )
    wandb: WandbSpec | None = Field(default=None, description="Weights & Biases; {} takes its defaults")

    def at(self, site: SiteTelemetrySpec | None) -> TelemetrySpec:
        """The same, with what the site's profile says where the job says nothing."""
        site_values = (
            {} if site is None else {name: getattr(site, name) for name in SiteTelemetrySpec.model_fields}
        )
        own = {name: value for name, value in self if value is not None}
        return TelemetrySpec(**(site_values | own))
