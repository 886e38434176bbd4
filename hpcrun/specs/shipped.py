"""Where the files lie that come with the package: example jobs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import hpcrun
from hpcrun.errors import UsageError


def shipped(name: str) -> Path:
    """The path of a file below templates/, such as `jobs/demo.yaml`; UsageError lists what there is."""
    found = importlib.util.find_spec("hpcrun.templates")
    # Without an installation, templates/ stands beside the package in the checkout.
    places = found.submodule_search_locations if found else [Path(hpcrun.__path__[0]).parent / "templates"]
    root = Path(next(iter(places or ())))
    path = root / name
    if not path.is_file():
        known = sorted(str(file.relative_to(root)) for file in root.glob("*/*.yaml"))
        raise UsageError(f"{name} does not come with hpcrun; there are {', '.join(known)}")
    return path
