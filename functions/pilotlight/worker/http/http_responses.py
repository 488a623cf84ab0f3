"""Sends whole responses through ASGI."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pilotlight.protocol import CONTENT_JSON, CONTENT_PROBLEM, HEADER_OUTCOME
from pilotlight.worker.user_code import serialization

if TYPE_CHECKING:
    from uvicorn._types import ASGISendCallable

_OUTCOME = HEADER_OUTCOME.encode()


async def send_json(send: ASGISendCallable, body: bytes) -> None:
    """Send JSON with status 200."""
    await _send(send, 200, CONTENT_JSON, b"ok", body)


async def send_problem(send: ASGISendCallable, error: Any) -> None:
    """Send one of our own errors as a problem document."""
    document = serialization.problem_of(error)
    await _send(
        send, document["status"], CONTENT_PROBLEM, b"invalid", json.dumps(document).encode()
    )


async def _send(
    send: ASGISendCallable, status: int, content_type: str, outcome: bytes, body: bytes
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", b"%d" % len(body)),
        (_OUTCOME, outcome),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
