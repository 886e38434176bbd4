"""A machine made of kernel namespaces, which lives exactly as long as its first process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrun import process
from hpcrun.errors import SiteError

# The first process reaps whatever is left to it (SIGCHLD ignored) and ends when its stdin does.
LIVE_ON = "echo ready\nexec env --ignore-signal=CHLD cat\n"
KILLED_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


class Space:
    """Mount, network, pid, host-name and IPC namespaces, made and set up by a shell script.

    The script tells with `echo WORD` how far it is, and may wait for us with `read`. When the process that
    made a space dies, however it dies, the kernel ends everything inside: the first process gets a death
    signal, and its end is the end of all in its pid namespace. The signal watches the *thread* that made it.
    """

    def __init__(self, script: str, environ: Mapping[str, str], inside: Space | None = None) -> None:
        self.environ = dict(environ)
        argv = [*KILLED_WITH_PARENT, "unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork"]
        argv += ["--kill-child", "--mount-proc", "sh", "-euc", script + LIVE_ON]
        self._generations = 1 if inside is None else 2
        self._process = subprocess.Popen(
            [*(inside.entrance() if inside else ()), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environ,
            text=True,
            start_new_session=True,
        )
        self.pid = 0

    def expect(self, word: str) -> None:
        """Wait until the script says this word; SiteError with its last words when it ends instead."""
        assert self._process.stdout
        said = []
        for line in self._process.stdout:
            if line.strip() == word:
                break
            said.append(line)
        else:
            self._process.wait()
            raise SiteError(
                f"a machine of the lab did not start: {''.join(said).strip() or 'it said nothing'}"
            )
        if not self.pid:
            pid = self._process.pid
            for _ in range(self._generations):
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])
            self.pid = pid

    def tell(self) -> None:
        """Let the script go on after its `read`."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether its first process lives."""
        return self._process.poll() is None

    @property
    def outer_pid(self) -> int:
        """The first process's id one pid namespace further out."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        ids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
        return int(ids.split()[-2])

    def path(self, inside: str) -> Path:
        """The file that this absolute path names inside, reachable from here."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def entrance(self) -> list[str]:
        """The command prefix that runs a command inside."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--uts", "--ipc", "--"]

    def command(self, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """The whole command for running this one inside, in a working directory there."""
        return [*self.entrance(), *KILLED_WITH_PARENT, "env", "-C", str(cwd or "/"), *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 60,
    ) -> process.CompletedCommand:
        """Run a command inside to its end; `env` adds to the lab's own environment."""
        return process.run(self.command(argv, cwd), timeout_s=timeout_s, env=self.environ | dict(env or {}))

    def end(self) -> None:
        """End everything inside, and return when it is gone."""
        if self.alive and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()
        self._process.wait()
