"""One call's wire form: the request's headers and body, and the value or exception in the answer.
No I/O.

A pickle in an answer runs code of its sender. Pickles are therefore opened only in answers to calls
that were sent as pickles, which go to functions of our own tenant; calls to another tenant's
function, and their answers, are JSON."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import quote

from pilotlight.client.errors import error_from_problem, error_from_response, remote_exception
from pilotlight.client.pickling import UnpicklingFailed, loads
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
    HEADER_IDEMPOTENCY_KEY,
    HEADER_OUTCOME,
    HEADER_PRIORITY,
    HEADER_TIMEOUT,
    HEADER_WEBHOOK,
    PROBLEM_BASE,
    TENANT_PATH,
    CallRecord,
)

RAISED_STATUS = frozenset({500})
"""A status whose body may be a pickled exception: the transport hands it over instead of
raising."""
_LENGTH = struct.Struct(">I")
_EXCEPTION_FOLLOWS = 0xFFFFFFFF
_STREAMS = frozenset({CONTENT_PICKLE_STREAM, CONTENT_NDJSON})
_FINISHED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})


def function_path(app: str, function: str, verb: str, *, tenant: str = "") -> str:
    """`/v1/functions/{app}/{function}:{verb}`; `function` may be `Class.method`. Another tenant's
    lies below its name."""
    owner = f"{TENANT_PATH}{quote(tenant, safe='')}" if tenant else ""
    return f"{owner}/v1/functions/{quote(app, safe='')}/{quote(function, safe='.')}:{verb}"


def call_headers(
    *,
    streams: bool,
    pickles: bool = True,
    timeout_s: float | None = None,
    priority: str = "",
    webhook: str = "",
    idempotency_key: str = "",
) -> dict[str, str]:
    """Headers of an SDK call: pickle in, pickle (or a stream of pickles) out. `priority` "" leaves
    it to the function.

    `pickles` False, for another tenant's function: JSON in, JSON (or lines of it) out. `webhook`:
    name of who is told when a submitted call ends. `idempotency_key`: a repeat with it is the same
    call."""
    if pickles:
        accept = CONTENT_PICKLE_STREAM if streams else CONTENT_PICKLE
        headers = {"content-type": CONTENT_PICKLE, "accept": f"{accept}, {CONTENT_JSON};q=0.5"}
    else:
        headers = {
            "content-type": CONTENT_JSON,
            "accept": CONTENT_NDJSON if streams else CONTENT_JSON,
        }
    if timeout_s is not None:
        headers[HEADER_TIMEOUT] = f"{timeout_s:g}"
    if priority:
        headers[HEADER_PRIORITY] = priority
    if webhook:
        headers[HEADER_WEBHOOK] = webhook
    if idempotency_key:
        headers[HEADER_IDEMPOTENCY_KEY] = idempotency_key
    return headers


def may_unpickle(headers: Mapping[str, str], tenant: str) -> bool:
    """Whether the answer to a call with these headers may be unpickled; `tenant` names another one
    whose function it is, "" = our own."""
    return not tenant and headers.get("content-type") == CONTENT_PICKLE


def parse_result(status: int, headers: Mapping[str, str], body: bytes, *, pickles: bool) -> Any:
    """What the function returned. Raises what it raised, or the platform's error. `pickles`:
    whether pickles may be opened."""
    content_type = headers.get("content-type", "").partition(";")[0].strip()
    if pickles and headers.get(HEADER_OUTCOME) == "raised" and content_type == CONTENT_PICKLE:
        raise remote_exception(body)
    if status >= 400 or content_type == CONTENT_PROBLEM:
        raise error_from_response(status, headers, body)
    return decode_result(content_type, body, pickles=pickles)


def decode_result(content_type: str, body: bytes, *, pickles: bool) -> Any:
    """A result's value by its content type; text and bytes for the types that are neither pickle
    nor JSON. Raises RemoteError."""
    import json

    if content_type == CONTENT_PICKLE and not pickles:
        raise _unasked()
    if content_type == CONTENT_PICKLE:
        try:
            return loads(body)
        except UnpicklingFailed as e:
            raise RemoteError(
                f"the function returned something that cannot be loaded here: {e}"
            ) from e
    if content_type == CONTENT_JSON:
        return json.loads(body)
    return body.decode(errors="replace") if content_type.startswith("text/") else body


def _unasked() -> RemoteError:
    return RemoteError(
        "the answer is a pickle, which the call did not ask for: it is not opened, because that "
        "runs code of its sender"
    )


class ItemReader(Protocol):
    """Cuts a stream of results into items. Fed with bytes as they come; owned by one call."""

    def feed(self, data: bytes) -> Iterator[Any]:
        """The items completed by `data`. Raises what the generator raised, at its place."""
        ...

    def close(self) -> None:
        """The stream ended. Raises RemoteError when it ended in the middle of an item."""
        ...


def item_reader_for(content_type: str, *, pickles: bool) -> ItemReader:
    """What reads a stream with this content type. Raises InvalidInput for an answer that is a
    single value, RemoteError for a pickle."""
    if pickles:
        return PickleItemReader()
    kind = content_type.partition(";")[0].strip()
    if kind == CONTENT_NDJSON:
        return NdjsonItemReader()
    if kind in (CONTENT_PICKLE, CONTENT_PICKLE_STREAM):
        raise _unasked()
    raise InvalidInput(
        f"the function answered with one value ({kind or 'of no type'}), not with a stream: call "
        f"it with .remote(…)"
    )


class NdjsonItemReader:
    """Cuts lines of JSON (`CONTENT_NDJSON`) into items. See PickleItemReader."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """See PickleItemReader."""
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
        """See PickleItemReader."""
        if self._buffer.strip():
            raise _cut_off()


class PickleItemReader:
    """Cuts a stream of pickles (`CONTENT_PICKLE_STREAM`) into items. Fed with bytes as they come;
    owned by one call."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._exception_follows = False

    def feed(self, data: bytes) -> Iterator[Any]:
        """The items completed by `data`. Raises the exception that the generator raised, at its
        place."""
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
        """The stream ended. Raises RemoteError when it ended in the middle of an item."""
        if self._buffer or self._exception_follows:
            raise _cut_off()


def _cut_off() -> RemoteError:
    return RemoteError(
        "the stream of results ended in the middle of an item: the instance or the connection "
        "went away"
    )


def is_problem(item: Any) -> bool:
    """Whether an item of a stream of JSON is a problem document: what the generator raised."""
    return (
        isinstance(item, dict)
        and str(item.get("type", "")).startswith(PROBLEM_BASE)
        and "status" in item
    )


def parse_items(content_type: str, body: bytes, *, pickles: bool) -> list[Any]:
    """All items of a generator's whole result. Raises what it raised in the middle."""
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
    """Whether the call will not change any more."""
    return record.state in _FINISHED


def parse_record_result(record: CallRecord, *, pickles: bool = True) -> Any:
    """The result of a finished call, of a generator the list of its items. `pickles` False: the
    call was sent as JSON.

    Of a call that is only known by its id pickles are opened: the platform keeps them as the
    results of our own functions only. Raises what it raised, ClientClosedRequest when cancelled,
    DeadlineExceeded when expired."""
    if record.state == "CANCELLED":
        raise ClientClosedRequest(f"call {record.id} was cancelled")
    body = base64.b64decode(record.result)
    if record.state == "EXPIRED":
        raise DeadlineExceeded(
            f"call {record.id} expired: it ran out of time, or its result was kept only until its "
            f"time to live ended"
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
