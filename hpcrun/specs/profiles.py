"""Where profiles of clusters lie, and the little of them that a quick verb needs, read without pydantic."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcrun.errors import SpecError, SpecProblem
from hpcrun.local_identity import expand_path
from hpcrun.specs.shipped import shipped_file


def config_directories() -> dict[str, Path]:
    """Where people keep templates and profiles, nearest first: user, site, shipped; they need not exist."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return {
        "user": Path(expand_path(config)) / "hpcrun",
        "site": Path(os.environ.get("HPCRUN_SITE") or "/etc/hpcrun"),
        "shipped": shipped_file("jobs/demo.yaml").parents[1],
    }


def list_profiles() -> list[Path]:
    """Every profile of the user and of the site; a user's file hides the site's of the same name."""
    profiles: dict[str, Path] = {}
    for origin, directory in config_directories().items():
        if origin != "shipped":
            for path in sorted((directory / "profiles").glob("*.yaml")):
                profiles.setdefault(path.name, path)
    return list(profiles.values())


def profile_roots() -> list[Path | None]:
    """Where the clusters' runs are made: first as the default profile says (None: nothing), then the others.

    SpecError where a profile is damaged or its root names a variable that is not set.
    """
    profiles = list_profiles()
    # Reading YAML takes longer than everything else that a quick verb does.
    if not any(map(_may_name_a_root, profiles)):
        return [None]
    from hpcrun.specs.yaml import load_yaml

    documents = {path: load_yaml(path) for path in profiles}
    chosen = [
        path for path, document in documents.items() if document.values.get("default") is True
    ] or profiles
    default = chosen[0] if len(chosen) == 1 else None
    roots = {
        path: _parse_root(document.values, document.where("root")) for path, document in documents.items()
    }
    others = [root for path, root in roots.items() if path != default and root is not None]
    return [roots[default] if default else None, *others]


def _may_name_a_root(profile: Path) -> bool:
    try:
        return b"root" in profile.read_bytes()
    except OSError:
        return True


def _parse_root(values: dict[str, Any], where: str) -> Path | None:
    given = values.get("root")
    if not isinstance(given, str):
        return None
    path = expand_path(given)
    if not os.path.isabs(path):  # noqa: PTH117
        text = f"{given!r} is not an absolute path here; set the variable that it names, or HPCRUN_ROOT"
        raise SpecError([SpecProblem("root", text, where)])
    return Path(path)
