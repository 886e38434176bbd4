"""An S3 server for the tests of a module, and a bucket for each; others want no process but their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.store import ObjectStore, RetryPolicy
from tests.checkpoint.object_store import CREDENTIALS, Bucket, new_bucket, serving


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """Where the server listens."""
    pytest.importorskip("s3fs", reason="pip install 'hpcrun-slurm[s3]'")
    pytest.importorskip("moto", reason="pip install 'moto[server]'")
    with serving() as found:
        yield found


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket, and the credentials for it in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return new_bucket(s3_endpoint)


@pytest.fixture
def s3(bucket: Bucket) -> Iterator[ObjectStore]:
    """A client of that bucket that does not wait long."""
    with open_object_store(
        bucket.url, bucket.endpoint, RetryPolicy(max_attempts=4, first_pause_s=0.01)
    ) as store:
        yield store
