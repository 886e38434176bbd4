"""Files that settings name: which are missing, and which were made for another machine.

NCCL passes over most of them in silence: a topology file that cannot be opened is a line of INFO, a plugin
that is not found is done without (src/graph/xml.cc:409, src/plugin/plugin_open.cc:69 of 2.30.7).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcrun.tuning.registry.registry import value_in_release, variable_registry

NamedFileKind = Literal["topology", "graphs", "tuner", "plugin", "library", "rules", "settings", "folder"]
NamedFileState = Literal["there", "missing", "unreadable", "empty", "no file", "relative"]

_KINDS: Mapping[str, NamedFileKind] = {
    "NCCL_TOPO_FILE": "topology",
    "NCCL_GRAPH_FILE": "graphs",
    "NCCL_CONF_FILE": "settings",
    "NCCL_TUNER_CONFIG_FILE": "tuner",
    "NCCL_TUNER_CONFIG_PATH": "tuner",
    "MSCCL_XML_FILES": "rules",
    "NCCL_IBVERBS_LIB": "library",
    "NCCL_INSPECTOR_DUMP_DIR": "folder",
    "TORCH_FR_DUMP_TEMP_FILE": "folder",
}
_WRITTEN = re.compile(r"NCCL_(DEBUG|\w+_DUMP)_FILE|TORCH_NCCL_DEBUG_INFO_(TEMP|PIPE)_FILE|NCCL_PROXY_PROFILE")
_NO_PLUGIN = ("none", "static_plugin")
_CONSEQUENCE: Mapping[NamedFileKind, str] = {
    "topology": "NCCL passes over that in silence and takes the layout that it finds by itself",
    "graphs": "NCCL ends with an error",
    "tuner": "the tuner continues without it in silence",
    "plugin": "NCCL continues without it, or ends where NCCL_NET names its network",
    "library": "NCCL finds no verbs and takes TCP",
    "rules": "what reads it continues without it",
    "settings": "NCCL passes over that in silence",
    "folder": "nothing will be written there",
}
_SYSTEM_FOLDERS = ("lib64", "lib", "usr/lib64", "usr/lib", "usr/local/lib", "usr/lib/x86_64-linux-gnu")
_MOST_BYTES = 2**24
_TAG = re.compile(r"<(?P<tag>pci|gpu|net)\b(?P<rest>[^>]*)>")
_ATTRIBUTE = re.compile(r"(\w+)=\"([^\"]*)\"")
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


@dataclass(frozen=True)
class NamedFile:
    """A file that a variable names, as it is on this node."""

    variable: str
    path: str
    kind: NamedFileKind
    state: NamedFileState = "there"
    where: str = ""
    """What sets the variable."""
    digest: str = ""
    """Digest of its content, where NCCL reads it."""
    gpus: tuple[str, ...] = ()
    """PCI addresses, or numbers, of the GPUs that it describes."""
    adapters: tuple[str, ...] = ()
    is_sound: bool = True
    """Whether it holds what it must, as far as that is known."""

    @property
    def _missing(self) -> str:
        if self.kind == "plugin" and "/" not in self.path:
            return "is in no folder of LD_LIBRARY_PATH and in none of the system's"
        return "is in a folder that is not here" if self.kind == "folder" else "is not a file here"

    @property
    def lacks(self) -> str:
        """What is wrong with it by itself, and what follows; empty: nothing."""
        is_folder = self.kind == "folder"
        problem = {
            "there": "" if self.is_sound else f"holds no <{_ROOTS.get(self.kind)}>",
            "missing": self._missing,
            "unreadable": "is in a folder that may not be written to" if is_folder else "may not be read",
            "empty": "is empty",
            "no file": "is in what is not a folder" if is_folder else "is not a file here",
            "relative": "is looked for in whichever directory a rank starts, and is not in this one",
        }[self.state]
        return f"{self.path!r} {problem}, and {_CONSEQUENCE[self.kind]}" if problem else ""


_ROOTS: Mapping[NamedFileKind, str] = {"topology": "system", "graphs": "graphs"}


def named_file_kind(variable: str) -> NamedFileKind | None:
    """What a variable names; None where that is no file."""
    if variable in _KINDS:
        return _KINDS[variable]
    if _WRITTEN.fullmatch(variable):
        return "folder"
    known_variable = variable_registry().variables.get(variable)
    rule = value_in_release(known_variable.values, None) if known_variable else None
    return "plugin" if rule == "plugin" else "rules" if rule == "path" else None


def find_named_files(
    values: Mapping[str, str], root: Path = Path("/"), where: Mapping[str, str] | None = None
) -> Iterator[NamedFile]:
    """Every file that the values of an environment name, as it is below a root."""
    for variable, value in values.items():
        kind = named_file_kind(variable)
        if kind is None or not value or value.startswith("~"):
            continue
        source = (where or {}).get(variable, "")
        if kind == "plugin":
            yield from _plugins(variable, value, values.get("LD_LIBRARY_PATH", ""), root, source)
        elif kind == "folder":
            path = value if variable.endswith("_DIR") else value.rpartition("/")[0]
            if value not in ("/dev/stdout", "/dev/stderr") and path:
                yield NamedFile(variable, value, kind, _folder(root, path), source)
        elif kind != "library" or "/" in value:
            yield _inspect_file(NamedFile(variable, value, kind, where=source), root)


def _path_below(root: Path, path: str) -> Path:
    return root / path.lstrip("/") if path.startswith("/") else Path(path)


def _folder(root: Path, path: str) -> NamedFileState:
    folder = _path_below(root, path)
    if not path.startswith("/"):
        return "there"
    if not folder.exists():
        return "missing"
    if not folder.is_dir():
        return "no file"
    return "there" if os.access(folder, os.W_OK | os.X_OK) else "unreadable"


def _inspect_file(named: NamedFile, root: Path) -> NamedFile:
    path = _path_below(root, named.path)
    try:
        if not path.exists():
            missing: NamedFileState = "missing" if named.path.startswith("/") else "relative"
            return NamedFile(named.variable, named.path, named.kind, missing, named.where)
        if not path.is_file():
            return NamedFile(named.variable, named.path, named.kind, "no file", named.where)
        if named.kind in ("library", "plugin"):
            return named
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError:
        return NamedFile(named.variable, named.path, named.kind, "unreadable", named.where)
    if not content.strip():
        return NamedFile(named.variable, named.path, named.kind, "empty", named.where)
    text = content.decode("utf-8", "replace")
    digest = hashlib.sha256(content).hexdigest()[:12]
    gpus, adapters = _described_devices(text, named.kind)
    is_sound = named.kind not in _ROOTS or f"<{_ROOTS[named.kind]}" in text
    return NamedFile(
        named.variable, named.path, named.kind, "there", named.where, digest, gpus, adapters, is_sound
    )


def _described_devices(text: str, kind: NamedFileKind) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The GPUs of a topology by their PCI address or of graphs by their number, and the adapters by name."""
    gpus: dict[str, None] = {}
    adapters: dict[str, None] = {}
    for match in _TAG.finditer(text if kind in _ROOTS else ""):
        attributes = dict(_ATTRIBUTE.findall(match["rest"]))
        if (
            kind == "topology"
            and match["tag"] == "pci"
            and attributes.get("class", "").startswith(_GPU_CLASSES)
        ):
            gpus[attributes.get("busid", "").lower()] = None
        elif kind == "topology" and match["tag"] == "net" and attributes.get("name"):
            adapters[attributes["name"]] = None
        elif kind == "graphs" and match["tag"] == "gpu" and attributes.get("dev", "").isdecimal():
            gpus[attributes["dev"]] = None
    return tuple(gpu for gpu in gpus if gpu), tuple(adapters)


def _plugins(variable: str, value: str, library_path: str, root: Path, where: str) -> Iterator[NamedFile]:
    """Plugins by their path, file or short name, several by commas (src/plugin/plugin_open.cc:69)."""
    prefix = f"libnccl-{variable.removeprefix('NCCL_').removesuffix('_PLUGIN').lower()}"
    folders = [*library_path.split(":"), *(f"/{folder}" for folder in _SYSTEM_FOLDERS), *_configured(root)]
    for name in value.split(","):
        if not name or name.lower() in _NO_PLUGIN:
            continue
        if "/" in name:
            yield _inspect_file(NamedFile(variable, name, "plugin", where=where), root)
            continue
        files = [name, f"{prefix}-{name}.so"]
        exists = any(
            _path_below(root, f"{folder}/{file}").is_file() for folder in folders if folder for file in files
        )
        yield NamedFile(variable, name, "plugin", "there" if exists else "missing", where)


def _configured(root: Path) -> Iterator[str]:
    """The folders that the loader's own files name."""
    for file in (root / "etc/ld.so.conf", *sorted((root / "etc/ld.so.conf.d").glob("*.conf"))):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        yield from (line.strip() for line in lines if line.startswith("/"))


def why_foreign(named: NamedFile, gpus: Collection[str], adapters: Collection[str]) -> str:
    """Why a file describes another machine than one with these GPUs (by PCI address) and RDMA devices."""
    if named.state != "there" or not gpus:
        return ""
    if named.kind == "graphs":
        beyond = [dev for dev in named.gpus if int(dev) >= len(gpus)]
        return f"names GPU {', '.join(beyond)}, and this node has {len(gpus)}" if beyond else ""
    here = {_address(gpu) for gpu in gpus}
    lost = [gpu for gpu in named.gpus if _address(gpu) not in here]
    if lost:
        return f"describes GPUs at {_few(lost)}, and this node's are at {_few(sorted(gpus))}"
    unknown = [name for name in named.adapters if adapters and name not in adapters]
    if unknown:
        return f"describes the adapters {_few(unknown)}, and this node has {_few(sorted(adapters))}"
    missing = [
        gpu for gpu in gpus if named.gpus and _address(gpu) not in {_address(listed) for listed in named.gpus}
    ]
    return f"does not describe this node's GPUs at {_few(missing)}" if missing else ""


def _address(text: str) -> str:
    """0000:17:00.0 without the domain's leading zeros, which files write as they like."""
    return re.sub(r"^0+(?=[0-9a-f])", "", text.lower())


def _few(names: Collection[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
