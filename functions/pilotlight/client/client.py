"""The HTTP API of the platform as typed methods, for the SDK, the CLI and other programs.

`Client` is synchronous and thread-safe: this module has its methods for calls, `resources` all
others. Responses are JSON as documented by the controller (OpenAPI, `GET /openapi.json`); errors
are those of `pilotlight.errors`. httpx is imported when the first client is created."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from pilotlight.client.json_stream import Json, iter_json_lines
from pilotlight.client.resources.artifacts import ArtifactResources
from pilotlight.client.resources.async_calls import AsyncCallResources
from pilotlight.client.resources.batches import BatchResources
from pilotlight.client.resources.billing import BillingResources
from pilotlight.client.resources.budgets import BudgetResources
from pilotlight.client.resources.customers.credits import CreditResources
from pilotlight.client.resources.drift import DriftResources
from pilotlight.client.resources.engines import EngineResources
from pilotlight.client.resources.experiments import ExperimentResources
from pilotlight.client.resources.predictions import PredictionResources
from pilotlight.client.resources.releases import ReleaseResources
from pilotlight.client.resources.sandboxes import SandboxResources
from pilotlight.client.resources.slos import SloResources
from pilotlight.client.resources.tenants import TenantResources
from pilotlight.client.resources.traces import TraceResources
from pilotlight.client.resources.traffic import RolloutResources, TrafficResources
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
from pilotlight.client.stream_resume import read_until_disconnect, reconnect_attempts
from pilotlight.client.transport import DEFAULT_BUDGET_S, Transport
from pilotlight.profile import Profile
from pilotlight.protocol import CONTENT_JSON, CONTENT_NDJSON, CallRecord


class Client(
    ReleaseResources,
    RolloutResources,
    EngineResources,
    SloResources,
    DriftResources,
    TrafficResources,
    TenantResources,
    BudgetResources,
    CreditResources,
    BillingResources,
    ExperimentResources,
    TraceResources,
    PredictionResources,
    BatchResources,
    AsyncCallResources,
    ArtifactResources,
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
            repeatable=is_repeatable(headers),
        )
        return CallResponse.of(response, pickles=may_unpickle(headers, tenant))

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

    def invoke_lines(
        self, app: str, function: str, arguments: Any, *, headers: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        """Call a generator with JSON arguments and yield its items as JSON values. `headers` are
        added to the content headers."""
        sent = {"content-type": CONTENT_JSON, "accept": CONTENT_NDJSON, **(headers or {})}
        path = function_path(app, function, "invoke")
        with self._transport.stream(
            "POST", path, content=json.dumps(arguments).encode(), headers=sent
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
        repeatable = is_repeatable(headers)
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
        return call_record(
            self._transport.request("GET", call_path(call_id), params=wait_params(wait_s))
        )

    def cancel(self, call_id: str) -> Json:
        """Cancel a queued or running call. Has no effect on a finished one. Returns how it ended:
        its `state`, such as "CANCELLED" or "SUCCEEDED", its `status` and its `outcome`."""
        path = f"{call_path(call_id)}:cancel"
        return dict(self._transport.request("POST", path, repeatable=True).json())

    def call_stream(self, call_id: str, *, after: str = "", pickles: bool = True) -> Iterator[Any]:
        """Yield the items of a background call as they are produced, from the first one or `after`
        the item with that id. Raises the exception of the call at the end.

        Lost connections are reestablished, and the stream is resumed. If the call is retried, its
        items start again from the first."""
        items = CallStreamItems(call_id, after, pickles=pickles)
        for _ in reconnect_attempts(items):
            with self._transport.stream(
                "GET", f"{call_path(call_id)}/stream", headers=resume_headers(items.after)
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
            "POST", path, content=body, headers=JSON_BODY, repeatable=True
        )
        return str(response.json()["function"])

    def warmup(self, app: str, function: str, *, snapshot: bool = False) -> Json:
        """Start one instance and return a report (see `activator.autoscaler.warm_up`). With
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
