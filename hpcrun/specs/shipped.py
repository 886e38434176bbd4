"""Where the files lie that come with the package: example jobs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hpcrun.errors import UsageError


def shipped_file(name: str) -> Path:
    """The path of a file below templates/, such as `jobs/demo.yaml`; UsageError lists what there is."""
    installed = importlib.util.find_spec("hpcrun.templates")
    if installed is not None and installed.origin is not None:
        root = Path(installed.origin).parent
    else:  # a checkout that runs without an installation
        root = Path(__file__).parents[2] / "templates"
    path = root / name
    if not path.is_file():
        names = sorted(str(file.relative_to(root)) for file in root.glob("*/*.yaml"))
        raise UsageError(f"{name} does not come with hpcrun; there are {', '.join(names)}")
    return path
