"""Reads request bodies and sends responses."""

from __future__ import annotations

import functools
import http
import json
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pilotlight.protocol import CONTENT_PROBLEM, HEADER_OUTCOME
from pilotlight.worker.user_code import serialization

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable

OUTCOME = HEADER_OUTCOME.encode()
PROBLEM = CONTENT_PROBLEM.encode()


async def read_body(receive: ASGIReceiveCallable) -> bytes | None:
    """The request's body; None if the caller disconnected before its end."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        return message["body"]
    parts = []
    while message["type"] == "http.request":
        parts.append(message["body"])
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    return None


async def send_response(
    send: ASGISendCallable,
    status: int,
    content_type: bytes,
    outcome: bytes,
    body: bytes,
    *,
    lines: bytes = b"",
) -> None:
    """Send a complete response. `lines`: further header lines, each ending in CRLF, which our own
    server writes unchanged."""
    cycle = getattr(send, "__self__", None)
    if (
        type(cycle) is RequestResponseCycle
        and not cycle.response_started
        and cycle.scope["method"] != "HEAD"
    ):
        _write_whole(cycle, _head(status, content_type, outcome, cycle.keep_alive), body, lines)
        return
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        (OUTCOME, outcome),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_problem(
    send: ASGISendCallable, error: Any, *, outcome: bytes, call: str = ""
) -> None:
    """Send one of our own errors; its document contains the id `call`."""
    await send_document(send, serialization.problem_of(error), outcome=outcome, call=call)


async def send_document(
    send: ASGISendCallable,
    document: dict[str, Any],
    *,
    outcome: bytes,
    call: str = "",
    lines: bytes = b"",
) -> None:
    """Send a problem document."""
    body = {**document, "instance": call} if call else document
    await send_response(
        send, document["status"], PROBLEM, outcome, json.dumps(body).encode(), lines=lines
    )


async def start(send: ASGISendCallable, status: int, content_type: bytes, outcome: bytes) -> None:
    """Send the head of a response whose body follows in pieces."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), (OUTCOME, outcome)],
        }
    )


async def end(send: ASGISendCallable, body: bytes, lines: bytes = b"") -> None:
    """Send the last piece of a body, and trailer lines after it if it is chunked (RFC 9112
    §7.1.2)."""
    cycle = getattr(send, "__self__", None)
    if (
        not lines
        or type(cycle) is not RequestResponseCycle
        or not cycle.chunked_encoding
        or cycle.disconnected
    ):
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    await send({"type": "http.response.body", "body": body, "more_body": True})
    cycle.response_complete = True
    cycle.transport.write(b"0\r\n%b\r\n" % lines)
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


def _write_whole(cycle: RequestResponseCycle, head: bytes, body: bytes, lines: bytes) -> None:
    """Send a response in one write, in place of two ASGI messages, without checking our own
    headers: this saves a quarter of a small call's time."""
    if cycle.disconnected:
        return
    cycle.response_started = cycle.response_complete = True
    cycle.transport.write(b"%b%d\r\n%b\r\n%b" % (head, len(body), lines, body))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


@functools.lru_cache(maxsize=64)  # a handful of combinations
def _head(status: int, content_type: bytes, outcome: bytes, keep_alive: bool) -> bytes:
    phrase = http.HTTPStatus(status).phrase.encode()
    close = b"" if keep_alive else b"connection: close\r\n"
    return b"HTTP/1.1 %d %b\r\n%bcontent-type: %b\r\n%b: %b\r\ncontent-length: " % (
        status,
        phrase,
        close,
        content_type,
        OUTCOME,
        outcome,
    )
