"""What the verbs look at: environment, files and job that a person named, in the order of their power."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.errors import UsageError
from hpcrun.finding import Finding, Severity
from hpcrun.tuning.lint.environment import (
    CONF_FILE_SINCE,
    EnvironmentLayer,
    VariableAssignment,
    effective_assignments,
    layer_from_environment,
    nccl_conf_paths,
    parse_environment_dump,
    parse_nccl_conf,
    read_user_file,
    resolve_layers,
)
from hpcrun.tuning.lint.lint import LintReport, lint_layers, sort_lint_findings
from hpcrun.tuning.lint.named_files import find_named_files, named_file_kind
from hpcrun.tuning.lint.rank_environments import (
    RankEnvironment,
    compare_rank_environments,
    parse_rank_environment,
)
from hpcrun.tuning.lint.script_exports import drops_shell_environment, parse_script_exports
from hpcrun.tuning.registry.nccl_library import NcclLibraryChoice, find_job_nccl_library, find_nccl_library
from hpcrun.tuning.registry.registry import Version

if TYPE_CHECKING:
    from hpcrun.specs.cluster import ClusterSpec
    from hpcrun.specs.load import ResolvedJob


@dataclass(frozen=True)
class LintSources:
    """What was named on the command line."""

    job: Path | None = None
    overrides: Sequence[str] = ()
    """key=value, over the job file."""
    cluster: str | None = None
    """Which profile, instead of the job's."""
    script: Path | None = None
    nccl_conf: Sequence[Path] = ()
    """In place of the files that NCCL looks for."""
    env: Sequence[Path] = ()
    """Environments that ranks wrote down, in place of this shell's."""
    container_env: Path | None = None
    nccl_version: str | None = None


@dataclass(frozen=True)
class LintInput:
    """Layers of settings, from the weakest on, the ranks' dumps, and the NCCL in use."""

    bases: tuple[EnvironmentLayer, ...]
    """The shell's environment, or one for each dump."""
    above: tuple[EnvironmentLayer, ...]
    """What stands over each of them."""
    library: NcclLibraryChoice
    dumps: tuple[RankEnvironment, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Why files that are named are not looked for here; empty: they are."""
    notes: tuple[str, ...] = ()
    confs: tuple[Path, ...] | None = None
    """The files that were named; None: those that NCCL finds."""
    advice: tuple[EnvironmentLayer, ...] = ()
    """What hpcrun sets for the job, where nobody else has."""

    def layers(self, base: EnvironmentLayer) -> list[EnvironmentLayer]:
        """All layers over one environment, the configuration files and hpcrun's settings included."""
        over = [base, *self.above]
        setting = effective_assignments(resolve_layers(over)).get("NCCL_CONF_FILE")
        value = setting.value if setting else None
        return [*over, *_conf_layers(self.confs, value, self.library.version), *self.advice]


def gather_lint_input(sources: LintSources, environ: Mapping[str, str]) -> LintInput:
    """Read everything; UsageError in one line where a file that was named cannot be read."""
    bases, notes = _base_layers(sources, environ)
    image = _image_layers(sources.container_env)
    above: list[EnvironmentLayer] = []
    job: ResolvedJob | None = None
    cluster: ClusterSpec | None = None
    if sources.script is not None:
        above.append(parse_script_exports(read_user_file(sources.script), str(sources.script)))
    if sources.job is not None:
        job, cluster = _load_job_and_profile(sources.job, sources.overrides, sources.cluster)
        above += _setup_layers(cluster)
        # What job and profile name is handed into the container; the rest keeps the image's values.
        above += [*image, *_job_layers(job, cluster)]
        if job.spec.modules or (cluster and cluster.modules.load):
            notes.append("what the job's modules set is not known here")
    else:
        above += image
    if image:
        notes.append(f"{sources.container_env}: taken to win over what comes from outside the container")
    counts = effective_assignments(resolve_layers([bases[0], *above]))
    values = {name: setting.value for name, setting in counts.items() if setting.value is not None}
    library = (
        find_job_nccl_library(job.spec, cluster, sources.nccl_version, values)
        if job
        else find_nccl_library(sources.nccl_version, environ=values)
    )
    confs = tuple(sources.nccl_conf) or None
    advice = tuple(_advice_layers(job, cluster, library.version, values, notes)) if job else ()
    return LintInput(
        tuple(bases),
        tuple(above),
        library,
        tuple(map(parse_rank_environment, bases)) if len(bases) > 1 else (),
        tuple(_why_files_may_differ(sources, job)),
        tuple(notes),
        confs,
        advice,
    )


def lint_gathered(gathered: LintInput) -> LintReport:
    """All that is wrong in it: in each environment, and between them."""
    reports = [lint_layers(gathered.layers(base), gathered.library.version) for base in gathered.bases]
    findings: dict[tuple[str, str, str], Finding] = {}
    files = [dump.values.get("NCCL_DEBUG_FILE") for dump in gathered.dumps]
    apart = bool(files) and len(set(files)) == len(files)
    missing = [finding for base in gathered.bases for finding in _missing_files(gathered, base)]
    for finding in (*missing, *(finding for report in reports for finding in report.findings)):
        if not (apart and finding.subject == "NCCL_DEBUG_FILE"):  # each rank has a file of its own
            findings.setdefault((finding.severity, finding.subject, finding.message), finding)
    notes = (*gathered.notes, *reports[0].notes)
    if gathered.elsewhere and any(named_file_kind(name) for name in reports[0].chains):
        notes += (f"files that variables name were not looked for: {gathered.elsewhere[0]}",)
    whole = sort_lint_findings([*findings.values(), *compare_rank_environments(gathered.dumps)])
    return LintReport(whole, reports[0].chains, notes, reports[0].read)


def _base_layers(
    sources: LintSources, environ: Mapping[str, str]
) -> tuple[list[EnvironmentLayer], list[str]]:
    if sources.env:
        return [parse_environment_dump(read_user_file(path), str(path), "env") for path in sources.env], []
    if sources.script is not None and drops_shell_environment(read_user_file(sources.script)):
        note = f"{sources.script}: its --export keeps this shell's environment out, so that was not looked at"
        return [EnvironmentLayer("shell")], [note]
    return [layer_from_environment(environ)], []


def _image_layers(path: Path | None) -> list[EnvironmentLayer]:
    return [] if path is None else [parse_environment_dump(read_user_file(path), str(path), "container")]


def _load_job_and_profile(
    path: Path, overrides: Sequence[str], cluster: str | None
) -> tuple[ResolvedJob, ClusterSpec | None]:
    from hpcrun.specs.cluster import find_cluster
    from hpcrun.specs.load import load_job

    resolved = load_job(path, overrides)
    name = cluster or resolved.spec.cluster
    return resolved, None if name == "local" else find_cluster(None if name in (None, "default") else name)


def _setup_layers(cluster: ClusterSpec | None) -> Iterator[EnvironmentLayer]:
    if cluster is not None and cluster.setup:
        yield parse_script_exports("\n".join(cluster.setup), f"profile {cluster.name} setup")


def _job_layers(resolved: ResolvedJob, cluster: ClusterSpec | None) -> Iterator[EnvironmentLayer]:
    from hpcrun.specs.fields import set_variables

    if cluster is not None:
        title = f"profile {cluster.name}"
        env = set_variables(cluster.env).items()
        yield EnvironmentLayer(
            title, tuple(VariableAssignment(name, value, "profile", f"{title} env") for name, value in env)
        )
    where = resolved.document.where
    env = set_variables(resolved.spec.env).items()
    yield EnvironmentLayer(
        "job", tuple(VariableAssignment(name, value, "job", where(f"env.{name}")) for name, value in env)
    )


def _advice_layers(
    job: ResolvedJob,
    cluster: ClusterSpec | None,
    version: Version | None,
    environ: Mapping[str, str],
    notes: list[str],
) -> Iterator[EnvironmentLayer]:
    """What `submit` adds; a profile that is wrong there costs these settings, and a note says so."""
    from hpcrun.tuning.job_settings import advise_job, preview_job_settings

    try:
        advice = advise_job(job.spec, cluster, nccl=version)
        led = preview_job_settings(job.spec, cluster, environ, version).environment()
    except UsageError as error:
        notes.append(f"hpcrun sets nothing: {error}")
        return
    settings = (
        VariableAssignment(
            setting.name, led.get(setting.name, setting.value), "hpcrun", f"hpcrun, {setting.source}"
        )
        for setting in advice.everywhere
    )
    yield EnvironmentLayer("hpcrun", tuple(settings), fills=True)


def _conf_layers(
    named: Sequence[Path] | None, value: str | None, version: Version | None
) -> Iterator[EnvironmentLayer]:
    if named is not None:
        yield from (parse_nccl_conf(read_user_file(path), str(path), version) for path in named)
        return
    for path in nccl_conf_paths(value, version):
        try:
            is_there = path.is_file()
        except OSError:
            is_there = False
        if is_there:
            yield parse_nccl_conf(read_user_file(path), str(path), version)


def _why_files_may_differ(sources: LintSources, job: ResolvedJob | None) -> Iterator[str]:
    if sources.container_env is not None or (job is not None and job.spec.container is not None):
        yield "ranks run in a container, which has files of its own"
    elif sources.env:
        yield "the environment was written down elsewhere"


def _missing_files(gathered: LintInput, base: EnvironmentLayer) -> Iterator[Finding]:
    """Files that settings name and that this host has not; those of a job's own may be on its nodes alone."""
    if gathered.elsewhere:
        return
    counts = effective_assignments(resolve_layers(gathered.layers(base)))
    values = {name: setting.value for name, setting in counts.items() if setting.value}
    old = gathered.library.version is not None and gathered.library.version < CONF_FILE_SINCE
    for file in find_named_files(values):
        if (file.kind == "settings" and (old or gathered.confs is not None)) or not file.lacks:
            continue
        setting = counts[file.variable]
        is_here = setting.origin == "shell" or "/" in setting.origin
        text = file.lacks if is_here else f"{file.lacks}; look whether the job's nodes have it"
        severity: Severity = "warning" if is_here else "note"
        yield Finding(severity, "variable", file.variable, text, where=setting.where)
