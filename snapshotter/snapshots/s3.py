"""Copies of snapshots in an S3 bucket, or in anything that speaks its protocol.

Credentials, region and a custom endpoint come from the standard places (AWS_ENDPOINT_URL, AWS_PROFILE, instance metadata, …). Buckets
are addressed by path, which every server understands. boto3 blocks, so each call is made in a thread; its clients may be shared
between threads. Retries, exponential with jitter, are botocore's `standard` mode. Source: boto3's guides on clients and retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from snapshotter.snapshots.stores import ObjectMissing, RemoteError, checked, is_key

T = TypeVar("T")
_ATTEMPTS = 5
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0
"""Between two bytes; a chunk of 16 MiB may take longer in all."""
_MISSING = ("404", "NoSuchKey", "NotFound")


class S3Store:
    """One bucket, below one prefix. The client is made when first needed: finding credentials may take a second."""

    def __init__(self, *, bucket: str, prefix: str, at_once: int = 8, attempts: int = _ATTEMPTS) -> None:
        if not bucket:
            raise ValueError("snapshot_store: s3://bucket/prefix needs a bucket")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._at_once = at_once
        self._attempts = attempts
        self._client: Any = None
        self._making = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<S3Store s3://{self._bucket}/{self._prefix}>"

    async def put(self, key: str, data: bytes) -> None:
        """See SnapshotStore."""
        name = self._name(key)
        await self._ask(key, lambda client: client.put_object(Bucket=self._bucket, Key=name, Body=data))

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """See SnapshotStore."""
        name = self._name(key)

        def read(client: Any) -> bytes | None:
            answer = client.get_object(Bucket=self._bucket, Key=name)
            with answer["Body"] as body:
                return None if answer["ContentLength"] > max_bytes else bytes(body.read())

        data = await self._ask(key, read)
        if data is None:
            raise RemoteError(f"{self._url(key)} is longer than {max_bytes} bytes")
        return data

    async def size(self, key: str) -> int | None:
        """See SnapshotStore."""
        name = self._name(key)
        try:
            return await self._ask(key, lambda client: int(client.head_object(Bucket=self._bucket, Key=name)["ContentLength"]))
        except ObjectMissing:
            return None

    async def keys(self, prefix: str) -> list[str]:
        """See SnapshotStore."""
        return sorted(await self._ask(prefix, lambda client: list(self._keys(client, prefix))))

    async def delete(self, key: str) -> None:
        """See SnapshotStore."""
        name = self._name(key)
        await self._ask(key, lambda client: client.delete_object(Bucket=self._bucket, Key=name))

    async def aclose(self) -> None:
        """See SnapshotStore."""
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
            self._client = None

    def _keys(self, client: Any, prefix: str) -> Iterator[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
        for page in pages:
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(self._prefix)
                if is_key(key):  # what somebody else put there is none of ours
                    yield key

    def _name(self, key: str) -> str:
        return self._prefix + checked(key)

    def _url(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}"

    async def _ask(self, key: str, call: Callable[[Any], T]) -> T:
        try:
            async with self._making:
                if self._client is None:
                    self._client = await asyncio.to_thread(_client, self._at_once, self._attempts)
            return await asyncio.to_thread(call, self._client)
        except ClientError as e:
            code = str(e.response.get("Error", {}).get("Code"))
            if code in _MISSING:
                raise ObjectMissing(f"{self._url(key)} is missing") from e
            raise RemoteError(f"{self._url(key)}: {e}") from e
        except (BotoCoreError, OSError) as e:
            raise RemoteError(f"{self._url(key)}: {e}") from e


def _client(at_once: int, attempts: int) -> Any:
    session = boto3.session.Session()
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        s3={"addressing_style": "path"},
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        max_pool_connections=at_once,
    )
    return session.client("s3", config=config, region_name=session.region_name or "us-east-1")
