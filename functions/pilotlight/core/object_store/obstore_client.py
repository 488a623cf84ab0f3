"""S3 range reads through obstore: a compiled client with its own event loop and threads, which
takes the GIL only to hand over data.

Endpoint, region and credentials are those that boto3 resolved, so both are configured in one place.
One attempt each, as with boto3. obstore's errors are distinguished by their text, since most of
them share a class. Source: obstore's documentation, `obstore.store.S3Store`."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from botocore.exceptions import NoCredentialsError
from obstore.exceptions import BaseError, UnauthenticatedError
from obstore.store import S3Store as CompiledStore

from pilotlight.core.object_store import error_mapping
from pilotlight.core.object_store.async_once import AsyncOnce
from pilotlight.core.object_store.boto3_client import Boto3Client, connect_timeout_s
from pilotlight.core.object_store.errors import ObjectStoreError
from pilotlight.core.object_store.interface import ObjectInfo
from pilotlight.core.object_store.range_reader import Buffer, RangeRequest

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, S3Credential

_CREDENTIALS_LAST = timedelta(minutes=5)
"""botocore renews expiring credentials; they are requested again at this interval."""
_WHOLE_REQUEST = timedelta(days=1)
"""No limit for a range that is still arriving; only the read timeout ends it."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_KIND = re.compile(r"kind: (\w+)")
_REDIRECTED = "BareRedirect"
_NO_RANGES = ("NotPartial", "UnexpectedRange")


class ObstoreRangeReader:
    """Reads ranges with obstore. Implements RangeReader. The store is created on the first read,
    with boto3's configuration. Owner: the event loop."""

    def __init__(self, boto: Boto3Client, bucket: str, *, timeout_s: float) -> None:
        self._boto = boto
        self._bucket = bucket
        self._timeout_s = timeout_s
        self._made = AsyncOnce(self._from_boto)

    async def read(self, wanted: RangeRequest) -> tuple[Buffer, ObjectInfo]:
        """Read one range. Raises ObjectStoreError."""
        try:
            answer = await obstore.get_async(
                await self._made.get(), wanted.name, options=_options(wanted)
            )
            found = ObjectInfo(size_bytes=answer.meta["size"], etag=answer.meta["e_tag"] or "")
            begin, end = answer.range
            wanted.check_head(found, offset_bytes=begin, length_bytes=end - begin)
            data = memoryview(await answer.bytes_async())
        except (BaseError, FileNotFoundError) as e:
            if _status(e) == 416:
                return b"", ObjectInfo(size_bytes=0, etag="")
            raise _translated(wanted.url, e) from e
        wanted.check_body(len(data), end - begin)
        return data, found

    async def aclose(self) -> None:
        """Do nothing: idle connections are closed when the store is garbage-collected."""

    async def _from_boto(self) -> CompiledStore:
        return await self._boto.ask(f"s3://{self._bucket}", self._make)

    def _make(self, client: Any) -> CompiledStore:
        credentials = self._boto.session.get_credentials()
        if credentials is None:
            raise NoCredentialsError

        def renewed() -> S3Credential:
            now = credentials.get_frozen_credentials()
            until = datetime.now(UTC) + _CREDENTIALS_LAST
            return {
                "access_key_id": now.access_key,
                "secret_access_key": now.secret_key,
                "token": now.token,
                "expires_at": until,
            }

        return CompiledStore(
            self._bucket,
            endpoint=client.meta.endpoint_url,
            region=client.meta.region_name,
            virtual_hosted_style_request=False,
            credential_provider=renewed,
            client_options=_client_options(self._timeout_s),
            retry_config={"max_retries": 0, "retry_timeout": _WHOLE_REQUEST},
        )


def _client_options(timeout_s: float) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=connect_timeout_s(timeout_s)),
        "read_timeout": timedelta(seconds=timeout_s),
        "timeout": _WHOLE_REQUEST,
    }
    if bundle := os.environ.get("AWS_CA_BUNDLE"):  # boto3 reads it by itself
        options["root_certificate"] = Path(bundle).read_bytes()
    return options


def _options(wanted: RangeRequest) -> GetOptions:
    options: GetOptions = {
        "range": (wanted.offset_bytes, wanted.offset_bytes + wanted.length_bytes)
    }
    if wanted.if_match:
        options["if_match"] = wanted.if_match
    return options


def _status(error: Exception) -> int | None:
    """The HTTP status in the error; None without a response."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _translated(url: str, error: Exception) -> ObjectStoreError:
    said, _, detail = str(error).partition("\n\nDebug source:")
    if (status := _status(error)) is not None:
        code, message = _CODE.search(said), _MESSAGE.search(said)
        return error_mapping.error_for_status(
            url, status, code[1] if code else "", message[1] if message else ""
        )
    if _REDIRECTED in detail:
        return ObjectStoreError(f"{url}: {said}. Set AWS_DEFAULT_REGION to the bucket's region")
    if any(mark in detail for mark in _NO_RANGES):
        return ObjectStoreError(f"{url}: {said}: the store must support Range")
    if isinstance(error, UnauthenticatedError):
        return error_mapping.error_for_transport(url, NoCredentialsError())
    kind = _KIND.search(detail)
    return error_mapping.error_for_transport(
        url, ConnectionError(f"{said} ({kind[1]})" if kind else said)
    )
