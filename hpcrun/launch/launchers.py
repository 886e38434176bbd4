"""What starts the ranks of an attempt: Hydra here, Hydra through agents, Slurm's srun, Open MPI's mpirun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.files import open_for_append
from hpcrun.hostlist import fold_hosts
from hpcrun.hydra import find_mpiexec, read_wait_statuses
from hpcrun.launch.agents.nodes import AttemptRanks
from hpcrun.slurm.allocation import step_environment
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt

_PROXIES_TIMEOUT_S = 60.0
_PROXY = re.compile(r"^HYDRA_LAUNCH: (?P<command>.*--proxy-id (?P<number>\d+).*)$", re.MULTILINE)


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be started: an attempt as a value."""

    attempt: Attempt
    placement: Placement
    command: tuple[str, ...]
    environ: Mapping[str, str]
    launcher: Launcher
    uses_exit_records: bool = False
    """Whether the ranks' own exit records say how it went, as a command's do, instead of rank 0's result."""
    can_save: bool = True
    """Whether the ranks know what to do when they are asked to save and stop before the time limit."""
    stragglers: Literal["off", "report", "replace"] = "report"
    """What is done about nodes that are slower than the others."""
    job: int | None = None
    """The batch job that it is part of, which Slurm may queue again."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.placement.ranks)


class Launcher(Protocol):
    """Starts the ranks of an attempt, on nodes that already look out for them."""

    @property
    def name(self) -> str:
        """The command that people know it by."""

    def start(self, launch: LaunchRequest, nodes: AttemptRanks) -> subprocess.Popen[bytes]:
        """Start them; what comes back lives as long as they do."""


def _start_launcher(
    argv: Sequence[str], launch: LaunchRequest, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a launcher; its own words, and the ranks' before they have logs of their own, go to its log."""
    with open_for_append(launch.attempt.launcher_log) as output:
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
                preexec_fn=_die_with_supervisor(os.getpid()),
            )
        except OSError as error:
            raise SiteError(f"{argv[0]}: cannot be run: {error.strerror}; is it on PATH?") from None


def _die_with_supervisor(supervisor: int) -> Callable[[], None]:
    """For the child between fork and exec: to end with us, however we end."""

    def bind() -> None:
        process.die_with_parent(signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    return bind


class HydraLauncher:
    """The mpiexec of the MPICH wheel; on several nodes its proxies are started by the agents."""

    name = "mpiexec"

    def __init__(self, *, agents: bool = False, interface: str | None = None) -> None:
        self._mpiexec = find_mpiexec()
        self._agents, self._interface = agents, interface

    def start(self, launch: LaunchRequest, nodes: AttemptRanks) -> subprocess.Popen[bytes]:
        """Start the ranks.

        Ours are both the clean-up (Hydra would blur who died first) and the signals (it dies of some).
        """
        argv = [str(self._mpiexec), "-disable-auto-cleanup", "-print-all-exitcodes"]
        # Inside an allocation Hydra would choose Slurm by itself.
        argv += ["-rmk", "user", "-launcher", "manual" if self._agents else "fork"]
        hosts = _blocks_of_ranks(launch.placement)
        if self._agents:
            argv += ["-hosts", ",".join(f"{node}:{count}" for node, count in hosts)]
        if self._interface:
            argv += ["-iface", self._interface]
        child = _start_launcher([*argv, "-n", str(launch.ranks), *launch.command], launch, launch.environ)
        if self._agents:
            self._start_proxies(child, launch, [node for node, _ in hosts], nodes)
        return child

    def _start_proxies(
        self, child: subprocess.Popen[bytes], launch: LaunchRequest, hosts: Sequence[str], nodes: AttemptRanks
    ) -> None:
        """Hydra prints what is to be started on which host, and waits until it has been."""
        log = launch.attempt.launcher_log
        deadline = time.monotonic() + _PROXIES_TIMEOUT_S
        while "HYDRA_LAUNCH_END" not in (output := log.read_text(errors="replace")):
            if child.poll() is not None or time.monotonic() > deadline:
                # Whoever watches the launcher finds out and reads the log.
                return
            time.sleep(0.01)
        for match in _PROXY.finditer(output):
            number = int(match["number"])
            nodes.start(hosts[number], match["command"].split(), log.with_name(f"proxy-{number}.log"))


def _blocks_of_ranks(placement: Placement) -> list[tuple[str, int]]:
    """The nodes of neighbouring ranks, and how many there are on each."""
    runs: list[tuple[str, int]] = []
    for node in placement.ranks:
        if runs and runs[-1][0] == node:
            runs[-1] = (node, runs[-1][1] + 1)
        else:
            runs.append((node, 1))
    return runs


class SrunLauncher:
    """A step of Slurm's, for a site's own MPI library."""

    name = "srun"

    def __init__(self, pmi: str, options: Sequence[str] = (), order: Sequence[str] = ()) -> None:
        self._pmi, self._options, self._order = pmi, tuple(options), tuple(order)

    def start(self, launch: LaunchRequest, nodes: AttemptRanks) -> subprocess.Popen[bytes]:
        """Start the ranks on their nodes alone; the agents see which of them dies, and the end is ours."""
        argv = ["srun", f"--nodes={len(launch.placement.nodes)}", f"--ntasks={launch.ranks}"]
        argv += ["--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        argv += [f"--mpi={self._pmi}", "--input=none", "--unbuffered"]
        environ = step_environment(launch.environ)
        if self._is_slurm_default_order(launch.placement):
            # Slurm tells the MPI library which ranks share a node only where it has chosen the order itself.
            count, listed = launch.placement.per_node, fold_hosts(launch.placement.nodes, suffixes=False)
            argv += ["--distribution=block", f"--ntasks-per-node={count}", f"--nodelist={listed}"]
        else:
            argv.append("--distribution=arbitrary")
            environ |= {"SLURM_HOSTFILE": str(launch.attempt.hosts)}
        return _start_launcher([*argv, *self._options, *launch.command], launch, environ)

    def _is_slurm_default_order(self, placement: Placement) -> bool:
        """Whether Slurm would put the ranks just so: equal blocks, nodes in the order of the allocation."""
        nodes, count = placement.nodes, placement.per_node
        in_order = [node for node in self._order if node in nodes]
        return in_order == list(nodes) and placement.ranks == tuple(n for n in nodes for _ in range(count))


class MpirunLauncher:
    """Open MPI's own launcher, which starts its daemons through Slurm."""

    name = "mpirun"

    def __init__(self) -> None:
        self._mpirun = _find_open_mpi()

    def start(self, launch: LaunchRequest, nodes: AttemptRanks) -> subprocess.Popen[bytes]:
        """Start the ranks, each where its line of the rank file says."""
        ranks = launch.attempt.rank_file
        lines = (f"rank {rank}={node} slot=*\n" for rank, node in enumerate(launch.placement.ranks))
        ranks.write_text("".join(lines))
        argv = [self._mpirun, "-n", str(launch.ranks), "--rankfile", str(ranks)]
        # The rank file says it all; how many slots Slurm would have given a node does not matter.
        argv += ["--oversubscribe", "--bind-to", "none"]
        argv += ["--allow-run-as-root"] if os.getuid() == 0 else []
        for name, value in launch.environ.items():
            if os.environ.get(name) != value:
                argv += ["-x", name]
        # It reads from Slurm's own variables which daemons to start where.
        names = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")
        allocation = {name: os.environ[name] for name in names if name in os.environ}
        return _start_launcher([*argv, *launch.command], launch, {**launch.environ, **allocation})


def _find_open_mpi() -> str:
    """The first mpirun on PATH that is Open MPI's: other MPI libraries call theirs so too."""
    for folder in os.get_exec_path():
        for name in ("mpirun", "mpirun.openmpi"):
            path = os.path.join(folder, name)  # noqa: PTH118 - an entry of PATH may be any text
            if os.access(path, os.X_OK) and re.search("Open ?MPI|OpenRTE|PRRTE", _version_of(path)):
                return path
    raise SiteError("mpirun: Open MPI's is not on PATH; load the module that holds it, or set mpi.launcher")


def _version_of(path: str) -> str:
    try:
        return process.run([path, "--version"], timeout_s=20).stdout
    except SiteError:
        return ""


_SRUN_ENDED = re.compile(
    r"^srun: error: \S+: tasks? (?P<ranks>[\d,-]+): (?:(?P<signal>[A-Z][A-Za-z ]+?)(?: \(core dumped\))?"
    r"|Exited with exit code (?P<code>\d+))$",
    re.MULTILINE,
)


def read_rank_wait_statuses(log: Path) -> dict[int, int]:
    """The wait status of ranks as the launcher has printed them: of all (Hydra), or of those that failed."""
    statuses = dict(enumerate(read_wait_statuses(log)))
    if statuses:
        return statuses
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return {}
    for match in _SRUN_ENDED.finditer(text):
        status = int(match["code"]) << 8 if match["code"] else _signal_number(match["signal"])
        for item in match["ranks"].split(",") if status is not None else ():
            first, _, last = item.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                statuses.setdefault(rank, status or 0)
    return statuses


def _signal_number(words: str) -> int | None:
    """The number of a signal by its description, as strsignal gives it."""
    return next((number.value for number in signal.Signals if signal.strsignal(number) == words), None)
