"""Which Slurm release accepts what: one table, and the question put to it."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from hpcrun.errors import UsageError


class SlurmVersion(NamedTuple):
    """A release of Slurm; what a vendor or a distribution adds to its name does not count."""

    year: int
    month: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.year:02}.{self.month:02}.{self.micro}"


SlurmRelease = tuple[int, int]
SlurmFeature = Literal[
    "gpus-options",
    "segment",
    "segment-of-several-blocks",
    "spread-segments",
    "exclusive-topo",
    "requeue-expedite",
    "nodelist-longer-than-nodes",
    "hostlist-suffix",
    "hostlist-functions",
    "cpus-per-task-reaches-srun",
    "block-topology",
    "block-size-shown",
    "topology-bare-unit",
    "topology-unit-argument",
    "topoconf",
    "partition-topology",
    "ring-topology",
    "scontrol-json",
]


class FeatureReleases(NamedTuple):
    """From which release on something is there, up to which, and the gap in between if there was one."""

    since: SlurmRelease
    words: str
    until: SlurmRelease | None = None
    gap: tuple[SlurmRelease, SlurmRelease] | None = None


_ALWAYS: SlurmRelease = (0, 0)
RELEASES_OF_FEATURE: dict[SlurmFeature, FeatureReleases] = {
    "gpus-options": FeatureReleases((19, 5), "sbatch --gpus, --gpus-per-node and --gpus-per-task"),
    "segment": FeatureReleases((24, 5), "sbatch --segment"),
    "segment-of-several-blocks": FeatureReleases((25, 11), "a --segment larger than the base block"),
    "spread-segments": FeatureReleases((25, 11), "sbatch --spread-segments and --consolidate-segments"),
    "exclusive-topo": FeatureReleases((24, 5), "sbatch --exclusive=topo"),
    "requeue-expedite": FeatureReleases((25, 11), "sbatch --requeue=expedite"),
    "nodelist-longer-than-nodes": FeatureReleases((23, 2), "a --nodelist of more nodes than --nodes"),
    "hostlist-suffix": FeatureReleases((23, 11), "host lists with text behind the bracket, n[01-10]-ib"),
    "hostlist-functions": FeatureReleases((24, 11), "host lists that name a switch{} or block{}"),
    "cpus-per-task-reaches-srun": FeatureReleases(
        _ALWAYS,
        "srun taking --cpus-per-task from sbatch (else set SRUN_CPUS_PER_TASK)",
        gap=((22, 5), (23, 11)),
    ),
    "block-topology": FeatureReleases((23, 11), "topology/block"),
    "block-size-shown": FeatureReleases((24, 11), "BlockSize= in `scontrol show topology`"),
    "topology-bare-unit": FeatureReleases(
        _ALWAYS, "`scontrol show topology UNIT`; a bare word names a topology since", (25, 5)
    ),
    "topology-unit-argument": FeatureReleases((25, 5), "`scontrol show topology unit=U node=N`"),
    "topoconf": FeatureReleases((25, 5), "`scontrol show topoconf`"),
    "partition-topology": FeatureReleases((25, 5), "a topology of its own for a partition"),
    "ring-topology": FeatureReleases((26, 5), "topology/ring and topology/torus3d"),
    "scontrol-json": FeatureReleases((23, 2), "`scontrol --json`"),
}

_VERSION = re.compile(
    r"^\s*(?:slurm\S*\s+)?v?(\d\d)\.(0[258]|11)(?:[.-](\d{1,4}))?(?!\d)",
    re.ASCII | re.MULTILINE | re.IGNORECASE,
)


def parse_slurm_version(text: str) -> SlurmVersion | None:
    """The release in `slurm 22.05.8`, `slurm-wlm 22.05.8`, `23.02`, `22.05.7-Atos.1.1`; None without one."""
    match = _VERSION.search(text)
    return SlurmVersion(int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def has_feature(version: SlurmVersion | None, feature: SlurmFeature) -> bool | None:
    """Whether a release has a feature; None when the release is unknown."""
    if version is None:
        return None
    gate, release = RELEASES_OF_FEATURE[feature], version[:2]
    if gate.gap and gate.gap[0] <= release < gate.gap[1]:
        return False
    return gate.since <= release and (gate.until is None or release < gate.until)


def require_feature(version: SlurmVersion | None, feature: SlurmFeature, where: str) -> None:
    """UsageError when a release is known not to have a feature; `where` begins the line."""
    if has_feature(version, feature) is not False:
        return
    gate = RELEASES_OF_FEATURE[feature]
    allowed = []
    if gate.until:
        allowed.append(f"before {_format_release(gate.until)}")
    if gate.gap:
        allowed.append(f"before {_format_release(gate.gap[0])} and from {_format_release(gate.gap[1])} on")
    if gate.since > _ALWAYS:
        allowed.append(f"from {_format_release(gate.since)} on")
    raise UsageError(f"{where}: Slurm {version} does not have {gate.words}; it exists {' '.join(allowed)}")


def _format_release(release: SlurmRelease) -> str:
    return f"{release[0]:02}.{release[1]:02}"
