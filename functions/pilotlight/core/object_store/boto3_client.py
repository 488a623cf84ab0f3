"""S3 through boto3: the client, blocking calls in its own threads, and range reads.

Credentials, region and a custom endpoint come from the standard locations (AWS_ENDPOINT_URL,
AWS_PROFILE, instance metadata, …). Buckets are addressed by path, and checksums are added only
where S3 requires them: all compatible servers support both. botocore makes one attempt; retries are
in one place, `retries`, which also covers reading the response body. Clients may be shared between
threads. Source: boto3's guides on clients, retries and data integrity."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from pilotlight.core.object_store import boto3_session, error_mapping
from pilotlight.core.object_store.async_once import AsyncOnce
from pilotlight.core.object_store.errors import ObjectStoreUnavailable
from pilotlight.core.object_store.interface import ObjectInfo
from pilotlight.core.object_store.range_reader import Buffer, RangeRequest

T = TypeVar("T")
_CONNECT_TIMEOUT_S = 5.0
_PIECE_BYTES = 1024 * 1024
"""Bytes per read; between two reads an abandoned request stops."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Boto3Client:
    """One boto3 client and its threads. Created on the first call, since finding credentials may
    take a second.

    Owner: the event loop; `_made` changes between awaits only. `timeout_s`: limit without data from
    the server. `session`: the client's session, set after the first call."""

    def __init__(self, *, at_once: int, timeout_s: float) -> None:
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="s3")
        self.session: Any = None
        self._made = AsyncOnce(self._in_thread)

    async def ask(self, url: str, call: Callable[[Any], T]) -> T:
        """Run `call(client)` in a thread, once. Raises ObjectStoreError, naming `url`. If
        cancelled, the thread's result is dropped."""
        try:
            client = await self.client()
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, client)
        except ClientError as e:
            raise error_mapping.error_for_client_error(url, e) from e
        except (BotoCoreError, HTTPError, OSError) as e:
            raise error_mapping.error_for_transport(url, e) from e

    async def client(self) -> Any:
        """The client. Raises BotoCoreError."""
        return await self._made.get()

    async def aclose(self) -> None:
        """Close connections; threads in a call end with it, or after the timeout."""
        if self._made.value is not None:
            await asyncio.to_thread(self._made.value.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._make)

    def _make(self) -> Any:
        session = self.session = boto3_session.shared_session()
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            s3={"addressing_style": "path"},
            connect_timeout=connect_timeout_s(self._timeout_s),
            read_timeout=self._timeout_s,
            max_pool_connections=self._at_once,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return session.client("s3", config=config, region_name=session.region_name or "us-east-1")


def connect_timeout_s(timeout_s: float) -> float:
    """Timeout to establish a connection."""
    return min(_CONNECT_TIMEOUT_S, timeout_s)


class Boto3RangeReader:
    """Reads ranges with a blocking GET each. Implements RangeReader."""

    def __init__(self, client: Boto3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    async def read(self, wanted: RangeRequest) -> tuple[Buffer, ObjectInfo]:
        """Read one range. Raises ObjectStoreError."""
        left = threading.Event()
        try:
            return await self._client.ask(
                wanted.url, lambda client: self._read(client, wanted, left)
            )
        finally:
            left.set()

    async def aclose(self) -> None:
        """Do nothing: the client is not owned."""

    def _read(
        self, client: Any, wanted: RangeRequest, left: threading.Event
    ) -> tuple[Buffer, ObjectInfo]:
        last = wanted.offset_bytes + wanted.length_bytes - 1
        condition = {"IfMatch": wanted.if_match} if wanted.if_match else {}
        try:
            answer = client.get_object(
                Bucket=self._bucket,
                Key=wanted.name,
                Range=f"bytes={wanted.offset_bytes}-{last}",
                **condition,
            )
        except ClientError as e:
            if e.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416:
                return b"", ObjectInfo(size_bytes=0, etag="")
            raise
        with answer["Body"] as body:
            offset, found = _head(answer)
            wanted.check_head(found, offset_bytes=offset, length_bytes=answer["ContentLength"])
            return _body(body, answer["ContentLength"], wanted, left), found


def _head(answer: Any) -> tuple[int, ObjectInfo]:
    """The offset of the body, and the object's version."""
    etag = answer.get("ETag", "")
    if match := _CONTENT_RANGE.fullmatch(answer.get("ContentRange", "")):
        return int(match[1]), ObjectInfo(size_bytes=int(match[3]), etag=etag)
    return 0, ObjectInfo(size_bytes=answer["ContentLength"], etag=etag)


def _body(body: Any, length: int, wanted: RangeRequest, left: threading.Event) -> memoryview:
    buffer = memoryview(bytearray(length))
    done = 0
    while done < length:
        if left.is_set():
            raise ObjectStoreUnavailable(f"{wanted.url}: the request was cancelled")
        piece = body.read(min(_PIECE_BYTES, length - done))
        if not piece:
            break
        buffer[done : done + len(piece)] = piece
        done += len(piece)
    wanted.check_body(done, length)
    return buffer.toreadonly()
