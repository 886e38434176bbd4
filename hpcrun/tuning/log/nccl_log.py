"""What an NCCL log tells: version, ways, graphs, the cost table, and which algorithm was really taken.

Pure: text in, object out. Formats are those of NCCL's own printing (src/graph/search.cc and tuning.cc,
src/enqueue.cc, src/init.cc) in three generations: up to 2.19 nothing is said of the choice, 2.20 to 2.23
print numbers, 2.24 and later names; 2.31 adds a line of its own. Lines may carry any prefix (see log_line).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, get_args

from hpcrun.errors import UsageError
from hpcrun.tuning.log.line import split_log_prefix
from hpcrun.tuning.log.torch_errors import TorchErrorReader
from hpcrun.tuning.model.nccl_constants import ALGOS, PROTOS, Algo, Proto
from hpcrun.tuning.model.nccl_model import (
    ExpectedPerformance,
    NcclCollective,
    NcclGraph,
    NcclMachine,
    model_version_notes,
)

_LINE = re.compile(r"(?<!\w)[RN]CCL (INFO|WARN|TRACE|VERSION|CALL) (.*)$")
_PLACE = re.compile(r"(?:^|\s)(?P<file>[\w./+-]+):(?P<at>\d+)(?: \([^)]*\))?\s*$")
"""Where in NCCL's source a warning is printed; from 2.29 on a thread's name may stand behind it."""
_VERSION = re.compile(r"(?<!\w)(?P<library>R?N?CCL) version(?: :)? (?P<version>\d+(?:\.\d+){1,3})\S*")
_COMM = re.compile(
    r"comm 0x[0-9a-f]+ rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+)"
    r"(?: nNodes (?P<nodes>\d+) localRanks (?P<local>\d+))?"
)
_PATTERN = re.compile(
    r"Pattern (?P<pattern>\d+), crossNic \d+, nChannels (?P<channels>\d+), (?:bw|speed)"
    r" (?P<intra>[\d.]+)/(?P<inter>[\d.]+),(?: nvlink \d+,)? type (?P<type>\w+/\w+),"
    r" sameChannels (?P<same>\d)"
)
_CHANNELS = re.compile(r"(?P<count>\d+) coll channels")
_VIA = re.compile(r"\d+\[\S+?\] -> \d+\[\S+?\](?: \[(?:send|receive)\])? via (?P<way>\S+)")
_NETWORK = re.compile(r"Using network (?P<name>.+?)\s*$")
_NICS = re.compile(r"\[\d+\](?P<nic>[^\s:\[\]]+:\S+)")
_ENV = re.compile(r"(?P<name>NCCL_[A-Z0-9_]+) set (?:by environment )?to (?P<value>.*?)\.?\s*$")
_REFUSED = re.compile(r"Invalid value \S+ for (?P<name>NCCL_[A-Z0-9_]+), using default")
_SOCKET = re.compile(r"(?:Bootstrap|NET/Socket) ?: ?Using (?:\[\d+\])?(?P<interface>[A-Za-z][\w.-]*):")
_NO_ADAPTER = re.compile(r"NET/IB : No device found|Using network Socket")
_WHO = re.compile(r"(?:^|[\s:>])(?P<node>[A-Za-z0-9][\w.-]*):\d+:\d+(?= )")
_TUNER = re.compile(r"TUNER/Plugin:? ?(?:Using|Plugin name set|Loaded)\S* (?P<name>.+?)\s*$", re.I)
_CHOSEN = re.compile(
    r"(?:(?P<call>[A-Za-z]+): )?(?P<bytes>\d+) Bytes -> Algo (?P<algo>\w+)\*? proto (?P<proto>\w+)"
    r"(?: time (?P<time>[\d.]+))?(?: channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\})?"
)
_INPUT = re.compile(r"Input: \{.*\.func = (?P<call>\w+),.*\.nBytes = (?P<bytes>\d+),")
_BEST = re.compile(
    r"Best tuning \{.*timeUs = (?P<time>[\d.]+),\s*\.algo = (?P<algo>\w+), \.proto = (?P<proto>\w+),"
    r".*nChannels = (?P<channels>\d+)"
)
_ERROR = re.compile(
    r"Traceback \(most recent|\b[A-Z]\w*(?:Error|Exception)\b|\b(?:[Ee]rror|ERROR|[Ff]atal|FATAL)(?::|\b )"
    r"|CUDA error|Segmentation fault|Bus error|core dumped|Out Of Memory|oom[-_]kill|\bKilled\b"
    r"|\bSIG(?:KILL|SEGV|ABRT|BUS)\b"
)
_RDMA = re.compile(
    r"(?i)ncclIbRoceGetVersionNum|gid_attrs/\w+.*(?:Invalid argument|EINVAL)"
    r"|(?:Invalid argument|Errno 22).*gid_attrs/"
    r"|status[ =:]*(?:IBV_WC_\w+\(?)?\d+\b.*(?:vendor|syndrom)"
)
"""What other programs, such as perftest, say of verbs devices in words that NCCL has too."""
_DEVICE = re.compile(r"#\s+Rank\s+\d+ .*\bdevice\s+\d+ \[[^\]]+\] (?P<gpu>\S.*?)\s*$")
_CELL = re.compile(r"\s*(?P<latency>[\d.]+)/\s*(?P<bandwidth>[\d.]+)\s*")
_PATTERNS = {1: "tree", 2: "tree", 3: "tree", 4: "ring", 5: "nvls", 6: "collnet"}
"""NCCL_TOPO_PATTERN_*: balanced, split and plain tree, ring, NVLS, CollNetDirect."""
_BALANCED = 1


class AlgorithmChoice(NamedTuple):
    """What NCCL took for one call."""

    collective: str
    """As NCCL writes it; `unknown` in logs of 2.20 and 2.21."""
    size_bytes: int
    algo: str
    proto: str
    channels: int | None = None
    time_us: float | None = None
    """What its model expected."""


class NcclLogLine(NamedTuple):
    """One line of NCCL's, without its prefix."""

    kind: str
    """INFO, WARN, ...; TORCH for what PyTorch says of NCCL, RDMA for what others say of verbs devices."""
    text: str
    number: int
    place: str = ""
    """The file of NCCL's source that prints it, as transport/nvls.cc; empty where the line does not say."""
    node: str = ""


@dataclass
class NcclLog:
    """All that one log says; what is not in it is None or empty."""

    library: str | None = None
    version: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    per_node: int | None = None
    channels: int | None = None
    network: str | None = None
    nics: tuple[str, ...] = ()
    ways: Counter[str] = field(default_factory=Counter)
    """Connections by their way, such as P2P/CUMEM or NET/IB/0/GDRDMA."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that NCCL says it has read."""
    tuner: str | None = None
    graphs: dict[str, NcclGraph] = field(default_factory=dict)
    table: dict[tuple[NcclCollective, Algo, Proto], ExpectedPerformance] = field(default_factory=dict)
    """Latency and bandwidth that its model has worked out; without those it will not take."""
    chosen: Counter[AlgorithmChoice] = field(default_factory=Counter)
    gpus: set[str] = field(default_factory=set)
    """Models, as nccl-tests names them."""
    lines: list[NcclLogLine] = field(default_factory=list)
    read: int = 0
    """All lines of the text."""
    errors: list[NcclLogLine] = field(default_factory=list)
    """Lines of others that speak of an error; nothing here understands them."""

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version."""
        if self.version is None or self.library != "NCCL":
            return None
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)

    def expectations(self, collective: NcclCollective) -> dict[tuple[Algo, Proto], ExpectedPerformance]:
        """The table's row of one collective."""
        return {
            (algo, proto): expected
            for (call, algo, proto), expected in self.table.items()
            if call == collective
        }

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            **{
                key: getattr(self, key)
                for key in ("library", "version", "ranks", "nodes", "per_node", "channels", "network")
            },
            "nics": list(self.nics),
            "ways": dict(self.ways),
            "env": self.env,
            "tuner": self.tuner,
            "graphs": {name: vars(graph) for name, graph in self.graphs.items()},
            "table": [
                {"collective": call, "algo": algo, "proto": proto, **vars(expected)}
                for (call, algo, proto), expected in self.table.items()
            ],
            "chosen": [{**choice._asdict(), "calls": calls} for choice, calls in self.chosen.items()],
            "lines": {"read": self.read, "of_nccl": len(self.lines), "errors_elsewhere": len(self.errors)},
        }


def parse_nccl_log(text: str) -> NcclLog:
    """Everything that is recognised; a text without a line of NCCL's gives an empty log."""
    log = NcclLog()
    table = _CostTable()
    torch = TorchErrorReader()
    request: re.Match[str] | None = None
    best: Counter[AlgorithmChoice] = Counter()
    for log.read, raw in enumerate(text.splitlines(), 1):
        prefix, bare = split_log_prefix(raw)
        if log.version is None and (version := parse_version_line(bare)):
            log.library, log.version = version
        nccl_line = _LINE.search(bare)
        if nccl_line is None:
            if device := _DEVICE.match(bare):
                log.gpus.add(device["gpu"])
            if torch.read(prefix, bare, log.read):
                continue
            if _RDMA.search(bare):
                log.lines.append(NcclLogLine("RDMA", bare.strip(), log.read))
            elif _ERROR.search(bare):
                log.errors.append(NcclLogLine("OTHER", bare.strip(), log.read))
            continue
        torch.interrupt(prefix)
        line = NcclLogLine(
            nccl_line[1],
            nccl_line[2].strip(),
            log.read,
            _source_file(bare[: nccl_line.start()]),
            node_of_line(bare),
        )
        log.lines.append(line)
        if match := _INPUT.search(line.text):
            request = match
        elif (match := _BEST.search(line.text)) and request is not None:
            best[_parse_best(request, match)] += 1
        elif choice := parse_choice_line(line.text):
            log.chosen[choice] += 1
        elif "|" in line.text:
            table.read(line.text, log)
        else:
            _read(line.text, log)
    if not log.chosen:
        log.chosen = best
    log.lines += [
        NcclLogLine("TORCH" if error.own else "WARN", error.text, error.number) for error in torch.found
    ]
    log.lines.sort(key=lambda line: line.number)
    _count_nodes(log)
    return log


def _source_file(head: str) -> str:
    """The file that stands before NCCL WARN, from the root of the source."""
    match = _PLACE.search(head)
    return match["file"].rpartition("src/")[2] if match else ""


def _count_nodes(log: NcclLog) -> None:
    """Nodes where NCCL does not count them itself: by ranks on each, or one where all ranks tell from it."""
    if log.nodes is not None or not log.ranks:
        return
    if log.per_node:
        log.nodes = log.ranks // log.per_node
        return
    writers = [(match["rank"], line.node) for line in log.lines if (match := _COMM.search(line.text))]
    if len({rank for rank, _ in writers}) == log.ranks and len({node for _, node in writers} - {""}) == 1:
        log.nodes, log.per_node = 1, log.ranks


def parse_version_line(line: str) -> tuple[str, str] | None:
    """NCCL or RCCL, and its release, where a line tells it; the line need not begin like NCCL's others."""
    match = _VERSION.search(line)
    return (match["library"], match["version"]) if match else None


def node_of_line(line: str) -> str:
    """The node that a line of NCCL's is from, without its domain; empty where it does not say."""
    # A time of day looks like a process and a thread, and stands before them.
    nodes = _WHO.findall(line.partition(" NCCL ")[0] + " ")
    return str(nodes[-1]).partition(".")[0] if nodes else ""


def parse_variable_line(line: str) -> tuple[str, str] | None:
    """The variable that NCCL says it has read, and its value."""
    match = _ENV.search(line)
    return (match["name"], match["value"]) if match else None


def parse_refused_variable(line: str) -> str | None:
    """The variable whose value NCCL says it has not taken."""
    match = _REFUSED.search(line)
    return match["name"] if match else None


def parse_interface_line(line: str) -> str | None:
    """The interface that NCCL says its sockets use."""
    match = _SOCKET.search(line)
    return match["interface"] if match else None


def parse_nics_line(line: str) -> tuple[str, ...]:
    """What a line of the network in use names, as mlx5_0:1/RoCE or eth0:10.0.0.7<0>."""
    if not re.search(r"NET/(?:IB|Socket) : Using", line):
        return ()
    return tuple(match["nic"] for match in _NICS.finditer(line.partition("; OOB")[0]))


def reports_no_adapter(line: str) -> bool:
    """Whether a line says that no InfiniBand or RoCE is used."""
    return _NO_ADAPTER.search(line) is not None


def parse_choice_line(line: str) -> AlgorithmChoice | None:
    """What NCCL says that it has taken for a call."""
    match = _CHOSEN.search(line)
    return _parse_chosen(match) if match else None


def _read(text: str, log: NcclLog) -> None:
    """One line of those that stand for themselves."""
    if match := _VIA.search(text):
        log.ways[match["way"]] += 1
    elif match := _PATTERN.search(text):
        _read_graph(match, log)
    elif match := _COMM.search(text):
        # The largest communicator is the one that matters.
        if log.ranks is None or int(match["ranks"]) > log.ranks or log.nodes is None:
            log.ranks = max(log.ranks or 0, int(match["ranks"]))
            if match["nodes"]:
                log.nodes, log.per_node = int(match["nodes"]), int(match["local"])
    elif match := _CHANNELS.search(text):
        log.channels = int(match["count"])
    elif match := _NETWORK.search(text):
        log.network = match["name"]
    elif variable := parse_variable_line(text):
        log.env[variable[0]] = variable[1]
    elif (nics := parse_nics_line(text)) and not log.nics:
        log.nics = nics
    elif "Could not find" not in text and (match := _TUNER.search(text)):
        log.tuner = match["name"]


def _read_graph(match: re.Match[str], log: NcclLog) -> None:
    name = _PATTERNS.get(int(match["pattern"]))
    channels = int(match["channels"])
    if name is None or not channels or name in log.graphs:
        return
    intra, _, inter = match["type"].partition("/")
    log.graphs[name] = NcclGraph(
        channels,
        float(match["intra"]),
        float(match["inter"]),
        intra,
        inter,
        int(match["pattern"]) == _BALANCED,
        match["same"] == "1",
    )


class _CostTable:
    """The table of latencies and bandwidths, in one piece (up to 2.19) or in blocks of three algorithms."""

    def __init__(self) -> None:
        self._columns: list[tuple[Algo | None, Proto | None]] = []

    def read(self, text: str, log: NcclLog) -> None:
        """One line with bars."""
        head, *cells = (part.strip() for part in text.split("|"))
        if head == "Algorithm":
            self._columns = [(_find_name(cell, ALGOS), proto) for cell in cells if cell for proto in PROTOS]
        elif head == "Latency/AlgBw":
            pairs = [cell.partition("/") for cell in cells if cell]
            self._columns = [
                (_find_name(algo, ALGOS), _find_name(proto.strip(), PROTOS)) for algo, _, proto in pairs
            ]
        else:
            self._read_row(head, cells, log)

    def _read_row(self, head: str, cells: list[str], log: NcclLog) -> None:
        call: NcclCollective | None = _find_name(head, get_args(NcclCollective))
        if call is None:
            return
        # 2.29 prints the protocols of algorithms that there are not, and cells for some of them.
        for (algo, proto), cell in zip(self._columns, cells, strict=False):
            match = _CELL.fullmatch(cell)
            if algo and proto and match and float(match["bandwidth"]) > 0:
                expected = ExpectedPerformance(float(match["latency"]), float(match["bandwidth"]))
                log.table.setdefault((call, algo, proto), expected)


def _parse_chosen(match: re.Match[str]) -> AlgorithmChoice:
    channels = int(match["high"]) - int(match["low"]) + 1 if match["high"] else None
    return AlgorithmChoice(
        match["call"] or "unknown",
        int(match["bytes"]),
        _name_of_number(match["algo"], ALGOS),
        _name_of_number(match["proto"], PROTOS),
        channels,
        float(match["time"]) if match["time"] else None,
    )


def _parse_best(request: re.Match[str], match: re.Match[str]) -> AlgorithmChoice:
    return AlgorithmChoice(
        request["call"],
        int(request["bytes"]),
        _name_of_number(match["algo"], ALGOS),
        _name_of_number(match["proto"], PROTOS),
        int(match["channels"]),
        float(match["time"]),
    )


_Name = TypeVar("_Name", bound=str)


def _name_of_number(word: str, names: Sequence[str]) -> str:
    """A number's name, or the name as it is written everywhere; what is unknown stays as it was printed."""
    if word.isdigit():
        return names[int(word)] if int(word) < len(names) else word
    return _find_name(word, names) or word


def _find_name(word: str, names: Sequence[_Name]) -> _Name | None:
    """The name that a word is but for capitals and underscores."""
    plain = word.replace("_", "").lower()
    return next((name for name in names if name.lower() == plain), None)


def machine_from_log(
    log: NcclLog, name: str, nodes: int | None, per_node: int | None, capability: int | None
) -> tuple[NcclMachine, list[str]]:
    """What the model needs, from a log; what was asked for goes first. UsageError where something is missing.

    The notes say what the log did not tell and what was taken in its place.
    """
    notes: list[str] = []
    nodes, per_node = nodes or log.nodes, per_node or log.per_node
    if nodes is None and log.ranks and per_node:
        nodes = log.ranks // per_node
    if per_node is None and log.ranks and nodes:
        per_node = log.ranks // nodes
    if nodes is None or per_node is None:
        raise UsageError(f"{name}: does not tell nodes and ranks; add --nodes N --ranks-per-node R")
    if not log.table and not log.graphs:
        raise UsageError(
            f"{name}: has neither NCCL's table nor its graphs; run with NCCL_DEBUG=INFO"
            " NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING"
        )
    if log.ranks and log.table and log.ranks != nodes * per_node:
        raise UsageError(
            f"{name}: its table is of {log.ranks} ranks, not of {nodes * per_node}; leave out --nodes and"
            " --ranks-per-node"
        )
    if capability is None:
        if not log.table:
            raise UsageError(f"{name}: does not tell which GPUs these are; add --platform for them")
        capability = 80
        notes.append("the GPUs are not known: taken as sm80 or newer")
    if log.release is not None and not log.table:
        notes += model_version_notes(log.release)
    graphs = dict(log.graphs)
    if "ring" not in graphs and log.channels:
        graphs["ring"] = NcclGraph(log.channels, 1.0, 1.0)
    version = log.release or (2, 30)
    return NcclMachine(nodes, per_node, capability, graphs, version=version), notes
