"""From a job file and command-line overrides to a resolved JobSpec and its Plan, or every mistake at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrun.errors import Problem, SpecError
from hpcrun.specs.corpus import PYTHON_STDLIB
from hpcrun.specs.job import NOT_YET, JobSpec
from hpcrun.specs.mistakes import nearest, problems_of, show
from hpcrun.specs.model import PRESETS, model_fields_from_hf
from hpcrun.specs.plan import Plan, contradictions, make_plan, with_layout
from hpcrun.specs.yaml import Document, load_document, parse_document, parse_value, render_document

_COMMAND_LINE = "command line"
_PATHS = (("data", "text"), ("data", "tokens"), ("model", "hf"), ("model", "weights"))
_SHORTHANDS = {"model": ("preset", "hf")}
"""Keys that stand for others, which take their place before the job is checked."""


@dataclass(frozen=True)
class ResolvedJob:
    """A job with nothing left to guess: the spec with all defaults, and the layout made from it."""

    spec: JobSpec
    plan: Plan
    document: Document = field(default=Document({}, {}), compare=False, repr=False)
    """Where its keys are written."""

    def mistake(self, key: str, text: str) -> SpecError:
        """A mistake that only a look at the machine shows, told with the place of its key."""
        return SpecError([Problem(key, text, self.document.where(key))])


def load_job(path: Path, overrides: Sequence[str] = ()) -> ResolvedJob:
    """Read a job file, apply `key.path=value` overrides, check everything; SpecError lists all mistakes.

    Paths in the file are relative to the file, those in overrides to the working directory.
    """
    return _resolve(load_document(path), overrides, path.absolute().parent)


def parse_job(text: str, name: str, overrides: Sequence[str] = ()) -> ResolvedJob:
    """The same for text that is already in memory; paths are relative to the working directory."""
    return _resolve(parse_document(text, name), overrides, Path.cwd())


def render_job(job: JobSpec) -> str:
    """The resolved spec as YAML, defaults included; load_job reads it back to the same job."""
    return render_document(job.model_dump(mode="json"))


def job_schema() -> dict[str, Any]:
    """JSON schema of the job file for editors; `model` may be a preset's name or build on one, or on hf."""
    schema = JobSpec.model_json_schema()
    model = schema["$defs"]["ModelSpec"]
    presets = {"enum": sorted(PRESETS), "description": "a known model; sizes beside it win"}
    model["properties"] |= {
        "preset": presets,
        "hf": {"type": "string", "description": "a Hugging Face directory with a Llama-family config.json"},
    }
    del model["required"]
    schema["properties"]["model"]["anyOf"].insert(0, presets)
    return schema


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys, for comparing two specs key by key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _resolve(document: Document, overrides: Sequence[str], base: Path) -> ResolvedJob:
    values = document.values
    _make_absolute(values, _PATHS, base)
    problems = [problem for text in overrides for problem in _override(document, text)]
    model_problems = _expand_model(values)
    problems += model_problems
    # A key with nothing after it, all its lines commented out, stands for its defaults.
    given = {key: v for key, v in values.items() if v is not None or key not in JobSpec.model_fields}
    broken = {"model"} if model_problems else set()
    try:
        job = JobSpec.model_validate(given)
    except ValidationError as error:
        problems += problems_of(error, JobSpec, shorthands=_SHORTHANDS, inherit=True)
        broken |= {str(details["loc"][0]) for details in error.errors(include_url=False)}
        job = JobSpec.model_validate({key: value for key, value in given.items() if key not in broken})
    reported = {problem.key for problem in problems}
    problems += [problem for problem in _not_yet(given) if problem.key not in reported]
    problems += [*_absent(job, broken), *contradictions(job, broken)]
    if problems:
        placed = [Problem(one.key, one.text, one.where or document.where(one.key)) for one in problems]
        raise SpecError(sorted(placed, key=_line))
    plan = make_plan(job)
    return ResolvedJob(with_layout(job, plan), plan, document)


def _line(problem: Problem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdecimal() else 0


def _make_absolute(values: dict[str, Any], keys: Iterable[tuple[str, ...]], base: Path) -> None:
    for section, key in keys:
        inner = values.get(section)
        if not isinstance(inner, dict):
            continue
        text = inner.get(key)
        if isinstance(text, str) and text not in ("", PYTHON_STDLIB):
            # unlike Path.expanduser, this one leaves the home of an unknown user as it is written
            inner[key] = str(base / os.path.expanduser(text))  # noqa: PTH111


def _override(document: Document, override: str) -> list[Problem]:
    dotted, equals, text = override.partition("=")
    *parents, last = path = dotted.split(".")
    if not equals or not all(path) or not dotted.isprintable() or " " in dotted:
        wanted = "is no override; write key.path=value, for instance train.lr=3e-4"
        return [Problem(json.dumps(override), wanted, _COMMAND_LINE)]
    try:
        value = parse_value(text, dotted, _COMMAND_LINE)
    except SpecError as error:
        return list(error.problems)
    place = document.values
    if parents[:1] == ["model"] and isinstance(place.get("model"), str):
        place["model"] = {"preset": place["model"]}
    for depth, parent in enumerate(parents, start=1):
        if place.get(parent) is None:
            place[parent] = {}
            document.places.setdefault(".".join(path[:depth]), _COMMAND_LINE)
        if not isinstance(place[parent], dict):
            text = f"{'.'.join(path[:depth])} is {show(place[parent])} and has no keys; set it as a whole"
            return [Problem(dotted, text, _COMMAND_LINE)]
        place = place[parent]
    place[last] = value
    document.places[dotted] = _COMMAND_LINE
    for below in [key for key in document.places if key.startswith(f"{dotted}.")]:
        del document.places[below]
    written = [key for key in _PATHS if ".".join(key) == dotted or key[0] == dotted]
    _make_absolute(document.values, written, Path.cwd())
    return []


def _expand_model(values: dict[str, Any]) -> list[Problem]:
    """Put the sizes of a preset or a Hugging Face directory in place; those written out win over a preset.

    What cannot be expanded gets the sizes of a stand-in, so that the other keys are still checked.
    """
    written = values.get("model")
    section = {"preset": written} if isinstance(written, str) else written
    if not isinstance(section, dict):
        return []
    preset, hf = section.pop("preset", None), section.pop("hf", None)
    fields: dict[str, Any] = {}
    problems: list[Problem] = []
    if preset is not None and hf is not None:
        problems = [Problem("model.hf", "stands beside preset; use one of the two")]
    elif hf is not None:
        fields, problems = _from_hf(hf, section)
    elif isinstance(preset, str) and preset in PRESETS:
        fields = PRESETS[preset]
    elif preset is not None:
        key = "model" if isinstance(written, str) else "model.preset"
        problems = [Problem(key, f"{show(preset)} is not known{nearest(str(preset), PRESETS)}")]
    section = (PRESETS["demo"] if problems else fields) | section
    values["model"] = section
    hidden, heads = section.get("hidden"), section.get("heads")
    if "head_dim" in section:
        return problems
    # Where one of the two is missing or wrong, that is the mistake, not the width that follows from them.
    section["head_dim"] = 2
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        section["head_dim"] = max(hidden // heads, 1)
        if hidden % heads:
            problems.append(
                Problem("model.heads", f"{heads} does not divide hidden {hidden}; or give head_dim")
            )
    return problems


def _from_hf(hf: Any, section: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    if not isinstance(hf, str) or not hf:
        return {}, [Problem("model.hf", f"must be the path of a directory, not {show(hf)}")]
    try:
        fields = model_fields_from_hf(Path(hf)) | {"weights": hf}
    except ValueError as error:
        return {}, [Problem("model.hf", str(error))]
    clashes = [key for key in fields if key in section and section[key] != fields[key]]
    text = "stands beside model.hf, which says {}; leave one of the two out"
    return fields, [Problem(f"model.{key}", text.format(show(fields[key]))) for key in clashes]


def _absent(job: JobSpec, broken: set[str]) -> list[Problem]:
    wanted = {
        "model": f"a preset ({', '.join(PRESETS)}), sizes, or hf: DIR",
        "data": "text: PATH or tokens: FILE",
    }
    missing = [key for key in wanted if getattr(job, key) is None and key not in broken]
    return [Problem(key, f"is missing; give {wanted[key]}") for key in missing]


def _not_yet(given: dict[str, Any]) -> list[Problem]:
    defaults = JobSpec().model_dump()
    text = "{} is not available in this version of hpcrun; leave it out"
    found = [(key, _value_at(given, key)) for key in NOT_YET]
    used = [(key, value) for key, value in found if value not in (None, _value_at(defaults, key))]
    return [Problem(key, text.format(show(value))) for key, value in used]


def _value_at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
