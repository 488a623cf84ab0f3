"""The HTTP API of the platform as typed methods, for the SDK, the CLI and other programs.

`Client` is synchronous and thread-safe; `AsyncClient` has only the methods for calls, dicts, queues
and sandboxes. Responses are
JSON as documented by the controller (OpenAPI, `GET /openapi.json`); errors are those of
`pilotlight.errors`. httpx is imported when the first client is created."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from pilotlight.client.json_stream import (
    Json,
    iter_json_lines,
    iter_json_objects_async,
    without_none,
)
from pilotlight.client.resources.async_calls import AsyncCallResources
from pilotlight.client.resources.batches import BatchResources
from pilotlight.client.resources.billing import BillingResources
from pilotlight.client.resources.budgets import BudgetResources
from pilotlight.client.resources.collections import AsyncCollectionResources
from pilotlight.client.resources.drift import DriftResources
from pilotlight.client.resources.engines import EngineResources
from pilotlight.client.resources.experiments import (
    FEEDBACK_PATH,
    ExperimentResources,
    feedback_body,
)
from pilotlight.client.resources.predictions import PredictionResources
from pilotlight.client.resources.releases import DeployedFunction, Deployment, ReleaseResources
from pilotlight.client.resources.rollouts import RolloutResources
from pilotlight.client.resources.sandboxes import AsyncSandboxResources, SandboxResources
from pilotlight.client.resources.slos import SloResources
from pilotlight.client.resources.tenants import TenantResources
from pilotlight.client.resources.traces import TraceResources
from pilotlight.client.resources.traffic import TrafficResources
from pilotlight.client.responses import (
    RAISED_STATUS,
    call_headers,
    function_path,
    item_reader_for,
    may_unpickle,
    parse_result,
)
from pilotlight.client.sse import CallStreamItems, SseParser
from pilotlight.client.stream_resume import (
    read_until_disconnect,
    read_until_disconnect_async,
    reconnect_attempts,
)
from pilotlight.client.transport import DEFAULT_BUDGET_S, AsyncTransport, Transport, path_segment
from pilotlight.profile import Profile
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_NDJSON,
    CONTENT_SSE,
    HEADER_IDEMPOTENCY_KEY,
    HEADER_REQUEST_ID,
    CallRecord,
)
from pilotlight.spec.function import ImageSpec
from pilotlight.spec.record_json import to_json

if TYPE_CHECKING:
    import httpx

__all__ = [
    "LONG_POLL_S",
    "AsyncClient",
    "BlobBody",
    "CallResponse",
    "Client",
    "DeployedFunction",
    "Deployment",
]

LONG_POLL_S = 20.0
"""Duration of one long poll of an unfinished call: below the idle timeouts of common proxies (30 to
60 s)."""
_FILE_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResponse:
    """The raw response of a call, for programs that need the headers (the CLI shows start kind,
    timings and cost).

    Attributes:
        pickles: whether the response may be unpickled, because the call was sent as a pickle to a
            function of the own tenant."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    pickles: bool = False

    @property
    def request_id(self) -> str:
        """The id of the call in logs, bills, traces and feedback."""
        return self.headers.get(HEADER_REQUEST_ID, "")

    def value(self) -> Any:
        """Return the result. Raises the exception of the function, or the error of the platform."""
        return parse_result(self.status, self.headers, self.body, pickles=self.pickles)


class BlobBody(Protocol):
    """A request body of known length that can be sent again: each iteration yields all of it."""

    @property
    def size_bytes(self) -> int:
        """Total size of an iteration."""

    def __iter__(self) -> Iterator[bytes]: ...


class _FileBody:
    """A file as a BlobBody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size_bytes = path.stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as f:
            while piece := f.read(_FILE_PIECE_BYTES):
                yield piece


class Client(
    ReleaseResources,
    RolloutResources,
    EngineResources,
    SloResources,
    DriftResources,
    TrafficResources,
    TenantResources,
    BudgetResources,
    BillingResources,
    ExperimentResources,
    TraceResources,
    PredictionResources,
    BatchResources,
    AsyncCallResources,
    SandboxResources,
):
    """A synchronous client for one profile. Thread-safe. Close it, or use it as a context
    manager."""

    def __init__(self, profile: Profile, *, retry_budget_s: float = DEFAULT_BUDGET_S) -> None:
        super().__init__(Transport(profile, budget_s=retry_budget_s))
        self.profile = profile

    def __repr__(self) -> str:
        return f"<Client {self.profile.url} environment={self.profile.environment}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    # -- calls -------------------------------------------------------------------------------------
    def invoke(
        self,
        app: str,
        function: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tenant: str = "",
    ) -> CallResponse:
        """Call a function, or a method as `Class.method`, and wait for the response.

        `headers` describe `body`; by default it is a pickle as sent by the SDK, or JSON with
        `tenant`. `tenant` is the name of another tenant that shares the function, which accepts
        only JSON; "" = the own tenant."""
        headers = call_headers(streams=False, pickles=not tenant) if headers is None else headers
        path = function_path(app, function, "invoke", tenant=tenant)
        response = self._transport.request(
            "POST",
            path,
            content=body,
            headers=dict(headers),
            accept_status=RAISED_STATUS,
            repeatable=_repeatable(headers),
        )
        return _answer(response, pickles=may_unpickle(headers, tenant))

    def invoke_stream(
        self,
        app: str,
        function: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tenant: str = "",
    ) -> Iterator[Any]:
        """Call a generator like `invoke` and yield items as they arrive. Raises the exception of
        the generator after the items before it."""
        path, headers = (
            function_path(app, function, "invoke", tenant=tenant),
            headers or call_headers(streams=True, pickles=not tenant),
        )
        pickles = may_unpickle(headers, tenant)
        with self._transport.stream(
            "POST", path, content=body, headers=dict(headers), accept_status=RAISED_STATUS
        ) as response:
            if response.status_code in RAISED_STATUS:
                parse_result(
                    response.status_code, response.headers, response.read(), pickles=pickles
                )
            reader = item_reader_for(response.headers.get("content-type", ""), pickles=pickles)
            for data in response.iter_bytes():
                yield from reader.feed(data)
            reader.close()

    def invoke_lines(self, app: str, function: str, arguments: Any) -> Iterator[Any]:
        """Call a generator with JSON arguments and yield its items as JSON values."""
        headers = {"content-type": CONTENT_JSON, "accept": CONTENT_NDJSON}
        path = function_path(app, function, "invoke")
        with self._transport.stream(
            "POST", path, content=json.dumps(arguments).encode(), headers=headers
        ) as response:
            yield from iter_json_lines(response)

    def submit(
        self,
        app: str,
        function: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tenant: str = "",
    ) -> str:
        """Start a background call, which continues without this process, and return its id."""
        headers = call_headers(streams=False, pickles=not tenant) if headers is None else headers
        path = function_path(app, function, "submit", tenant=tenant)
        repeatable = _repeatable(headers)
        return str(
            self._transport.request(
                "POST", path, content=body, headers=dict(headers), repeatable=repeatable
            ).json()["id"]
        )

    def submit_json(
        self, app: str, function: str, arguments: Any, *, headers: Mapping[str, str] | None = None
    ) -> str:
        """Start a background call with JSON arguments and a JSON result, and return its id.
        `headers` are added to the content headers."""
        sent = {"content-type": CONTENT_JSON, "accept": CONTENT_JSON, **(headers or {})}
        return self.submit(app, function, json.dumps(arguments).encode(), headers=sent)

    def call(self, call_id: str, *, wait_s: float = 0.0) -> CallRecord:
        """Return the record of a background call. `wait_s` long-polls until the call is
        finished."""
        return _record(self._transport.request("GET", _call_path(call_id), params=_wait(wait_s)))

    def cancel(self, call_id: str) -> Json:
        """Cancel a queued or running call. Has no effect on a finished one. Returns how it ended:
        its `state`, such as "CANCELLED" or "SUCCEEDED", its `status` and its `outcome`."""
        path = f"{_call_path(call_id)}:cancel"
        return dict(self._transport.request("POST", path, repeatable=True).json())

    def call_stream(self, call_id: str, *, after: str = "", pickles: bool = True) -> Iterator[Any]:
        """Yield the items of a background call as they are produced, from the first one or `after`
        the item with that id. Raises the exception of the call at the end.

        Lost connections are reestablished, and the stream is resumed. If the call is retried, its
        items start again from the first."""
        items = CallStreamItems(call_id, after, pickles=pickles)
        for _ in reconnect_attempts(items):
            with self._transport.stream(
                "GET", f"{_call_path(call_id)}/stream", headers=_resume(items.after)
            ) as response:
                reader = SseParser(items.after)
                for data in read_until_disconnect(response.iter_bytes()):
                    for event in reader.feed(data):
                        yield from items.of(event)

    def bind(
        self,
        app: str,
        function: str,
        arguments: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the name of a function that is bound to these arguments of its class, and options
        (`pilotlight.spec.bound`); the platform makes it if it is not there."""
        body = json.dumps({"arguments": arguments, "options": options or {}}).encode()
        path = function_path(app, function, "bind")
        response = self._transport.request(
            "POST", path, content=body, headers=_JSON_BODY, repeatable=True
        )
        return str(response.json()["function"])

    def warmup(self, app: str, function: str, *, snapshot: bool = False) -> Json:
        """Start one instance and return a report (see `activator.autoscaler.autoscaler_loop`). With
        `snapshot`, also wait until its snapshot is verified."""
        path, params = (
            function_path(app, function, "warmup"),
            {} if snapshot else {"snapshot": "false"},
        )
        response = self._transport.request("POST", path, params=params, repeatable=True)
        return dict(response.json()) if response.content else {}

    def warmup_stages(self, app: str, function: str, *, snapshot: bool = True) -> Iterator[Json]:
        """Start one instance and yield its progress: `{"stage", "elapsed_ms"}` at least every 10 s,
        `{"report": {…}}` last. With `snapshot`, also wait until its snapshot is verified. It begins
        anew when the activator or the node agent restarts meanwhile."""
        path = function_path(app, function, "warmup")
        params = {} if snapshot else {"snapshot": "false"}
        return self._transport.stream_objects(
            "POST", path, params=params, headers={"accept": CONTENT_NDJSON}
        )

    # -- uploads -----------------------------------------------------------------------------------
    def has_blob(self, digest: str) -> bool:
        """Whether the platform has the blob with this sha256."""
        return (
            self._transport.request(
                "HEAD", f"/v1/blobs/{digest}", accept_status=frozenset({404})
            ).status_code
            != 404
        )

    def put_blob(
        self, digest: str, data: bytes | Path | BlobBody, *, chunked: bool = False
    ) -> None:
        """Upload a blob. The platform verifies its digest: a sha256, or with `chunked`, for files
        of weights, that of the hashes of its chunks.

        Uploading twice is harmless. Files and BlobBody are streamed; a body that raises, or breaks
        off, stores nothing."""
        params = {"chunked": "true"} if chunked else None
        if isinstance(data, bytes):
            self._transport.request("PUT", f"/v1/blobs/{digest}", content=data, params=params)
            return
        body = _FileBody(data) if isinstance(data, Path) else data
        headers = {"content-length": str(body.size_bytes)}
        self._transport.request(
            "PUT", f"/v1/blobs/{digest}", content=body, headers=headers, params=params
        )

    def build_image(self, spec: ImageSpec) -> Iterator[Json]:
        """Build an image unless it exists, and yield its progress: `{"step", "text", …}`, and
        `{"image": digest}` last."""
        return self._transport.stream_objects("POST", "/v1/images", json=to_json(spec))

    def container_image(self, app: str, digest: str) -> Json:
        """Where the container image of an app's Image is: `repository` to push it to (None: the
        platform builds images itself), and `reference` if it is there."""
        return dict(self._transport.request("GET", _image_path(app, digest)).json())

    def record_container_image(self, app: str, spec: ImageSpec, reference: str) -> None:
        """Record the container image, by digest, of which the app's next revisions with that Image
        consist."""
        body = {"image": to_json(spec), "reference": reference}
        self._transport.request("PUT", _image_path(app, spec.digest()), json=body)

    def images(self) -> list[Json]:
        """List the images that this tenant has built: digest, size, and the functions that use
        them."""
        return self._list("/v1/images", "images")

    def delete_image(self, digest: str) -> None:
        """Delete an image. Raises NotFound, or Conflict while a revision uses it."""
        self._transport.request("DELETE", f"/v1/images/{path_segment(digest)}")

    def prune_app(self, app: str, *, keep: int = 10, dry_run: bool = False) -> Json:
        """Delete old revisions of an app: all but the newest `keep` of each function and those that
        can be called."""
        body = {"keep": keep, "dry_run": dry_run}
        return dict(
            self._transport.request("POST", f"/v1/apps/{path_segment(app)}:prune", json=body).json()
        )

    def collect_storage(
        self, *, unused_s: float | None = None, dry_run: bool = False, all_tenants: bool = False
    ) -> Json:
        """Delete unreferenced blobs. Requires a key with scope admin."""
        body = {"unused_s": unused_s, "dry_run": dry_run, "all_tenants": all_tenants}
        return dict(self._transport.request("POST", "/v1/storage:collect", json=body).json())


class AsyncClient(AsyncCollectionResources, AsyncSandboxResources):
    """An asynchronous client with the methods for calls, dicts, queues and sandboxes, for one event
    loop.

    Cancelling an awaited call closes its connection, which frees its slot immediately."""

    def __init__(self, profile: Profile, *, retry_budget_s: float = DEFAULT_BUDGET_S) -> None:
        self.profile = profile
        self._transport = AsyncTransport(profile, budget_s=retry_budget_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def invoke(
        self,
        app: str,
        function: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tenant: str = "",
    ) -> CallResponse:
        """Asynchronous form of `Client.invoke`."""
        headers = call_headers(streams=False, pickles=not tenant) if headers is None else headers
        path = function_path(app, function, "invoke", tenant=tenant)
        response = await self._transport.request(
            "POST",
            path,
            content=body,
            headers=dict(headers),
            accept_status=RAISED_STATUS,
            repeatable=_repeatable(headers),
        )
        return _answer(response, pickles=may_unpickle(headers, tenant))

    async def invoke_stream(
        self,
        app: str,
        function: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tenant: str = "",
    ) -> AsyncIterator[Any]:
        """Asynchronous form of `Client.invoke_stream`."""
        path, headers = (
            function_path(app, function, "invoke", tenant=tenant),
            headers or call_headers(streams=True, pickles=not tenant),
        )
        pickles = may_unpickle(headers, tenant)
        async with self._transport.stream(
            "POST", path, content=body, headers=dict(headers), accept_status=RAISED_STATUS
        ) as response:
            if response.status_code in RAISED_STATUS:
                parse_result(
                    response.status_code, response.headers, await response.aread(), pickles=pickles
                )
            reader = item_reader_for(response.headers.get("content-type", ""), pickles=pickles)
            async for data in response.aiter_bytes():
                for item in reader.feed(data):
                    yield item
            reader.close()

    async def submit(
        self,
        app: str,
        function: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tenant: str = "",
    ) -> str:
        """Asynchronous form of `Client.submit`."""
        path = function_path(app, function, "submit", tenant=tenant)
        headers = call_headers(streams=False, pickles=not tenant) if headers is None else headers
        response = await self._transport.request(
            "POST", path, content=body, headers=dict(headers), repeatable=_repeatable(headers)
        )
        return str(response.json()["id"])

    async def bind(
        self,
        app: str,
        function: str,
        arguments: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Asynchronous form of `Client.bind`."""
        body = json.dumps({"arguments": arguments, "options": options or {}}).encode()
        path = function_path(app, function, "bind")
        response = await self._transport.request(
            "POST", path, content=body, headers=_JSON_BODY, repeatable=True
        )
        return str(response.json()["function"])

    async def call(self, call_id: str, *, wait_s: float = 0.0) -> CallRecord:
        """Asynchronous form of `Client.call`."""
        return _record(
            await self._transport.request("GET", _call_path(call_id), params=_wait(wait_s))
        )

    async def call_stream(
        self, call_id: str, *, after: str = "", pickles: bool = True
    ) -> AsyncIterator[Any]:
        """Asynchronous form of `Client.call_stream`."""
        items = CallStreamItems(call_id, after, pickles=pickles)
        for _ in reconnect_attempts(items):
            async with self._transport.stream(
                "GET", f"{_call_path(call_id)}/stream", headers=_resume(items.after)
            ) as response:
                reader = SseParser(items.after)
                async for data in read_until_disconnect_async(response.aiter_bytes()):
                    for event in reader.feed(data):
                        for item in items.of(event):
                            yield item

    async def follow_logs(self, app: str, *, since: float | None = None) -> AsyncIterator[Json]:
        """Yield the log lines of an app, as `Client.logs` with `follow`, until the connection is
        lost."""
        params = without_none({"app": app, "since": since, "follow": "true"})
        async with self._transport.stream("GET", "/v1/logs", params=params) as response:
            pieces = read_until_disconnect_async(response.aiter_bytes())
            async for line in iter_json_objects_async(pieces):
                yield line

    async def cancel(self, call_id: str) -> Json:
        """Asynchronous form of `Client.cancel`."""
        path = f"{_call_path(call_id)}:cancel"
        return dict((await self._transport.request("POST", path, repeatable=True)).json())

    async def feedback(
        self,
        request_id: str,
        *,
        label: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Json:
        """Asynchronous form of `Client.feedback`."""
        body = feedback_body(request_id, label=label, metrics=metrics)
        return dict(
            (
                await self._transport.request("POST", FEEDBACK_PATH, json=body, repeatable=True)
            ).json()
        )


_JSON_BODY = {"content-type": CONTENT_JSON}


def _repeatable(headers: Mapping[str, str]) -> bool | None:
    """Return True for a request with an idempotency key, which may be sent again after its
    connection was lost; otherwise None."""
    return True if HEADER_IDEMPOTENCY_KEY in headers else None


def _answer(response: httpx.Response, *, pickles: bool) -> CallResponse:
    return CallResponse(
        status=response.status_code,
        headers=response.headers,
        body=response.content,
        pickles=pickles,
    )


def _record(response: httpx.Response) -> CallRecord:
    return CallRecord.from_json(response.json())


def _call_path(call_id: str) -> str:
    return f"/v1/calls/{path_segment(call_id)}"


def _image_path(app: str, digest: str) -> str:
    return f"/v1/apps/{path_segment(app)}/images/{path_segment(digest)}"


def _resume(after: str) -> dict[str, str]:
    return {"accept": CONTENT_SSE, **({"last-event-id": after} if after else {})}


def _wait(wait_s: float) -> dict[str, str]:
    return {"wait_s": f"{wait_s:g}"} if wait_s > 0 else {}
