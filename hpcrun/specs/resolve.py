"""From the values of a job file to a JobSpec and its Plan: short forms expanded, every check made."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrun.errors import SpecProblem
from hpcrun.mesh import AXES
from hpcrun.specs.job import UNSUPPORTED_KEYS, JobSpec
from hpcrun.specs.model import MODEL_PRESETS, model_fields_from_hf
from hpcrun.specs.plan import Plan, find_plan_problems, make_plan, with_layout
from hpcrun.specs.validation import format_value, problems_of_validation_error, suggest_allowed

_SHORTHANDS = {"model": ("preset", "hf")}
"""Keys that stand for others, which take their place before the job is checked."""


def resolve_job_values(
    values: dict[str, Any], *, whole: bool = True
) -> tuple[JobSpec, Plan | None, list[SpecProblem]]:
    """The job that these values make, its plan (None for a command), and all that is wrong with it.

    Without `whole` the values are those of a part, which may lack what a job must have. `values` is left as
    it is.
    """
    # A key with nothing after it, all its lines commented out, stands for its defaults.
    given = {key: v for key, v in values.items() if v is not None or key not in JobSpec.model_fields}
    problems = _expand_model(given)
    broken = {"model"} if problems else set()
    try:
        job = JobSpec.model_validate(given)
    except ValidationError as error:
        problems += problems_of_validation_error(error, JobSpec, shorthands=_SHORTHANDS, inherit=True)
        broken |= {str(details["loc"][0]) for details in error.errors(include_url=False)}
        job = JobSpec.model_validate({key: value for key, value in given.items() if key not in broken})
    reported = {problem.key for problem in problems}
    problems += [problem for problem in _find_unsupported_keys(given) if problem.key not in reported]
    if whole:
        problems += [*_find_missing_sections(job, broken), *_find_unused_sections(job, given)]
        reported = {problem.key for problem in problems}
        problems += [problem for problem in find_plan_problems(job, broken) if problem.key not in reported]
    if problems or not whole or job.command is not None:
        return job, None, problems
    plan = make_plan(job)
    return with_layout(job, plan), plan, []


@cache
def default_job_values() -> dict[str, Any]:
    """What every key of a job is when it is not given."""
    return JobSpec().model_dump(mode="json")


def _expand_model(values: dict[str, Any]) -> list[SpecProblem]:
    """Put the sizes of a preset or a Hugging Face directory in place; those written out win over a preset.

    What cannot be expanded gets the sizes of a stand-in, so that the other keys are still checked.
    """
    written = values.get("model")
    section = {"preset": written} if isinstance(written, str) else written
    if not isinstance(section, dict):
        return []
    preset, hf = section.get("preset"), section.get("hf")
    section = {key: value for key, value in section.items() if key not in _SHORTHANDS["model"]}
    fields: dict[str, Any] = {}
    problems: list[SpecProblem] = []
    if preset is not None and hf is not None:
        problems = [SpecProblem("model.hf", "cannot be combined with preset; use one of the two")]
    elif hf is not None:
        fields, problems = _model_from_hf(hf, section)
    elif isinstance(preset, str) and preset in MODEL_PRESETS:
        fields = MODEL_PRESETS[preset]
    elif preset is not None:
        key = "model" if isinstance(written, str) else "model.preset"
        problems = [
            SpecProblem(
                key, f"{format_value(preset)} is not known{suggest_allowed(str(preset), MODEL_PRESETS)}"
            )
        ]
    section = (MODEL_PRESETS["demo"] if problems else fields) | section
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
                SpecProblem("model.heads", f"{heads} does not divide hidden {hidden}; or give head_dim")
            )
    return problems


def _model_from_hf(hf: Any, section: dict[str, Any]) -> tuple[dict[str, Any], list[SpecProblem]]:
    if not isinstance(hf, str) or not hf:
        return {}, [SpecProblem("model.hf", f"must be the path of a directory, not {format_value(hf)}")]
    try:
        fields = model_fields_from_hf(Path(hf)) | {"weights": hf}
    except ValueError as error:
        return {}, [SpecProblem("model.hf", str(error))]
    clashes = [key for key in fields if key in section and section[key] != fields[key]]
    text = "cannot be combined with model.hf, which says {}; leave one of the two out"
    return fields, [SpecProblem(f"model.{key}", text.format(format_value(fields[key]))) for key in clashes]


def _find_missing_sections(job: JobSpec, broken: set[str]) -> list[SpecProblem]:
    if job.command is not None or "command" in broken:
        return []
    expected = {
        "model": f"a preset ({', '.join(MODEL_PRESETS)}), sizes, or hf: DIR",
        "data": "text: PATH or tokens: FILE, or a command instead of both",
    }
    missing = [key for key in expected if getattr(job, key) is None and key not in broken]
    return [SpecProblem(key, f"is missing; give {expected[key]}") for key in missing]


def _find_unused_sections(job: JobSpec, given: dict[str, Any]) -> list[SpecProblem]:
    """What our own training would read, and a command does not."""
    if job.command is None:
        return []
    values, plain = job.model_dump(mode="json"), default_job_values()
    # With memory the section is for those that serve a program's `hpcrun.Checkpointer`.
    keys = ["model", "data", "train", *([] if job.checkpoint.memory else ["checkpoint"]), "device"]
    keys += [f"parallel.{key}" for key in plain["parallel"] if key not in AXES]
    used = [
        key
        for key in keys
        if _value_at(given, key) is not None and _value_at(values, key) != _value_at(plain, key)
    ]
    return [
        SpecProblem(key, "cannot be combined with command, which trains by itself; leave one out")
        for key in used
    ]


def _find_unsupported_keys(given: dict[str, Any]) -> list[SpecProblem]:
    text = "{} is not available in this version of hpcrun; leave it out"
    keys = [
        key for key in UNSUPPORTED_KEYS if given.get("command") is None or not key.startswith("parallel.")
    ]
    entries = [(key, _value_at(given, key)) for key in keys]
    used = [
        (key, value) for key, value in entries if value not in (None, _value_at(default_job_values(), key))
    ]
    return [SpecProblem(key, text.format(format_value(value))) for key, value in used]


def _value_at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
