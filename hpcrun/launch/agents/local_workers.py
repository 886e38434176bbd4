"""The checkpoint workers whose host is this process: of this node, or of several that are all this host."""

from __future__ import annotations

import os
import select
import time

from hpcrun.checkpoint.worker_messages import WorkerLog, WorkerMessage, WorkerOrder
from hpcrun.launch.agents.memory_cleanup import clean_up_memory
from hpcrun.launch.agents.worker_process import WorkerProcess
from hpcrun.specs.rundir import RunDir


class LocalWorkers:
    """A worker for each node that was told something."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._hosts: dict[str, WorkerProcess] = {}
        self._said: list[tuple[str, WorkerMessage]] = []

    @property
    def pids(self) -> list[int]:
        """The workers' processes."""
        return [pid for host in self._hosts.values() for pid in host.pids]

    def send(self, node: str, order: WorkerOrder) -> None:
        """Tell a node's worker something."""
        if node not in self._hosts:
            self._hosts[node] = self._open(node)
        self._hosts[node].obey(order)

    def _open(self, node: str) -> WorkerProcess:
        from hpcrun.process import environment_with_package

        if not self._hosts:
            for text in clean_up_memory(self._run):
                self._said.append((node, WorkerLog(text)))

        def say(message: WorkerMessage) -> None:
            self._said.append((node, message))

        return WorkerProcess(self._run, node, say, environment_with_package(os.environ), address="127.0.0.1")

    def receive(self) -> list[tuple[str, WorkerMessage]]:
        """What they have said since the last call."""
        for host in self._hosts.values():
            host.look()
        messages, self._said = self._said, []
        return messages

    def wait(self, seconds: float) -> None:
        """Let time pass, but not after a worker has said something."""
        if not self._hosts:
            time.sleep(seconds)
            return
        select.select(list(self._hosts.values()), [], [], seconds)
        for host in self._hosts.values():
            host.look()

    def lose(self, node: str) -> None:
        """A node is gone, and what its memory held."""
        host = self._hosts.pop(node, None)
        if host is not None:
            host.close()

    def close(self) -> None:
        """End them, and give their memory back."""
        for node in list(self._hosts):
            self.lose(node)
