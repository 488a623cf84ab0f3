"""Errors of the activator as gRPC statuses, with the time after which a retry may succeed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from activator.open_inference.grpc.messages import message_class

Metadata = tuple[tuple[str, str | bytes], ...]
_CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    402: grpc.StatusCode.RESOURCE_EXHAUSTED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.UNKNOWN,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Status codes by those of HTTP, as far as gRPC's mapping goes; 500 is what a function raised."""
MAX_TEXT_BYTES: Final = 2048
"""Of a status' message: metadata of a response has 8 KiB in all."""
_RETURNED: Final = ("x-request-id", "server-timing", "ratelimit")
_PREFIX: Final = "pilotlight-"


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended: code, message, and trailing metadata."""

    code: grpc.StatusCode
    text: str
    metadata: Metadata = ()


class Refused(Exception):
    """Raised for a call that ends with this status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.text)
        self.status = status


def trailing_metadata(headers: Mapping[str, str]) -> Metadata:
    """Return what a response's headers say about its call."""
    return tuple(
        (name, value)
        for name, value in headers.items()
        if (name in _RETURNED or name.startswith(_PREFIX)) and value.isascii()
    )


def status_of(http_status: int, headers: Mapping[str, str], body: bytes) -> Status:
    """Return the status of an error over HTTP, with `google.rpc.RetryInfo` where a retry may
    succeed."""
    code = _CODES.get(http_status, grpc.StatusCode.INTERNAL)
    text = _text_of(body) or f"HTTP status {http_status}"
    metadata = trailing_metadata(headers)
    after = headers.get("retry-after", "")
    if after.isdigit():
        metadata += (
            ("retry-after", after),
            ("grpc-status-details-bin", retry_details(code, text, float(after))),
        )
    return Status(code, text, metadata)


def retry_details(code: grpc.StatusCode, text: str, after_s: float) -> bytes:
    """Return a `google.rpc.Status` with the time after which a retry may succeed."""
    fraction, seconds = math.modf(after_s)
    delay = message_class("Duration")(seconds=int(seconds), nanos=int(fraction * 1e9))
    info = message_class("RetryInfo")(retry_delay=delay)
    detail = message_class("Any")(
        type_url="type.googleapis.com/google.rpc.RetryInfo", value=info.SerializeToString()
    )
    status = message_class("Status")(code=code.value[0], message=text, details=[detail])
    data: bytes = status.SerializeToString()
    return data


def refused(text: str, after_s: float = 1.0) -> Status:
    """Return the status of a call over a bound of this process."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return Status(code, text, (("grpc-status-details-bin", retry_details(code, text, after_s)),))


def _text_of(body: bytes) -> str:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict):
        return ""
    text = document.get("error") or document.get("detail") or document.get("title") or ""
    return str(text).encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
