"""A real S3 server as a process of its own: moto's, which counts requests and can be slow or too busy.

Run as a program, it prints its port and ends with its stdin. Below /-/ it is told what to do:
GET /-/requests, POST /-/reset, POST /-/busy?count=N&method=PUT&status=503, POST /-/stall?after=N (PUTs),
POST /-/refuse?code=CODE.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

TROUBLE = {
    "503": b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    "500": b"<Error><Code>InternalError</Code><Message>We had a problem.</Message></Error>",
    "400": b"<Error><Code>RequestTimeout</Code><Message>It took too long.</Message></Error>",
    "502": b"<html><body>Bad Gateway</body></html>",
    "429": b"",
}
Start = Callable[..., Any]


class Watched:
    """moto's application, and who asked it for what."""

    def __init__(self, inner: Callable[[dict[str, Any], Start], Iterable[bytes]]) -> None:
        self._inner, self._lock = inner, threading.Lock()
        self._released = threading.Event()
        self._reset()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.startswith("/-/"):
            return self._told(path[3:], parse_qs(environ.get("QUERY_STRING", "")), start)
        with self._lock:
            self._seen.append([method, path])
            busy = self._busy > 0 and method == self._busy_method
            self._busy -= busy
            puts = sum(one[0] == "PUT" for one in self._seen)
            refused = self._refused
            stalled = method == "PUT" and self._after is not None and puts > self._after
        if stalled:
            self._released.wait(60)
        if refused:
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{refused}</Code><Message>no such key</Message></Error>".encode()]
        if busy or stalled:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(f"{self._status} Not now", [("Content-Type", "application/xml")])
            return [TROUBLE[self._status] if method != "HEAD" else b""]
        return self._inner(environ, start)

    def _reset(self) -> None:
        self._seen: list[list[str]] = []
        self._busy, self._busy_method, self._status = 0, "", "503"
        self._after: int | None = None
        self._refused = ""
        self._released.set()

    def _told(self, what: str, words: dict[str, list[str]], start: Start) -> Iterable[bytes]:
        with self._lock:
            match what:
                case "reset":
                    self._reset()
                case "busy":
                    self._busy, self._busy_method = int(words["count"][0]), words["method"][0]
                    self._status = words.get("status", ["503"])[0]
                case "refuse":
                    self._refused = words["code"][0]
                case "stall":
                    self._after = int(words["after"][0])
                    self._released.clear()
            answer = json.dumps(self._seen).encode()
        start("200 OK", [("Content-Type", "application/json")])
        return [answer]


def main() -> None:
    """Serve until stdin ends."""
    server = importlib.import_module("moto.server")
    serving = importlib.import_module("werkzeug.serving")
    app = Watched(server.DomainDispatcherApplication(server.create_backend_app))

    class Quiet(serving.WSGIRequestHandler):  # type: ignore[misc, name-defined]
        def log(self, *_: object) -> None:
            """Nobody reads it."""

    listening = serving.make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    print(listening.server_port, flush=True)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
