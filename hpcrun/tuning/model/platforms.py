"""The table of platforms, and how far the model may be off on each: shipped, or a site's own file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from hpcrun.errors import SpecError, UsageError
from hpcrun.fabric.collectives import IntraNodeLink
from hpcrun.fabric.graph import Fabric, FabricLevel
from hpcrun.specs.fields import SpecSection
from hpcrun.specs.validation import problems_of_validation_error
from hpcrun.specs.yaml import YamlDocument, load_yaml
from hpcrun.tuning.model.nccl_model import CpuVendor, NcclGraph, NcclMachine

CollectiveLibrary = Literal["nccl", "mpi", "gloo"]
_TABLE = Path(__file__).with_name("platforms.yaml")
_GB = 1e9
_Model = TypeVar("_Model", bound=BaseModel)


class GraphSpec(SpecSection):
    """What NCCL's search finds, as it prints it at init."""

    channels: int = Field(ge=1)
    bw_intra: float = Field(gt=0, description="GB/s of a channel inside a node")
    bw_inter: float = Field(gt=0, description="GB/s of a channel between nodes")
    type_intra: str = "NVL"
    type_inter: str = "PXN"
    balanced: bool = True
    same_channels: bool = True


class NetworkLevelSpec(SpecSection):
    """One level of the network from the node upwards, for the α-β models."""

    name: str
    bandwidth_GBps: float = Field(gt=0, description="of one node's link at this level, one direction")
    latency_us: float = Field(ge=0, description="added by this level, one way")
    oversubscription: float = Field(default=1.0, ge=1)
    nodes: int | None = Field(default=None, ge=1, description="below one unit; default: all")


class SmallMessageSpec(SpecSection):
    """What small messages find: libraries and networks treat them otherwise than large ones."""

    up_to_bytes: int = Field(ge=1)
    levels: list[NetworkLevelSpec] = Field(min_length=1)


class IntraNodeSpec(SpecSection):
    """What a rank's way to the others on its node carries."""

    bandwidth_GBps: float = Field(gt=0)
    latency_us: float = Field(default=0.0, ge=0)


class ModelErrorSpec(SpecSection):
    """The error of the model, with its source."""

    library: CollectiveLibrary
    share: float = Field(gt=0, description="of the time")
    source: str
    nodes: Literal["one", "several", "any"] = "any"
    from_bytes: int = Field(default=0, ge=0)
    capability: int | None = Field(
        default=None, ge=60, description="of the GPUs it is known for; default: any"
    )

    def fits(
        self, library: CollectiveLibrary, nodes: int, size_bytes: float, capability: int | None = None
    ) -> bool:
        """Whether it is about this case; GPUs that nobody names may be those."""
        right = self.nodes in ("any", "one" if nodes == 1 else "several")
        same = None in (capability, self.capability) or capability == self.capability
        return self.library == library and right and same and size_bytes >= self.from_bytes


class PlatformSpec(SpecSection):
    """All that is known of one kind of machine."""

    about: str
    source: str = Field(description="where the figures are from")
    gpus_per_node: int | None = Field(default=None, ge=1)
    capability: int | None = Field(default=None, ge=60, description="of the GPUs, 90 for sm90")
    cpu: CpuVendor = "other"
    nic_latency_us: float = Field(default=0.0, ge=0, description="as the net plugin tells it")
    collnet: bool = False
    one_node: dict[Literal["ring", "tree", "nvls", "collnet"], GraphSpec] = Field(default_factory=dict)
    several_nodes: dict[Literal["ring", "tree", "nvls", "collnet"], GraphSpec] = Field(default_factory=dict)
    levels: list[NetworkLevelSpec] = Field(default_factory=list)
    small_messages: SmallMessageSpec | None = None
    inside: IntraNodeSpec | None = None
    reduce_GBps: float | None = Field(default=None, gt=0, description="at which a rank adds up")
    errors: list[ModelErrorSpec] = Field(default_factory=list)

    def machine(self, nodes: int, per_node: int, version: tuple[int, int]) -> NcclMachine | None:
        """As NCCL's model wants it; None where the graphs for so many nodes are not known."""
        specs = self.one_node if nodes == 1 else self.several_nodes
        if not specs or self.capability is None:
            return None
        graphs: dict[str, NcclGraph] = {name: NcclGraph(**dict(spec)) for name, spec in specs.items()}
        return NcclMachine(
            nodes,
            per_node,
            self.capability,
            graphs,
            self.cpu,
            self.nic_latency_us,
            collnet=self.collnet,
            version=version,
        )

    def fabric(self, nodes: int) -> Fabric | None:
        """Nodes filled into the units of its levels in order; None where no levels are known."""
        return self._fabric(nodes, self.levels)

    def small_fabric(self, nodes: int) -> Fabric | None:
        """The fabric for small messages; None where it is the same."""
        return self._fabric(nodes, self.small_messages.levels) if self.small_messages else None

    def _fabric(self, nodes: int, specs: Sequence[NetworkLevelSpec]) -> Fabric | None:
        if not specs:
            return None
        names = tuple(f"node{number}" for number in range(1, nodes + 1))
        units = tuple(
            tuple(f"{level.name}{at // level.nodes + 1 if level.nodes else 1}" for level in specs)
            for at in range(nodes)
        )
        levels = tuple(
            FabricLevel(
                level.name, level.bandwidth_GBps * _GB, level.oversubscription, level.latency_us / 1e6
            )
            for level in specs
        )
        return Fabric(names, levels, units, source=self.about)

    @property
    def within(self) -> IntraNodeLink | None:
        """The link of a rank inside its node; None: unknown."""
        if self.inside is None:
            return None
        return IntraNodeLink(self.inside.bandwidth_GBps * _GB, self.inside.latency_us / 1e6)


class _PlatformTable(SpecSection):
    platforms: dict[str, PlatformSpec]
    errors: list[ModelErrorSpec] = Field(default_factory=list)


@cache
def _shipped_table() -> _PlatformTable:
    return validate_document(load_yaml(_TABLE), _PlatformTable)


def platform_names() -> tuple[str, ...]:
    """The names in the shipped table."""
    return tuple(_shipped_table().platforms)


def find_platform(name: str) -> PlatformSpec:
    """By name, or from a file; UsageError lists what there is."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return validate_document(load_yaml(Path(name)), PlatformSpec)
    if name not in _shipped_table().platforms:
        raise UsageError(
            f"--platform {name}: is not known; there are {', '.join(platform_names())}; or a FILE.yaml of"
            " your own, or --log FILE with NCCL's init lines"
        )
    return _shipped_table().platforms[name]


def find_model_error(
    platform: PlatformSpec | None, library: CollectiveLibrary, nodes: int, size_bytes: float
) -> ModelErrorSpec | None:
    """The error of the model here; None: it has not been compared with measured times."""
    capability = platform.capability if platform else None
    for errors in (platform.errors if platform else (), _shipped_table().errors):
        fitting = [entry for entry in errors if entry.fits(library, nodes, size_bytes, capability)]
        if fitting:
            return fitting[-1]
    return None


def validate_document(document: YamlDocument, model: type[_Model]) -> _Model:
    """The content of a YAML file as a model; SpecError lists every mistake with its line."""
    try:
        return model.model_validate(document.values)
    except ValidationError as error:
        problems = problems_of_validation_error(error, model)
    raise SpecError([replace(problem, where=document.where(problem.key)) for problem in problems])
