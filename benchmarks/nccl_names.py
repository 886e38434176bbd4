"""Whether the registry of variables knows every name inside a library of NCCL.

    pip download --no-deps nvidia-nccl-cu13
    python benchmarks/nccl_names.py nvidia_nccl_cu13-*.whl --names tests/data/nccl-X-strings.txt

The library is a wheel or a libnccl.so.2; without one it is the wheel that is installed here. A name is what
looks like one anywhere in the file; `strings` shows fewer, since some stand right behind other text.
"""

from __future__ import annotations

import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import harness

from hpcrun.tuning.registry.registry import format_version, variable_registry

_NAME = re.compile(rb"NCCL_[A-Z0-9_]+")
_RUN = re.compile(rb"[\x20-\x7e\t]{4,}")


def content(path: Path) -> bytes:
    """The library itself, taken out of its wheel where it is in one; ValueError where there is none."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        inside = [name for name in wheel.namelist() if name.endswith("libnccl.so.2")]
        if not inside:
            raise ValueError(f"{path} holds no libnccl.so.2")
        return wheel.read(inside[0])


def installed() -> Path | None:
    """The library of the wheel that is installed here."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        found = next(iter(metadata.distributions(name=name)), None)
        path = found.locate_file("nvidia/nccl/lib/libnccl.so.2") if found else None
        if path is not None and Path(str(path)).is_file():
            return Path(str(path))
    return None


def main() -> int:
    """Print what is not known, and one line a claim."""
    parser = harness.options(__doc__)
    parser.add_argument("library", nargs="?", type=Path, help="a wheel or a libnccl.so.2")
    parser.add_argument("--names", type=Path, metavar="FILE", help="also write all names to this file")
    arguments = parser.parse_args()
    path = arguments.library or installed()
    if path is None:
        return harness.fail("no library given and none installed; pip download --no-deps nvidia-nccl-cu13")
    try:
        data = content(path)
    except (OSError, ValueError) as error:
        return harness.fail(str(error))
    report = harness.Report("nccl_names")
    report.header()
    names = sorted({match.decode() for match in _NAME.findall(data)})
    starts = {found[0].decode() for run in _RUN.findall(data) if (found := _NAME.match(run))}
    known = variable_registry()
    for name in names:
        if name not in known.variables and name not in known.symbols:
            report.row(unknown=name, nearest=str(known.nearest(name)))
    if arguments.names:
        arguments.names.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    missing = len(report.rows)
    print(f"# {path.name}: {len(names)} names, {len(starts)} of them as `strings` begins a line")
    print(f"# the registry is that of {format_version(known.library)}")
    told = f"{len(names) - missing} of {len(names)}"
    report.claim("names in the library that the registry knows", told, "all", missing == 0)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
