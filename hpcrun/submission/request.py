"""A submission before it is made: its job, cluster and template, and all findings about it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hpcrun import process
from hpcrun.checkpoint.policy.capacity import find_storage_problems
from hpcrun.errors import HpcrunError, SiteError, SpecError, SpecProblem, UsageError
from hpcrun.fabric.domains import failure_domains
from hpcrun.finding import Finding
from hpcrun.local_identity import expand_path
from hpcrun.mounts import find_mount
from hpcrun.runs.run_state import read_element_states, read_run_states
from hpcrun.slurm.arrays import DEFAULT_ARRAY_SIZE, ArrayChunk, split_into_arrays
from hpcrun.slurm.cluster_state import LiveCluster, query_cluster
from hpcrun.slurm.inputs import SbatchInputs, read_sbatch_inputs
from hpcrun.slurm.precheck import (
    check_gpus,
    check_partition_fit,
    check_run_root_visibility,
    exceeded_quota_lines,
    make_precheck_warning,
    make_refusal,
    schedules_memory,
)
from hpcrun.slurm.script_context import ScriptContext
from hpcrun.slurm.template import TEMPLATE_SUFFIX, BatchTemplate, TemplateLibrary
from hpcrun.slurm.versions import SlurmVersion, parse_slurm_version
from hpcrun.specs.badnodes import merge_excluded_nodes
from hpcrun.specs.cluster import ClusterSpec, find_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import ResolvedJob, load_job, load_run_job
from hpcrun.specs.plan import find_plan_problems
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import resumable_checkpoints
from hpcrun.specs.secrets import check_secret_files
from hpcrun.specs.sweep import read_sweep
from hpcrun.submission import prepare
from hpcrun.submission.batch_script import (
    build_script_context,
    choose_template_name,
    cluster_runs_root,
    container_runtime,
    job_python,
)
from hpcrun.submission.dependencies import NoteCallback, find_dependencies
from hpcrun.submission.launch_checks import check_run_root, find_launch_problems, why_not_launchable_here
from hpcrun.submission.placement_preview import NetworkState, load_network, preview_placement

_ASK_S, _QUOTA_S = 5.0, 10.0


@dataclass(frozen=True)
class SubmissionRequest:
    """What the user asks to submit."""

    job: Path | None = None
    resolved: ResolvedJob | None = None
    """The job itself, if it is in no file."""
    furnish: Callable[[RunDir], None] | None = None
    """Writes a function's calls to the new run's directory."""
    overrides: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    resume: RunDir | None = None
    """Submit this run again, or this element of a sweep, instead of a job file."""
    only_failed: bool = False
    """Of a sweep only the elements that did not end well."""
    after: tuple[RunDir, ...] = ()
    """Start when these runs have ended well."""
    after_any: tuple[RunDir, ...] = ()
    """Start when these runs have ended."""
    template: str | None = None
    """A template's name or path; default: by the kind of the job."""
    slurm_version: str | None = None
    """The release that the script is for; default: the one here, else the profile's."""


class PreparedSubmission:
    """A resolved request: its job, its cluster, its template; each is looked up when it is needed."""

    def __init__(self, request: SubmissionRequest, note: NoteCallback, detail: NoteCallback) -> None:
        self.request, self.note, self.detail = request, note, detail
        self.resolved = _load_job(request, note)
        self.resume = request.resume and (request.resume.sweep_of_element or request.resume)
        spec = self.resolved.spec
        self.cluster = load_job_profile(spec)
        if spec.cluster == "default" and self.cluster is None:
            raise self.resolved.mistake("cluster", "there is no profile; see `hpcrun cluster draft`")
        nowhere = self.cluster is None and request.slurm_version is None and shutil.which("sbatch") is None
        self.is_local = spec.cluster == "local" or nowhere
        self.inputs = SbatchInputs() if self.is_local else read_sbatch_inputs(spec, self.cluster, os.environ)
        for text in self.inputs.notes:
            note(text)
        self.resolved = self.resolved.asking(self.inputs.resources)
        self.library = TemplateLibrary()
        if self.is_local and (request.after or request.after_any):
            raise UsageError("--after needs Slurm, and this would run here without it; leave it out")
        self.dependencies, self.after = find_dependencies(
            request.after, request.after_any, self.cluster, note
        )

    @cached_property
    def is_function(self) -> bool:
        """Whether its program is a function that was submitted from Python."""
        record = read_provenance(self.resume) if self.resume else None
        return self.request.furnish is not None or (record is not None and record.kind == "function")

    @property
    def cluster_name(self) -> str:
        """As --json and records name it."""
        return "local" if self.is_local else self.cluster.name if self.cluster else ""

    @property
    def slurm_cluster(self) -> str | None:
        """For -M: the profile's, else the one that the caller's environment names."""
        return (self.cluster.slurm_cluster if self.cluster else None) or self.inputs.slurm_cluster

    @cached_property
    def template(self) -> BatchTemplate:
        """The request's, else the one for jobs of this kind."""
        spec, requested = self.resolved.spec, self.request.template
        usual = "function" if self.is_function else choose_template_name(spec, self.cluster)
        template = self.library.find(requested or usual)
        kinds = {layer.name.removesuffix(TEMPLATE_SUFFIX) for layer in self.library.chain(template)}
        if "array" in kinds and spec.sweep is None:
            raise UsageError(f"--template {requested}: is for a sweep, and the job has none; leave it out")
        if spec.container is None and any(kind.endswith(("-pyxis", "-apptainer")) for kind in kinds):
            raise UsageError(
                f"--template {requested}: is for ranks in a container, and the job has no container.image;"
                " give one, or leave the template out"
            )
        return template

    @cached_property
    def live(self) -> LiveCluster | None:
        """The live cluster; None if Slurm is not here, or if the script is for another release."""
        is_elsewhere = self.is_local or self.request.slurm_version is not None
        return None if is_elsewhere else query_live_cluster(self.slurm_cluster, self.note)

    @cached_property
    def version(self) -> SlurmVersion | None:
        """The release that the script is for; None if it is not known."""
        given = self.request.slurm_version
        if given is not None:
            version = parse_slurm_version(given)
            if version is None:
                raise UsageError(f"--slurm-version {given}: is not a release of Slurm; write it as 24.05")
            return version
        live = self.live.version if self.live else None
        return live or (parse_slurm_version(self.cluster.slurm_version or "") if self.cluster else None)

    @property
    def place(self) -> Path:
        """Where the run directory is, or is to be made."""
        return self.resume.path if self.resume else cluster_runs_root(self.cluster)

    @cached_property
    def network(self) -> NetworkState:
        """The cluster's network now; without Slurm as far as the profile knows it."""
        resources = self.resolved.spec.resources
        return load_network(
            self.cluster,
            self.live,
            partition=resources.partition,
            needed=resources.all_nodes,
            reservation=resources.reservation,
        )

    @cached_property
    def leaves(self) -> int | None:
        """The fewest leaf switches with enough nodes for the job; None if not known, or not needed."""
        spec = self.resolved.spec
        if self.live is None or not self.network.fabric.levels or spec.resources.placement != "pack":
            return None
        try:
            preview = preview_placement(spec, self.resolved.plan, self.network)
        except UsageError:
            # Too few nodes: check_partition_fit reports it, or Slurm.
            return None
        for line in (*self.network.notes, *preview.notes, *preview.placed.why):
            self.detail(f"placement: {line}")
        return preview.leaves

    @cached_property
    def spec_with_exclusions(self) -> JobSpec:
        """The job with the bad nodes among those that it excludes."""
        spec = self.resolved.spec
        if self.is_local:
            return spec
        names = [node.name for node in self.live.nodes] if self.live else None
        excluded, notes = merge_excluded_nodes(spec.resources.exclude, self.network.bad, names)
        for text in (*notes, *self.network.damaged):
            self.note(text)
        resources = spec.resources.model_copy(update={"exclude": excluded or None})
        return spec.model_copy(update={"resources": resources})

    def context(self, run: RunDir) -> ScriptContext:
        """What the template gets, still without the array."""
        dependency = ",".join(self.dependencies)
        try:
            context, notes = build_script_context(
                self.spec_with_exclusions, run, self.cluster, self.version, dependency, self.leaves
            )
        except SpecError as error:
            problems = [self.placed(make_refusal(problem.key, problem.text)) for problem in error.problems]
            raise refuse_submission(problems) from None
        for text in notes:
            self.note(text)
        return without_uncounted_memory(context, self.resolved.spec, self.cluster, self.live, self.note)

    @cached_property
    def elements(self) -> list[int]:
        """Which elements of the sweep are to be run; empty for a job without one."""
        if self.resume is None or not self.resolved.elements:
            return list(range(len(self.resolved.elements)))
        requested = self.request.resume
        left = []
        for state, element in zip(
            read_element_states(self.resume, ask=False), self.resolved.elements, strict=True
        ):
            goes_on = element.spec.command is None and element.spec.train.steps > (state.step or 0)
            is_due = state.state != "done" or (goes_on and not self.request.only_failed)
            if is_due and requested in (self.resume, state.run):
                left.append(int(state.run.path.name))
        if not left:
            what = "every element" if requested == self.resume else "it"
            raise UsageError(f"{requested and requested.id}: {what} ended well; nothing is left to do")
        return left

    def chunks(self) -> list[ArrayChunk]:
        """The arrays that the sweep becomes; none for a job without one."""
        if not self.elements:
            return []
        sweep = self.resolved.spec.sweep
        size = self.live.config.max_array_size if self.live else None
        if size == 0:
            raise UsageError("sweep: this cluster takes no arrays (MaxArraySize is 0)")
        return split_into_arrays(self.elements, size or DEFAULT_ARRAY_SIZE, sweep.throttle if sweep else None)

    def jobs(self) -> tuple[ResolvedJob, ...]:
        """The job itself or, of a sweep, every element."""
        return self.resolved.elements or (self.resolved,)

    def placed(self, finding: Finding) -> Finding:
        """A finding with the file and line of its key."""
        where = self.resolved.document.where(finding.subject) if finding.subject else ""
        return replace(finding, where=where)

    def findings(self) -> list[Finding]:
        """List all findings about the job's files, the cluster and the run directory, with file and line."""
        return [self.placed(finding) for finding in self._findings()]

    def _findings(self) -> list[Finding]:
        spec = self.resolved.spec
        findings = [*_find_missing_inputs(self.jobs()), *self._storage()]
        if self.is_local:
            return [*findings, *_find_cluster_only_keys(spec)]
        findings += [
            *self.inputs.findings,
            *_find_env_conflicts(self.resolved.spec, self.inputs),
            *_find_missing_image(spec),
        ]
        findings += check_job_fits_cluster(self.spec_with_exclusions, self.cluster, self.live, self.place)
        runtime = container_runtime(spec, self.cluster)
        fabric = self.network.fabric
        levels = failure_domains(fabric, fabric.nodes) if fabric.levels else None
        findings += [
            make_refusal(problem.key, problem.text)
            for problem in find_launch_problems(spec, self.cluster, runtime, levels)
        ]
        return [*findings, *self._python(), *self._quota()]

    def _python(self) -> Iterator[Finding]:
        """What is seen from here of the interpreter on the compute nodes, which may differ there."""
        python = job_python(self.resolved.spec, self.cluster)
        if not os.access(python, os.X_OK):
            text = f"{python} is not on this machine; it has to be on the compute nodes"
            yield make_precheck_warning("python", text)
        elif python == sys.executable:
            for why in why_not_launchable_here(self.cluster):
                yield make_precheck_warning("python", f"{why} (if it is the same on the compute nodes)")

    def _storage(self) -> Iterator[Finding]:
        """Check whether the files and saves of the run, or of all elements, fit where they are written."""
        if self.resume is None:
            try:
                check_run_root(self.place)
            except UsageError as error:
                yield make_refusal("", str(error))
                return
        jobs = [(job.spec, job.plan) for job in self.jobs()]
        held = len(resumable_checkpoints(self.resume.checkpoints)) if self.resume else None
        for finding in find_storage_problems(jobs, self.place, held=held):
            make = make_refusal if finding.level == "refused" else make_precheck_warning
            yield make("", finding.text)

    def _quota(self) -> list[Finding]:
        """Limits that the profile's quota command shows as passed."""
        words = [expand_path(word) for word in self.cluster.quota] if self.cluster else []
        if not words:
            return []
        try:
            printed = process.run(words, timeout_s=_QUOTA_S).stdout
        except SiteError as error:
            return [make_precheck_warning("", f"the quota is not known: {error}")]
        text = "over the quota, so writing may fail: {} (`{}`)"
        return [
            make_precheck_warning("", text.format(line, " ".join(words)))
            for line in exceeded_quota_lines(printed)
        ]


def refuse_submission(findings: Sequence[Finding]) -> SpecError:
    """The error that names all findings for which a job is refused."""
    return SpecError([SpecProblem(finding.subject, finding.message, finding.where) for finding in findings])


def load_job_profile(spec: JobSpec) -> ClusterSpec | None:
    """The profile that a job names, else the default one; None without one, and for a job that runs here."""
    if spec.cluster == "local":
        return None
    return find_cluster(None if spec.cluster == "default" else spec.cluster)


def _find_env_conflicts(spec: JobSpec, inputs: SbatchInputs) -> Iterator[Finding]:
    """Yield what the caller's variables contradict in a job that was valid without them."""
    for problem in find_plan_problems(spec) if inputs.resources else ():
        by = inputs.by_key.get(problem.key.removeprefix("resources."))
        names = [by] if by else list(inputs.sources)
        variables = ", ".join(f"{name} is {inputs.sources[name]}" for name in names)
        yield make_refusal(problem.key, f"{problem.text} ({variables} in your environment)")


def query_live_cluster(slurm_cluster: str | None, note: NoteCallback) -> LiveCluster | None:
    """Query the cluster's Slurm; None if it is not here, or does not answer."""
    if shutil.which("scontrol") is None:
        return None
    try:
        return query_cluster(slurm_cluster, _ASK_S)
    except HpcrunError as error:
        note(f"not checked against Slurm: {error}")
        return None


def check_job_fits_cluster(
    job: JobSpec, cluster: ClusterSpec | None, live: LiveCluster | None, place: Path
) -> list[Finding]:
    """Whether a job fits the cluster, and whether compute nodes see the place of its run."""
    findings = [*check_partition_fit(job, cluster, live), *check_gpus(job, cluster, live)]
    return [*findings, *check_run_root_visibility(place, cluster, find_mount(place).kind)]


def without_uncounted_memory(
    context: ScriptContext,
    job: JobSpec,
    cluster: ClusterSpec | None,
    live: LiveCluster | None,
    note: NoteCallback,
) -> ScriptContext:
    """The context without --mem where the partition counts no memory, and would refuse any."""
    if "mem" not in context.directives or schedules_memory(job, cluster, live):
        return context
    note("resources.mem: left out: this partition counts no memory")
    directives = {name: value for name, value in context.directives.items() if name != "mem"}
    return context.model_copy(update={"directives": directives})


def _load_job(request: SubmissionRequest, note: NoteCallback) -> ResolvedJob:
    run = request.resume
    if request.resolved is not None:
        return request.resolved
    if run is None:
        if request.only_failed:
            raise UsageError("--only-failed goes with --resume RUN, of a sweep")
        if request.job is None and request.command is None and not request.overrides:
            raise UsageError("nothing to submit; write `hpcrun submit JOB.yaml`, or a command behind `--`")
        return load_job(request.job, request.overrides, command=request.command)
    if request.job is not None or request.command is not None:
        raise UsageError("--resume takes the job from the run; give overrides (key=value) only")
    state = read_run_states([run])[0]
    if not state.is_over and state.state != "unknown":
        raise UsageError(f"{run.id} is {state.state}; `hpcrun cancel {run.id}` first, or wait for its end")
    if state.state == "unknown":
        note(f"{run.id}: whether it still runs is not known: {state.message}")
    sweep = run.sweep_of_element or run
    if not sweep.sweep.exists():
        if request.only_failed:
            raise UsageError(f"{run.id} is not a sweep, so --only-failed does not apply; leave it out")
        prepared = prepare.prepare_job(None, request.overrides, resume=run, until="plan")
        return ResolvedJob(prepared.spec, prepared.plan)
    resolved = load_run_job(sweep, request.overrides)
    if [element.overrides for element in resolved.elements] != read_sweep(sweep):
        raise UsageError(f"{sweep.id}: the sweep's own keys cannot be changed; submit it as a new run")
    return resolved


def _find_missing_inputs(jobs: Sequence[ResolvedJob]) -> list[Finding]:
    """List what is wrong with the data, the weights and the secrets, each finding once."""
    findings = [
        make_refusal(problem.key, problem.text) for problem in check_secret_files(jobs[0].spec.secrets)
    ]
    if jobs[0].spec.command is not None:
        return findings
    seen = set()
    for job in jobs:
        assert job.spec.model is not None
        inputs = (job.spec.data, job.spec.model.vocab, job.spec.model.weights)
        if inputs in seen:
            continue
        seen.add(inputs)
        try:
            prepare.check_job_inputs(job)
        except SpecError as error:
            findings += [make_refusal(problem.key, problem.text) for problem in error.problems]
    return findings


def _find_cluster_only_keys(spec: JobSpec) -> Iterator[Finding]:
    """What only a cluster gives, of a job that would run here as a process in the background."""
    resources = spec.resources
    if resources.nodes > 1:
        text = (
            f"{resources.nodes} nodes are asked for, but this would run on one machine, without Slurm; use 1"
        )
        yield make_refusal("resources.nodes", text)
    if spec.container is not None:
        text = "this would run here, without Slurm, where no container is started; leave the section out"
        yield make_refusal("container", f"{text} (container=null)")
    if spec.modules:
        yield make_precheck_warning("modules", "not loaded, because this runs here without Slurm")
    if resources.gpus_per_node and not (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()):
        text = f"{resources.gpus_per_node} are asked for, but this machine shows none"
        yield make_precheck_warning("resources.gpus_per_node", text)


def _find_missing_image(spec: JobSpec) -> list[Finding]:
    """Warn of an image that is a file and is not here; compute nodes may have it."""
    image = spec.container.image if spec.container else ""
    is_file = image.startswith(("/", "./", "../")) or image.endswith((".sif", ".sqsh"))
    # os.path.exists returns False where pathlib raises, for instance for a name that is too long.
    if not is_file or "://" in image or os.path.exists(image):  # noqa: PTH110
        return []
    text = f"{image} is not on this machine; it has to be on the compute nodes"
    return [make_precheck_warning("container.image", text)]
