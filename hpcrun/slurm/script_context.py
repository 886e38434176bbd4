"""What a template of a batch script is given, by name; `hpcrun template show` lists it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from jinja2.exceptions import TemplateRuntimeError
from pydantic import BaseModel, Field, model_validator

from hpcrun.slurm.template import (
    TEMPLATE_SUFFIX,
    BatchTemplate,
    TemplateLibrary,
    as_shell_code,
)
from hpcrun.slurm.versions import RELEASES_OF_FEATURE, has_feature, parse_slurm_version
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.fields import (
    AbsolutePath,
    ContainerMount,
    ModuleName,
    NoNulText,
    SbatchOptionName,
    SingleLineText,
    SpecSection,
    VariableName,
    VariablePattern,
    set_variables,
    unset_variables,
)


class ArrayContext(SpecSection):
    """The elements of one array submission."""

    indices: str = Field(pattern=r"^[0-9][0-9,:%-]*$", description="as sbatch --array takes them: 0-39%8")
    offset: int = Field(default=0, ge=0, description="element = array index + offset, when a sweep is cut up")


class ContainerContext(SpecSection):
    """The container of the ranks."""

    runtime: Literal["pyxis", "apptainer", "singularity"] = Field(description="what runs it")
    image: SingleLineText = Field(description="image file or URI, as the runtime takes it")
    mounts: list[ContainerMount] = Field(
        default=[], description="SOURCE:TARGET[:ro]; the run directory is added"
    )
    workdir: SingleLineText | None = Field(default=None, description="working directory inside")
    options: list[SingleLineText] = Field(default=[], description="further words for the runtime")
    gpus: bool = Field(default=False, description="the ranks use GPUs")


class ScriptContext(SpecSection):
    """What a template gets for one job; every value is data and is quoted, except the admin's own lines."""

    name: SingleLineText = Field(description="the job's name")
    run_id: SingleLineText = Field(description="the run's id")
    run_dir: AbsolutePath = Field(description="the run directory, absolute")
    launch: list[NoNulText] = Field(min_length=1, description="the one command of the launch block, as words")
    stdout: SingleLineText = Field(
        description="log pattern: .../%j_%t_log.out, in arrays .../%A_%a_%t_log.out; %t: task"
    )
    stderr: SingleLineText | None = Field(default=None, description="the same for errors; null: into stdout")
    directives: dict[SbatchOptionName, SingleLineText | int | Literal[True]] = Field(
        default={}, description="sbatch options in order: nodes, time, ...; true: an option without value"
    )
    signal: Literal["USR1", "USR2"] = Field(default="USR2", description="sent before the time limit")
    grace_s: int = Field(default=120, ge=1, description="how many seconds before")
    requeue: bool = Field(default=False, description="the job may be queued again under its own id")
    array: ArrayContext | None = Field(default=None, description="null unless this is an array")
    ranks_per_node: int = Field(default=1, ge=1, description="ranks on each node")
    container: ContainerContext | None = Field(default=None, description="null: ranks run on the host")
    modules: list[ModuleName] = Field(default=[], description="environment modules to load, in order")
    module_purge: bool = Field(default=False, description="`module purge` first")
    module_init: list[NoNulText] = Field(default=[], description="the admin's lines that define `module`")
    env: dict[VariableName, NoNulText] = Field(
        default={}, description="environment of the job; never contains a secret"
    )
    env_unset: list[VariableName] = Field(default=[], description="variables that are unset for the job")
    env_deny: list[VariablePattern] = Field(
        default=[], description="patterns of variables that sbatch is not to pass on; for what submits"
    )
    setup_lines: list[NoNulText] = Field(default=[], description="the admin's lines before the job")
    teardown_lines: list[NoNulText] = Field(default=[], description="the admin's lines after the job")
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
            values[key] = [as_shell_code(line) for line in values[key]]
        return values | {"accepts": self._accepts}

    def _accepts(self, feature: str) -> bool | None:
        entry = next((name for name in RELEASES_OF_FEATURE if name == feature), None)
        if entry is None:
            raise TemplateRuntimeError(
                f"accepts: {feature!r} is not known; there are: {', '.join(RELEASES_OF_FEATURE)}"
            )
        return has_feature(parse_slurm_version(self.slurm_version or ""), entry)


def describe_context() -> list[tuple[str, str, str]]:
    """Name, type and meaning of everything that a template gets, nested values with a dot."""
    rows = [*_describe(ScriptContext, "")]
    return [
        *rows,
        ("accepts(feature)", "bool | null", f"the release has it: {', '.join(RELEASES_OF_FEATURE)}"),
    ]


def _describe(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        kinds = [properties[name], *properties[name].get("anyOf", [])]
        words = [kind.get("type", "mapping" if "$ref" in kind else "") for kind in kinds]
        words = ["mapping" if word == "object" else "list" if word == "array" else word for word in words]
        yield f"{prefix}{name}", " | ".join(dict.fromkeys(filter(None, words))), field.description or ""
        for inner in (ArrayContext, ContainerContext):
            if inner in getattr(field.annotation, "__args__", ()):
                yield from _describe(inner, f"{name}.")


def context_from_profile(cluster: ClusterSpec | None) -> dict[str, Any]:
    """The part of a ScriptContext that the profile gives; the job's own modules and env come on top."""
    if cluster is None:
        return {}
    return {
        "cluster": cluster,
        "modules": cluster.modules.load,
        "module_purge": cluster.modules.purge,
        "module_init": cluster.modules.init,
        "env": set_variables(cluster.env),
        "env_unset": unset_variables(cluster.env),
        "env_deny": cluster.env_deny,
        "setup_lines": cluster.setup,
        "teardown_lines": cluster.teardown,
        "slurm_version": cluster.slurm_version,
    }


def example_context(
    library: TemplateLibrary,
    template: BatchTemplate,
    cluster: ClusterSpec | None = None,
    slurm_version: str | None = None,
) -> ScriptContext:
    """Return an example job of the kind that a template is for, with every optional part."""
    layers = library.chain(template)
    is_array = is_among_layers(layers, "array")
    runtime: Literal["pyxis", "apptainer"] = "pyxis" if "pyxis" in template.name else "apptainer"
    site = context_from_profile(cluster)
    version = slurm_version or site.get("slurm_version")
    run_dir = "/scratch/user/runs/fixture-0101-120000-abcdef"
    directives: dict[str, str | int | Literal[True]] = {"nodes": 2, "ntasks-per-node": 4, "time": 60}
    if cluster is not None and cluster.default_partition is not None:
        directives["partition"] = cluster.default_partition
    if not is_array and has_feature(parse_slurm_version(version or ""), "segment"):
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


def is_among_layers(layers: Iterable[BatchTemplate], name: str) -> bool:
    """Whether these layers include a template of this name."""
    return any(layer.name == f"{name}{TEMPLATE_SUFFIX}" for layer in layers)
