"""Settings: the communication settings of a job, with reasons, for all and by node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.specs.records import read_json, write_json


@dataclass(frozen=True)
class CommSetting:
    """One environment variable, and why it has this value."""

    name: str
    value: str
    reason: str
    source: str
    """Where the value is from, such as `profile: network.interface`."""
    needs: str = ""
    """The release that reads it, such as `NCCL 2.21`; empty: any."""

    def __str__(self) -> str:
        needs = f", needs {self.needs}" if self.needs else ""
        return f"{self.name}={self.value}  # {self.reason} ({self.source}{needs})"


@dataclass(frozen=True)
class OverriddenSetting:
    """A variable that somebody has set already: theirs stands, ours is only told."""

    name: str
    value: str
    ours: str
    by: str
    """The job's env, or the environment."""

    def __str__(self) -> str:
        return f"{self.name}={self.value} stands, as {self.by} has it; it would be {self.ours}"


@dataclass(frozen=True)
class CommSettings:
    """All of them as one value: prints, dumps to JSON and reads back."""

    everywhere: tuple[CommSetting, ...] = ()
    by_node: Mapping[str, tuple[CommSetting, ...]] = field(default_factory=dict)
    """What holds on one node alone."""
    overruled: tuple[OverriddenSetting, ...] = ()
    notes: tuple[str, ...] = ()
    """What was left alone, and why."""

    def environment(self) -> dict[str, str]:
        """What every rank gets."""
        return {setting.name: setting.value for setting in self.everywhere}

    def of_node(self, node: str) -> dict[str, str]:
        """What the ranks of a node get in addition; a name with its domain stands for the short one."""
        short = node.partition(".")[0]
        settings = next((of for name, of in self.by_node.items() if name.partition(".")[0] == short), ())
        return {setting.name: setting.value for setting in settings}

    def all(self) -> tuple[CommSetting, ...]:
        """Each of them, whichever node it is for."""
        return (*self.everywhere, *(setting for of in self.by_node.values() for setting in of))

    def without_variables(self, taken: Mapping[str, str], by: str) -> CommSettings:
        """The same without the variables that are set already; these are told as overruled."""

        def left(settings: Iterable[CommSetting]) -> tuple[CommSetting, ...]:
            return tuple(setting for setting in settings if setting.name not in taken)

        lost = {setting.name: setting for setting in self.all() if setting.name in taken}
        overruled = [
            OverriddenSetting(name, taken[name], setting.value, by) for name, setting in lost.items()
        ]
        nodes = {node: left(of) for node, of in self.by_node.items()}
        return CommSettings(
            left(self.everywhere),
            {node: of for node, of in nodes.items() if of},
            (*self.overruled, *overruled),
            self.notes,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "settings": [asdict(setting) for setting in self.everywhere],
            "by_node": {node: [asdict(setting) for setting in of] for node, of in self.by_node.items()},
            "overruled": [asdict(setting) for setting in self.overruled],
            "notes": list(self.notes),
        }


def write_comm_settings(path: Path, settings: CommSettings) -> None:
    """Put settings in their file."""
    write_json(path, settings.as_json())


def read_comm_settings(path: Path) -> CommSettings | None:
    """The settings of a file, or None where there is none; UsageError for a damaged one."""
    record = read_json(path)
    if record is None:
        return None
    try:
        return parse_comm_settings(record)
    except (KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{path}: holds no settings of this version of hpcrun; start the run again"
        ) from None


def parse_comm_settings(record: Mapping[str, Any]) -> CommSettings:
    """Settings from as_json's values."""
    return CommSettings(
        tuple(CommSetting(**setting) for setting in record["settings"]),
        {node: tuple(CommSetting(**setting) for setting in of) for node, of in record["by_node"].items()},
        tuple(OverriddenSetting(**setting) for setting in record["overruled"]),
        tuple(record["notes"]),
    )
