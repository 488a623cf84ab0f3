"""The OpenAPI description of the data plane's paths. The activator serves them; the controller's
document covers both.

Arguments and results depend on the function: each function's schema is in `GET /v1/apps/{app}`.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from pilotlight.protocol import CONTENT_JSON, CONTENT_NDJSON, CONTENT_SSE, CallRecord

TAG = "calls"
_ANY: dict[str, Any] = {"description": "JSON, as the function returned it"}
_NUMBER_S = {"type": "number", "exclusiveMinimum": 0}
_RESPONSE_HEADERS = {
    "X-Request-Id": "the call's id",
    "Pilotlight-Revision": "the revision that handled the call",
    "Pilotlight-Arm": "the caller's arm of the experiment; omitted if the caller is in none",
    "Pilotlight-Start": "how the instance started: WARM, WAKE, FORK, RESTORE or COLD",
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
_ARGUMENTS: dict[str, Any] = {
    "description": (
        "by name (an object) or by position (an array), checked against the function's signature; "
        "a pickle, as the SDK sends it, is "
        "accepted only from callers of the function's own tenant (else 415)"
    ),
    "content": {CONTENT_JSON: {"schema": {"oneOf": [{"type": "object"}, {"type": "array"}]}}},
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
_PUBLIC = ("/v1/functions/", "/fn/", "/v1/models/", "/v2/models/")
"""Paths of functions: those of a public one need no key."""
_OPENAI_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string", "description": "the type of the problem document"},
            },
        }
    },
}
_TEXT: dict[str, Any] = {"schema": {"type": "string"}}


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
    for path, operations in {**_paths(), **_models(), **_openai(), **_health()}.items():
        for operation in operations.values():
            operation["responses"] |= {
                status: answer
                for status, answer in refused.items()
                if status not in operation["responses"]
            }
            operation.setdefault("tags", [TAG])
            if path.startswith(_PUBLIC):
                operation.setdefault("security", [{"key": []}, {}])
        document["paths"][path] = operations


def _paths() -> dict[str, dict[str, Any]]:
    what = (
        "a function, or Class.method; optionally followed by @ and a tag, an alias or a revision, "
        "to select a revision"
    )
    tag = _in_query(
        "tag",
        "the tag, alias or revision, for callers that cannot put it in the path; or use the header "
        "Pilotlight-Tag",
        {"type": "string"},
    )
    function = [_in_path("app", "app"), _in_path("function", what), _environment(), tag]
    call = [_in_path("call", "the call's id"), _environment()]
    record = _json("the call", {"$ref": "#/components/schemas/Call"})
    wait = _in_query(
        "wait_s",
        "wait up to this many seconds for the call to finish before responding",
        {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
    )
    raw = [
        _in_path("app", "app"),
        _in_path("function", "an ASGI function; @tag as for calls"),
        _in_path("path", "the function's own path; it may contain slashes"),
    ]
    put = [
        *call,
        _in_query("function", "app/function", {"type": "string"}, required=True),
        _webhook(),
    ]
    address = "/v1/functions/{app}/{function}"
    web = _AsgiPaths(raw)
    invoke = _operation(
        "invoke",
        "Call a function and wait for the result.",
        [*function, _timeout(), _once()],
        _invoked(),
        _ARGUMENTS,
    )
    later = [*function, _timeout(), _once(), _webhook()]
    submit = _operation(
        "submit",
        "Submit a call. It is on disk before the response, and runs at least once.",
        later,
        _receipt("202"),
        _ARGUMENTS,
    )
    makes = _in_query(
        "snapshot",
        "false: do not wait for the snapshot to be created and verified",
        {"type": "boolean", "default": True},
    )
    warmup = _operation(
        "warmup",
        "Make the next starts fast, free of charge. Requires a key of scope deploy.",
        [*function, makes, _once()],
        _warmed(),
    )
    return {
        f"{address}:invoke": {"post": invoke},
        f"{address}:submit": {"post": submit},
        f"{address}:warmup": {"post": warmup},
        "/v1/calls/{call}": {
            "get": _operation(
                "get_call", "A submitted call: state, result, cost.", [*call, wait], {"200": record}
            ),
            "put": _operation(
                "put_call",
                "Submit a call under an id that you choose: a repeat is the same call.",
                put,
                _receipt("202"),
                _ARGUMENTS,
            ),
        },
        "/v1/calls/{call}:cancel": {
            "post": _operation("cancel_call", "Cancel a submitted call.", call, _receipt("200"))
        },
        "/v1/calls/{call}/stream": {
            "get": _operation("follow_call", _FOLLOW, [*call, _last_id()], _events())
        },
        "/fn/{app}/{function}/{path}": {
            verb: web.operation(verb)
            for verb in ("get", "head", "post", "put", "patch", "delete", "options")
        },
    }


_FOLLOW = (
    "Events: `state` at each change, items with ids as they arrive or the `result`, `end` last."
)


def _last_id() -> dict[str, Any]:
    return _in_header(
        "Last-Event-ID",
        "the id of the last item that you received; the stream resumes after it",
        {"type": "string"},
    )


def _models() -> dict[str, dict[str, Any]]:
    """Functions under the paths of model servers: TensorFlow Serving's predict, and the Open
    Inference Protocol."""
    model = [
        _in_path("app", "app"),
        _in_path("function", "a function, or Class.method"),
        _environment(),
    ]
    version = [*model, _in_path("version", "a revision, an alias or a tag")]
    instances = _object("one call's instances", {"instances": {"type": "array"}})
    predictions = _json(
        "the predictions, in order",
        {"type": "object", "properties": {"predictions": {"type": "array"}}},
    )
    tensors = _object(
        "input tensors by argument: name, shape, datatype, data",
        {"id": {"type": "string"}, "inputs": {"type": "array"}},
    )
    inferred = _json(
        "output tensors",
        {
            "type": "object",
            "properties": {"model_version": {"type": "string"}, "outputs": {"type": "array"}},
        },
    )
    known = {"200": _json("as the protocol defines", {"type": "object"})}
    server: dict[str, Any] = {"security": []}
    out: dict[str, dict[str, Any]] = {}
    for end, parameters, at in (("", model, ""), ("_version", version, "/versions/{version}")):
        predict = _operation(
            f"predict{end}", "Call with instances.", parameters, {"200": predictions}, instances
        )
        infer = _operation(
            f"infer{end}",
            "Call with tensors (Open Inference Protocol).",
            parameters,
            {"200": inferred},
            tensors,
        )
        place = f"/v2/models/{{app}}/{{function}}{at}"
        out[f"/v1/models/{{app}}/{{function}}{at}:predict"] = {"post": predict}
        out[f"{place}/infer"] = {"post": infer}
        out[place] = {
            "get": _operation(
                f"model_metadata{end}", "Inputs and outputs of a model.", parameters, known
            )
        }
        out[f"{place}/ready"] = {
            "get": _operation(
                f"model_ready{end}",
                "Whether the model accepts calls; it does when scaled to zero.",
                parameters,
                known,
            )
        }
    for name in ("live", "ready"):
        out[f"/v2/health/{name}"] = {
            "get": server
            | _operation(f"server_{name}", "Whether the server accepts requests.", [], known)
        }
    return {
        **out,
        "/v2": {
            "get": server
            | _operation("server_metadata", "Name and version of the server.", [], known)
        },
    }


def _health() -> dict[str, dict[str, Any]]:
    """The probes of an activator."""
    state = {
        "status": {"type": "string"},
        "routes": {"type": "integer", "description": "position in the configuration feed"},
    }
    known = _json("it does", {"type": "object", "required": list(state), "properties": state})
    out: dict[str, dict[str, Any]] = {}
    for path, name, description in (
        ("/healthz", "liveness", "Whether the activator works; otherwise 503."),
        ("/readyz", "readiness", "Whether the activator can take calls; otherwise 503."),
    ):
        out[path] = {
            verb: _operation(
                f"{name}{'' if verb == 'get' else '_head'}", description, [], {"200": known}
            )
            | {"security": [], "tags": ["health"]}
            for verb in ("get", "head")
        }
    return out


def _openai() -> dict[str, dict[str, Any]]:
    """Language models under the paths of OpenAI's API, whose reference defines the bodies of
    requests, responses and errors."""
    text, number = {"type": "string"}, {"type": "integer", "minimum": 1}
    model = {
        "type": "string",
        "description": "app/function, with @ and a tag, alias or revision, with : and an adapter; "
        "or a bare name",
    }
    common = {"stream": {"type": "boolean"}, "max_tokens": number}
    bodies: dict[str, dict[str, Any]] = {
        "chat_completions": {**common, "messages": {"type": "array", "items": {"type": "object"}}},
        "completions": {**common, "prompt": {}},
        "embeddings": {"input": {}},
    }
    answer = _json("as OpenAI's reference defines", {"type": "object"})
    streamed = {
        **answer,
        "content": {**answer["content"], CONTENT_SSE: _TEXT},
        "headers": _headers(*_RESPONSE_HEADERS),
    }
    refused = {status: _json("refused", _OPENAI_ERROR) for status in ("4XX", "5XX")}
    out: dict[str, dict[str, Any]] = {}
    for name, properties in bodies.items():
        body = _object(
            "the request to the engine; fields not listed here are passed on unchanged",
            {"model": model, **properties},
        )
        body["content"][CONTENT_JSON]["schema"]["required"] = ["model"]
        description = "Call a language model."
        known = {**answer, "headers": streamed["headers"]}
        if "stream" in properties:
            known = streamed
            description += (
                " A stream ends with `[DONE]`, and an event `end` with the finish reason, the "
                "tokens and the cost."
            )
        operation = _operation(
            f"openai_{name}",
            description,
            [_environment(), _timeout()],
            {"200": known, **refused},
            body,
        )
        out[f"/v1/{name.replace('_', '/')}"] = {"post": operation}
    model_list = _json(
        "models",
        {
            "type": "object",
            "properties": {"object": text, "data": {"type": "array", "items": {"type": "object"}}},
        },
    )
    out["/v1/models"] = {
        "get": _operation(
            "openai_models",
            "The language models that this key may call.",
            [_environment()],
            {"200": model_list, **refused},
        )
    }
    one = [
        _in_path("app", "app"),
        _in_path("function", "with : and an adapter, or @ and a tag"),
        _environment(),
    ]
    out["/v1/models/{app}/{function}"] = {
        "get": _operation("openai_model", "One language model.", one, {"200": answer})
    }
    return out


class _AsgiPaths:
    """An ASGI function's own paths: everything is passed on unchanged, including WebSocket."""

    def __init__(self, parameters: list[dict[str, Any]]) -> None:
        self._parameters = parameters

    def operation(self, verb: str) -> dict[str, Any]:
        """Return the operation for one HTTP method."""
        answer = {
            "default": {
                "description": "the function's own response",
                "headers": _headers("X-Request-Id", "Pilotlight-Start"),
            }
        }
        return _operation(
            f"web_{verb}",
            "An ASGI function's own path; a WebSocket is opened with GET.",
            self._parameters,
            answer,
        )


def _operation(
    name: str,
    description: str,
    parameters: list[dict[str, Any]],
    responses: dict[str, Any],
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
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


def _invoked() -> dict[str, Any]:
    streams = {CONTENT_SSE: _TEXT, CONTENT_NDJSON: _TEXT}
    content = {CONTENT_JSON: {"schema": _ANY}, **streams}
    return {
        "200": {
            "description": "the result; a generator's items in the format that Accept names",
            "headers": _headers(*_RESPONSE_HEADERS),
            "content": content,
        }
    }


def _receipt(status: str) -> dict[str, Any]:
    return {status: _json("the call and its state", _RECEIPT)}


def _warmed() -> dict[str, Any]:
    known = {
        "revision": {"type": "string"},
        "start_kind": {"type": "string", "enum": ["WARM", "WAKE", "FORK", "RESTORE", "COLD"]},
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
    answer = _json(
        "how it started", {"type": "object", "required": list(known), "properties": properties}
    )
    answer["content"][CONTENT_NDJSON] = _TEXT
    answer["description"] += (
        "; as lines: `{stage, elapsed_ms}` at least each 10 s, `{report}` or `{error}` last"
    )
    return {"200": answer}


def _events() -> dict[str, Any]:
    return {"200": {"description": "server-sent events", "content": {CONTENT_SSE: _TEXT}}}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {CONTENT_JSON: {"schema": schema}}}


def _object(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": list(properties)[-1:], "properties": properties}
    return {
        "required": True,
        "description": description,
        "content": {CONTENT_JSON: {"schema": schema}},
    }


def _headers(*names: str) -> dict[str, Any]:
    return {
        name: {"description": _RESPONSE_HEADERS[name], "schema": {"type": "string"}}
        for name in names
    }


def _in_path(name: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string"},
    }


def _in_query(
    name: str, description: str, schema: dict[str, Any], *, required: bool = False
) -> dict[str, Any]:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "description": description,
        "schema": schema,
    }


def _environment() -> dict[str, Any]:
    return {
        "name": "Pilotlight-Environment",
        "in": "header",
        "required": False,
        "schema": {"type": "string", "default": "main"},
    }


def _timeout() -> dict[str, Any]:
    return {
        "name": "Pilotlight-Timeout",
        "in": "header",
        "required": False,
        "description": "how long the caller waits, in seconds",
        "schema": _NUMBER_S,
    }


def _once() -> dict[str, Any]:
    return _in_header(
        "Idempotency-Key",
        "a repeat with the same key and body returns the first response",
        {"type": "string", "maxLength": 255},
    )


def _webhook() -> dict[str, Any]:
    return _in_header(
        "Pilotlight-Webhook",
        "the name of a webhook to notify when the call ends",
        {"type": "string", "maxLength": 63},
    )


def _in_header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }
