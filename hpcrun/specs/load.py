"""From a job file and overrides to a resolved job, its sweep included, or to every mistake at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcrun.errors import SpecError, SpecProblem, UsageError
from hpcrun.files import read_regular
from hpcrun.local_identity import absolute_path, working_directory
from hpcrun.specs.data import PYTHON_STDLIB
from hpcrun.specs.job import JobSpec
from hpcrun.specs.model import MODEL_PRESETS
from hpcrun.specs.plan import Plan
from hpcrun.specs.portable import portable_part
from hpcrun.specs.resolve import default_job_values, resolve_job_values
from hpcrun.specs.resources import SweepSpec
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sweep import expand_sweep
from hpcrun.specs.validation import format_value
from hpcrun.specs.yaml import YamlDocument, load_yaml, parse_yaml, parse_yaml_value, render_yaml

_COMMAND_LINE = "command line"
_PATHS = ("data.text", "data.tokens", "model.hf", "model.weights")
_ASKED = ("resources", "container", "modules", "python", "retry")
"""What the one batch script of a sweep asks for, so that its elements have to agree on it."""
_MOST_FOREIGN_BYTES = 1 << 20
_MAX_SHOWN_MISTAKES = 5
"""Mistakes in a sweep that are told one by one."""


@dataclass(frozen=True)
class ResolvedJob:
    """A job with nothing left to guess: the spec with all defaults, and the layout made from it."""

    spec: JobSpec
    """Of a sweep: the first element's, with `sweep` in it."""
    plan: Plan | None
    """None for a command, which trains by itself."""
    document: YamlDocument = field(default=YamlDocument({}, {}), compare=False, repr=False)
    """Where its keys are written."""
    elements: tuple[ResolvedJob, ...] = ()
    """Every element of a sweep as a job of its own; empty without one."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of an element: the dotted keys that it sets, and their values."""

    @property
    def training_plan(self) -> Plan:
        """The plan of a job that we train ourselves."""
        assert self.plan is not None
        return self.plan

    def mistake(self, key: str, text: str) -> SpecError:
        """A mistake that only a look at the machine shows, told with the place of its key."""
        return SpecError([SpecProblem(key, text, self.document.where(key))])

    def asking(self, resources: Mapping[str, Any]) -> ResolvedJob:
        """The same with these keys of `resources` set, in every element of a sweep too."""
        if not resources:
            return self
        resources_spec = self.spec.resources.model_copy(update=dict(resources))
        written = {**(self.document.values.get("resources") or {}), **resources}
        values = {**self.document.values, "resources": written}
        return replace(
            self,
            spec=self.spec.model_copy(update={"resources": resources_spec}),
            document=replace(self.document, values=values),
            elements=tuple(element.asking(resources) for element in self.elements),
        )

    def render(self) -> str:
        """The job as YAML, defaults included; load_job reads it back to the same, with the same elements."""
        if not self.elements:
            return render_job(self.spec)
        # The figures that each element settles for itself must stay open here.
        given = {key: value for key, value in self.document.values.items() if value is not None}
        return render_yaml(_with_defaults(default_job_values(), given))


def load_job(
    path: Path | None, overrides: Sequence[str] = (), *, command: Sequence[str] | None = None
) -> ResolvedJob:
    """Read a job file, apply `key.path=value` overrides, check everything; SpecError lists all mistakes.

    Paths in the file are relative to the file, those in overrides to the working directory. `command`
    takes the place of the file's, and needs no file.
    """
    document = load_yaml(path) if path else YamlDocument({}, {"": _COMMAND_LINE})
    if command is not None:
        document.values["command"] = list(command)
        document.places["command"] = _COMMAND_LINE
    return _resolve_document(document, overrides, absolute_path(path).parent if path else working_directory())


def load_run_job(run: RunDir, overrides: Sequence[str] = ()) -> ResolvedJob:
    """The job of a run, whose directory may be anybody's."""
    return _resolve_document(load_yaml(run.spec, follow=False), overrides, run.path)


def resolve_job(document: YamlDocument, base: Path) -> ResolvedJob:
    """The same for values that stand in no file of ours; relative paths in them are below `base`."""
    return _resolve_document(document, (), base)


def parse_job(text: str, name: str, overrides: Sequence[str] = ()) -> ResolvedJob:
    """The same for text that is already in memory; paths are relative to the working directory."""
    return _resolve_document(parse_yaml(text, name), overrides, working_directory())


def load_portable_job(path: Path, name: str) -> tuple[ResolvedJob, list[str]]:
    """The job beside a state from elsewhere, under a new name; only what describes the state is taken.

    Also gives the dotted keys that were left out. SpecError as load_job raises it.
    """
    document = parse_yaml(_foreign_text(path), str(path))
    kept, dropped = portable_part(document.values)
    if document.values.get("command") is not None:
        text = "a program is not taken from elsewhere, and there is no model to import into"
        raise SpecError(
            [SpecProblem("command", f"{text}; give your own job with --job", document.where("command"))]
        )
    kept.pop("name", None)
    return _resolve_document(
        YamlDocument(kept, document.places), [f"name={name}"], absolute_path(path).parent
    ), dropped


def _foreign_text(path: Path) -> str:
    try:
        return read_regular(path, _MOST_FOREIGN_BYTES).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not text in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def render_portable_job(path: Path) -> tuple[str, list[str]]:
    """What describes the state in the job of a run, as YAML, and the dotted keys that were left out."""
    kept, dropped = portable_part(load_yaml(path).values)
    return render_yaml(kept), dropped


def render_job(job: JobSpec) -> str:
    """The resolved spec as YAML, defaults included; load_job reads it back to the same job."""
    return render_yaml(job.model_dump(mode="json"))


def job_schema() -> dict[str, Any]:
    """JSON schema of the job file for editors; `model` may be a preset's name or build on one, or on hf."""
    schema = JobSpec.model_json_schema()
    model = schema["$defs"]["ModelSpec"]
    presets = {"enum": sorted(MODEL_PRESETS), "description": "a known model; sizes beside it win"}
    model["properties"] |= {
        "preset": presets,
        "hf": {"type": "string", "description": "a Hugging Face directory with a Llama-family config.json"},
    }
    del model["required"]
    schema["properties"]["model"]["anyOf"].insert(0, presets)
    return schema


def flatten_keys(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys, for comparing two specs key by key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _resolve_document(document: YamlDocument, overrides: Sequence[str], base: Path) -> ResolvedJob:
    _make_absolute(document.values, base)
    problems = [problem for text in overrides for problem in _apply_override(document, text)]
    if document.values.get("sweep") is not None:
        return _resolve_sweep(document, problems)
    job, plan, value_problems = resolve_job_values(document.values)
    _raise_problems([*problems, *value_problems], document)
    return ResolvedJob(job, plan, document)


def _raise_problems(problems: Sequence[SpecProblem], document: YamlDocument) -> None:
    """SpecError with all of them in the order of the lines where they stand; nothing without any."""
    placed = [
        SpecProblem(problem.key, problem.text, problem.where or document.where(problem.key))
        for problem in problems
    ]
    if placed:
        raise SpecError(sorted(placed, key=_line_number))


def _line_number(problem: SpecProblem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdecimal() else 0


def _make_absolute(values: dict[str, Any], base: Path) -> None:
    """Put `base` before every relative path of a job, those in its sweep included."""
    for section in ("data", "model", "secrets"):
        if section in values:
            values[section] = _with_base(section, values[section], base)
    sweep = values.get("sweep")
    if not isinstance(sweep, dict):
        return
    values["sweep"] = sweep = dict(sweep)
    for part in ("grid", "zip"):
        if isinstance(sweep.get(part), dict):
            sweep[part] = {
                key: [_with_base(key, entry, base) for entry in values]
                if isinstance(values, list)
                else values
                for key, values in sweep[part].items()
            }
    if isinstance(sweep.get("list"), list):
        sweep["list"] = [
            {key: _with_base(key, entry, base) for key, entry in row.items()}
            if isinstance(row, dict)
            else row
            for row in sweep["list"]
        ]


def _with_base(key: str, value: Any, base: Path) -> Any:
    if isinstance(value, dict):
        return {inner: _with_base(f"{key}.{inner}", entry, base) for inner, entry in value.items()}
    if not isinstance(value, str) or not (key in _PATHS or key.startswith("secrets.")):
        return value
    # unlike Path.expanduser, this one leaves the home of an unknown user as it is written
    return value if value in ("", PYTHON_STDLIB) else str(base / os.path.expanduser(value))  # noqa: PTH111


def _apply_override(document: YamlDocument, override: str) -> list[SpecProblem]:
    dotted, equals, text = override.partition("=")
    path = dotted.split(".")
    if not equals or not all(path) or not dotted.isprintable() or " " in dotted:
        usage = "is not an override; write key.path=value, for instance train.lr=3e-4"
        return [SpecProblem(json.dumps(override), usage, _COMMAND_LINE)]
    if path[0] == "sweep":  # what stands there are dotted keys
        path[2:] = [".".join(path[2:])] if path[2:] else []
    try:
        value = parse_yaml_value(text, dotted, _COMMAND_LINE)
    except SpecError as error:
        return list(error.problems)
    wrong = _set_key(document.values, path, value)
    if wrong:
        return [SpecProblem(dotted, f"{wrong}; set it as a whole", _COMMAND_LINE)]
    for depth in range(1, len(path)):
        document.places.setdefault(".".join(path[:depth]), _COMMAND_LINE)
    document.places[dotted] = _COMMAND_LINE
    for below in [key for key in document.places if key.startswith(f"{dotted}.")]:
        del document.places[below]
    # Every other path is absolute already.
    _make_absolute(document.values, working_directory())
    return []


def _set_key(values: dict[str, Any], path: Sequence[str], value: Any) -> str:
    """Set a key, in copies of the mappings on the way, which may be shared; says why when it cannot be."""
    *parents, last = path
    place = values
    for depth, parent in enumerate(parents, start=1):
        inner = place.get(parent)
        if path[:depth] == ["model"] and isinstance(inner, str):
            inner = {"preset": inner}
        if inner is not None and not isinstance(inner, dict):
            return f"{'.'.join(path[:depth])} is {format_value(inner)} and has no keys"
        place[parent] = place = dict(inner or {})
    place[last] = value
    return ""


def _with_defaults(plain: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, on top of the defaults."""
    inner = {
        key: _with_defaults(plain[key], value)
        for key, value in given.items()
        if isinstance(value, dict) and isinstance(plain.get(key), dict)
    }
    return {**plain, **given, **inner}


def _resolve_sweep(document: YamlDocument, problems: list[SpecProblem]) -> ResolvedJob:
    base = {key: value for key, value in document.values.items() if key != "sweep"}
    part, _, wrong = resolve_job_values({"sweep": document.values["sweep"]}, whole=False)
    sweep, chosen = part.sweep, []
    if sweep is not None:
        try:
            chosen = expand_sweep(sweep)
        except SpecError as error:
            wrong = list(error.problems)
    if sweep is None or wrong or problems:
        # The job may well be whole with its sweep alone: only what is wrong by itself is told.
        _raise_problems([*problems, *wrong, *resolve_job_values(base, whole=False)[2]], document)
    assert sweep is not None
    places = {key: place for key, place in document.places.items() if not key.startswith("sweep.")}
    elements: list[ResolvedJob] = []
    elements_of: dict[SpecProblem, list[int]] = {}
    for number, overrides in enumerate(chosen):
        values, found = _with_overrides(base, overrides)
        job, plan, job_problems = resolve_job_values(values)
        for problem in found or job_problems:
            elements_of.setdefault(problem, []).append(number)
        spots = {key: document.where(_sweep_location(sweep, key, value)) for key, value in overrides.items()}
        elements.append(ResolvedJob(job, plan, YamlDocument(values, places | spots), overrides=overrides))
    _raise_problems([*_merge_element_problems(elements_of, elements)], document)
    _raise_problems([*_disagreements(elements)], document)
    first = elements[0]
    return ResolvedJob(first.spec.model_copy(update={"sweep": sweep}), first.plan, document, tuple(elements))


def _with_overrides(
    values: dict[str, Any], overrides: dict[str, Any]
) -> tuple[dict[str, Any], list[SpecProblem]]:
    """The values with those of an element, sections before their keys, and what cannot be set."""
    result, problems = dict(values), []
    for dotted in sorted(overrides, key=lambda key: key.count(".")):
        wrong = _set_key(result, dotted.split("."), overrides[dotted])
        problems += [SpecProblem(dotted, f"{wrong}; sweep it as a whole")] if wrong else []
    return result, problems


def _sweep_location(sweep: SweepSpec, key: str, value: Any) -> str:
    """Where in the document a value of an element stands, as a dotted key."""
    for part, values in (("grid", sweep.grid.get(key)), ("zip", sweep.zip.get(key))):
        if values is not None:
            return f"sweep.{part}.{key}.{next(i for i, entry in enumerate(values) if entry is value)}"
    row = next(i for i, row in enumerate(sweep.list) if key in row and row[key] is value)
    return f"sweep.list.{row}.{key}"


def _merge_element_problems(
    elements_of: dict[SpecProblem, list[int]], elements: Sequence[ResolvedJob]
) -> Iterator[SpecProblem]:
    """Each mistake once: at the value of the sweep that it is in, or plainly when all have it alike."""
    count = 0
    for problem, numbers in elements_of.items():
        element = elements[numbers[0]]
        key = _find_swept_key(problem.key, element)
        if key is None and len(numbers) == len(elements):
            yield problem
            continue
        count += 1
        if count > _MAX_SHOWN_MISTAKES:
            continue
        who = f"element {numbers[0]}" + (f" and {len(numbers) - 1} more" if numbers[1:] else "")
        if key is not None:
            yield SpecProblem(f"sweep {problem.key}", f"{who}: {problem.text}", element.document.where(key))
            continue
        values = ", ".join(f"{key}={format_value(value)}" for key, value in element.overrides.items())
        yield SpecProblem("sweep", f"{who} ({values}): {problem.key}: {problem.text}")
    if count > _MAX_SHOWN_MISTAKES:
        yield SpecProblem("sweep", f"{count - _MAX_SHOWN_MISTAKES} more mistakes in its elements, not shown")


def _find_swept_key(key: str, element: ResolvedJob) -> str | None:
    """The key of the sweep that set this one, or a part of it, in an element."""
    above = [override for override in element.overrides if f"{key}.".startswith(f"{override}.")]
    below = [override for override in element.overrides if override.startswith(f"{key}.")]
    return next(iter([*above, *below]), None)


def _disagreements(elements: Sequence[ResolvedJob]) -> Iterator[SpecProblem]:
    """What elements ask of the cluster and not all alike, although they are one batch job."""
    first, reported = elements[0].spec, set()
    for number, element in enumerate(elements):
        if _cluster_request(element.spec) == _cluster_request(first):
            continue
        own, other = (flatten_keys(spec.model_dump(include=set(_ASKED))) for spec in (first, element.spec))
        differ = {key: (own.get(key), other.get(key)) for key in {**own, **other}}
        differ["ranks"] = (first.ranks, element.spec.ranks)
        differ["command"] = (first.command is None, element.spec.command is None)
        for key, (here, there) in differ.items():
            if here == there or key in reported:
                continue
            reported.add(key)
            difference = f"element {number} has {format_value(there)}, element 0 {format_value(here)}"
            if key == "command":
                difference = "some elements have one, some have none"
            text = f"{key}: {difference}; a sweep is one batch job, its elements must ask for the same"
            yield SpecProblem("sweep", text, element.document.where(_find_swept_key(key, element) or "sweep"))


def _cluster_request(spec: JobSpec) -> tuple[object, ...]:
    return (*(getattr(spec, key) for key in _ASKED), spec.ranks, spec.command is None)
