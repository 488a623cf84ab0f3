"""Errors as HTTP responses: problem documents (RFC 9457), and headers that a status requires."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from activator.http.payloads import GUARD_LINES
from pilotlight import errors
from pilotlight.protocol import CONTENT_PROBLEM, problem

Shape = Callable[[errors.PilotlightError, str], tuple[bytes, bytes]]
"""Formats an error: returns content type and body for an error and the request's id."""
_PROBLEM = CONTENT_PROBLEM.encode()


def problem_of(error: errors.PilotlightError, request_id: str) -> dict[str, Any]:
    """Return the problem document of an error."""
    title = (
        HTTPStatus(error.status).phrase
        if error.status in HTTPStatus._value2member_map_
        else "Client Closed Request"
    )
    return problem(
        type=error.type,
        title=title,
        status=error.status,
        detail=str(error),
        instance=request_id,
        extra=dict(error.detail),
    )


def problem_shape(error: errors.PilotlightError, request_id: str) -> tuple[bytes, bytes]:
    """Return content type and body of an error as a problem document."""
    return _PROBLEM, json.dumps(problem_of(error, request_id)).encode()


def error_answer(
    error: errors.PilotlightError, request_id: str, shape: Shape = problem_shape
) -> tuple[bytes, bytes]:
    """Return header lines, each ending in CRLF, and body of an error response."""
    content_type, data = shape(error, request_id)
    head = b"content-type: %b\r\n%bcontent-length: %d\r\nx-request-id: %b\r\n" % (
        content_type,
        GUARD_LINES,
        len(data),
        request_id.encode(),
    )
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status in (429, 503):
        retry_after_s = 1.0
    if retry_after_s is not None:
        head += b"retry-after: %d\r\n" % max(1, math.ceil(retry_after_s))
    if error.status == 405:
        head += b"allow: %b\r\n" % ", ".join(error.detail["allowed"]).encode()
    if (accept_encoding := error.detail.get("accept_encoding")) is not None:
        head += b"accept-encoding: %b\r\n" % accept_encoding.encode()
    if error.status == 401:
        head += b'www-authenticate: Bearer realm="pilotlight"\r\n'
    return head, data
