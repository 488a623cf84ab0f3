"""Building blocks of the data plane's OpenAPI description: operations, bodies, parameters."""

from __future__ import annotations

from typing import Any

from pilotlight.protocol import CONTENT_JSON

_NUMBER_S = {"type": "number", "exclusiveMinimum": 0}
RESPONSE_HEADERS = {
    "X-Request-Id": "the call's id",
    "Pilotlight-Revision": "the revision that handled the call",
    "Pilotlight-Arm": "the caller's arm of the experiment; omitted if the caller is in none",
    "Pilotlight-Start": "how the instance started: WARM, WAKE, FORK, RESTORE, IMPORT or COLD; or "
    "CACHED: none was needed",
    "Pilotlight-Cache": "of a function with a response cache: hit, miss, or bypass (it was not "
    "looked for)",
    "Age": "of a hit: seconds since the answer was made",
    "Server-Timing": (
        "queue, start and exec in ms; `weights;desc=` is the tier (origin, nvme, dram, hbm) from "
        "which the awaited start loaded its weights; for a streamed response, exec is in its last "
        "event"
    ),
    "Pilotlight-Cost": "a decimal; for a streamed response, in its last event",
    "X-Content-Type-Options": "nosniff; a type that a browser would execute, such as text/html, is "
    "sent as application/octet-stream",
    "Content-Security-Policy": "sandbox",
}
TEXT: dict[str, Any] = {"schema": {"type": "string"}}
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


def operation(
    name: str,
    description: str,
    parameters: list[dict[str, Any]],
    responses: dict[str, Any],
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """An operation of the document."""
    found: dict[str, Any] = {
        "operationId": name,
        "summary": name.replace("_", " ").capitalize(),
        "description": description,
    }
    return {
        **found,
        "parameters": parameters,
        "responses": dict(responses),
        **({"requestBody": body} if body else {}),
    }


def json_response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A response with a JSON body."""
    return {"description": description, "content": {CONTENT_JSON: {"schema": schema}}}


def json_body(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    """A JSON request body, of which the last of `properties` is required."""
    schema = {"type": "object", "required": list(properties)[-1:], "properties": properties}
    return {
        "required": True,
        "description": description,
        "content": {CONTENT_JSON: {"schema": schema}},
    }


def headers(*names: str) -> dict[str, Any]:
    """The description of these headers of a response."""
    return {
        name: {"description": RESPONSE_HEADERS[name], "schema": {"type": "string"}}
        for name in names
    }


def in_path(name: str, description: str) -> dict[str, Any]:
    """A parameter in the path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string"},
    }


def in_query(
    name: str, description: str, schema: dict[str, Any], *, required: bool = False
) -> dict[str, Any]:
    """A parameter in the query."""
    return {
        "name": name,
        "in": "query",
        "required": required,
        "description": description,
        "schema": schema,
    }


def environment() -> dict[str, Any]:
    """The environment of a call."""
    return {
        "name": "Pilotlight-Environment",
        "in": "header",
        "required": False,
        "schema": {"type": "string", "default": "main"},
    }


def timeout() -> dict[str, Any]:
    """How long the caller waits."""
    return {
        "name": "Pilotlight-Timeout",
        "in": "header",
        "required": False,
        "description": "how long the caller waits, in seconds",
        "schema": _NUMBER_S,
    }


def idempotency_key() -> dict[str, Any]:
    """The key of a repeated request."""
    return in_header(
        "Idempotency-Key",
        "a repeat with the same key and body returns the first response",
        {"type": "string", "maxLength": 255},
    )


def cache_control() -> dict[str, Any]:
    """Whether the response cache may answer."""
    return in_header(
        "Cache-Control",
        "of a function with a response cache: no-cache runs the call and stores its answer, "
        "no-store does not store it either",
        {"type": "string", "maxLength": 256},
    )


def webhook() -> dict[str, Any]:
    """The webhook of a submitted call."""
    return in_header(
        "Pilotlight-Webhook",
        "the name of a webhook to notify when the call ends",
        {"type": "string", "maxLength": 63},
    )


def in_header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An optional header."""
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }
