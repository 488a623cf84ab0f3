"""Protocols of model servers for functions: `POST /v1/models/{model}:predict`, and the Open
Inference Protocol under `/v2`.

A model is `app/function` (or `app/Class.method`); a version of it is a revision, an alias or a tag.
A request is translated into a call of the function and its answer back. In between it is treated
like every call, with its quotas, choice of a revision, and billing.

Sources of the formats: Open Inference Protocol, HTTP/REST (required inference API), and its binary
tensor data extension; TensorFlow
Serving's predict API for `instances` and `predictions`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from activator.access.grants import AccessGrant
from activator.access.resolver import RequestResolver
from activator.arguments import tensors
from activator.arguments.checker import ArgumentChecker
from activator.arguments.translations import SMALL_BYTES, parsed, properties, translation_of
from activator.http.payloads import JSON, OPAQUE, TENSORS, Payload
from activator.http.request import Request, content_type_of
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.spec.function import MethodSpec

V1, V2 = "/v1/models/", "/v2"

_HEAD_BYTES: Final = b"inference-header-content-length"
"""Header with the size of the JSON of a request or an answer, where data of tensors follow it."""
MAX_DIGITS: Final = 12
ReadArguments = Callable[[], Awaitable[Payload]]
RunCall = Callable[[Request, AccessGrant, str, ReadArguments], Awaitable[tuple[int, bytes, bytes]]]
"""Runs a call of a method with these arguments; returns the status, the header lines and the body
of its whole response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """The request of a path: the `verb` (`predict`, `infer`, `ready` or "") of a `model` in a
    `version` ("" = by traffic split)."""

    model: str
    version: str
    verb: str


def is_model_path(path: str) -> bool:
    """Whether a path belongs to one of the protocols."""
    return path.startswith((V1, f"{V2}/")) or path == V2


def parse(path: str) -> InferenceRequest | None:
    """Parse a path below V1 or V2's models; None if it does not match."""
    if path.startswith(V1):
        place, _, verb = path[len(V1) :].partition(":")
        parts = place.split("/")
    elif path.startswith(f"{V2}/models/"):
        parts, verb = path[len(V2) + len("/models/") :].split("/"), ""
        if len(parts) in (3, 5):
            verb = parts.pop()
            if verb not in ("infer", "ready"):
                return None
    else:
        return None
    if len(parts) == 4 and parts[2] == "versions":
        return (
            InferenceRequest(model="/".join(parts[:2]), version=parts[3], verb=verb)
            if all(parts)
            else None
        )
    return (
        InferenceRequest(model="/".join(parts), version="", verb=verb)
        if len(parts) == 2 and all(parts)
        else None
    )


class OpenInferenceApi:
    """Handles the protocols' requests. Owner: the event loop."""

    def __init__(
        self,
        *,
        settings: ActivatorSettings,
        resolver: RequestResolver,
        run: RunCall,
        arguments: ArgumentChecker,
    ) -> None:
        self._settings = settings
        self._arguments = arguments
        self._resolver = resolver
        self._run = run

    def __repr__(self) -> str:
        return f"<OpenInferenceApi {self._resolver!r}>"

    async def answer(self, request: Request, owner: str | None, path: str) -> None:
        """Answer a request whose path `is_model_path`. Raises what calls raise; for `/v2` with the
        member `error`."""
        try:
            await self._answer(request, owner, path)
        except errors.PilotlightError as e:
            if path.startswith(V2):
                e.detail = {**e.detail, "error": str(e)}
            raise

    async def _answer(self, request: Request, owner: str | None, path: str) -> None:
        if path in (V2, f"{V2}/health/live", f"{V2}/health/ready"):
            request.require_method("GET")
            await request.respond_json(
                200, _server() if path == V2 else {"live": True, "ready": True}
            )
            return
        asked = parse(path)
        if asked is not None and asked.verb in ("", "ready"):
            request.require_method("GET")
            await self._describe(request, owner, asked, is_v2=path.startswith(V2))
        elif asked is not None and asked.verb == ("infer" if path.startswith(V2) else "predict"):
            request.require_method("POST")
            await self._call(request, owner, asked)
        else:
            hint = f"POST {V1}app/function:predict, or POST {V2}/models/app/function/infer"
            raise errors.NotFound(
                f"{request.verb} {path[:200]} does not exist: a model is a function's address: "
                f"{hint}"
            )

    def entry_of(self, request: Request, owner: str | None, path: str) -> AccessGrant:
        """The caller's access to the function of a call. Raises NotFound if the path is not a call,
        and what calls raise."""
        asked = parse(path)
        if asked is None or not asked.verb:
            raise errors.NotFound(f"{path[:200]} is not a call")
        caller = self._resolver.identify(request, owner)
        routed, _, tag = self._resolver.routed(request, caller, asked.model, owner)
        return self._resolver.enter(request, caller, routed, asked.version or tag)

    async def _call(self, request: Request, owner: str | None, asked: InferenceRequest) -> None:
        caller = self._resolver.identify(request, owner)
        routed, method, tag = self._resolver.routed(request, caller, asked.model, owner)
        entry = self._resolver.enter(request, caller, routed, asked.version or tag)
        spec = entry.target.method(method)
        translation = {
            **translation_of(asked.verb, asked.model, spec, revision=entry.target.revision),
            "head_bytes": _head_bytes(request, asked.verb),
        }
        memo: Any = None

        async def read_arguments() -> Payload:
            nonlocal memo
            body = await request.body(
                limit_bytes=entry.body_bytes, timeout_s=self._settings.body_timeout_s
            )
            found = await self._arguments.translate(
                translation, body, tenant=request.tenant, is_answer=False
            )
            memo = found.memo
            return Payload(
                found.body,
                TENSORS if found.is_packed else JSON,
                TENSORS if found.wants_tensors else JSON,
            )

        status, head, body = await self._run(request, entry, method, read_arguments)
        if status == 200:
            is_packed = content_type_of(head) == OPAQUE
            answer = await self._arguments.translate(
                {**translation, "memo": memo, "head_bytes": None, "is_packed": is_packed},
                body,
                tenant=request.tenant,
                is_answer=True,
            )
            body = answer.body
            head = _with_lengths(head, is_packed=is_packed, head_bytes=answer.head_bytes)
        elif asked.verb == "infer":
            body = _as_error(body)
        await request.respond_whole(status, head, body)

    async def _describe(
        self, request: Request, owner: str | None, asked: InferenceRequest, *, is_v2: bool
    ) -> None:
        """Answer metadata or readiness. A function without instances is ready, because a call
        starts one."""
        caller = self._resolver.identify(request, owner)
        routed, method, tag = self._resolver.routed(request, caller, asked.model, owner)
        target = self._resolver.enter(request, caller, routed, asked.version or tag).target
        request.target = None  # not a call, even if it fails
        spec = target.method(method)
        if asked.verb == "ready" or not is_v2:
            await request.respond_json(200, {"name": asked.model, "ready": True})
            return
        names = (
            sorted(routed.targets)
            if not caller.is_anonymous and caller.tenant == target.tenant
            else [target.revision]
        )
        await request.respond_json(
            200,
            {"name": asked.model, "versions": names, "platform": "pilotlight", **_described(spec)},
        )


def _head_bytes(request: Request, verb: str) -> int | None:
    """Return the size of the JSON that tensor data follow; None = the body is JSON."""
    given = request.headers.get(_HEAD_BYTES)
    if given is None:
        return None
    if verb != "infer" or not given.isdigit() or len(given) > MAX_DIGITS:
        raise errors.InvalidInput(
            f"header {_HEAD_BYTES.decode()}: must be the size of the JSON of an inference request",
            parameter=_HEAD_BYTES.decode(),
        )
    return int(given)


def _with_lengths(head: bytes, *, is_packed: bool, head_bytes: int) -> bytes:
    """Return the head of a translated answer: with the type of its body, and the size of its
    JSON."""
    sent = OPAQUE if is_packed else content_type_of(head)
    if head_bytes:
        head = head.replace(_type_line(sent), _type_line(OPAQUE), 1)
        return b"%b%b: %d\r\n" % (head, _HEAD_BYTES, head_bytes)
    return head.replace(_type_line(sent), _type_line(JSON), 1)


def _type_line(content_type: bytes) -> bytes:
    return b"content-type: %b\r\n" % content_type


def _as_error(body: bytes) -> bytes:
    """A function's error in the protocol's format: `{"error": text}`; unchanged if it is large."""
    if len(body) > SMALL_BYTES:
        return body
    try:
        document = parsed(body)
    except (errors.InvalidInput, errors.TooLarge):
        return body
    raised = document.get("error") if isinstance(document, dict) else None
    text = f"{raised.get('type')}: {raised.get('message')}" if isinstance(raised, dict) else None
    return (
        json.dumps({**document, "error": text or document.get("detail", "")}).encode()
        if isinstance(document, dict)
        else body
    )


def _described(spec: MethodSpec) -> dict[str, Any]:
    inputs = [tensors.tensor_metadata(name, schema) for name, schema in properties(spec).items()]
    answer: Mapping[str, Any] = spec.returns or {}
    members = answer.get("properties") if answer.get("type") == "object" else None
    outputs = [
        tensors.tensor_metadata(name, schema)
        for name, schema in (members or {"output": answer}).items()
    ]
    return {"inputs": inputs, "outputs": outputs}


def _server() -> dict[str, Any]:
    return {
        "name": "pilotlight",
        "version": metadata.version("pilotlight"),
        "extensions": ["binary_tensor_data"],
    }
