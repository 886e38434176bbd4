"""Shows the figures of a run to Prometheus: over HTTP, and as a file for the node_exporter."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.messages.listeners import OutOfDescriptorsError, UnauthenticatedPeers, accept_connection
from hpcrun.runs.heartbeat_age import read_heartbeat_ages
from hpcrun.runs.run_lock import read_supervisor_record
from hpcrun.runs.run_state import read_run_state
from hpcrun.specs.placement import read_placement
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.records import write_atomically, write_json
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry.prometheus_metrics import RunMetrics, render_exposition
from hpcrun.telemetry.run_counters import RunCounters, RunCountersReader
from hpcrun.telemetry.shared_files import SharedFile, remove_stale_files
from hpcrun.telemetry.sidecar import TEXTFILE_SUFFIX, load_sidecar_state, print_to_console, write_sidecar_log

EXPORTER_STATE = "exporter"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WRITE_S = 15.0
"""How often the file is written, and our own state."""
_PORTS_TRIED = 16
"""So many, from the wanted one on, are tried."""
_CLIENT_S = 5.0
_MAX_CLIENTS = 16
_POLL_S = 0.2
_REST_S = 0.1
_FINAL_STATES = ("done", "saved", "failed", "interrupted")


class Exporter:
    """Counts, and shows what it has counted; another thread answers, from a text that is ready."""

    every_s = 2.0

    def __init__(self, run: RunDir, about: Mapping[str, Any], orders: Mapping[str, Any]) -> None:
        self._run, self._about = run, about
        self._follower = RunCountersReader(run, load_sidecar_state(run, EXPORTER_STATE))
        self._nodes = _NodeCounts(run)
        self._errors, self._written, self._text = 0, float("-inf"), ""
        self._is_well = True
        self._textfile = self._shown(orders["textfile"], TEXTFILE_SUFFIX)
        self._targets = self._shown(orders["targets"], ".json")
        self._targets_text = ""
        self._server: _Server | None = None
        self.turn()  # so that nobody is answered with nothing
        if orders["port"]:
            self._serve(orders["address"], orders["port"], orders["suffix"])

    def _shown(self, folder: str | None, suffix: str) -> SharedFile | None:
        if not folder:
            return None
        remove_stale_files(Path(folder), suffix, self._run)
        return SharedFile(self._run, folder, suffix, lambda text: print_to_console(f"exporter: {text}"))

    def turn(self) -> None:
        """Count what is new, and show it."""
        try:
            self._show(self._follower.read())
        except (OSError, UsageError) as error:
            self._errors += 1
            write_sidecar_log(str(error))
        if time.monotonic() - self._written > _WRITE_S:
            self._write()

    def _show(self, tally: RunCounters, *, is_last: bool = False) -> None:
        counts = self._nodes.of(tally)
        ages = {} if is_last else read_heartbeat_ages(self._run)
        about: dict[str, Any] = {
            name: str(self._about[name]) for name in ("run", "name", "slurm_job", "host")
        }
        figures = RunMetrics(
            tally=tally, nodes=counts, heartbeat_ages_s=ages, scrape_errors=self._errors, **about
        )
        self._text = render_exposition([replace(figures, now=None if is_last else time.time())])

    def _write(self) -> None:
        self._written = time.monotonic()
        try:
            write_json(self._run.sidecar_state(EXPORTER_STATE), self._follower.as_json())
            if self._textfile is not None:
                self._textfile.write(self._text)
            if self._targets is not None and self._targets_text:
                self._targets.write(self._targets_text)  # again, so that it does not look like a dead run's
        except OSError as error:
            self._errors += 1
            text = f"{error.filename or 'its files'}: {error.strerror}"
            write_sidecar_log(text)
            if self._is_well:
                # Once, until it has gone well again.
                print_to_console(f"exporter: {text}; the run continues")
            self._is_well = False
        else:
            self._is_well = True

    def close(self) -> None:
        """The last figures; a run that goes on elsewhere leaves none here, where they would be told twice."""
        state = read_final_state(self._run, self._follower.tally)
        self._follower.tally.state = state
        self._show(self._follower.tally, is_last=True)
        self._write()
        if self._textfile is not None and state not in _FINAL_STATES:
            self._textfile.remove()
        if self._server is not None:
            self._server.end()
            self._server = None
        self._targets_text = ""
        if self._targets is not None:
            self._targets.remove()
        self._run.prometheus_targets.unlink(missing_ok=True)

    def _serve(self, address: str, port: int, suffix: str) -> None:
        """Answer, and say where in the form that Prometheus's file_sd reads."""
        try:
            self._server = _bind_server(address, port, lambda: self._text)
        except OSError as error:
            print_to_console(
                f"exporter: {address}:{port} and the next ports: {error.strerror}; nothing is served there"
            )
            return
        Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True).start()
        bound = self._server.server_address[1]
        if bound != port:
            print_to_console(
                f"exporter: {address}:{port} is taken; the run's figures are served on port {bound}"
            )
        is_here = address.startswith("127.")
        host = address if is_here else f"{self._about['host']}{suffix}"
        # Under names that no series has: Prometheus would rename those.
        labels = {"run_name": str(self._about["name"]), "job_id": str(self._about["slurm_job"])}
        targets = json.dumps([{"targets": [f"{host}:{bound}"], "labels": labels}], indent=2) + "\n"
        write_sidecar_log(f"http://{host}:{bound}/metrics")
        write_atomically(self._run.prometheus_targets, targets, 0o644)
        if self._targets is not None:
            self._targets_text = targets
            self._write()


class _NodeCounts:
    """How many nodes have which part, as the placement of the newest attempt says."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._attempt = run, 0
        self._counts: dict[str, int] = {}

    def of(self, tally: RunCounters) -> dict[str, int]:
        if tally.attempt != self._attempt:
            placed = read_placement(self._run.attempt(tally.attempt).placement)
            self._attempt = tally.attempt
            self._counts = {}
            if placed is not None:
                self._counts = {"active": len(placed[0].nodes), "spare": len(placed[0].spares)}
        return self._counts and {**self._counts, "excluded": tally.excluded}


def read_final_state(run: RunDir, tally: RunCounters) -> str:
    """How the run stands now that nobody runs it: by its exit record, or queued again, or lost."""
    with contextlib.suppress(UsageError):
        ended = run.read_exit()
        if ended is not None and ended.get("status") in _FINAL_STATES:
            return str(ended["status"])
    return tally.state if tally.state in ("requeued", "waiting", *_FINAL_STATES) else "lost"


def read_run_metrics(run: RunDir) -> RunMetrics:
    """The figures of any run, also one that is over or was never watched; nothing is written."""
    state = read_run_state(run)
    follower = RunCountersReader(run, load_sidecar_state(run, EXPORTER_STATE))
    tally = follower.read()
    is_alive = not state.is_over and state.state != "queued"
    if not is_alive:
        tally.state = read_final_state(run, tally)
    told: dict[str, Any] = {}
    name, nodes = "", {}
    with contextlib.suppress(UsageError):  # a damaged placement
        nodes = _NodeCounts(run).of(tally)
    with contextlib.suppress(UsageError):
        origin = read_provenance(run.sweep_of_element or run)
        told, name = read_supervisor_record(run), origin.name if origin else ""
    job, host = (str(told.get(key) or "") for key in ("slurm_job", "host"))
    ages = read_heartbeat_ages(run) if is_alive else {}
    now = time.time() if is_alive else None
    return RunMetrics(run.id, tally, name, job, host, nodes, ages, now=now)


def _bind_server(address: str, port: int, text: Callable[[], str]) -> _Server:
    """A server on the wanted port or one of the next; OSError where all are taken."""
    for number in range(port, min(port + _PORTS_TRIED, 65536)):
        try:
            return _Server(address, number, text)
        except OSError as error:
            last = error
    raise last


class _Server(ThreadingHTTPServer):
    """A thread for each of a few clients; one that takes too long is let go, whatever it does meanwhile."""

    allow_reuse_address = False
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        self.text = text
        self._clients = UnauthenticatedPeers[socket.socket](_MAX_CLIENTS)
        self._lock = Lock()
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        """Without asking the name service who we are."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next client; where descriptors run out another one goes for it."""
        try:
            found = accept_connection(self.socket)
        except OutOfDescriptorsError:
            with self._lock:
                self._let_go(self._clients.eviction_candidate())
            time.sleep(_REST_S)
            raise
        if found is None:
            raise BlockingIOError
        connection, host = found
        with self._lock:
            self._let_go(self._clients.add(connection, host))
        return connection, host

    def _let_go(self, client: socket.socket | None) -> None:
        """Its thread notices, and closes it."""
        if client is not None:
            self._clients.remove(client)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """A client is done with."""
        with self._lock:
            self._clients.remove(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called every moment."""
        with self._lock:
            for client in self._clients.late(_CLIENT_S):
                self._let_go(client)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or talks no sense, is not worth a line."""

    def end(self) -> None:
        """Answer nobody any more, whatever clients still do."""
        self.shutdown()
        with self._lock:
            for client in self._clients:
                self._let_go(client)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_S
    server: _Server
    server_version, sys_version = "hpcrun", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "only /metrics is here")
            return
        body = self.server.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line."""
