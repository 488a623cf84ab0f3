"""The OpenAPI description of model servers' paths: those of TensorFlow Serving, the Open Inference
Protocol and OpenAI."""

from __future__ import annotations

from typing import Any

from pilotlight.controller.server.openapi_parts import (
    BINARY,
    RESPONSE_HEADERS,
    TEXT,
    environment,
    headers,
    in_path,
    json_body,
    json_response,
    operation,
    timeout,
)
from pilotlight.protocol import CONTENT_BYTES, CONTENT_JSON, CONTENT_SSE

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


def model_server_paths() -> dict[str, dict[str, Any]]:
    """Functions under the paths of model servers: TensorFlow Serving's predict, and the Open
    Inference Protocol."""
    model = [
        in_path("app", "app"),
        in_path("function", "a function, or Class.method"),
        environment(),
    ]
    version = [*model, in_path("version", "a revision, an alias or a tag")]
    known = {"200": json_response("as the protocol defines", {"type": "object"})}
    server: dict[str, Any] = {"security": []}
    out: dict[str, dict[str, Any]] = {}
    for end, parameters, at in (("", model, ""), ("_version", version, "/versions/{version}")):
        place = f"/v2/models/{{app}}/{{function}}{at}"
        out[f"/v1/models/{{app}}/{{function}}{at}:predict"] = {"post": _predict(end, parameters)}
        out[f"{place}/infer"] = {"post": _infer(end, parameters)}
        out[place] = {
            "get": operation(
                f"model_metadata{end}", "Inputs and outputs of a model.", parameters, known
            )
        }
        out[f"{place}/ready"] = {
            "get": operation(
                f"model_ready{end}",
                "Whether the model accepts calls; it does when scaled to zero.",
                parameters,
                known,
            )
        }
    for name in ("live", "ready"):
        out[f"/v2/health/{name}"] = {
            "get": server
            | operation(f"server_{name}", "Whether the server accepts requests.", [], known)
        }
    return {
        **out,
        "/v2": {
            "get": server
            | operation("server_metadata", "Name and version of the server.", [], known)
        },
    }


def _predict(end: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    instances = json_body("one call's instances", {"instances": {"type": "array"}})
    predictions = json_response(
        "the predictions, in order",
        {"type": "object", "properties": {"predictions": {"type": "array"}}},
    )
    return operation(
        f"predict{end}", "Call with instances.", parameters, {"200": predictions}, instances
    )


def _infer(end: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    tensors = json_body(
        "input tensors by argument: name, shape, datatype, data",
        {"id": {"type": "string"}, "inputs": {"type": "array"}},
    )
    # with the header Inference-Header-Content-Length: the JSON, then the data of tensors
    tensors["content"][CONTENT_BYTES] = BINARY
    inferred = json_response(
        "output tensors",
        {
            "type": "object",
            "properties": {"model_version": {"type": "string"}, "outputs": {"type": "array"}},
        },
    )
    inferred["content"][CONTENT_BYTES] = BINARY
    return operation(
        f"infer{end}",
        "Call with tensors (Open Inference Protocol).",
        parameters,
        {"200": inferred},
        tensors,
    )


def openai_paths() -> dict[str, dict[str, Any]]:
    """Language models under the paths of OpenAI's API, whose reference defines the bodies of
    requests, responses and errors."""
    number = {"type": "integer", "minimum": 1}
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
    answer = json_response("as OpenAI's reference defines", {"type": "object"})
    streamed = {
        **answer,
        "content": {**answer["content"], CONTENT_SSE: TEXT},
        "headers": headers(*RESPONSE_HEADERS),
    }
    refused = {
        "4XX": json_response(
            "refused; with code content_filter by the model's guard", _OPENAI_ERROR
        ),
        "5XX": json_response("refused", _OPENAI_ERROR),
    }
    out: dict[str, dict[str, Any]] = {}
    for name, properties in bodies.items():
        body = json_body(
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
        parameters = [environment(), timeout()]
        out[f"/v1/{name.replace('_', '/')}"] = {
            "post": operation(
                f"openai_{name}", description, parameters, {"200": known, **refused}, body
            )
        }
    return {**out, **_openai_models(answer, refused)}


def _openai_models(answer: dict[str, Any], refused: dict[str, Any]) -> dict[str, dict[str, Any]]:
    model_list = json_response(
        "models",
        {
            "type": "object",
            "properties": {
                "object": {"type": "string"},
                "data": {"type": "array", "items": {"type": "object"}},
            },
        },
    )
    one = [
        in_path("app", "app"),
        in_path("function", "with : and an adapter, or @ and a tag"),
        environment(),
    ]
    return {
        "/v1/models": {
            "get": operation(
                "openai_models",
                "The language models that this key may call.",
                [environment()],
                {"200": model_list, **refused},
            )
        },
        "/v1/models/{app}/{function}": {
            "get": operation("openai_model", "One language model.", one, {"200": answer})
        },
    }
