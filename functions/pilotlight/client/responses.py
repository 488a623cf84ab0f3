"""The wire format of calls: headers and bodies of requests, and values or exceptions in responses.
No I/O.

Unpickling runs code of the sender. Therefore only responses to calls that were sent as pickles are
unpickled; those go to functions of the own tenant. Calls to functions of other tenants, and their
responses, are JSON."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import quote

from pilotlight.client.errors import error_from_problem, error_from_response, remote_exception
from pilotlight.client.pickling import UnpicklingFailed, loads
from pilotlight.client.transport import path_segment
from pilotlight.errors import (
    ClientClosedRequest,
    DeadlineExceeded,
    InvalidInput,
    PilotlightError,
    RemoteError,
)
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_NDJSON,
    CONTENT_PICKLE,
    CONTENT_PICKLE_STREAM,
    CONTENT_PROBLEM,
    CONTENT_SSE,
    HEADER_CUSTOMER,
    HEADER_IDEMPOTENCY_KEY,
    HEADER_OUTCOME,
    HEADER_PRIORITY,
    HEADER_REQUEST_ID,
    HEADER_WEBHOOK,
    PROBLEM_BASE,
    TENANT_PATH,
    CallRecord,
)

if TYPE_CHECKING:
    import httpx

LONG_POLL_S = 20.0
"""Duration of one long poll of an unfinished call: below the idle timeouts of common proxies (30 to
60 s)."""
JSON_BODY = {"content-type": CONTENT_JSON}
RAISED_STATUS = frozenset({500})
"""Statuses whose body may be a pickled exception, which the transport returns instead of
raising."""
_LENGTH = struct.Struct(">I")
_EXCEPTION_FOLLOWS = 0xFFFFFFFF
_STREAMS = frozenset({CONTENT_PICKLE_STREAM, CONTENT_NDJSON})
_FINISHED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})


def function_path(app: str, function: str, verb: str, *, tenant: str = "") -> str:
    """Return `/v1/functions/{app}/{function}:{verb}`, prefixed with the path of `tenant` if given.
    `function` may be `Class.method`."""
    owner = f"{TENANT_PATH}{path_segment(tenant)}" if tenant else ""
    return f"{owner}/v1/functions/{path_segment(app)}/{quote(function, safe='.')}:{verb}"


def is_repeatable(headers: Mapping[str, str]) -> bool | None:
    """Return True for a request with an idempotency key, which may be sent again after its
    connection was lost; otherwise None."""
    return True if HEADER_IDEMPOTENCY_KEY in headers else None


def call_path(call_id: str) -> str:
    """Return the path of a background call."""
    return f"/v1/calls/{path_segment(call_id)}"


def call_record(response: httpx.Response) -> CallRecord:
    """Parse the record of a background call."""
    return CallRecord.from_json(response.json())


def wait_params(wait_s: float) -> dict[str, str]:
    """Return the query that long-polls a background call."""
    return {"wait_s": f"{wait_s:g}"} if wait_s > 0 else {}


def resume_headers(after: str) -> dict[str, str]:
    """Return the headers that read the events of a background call, after the one with this id."""
    return {"accept": CONTENT_SSE, **({"last-event-id": after} if after else {})}


def call_headers(
    *,
    streams: bool,
    pickles: bool = True,
    priority: str = "",
    webhook: str = "",
    idempotency_key: str = "",
    customer: str = "",
) -> dict[str, str]:
    """Return the headers of an SDK call, with pickled arguments and a pickle, or a stream of
    pickles, as response.

    Args:
        pickles: False for a function of another tenant: JSON arguments, and JSON, or lines of JSON,
            as response.
        priority: "" = that of the function.
        webhook: name of the webhook to notify when a background call ends.
        idempotency_key: requests with the same key are the same call.
        customer: for which the call is made; "" = none is named."""
    if pickles:
        accept = CONTENT_PICKLE_STREAM if streams else CONTENT_PICKLE
        headers = {"content-type": CONTENT_PICKLE, "accept": f"{accept}, {CONTENT_JSON};q=0.5"}
    else:
        headers = {
            "content-type": CONTENT_JSON,
            "accept": CONTENT_NDJSON if streams else CONTENT_JSON,
        }
    if priority:
        headers[HEADER_PRIORITY] = priority
    if webhook:
        headers[HEADER_WEBHOOK] = webhook
    if idempotency_key:
        headers[HEADER_IDEMPOTENCY_KEY] = idempotency_key
    if customer:
        headers[HEADER_CUSTOMER] = customer
    return headers


def may_unpickle(headers: Mapping[str, str], tenant: str) -> bool:
    """Whether the response to a call with these headers may be unpickled. `tenant` is the name of
    another tenant that owns the function; "" = the own tenant."""
    return not tenant and headers.get("content-type") == CONTENT_PICKLE


def parse_result(status: int, headers: Mapping[str, str], body: bytes, *, pickles: bool) -> Any:
    """Return the result of a function. Raises its exception, or the error of the platform.
    `pickles`: whether the response may be unpickled."""
    content_type = headers.get("content-type", "").partition(";")[0].strip()
    if pickles and headers.get(HEADER_OUTCOME) == "raised" and content_type == CONTENT_PICKLE:
        raise remote_exception(body)
    if status >= 400 or content_type == CONTENT_PROBLEM:
        raise error_from_response(status, headers, body)
    return decode_result(content_type, body, pickles=pickles)


def decode_result(content_type: str, body: bytes, *, pickles: bool) -> Any:
    """Decode a result by its content type; types other than pickle and JSON become str or bytes.
    Raises RemoteError."""
    import json

    if content_type == CONTENT_PICKLE and not pickles:
        raise _unasked()
    if content_type == CONTENT_PICKLE:
        try:
            return loads(body)
        except UnpicklingFailed as e:
            raise RemoteError(
                f"the result of the function cannot be loaded in this process: {e}"
            ) from e
    if content_type == CONTENT_JSON:
        return json.loads(body)
    return body.decode(errors="replace") if content_type.startswith("text/") else body


def _unasked() -> RemoteError:
    return RemoteError(
        "the response is a pickle, which the call did not accept: it was not opened, because "
        "unpickling runs code of the sender"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResponse:
    """The raw response of a call, for programs that need the headers (the CLI shows start kind,
    timings and cost).

    Attributes:
        pickles: whether the response may be unpickled, because the call was sent as a pickle to a
            function of the own tenant."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    pickles: bool = False

    @classmethod
    def of(cls, response: httpx.Response, *, pickles: bool) -> Self:
        """The response that the transport returned."""
        return cls(
            status=response.status_code,
            headers=response.headers,
            body=response.content,
            pickles=pickles,
        )

    @property
    def request_id(self) -> str:
        """The id of the call in logs, bills, traces and feedback."""
        return self.headers.get(HEADER_REQUEST_ID, "")

    def value(self) -> Any:
        """Return the result. Raises the exception of the function, or the error of the platform."""
        return parse_result(self.status, self.headers, self.body, pickles=self.pickles)


class ItemReader(Protocol):
    """An incremental parser of the items of a stream of results, for one call."""

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the items completed by `data`. Raises the exception of the generator after the
        items before it."""

    def close(self) -> None:
        """End the stream. Raises RemoteError if it ended in the middle of an item."""


def item_reader_for(content_type: str, *, pickles: bool) -> ItemReader:
    """Return a reader for a stream of this content type. Raises InvalidInput for a single value,
    RemoteError for a pickle that was not accepted."""
    if pickles:
        return PickleItemReader()
    kind = content_type.partition(";")[0].strip()
    if kind == CONTENT_NDJSON:
        return NdjsonItemReader()
    if kind in (CONTENT_PICKLE, CONTENT_PICKLE_STREAM):
        raise _unasked()
    raise InvalidInput(
        f"the function returned a single value (content type {kind or 'missing'}), not a stream: "
        f"call it with .remote(…)"
    )


class NdjsonItemReader:
    """An incremental parser of lines of JSON (`CONTENT_NDJSON`), for one call."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the items completed by `data`. Raises the exception of the generator after the
        items before it."""
        import json

        self._buffer += data
        if b"\n" not in data:
            return
        *whole, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in whole:
            if line.strip():
                item = json.loads(line)
                if is_problem(item):
                    raise error_from_problem(item)
                yield item

    def close(self) -> None:
        """End the stream. Raises RemoteError if it ended in the middle of an item."""
        if self._buffer.strip():
            raise _cut_off()


class PickleItemReader:
    """An incremental parser of a stream of pickles (`CONTENT_PICKLE_STREAM`), for one call."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._exception_follows = False

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the items completed by `data`. Raises the exception of the generator after the
        items before it."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length == _EXCEPTION_FOLLOWS and not self._exception_follows:
                self._exception_follows = True
                del self._buffer[: _LENGTH.size]
                continue
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            if self._exception_follows:
                raise remote_exception(body)
            yield decode_result(CONTENT_PICKLE, body, pickles=True)

    def close(self) -> None:
        """End the stream. Raises RemoteError if it ended in the middle of an item."""
        if self._buffer or self._exception_follows:
            raise _cut_off()


def _cut_off() -> RemoteError:
    return RemoteError(
        "the stream of results ended in the middle of an item: the instance crashed or the "
        "connection was lost"
    )


def is_problem(item: Any) -> bool:
    """Whether an item of a JSON stream is a problem document, the exception of the generator."""
    return (
        isinstance(item, dict)
        and str(item.get("type", "")).startswith(PROBLEM_BASE)
        and "status" in item
    )


def parse_items(content_type: str, body: bytes, *, pickles: bool) -> list[Any]:
    """Parse the complete result of a generator to a list of items. Raises the exception of the
    generator."""
    import json

    if content_type == CONTENT_PICKLE_STREAM:
        if not pickles:
            raise _unasked()
        reader = PickleItemReader()
        items = list(reader.feed(body))
        reader.close()
        return items
    items = [json.loads(line) for line in body.splitlines() if line.strip()]
    last = items[-1] if items else None
    if last is not None and is_problem(last):
        raise error_from_problem(last)
    return items


def is_finished(record: CallRecord) -> bool:
    """Whether the call is in a final state."""
    return record.state in _FINISHED


def parse_record_result(record: CallRecord, *, pickles: bool = True) -> Any:
    """Return the result of a finished call; of a generator, the list of its items.

    `pickles` is False if the call was sent as JSON. For a call known only by its id it is True: the
    platform stores pickles only as results of functions of the own tenant. Raises the exception of
    the call, ClientClosedRequest if it was cancelled, DeadlineExceeded if it expired."""
    if record.state == "CANCELLED":
        raise ClientClosedRequest(f"call {record.id} was cancelled")
    body = base64.b64decode(record.result)
    if record.state == "EXPIRED":
        raise DeadlineExceeded(
            f"call {record.id} expired: it exceeded its timeout, or its result was deleted after "
            f"its time to live"
        )
    if record.content_type.partition(";")[0].strip() in _STREAMS:
        return parse_items(record.content_type, body, pickles=pickles)
    if record.state == "FAILED" and not body:
        raise PilotlightError(
            f"call {record.id} failed with status {record.status} and outcome {record.outcome!r}"
        )
    outcome = record.outcome if record.state == "SUCCEEDED" else "raised"
    status = record.status or (200 if record.state == "SUCCEEDED" else 500)
    return parse_result(
        status,
        {"content-type": record.content_type, HEADER_OUTCOME: outcome},
        body,
        pickles=pickles,
    )
