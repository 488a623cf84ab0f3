"""Model files in an S3 bucket, or in a compatible object store.

Credentials, region and a custom endpoint come from the standard chain (AWS_PROFILE,
AWS_ENDPOINT_URL, instance metadata, …); without credentials, requests are unsigned, which public
buckets allow. Each range request requires the listed version (If-Match)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from weight_cache.errors import SourceInvalid
from weight_cache.sources.retries import TIMEOUT_S, TransientSourceError, retry_transient
from weight_cache.sources.source import SourceFile, sort_source_files, source_changed_error

T = TypeVar("T")
_READS_AT_ONCE = 8
_CONNECT_TIMEOUT_S = 5.0
_SESSION = {
    "AWS_ACCESS_KEY_ID": "aws_access_key_id",
    "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key",
    "AWS_SESSION_TOKEN": "aws_session_token",
    "AWS_DEFAULT_REGION": "region_name",
    "AWS_REGION": "region_name",
    "AWS_PROFILE": "profile_name",
}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_TRANSIENT_STATUSES = frozenset({408, 429})
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
)


class S3Source:
    """The objects below a prefix, or a single object.

    `given`: variables in addition to the standard chain, from a secret. The client is created under
    the lock on first use (finding credentials may take a second); threads share it. `files`
    determines whether it is a single object."""

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str,
        given: Mapping[str, str],
        timeout_s: float = TIMEOUT_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        self._given = given
        self._timeout_s = timeout_s
        self._pause = pause
        self._is_single = False
        self._client: Any = None
        self._making = threading.Lock()

    @classmethod
    def at(cls, address: str, *, environ: Mapping[str, str]) -> S3Source:
        """Create the source for `s3://bucket/prefix`. Variables in `environ` that differ from the
        process's environment take precedence."""
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        if not bucket:
            raise SourceInvalid(f"{address} has no bucket: write s3://bucket/prefix")
        names = (*_SESSION, *_ENDPOINTS)
        given = {
            name: environ[name]
            for name in names
            if name in environ and environ[name] != os.environ.get(name)
        }
        return cls(bucket=bucket, prefix=prefix, given=given)

    def __repr__(self) -> str:
        return f"<S3Source {self.name}>"

    @property
    def name(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def reads_at_once(self) -> int:
        """A single stream is slower than the object store."""
        return _READS_AT_ONCE

    def files(self) -> list[SourceFile]:
        """List the objects. Raises SourceInvalid."""
        found = self._request(self.name, lambda client: list(self._list(client))) or self._single()
        if not all(file.version for file in found):  # a server that lists no entity tags
            with ThreadPoolExecutor(_READS_AT_ONCE, "ask S3") as pool:
                found = list(pool.map(self._described, found))
        return sort_source_files(found, where=self.name)

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range of the listed version. Raises SourceInvalid."""
        if not length_bytes:
            return b""
        where = f"s3://{self._bucket}/{self._key(file)}"
        return self._request(
            where, lambda client: self._read(client, where, file, offset_bytes, length_bytes)
        )

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()

    def _list(self, client: Any) -> Iterator[SourceFile]:
        below = f"{self._prefix}/" if self._prefix else ""
        for page in client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=below
        ):
            for entry in page.get("Contents", ()):
                # consoles create empty objects as folders
                if not entry["Key"].endswith("/") or entry["Size"]:
                    yield _file(entry["Key"].removeprefix(below), entry["Size"], entry)

    def _single(self) -> list[SourceFile]:
        """The single object with this exact key."""
        if not self._prefix:
            return []
        self._is_single = True
        return [
            self._described(
                SourceFile(path=self._prefix.rpartition("/")[2], size_bytes=0, version="")
            )
        ]

    def _described(self, file: SourceFile) -> SourceFile:
        head = self._request(
            self.name, lambda client: client.head_object(Bucket=self._bucket, Key=self._key(file))
        )
        return _file(file.path, head["ContentLength"], head)

    def _key(self, file: SourceFile) -> str:
        return self._prefix if self._is_single else f"{self._prefix}/{file.path}".lstrip("/")

    def _read(self, client: Any, where: str, file: SourceFile, offset: int, length: int) -> bytes:
        wanted = f"bytes={offset}-{offset + length - 1}"
        condition = {"IfMatch": file.version} if file.version else {}
        answer = client.get_object(
            Bucket=self._bucket, Key=self._key(file), Range=wanted, **condition
        )
        with answer["Body"] as body:
            if file.version and answer.get("ETag") != file.version:
                raise source_changed_error(where)
            if answer["ContentLength"] > length or (offset and "ContentRange" not in answer):
                raise SourceInvalid(f"{where}: the store does not support range requests")
            data = bytes(body.read())
        if len(data) < length:
            raise TransientSourceError(f"{where}: received {len(data)} of {length} bytes")
        return data

    def _request(self, where: str, call: Callable[[Any], T]) -> T:
        return retry_transient(lambda: self._attempt(where, call), pause=self._pause)

    def _attempt(self, where: str, call: Callable[[Any], T]) -> T:
        try:
            from botocore.exceptions import (
                BotoCoreError,
                ClientError,
                PartialCredentialsError,
                ProfileNotFound,
            )
            from urllib3.exceptions import HTTPError
        except ImportError as e:
            raise SourceInvalid(
                f"{where}: reading from S3 needs boto3: pip install 'pilotlight[weights]'"
            ) from e
        try:
            with self._making:
                self._client = self._client or _client(self._given, self._timeout_s)
            return call(self._client)
        except ClientError as e:
            raise _refused(where, e.response) from e
        except (PartialCredentialsError, ProfileNotFound) as e:
            raise SourceInvalid(f"{where}: {e}") from e
        except (BotoCoreError, HTTPError, OSError) as e:
            raise TransientSourceError(
                f"{where}: no valid response: {e}. Check the endpoint (AWS_ENDPOINT_URL) and the "
                f"network"
            ) from e


def _file(path: str, size_bytes: int, entry: Mapping[str, Any]) -> SourceFile:
    """The file described by a listing or a head; without an entity tag its version is unknown."""
    etag = str(entry.get("ETag", ""))
    return SourceFile(path=path, size_bytes=size_bytes, version=etag, is_lasting=bool(etag))


def _refused(where: str, response: Mapping[str, Any]) -> SourceInvalid:
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code, said = (
        str(response.get("Error", {}).get("Code", "")),
        str(response.get("Error", {}).get("Message", "")),
    )
    if code == "NoSuchBucket":
        return SourceInvalid(f"{where}: the bucket does not exist")
    if status == 404:
        return SourceInvalid(f"{where}: there is no object with that name or prefix")
    if status in (412, 416):
        return source_changed_error(where)
    if status in (401, 403):
        return SourceInvalid(
            f"{where}: access refused ({code or status}: {said}): set credentials that may list "
            f"and read it, in AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or with "
            f"secret="
        )
    if status >= 500 or status in _TRANSIENT_STATUSES or code in _TRANSIENT_CODES:
        return TransientSourceError(
            f"{where}: the store is temporarily unavailable ({status} {code}: {said})"
        )
    return SourceInvalid(f"{where}: the store refused ({status} {code}: {said})")


def _client(given: Mapping[str, str], timeout_s: float) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config

    from pilotlight.core.object_store import boto3_session

    session = boto3_session.shared_session(
        **{_SESSION[name]: value for name, value in given.items() if name in _SESSION}
    )
    config = Config(
        # `retry_transient` retries, also while reading bodies
        retries={"mode": "standard", "total_max_attempts": 1},
        s3={"addressing_style": "path"},
        connect_timeout=min(_CONNECT_TIMEOUT_S, timeout_s),
        read_timeout=timeout_s,
        max_pool_connections=2 * _READS_AT_ONCE,
        # checksums cover whole objects, not ranges
        response_checksum_validation="when_required",
        **({} if session.get_credentials() else {"signature_version": UNSIGNED}),
    )
    endpoint = next((given[name] for name in _ENDPOINTS if name in given), None)
    return session.client(
        "s3", config=config, region_name=session.region_name or "us-east-1", endpoint_url=endpoint
    )
