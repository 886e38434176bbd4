"""An object store that speaks S3, through s3fs."""

from __future__ import annotations

import base64
import contextlib
import importlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpcrun.checkpoint.objects.store import TRANSFER_BYTES, ObjectStore, RetryPolicy
from hpcrun.errors import SiteError


class S3ObjectStore(ObjectStore):
    """S3 and what speaks its language: each piece goes with a CRC-32 that the store checks."""

    def __init__(self, url: str, endpoint: str | None, patience: RetryPolicy) -> None:
        super().__init__(url, endpoint, patience)
        boto = importlib.import_module("botocore.exceptions")
        torn = (
            importlib.import_module("aiohttp").ClientError,
            importlib.import_module("botocore.parsers").ResponseParserError,
        )
        self._no_credentials: type[Exception] = boto.NoCredentialsError
        self._gone: tuple[type[Exception], ...] = (boto.HTTPClientError, boto.ConnectionError)
        self._trouble: tuple[type[Exception], ...] = (*self._gone, *torn)
        self._errors = (*self._errors, boto.BotoCoreError, *torn)
        # The one who tries again is `_try`; with three of them a dead store would hold us for many minutes.
        self._fs.retries = 1
        self._bucket, _, self._prefix = self._root.partition("/")

    def close(self) -> None:
        """Close its connections."""
        if getattr(self._fs, "_s3", None) is not None:
            self._fs.close_session(self._fs.loop, self._fs._s3creator)
            self._fs._s3 = None

    def check(self) -> None:
        """SiteError, soon and in plain words, when the store cannot be used at all."""
        patience, self._patience = (
            self._patience,
            replace(self._patience, max_attempts=min(2, self._patience.max_attempts)),
        )
        try:
            self._try("", self._call, "list_objects_v2", Prefix=self._key(""), MaxKeys=1)
        except FileNotFoundError as error:
            raise SiteError(self._words("", error, 1)) from None
        finally:
            self._patience = patience

    def delete_prefix(self, prefix: str) -> None:
        """Remove everything whose key begins with `prefix`, which ends with a slash."""
        self.abort_incomplete_uploads(prefix)
        for key in self.list(prefix):
            self.delete(key)

    def abort_incomplete_uploads(self, prefix: str) -> None:
        """Remove what interrupted uploads have left below `prefix` that is no object yet.

        Where the credentials do not allow it, that is left to the bucket's own rules.
        """
        with contextlib.suppress(FileNotFoundError, SiteError):
            answer = self._try(prefix, self._call, "list_multipart_uploads", Prefix=self._key(prefix))
            for upload in answer.get("Uploads", ()):
                words = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._try(prefix, self._call, "abort_multipart_upload", **words)

    def _options(self) -> dict[str, Any]:
        once = {"retries": {"total_max_attempts": 1, "mode": "standard"}, "connect_timeout": 10}
        return {
            **super()._options(),
            "config_kwargs": once
            | {"read_timeout": self._patience.response_timeout_s, "max_pool_connections": 32},
            "skip_instance_cache": True,
            "use_listings_cache": False,
        }

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _call(self, name: str, **words: Any) -> Any:
        return self._fs.call_s3(name, Bucket=self._bucket, **words)

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        objects: dict[str, dict[str, Any]] = {}
        page: dict[str, str] = {}
        while True:
            try:
                answer = self._try(prefix, self._call, "list_objects_v2", Prefix=self._key(prefix), **page)
            except FileNotFoundError as error:
                raise SiteError(self._words(prefix, error, 1)) from None
            for entry in answer.get("Contents", ()):
                listed = {"type": "file", "size": entry["Size"], "LastModified": entry.get("LastModified")}
                objects[f"{self._bucket}/{entry['Key']}"] = listed
            if not answer.get("IsTruncated"):
                return objects
            page = {"ContinuationToken": answer["NextContinuationToken"]}

    def _tell(self, key: str) -> tuple[int, int | None]:
        answer = self._call("head_object", Key=self._key(key), ChecksumMode="ENABLED")
        crc32 = answer.get("ChecksumCRC32", "")
        # A sum with -N behind it is one of the sums of N parts.
        stored_crc = None if not crc32 or "-" in crc32 else int.from_bytes(base64.b64decode(crc32), "big")
        return int(answer["ContentLength"]), stored_crc

    def _put(self, key: str, read: Callable[[int, int], bytes], size_bytes: int, crc32: int) -> None:
        place = {"Key": self._key(key)}
        if size_bytes <= TRANSFER_BYTES:
            body = {
                "Body": read(0, size_bytes),
                "ChecksumAlgorithm": "CRC32",
                "ChecksumCRC32": _base64(crc32),
            }
            self._call("put_object", **place, **body)
            return
        kind = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
        place["UploadId"] = self._call("create_multipart_upload", **place, **kind)["UploadId"]
        try:
            parts = [
                self._try(key, self._put_piece, place, number, read(at, min(TRANSFER_BYTES, size_bytes - at)))
                for number, at in enumerate(range(0, size_bytes, TRANSFER_BYTES), start=1)
            ]
            whole = {"ChecksumCRC32": _base64(crc32), "ChecksumType": "FULL_OBJECT"}
            ended = {"MultipartUpload": {"Parts": parts}}
            self._try(key, self._call, "complete_multipart_upload", **place, **ended, **whole)
        except FileNotFoundError:
            # Another uploader of the same object was quicker, and has cleared up; `send` looks.
            return
        except BaseException:
            with contextlib.suppress(OSError, SiteError, *self._errors):
                self._call("abort_multipart_upload", **place)
            raise

    def _put_piece(self, place: dict[str, str], number: int, data: bytes) -> dict[str, Any]:
        crc32 = {"ChecksumCRC32": _base64(zlib.crc32(data))}
        body = {"Body": data, "PartNumber": number, "ChecksumAlgorithm": "CRC32"}
        return {
            "PartNumber": number,
            "ETag": self._call("upload_part", **place, **body, **crc32)["ETag"],
            **crc32,
        }

    def _is_transient(self, error: Exception) -> bool:
        if super()._is_transient(error) or isinstance(error, self._trouble):
            return True
        # A code that s3fs does not know, from a proxy in between for instance.
        response = getattr(error.__cause__, "response", None) or {}
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status in (408, 429) or (status >= 500 and status != 501)

    def _words(self, key: str, error: Exception, tried: int) -> str:
        where = f"{self.url} at {self._endpoint}" if self._endpoint else self.url
        if isinstance(error, FileNotFoundError):
            return f"{where}: there is no bucket {self._bucket}; make it, or correct checkpoint.object.url"
        if isinstance(error, self._no_credentials):
            return (
                f"{where}: no credentials were found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY, or write ~/.aws/credentials"
            )
        if isinstance(error, PermissionError):
            return f"{where}: refused: {error}; are these the right credentials for this bucket?"
        if isinstance(error, self._gone):
            return (
                f"{where}: cannot be reached (tried {tried} times): {error}; see checkpoint.object.endpoint"
            )
        return super()._words(key, error, tried)


def _base64(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()
