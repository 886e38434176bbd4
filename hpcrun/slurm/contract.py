"""What a template is given, and what its script must keep so that submission, signals and requeue work."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any, Literal

from jinja2.exceptions import TemplateRuntimeError
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hpcrun.errors import SpecProblem, UsageError
from hpcrun.slurm.batch_options import FIXED, BatchOption, last_of, read_options, replaced
from hpcrun.slurm.client import run_client
from hpcrun.slurm.syntax import profile_errors, syntax_error
from hpcrun.slurm.template import SUFFIX, Library, Template, as_code, for_sbatch, quoted_words, read_source
from hpcrun.slurm.versions import GATES, accepts, parse_version
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.fields import (
    Line,
    Module,
    Mount,
    Name,
    Option,
    Pattern,
    Place,
    Text,
    given,
    taken_away,
)

MOST_BYTES = 4 * 2**20
"""sbatch refuses a larger script."""


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ArrayContext(_Value):
    """The elements of one array submission."""

    indices: str = Field(pattern=r"^[0-9][0-9,:%-]*$", description="as sbatch --array takes them: 0-39%8")
    offset: int = Field(default=0, ge=0, description="element = array index + offset, when a sweep is cut up")


class ContainerContext(_Value):
    """The container of the ranks."""

    runtime: Literal["pyxis", "apptainer", "singularity"] = Field(description="what runs it")
    image: Line = Field(description="image file or URI, as the runtime takes it")
    mounts: list[Mount] = Field(
        default=[], description="SOURCE:TARGET[:ro]; the run directory comes by itself"
    )
    workdir: Line | None = Field(default=None, description="working directory inside")
    options: list[Line] = Field(default=[], description="further words for the runtime")
    gpus: bool = Field(default=False, description="the ranks use GPUs")


class ScriptContext(_Value):
    """What a template gets for one job; every value is data and is quoted, except the admin's own lines."""

    name: Line = Field(description="the job's name")
    run_id: Line = Field(description="the run's id")
    run_dir: Place = Field(description="the run directory, absolute")
    launch: list[Text] = Field(min_length=1, description="the one command of the launch block, as words")
    stdout: Line = Field(
        description="log pattern: .../%j_%t_log.out, in arrays .../%A_%a_%t_log.out; %t: task"
    )
    stderr: Line | None = Field(default=None, description="the same for errors; null: into stdout")
    directives: dict[Option, Line | int | Literal[True]] = Field(
        default={}, description="sbatch options in order: nodes, time, ...; true: an option without value"
    )
    signal: Literal["USR1", "USR2"] = Field(default="USR2", description="sent before the time limit")
    grace_s: int = Field(default=120, ge=1, description="how many seconds before")
    requeue: bool = Field(default=False, description="the job may be queued again under its own id")
    array: ArrayContext | None = Field(default=None, description="null unless this is an array")
    ranks_per_node: int = Field(default=1, ge=1, description="ranks on each node")
    container: ContainerContext | None = Field(default=None, description="null: ranks run on the host")
    modules: list[Module] = Field(default=[], description="environment modules to load, in order")
    module_purge: bool = Field(default=False, description="`module purge` first")
    module_init: list[Text] = Field(default=[], description="the admin's lines that define `module`")
    env: dict[Name, Text] = Field(default={}, description="environment of the job; never holds a secret")
    env_unset: list[Name] = Field(default=[], description="variables that are unset for the job")
    env_deny: list[Pattern] = Field(
        default=[], description="patterns of variables that sbatch is not to pass on; for what submits"
    )
    setup_lines: list[Text] = Field(default=[], description="the admin's lines before the job")
    teardown_lines: list[Text] = Field(default=[], description="the admin's lines after the job")
    cluster: ClusterSpec | None = Field(default=None, description="the profile; null where there is none")
    slurm_version: str | None = Field(default=None, description="release the script is for; null: unknown")

    @model_validator(mode="after")
    def _mountable(self) -> ScriptContext:
        if self.container is not None and re.search("[,:]", self.run_dir):
            raise ValueError(
                f"{self.run_dir}: a run directory with , or : cannot be mounted into a container"
            )
        return self

    def values(self) -> dict[str, Any]:
        """By name, as templates see them; `accepts(feature)` answers for the Slurm release."""
        values = self.model_dump()
        for key in ("module_init", "setup_lines", "teardown_lines"):
            values[key] = [as_code(line) for line in values[key]]
        return values | {"accepts": self._accepts}

    def _accepts(self, feature: str) -> bool | None:
        known = next((one for one in GATES if one == feature), None)
        if known is None:
            raise TemplateRuntimeError(f"accepts: {feature!r} is not known; there are: {', '.join(GATES)}")
        return accepts(parse_version(self.slurm_version or ""), known)


def describe_context() -> list[tuple[str, str, str]]:
    """Name, type and meaning of everything that a template gets, nested values with a dot."""
    rows = [*_describe(ScriptContext, "")]
    return [*rows, ("accepts(feature)", "bool | null", f"the release has it: {', '.join(GATES)}")]


def _describe(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        kinds = [properties[name], *properties[name].get("anyOf", [])]
        words = [one.get("type", "mapping" if "$ref" in one else "") for one in kinds]
        words = ["mapping" if word == "object" else "list" if word == "array" else word for word in words]
        yield f"{prefix}{name}", " | ".join(dict.fromkeys(filter(None, words))), field.description or ""
        for inner in (ArrayContext, ContainerContext):
            if inner in getattr(field.annotation, "__args__", ()):
                yield from _describe(inner, f"{name}.")


def from_profile(cluster: ClusterSpec | None) -> dict[str, Any]:
    """The part of a ScriptContext that the profile gives; the job's own modules and env come on top."""
    if cluster is None:
        return {}
    return {
        "cluster": cluster,
        "modules": cluster.modules.load,
        "module_purge": cluster.modules.purge,
        "module_init": cluster.modules.init,
        "env": given(cluster.env),
        "env_unset": taken_away(cluster.env),
        "env_deny": cluster.env_deny,
        "setup_lines": cluster.setup,
        "teardown_lines": cluster.teardown,
        "slurm_version": cluster.slurm_version,
    }


def render_script(library: Library, template: Template, context: ScriptContext) -> str:
    """The batch script of one job."""
    return library.render(template, context.values())


def fixture(
    library: Library, template: Template, cluster: ClusterSpec | None = None, slurm_version: str | None = None
) -> ScriptContext:
    """An invented job of the kind that a template is for, with all that a job can have."""
    layers = library.chain(template)
    is_array = _extends(layers, "array")
    runtime: Literal["pyxis", "apptainer"] = "pyxis" if "pyxis" in template.name else "apptainer"
    site = from_profile(cluster)
    version = slurm_version or site.get("slurm_version")
    run_dir = "/scratch/user/runs/fixture-0101-120000-abcdef"
    directives: dict[str, str | int | Literal[True]] = {"nodes": 2, "ntasks-per-node": 4, "time": 60}
    if cluster is not None and cluster.default_partition is not None:
        directives["partition"] = cluster.default_partition
    if not is_array and accepts(parse_version(version or ""), "segment"):
        directives["segment"] = 2
    directives |= {"exclusive": True, "comment": "two words"}
    submission = ["/opt/python/bin/python", "-u", "-m", "submitit.core._submit", f"{run_dir}/submitit"]
    pattern = f"{run_dir}/submitit/{'%A_%a' if is_array else '%j'}_%t_log"
    return ScriptContext.model_validate(
        site
        | {
            "name": "fixture",
            "run_id": run_dir.rpartition("/")[2],
            "run_dir": run_dir,
            "launch": submission,
            "stdout": f"{pattern}.out",
            "stderr": f"{pattern}.err",
            "directives": directives,
            "requeue": True,
            "array": ArrayContext(indices="0-39%8", offset=1000) if is_array else None,
            "ranks_per_node": 4,
            "container": ContainerContext(
                runtime=runtime, image="/images/pytorch.sif", mounts=["/scratch:/scratch"], gpus=True
            ),
            "modules": [*site.get("modules", []), "gcc/12.2"],
            "env": {**site.get("env", {}), "OMP_NUM_THREADS": "8", "GREETING": "two words"},
            "slurm_version": version,
        }
    )


def _extends(layers: Iterable[Template], name: str) -> bool:
    return any(layer.name == f"{name}{SUFFIX}" for layer in layers)


@dataclass(frozen=True)
class _Script:
    """A rendered script, its logical lines (backslash continuations joined), and the job it is for."""

    text: str
    lines: tuple[tuple[int, str], ...]
    context: ScriptContext
    launch_at: int | None
    """Index into `lines` of the line that launches; None where it is not there once."""

    @property
    def options(self) -> dict[str, str]:
        """The sbatch options in force as they are written: of several of one name the last."""
        found: dict[str, str] = {}
        for one in self.given:
            # Of an option that has a line to itself the quotes are kept.
            alone = re.match(r"#SBATCH\s+--([a-z-]+)(?:[=\s]\s*(.*))?$", one.line)
            is_alone = alone is not None and len(read_options([one.line])) == 1
            value = (alone[2] or "").strip() if alone is not None and is_alone else one.value
            found.pop(one.name, None)
            found[one.name] = value
        return found

    @property
    def given(self) -> list[BatchOption]:
        """All sbatch options in their order."""
        return read_options(line for _, line in self.lines)

    @property
    def command(self) -> str:
        return "" if self.launch_at is None else self.lines[self.launch_at][1].strip()


def _parse_script(text: str, context: ScriptContext) -> _Script:
    lines: list[tuple[int, str]] = []
    begun: tuple[int, str] | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        first, before = begun or (number, "")
        begun = (first, before + line[:-1]) if line.endswith("\\") else None
        if begun is None:
            lines.append((first, before + line))
    words = quoted_words(context.launch)
    at = [i for i, (_, line) in enumerate(lines) if words in line and not line.lstrip().startswith("#")]
    return _Script(text, tuple(lines), context, at[0] if len(at) == 1 else None)


Rule = Callable[[_Script], Iterator[tuple[str, str]]]
"""Yields what is wrong as (place, what to do): a block, `line:` and the line itself, `profile:` and the key,
or nothing where the whole file is meant."""


def _shape(script: _Script) -> Iterator[tuple[str, str]]:
    if not re.match(r"#!\s*/\S*(/bash|env bash)\b", script.text):
        yield "directives", "the script does not begin with #!/bin/bash"
    if "\r" in script.text:
        yield "directives", "the script holds a carriage return; sbatch refuses Windows line ends"
    if len(script.text.encode()) >= MOST_BYTES:
        yield (
            "directives",
            f"the script has {len(script.text.encode())} bytes; sbatch takes less than {MOST_BYTES}",
        )
    begun = False
    for _, line in script.lines:
        if begun and line.startswith("#SBATCH"):
            yield f"line:{line}", f"sbatch ignores a directive after the first command: {line}"
        begun = begun or bool(line.strip() and not line.lstrip().startswith("#"))


_COUNTS = "the run counts on its nodes and ranks"
_REASONS = {
    "time": "what is done before the limit depends on it",
    "time-min": "Slurm would shorten the job's time, and what is done before the limit depends on it",
    "array": "elements and their files are counted by it",
    "clusters": "the job would be looked for elsewhere; the profile's slurm_cluster says where it goes",
    "dependency": "the job waits for what it asks, and nothing else",
    "wait": "sbatch would not return",
}


def _directives(script: _Script) -> Iterator[tuple[str, str]]:
    options, context = script.options, script.context
    for option, pattern in (("output", context.stdout), ("error", context.stderr)):
        wanted = None if pattern is None else for_sbatch(quoted_words([pattern.replace("%t", "0")]))
        if wanted is not None and options.get(option) != wanted:
            yield (
                "directives",
                f"--{option} must be the job's pattern, or logs cannot be found: --{option}={wanted}",
            )
    if options.get("open-mode") != "append":
        yield "directives", "--open-mode=append is missing: a requeued job would overwrite its log"
    yield from _sizes(script)
    last = [o for o in options if o in ("requeue", "no-requeue")][-1:]
    if last != ["requeue" if context.requeue else "no-requeue"] and (context.requeue or last):
        told = "--requeue is missing" if context.requeue else "--requeue stands although the job forbids it"
        yield "directives", f"{told}: write it under {{% if requeue %}}"


def _sizes(script: _Script) -> Iterator[tuple[str, str]]:
    """What the run counts on: the job's own value, or none where it asks for none."""
    asked = _asked(script.context)
    for name, one in last_of(script.given).items():
        if name not in FIXED or (name == "time" and "time" not in asked):
            continue
        if name not in asked:
            yield "directives", f"{one} must not stand here: {_REASONS.get(name, _COUNTS)}"
        elif one.value != asked[name]:
            wanted = f"--{name}" + (f"={asked[name]}" if asked[name] else "")
            reason = _REASONS.get(name, _COUNTS)
            yield "directives", f"--{name} must be the job's: {wanted}, and not {one.value}: {reason}"
    present = {one.name for one in script.given}
    for name in asked:
        if name in FIXED and name not in present:
            yield "directives", f"--{name} must be the job's: --{name}={asked[name]} is missing"


def _asked(context: ScriptContext) -> dict[str, str]:
    """What the job asks of sbatch, as text."""
    asked = {name: "" if value is True else str(value) for name, value in context.directives.items()}
    return asked | ({"array": context.array.indices} if context.array is not None else {})


def replaced_directives(context: ScriptContext, text: str) -> list[str]:
    """What a template's script has in the place of what the job asks, one line each."""
    lines = _parse_script(text, context).lines
    return [
        f"the template's {one} replaces the job's {wanted}: sbatch takes the last of two"
        for wanted, one in replaced(read_options(line for _, line in lines), _asked(context))
    ]


def _signals(script: _Script) -> Iterator[tuple[str, str]]:
    context, given = script.context, script.options.get("signal", "")
    wanted = f"B:{context.signal}@{context.grace_s}"
    if given != wanted:
        reason = "the batch shell must get it"
        yield "directives", f"--signal={given or '(none)'} must be --signal={wanted}: {reason}"
    if script.launch_at is None:
        return
    traps = [line for _, line in script.lines[: script.launch_at] if re.match(r"\s*trap\s", line)]
    after = [line for _, line in script.lines[script.launch_at + 1 :]]
    for name in ("USR1", "USR2", "TERM"):
        if not any(re.search(rf"\b{name}\b", line) for line in traps):
            yield "signals", f"no trap hands {name} on to the command; keep the shipped block signals"
    knows = any(re.match(r"\s*hpcrun_child=\$", line) for line in after)
    if not knows and traps and "hpcrun_forward" in traps[-1]:
        yield "launch", "hpcrun_child=$! must follow the command, or no signal is handed on to it"
    if not script.command.endswith("&") or not any(re.match(r"\s*wait\b", line) for line in after):
        yield "launch", "the command must run in the background (&) with a wait after it, or no trap can run"


def _launch(script: _Script) -> Iterator[tuple[str, str]]:
    if not re.search(r"^\s*export SUBMITIT_EXECUTOR=slurm\s*$", script.text, re.MULTILINE):
        yield "environment", "`export SUBMITIT_EXECUTOR=slurm` is missing: the job would not find itself"
    if script.launch_at is None:
        yield "launch", "{{ launch }} must stand in it once, as a command of its own"
    elif script.command.split()[0] in ("srun", "mpirun", "mpiexec"):
        yield (
            "launch",
            "the command is the supervisor: it runs once, in the batch shell, without srun or mpirun",
        )


_SECRET = r"[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)"
_SECRET_LITERAL = re.compile(
    rf"^\s*(?:export\s+|declare\s+-x\s+)?({_SECRET})=(?!['\"]?(?:\$|['\"]?\s*$))\S.*", re.M | re.I
)


def _secrets(script: _Script) -> Iterator[tuple[str, str]]:
    for match in _SECRET_LITERAL.finditer(script.text):
        line = match[0].strip()
        yield f"line:{line}", f"{match[1]} is written out; secrets are read from a 0600 file at run time"
    for name, value in os.environ.items():
        if re.fullmatch(_SECRET, name, re.I) and len(value) >= 8 and value in script.text:
            line = next((line for line in script.text.split("\n") if value in line), "")
            yield f"line:{line}", f"the script holds the value of your variable {name}"


def _syntax(script: _Script) -> Iterator[tuple[str, str]]:
    said = syntax_error(script.text)
    if not said:
        return
    cluster = script.context.cluster
    own = list(profile_errors(cluster)) if cluster is not None else []
    yield from ((f"profile:{key}", words) for key, words in own)
    if not own:
        number = re.match(r"line (\d+)", said)
        # What is never closed is noticed far from where it was begun.
        is_far = number is None or re.search(r"end of file|unexpected EOF", said)
        where = "" if is_far or number is None else f"line:{script.text.split(chr(10))[int(number[1]) - 1]}"
        yield where, f"bash -n: the script: {said}"


_RULES: tuple[Rule, ...] = (_shape, _directives, _signals, _launch, _secrets, _syntax)


def check(
    library: Library, template: Template, cluster: ClusterSpec | None = None, slurm_version: str | None = None
) -> list[SpecProblem]:
    """Everything in which a template breaks its contract, with file and line; empty when it holds."""
    try:
        layers = library.chain(template)
        problems = [
            SpecProblem(
                f"line {number}",
                "ends in a carriage return; sbatch refuses Windows line ends",
                str(layer.path),
            )
            for layer in layers
            for number, line in enumerate(read_source(layer).split("\n"), start=1)
            if line.endswith("\r")
        ][:1]
        job = fixture(library, template, cluster, slurm_version)
        text = ""
        for context in (job.model_copy(update={"requeue": False}), job):
            text = render_script(library, template, context)
            problems += check_script(library, template, context, text)
    except UsageError as error:
        return [SpecProblem("", str(error))]
    problems += _ask_sbatch(library, template, text)
    return list(dict.fromkeys(problems))


def check_script(
    library: Library, template: Template, context: ScriptContext, text: str
) -> list[SpecProblem]:
    """In what a template's script for one job breaks the contract, or bash cannot read it."""
    script = _parse_script(text, context)
    unheard = [SpecProblem("", what, place) for place, what in library.unheard(template)]
    return unheard + [
        _problem(library, template, context, where, what) for rule in _RULES for where, what in rule(script)
    ]


def _problem(
    library: Library, template: Template, context: ScriptContext, where: str, what: str
) -> SpecProblem:
    kind, _, rest = where.partition(":")
    if kind == "line":
        own = {"setup": context.setup_lines, "teardown": context.teardown_lines}
        own |= {"modules.init": context.module_init}
        for key, lines in own.items():
            if rest.strip() in map(str.strip, lines):
                kind, rest = "profile", key
    if kind == "profile":
        return SpecProblem(
            rest, what, f"profile {context.cluster.name}" if context.cluster else "the profile"
        )
    if kind == "line":
        return SpecProblem("", what, library.text_place(template, rest, "setup"))
    return SpecProblem(
        "", what, library.block_place(template, kind) if kind else library.file_place(template)
    )


def _ask_sbatch(library: Library, template: Template, text: str) -> Iterator[SpecProblem]:
    """What sbatch, where there is one, says to the script without running it."""
    if which("sbatch") is None:
        return
    with tempfile.TemporaryDirectory(prefix="hpcrun-check-") as folder:
        path = Path(folder) / "script.sh"
        path.write_text(text, encoding="utf-8")
        done = run_client(["sbatch", "--test-only", str(path)], timeout_s=60)
        if done.exit_code != 0:
            words = " ".join(done.stderr.split())
            yield SpecProblem("", f"sbatch --test-only: {words}", library.block_place(template, "directives"))


def shipped_counterpart(library: Library, template: Template) -> Template:
    """The shipped template that a site's own extends or stands in for; UsageError where there is none."""
    layers = library.chain(template)
    for layer in layers:
        if layer.origin == "shipped":
            return library.shipped().find(layer.name)
    try:
        return library.shipped().find(template.name)
    except UsageError:
        raise UsageError(
            f"{template.path}: extends no shipped template; there is nothing to compare with"
        ) from None
