"""Errors in the format of OpenAI's clients: `{"error": {"message", "type", "param", "code"}}`, with
the same status and `Retry-After`."""

from __future__ import annotations

import json
from typing import Any

from pilotlight import errors
from pilotlight.protocol import CONTENT_JSON

_TYPES = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    429: "rate_limit_error",
}


class ModelNotFound(errors.NotFound):
    """Raised when `model` does not name a model that this key may call; `detail` contains `models`
    with similar names."""

    type = "model_not_found"


def error_of(error: errors.PilotlightError) -> dict[str, Any]:
    """The error object. `code` is our own problem type, which programs may rely on."""
    param = error.detail.get("parameter")
    kind = _TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {
        "error": {"message": str(error), "type": kind, "param": param or None, "code": error.type}
    }


def shape(error: errors.PilotlightError, _request_id: str) -> tuple[bytes, bytes]:
    """Content type and body of an error response (`Request.shape`)."""
    return CONTENT_JSON.encode(), json.dumps(error_of(error)).encode()


def error_event(error: errors.PilotlightError) -> bytes:
    """An error within a stream: OpenAI's clients raise it, and stop reading."""
    return b"data: %b\n\n" % json.dumps(error_of(error)).encode()
