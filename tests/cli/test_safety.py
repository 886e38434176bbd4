"""No value of a job becomes shell code: every text field, filled with what hurts, up to the script run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from hpcrun.cli.main import main
from hpcrun.errors import UsageError
from hpcrun.specs.job import JobSpec
from hpcrun.submission.request import SubmissionRequest
from hpcrun.submission.submit import dry_run
from tests.slurm.test_template_scripts import BROKEN, HOSTILE, Bench, sbatch_words

VALUES = (
    *HOSTILE,
    *BROKEN,
    "-x",
    "--wrap=touch x",
    "%j",
    "$(touch x)/../%t",
    "{{ 7 * 7 }}",
    "{% set x = 1 %}",
)
EVERYWHERE = (
    "$(touch x)",
    "`touch x`",
    "'; touch x; '",
    '"; touch x; "',
    "\\",
    "a\ntouch x\n",
    "é\u2028touch x",
    "-x",
    "{{ 7 * 7 }}",
)
"""For every field there is."""
BASE: dict[str, Any] = {"command": ["echo"], "container": {"image": "i", "runtime": "apptainer"}}

Fill = Callable[[str], Any]
"""Puts a value where a field holds text: as itself, in a list, behind a key, or as a key."""


def texts(annotation: Any, fill: Fill = lambda value: value) -> Iterator[Fill]:
    """Every way in which a field of this type takes text."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is str:
        yield fill
    elif origin is list:
        yield from texts(arguments[0], lambda value: [fill(value)])
    elif origin is dict:
        yield from texts(arguments[1], lambda value: {"A": fill(value)})
        yield lambda value: {value: "1"}
    else:
        for argument in arguments:
            yield from texts(argument, fill)


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections(argument)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Fill]]:
    """Every text field of a job, by its dotted key."""
    for name, field in model.model_fields.items():
        for fill in texts(field.annotation):
            yield f"{prefix}{name}", fill
        for section in sections(field.annotation):
            yield from fields(section, f"{prefix}{name}.")


FIELDS = list(fields(JobSpec))


def nested(key: str, value: Any) -> dict[str, Any]:
    """A job that is plain but for one field."""
    first, _, rest = key.partition(".")
    inner = value if not rest else nested_in(BASE.get(first, {}), rest, value)
    return BASE | {first: inner}


def nested_in(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return base | {first: nested_in({}, rest, value) if rest else value}


def rendered(job: dict[str, Any], *overrides: str) -> str | None:
    """The script of a job, or None where it is refused, each mistake in one line."""
    path = Path("job.yaml")
    path.write_text(json.dumps(job), encoding="utf-8")
    request = SubmissionRequest(job=path, overrides=overrides, slurm_version="22.05")
    refused = ""
    try:
        script = dry_run(request, lambda _: None).script
    except UsageError as error:
        script, refused = None, str(error)
    lines = [line for line in refused.split("\n") if "is missing" not in line]
    assert all(line.startswith(("job.yaml", "command line", "resources.", "'")) for line in lines if line)
    assert len(lines) <= 2
    return script


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An empty directory where scripts run with stand-ins, and an empty one to submit from."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    place = tmp_path / "from"
    place.mkdir()
    monkeypatch.chdir(place)
    found = Bench(tmp_path)
    monkeypatch.setitem(BASE, "python", str(found.bin / "launch"))
    return found


def run(bench: Bench, script: str, runs_root: Path) -> None:
    """Run a script; nothing but the stand-ins may have been run by it."""
    (runs_root / "run-dry-run").mkdir(parents=True, exist_ok=True)
    bench.run(script)
    assert [path.name for path in bench.work.iterdir()] == []
    assert [path.name for path in Path.cwd().iterdir()] == ["job.yaml"]


def options(script: str) -> list[str]:
    lines = [line for line in script.split("\n") if line.startswith("#SBATCH")]
    words = [sbatch_words(line) for line in lines]
    assert all(len(one) == 1 for one in words), "one option a line"
    return [one[0] for one in words]


def test_the_fields_are_found() -> None:
    keys = {key for key, _ in FIELDS}
    wanted = {"name", "command", "python", "env", "modules", "secrets", "cluster", "container.image"}
    assert wanted | {"resources.account", "resources.sbatch", "container.mounts", "data.text"} <= keys


@pytest.mark.parametrize(("key", "fill"), [pytest.param(*field, id=f"{field[0]}") for field in FIELDS])
def test_no_field_is_run(key: str, fill: Fill, bench: Bench, runs_root: Path) -> None:
    for value in EVERYWHERE:
        script = rendered(nested(key, fill(value)))
        if script is not None:
            assert "49" not in options(script)
            run(bench, script, runs_root)


@pytest.mark.parametrize("value", VALUES)
def test_values_arrive_as_they_are(value: str, bench: Bench, runs_root: Path) -> None:
    script = rendered(BASE | {"env": {"A": value}, "command": ["echo", value]})
    assert script is not None
    run(bench, script, runs_root)
    assert f"A={value}" in bench.words("env")
    assert bench.words("launch")[:5] == ["-P", "-u", "-m", "hpcrun", "_task"]
    for key in ("account", "partition", "constraint", "reservation", "sbatch.comment"):
        job = nested(f"resources.{key}", value)
        shown = rendered(job)
        refused = value in BROKEN or "`" in value
        assert refused or not value or shown is not None, "all else is taken"
        if shown is not None and value:
            assert not refused
            assert f"--{key.rpartition('.')[2]}={value}" in options(shown)


@pytest.mark.parametrize("value", [one for one in VALUES if one not in BROKEN and one])
def test_overrides_are_values_too(
    value: str, bench: Bench, runs_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(json.dumps(BASE), encoding="utf-8")
    words = [f"env.A={json.dumps(value)}", f"resources.sbatch.gres={json.dumps(value)}", f"name={value}"]
    with pytest.raises(SystemExit) as left:
        main(["submit", "job.yaml", "--dry-run", "--slurm-version", "22.05", *words])
    out, err = capfd.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("hpcrun: command line name: ")
    script = rendered(BASE, *words[:2])
    assert (script is None) == ("`" in value)
    if script is None:
        return
    run(bench, script, runs_root)
    assert f"A={value}" in bench.words("env")
    assert f"--gres={value}" in options(script)


@pytest.mark.parametrize("value", [one for one in HOSTILE if one and one.isprintable()])
def test_the_place_of_the_run_is_a_value(
    value: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / value.replace("/", "_")
    monkeypatch.setenv("HPCRUN_ROOT", str(root))
    with pytest.raises(UsageError) if "`" in value else nullcontext():
        script = dry_run(
            SubmissionRequest(command=("echo",), overrides=(f"python={BASE['python']}",)), lambda _: None
        ).script
        Path("job.yaml").touch()
        run(bench, script, root)
        assert bench.words("launch")[5] == f"{root}/run-dry-run/submitit"
