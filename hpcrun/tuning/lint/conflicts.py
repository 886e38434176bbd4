"""What is wrong between variables although each by itself is in order; one function a rule, all pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hpcrun.finding import Finding
from hpcrun.tuning.lint.environment import VariableAssignment
from hpcrun.tuning.lint.traffic_classes import CLASS_VARIABLES, check_class_agreement, decode_traffic_class
from hpcrun.tuning.registry.device_names import parse_device_list
from hpcrun.tuning.registry.nccl_grammar import (
    FROM_EMPTY_SINCE,
    functions_without_choice,
    parse_nccl_selection,
)
from hpcrun.tuning.registry.registry import Version, format_version, value_in_release, variable_registry
from hpcrun.tuning.registry.values import parse_c_integer
from hpcrun.tuning.variable_findings import make_error, make_note, make_warning, quote_value

_STEPS = 8
"""NCCL_STEPS: parts of a buffer, each at most as large as a chunk."""
_MIB = 2**20
_ROUTED_FROM = 8192
"""NCCL_IB_AR_THRESHOLD of all releases where nobody sets it; from 2.30 on it is written -2."""
_AUTOMATIC = -2
_PLUGINS = re.compile(r"hpcx|nccl_rdma_sharp|aws-ofi-nccl|nccl-rdma-sharp|fastrak|gpudirect", re.I)
_RAS_CRASHES = {(2, 26, 2), (2, 27, 7), (2, 29, 7)}
"""Releases in which a question to the RAS thread has ended jobs."""
_RIGHT_DETOURS = (2, 19)
"""What NCCL's authors recommend against wrong results without P2P or PXN; the fix itself is not on record."""


@dataclass(frozen=True)
class SettingsView:
    """What counts, as rules look at it; a value that is not known is never there."""

    settings: Mapping[str, VariableAssignment]
    version: Version | None

    def text(self, name: str) -> str | None:
        """A value that is set and known."""
        setting = self.settings.get(name)
        return setting.value if setting is not None and setting.value else None

    def number(self, name: str) -> int | None:
        """A value as a number."""
        text = self.text(name)
        return None if text is None else parse_c_integer(text)

    def default(self, name: str) -> int | None:
        """A number that holds when nothing is set."""
        return parse_c_integer(
            value_in_release(variable_registry().variables[name].default, self.version) or ""
        )

    def may_be_since(self, *release: int) -> bool:
        """Whether the release is this one or a newer one, or not known."""
        return self.version is None or self.version >= release


def find_conflicts(settings: Mapping[str, VariableAssignment], version: Version | None) -> Iterator[Finding]:
    """Everything that does not go together."""
    view = SettingsView(settings, version)
    for rule in _RULES:
        yield from rule(view)


def find_plugin_folder(path: str) -> str | None:
    """The first folder of a library path that a network plugin of NCCL is known to lie in."""
    return next((folder for folder in path.split(":") if _PLUGINS.search(folder)), None)


def _sockets(view: SettingsView) -> Iterator[Finding]:
    threads, sockets = view.number("NCCL_SOCKET_NTHREADS"), view.number("NCCL_NSOCKS_PERTHREAD")
    if threads and sockets and threads * sockets > 64:
        text = f"{threads} threads × {sockets} sockets are {threads * sockets}; 64 are allowed"
        yield make_error("NCCL_NSOCKS_PERTHREAD", text)


def _queue_pairs(view: SettingsView) -> Iterator[Finding]:
    split, pairs = view.number("NCCL_IB_SPLIT_DATA_ON_QPS"), view.number("NCCL_IB_QPS_PER_CONNECTION")
    if split is not None and (pairs or 1) == 1:
        text = "does nothing with one queue pair; NCCL_IB_QPS_PER_CONNECTION is not above 1"
        yield make_warning("NCCL_IB_SPLIT_DATA_ON_QPS", text)
    elif split is None and pairs is not None and pairs > 1:
        default = value_in_release(
            variable_registry().variables["NCCL_IB_SPLIT_DATA_ON_QPS"].default, view.version
        )
        release = format_version(view.version) if view.version else "2.20 and later"
        yield make_note(
            "NCCL_IB_QPS_PER_CONNECTION",
            f"NCCL_IB_SPLIT_DATA_ON_QPS is not set; {release} has {default}"
            f" ({'split each message' if default == '1' else 'take the pairs in turn'})",
        )


def _gid(view: SettingsView) -> Iterator[Finding]:
    index = view.number("NCCL_IB_GID_INDEX")
    if index is None or index < 0:
        return
    others = [
        name
        for name in ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")
        if view.text(name)
    ]
    for name in others:
        yield make_warning(name, f"is not looked at: NCCL_IB_GID_INDEX={index} chooses the GID")
    if view.may_be_since(2, 21):
        newer = "" if view.version else "from 2.21 on "
        yield make_warning(
            "NCCL_IB_GID_INDEX",
            f"{newer}NCCL finds it; a fixed index differs between nodes, reboots and containers:"
            " leave it out, or say NCCL_IB_ADDR_FAMILY and NCCL_IB_ADDR_RANGE",
        )


def _no_infiniband(view: SettingsView) -> Iterator[Finding]:
    named = view.text("NCCL_NET") or ""
    net = named.lower()
    off = view.number("NCCL_IB_DISABLE") == 1
    if off and net == "ib":
        yield make_error("NCCL_NET", "is IB while NCCL_IB_DISABLE=1 turns it off; take one of them out")
    elif net not in ("", "ib", "socket") and (view.text("NCCL_NET_PLUGIN") or "").lower() == "none":
        text = f"{quote_value(named)} comes from a plugin, and NCCL_NET_PLUGIN=none loads none"
        yield make_error("NCCL_NET", text)
    if off or net == "socket":
        why = "NCCL_IB_DISABLE=1" if off else "NCCL_NET=Socket"
        for name in view.settings:
            if (
                name.startswith("NCCL_IB_")
                and name != "NCCL_IB_DISABLE"
                and name in variable_registry().variables
            ):
                yield make_warning(name, f"does nothing: {why} turns InfiniBand and RoCE off")
    plugin = find_plugin_folder(view.text("LD_LIBRARY_PATH") or "")
    if off and plugin and (view.text("NCCL_NET_PLUGIN") or "").lower() != "none":
        yield make_warning(
            "NCCL_IB_DISABLE",
            f"is ignored once a plugin is loaded, and LD_LIBRARY_PATH holds {quote_value(plugin)};"
            " NCCL_NET=Socket is the sure way, NCCL_NET_PLUGIN=none keeps the plugin out",
        )


def _bounds(view: SettingsView) -> Iterator[Finding]:
    for what in ("CTAS", "NCHANNELS", "P2P_NCHANNELS", "NRINGS"):
        low, high = view.number(f"NCCL_MIN_{what}"), view.number(f"NCCL_MAX_{what}")
        if low is not None and high is not None and low > high:
            yield make_error(f"NCCL_MIN_{what}", f"{low} is above NCCL_MAX_{what}={high}")
    for end in ("MIN", "MAX"):
        if view.text(f"NCCL_{end}_CTAS") and view.text(f"NCCL_{end}_NCHANNELS"):
            text = f"stands beside NCCL_{end}_CTAS; the tighter of the two holds: keep that one"
            yield make_warning(f"NCCL_{end}_NCHANNELS", text)
        if view.text(f"NCCL_{end}_NRINGS") and view.text(f"NCCL_{end}_NCHANNELS"):
            yield make_warning(f"NCCL_{end}_NRINGS", f"is ignored beside NCCL_{end}_NCHANNELS")


def _chunks(view: SettingsView) -> Iterator[Finding]:
    buffer = view.number("NCCL_BUFFSIZE") or view.default("NCCL_BUFFSIZE") or 0
    step = buffer // _STEPS
    chunk = view.number("NCCL_CHUNK_SIZE")
    if chunk is not None and chunk >= _MIB:
        text = f"{chunk}: from 1 MiB on results have been wrong, with Xid 31; stay below"
        yield make_warning("NCCL_CHUNK_SIZE", text)
    for name in ("NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE"):
        size = view.number(name)
        if size is not None and size > step and view.may_be_since(2, 19):
            text = f"{size} is cut to {step}, an eighth of NCCL_BUFFSIZE"
            yield make_note(
                name, f"{text}; {size * _STEPS} there would let it count, and takes that much memory"
            )


def _adaptive_routing(view: SettingsView) -> Iterator[Finding]:
    """The size from which on data goes apart from its notice: src/transport/net_ib/p2p.cc:131 of 2.30.7.

    What it costs: N#1050.
    """
    name = "NCCL_IB_AR_THRESHOLD"
    threshold = view.number(name)
    if threshold is None or threshold == _AUTOMATIC:
        return
    buffer = view.number("NCCL_BUFFSIZE") or view.default("NCCL_BUFFSIZE") or 0
    if threshold > buffer:
        text = f"{threshold} is above NCCL_BUFFSIZE {buffer}: no message uses adaptive routing"
        yield make_warning(name, text)
    elif view.number("NCCL_IB_ADAPTIVE_ROUTING") == 0:
        yield make_warning(name, "does nothing: NCCL_IB_ADAPTIVE_ROUTING=0 sends each message in one piece")
    elif view.number("NCCL_IB_OOO_RQ") == 1 and view.may_be_since(2, 30):
        text = "is not looked at: NCCL_IB_OOO_RQ=1 lets data and its notice arrive in any order"
        yield make_warning(name, text)
    elif threshold < _ROUTED_FROM:
        sizes = "all messages" if threshold <= 0 else f"messages of {threshold} to {_ROUTED_FROM} bytes"
        roce = (
            "NCCL_IB_ADAPTIVE_ROUTING=1 needs switches and adapters that are set up for it"
            if view.number("NCCL_IB_ADAPTIVE_ROUTING") == 1
            else "it does nothing without NCCL_IB_ADAPTIVE_ROUTING=1"
        )
        text = (
            f"{threshold}: {sizes} cost a second work request each, and small ones take longer;"
            f" {_ROUTED_FROM} is the default, and large ones gain nothing. It is wrong where adaptive routing"
            f" is off: on InfiniBand it must be on for the service level of NCCL_IB_SL, on RoCE {roce}"
        )
        yield make_warning(name, text, "leave it out, unless small messages were measured to gain")


def _algorithms(view: SettingsView) -> Iterator[Finding]:
    algo, proto = view.text("NCCL_ALGO"), view.text("NCCL_PROTO")
    chosen = parse_nccl_selection("NCCL_ALGO", algo, view.version) if algo else None
    if chosen is not None and chosen.is_valid:
        left = frozenset().union(*chosen.chosen.values()) if chosen.chosen else frozenset()
        needs = (
            ("NCCL_NVLS_ENABLE", {"nvls", "nvlstree"}, view.number("NCCL_NVLS_ENABLE") == 0),
            ("NCCL_PAT_ENABLE", {"pat"}, view.number("NCCL_PAT_ENABLE") == 0),
            (
                "NCCL_COLLNET_ENABLE",
                {"collnet", "collnetchain", "collnetdirect"},
                view.number("NCCL_COLLNET_ENABLE") != 1,
            ),
        )
        for switch, names, is_off in needs:
            chosen_names = sorted(chosen.words & names)
            if is_off and chosen_names:
                alone = left <= names
                say = make_error if alone else make_warning
                yield say("NCCL_ALGO", f"asks for {', '.join(chosen_names)}, which {switch} has turned off")
    if chosen and proto and chosen.is_valid and view.may_be_since(*FROM_EMPTY_SINCE):
        other = parse_nccl_selection("NCCL_PROTO", proto, view.version)
        lost = sorted(set(other.chosen) - set(chosen.chosen)) if other.is_valid else []
        if lost:
            text = (
                f"chooses nothing for {', '.join(lost)}, which NCCL_PROTO={quote_value(proto)}"
                " covers: from 2.31"
                f" on they have no algorithm"
            )
            remedy = f"write {quote_value(f'ring,tree;{algo}')}"
            yield make_error("NCCL_ALGO", text, remedy, f"ring,tree;{algo}")


def _symmetric(view: SettingsView) -> Iterator[Finding]:
    kernels = view.text("NCCL_SYM_KERNEL")
    if kernels and not view.text("NCCL_ALGO") and view.may_be_since(*FROM_EMPTY_SINCE):
        yield make_warning(
            "NCCL_SYM_KERNEL",
            "from 2.31 on leaves what it names without the usual algorithms, so that buffers that are"
            " not registered fail; name some in NCCL_ALGO too",
        )


def _protocols(view: SettingsView) -> Iterator[Finding]:
    algo, proto = view.text("NCCL_ALGO"), view.text("NCCL_PROTO")
    if not algo or not proto:
        return
    algorithms = parse_nccl_selection("NCCL_ALGO", algo, view.version)
    protocols = parse_nccl_selection("NCCL_PROTO", proto, view.version)
    if not algorithms.is_valid or not protocols.is_valid:
        return
    for function, left in algorithms.chosen.items():
        simple = (
            left
            and left.isdisjoint({"ring", "tree"})
            and function not in functions_without_choice(algorithms)
        )
        if simple and "simple" not in protocols.chosen.get(function, frozenset({"simple"})):
            text = (
                f"{quote_value(proto)} leaves {function} nothing: {', '.join(sorted(left))} know Simple alone"
            )
            yield make_error("NCCL_PROTO", text)


def _memory(view: SettingsView) -> Iterator[Finding]:
    if view.number("NCCL_MNNVL_ENABLE") == 1 and view.number("NCCL_CUMEM_ENABLE") == 0:
        yield make_error("NCCL_CUMEM_ENABLE", "is 0, and NVLink between nodes (NCCL_MNNVL_ENABLE=1) needs it")
    if view.number("NCCL_P2P_DISABLE") == 1 and view.text("NCCL_P2P_LEVEL"):
        yield make_warning("NCCL_P2P_LEVEL", "is not looked at: NCCL_P2P_DISABLE=1")
    if view.number("NCCL_P2P_DISABLE") == 1 and view.number("NCCL_SHM_DISABLE") == 1:
        text = "with NCCL_P2P_DISABLE sends all traffic of a node through its NIC"
        yield make_warning("NCCL_SHM_DISABLE", text)
    if view.number("NCCL_MULTI_RANK_GPU_ENABLE") == 1 and view.number("NCCL_NVLS_ENABLE") == 1:
        text = "is 1, which fails at start with several ranks on a GPU"
        yield make_error("NCCL_NVLS_ENABLE", text, "use 2 or 0", "2")
    mixing, ordering = (
        view.number("NCCL_GRAPH_MIXING_SUPPORT"),
        view.number("NCCL_GRAPH_STREAM_ORDERING"),
    )
    if mixing == 1 and ordering == 0:
        text = "is 0, and that does not go with NCCL_GRAPH_MIXING_SUPPORT=1"
        yield make_warning("NCCL_GRAPH_STREAM_ORDERING", text)


def _partition(view: SettingsView) -> Iterator[Finding]:
    value = view.number("NCCL_IB_PKEY_VALUE")
    if view.text("NCCL_IB_PKEY") and value is not None and value >= 0:
        yield make_warning("NCCL_IB_PKEY", "is not looked at: NCCL_IB_PKEY_VALUE chooses the partition")


def _traffic_class(view: SettingsView) -> Iterator[Finding]:
    for name in CLASS_VARIABLES:
        value = view.number(name)
        if value is not None and 0 < value <= 255:
            what = decode_traffic_class(value)
            no_marks = value & 3 == 0
            hint = "; so that marking hangs on the NIC setting its bits itself" if no_marks else ""
            yield make_note(name, f"is {what}; the switches must map it{hint}")
    ours, theirs = view.number("NCCL_IB_TC"), view.number("UCX_IB_TRAFFIC_CLASS")
    if ours is None or theirs is None or not (0 <= ours <= 255 and 0 <= theirs <= 255):
        return
    for finding in check_class_agreement(
        {"NCCL_IB_TC": str(ours), "UCX_IB_TRAFFIC_CLASS": str(theirs)}, "", uses_ucx=True
    ):
        yield make_warning("UCX_IB_TRAFFIC_CLASS", finding.text)


def _interfaces(view: SettingsView) -> Iterator[Finding]:
    ours, gloo = view.text("NCCL_SOCKET_IFNAME"), view.text("GLOO_SOCKET_IFNAME")
    if gloo:
        if gloo[0] in "^=":
            text = f"{gloo[0]!r} is NCCL's sign, not gloo's; write whole names"
            yield make_error("GLOO_SOCKET_IFNAME", text)
        elif ours and not any(parse_device_list(ours).takes(name) for name in gloo.split(",")):
            text = f"is {quote_value(gloo)}, which NCCL_SOCKET_IFNAME {quote_value(ours)} leaves out"
            yield make_warning("GLOO_SOCKET_IFNAME", text)
    entries = (view.text("UCX_NET_DEVICES") or "").split(",")
    bare = re.compile(r"mlx5_\d+|bnxt_re\d+")
    with_ports = ",".join(f"{entry}:1" if bare.fullmatch(entry) else entry for entry in entries)
    for entry in filter(bare.fullmatch, entries):
        text = f"{entry} has no port and matches nothing"
        yield make_error("UCX_NET_DEVICES", text, f"write {entry}:1", with_ports)


def _debugging(view: SettingsView) -> Iterator[Finding]:
    level, path = (view.text("NCCL_DEBUG") or "").upper(), view.text("NCCL_DEBUG_FILE")
    levels = (view.text("NCCL_DEBUG_LEVELS") or "").upper()
    if view.text("NCCL_DEBUG_SUBSYS") and level not in ("INFO", "TRACE") and "INFO" not in levels:
        yield make_note("NCCL_DEBUG_SUBSYS", "does nothing until NCCL_DEBUG is INFO or TRACE")
    if path and path not in ("/dev/stdout", "/dev/stderr") and "%p" not in path:
        text = "ranks write over each other's file"
        yield make_warning("NCCL_DEBUG_FILE", text, f"write {quote_value(f'{path}.%h.%p')}", f"{path}.%h.%p")


def _old_detours(view: SettingsView) -> Iterator[Finding]:
    """Ways around P2P and PXN that gave wrong sums: seen with 2.15.5, and answered with `use 2.19`."""
    if view.version is None or view.version >= _RIGHT_DETOURS:
        return
    for name in ("NCCL_P2P_DISABLE", "NCCL_PXN_DISABLE"):
        if view.number(name) == 1:
            release, right = format_version(view.version), format_version(_RIGHT_DETOURS)
            text = (
                f"allreduce between nodes has given wrong results with it in old releases (this is {release})"
            )
            yield make_warning(name, f"{text}; take it out, or use NCCL {right}")


def _ras(view: SettingsView) -> Iterator[Finding]:
    version = view.version
    if version is not None and version in _RAS_CRASHES and view.number("NCCL_RAS_ENABLE") != 0:
        release = format_version(version)
        text = f"asking the RAS thread of {release} has ended jobs; 0 turns it off"
        yield make_note("NCCL_RAS_ENABLE", text)


def _torch(view: SettingsView) -> Iterator[Finding]:
    for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "AVOID_RECORD_STREAMS"):
        if view.text(f"NCCL_{name}") and view.text(f"TORCH_NCCL_{name}"):
            yield make_warning(f"NCCL_{name}", f"stands beside TORCH_NCCL_{name}, its new name; take it out")
    waits = view.number("TORCH_NCCL_BLOCKING_WAIT") == 1 or view.number("NCCL_BLOCKING_WAIT") == 1
    if waits and (view.number("TORCH_NCCL_ASYNC_ERROR_HANDLING") or 0) > 0:
        text = "does nothing beside TORCH_NCCL_BLOCKING_WAIT=1"
        yield make_warning("TORCH_NCCL_ASYNC_ERROR_HANDLING", text)


def _open_mpi(view: SettingsView) -> Iterator[Finding]:
    rules, use = (
        view.text("OMPI_MCA_coll_tuned_dynamic_rules_filename"),
        view.number("OMPI_MCA_coll_tuned_use_dynamic_rules"),
    )
    if rules and use != 1:
        text = "is not read: OMPI_MCA_coll_tuned_use_dynamic_rules is not 1"
        yield make_error("OMPI_MCA_coll_tuned_dynamic_rules_filename", text)
    elif rules and view.number("OMPI_MCA_coll_han_priority") != 0:
        yield make_note(
            "OMPI_MCA_coll_tuned_dynamic_rules_filename",
            "from Open MPI 5 on HAN stands before these rules, which then hold inside a node and between"
            " leaders alone; OMPI_MCA_coll_han_priority=0 gives them all",
        )


_RULES: tuple[Callable[[SettingsView], Iterator[Finding]], ...] = (
    _sockets,
    _queue_pairs,
    _gid,
    _no_infiniband,
    _bounds,
    _chunks,
    _adaptive_routing,
    _algorithms,
    _protocols,
    _symmetric,
    _memory,
    _partition,
    _traffic_class,
    _interfaces,
    _debugging,
    _old_detours,
    _ras,
    _torch,
    _open_mpi,
)
