"""An S3 server for tests, a process of its own, and what they do to it behind the back of a client."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "who",
    "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-prints",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
UNCHECKED = (
    "AWS4-HMAC-SHA256 Credential=who/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"
)


@dataclass(frozen=True)
class Bucket:
    """A bucket of its own for each test."""

    endpoint: str
    name: str

    @property
    def url(self) -> str:
        """Where a job would put its copies."""
        return f"s3://{self.name}/runs/here"

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Plain HTTP, past every client."""
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=30)
        try:
            connection.request(method, path, body, {"Authorization": UNCHECKED})
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status < 300, f"{method} {path}: {answer.status} {data!r}"
            return data
        finally:
            connection.close()

    def put(self, key: str, data: bytes) -> None:
        """Store an object, whatever was there."""
        self.ask("PUT", f"/{self.name}/{key}", data)

    def get(self, key: str) -> bytes:
        """The bytes of an object."""
        return self.ask("GET", f"/{self.name}/{key}")

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.ask("DELETE", f"/{self.name}/{key}")

    def all_keys(self) -> list[str]:
        """All keys, of few objects."""
        text = self.ask("GET", f"/{self.name}?list-type=2").decode()
        return [part.split("</Key>")[0] for part in text.split("<Key>")[1:]]

    def only(self, part: str) -> str:
        """The one key that contains this."""
        (key,) = [key for key in self.all_keys() if part in key]
        return key

    def tell(self, what: str) -> None:
        """Make the server busy or slow, or neither."""
        self.ask("POST", f"/-/{what}")

    def requests(self, method: str, part: str = "") -> list[str]:
        """The paths that were asked for since the last reset."""
        seen = json.loads(self.ask("GET", "/-/requests"))
        return [path for one, path in seen if one == method and part in path and self.name in path]


@contextmanager
def serving() -> Iterator[str]:
    """The endpoint of a server that lives for as long as this."""
    program = ROOT / "tests" / "checkpoint" / "s3_server.py"
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | CREDENTIALS | {"MOTO_S3_CUSTOM_ENDPOINTS": ""},
    ) as server:
        assert server.stdin
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()
            server.wait(20)


def new_bucket(endpoint: str) -> Bucket:
    """An empty bucket, and a server that is neither busy nor slow."""
    bucket = Bucket(endpoint, f"test-{secrets.token_hex(6)}")
    bucket.tell("reset")
    bucket.ask("PUT", f"/{bucket.name}")
    bucket.tell("reset")
    return bucket
