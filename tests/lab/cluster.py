"""The lab: a real Slurm of a few nodes in emulated racks, with the faults that one can ask for."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcrun import process
from hpcrun.errors import SiteError
from tests.lab import packages, slurmconf
from tests.lab.space import Space

CHECKOUT = Path(__file__).parents[2]
SCRATCH = Path("/run/scratch")
CONFIGURATION = "/run/lab/slurm.conf"
OPENMPI_LIBRARY = "libmpi.so.40"
_TRIES = 3

HEAD = """
hostname head
[ -z "$overlay" ] || mount -t overlay -o "lowerdir=$overlay:/usr" overlay /usr
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p -m 755 /run/lab/spool /run/lab/state /run/lab/log /run/munge /run/scratch
: > /run/lab/hosts
mount --bind /run/lab/hosts /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
for number in $(seq 0 $((gpus - 1))); do mknod "/run/lab/gpu$number" c 1 3; done
echo up
read -r go
ip -batch /run/lab/links
tc -batch /run/lab/rates
munged --force --key-file=/run/lab/munge.key --socket=/run/munge/munge.socket.2 \
    --pid-file=/run/lab/munged.pid --log-file=/run/lab/log/munged --seed-file=/run/lab/munge.seed
"""

DATABASE = """
mkdir -p /run/lab/database /run/mysqld
chmod 600 /run/lab/slurmdbd.conf
# A database for one test run: nobody but the lab reaches it, and nothing of it has to survive a crash.
maria="mariadbd --no-defaults --user=root --datadir=/run/lab/database --innodb-flush-log-at-trx-commit=0"
maria="$maria --innodb-log-file-size=16M --innodb-buffer-pool-size=32M --skip-networking --wsrep-on=OFF"
{ printf 'create database mysql;\\nuse mysql;\\n'; cat /usr/share/mysql/mysql_system_tables.sql; } |
    $maria --bootstrap >/run/lab/log/mariadbd 2>&1 || { cat /run/lab/log/mariadbd; exit 1; }
$maria --skip-grant-tables --socket=/run/mysqld/mysqld.sock >>/run/lab/log/mariadbd 2>&1 &
within() { for try in $(seq 200); do if "$@" >/run/lab/log/tried 2>&1; then return; fi; sleep 0.05; done
    echo "in vain: $*"; cat /run/lab/log/tried; exit 1; }
within test -S /run/mysqld/mysqld.sock
slurmdbd
within sacctmgr --immediate add cluster lab
"""

SLURMCTLD = 'slurmctld -f "$SLURM_CONF"\n'

NODE = """
hostname {name}
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777,size={scratch_mib}m tmpfs /run/scratch
echo up
read -r go
ip link set lo up
ip address add {address}/16 dev eth0
ip link set eth0 up
tc qdisc add dev eth0 root {rate}
rm -f /run/lab/slurmd-{name}.pid
mkdir -p /run/lab/spool/{name}
"""

SLURMD = 'slurmd -f "$SLURM_CONF"\n'


def bucket(mbit: float) -> str:
    """The queueing discipline that holds a link at a rate."""
    return f"tbf rate {mbit:g}mbit burst 256kb latency 50ms"


@dataclass(frozen=True)
class Shape:
    """What a lab looks like: nodes in each rack, rates of the links, size of a node's scratch."""

    racks: tuple[int, ...] = (4, 4)
    uplink_mbit: float = 400
    link_mbit: float = 2000
    scratch_mib: int = 64


class Node:
    """One machine of the lab: the login node, or a compute node with its slurmd."""

    def __init__(self, name: str, address: str, switch: str, lab: Lab) -> None:
        self.name, self.address, self.switch = name, address, switch
        self._lab = lab
        self._space: Space | None = None
        self._remedies: dict[str, Callable[[], None]] = {}

    @property
    def space(self) -> Space:
        """Its namespaces; SiteError while it is powered off."""
        if self._space is None:
            raise SiteError(f"{self.name} of the lab is powered off")
        return self._space

    @property
    def is_off(self) -> bool:
        """Whether it is without power."""
        return self._space is None

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = CHECKOUT,
        timeout_s: float = 60,
    ) -> process.CompletedCommand:
        """Run a command on this node to its end; `env` adds to the lab's own environment."""
        return self.space.run(argv, env=env, cwd=cwd, timeout_s=timeout_s)

    def power_on(self) -> None:
        """Start the machine; slurmd runs when this returns, and registers itself a little later."""
        power_on([self], self._lab)
        self._remedies.clear()

    def power_off(self) -> None:
        """Take the power away: every process, /dev/shm and the scratch are gone, and nobody is told."""
        self.space.end()
        self._space = None
        self._remedies = {"power": self.power_on}
        # The kernel takes a dead namespace's links down at leisure; a pulled plug is gone at once.
        self._lab.head.run(["ip", "link", "delete", self.name])

    def stop(self) -> None:
        """Freeze every process (SIGSTOP); the links stay up."""
        self._remedies["stop"] = self.resume
        self.space.run(["sh", "-c", "kill -STOP -1"]).require_success()

    def resume(self) -> None:
        """Let what `stop` froze go on."""
        self.space.run(["sh", "-c", "kill -CONT -1"]).require_success()
        self._remedies.pop("stop", None)

    def cut_link(self) -> None:
        """Pull the network cable; processes go on."""
        self._remedies["link"] = self.restore_link
        self._lab.head.run(["ip", "link", "set", self.name, "down"]).require_success()

    def restore_link(self) -> None:
        """Put the cable back in."""
        self._lab.head.run(["ip", "link", "set", self.name, "up"]).require_success()
        self._remedies.pop("link", None)

    def slow_link(self, mbit: float) -> None:
        """Change the link's rate, in both directions."""
        self._remedies["rate"] = lambda: self.slow_link(self._lab.shape.link_mbit)
        self._lab.head.run(
            ["tc", "qdisc", "replace", "dev", self.name, "root", *bucket(mbit).split()]
        ).require_success()
        self.space.run(
            ["tc", "qdisc", "replace", "dev", "eth0", "root", *bucket(mbit).split()]
        ).require_success()

    def fill_scratch(self) -> None:
        """Fill the scratch to its last byte."""
        self._remedies["scratch"] = self.empty_scratch
        with (self.space.path(str(SCRATCH)) / "filler").open("wb") as filler:
            room = os.fstatvfs(filler.fileno())
            os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize)

    def empty_scratch(self) -> None:
        """Take away what `fill_scratch` put there."""
        (self.space.path(str(SCRATCH)) / "filler").unlink(missing_ok=True)

    def mend(self) -> None:
        """Undo every fault that was asked for."""
        for remedy in list(self._remedies.values()):
            remedy()
        self._remedies.clear()

    def boot(self) -> None:
        """First half of power_on: make the namespaces."""
        if self._space is not None and self._space.alive:
            raise SiteError(f"{self.name} of the lab is powered on already")
        shape = self._lab.shape
        script = NODE.format(
            name=self.name,
            address=self.address,
            rate=bucket(shape.link_mbit),
            scratch_mib=shape.scratch_mib,
        )
        if self.switch != "spine":
            script += SLURMD
        self._space = Space(script, self._lab.environ, inside=self._lab.head)

    def halt(self) -> None:
        """Let go of a node whose lab has ended."""
        if self._space is not None:
            self._space.end()
            self._space = None

    def link_commands(self) -> str:
        """What plugs this node into its switch; for `ip -batch`."""
        # An address of its own choice would leave the others with a stale one after a power cycle.
        mac = "02:4d:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))
        return (
            f"link add {self.name} type veth peer name eth0 address {mac} netns {self.space.outer_pid}\n"
            f"link set {self.name} master {self.switch} up\n"
        )


def power_on(nodes: Collection[Node], lab: Lab) -> None:
    """Start machines side by side: namespaces, then their cables, then what runs on them."""
    for node in nodes:
        node.boot()
    for node in nodes:
        node.space.expect("up")
    links = "".join(node.link_commands() for node in nodes)
    rates = "".join(f"qdisc add dev {node.name} root {bucket(lab.shape.link_mbit)}\n" for node in nodes)
    script = 'printf %s "$1" | ip -batch - && printf %s "$2" | tc -batch -'
    lab.head.run(["sh", "-euc", script, "sh", links, rates]).require_success()
    for node in nodes:
        node.space.tell()
    for node in nodes:
        node.space.expect("ready")


class Lab:
    """A running lab, as a context manager: `with Lab(Shape((4, 4))) as lab: lab.run(["sinfo"])`.

    With `accounting` it has slurmdbd and a database, so that sacct knows its jobs; with `openmpi` there is
    mpirun.openmpi, and OPENMPI_LIBRARY for MPI4PY_LIBMPI.
    """

    def __init__(
        self, shape: Shape | None = None, *, accounting: bool = False, openmpi: bool = False
    ) -> None:
        self.shape = shape or Shape()
        self.accounting = accounting
        extras = {packages.ACCOUNTING: accounting, packages.OPENMPI: openmpi}
        self._bundles = [packages.SLURM, *(bundle for bundle, wanted in extras.items() if wanted)]
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:{packages.SYSTEM_PATH}",
            "HOME": str(Path.home()),
            "USER": "root",
            "TERM": os.environ.get("TERM", "dumb"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": CONFIGURATION,
            "OMP_NUM_THREADS": "1",
            # The nodes share a kernel: no other way than their network may ever look better to MPI.
            "UCX_TLS": "tcp,self",
            "OMPI_MCA_btl": "tcp,self",
            # It looks for libraries of hardware that Debian links only at installation.
            "OMPI_MCA_mca_base_component_show_load_errors": "0",
        }
        self.login = Node("login", slurmconf.LOGIN_ADDRESS, "spine", self)
        self.racks = [
            [
                Node(name, slurmconf.node_address(rack, place), f"leaf{rack}", self)
                for place, name in enumerate(names, 1)
            ]
            for rack, names in enumerate(slurmconf.node_names(self.shape.racks), 1)
        ]
        self.nodes = [node for rack in self.racks for node in rack]
        self._head: Space | None = None
        self._slowed: set[int] = set()

    @property
    def head(self) -> Space:
        """Where slurmctld, munged and the switches are."""
        if self._head is None:
            raise SiteError("the lab is not running")
        return self._head

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        folders = [folder for bundle in self._bundles if (folder := packages.overlay(bundle))]
        given = {"overlay": ":".join(f"{one}/usr" for one in folders), "gpus": str(slurmconf.GPUS)}
        script = HEAD + (DATABASE if self.accounting else "") + SLURMCTLD
        self._head = Space(script, self.environ | given)
        self.head.expect("up")
        home = self.head.path("/run/lab")
        for name, text in (
            slurmconf.render(self.shape.racks, accounting=self.accounting) | self._network()
        ).items():
            (home / name).write_text(text, encoding="utf-8")
        key = home / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self.head.tell()
        self.head.expect("ready")
        power_on([self.login, *self.nodes], self)
        self.wait_for_state(self.nodes, {"idle"})

    def _network(self) -> dict[str, str]:
        """A bridge for each leaf switch, one for the spine, and slow uplinks between them."""
        links = ["link set lo up", "link add spine type bridge", "link set spine up"]
        links.append(f"address add {slurmconf.HEAD_ADDRESS}/16 dev spine")
        rates = []
        for rack in range(1, len(self.racks) + 1):
            links += [f"link add leaf{rack} type bridge", f"link set leaf{rack} up"]
            links.append(f"link add up{rack} type veth peer name down{rack}")
            links += [f"link set up{rack} master leaf{rack} up", f"link set down{rack} master spine up"]
            rates += [
                f"qdisc add dev {end}{rack} root {bucket(self.shape.uplink_mbit)}" for end in ("up", "down")
            ]
        return {"links": "\n".join(links) + "\n", "rates": "\n".join(rates) + "\n"}

    def close(self) -> None:
        """End everything in the lab, and return when it is gone."""
        if self._head is not None:
            self._head.end()
            self._head = None
        for node in (self.login, *self.nodes):
            node.halt()

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = CHECKOUT,
        timeout_s: float = 200,
    ) -> process.CompletedCommand:
        """Run a command on the login node, which sees this checkout and this Python environment."""
        return self.login.run(argv, env=env, cwd=cwd, timeout_s=timeout_s)

    def node(self, name: str) -> Node:
        """The compute node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def states(self) -> dict[str, str]:
        """Node name to what sinfo calls its state, the mark of a node that does not answer (*) included."""
        lines = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"]).stdout.splitlines()
        return {name: state for name, _, state in (line.partition(" ") for line in lines)}

    def wait_for_state(self, nodes: Iterable[Node], states: Collection[str], timeout_s: float = 200) -> None:
        """Wait until Slurm shows all these nodes in one of these states; SiteError when it does not."""
        names = [node.name for node in nodes]
        self.wait_until(
            lambda: all(self.states().get(name) in states for name in names), timeout_s, self.states
        )

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float, tell: Callable[[], object] = lambda: "not yet"
    ) -> None:
        """Wait for a condition; SiteError with what `tell` says when it does not come about in time."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise SiteError(
                    f"the lab waited {timeout_s:g} s in vain: {tell()}; {self.log('slurmctld')[-2000:]}"
                )
            time.sleep(0.1)

    def log(self, name: str) -> str:
        """A daemon's log so far: slurmctld, munged, slurmd-n01, …"""
        path = self.head.path(f"/run/lab/log/{name}")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def mend(self) -> None:
        """Undo every fault, cancel every job, and wait until all nodes are idle again."""
        for node in self.nodes:
            node.mend()
        for rack in self._slowed:
            self._rate_uplink(rack, self.shape.uplink_mbit)
        self._slowed.clear()
        self.run(["scancel", "--user=root"]).require_success()
        # By itself Slurm asks a node that it gave up for lost again only after half a minute, and one whose
        # answer to the end of a job was lost, after a minute or two.
        self._resume(name for name, state in self.states().items() if state.startswith("down"))
        for _ in range(_TRIES):
            with contextlib.suppress(SiteError):
                self.wait_for_state(self.nodes, {"idle"}, timeout_s=20)
                return
            stuck = [name for name, state in self.states().items() if state.rstrip("*") != "idle"]
            self._set(stuck, "down", "reason=stuck")
            self._resume(stuck)
        self.wait_for_state(self.nodes, {"idle"})

    def give_up_lost(self) -> None:
        """Set the nodes without power down now; by itself Slurm does so after SlurmdTimeout."""
        self._set([node.name for node in self.nodes if node.is_off], "down", "reason=lost")

    def _resume(self, names: Iterable[str]) -> None:
        # One that came back by itself meanwhile cannot be resumed: who waits for it will see.
        with contextlib.suppress(SiteError):
            self._set(names, "resume")

    def _set(self, names: Iterable[str], state: str, *more: str) -> None:
        """As an admin would, when Slurm does not come to it by itself."""
        if listed := ",".join(names):
            self.run(["scontrol", "update", f"nodename={listed}", f"state={state}", *more]).require_success()

    def slow_uplink(self, rack: int, mbit: float) -> None:
        """Change the rate of a rack's uplink (racks count from 1), in both directions."""
        self._slowed.add(rack)
        self._rate_uplink(rack, mbit)

    def _rate_uplink(self, rack: int, mbit: float) -> None:
        for end in ("up", "down"):
            rate = bucket(mbit).split()
            self.head.run(["tc", "qdisc", "replace", "dev", f"{end}{rack}", "root", *rate]).require_success()

    def uplink_bytes(self, rack: int) -> int:
        """How many bytes have gone over a rack's uplink, both directions together."""
        shown = self.head.run(["tc", "-s", "-j", "qdisc", "show"]).require_success().stdout
        ends = {f"up{rack}", f"down{rack}"}
        return sum(int(entry["bytes"]) for entry in json.loads(shown) if entry.get("dev") in ends)
