"""What single lines of a log mean once all of it is seen: the network asked for, the number of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcrun.tuning.log.nccl_log import NcclLog, NcclLogLine, parse_interface_line, reports_no_adapter

_ABSENT = re.compile(
    r"(?P<kind>NET|TUNER|PROFILER|COLLNET|GIN|ENV|RMA)/Plugin ?:?.*"
    r"(?:Could not find|No plugin found|Failed to load|Plugin load .*returned)"
)
_LOOPBACK = re.compile(r"(?:NET/Socket|Bootstrap).*(?:\]|Using |[ :])lo:(?:127\.|\[?::1)|onnect to 127\.\d")
_BRIDGE = re.compile(r"docker|virbr|cni|podman|veth|lxcbr|br-[0-9a-f]{6}")
_NO_TYPE = {(2, 21): ("282", "283"), (2, 22): ("284", "285")}
"""Lines of transport/net_ib.cc on which these releases, without a warning, fail to read the type of a GID."""
_SHARES_MEMORY = re.compile(r"\bGB10\b")
"""GPUs without memory of their own."""
_TOO_MUCH = re.compile(r"ncclMaxSharedMem \d+ exceeds")
_OWN = ("ib", "socket", "none", "")
"""Networks of NCCL's own, and no plugin at all."""


def meanings_in_context(log: NcclLog) -> dict[int, str]:
    """The meaning of lines, by their number, that the whole log decides."""
    rules = (_plugins, _adapters, _direct, _launches, _loopback, _types_of_gids)
    return {line.number: meaning for rule in rules for line, meaning in rule(log)}


def _types_of_gids(log: NcclLog) -> Iterator[tuple[NcclLogLine, str]]:
    """From 2.23 on a warning tells it."""
    for at in _NO_TYPE.get(log.release or (0, 0), ()):
        ends = f"transport/net_ib.cc:{at} -> 2"
        yield from ((line, "gid-type") for line in log.lines if line.text.endswith(ends))


def _plugins(log: NcclLog) -> Iterator[tuple[NcclLogLine, str]]:
    """A plugin that is asked for by name and is not there is no harmless line."""
    refused = any("network" in line.text and "not found" in line.text for line in log.lines)
    network = log.env.get("NCCL_NET", "").strip("\"'").lower()
    for line in log.lines:
        match = _ABSENT.search(line.text)
        if match is None or line.kind == "WARN":
            continue
        kind = match["kind"]
        named = log.env.get(f"NCCL_{kind}_PLUGIN", "").strip("\"'").lower() not in _OWN
        named = named or _names_another(line.text, kind)
        if kind == "NET" and (named or (refused and network not in _OWN)):
            yield line, "plugin-named-missing"
        elif named and kind in ("TUNER", "PROFILER"):
            yield line, "tuner-named-missing"


def _names_another(text: str, kind: str) -> bool:
    """Whether a library is looked for that NCCL does not look for by itself."""
    own = {f"lib{library}-{kind.lower()}.so" for library in ("nccl", "rccl")}
    libraries = re.findall(r"[\w./+-]*\blib[\w.+-]+\.so[\w.]*", text)
    if kind != "NET":
        # What is searched for a tuner as well is the network's plugin.
        libraries = [name for name in libraries if not name.startswith(("libnccl-net", "librccl-net"))]
    return any(name.rstrip(".") not in own for name in libraries)


def _adapters(log: NcclLog) -> Iterator[tuple[NcclLogLine, str]]:
    """An adapter is not missing on one node, nor where a plugin has the network."""
    other = log.network is not None and log.network not in ("Socket", "IB")
    if log.nodes != 1 and not other:
        return
    for line in log.lines:
        if reports_no_adapter(line.text) and "No device found" in line.text:
            yield line, "no-ib-one-node" if log.nodes == 1 else "no-ib-other-network"


def _direct(log: NcclLog) -> Iterator[tuple[NcclLogLine, str]]:
    """GPUs reach the NICs near them directly; that they do not reach the far ones is no fault."""
    shared = bool(log.gpus) and all(_SHARES_MEMORY.search(name) for name in log.gpus)
    near = any("GPU Direct RDMA Enabled" in line.text for line in log.lines)
    near = near or log.nodes == 1 or any("GDRDMA" in way for way in log.ways)
    for line in log.lines if near or shared else []:
        if "GPU Direct RDMA Disabled for" in line.text:
            yield line, "gdr-shared" if shared else "gdr-far"


def _launches(log: NcclLog) -> Iterator[tuple[NcclLogLine, str]]:
    """A kernel that asks for too much shared memory fails when it is started, without saying so again."""
    if any(_TOO_MUCH.search(line.text) for line in log.lines):
        for line in log.lines:
            if line.kind == "WARN" and line.place == "enqueue.cc" and "invalid argument" in line.text:
                yield line, "smem"


def _loopback(log: NcclLog) -> Iterator[tuple[NcclLogLine, str]]:
    """The first line of each node that shows an interface in use that does not lead to other nodes."""
    nodes = {line.node for line in log.lines} - {""}
    if (log.nodes or 0) < 2 and (log.nodes == 1 or len(nodes) < 2):
        return
    reported: set[str] = set()
    for line in log.lines:
        interface = parse_interface_line(line.text) or ""
        meaning = "loopback" if interface == "lo" or _LOOPBACK.search(line.text) else ""
        meaning = meaning or ("bridge" if _BRIDGE.match(interface) else "")
        if meaning and line.kind == "INFO" and line.node not in reported:
            reported.add(line.node)
            yield line, meaning
    if not reported:
        yield from [(line, "loopback") for line in log.lines if "onnect to 127." in line.text][:1]
