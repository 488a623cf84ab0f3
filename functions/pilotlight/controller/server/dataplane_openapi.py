"""The OpenAPI description of the data plane's paths. The activator serves them; the controller's
document covers both.

Arguments and results depend on the function: each function's schema is in `GET /v1/apps/{app}`.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from pilotlight.controller.server.model_openapi import model_server_paths, openai_paths
from pilotlight.controller.server.openapi_parts import (
    BINARY,
    RESPONSE_HEADERS,
    TEXT,
    cache_control,
    environment,
    headers,
    idempotency_key,
    in_header,
    in_path,
    in_query,
    json_response,
    operation,
    timeout,
    webhook,
)
from pilotlight.controller.server.sandbox_openapi import sandbox_paths
from pilotlight.protocol import (
    CONTENT_BYTES,
    CONTENT_JSON,
    CONTENT_NDJSON,
    CONTENT_NPY,
    CONTENT_SSE,
    CallRecord,
)
from snapshotter.types import StartKind

TAG = "calls"
_ANY: dict[str, Any] = {"description": "JSON, as the function returned it"}
_ARGUMENTS: dict[str, Any] = {
    "description": (
        "by name (an object) or by position (an array), checked against the function's signature; "
        "a pickle, as the SDK sends it, is "
        "accepted only from callers of the function's own tenant (else 415); bytes, or an array of "
        "numpy, for a function that takes one"
    ),
    "content": {
        CONTENT_JSON: {"schema": {"oneOf": [{"type": "object"}, {"type": "array"}]}},
        CONTENT_BYTES: BINARY,
        CONTENT_NPY: BINARY,
    },
}
_BINDING: dict[str, Any] = {
    "description": (
        "arguments of the class, by name; options, with a key of scope deploy, replace fields of "
        "the function: resources, scaling, clocks, retries, env, secrets"
    ),
    "content": {
        CONTENT_JSON: {
            "schema": {
                "type": "object",
                "properties": {"arguments": {"type": "object"}, "options": {"type": "object"}},
            }
        }
    },
}
_RECEIPT: dict[str, Any] = {
    "type": "object",
    "required": ["id", "state", "url"],
    "properties": {
        "id": {"type": "string"},
        "state": {"type": "string"},
        "url": {"type": "string"},
    },
}


_CANCELLED: dict[str, Any] = {
    "type": "object",
    "required": [*_RECEIPT["required"], "status", "outcome"],
    "properties": {
        **_RECEIPT["properties"],
        "status": {"type": "integer"},
        "outcome": {"type": "string"},
    },
}


def describe_dataplane(document: dict[str, Any], problems: dict[int | str, dict[str, Any]]) -> None:
    """Add the data plane's paths, and the authentication scheme, to an OpenAPI document; `problems`
    are the error responses."""
    call = dict(TypeAdapter(CallRecord).json_schema())
    call["properties"]["state"]["enum"] = [
        "QUEUED",
        "RUNNING",
        "SUCCEEDED",
        "FAILED",
        "CANCELLED",
        "EXPIRED",
    ]
    call["properties"]["result"] = {
        "description": "the response's body, of type content_type, in the form that "
        "result_encoding says; if FAILED, its problem document"
    }
    call["properties"]["result_encoding"] = {
        "enum": ["json", "base64", None],
        "description": "json: `result` is the JSON value, or the list of an "
        f"{CONTENT_NDJSON} body's lines; base64: it is base64 of a body that is not JSON, or is "
        "JSON of more than some 20,000 values; null: there is no result yet",
    }
    call["properties"]["attempts"] = {
        "type": "array",
        "items": {"type": "object"},
        "description": "usage records, as soon as they are in the ledger",
    }
    components = document.setdefault("components", {})
    components.setdefault("schemas", {})["Call"] = call
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "an API key, pl_…"}
    }
    document["security"] = [{"key": []}]
    refused = {str(status): answer for status, answer in problems.items()}
    for path, operations in {
        **_paths(),
        **model_server_paths(),
        **openai_paths(),
        **_health(),
    }.items():
        for each in operations.values():
            each["responses"] |= {
                status: answer
                for status, answer in refused.items()
                if status not in each["responses"]
            }
            each.setdefault("tags", [TAG])
        document["paths"][path] = operations


def _paths() -> dict[str, dict[str, Any]]:
    return {**_function_paths(), **_call_paths(), **sandbox_paths(), **_web_paths()}


def _function_paths() -> dict[str, dict[str, Any]]:
    what = (
        "a function, or Class.method; optionally followed by @ and a tag, an alias or a revision, "
        "to select a revision"
    )
    tag = in_query(
        "tag",
        "the tag, alias or revision, for callers that cannot put it in the path; or use the header "
        "Pilotlight-Tag",
        {"type": "string"},
    )
    function = [in_path("app", "app"), in_path("function", what), environment(), tag]
    invoke = operation(
        "invoke",
        "Call a function and wait for the result.",
        [*function, timeout(), idempotency_key(), cache_control()],
        _invoked(),
        _ARGUMENTS,
    )
    submit = operation(
        "submit",
        "Submit a call. It is on disk before the response, and runs at least once.",
        [*function, timeout(), idempotency_key(), webhook()],
        _receipt(),
        _ARGUMENTS,
    )
    makes = in_query(
        "snapshot",
        "false: do not wait for the snapshot to be created and verified",
        {"type": "boolean", "default": True},
    )
    warmup = operation(
        "warmup",
        "Make the next starts fast, free of charge. Requires a key of scope deploy.",
        [*function, makes, idempotency_key()],
        _warmed(),
    )
    bind = operation(
        "bind",
        "Bind a class to arguments: get the name of a function with instances of its own.",
        function,
        {
            "200": json_response(
                "the function's name",
                {"type": "object", "properties": {"function": {"type": "string"}}},
            )
        },
        _BINDING,
    )
    address = "/v1/functions/{app}/{function}"
    return {
        f"{address}:invoke": {"post": invoke},
        f"{address}:submit": {"post": submit},
        f"{address}:warmup": {"post": warmup},
        f"{address}:bind": {"post": bind},
    }


def _call_paths() -> dict[str, dict[str, Any]]:
    call = [in_path("call", "the call's id"), environment()]
    record = json_response("the call", {"$ref": "#/components/schemas/Call"})
    wait = in_query(
        "wait_s",
        "wait up to this many seconds for the call to finish before responding",
        {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
    )
    put = [
        *call,
        in_query("function", "app/function", {"type": "string"}, required=True),
        webhook(),
    ]
    return {
        "/v1/calls/{call}": {
            "get": operation(
                "get_call", "A submitted call: state, result, cost.", [*call, wait], {"200": record}
            ),
            "put": operation(
                "put_call",
                "Submit a call under an id that you choose: a repeat is the same call.",
                put,
                _receipt(),
                _ARGUMENTS,
            ),
        },
        "/v1/calls/{call}:cancel": {
            "post": operation(
                "cancel_call",
                "Cancel a submitted call; of one that has ended, say how.",
                call,
                {"200": json_response("the call and how it ended", _CANCELLED)},
            )
        },
        "/v1/calls/{call}/stream": {
            "get": operation("follow_call", _FOLLOW, [*call, _last_id()], _events())
        },
    }


def _web_paths() -> dict[str, dict[str, Any]]:
    """An ASGI function's own paths: everything is passed on unchanged, including WebSocket."""
    parameters = [
        in_path("app", "app"),
        in_path("function", "an ASGI function; @tag as for calls"),
        in_path("path", "the function's own path; it may contain slashes"),
    ]
    answer = {
        "default": {
            "description": "the function's own response",
            "headers": headers("X-Request-Id", "Pilotlight-Start"),
        }
    }
    return {
        "/fn/{app}/{function}/{path}": {
            verb: operation(
                f"web_{verb}",
                "An ASGI function's own path; a WebSocket is opened with GET.",
                parameters,
                answer,
            )
            for verb in ("get", "head", "post", "put", "patch", "delete", "options")
        },
    }


_FOLLOW = (
    "Events: `state` at each change, items with ids as they arrive or the `result`, `end` last."
)


def _last_id() -> dict[str, Any]:
    return in_header(
        "Last-Event-ID",
        "the id of the last item that you received; the stream resumes after it",
        {"type": "string"},
    )


def _health() -> dict[str, dict[str, Any]]:
    """The probes of an activator."""
    state = {
        "status": {"type": "string"},
        "routes": {"type": "integer", "description": "position in the configuration feed"},
    }
    known = json_response(
        "it does", {"type": "object", "required": list(state), "properties": state}
    )
    out: dict[str, dict[str, Any]] = {}
    for path, name, description in (
        ("/healthz", "liveness", "Whether the activator works; otherwise 503."),
        ("/readyz", "readiness", "Whether the activator can take calls; otherwise 503."),
    ):
        out[path] = {
            verb: operation(
                f"{name}{'' if verb == 'get' else '_head'}", description, [], {"200": known}
            )
            | {"security": [], "tags": ["health"]}
            for verb in ("get", "head")
        }
    return out


def _invoked() -> dict[str, Any]:
    streams = {CONTENT_SSE: TEXT, CONTENT_NDJSON: TEXT}
    binary = {CONTENT_BYTES: BINARY, CONTENT_NPY: BINARY}
    content = {CONTENT_JSON: {"schema": _ANY}, **streams, **binary}
    return {
        "200": {
            "description": "the result; a generator's items in the format that Accept names",
            "headers": headers(*RESPONSE_HEADERS),
            "content": content,
        }
    }


def _receipt() -> dict[str, Any]:
    return {"202": json_response("the call and its state", _RECEIPT)}


def _warmed() -> dict[str, Any]:
    known = {
        "revision": {"type": "string"},
        "start_kind": {"type": "string", "enum": [kind.value for kind in StartKind]},
        "start_ms": {"type": "number"},
        "instance": {"type": "string"},
    }
    snapshot = (
        "SnapshotInfo as in `GET /v1/snapshots/{snapshot}`, or {refused: [reasons]}, {off: "
        "why}, {failed: message}"
    )
    properties = {
        **known,
        "template": {"type": "object"},
        "snapshot": {"type": "object", "description": snapshot},
    }
    answer = json_response(
        "how it started", {"type": "object", "required": list(known), "properties": properties}
    )
    answer["content"][CONTENT_NDJSON] = TEXT
    answer["description"] += (
        "; as lines: `{stage, elapsed_ms}` at least each 10 s, `{report}` or `{error}` last"
    )
    return {"200": answer}


def _events() -> dict[str, Any]:
    return {"200": {"description": "server-sent events", "content": {CONTENT_SSE: TEXT}}}
