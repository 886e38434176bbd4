"""Whether the nodes of an allocation reach each other over TCP: each listens, and tries all others."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hpcrun.errors import SiteError
from hpcrun.fabric.ports import NetworkInterface, read_network_interfaces
from hpcrun.finding import Finding
from hpcrun.health.connection_test import ConnectionTest
from hpcrun.launcher_world import without_rank_variables
from hpcrun.process import environment_with_package
from hpcrun.slurm.allocation import Allocation, node_step, step_environment
from hpcrun.tuning.host.connectivity import check_connectivity
from hpcrun.tuning.registry.device_names import choose_socket_interface, render_exact_names

_STEP_S = 60.0


def check_all_connections(allocation: Allocation, interface: str | None) -> tuple[Finding, ...]:
    """Have every node connect to every other; a node that takes no part is a finding.

    `interface` is the profile's; without one, the interface that NCCL would take on each node.
    """
    environ = step_environment(without_rank_variables(environment_with_package(os.environ)))
    steps = [_ConnectivityStep(node, interface or "", environ) for node in allocation.nodes]
    try:
        with ThreadPoolExecutor(len(steps)) as pool:
            list(pool.map(_ConnectivityStep.receive_address, steps))
            places = {step.node: step.place for step in steps if step.place}
            list(pool.map(lambda step: step.receive_result(places), steps))
    finally:
        # Everyone listens until everyone has tried.
        for step in steps:
            step.close()
    absent = [
        Finding("error", "connection", step.node, f"took no part in the connection test: {step.error}")
        for step in steps
        if step.error
    ]
    failed = {step.node: step.failed for step in steps if not step.error}
    return (*absent, *check_connectivity(failed, list(failed), interface or "the interface that NCCL takes"))


class _ConnectivityStep:
    """One node's part, through the pipes of the srun that has started it."""

    def __init__(self, node: str, interface: str, environ: Mapping[str, str]) -> None:
        self.node = node
        self.place: list[Any] | None = None
        self.failed: dict[str, str] = {}
        self.error = ""
        step = node_step(node, "--unbuffered")
        pipe = subprocess.PIPE
        try:
            self._child = subprocess.Popen(
                [*step, sys.executable, "-P", "-m", "hpcrun", "_reach", interface],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=dict(environ),
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise SiteError(f"srun: cannot be run: {error.strerror}; is it on PATH?") from None
        self._end = threading.Timer(_STEP_S, self._child.kill)
        self._end.start()

    def receive_address(self) -> None:
        """Where the node listens, or why it does not."""
        message = self._line()
        self.place, self.error = message.get("place"), str(message.get("error", ""))
        if self.place is None and not self.error:
            self._child.kill()
            assert self._child.stderr is not None
            self.error = (self._child.stderr.read().strip().splitlines() or ["it printed nothing"])[-1]

    def receive_result(self, places: Mapping[str, Any]) -> None:
        """Send the addresses of the others, and receive which of them the node has not reached."""
        if self.error:
            return
        assert self._child.stdin is not None
        others = {node: place for node, place in places.items() if node != self.node}
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(others) + "\n")
            self._child.stdin.flush()
        failed = self._line().get("failed")
        if isinstance(failed, dict):
            self.failed = failed
        else:
            self.error = "it ended before its attempts"

    def _line(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        try:
            message = json.loads(self._child.stdout.readline())
        except ValueError:
            return {}
        return message if isinstance(message, dict) else {}

    def close(self) -> None:
        """Let it go."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._child.communicate()
        self._end.cancel()


def run_connectivity_step(interface: str) -> None:
    """A node's part: listen, say where, try the others, say which were not reached; until the input ends."""
    address = _first_address(read_network_interfaces(), interface)
    if address is None:
        _send_message({"error": f"{interface or 'none of its interfaces'} has no address"})
        return
    with contextlib.closing(ConnectionTest(address)) as trial:
        _send_message({"place": trial.place})
        places: dict[str, list[Any]] = json.loads(sys.stdin.readline() or "{}")
        _send_message({"failed": trial.failures(places)})
        sys.stdin.read()


def _send_message(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _first_address(interfaces: Sequence[NetworkInterface], interface: str) -> str | None:
    """The first address of an interface that others can reach, IPv4 first."""
    chosen = choose_socket_interface(interfaces, render_exact_names([interface]) if interface else "")
    for text in chosen.networks if chosen else ():
        address = ipaddress.ip_interface(text)
        if not address.is_link_local:
            return str(address.ip)
    return None
