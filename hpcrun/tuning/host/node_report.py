"""One look at a node from inside, without root: what its files and a few commands say about its network."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.fabric.node_topology import (
    NodeTopology,
    parse_cpu_list,
    read_kernel_text,
    read_node_topology,
    read_sysfs_line,
)
from hpcrun.fabric.ports import (
    NetworkInterface,
    PciLink,
    RdmaPort,
    read_network_interfaces,
    read_pci_links,
    read_rdma_ports,
)
from hpcrun.tuning.host.routes import NetworkRoute, parse_ip_route, parse_proc_route
from hpcrun.tuning.lint.environment import (
    VariableAssignment,
    effective_assignments,
    nccl_conf_paths,
    parse_nccl_conf,
    resolve_layers,
)
from hpcrun.tuning.lint.named_files import NamedFile, find_named_files

CommandRunner = Callable[..., str]
"""A command's words in, what it prints out; empty where it is missing, fails or says nothing."""

_HOST_COMMAND_S = 10.0
_TOPOLOGY = "var/run/nvidia-topologyd/virtualTopology.xml"
_SEGMENT = re.compile(r"(nccl-|mpich_|ucx_|torch_|psm_|gloo|vader_segment|sm_segment|sem\.mp-)[\w.+-]*\Z")
_OURS = re.compile(r"(NCCL_|UCX_|GLOO_|OMPI_MCA_|FI_|MPIR_CVAR_|TORCH_NCCL_)\w*\Z")
_LIMITS = {
    "Max locked memory": "memlock",
    "Max stack size": "stack",
    "Max open files": "nofile",
    "Max processes": "nproc",
}
_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class SharedMemory:
    """/dev/shm: its size, what is free, and what dead jobs left in it. None: unknown."""

    size_bytes: int | None = None
    free_bytes: int | None = None
    stale: tuple[str, ...] = ()
    """Segments of communication libraries, ours, which no process maps."""
    stale_bytes: int = 0


@dataclass(frozen=True)
class HostReport:
    """What a node says about itself; None and empty: unknown."""

    node: str
    time: float | None = None
    """Its wall clock, where it was looked at live."""
    kernel: str = ""
    inside: NodeTopology = field(default_factory=NodeTopology)
    ports: tuple[RdmaPort, ...] = ()
    interfaces: tuple[NetworkInterface, ...] = ()
    links: tuple[PciLink, ...] = ()
    routes: tuple[NetworkRoute, ...] = ()
    """In the order in which the kernel lists them."""
    lossless: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    """The priorities with PFC, by interface; None where nobody says."""
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """Soft limits in their units: memlock, stack (bytes), nofile, nproc; None stands for unlimited."""
    shm: SharedMemory = field(default_factory=SharedMemory)
    allowed: tuple[int, ...] = ()
    """The CPUs that this process may use."""
    memory_bytes: int | None = None
    hugepages: int | None = None
    modules: tuple[str, ...] | None = None
    """Kernel modules; None where the list cannot be read."""
    driver: str = ""
    """The NVIDIA driver's own line."""
    libfabric: str = ""
    """What `fi_info --version` prints, in one line."""
    is_virtual: bool | None = None
    """Whether it is a virtual machine, by its processors; None where they do not tell."""
    topology_file: str = ""
    """The file that NCCL takes by itself for a virtual machine's PCI tree; empty: there is none."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The variables of communication libraries."""
    files: tuple[NamedFile, ...] = ()
    """Those that variables name."""

    def interface(self, name: str) -> NetworkInterface | None:
        """An interface by its name."""
        return next((interface for interface in self.interfaces if interface.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Plain values; of the inside the number of GPUs and NUMA nodes, and what is near to what."""
        values = {key: value for key, value in vars(self).items() if key != "inside"}
        names = ("ports", "interfaces", "links", "routes", "files")
        listed = {key: [asdict(entry) for entry in values[key]] for key in names}
        near: dict[str, dict[str, str]] = {}
        for (gpu, nic), word in self.inside.near.items():
            near.setdefault(f"GPU {gpu}", {})[nic] = word
        counts = {"gpus": len(self.inside.gpus), "numa_nodes": len(self.inside.numa), "near": near}
        plain = {key: dict(values[key]) for key in ("lossless", "limits", "environ")}
        return values | listed | plain | counts | {"shm": asdict(self.shm)}


def read_host_report(
    root: Path = Path("/"), ask: CommandRunner | None = None, advised: Mapping[str, str] | None = None
) -> HostReport:
    """Look at this node, or at the captured tree of one.

    A captured tree holds what a command printed in a file of `commands/` that is named like the command.
    `advised`: what jobs get besides.
    """
    live = root == Path("/")
    runner = ask or (run_host_command if live else captured_command_runner(root))
    host = read_node_topology(root)
    ports = read_rdma_ports(root)
    names = read_network_interfaces(root)
    roce = dict.fromkeys(name for port in ports if port.is_roce for name in port.interfaces)
    memory = _memory(read_kernel_text(root / "proc/meminfo"))
    modules = read_kernel_text(root / "proc/modules")
    own = dict(os.environ) if live else _variables(read_kernel_text(root / "proc/self/environ"))
    settings = _read_nccl_conf_settings(root, own)
    environ = {name: setting.value or "" for name, setting in settings.items()} | {
        name: value for name, value in own.items() if _OURS.match(name)
    }
    return HostReport(
        node=read_sysfs_line(root / "proc/sys/kernel/hostname")
        or (os.uname().nodename if live else "unknown"),
        time=time.time() if live else None,
        kernel=read_sysfs_line(root / "proc/sys/kernel/osrelease"),
        inside=host,
        ports=ports,
        interfaces=names,
        links=read_pci_links(root, host),
        routes=_read_routes(root, runner),
        lossless={name: lossless_priorities(name, runner) for name in roce},
        limits=parse_limits(read_kernel_text(root / "proc/self/limits")),
        shm=_read_shared_memory(root, live, memory.get("MemTotal")),
        allowed=_allowed(read_kernel_text(root / "proc/self/status")),
        memory_bytes=memory.get("MemTotal"),
        hugepages=memory.get("HugePages_Total"),
        modules=tuple(sorted(line.split()[0] for line in modules.splitlines() if line.strip())) or None,
        driver=next(iter(read_kernel_text(root / "proc/driver/nvidia/version").splitlines()), ""),
        libfabric=" ".join(runner("fi_info", "--version").split()),
        is_virtual=_is_virtual(read_kernel_text(root / "proc/cpuinfo")),
        topology_file=f"/{_TOPOLOGY}" if (root / _TOPOLOGY).is_file() else "",
        environ=environ,
        files=tuple(
            find_named_files(
                {**(advised or {}), **environ, "LD_LIBRARY_PATH": own.get("LD_LIBRARY_PATH", "")},
                root,
                {name: setting.where for name, setting in settings.items() if name not in own},
            )
        ),
    )


def run_host_command(*words: str) -> str:
    """What a command of this node prints."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = process.run(words, timeout_s=_HOST_COMMAND_S)
    except SiteError:
        return ""
    return done.stdout if done.exit_code == 0 else ""


def captured_command_runner(root: Path) -> CommandRunner:
    """What the same commands had printed where the tree was captured."""
    return lambda *words: read_kernel_text(root / "commands" / " ".join(words).replace("/", "_"))


def _read_routes(root: Path, ask: CommandRunner) -> tuple[NetworkRoute, ...]:
    """By `ip route`, which knows more tables than /proc."""
    routes = parse_ip_route(ask("ip", "route", "show", "table", "all")) or parse_ip_route(ask("ip", "route"))
    return routes or parse_proc_route(read_kernel_text(root / "proc/net/route"))


def lossless_priorities(interface: str, ask: CommandRunner) -> tuple[int, ...] | None:
    """The priorities on which an interface sends pauses; None where neither dcb nor mlnx_qos tells."""
    priorities = parse_dcb_pfc(ask("dcb", "pfc", "show", "dev", interface))
    return parse_mlnx_qos(ask("mlnx_qos", "-i", interface)) if priorities is None else priorities


def parse_dcb_pfc(text: str) -> tuple[int, ...] | None:
    """The answer of `dcb pfc show`: `prio-pfc 0:off … 3:on …`."""
    match = re.search(r"prio-pfc((?:\s+[0-7]:(?:on|off))+)", text)
    if match is None:
        return None
    return tuple(int(word[0]) for word in match[1].split() if word.endswith(":on"))


def parse_mlnx_qos(text: str) -> tuple[int, ...] | None:
    """The answer of `mlnx_qos -i`: a row of priorities, and below it one of 0 and 1."""
    match = re.search(r"^\s*enabled\s+((?:[01]\s+){7}[01])\s*$", text, re.MULTILINE)
    return None if match is None else tuple(at for at, word in enumerate(match[1].split()) if word == "1")


def parse_limits(text: str) -> dict[str, int | None]:
    """The soft limits of /proc/PID/limits; what it does not tell is missing, None is unlimited."""
    limits: dict[str, int | None] = {}
    for line in text.splitlines():
        for start, name in _LIMITS.items():
            words = line.removeprefix(start).split() if line.startswith(start) else []
            if words and (words[0] == "unlimited" or words[0].isdigit()):
                limits[name] = None if words[0] == "unlimited" else int(words[0])
    return limits


def _memory(text: str) -> dict[str, int]:
    """The values of /proc/meminfo in bytes."""
    sizes = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"(\w+):\s+([0-9]{1,15})( kB)?", line.strip()):
            sizes[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return sizes


def _allowed(text: str) -> tuple[int, ...]:
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", text, re.MULTILINE)
    return parse_cpu_list(match[1]) if match else ()


def _is_virtual(text: str) -> bool | None:
    """By the flag that every hypervisor of x86 sets."""
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return None if match is None else "hypervisor" in match[1].split()


def _variables(text: str) -> dict[str, str]:
    """The variables of /proc/PID/environ, or of lines NAME=VALUE."""
    entries = (entry.partition("=") for entry in re.split(r"[\0\n]", text))
    return {name: value for name, _, value in entries if name}


def read_nccl_conf_files(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What NCCL's own files set: the user's (NCCL_CONF_FILE, else ~/.nccl.conf) before the system's."""
    return {name: setting.value or "" for name, setting in _read_nccl_conf_settings(root, environ).items()}


def _read_nccl_conf_settings(root: Path, environ: Mapping[str, str]) -> dict[str, VariableAssignment]:
    paths = nccl_conf_paths(environ.get("NCCL_CONF_FILE"), None, root)
    settings = effective_assignments(
        resolve_layers([parse_nccl_conf(read_kernel_text(path), str(path)) for path in paths])
    )
    return {
        name: setting for name, setting in settings.items() if setting.value is not None and _OURS.match(name)
    }


def _read_shared_memory(root: Path, live: bool, memory: int | None) -> SharedMemory:
    size, free = _shm_size(read_kernel_text(root / "proc/mounts"), memory), None
    if live:
        try:
            usage = shutil.disk_usage("/dev/shm")
            size, free = usage.total, usage.free
        except OSError:
            free = None
    segments = _list_segments(root / "dev/shm")
    stale = sorted(set(segments) - _mapped_segments(root)) if segments else []
    return SharedMemory(size, free, tuple(stale), sum(segments[name] for name in stale))


def _shm_size(mounts: str, memory: int | None) -> int | None:
    """By its line in /proc/mounts; without a size it is half the memory."""
    options = next(
        (
            words[3]
            for line in mounts.splitlines()
            if (words := line.split())[1:2] == ["/dev/shm"] and len(words) > 3
        ),
        None,
    )
    if options is None:
        return None
    match = re.search(r"(?:^|,)size=([0-9]{1,15})([kmg]?)(?:,|$)", options)
    if match:
        return int(match[1]) * _SIZES[match[2]]
    return memory // 2 if memory and "size=" not in options else None


def _list_segments(folder: Path) -> dict[str, int]:
    """What communication libraries keep there as this user, with the size of each."""
    sizes = {}
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return {}
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if (
            _SEGMENT.match(entry.name)
            and status.st_uid == os.getuid()
            and entry.is_file(follow_symlinks=False)
        ):
            sizes[entry.name] = status.st_size
    return sizes


def _mapped_segments(root: Path) -> set[str]:
    """The names in /dev/shm that a process maps or holds open, as far as it lets us look."""
    names: set[str] = set()
    try:
        entries = [entry for entry in os.scandir(root / "proc") if entry.name.isdigit()]
    except OSError:
        return names
    for entry in entries:
        maps = read_kernel_text(Path(entry.path) / "maps")
        names |= set(re.findall(r" /dev/shm/(\S+)", maps))
        try:
            held = [str(link.readlink()) for link in Path(entry.path, "fd").iterdir()]
        except OSError:
            continue
        names |= {path.removeprefix("/dev/shm/") for path in held if path.startswith("/dev/shm/")}
    return names
