"""The object store under a URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from hpcrun.checkpoint.objects.s3 import S3ObjectStore
from hpcrun.checkpoint.objects.store import PACKAGE_EXTRAS, ObjectStore, RetryPolicy
from hpcrun.errors import UsageError


def open_object_store(
    url: str, endpoint: str | None = None, patience: RetryPolicy | None = None
) -> ObjectStore:
    """The store under a URL; UsageError for a URL that is none, SiteError when it cannot be used at all."""
    scheme, _, rest = url.partition("://")
    if not rest or not scheme.isalnum():
        raise UsageError(f"{url}: is not a URL of an object store; write s3://BUCKET/PREFIX")
    for text in (url, endpoint or ""):
        if "@" in urlsplit(text).netloc or "?" in text:
            raise UsageError(
                "the URL of the object store holds a user, a password or a query; credentials belong into"
                " the environment (AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) or"
                " ~/.aws/credentials"
            )
    if any(part in (".", "..") for part in rest.split("/")):
        raise UsageError(f"{url}: a URL of an object store has no `.` or `..` in it")
    if scheme in PACKAGE_EXTRAS:
        return S3ObjectStore(url.rstrip("/"), endpoint, patience or RetryPolicy())
    return ObjectStore(url.rstrip("/"), endpoint, patience or RetryPolicy())
