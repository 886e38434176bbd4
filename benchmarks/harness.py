"""What every script here shares: its options, the header, and the one line a claim."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all scripts have; SIGTERM unwinds and cleans up from now on."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and cases, about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    return parser


@dataclass
class Report:
    """Collects rows and claims, prints them as they come, and writes them out at the end."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)

    def header(self) -> None:
        """Say on which machine and with which versions the figures were taken."""
        packages = ("hpcrun-slurm", "torch", "numpy", "mpi4py", "mpich")
        print(f"# {self.name}")
        print(f"# python {platform.python_version()}, " + ", ".join(f"{p} {version(p)}" for p in packages))
        cores = len(os.sched_getaffinity(0))
        print(f"# {_processor()}, {cores} cores, load {os.getloadavg()[0]:.1f}", flush=True)

    def row(self, **values: Any) -> None:
        """One line of the table."""
        if not self.rows:
            print("# " + " | ".join(values))
        self.rows.append(values)
        print(" | ".join(_shown(value) for value in values.values()), flush=True)

    def claim(self, what: str, figure: float | str, target: str, met: bool) -> None:
        """One line that the README's table is made from."""
        shown = figure if isinstance(figure, str) else f"{figure:.4g}"
        self.claims.append({"claim": what, "figure": shown, "target": target, "met": met})
        print(f"{what}: {shown} (target {target}): {'met' if met else 'missed'}", flush=True)

    def write(self, path: Path | None) -> None:
        """Write everything as JSON if a file was asked for."""
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def spread(values: Sequence[float]) -> str:
    """Median with the smallest and the largest value."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def fail(message: str) -> int:
    """Say that nothing could be measured, and why; the exit code for that."""
    sys.stderr.write(f"could not measure: {message}\n")
    return 1
