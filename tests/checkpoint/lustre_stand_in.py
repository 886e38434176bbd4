"""A small emulated Lustre behind a stand-in for `lfs`: run as a command it obeys the grammar table only.

Its state is one JSON file: targets with their space, pools, directory defaults, quotas, who may set layouts,
the layouts of files, and every command line that it was given. Answers have the form of Lustre's own
printing functions (lustre/utils/liblustreapi.c and lfs.c).
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.checkpoint import lfs_grammar as lfsgrammar

GIB = 1 << 30
RAID0 = {"stripes": 1, "size": 4 << 20, "pattern": "raid0", "pool": "", "end": None}


def ost(index: int, free: int = 1 << 40, flags: str = "", **more: Any) -> dict[str, Any]:
    """A target: 2 TiB with so much free; `state` is up, dead (it hangs) or failing."""
    return {"index": index, "total": 2 << 40, "free": free, "flags": flags, "state": "up"} | more


class Emulated:
    """A Lustre that is mounted on a directory, for a test."""

    def __init__(self, tmp_path: Path, osts: int | list[dict[str, Any]] = 8) -> None:
        self.mount = tmp_path / "lustre"
        self.mount.mkdir()
        self._file = tmp_path / "lustre.json"
        self.mountinfo = tmp_path / "mountinfo"
        self.mountinfo.write_text(
            "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
            f"30 21 0:40 / {self.mount} rw,noatime shared:9 - lustre 10.0.0.1@o2ib:/testfs rw,flock\n"
        )
        self.set(
            mount=str(self.mount),
            osts=[ost(index) for index in range(osts)] if isinstance(osts, int) else osts,
            inodes=10**8,
            pools={},
            default=[RAID0],
            quotas={},
            project=0,
            gids=None,
            files={},
            calls=[],
            says={},
        )
        folder = tmp_path / "bin"
        folder.mkdir()
        root = Path(lfsgrammar.__file__).parents[2]
        command = folder / "lfs"
        paths = [str(root), str(Path(__file__).parent)]
        command.write_text(
            f"#!{sys.executable} -SE\nimport sys\nsys.path[:0] = {paths!r}\nimport lustre_stand_in\n"
            f"sys.exit(lustre_stand_in.main({str(self._file)!r}, sys.argv[1:]))\n"
        )
        command.chmod(0o755)
        self.path = f"{folder}:/usr/bin:/bin"

    def set(self, **values: Any) -> None:
        """Change the state."""
        now = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._file.write_text(json.dumps(now | values))

    def get(self, key: str) -> Any:
        """A part of the state."""
        return json.loads(self._file.read_text())[key]


class Failure(Exception):
    """How a command fails: with an errno, as lfs does."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


def main(state_file: str, words: list[str]) -> int:
    """What `lfs` does."""
    state = json.loads(Path(state_file).read_text())
    state["calls"].append(words)
    try:
        try:
            command = lfsgrammar.parse_lfs_command(words)
        except ValueError as error:
            sys.stderr.write(f"error: {error}\nusage: lfs VERB\n")
            return 4
        said = state["says"].get(command.verb)
        if said is not None:
            sys.stdout.write(said["out"])
            sys.stderr.write(said.get("err", ""))
            return int(said["code"])
        if not command.operand.startswith(state["mount"]):
            raise Failure(errno.ENOTTY, f"{command.operand}: Inappropriate ioctl for device")
        return _VERBS[command.verb](state, dict(command.options), Path(command.operand))
    except Failure as failure:
        sys.stderr.write(f"error: {words[0]}: {failure}\n")
        return failure.number
    finally:
        Path(state_file).write_text(json.dumps(state))


def _setstripe(state: dict[str, Any], options: dict[str, str], path: Path) -> int:
    if state["gids"] is not None and os.getgid() not in state["gids"]:
        raise Failure(errno.EPERM, f"create striped file '{path}' failed: Operation not permitted")
    if str(path) in state["files"] and path.exists():
        raise Failure(errno.EEXIST, f"create striped file '{path}' failed: stripe already set")
    pool = options.get("-p", "")
    if pool and pool not in state["pools"]:
        raise Failure(errno.ENODEV, f"create striped file '{path}' failed: No such device")
    pattern = "raid0"
    takes = [one for one in _of(state, pool) if one["state"] == "up" and not set(one["flags"]) & set("NRSI")]
    if "-o" in options:
        wanted = lfsgrammar.parse_ost_list(options["-o"])
        chosen = [index for index in wanted if index in [one["index"] for one in takes]]
        if chosen != wanted:
            raise Failure(errno.ENOSPC, f"create striped file '{path}' failed: No space left on device")
    else:
        fresh = sorted(takes, key=lambda one: ("D" in one["flags"], -one["free"], one["index"]))
        ring = [one["index"] for one in fresh]
        if not ring:
            raise Failure(errno.ENOSPC, f"create striped file '{path}' failed: No space left on device")
        count = int(options.get("-C") or options.get("-c") or 1)
        count = len(ring) if count < 0 else count
        if "-C" in options and count > len(ring):
            pattern = "raid0,overstriped"
        elif count > len(ring):
            count = len(ring)
        chosen = [ring[step % len(ring)] for step in range(count)]
    path.touch(mode=0o644, exist_ok=True)
    size = lfsgrammar.parse_stripe_size(options["-S"]) if "-S" in options else 4 << 20
    layout = RAID0 | {"stripes": len(chosen), "size": size, "pattern": pattern, "pool": pool, "osts": chosen}
    state["files"][str(path)] = [layout]
    return 0


def _of(state: dict[str, Any], pool: str) -> list[dict[str, Any]]:
    return [one for one in state["osts"] if not pool or one["index"] in state["pools"].get(pool, [])]


def _getstripe(state: dict[str, Any], options: dict[str, str], path: Path) -> int:
    if not path.exists():
        raise Failure(errno.ENOENT, f"getstripe failed for {path}: No such file or directory")
    if path.is_dir():
        if "-d" not in options:
            raise Failure(errno.EINVAL, "the stand-in lists no directories")
        sys.stdout.write(render_layout(state["default"], prefix=""))
        return 0
    layout = state["files"].get(str(path))
    if layout is None:
        # Made without setstripe: as its directory says.
        layout = [dict(one) for one in state["default"]]
        state["files"][str(path)] = layout
    start, indices = 0, [one["index"] for one in state["osts"]]
    for number, one in enumerate(layout):
        # The first component has its objects at once, the others when the file has grown so far.
        if one["pattern"] != "mdt" and "osts" not in one and (not number or path.stat().st_size > start):
            one["osts"] = indices[number : number + one["stripes"]]
        start = one["end"] or start
    sys.stdout.write(render_layout(layout, prefix="lmm_"))
    return 0


def render_layout(layout: list[dict[str, Any]], prefix: str) -> str:
    """The YAML of getstripe -y."""
    if len(layout) == 1 and layout[0]["end"] is None:
        return _plain(layout[0], prefix, "") + "\n"
    lines = ["  lcm_layout_gen:    2", "  lcm_mirror_count:  1", f"  lcm_entry_count:   {len(layout)}"]
    start = 0
    for index, one in enumerate(layout):
        end = "EOF" if one["end"] is None else one["end"]
        lines += [
            f"  component{index}:",
            f"    lcme_id:             {index + 1}",
            "    lcme_mirror_id:      0",
            f"    lcme_flags:          {'init' if one.get('osts') else 0}",
            f"    lcme_extent.e_start: {start}",
            f"    lcme_extent.e_end:   {end}",
            "    sub_layout:",
            _plain(one, prefix, "      "),
        ]
        start = one["end"]
    return "\n".join(lines) + "\n"


def _plain(one: dict[str, Any], prefix: str, space: str) -> str:
    stripes = 0 if one["pattern"] == "mdt" else one["stripes"]
    lines = [
        f"{prefix}stripe_count:  {stripes}",
        f"{prefix}stripe_size:   {one['size']}",
        f"{prefix}pattern:       {one['pattern']}",
    ]
    if prefix:
        lines.append(f"{prefix}layout_gen:    0")
    lines.append(f"{prefix}stripe_offset: {(one.get('osts') or [-1])[0]}")
    if one["pool"]:
        lines.append(f"{prefix}pool:          {one['pool']}")
    text = "\n".join(space + line for line in lines) + "\n"
    if prefix and one.get("osts"):
        text += f"{space}{prefix}objects:\n"
        for number, index in enumerate(one["osts"]):
            text += (
                f"      - l_ost_idx: {index}\n        l_fid:     0x1000{index:x}0000:0x{number + 2:x}:0x0\n"
            )
    return text


def _df(state: dict[str, Any], options: dict[str, str], path: Path) -> int:
    mount, inodes = state["mount"], "-i" in options
    names = ("Inodes", "IUsed", "IFree", "IUse%") if inodes else ("1K-blocks", "Used", "Available", "Use%")
    print(f"{'UUID':<20} {names[0]:>11} {names[1]:>11} {names[2]:>11} {names[3]:>4} Mounted on")
    code = 0

    def row(name: str, total: int, free: int, where: str, flags: str = "") -> None:
        used = total - free
        state_words = f" {flags}" if flags else ""
        percent = round(100 * used / max(1, total))
        print(f"{name:<20} {total:>11} {used:>11} {free:>11} {percent:>3}% {where}{state_words}")

    metadata: tuple[int, int] = (2 * 10**8, state["inodes"]) if inodes else (1 << 30, 1 << 29)
    row("testfs-MDT0000_UUID", *metadata, f"{mount}[MDT:0]")
    total = free = 0
    for one in _of(state, options.get("-p", "").rpartition(".")[2]):
        name, index = f"testfs-OST{one['index']:04x}_UUID", one["index"]
        if one["state"] == "dead":
            if "-l" not in options:
                sys.stdout.flush()
                time.sleep(60)
            continue
        if one["state"] == "failing":
            code = code or errno.EIO
            print(f"{name:<20}: {os.strerror(errno.EIO)}")
            continue
        figures: tuple[int, int] = (10**7, 10**6) if inodes else (one["total"] >> 10, one["free"] >> 10)
        total, free = total + figures[0], free + figures[1]
        row(name, *figures, f"{mount}[OST:{index}]", one["flags"])
    print()
    row("filesystem_summary:", *(metadata if inodes else (total, free)), mount)
    print()
    return code


def _quota(state: dict[str, Any], options: dict[str, str], path: Path) -> int:
    names = {"-u": ("usr", "uid"), "-g": ("grp", "gid"), "-p": ("prj", "pid")}
    flag = next(name for name in names if name in options)
    found = state["quotas"].get(flag)
    if found is None:
        raise Failure(errno.ESRCH, f"{names[flag][0]} quotas are not enabled.")
    if "-q" not in options:
        print(f"Disk quotas for {names[flag][0]} {options[flag]} ({names[flag][1]} {options[flag]}):")
        heads = ("Filesystem", "kbytes", "quota", "limit", "grace", "files", "quota", "limit", "grace")
        print(f"{heads[0]:>15} " + " ".join(f"{word:>7}" for word in heads[1:]))
    where = f"{path!s:>15}" + (f"\n{'':>15}" if len(str(path)) > 15 else "")
    used, soft, hard, files, soft_files, hard_files = found["row"]
    mark = "*" if hard and used > hard else ""
    shown = f"[{used}]" if found.get("inexact") else f"{used}{mark}"
    words = (shown, soft, hard, "-", files, soft_files, hard_files, "-")
    print(f"{where} " + " ".join(f"{word:>7}" for word in words))
    if found.get("inexact"):
        print(
            "Some errors happened when getting quota info. Some devices may be not working or deactivated."
            ' The data in "[]" is inaccurate.'
        )
        return errno.EIO if found.get("fails") else 0
    return 0


def _project(state: dict[str, Any], options: dict[str, str], path: Path) -> int:
    print(f"{state['project']:>5} {'P' if state['project'] else '-'} {path}")
    return 0


_VERBS = {"setstripe": _setstripe, "getstripe": _getstripe, "df": _df, "quota": _quota, "project": _project}
