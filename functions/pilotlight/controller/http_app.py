"""The FastAPI application, and the middleware around it that identifies and counts requests."""

from __future__ import annotations

import functools
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.controller import dashboard
from pilotlight.controller.api.account import (
    api_keys,
    audit,
    billing,
    budgets,
    credits,
    identity,
    invoices,
    plans,
    quotas,
    secrets,
    sign_ins,
    webhooks,
)
from pilotlight.controller.api.apps import (
    apps,
    deployments,
    experiments,
    instances,
    language_models,
    objectives,
    revisions,
    rollouts,
    schedules,
    traffic,
)
from pilotlight.controller.api.artifacts import (
    blobs,
    collections,
    container_images,
    images,
    snapshots,
    storage,
    volumes,
    weights,
)
from pilotlight.controller.api.calls import (
    batch_files,
    batches,
    calls,
    drift,
    feedback,
    predictions,
    service_times,
    traces,
)
from pilotlight.controller.api.internal import (
    activator_sync,
    bindings,
    cluster_nodes,
    cluster_ownership,
    observations,
    refusals,
    scheduled_calls,
    warm_pods,
)
from pilotlight.controller.api.internal import collections as internal_collections
from pilotlight.controller.api.internal import volumes as internal_volumes
from pilotlight.controller.context import Context
from pilotlight.controller.dashboard import api_docs
from pilotlight.controller.database.audit_trail import with_client_address
from pilotlight.controller.identity import access_control
from pilotlight.controller.lazy_routes import LazyRoute
from pilotlight.controller.server import dataplane_openapi, error_responses
from pilotlight.controller.server.idempotency import Idempotency
from pilotlight.controller.server.request_id import set_request_id
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.errors import PilotlightError
from pilotlight.protocol import (
    CALLS_PATH,
    CONTENT_PROBLEM,
    DUE_PATH,
    HEADER_REQUEST_ID,
    new_call_id,
)
from pilotlight.spec.collection import (
    INTERNAL_COLLECTIONS,
    MAX_REQUEST_BYTES,
    CollectionKind,
)
from pilotlight.spec.identifiers import Scope as ApiScope
from pilotlight.validation.json_size import ValueCounter

MAX_BODY_BYTES = 32 * 1024 * 1024
"""For a deploy with a key that may deploy: the schemas of a thousand functions are a few MB."""
MAX_SMALL_BYTES = 1024 * 1024
"""For any other request with a valid key, and a deploy with a key that may not deploy: bodies are
parsed before a route checks scopes."""
MAX_DEPLOY_VALUES = 300_000
"""JSON values of a deploy (`json_size`), which the event loop decodes in about 20 milliseconds: a
thousand functions with schemas of 150 values."""
MAX_VALUES = 10_000
"""JSON values of any other request. Validation reports an error for each invalid value, which takes
ten times as long as decoding it."""
MAX_UNKNOWN_BYTES = 64 * 1024
"""Read before the key is checked; smaller requests are authenticated once, by their route."""
MAX_CALLS_BYTES = 512 * 1024 * 1024
"""For the platform's own messages with calls: 16 MiB plus one dead letter's body and result in
base64. That is 43 MiB with the default `activator.max_body_bytes`; the limit suffices up to 180
MiB. Other messages are batches of a few MB."""
_STREAMED = ("/v1/blobs/", "/v1/volume-chunks/", "/v1/files")
"""Paths whose bodies are streamed to disk and limited elsewhere."""
_COLLECTIONS = tuple(f"{kind.path}/" for kind in CollectionKind)
"""Paths with values, whose requests may have MAX_REQUEST_BYTES."""
_INTERNAL = "/internal/"
"""Paths for the platform's own processes (the activator forwards none of them)."""
_PAGES = "/dashboard"
"""Pages with forms, which are small regardless of the caller."""
_DEPLOY = re.compile(r"/v1/apps/[^/]+/deploy\Z")
_WITH_CALLS = (CALLS_PATH, DUE_PATH)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}\Z")
_PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string", "description": "the request's id"},
    },
}
_PROBLEM: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "Refused (RFC 9457)",
        "content": {CONTENT_PROBLEM: {"schema": _PROBLEM_SCHEMA}},
    },
    "5XX": {
        "description": "Failed (RFC 9457)",
        "content": {CONTENT_PROBLEM: {"schema": _PROBLEM_SCHEMA}},
    },
}


_ROUTERS = (
    activator_sync.router,
    apps.router,
    revisions.router,
    deployments.router,
    blobs.router,
    images.router,
    container_images.router,
    storage.router,
    identity.router,
    secrets.router,
    api_keys.router,
    sign_ins.router,
    plans.router,
    quotas.router,
    audit.router,
    instances.router,
    cluster_nodes.router,
    cluster_nodes.internal,
    cluster_ownership.router,
    language_models.router,
    objectives.router,
    observations.internal,
    refusals.internal,
    snapshots.router,
    weights.router,
    volumes.router,
    internal_volumes.router,
    collections.router,
    internal_collections.router,
    billing.router,
    traffic.router,
    rollouts.router,
    invoices.router,
    budgets.router,
    credits.router,
    budgets.internal,
    calls.router,
    calls.internal,
    batch_files.router,
    batches.router,
    scheduled_calls.router,
    bindings.router,
    warm_pods.router,
    schedules.router,
    webhooks.router,
    experiments.router,
    feedback.router,
    traces.router,
    traces.internal,
    service_times.router,
    predictions.router,
    drift.router,
    predictions.internal,
    *dashboard.routers,
    api_docs.router,
)


def build_app(context: Context) -> ASGIApp:
    """Build the application that serves `context`."""
    app = _application()
    app.state.context = context
    error_responses.install_error_handlers(app)
    for router in _ROUTERS:
        # not include_router, which builds each route anew: half a second for all of them
        app.router.routes.extend(router.routes)
    app.router.route_class = LazyRoute
    app.add_api_route("/healthz", _healthz, methods=["GET"], tags=["health"])
    app.openapi = openapi_document  # type: ignore[method-assign]
    return _RequestMiddleware(
        Idempotency(
            app, store=context.store, key=context.key, threads=context.threads, clock=context.clock
        ),
        context,
    )


def _application() -> FastAPI:
    return FastAPI(
        title="pilotlight",
        version="1",
        summary="What is deployed, for whom, under which keys, and what it cost.",
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        responses=_PROBLEM,
        generate_unique_id_function=_operation_id,
    )


async def _healthz() -> dict[str, str]:
    """Return ok while the process serves requests."""
    return {"status": "ok"}


def _operation_id(route: APIRoute) -> str:
    return route.name


@functools.cache
def openapi_document() -> dict[str, Any]:
    """Build the OpenAPI document of the one URL that users know."""
    # include_router gives each route the responses that the application declares for all of them.
    # Validation errors are problems here (400) instead of the framework's 422, so 422 is removed.
    # Users know a single URL, so the document includes the paths that the activator serves itself.
    described = _application()
    for router in _ROUTERS:
        described.include_router(router)
    document = described.openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.get("responses", {}).pop("422", None)
    dataplane_openapi.describe_dataplane(document, _PROBLEM)
    return document


def _client_address(scope: Scope, headers: Mapping[bytes, bytes]) -> str:
    """Return the caller's address. Of `x-forwarded-for` only the last entry counts, which the
    activator appended; callers control the rest."""
    forwarded = headers.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
    peer = scope.get("client")
    return forwarded or (str(peer[0]) if peer else "")


def _limit_body(
    receive: Receive, limit: int, more: Callable[[], Awaitable[int]] | None = None
) -> Receive:
    """Wrap `receive` with a limit of `limit` bytes; beyond it raises HTTPException (413). `more` is
    called once at the limit: it returns a higher limit, or raises."""
    size = 0

    async def counted() -> Message:
        nonlocal size, limit, more
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit and more is not None:
            limit, more = await more(), None
        if size > limit:
            raise HTTPException(413, f"the request body is larger than {limit} bytes")
        return message

    return counted


async def _refuse_encoding() -> Message:
    """A `receive` for a body with a content coding (RFC 9110, section 15.5.16)."""
    raise HTTPException(
        415,
        "bodies with a Content-Encoding are not supported here: send the body as it is",
        headers={"accept-encoding": "identity"},
    )


def _limit_values(receive: Receive, max_values: int) -> Receive:
    """Wrap `receive` with a limit of `max_values` JSON values; beyond it raises HTTPException
    (413)."""
    counter = ValueCounter(max_values, "send fewer, in several requests")

    async def counted() -> Message:
        message = await receive()
        try:
            counter.add(message.get("body", b""))
        except PilotlightError as e:
            raise HTTPException(e.status, str(e)) from e
        return message

    return counted


class _RequestMiddleware:
    """Assigns each request an id (the caller's own, if valid), returns it in the response, and
    counts responses by route.

    Also records the client's address for the audit log.
    """

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context
        self._metrics = context.metrics

    def _limit_read(self, path: str, headers: Mapping[bytes, bytes], receive: Receive) -> Receive:
        """Wrap `receive` with the limits for this request. Bodies are read and parsed before a
        route's own checks, so the limit depends on the caller, and a large body requires
        authentication first."""
        if path.startswith(_STREAMED):
            return receive
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return _refuse_encoding
        if path.startswith(_PAGES):
            return _limit_body(receive, MAX_UNKNOWN_BYTES)
        if not path.startswith(_INTERNAL):
            is_deploy = _DEPLOY.match(path) is not None
            small = MAX_REQUEST_BYTES if path.startswith(_COLLECTIONS) else MAX_SMALL_BYTES
            bounded = _limit_body(
                receive, MAX_UNKNOWN_BYTES, partial(self._limit_of_key, headers, is_deploy, small)
            )
            return _limit_values(bounded, MAX_DEPLOY_VALUES if is_deploy else MAX_VALUES)
        token = headers.get(HEADER_PLATFORM_TOKEN.encode(), b"")
        if hmac.compare_digest(token, self._context.key.token.encode()):
            if path.startswith(INTERNAL_COLLECTIONS):  # the body is that of a function
                return _limit_values(_limit_body(receive, MAX_REQUEST_BYTES), MAX_VALUES)
            return _limit_body(receive, MAX_CALLS_BYTES if path in _WITH_CALLS else MAX_BODY_BYTES)
        node_token = (self._context.node_key or self._context.key).node_token.encode()
        return _limit_body(
            receive, MAX_BODY_BYTES if hmac.compare_digest(token, node_token) else MAX_UNKNOWN_BYTES
        )

    async def _limit_of_key(
        self, headers: Mapping[bytes, bytes], is_deploy: bool, small: int
    ) -> int:
        """Return the body limit for this key, `small` unless it deploys. Raises HTTPException,
        which the framework's body reading lets through."""
        authorization = headers.get(b"authorization", b"").decode("latin-1")

        def authenticate() -> int:
            with self._context.store.read() as sql:
                caller = access_control.authenticate(
                    sql, authorization=authorization, environment=None, now=self._context.clock()
                )
            is_deployer = caller.scope.reaches(ApiScope.DEPLOY) and not caller.suspended
            return MAX_BODY_BYTES if is_deploy and is_deployer else small

        try:
            return await self._context.threads.look_up(authenticate)
        except PilotlightError as e:
            raise HTTPException(e.status, str(e)) from e

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])  # the last of a repeated header: the activator's
        given = headers.get(HEADER_REQUEST_ID.encode(), b"")
        request_id = given.decode("ascii") if _REQUEST_ID.match(given) else new_call_id()
        set_request_id(scope, request_id)
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER_REQUEST_ID] = request_id
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.requests.labels(route, message["status"]).inc()
                self._metrics.request_seconds.labels(route).observe(time.perf_counter() - began)
            await send(message)

        with with_client_address(_client_address(scope, headers)):
            await self._app(scope, self._limit_read(scope["path"], headers, receive), send_with_id)
