"""What a template is given, and what its script must keep so that submission, signals and requeue work."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from hpcrun.errors import SpecProblem, UsageError
from hpcrun.finding import Finding
from hpcrun.slurm.batch_options import (
    FIXED_OPTIONS,
    BatchOption,
    effective_options,
    overridden_options,
    parse_batch_options,
)
from hpcrun.slurm.client import run_slurm_client
from hpcrun.slurm.script_context import (
    ScriptContext,
    example_context,
)
from hpcrun.slurm.syntax import find_bash_syntax_error, find_profile_syntax_errors
from hpcrun.slurm.template import (
    BatchTemplate,
    TemplateLibrary,
    escape_directive,
    quote_shell_words,
    read_template_source,
)
from hpcrun.specs.cluster import ClusterSpec

MAX_SCRIPT_BYTES = 4 * 2**20
"""sbatch refuses a larger script."""


def render_script(library: TemplateLibrary, template: BatchTemplate, context: ScriptContext) -> str:
    """The batch script of one job."""
    return library.render(template, context.values())


@dataclass(frozen=True)
class _RenderedScript:
    """A rendered script, its logical lines (backslash continuations joined), and the job it is for."""

    text: str
    lines: tuple[tuple[int, str], ...]
    context: ScriptContext
    launch_at: int | None
    """Index into `lines` of the line that launches; None if it is absent or occurs twice."""

    @property
    def options(self) -> dict[str, str]:
        """The sbatch options in force as they are written: of several of one name the last."""
        values: dict[str, str] = {}
        for option in self.given:
            # Of an option that has a line to itself the quotes are kept.
            alone = re.match(r"#SBATCH\s+--([a-z-]+)(?:[=\s]\s*(.*))?$", option.line)
            is_alone = alone is not None and len(parse_batch_options([option.line])) == 1
            value = (alone[2] or "").strip() if alone is not None and is_alone else option.value
            values.pop(option.name, None)
            values[option.name] = value
        return values

    @property
    def given(self) -> list[BatchOption]:
        """All sbatch options in their order."""
        return parse_batch_options(line for _, line in self.lines)

    @property
    def command(self) -> str:
        return "" if self.launch_at is None else self.lines[self.launch_at][1].strip()


def _parse_rendered_script(text: str, context: ScriptContext) -> _RenderedScript:
    lines: list[tuple[int, str]] = []
    begun: tuple[int, str] | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        first, before = begun or (number, "")
        begun = (first, before + line[:-1]) if line.endswith("\\") else None
        if begun is None:
            lines.append((first, before + line))
    words = quote_shell_words(context.launch)
    at = [i for i, (_, line) in enumerate(lines) if words in line and not line.lstrip().startswith("#")]
    return _RenderedScript(text, tuple(lines), context, at[0] if len(at) == 1 else None)


ContractRule = Callable[[_RenderedScript], Iterator[tuple[str, str]]]
"""Yields problems as (place, remedy). A place is a block, `line:` and the line itself, `profile:` and the
key, or empty for the whole file."""


def _check_shape(script: _RenderedScript) -> Iterator[tuple[str, str]]:
    if not re.match(r"#!\s*/\S*(/bash|env bash)\b", script.text):
        yield "directives", "the script does not begin with #!/bin/bash"
    if "\r" in script.text:
        yield "directives", "the script contains a carriage return; sbatch refuses Windows line ends"
    if len(script.text.encode()) >= MAX_SCRIPT_BYTES:
        yield (
            "directives",
            f"the script has {len(script.text.encode())} bytes; sbatch takes less than {MAX_SCRIPT_BYTES}",
        )
    begun = False
    for _, line in script.lines:
        if begun and line.startswith("#SBATCH"):
            yield f"line:{line}", f"sbatch ignores a directive after the first command: {line}"
        begun = begun or bool(line.strip() and not line.lstrip().startswith("#"))


_COUNTS = "the run counts on its nodes and ranks"
_REASONS = {
    "time": "the save before the limit depends on it",
    "time-min": "Slurm would shorten the job's time, and the save before the limit depends on it",
    "array": "elements and their files are counted by it",
    "clusters": "hpcrun would look for the job elsewhere; set slurm_cluster in the profile instead",
    "dependency": "--after and --after-any set it",
    "wait": "sbatch would not return",
}


def _check_directives(script: _RenderedScript) -> Iterator[tuple[str, str]]:
    options, context = script.options, script.context
    for option, pattern in (("output", context.stdout), ("error", context.stderr)):
        expected = (
            None if pattern is None else escape_directive(quote_shell_words([pattern.replace("%t", "0")]))
        )
        if expected is not None and options.get(option) != expected:
            yield (
                "directives",
                f"--{option} must be the job's pattern, or logs cannot be found: --{option}={expected}",
            )
    if options.get("open-mode") != "append":
        yield "directives", "--open-mode=append is missing: a requeued job would overwrite its log"
    yield from _check_sizes(script)
    last = [o for o in options if o in ("requeue", "no-requeue")][-1:]
    if last != ["requeue" if context.requeue else "no-requeue"] and (context.requeue or last):
        problem = (
            "--requeue is missing" if context.requeue else "--requeue is set although the job forbids it"
        )
        yield "directives", f"{problem}: write it under {{% if requeue %}}"


def _check_sizes(script: _RenderedScript) -> Iterator[tuple[str, str]]:
    """Check the options that the run relies on: the job's own value, or none if the job sets none."""
    requested = _requested_options(script.context)
    for name, option in effective_options(script.given).items():
        if name not in FIXED_OPTIONS or (name == "time" and "time" not in requested):
            continue
        if name not in requested:
            yield "directives", f"{option} must not be set: {_REASONS.get(name, _COUNTS)}"
        elif option.value != requested[name]:
            expected = f"--{name}" + (f"={requested[name]}" if requested[name] else "")
            reason = _REASONS.get(name, _COUNTS)
            yield "directives", f"--{name} must be the job's: {expected}, and not {option.value}: {reason}"
    present = {option.name for option in script.given}
    for name in requested:
        if name in FIXED_OPTIONS and name not in present:
            yield "directives", f"--{name} must be the job's: --{name}={requested[name]} is missing"


def _requested_options(context: ScriptContext) -> dict[str, str]:
    """Return the job's sbatch options as text."""
    requested = {name: "" if value is True else str(value) for name, value in context.directives.items()}
    return requested | ({"array": context.array.indices} if context.array is not None else {})


def replaced_directives(context: ScriptContext, text: str) -> list[str]:
    """Return one line for each directive with which a template's script overrides the job's."""
    lines = _parse_rendered_script(text, context).lines
    return [
        f"the template's {option} replaces the job's {requested}: sbatch takes the last of two"
        for requested, option in overridden_options(
            parse_batch_options(line for _, line in lines), _requested_options(context)
        )
    ]


def _check_signals(script: _RenderedScript) -> Iterator[tuple[str, str]]:
    context, given = script.context, script.options.get("signal", "")
    expected = f"B:{context.signal}@{context.grace_s}"
    if given != expected:
        reason = "the batch shell must get it"
        yield "directives", f"--signal={given or '(none)'} must be --signal={expected}: {reason}"
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


def _check_launch(script: _RenderedScript) -> Iterator[tuple[str, str]]:
    if not re.search(r"^\s*export SUBMITIT_EXECUTOR=slurm\s*$", script.text, re.MULTILINE):
        yield "environment", "`export SUBMITIT_EXECUTOR=slurm` is missing: the job would not find itself"
    if script.launch_at is None:
        yield "launch", "{{ launch }} must occur once, as a separate command"
    elif script.command.split()[0] in ("srun", "mpirun", "mpiexec"):
        yield (
            "launch",
            "the command is the supervisor: it runs once, in the batch shell, without srun or mpirun",
        )


_SECRET = r"[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)"
_SECRET_LITERAL = re.compile(
    rf"^\s*(?:export\s+|declare\s+-x\s+)?({_SECRET})=(?!['\"]?(?:\$|['\"]?\s*$))\S.*", re.M | re.I
)


def _check_secrets(script: _RenderedScript) -> Iterator[tuple[str, str]]:
    for match in _SECRET_LITERAL.finditer(script.text):
        line = match[0].strip()
        yield f"line:{line}", f"{match[1]} is written out; secrets are read from a 0600 file at run time"
    for name, value in os.environ.items():
        if re.fullmatch(_SECRET, name, re.I) and len(value) >= 8 and value in script.text:
            line = next((line for line in script.text.split("\n") if value in line), "")
            yield f"line:{line}", f"the script contains the value of your variable {name}"


def _check_syntax(script: _RenderedScript) -> Iterator[tuple[str, str]]:
    complaint = find_bash_syntax_error(script.text)
    if not complaint:
        return
    cluster = script.context.cluster
    own = list(find_profile_syntax_errors(cluster)) if cluster is not None else []
    yield from ((f"profile:{key}", words) for key, words in own)
    if not own:
        number = re.match(r"line (\d+)", complaint)
        # What is never closed is noticed far from where it was begun.
        is_far = number is None or re.search(r"end of file|unexpected EOF", complaint)
        where = "" if is_far or number is None else f"line:{script.text.split(chr(10))[int(number[1]) - 1]}"
        yield where, f"bash -n: the script: {complaint}"


_RULES: tuple[ContractRule, ...] = (
    _check_shape,
    _check_directives,
    _check_signals,
    _check_launch,
    _check_secrets,
    _check_syntax,
)


def check_template(
    library: TemplateLibrary,
    template: BatchTemplate,
    cluster: ClusterSpec | None = None,
    slurm_version: str | None = None,
) -> list[Finding]:
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
            for number, line in enumerate(read_template_source(layer).split("\n"), start=1)
            if line.endswith("\r")
        ][:1]
        job = example_context(library, template, cluster, slurm_version)
        text = ""
        for context in (job.model_copy(update={"requeue": False}), job):
            text = render_script(library, template, context)
            problems += check_rendered_script(library, template, context, text)
    except UsageError as error:
        return [Finding("error", "contract", "", str(error))]
    problems += _check_with_sbatch(library, template, text)
    return [
        Finding("error", "contract", problem.key, problem.text, where=problem.where)
        for problem in dict.fromkeys(problems)
    ]


def check_rendered_script(
    library: TemplateLibrary, template: BatchTemplate, context: ScriptContext, text: str
) -> list[SpecProblem]:
    """In what a template's script for one job breaks the contract, or bash cannot read it."""
    script = _parse_rendered_script(text, context)
    unheard = [SpecProblem("", what, place) for place, what in library.unused_text(template)]
    return unheard + [
        _problem(library, template, context, where, what) for rule in _RULES for where, what in rule(script)
    ]


def _problem(
    library: TemplateLibrary, template: BatchTemplate, context: ScriptContext, where: str, what: str
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
        return SpecProblem("", what, library.text_location(template, rest, "setup"))
    return SpecProblem(
        "", what, library.block_location(template, kind) if kind else library.file_location(template)
    )


def _check_with_sbatch(library: TemplateLibrary, template: BatchTemplate, text: str) -> Iterator[SpecProblem]:
    """Yield what sbatch, where there is one, reports about the script without running it."""
    if which("sbatch") is None:
        return
    with tempfile.TemporaryDirectory(prefix="hpcrun-check-") as folder:
        path = Path(folder) / "script.sh"
        path.write_text(text, encoding="utf-8")
        done = run_slurm_client(["sbatch", "--test-only", str(path)], timeout_s=60)
        if done.exit_code != 0:
            words = " ".join(done.stderr.split())
            yield SpecProblem(
                "", f"sbatch --test-only: {words}", library.block_location(template, "directives")
            )


def shipped_counterpart(library: TemplateLibrary, template: BatchTemplate) -> BatchTemplate:
    """Return the shipped template that a site's template extends or replaces; UsageError if there is none."""
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
