"""The asynchronous client: the methods for calls, logs, feedback, dicts, queues and sandboxes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

from pilotlight.client.json_stream import Json, iter_json_objects_async, without_none
from pilotlight.client.resources.collections import AsyncCollectionResources
from pilotlight.client.resources.experiments import FEEDBACK_PATH, feedback_body
from pilotlight.client.resources.sandboxes import AsyncSandboxResources
from pilotlight.client.responses import (
    JSON_BODY,
    RAISED_STATUS,
    CallResponse,
    call_headers,
    call_path,
    call_record,
    function_path,
    is_repeatable,
    item_reader_for,
    may_unpickle,
    parse_result,
    resume_headers,
    wait_params,
)
from pilotlight.client.sse import CallStreamItems, SseParser
from pilotlight.client.stream_resume import read_until_disconnect_async, reconnect_attempts
from pilotlight.client.transport import DEFAULT_BUDGET_S, AsyncTransport
from pilotlight.profile import Profile
from pilotlight.protocol import CallRecord


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
            repeatable=is_repeatable(headers),
        )
        return CallResponse.of(response, pickles=may_unpickle(headers, tenant))

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
            "POST", path, content=body, headers=dict(headers), repeatable=is_repeatable(headers)
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
            "POST", path, content=body, headers=JSON_BODY, repeatable=True
        )
        return str(response.json()["function"])

    async def call(self, call_id: str, *, wait_s: float = 0.0) -> CallRecord:
        """Asynchronous form of `Client.call`."""
        return call_record(
            await self._transport.request("GET", call_path(call_id), params=wait_params(wait_s))
        )

    async def call_stream(
        self, call_id: str, *, after: str = "", pickles: bool = True
    ) -> AsyncIterator[Any]:
        """Asynchronous form of `Client.call_stream`."""
        items = CallStreamItems(call_id, after, pickles=pickles)
        for _ in reconnect_attempts(items):
            async with self._transport.stream(
                "GET", f"{call_path(call_id)}/stream", headers=resume_headers(items.after)
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
        path = f"{call_path(call_id)}:cancel"
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
