"""HTTP API of submitted calls: state and result, event stream, cancellation. Answered here, by a
peer activator, or by the controller.

Owner: the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from activator.async_calls.pending import PendingCalls
from activator.async_calls.pending_call import PendingCall
from activator.async_calls.public_record import public_record
from activator.async_calls.records import (
    is_of_app,
    is_visible_to,
    namespaced_call_id,
    receipt_of,
    unknown,
    wait_s,
)
from activator.async_calls.result_stream import (
    FINAL,
    StreamSubscriber,
    call_stream_headers,
    position_of,
)
from activator.control_plane.proxy import ControlPlaneProxy
from activator.coordination.peers import PASSED_ON, ActivatorPeers
from activator.http.request import Request
from activator.http.sse import SseResponse
from activator.routing.api_keys import FunctionPrincipal, Principal
from pilotlight import errors
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import CALLS_PATH


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCalls:
    """Where the submitted calls are that are not pending here: the controller stores their records,
    the other activators run theirs.

    Attributes:
        control: forwards a caller's request to the controller.
        controller, token: the controller itself, and the platform's token for it.
        siblings: the other activators, if any.
    """

    control: ControlPlaneProxy
    controller: Endpoint
    token: str
    siblings: ActivatorPeers | None = None


class AsyncCallApi:
    """Answers requests about submitted calls."""

    def __init__(
        self,
        held: PendingCalls,
        remote: RemoteCalls,
        *,
        cancel: Callable[[PendingCall], Awaitable[None]],
        heartbeat_s: float,
    ) -> None:
        """`cancel` ends a call that is pending here. `heartbeat_s`: longest silence of a stream."""
        self._token = remote.token.encode()
        self._heartbeat_s = heartbeat_s
        self._held = held
        self._control = remote.control
        self.siblings = remote.siblings
        self._cancel_held = cancel

    def __repr__(self) -> str:
        return f"<AsyncCallApi of {self._held!r}>"

    async def answer(self, request: Request, caller: Principal, path: str) -> None:
        """`GET /v1/calls/{id}`, `GET …/{id}/stream`, `POST …/{id}:cancel`, `POST …/{id}:redrive`.
        Raises NotFound, MethodNotAllowed."""
        request.require_method(*methods_of(path))
        if path.endswith(":redrive"):
            await self._control.forward(request)  # the controller stores dead letters
            return
        if await self._is_answered_by_sibling(request, caller, path):
            return
        if path.endswith(":cancel"):
            await self._cancel(request, caller, path.removesuffix(":cancel"))
        elif path.endswith("/stream"):
            await self._stream(request, caller, path.removesuffix("/stream"))
        else:
            await self._wait(caller, path, wait_s(request))
            record = await self.find(request, caller, path) or await self.find(
                request, caller, namespaced_call_id(caller.tenant, path)
            )
            if record is None:
                raise unknown(path)
            await request.respond_json_text(200, public_record(record))

    async def find(
        self, request: Request, caller: Principal, call_id: str
    ) -> dict[str, Any] | None:
        """Return a call of the caller as JSON, with its result in base64, from here or the
        controller; None when there is none.

        Raises Forbidden, Unavailable, TooManyRequests.
        """
        held = self._held.get(call_id)
        if held is not None and is_visible_to(caller, held.record):
            return held.record.to_json()
        name = quote(call_id, safe="")
        if isinstance(caller, FunctionPrincipal):  # it has no key
            path, proof = (
                f"{CALLS_PATH}/{name}?{urlencode({'tenant': caller.tenant})}",
                (HEADER_PLATFORM_TOKEN.encode(), self._token),
            )
        else:
            path, proof = (
                f"/v1/calls/{name}",
                (b"authorization", request.headers.get(b"authorization", b"")),
            )
        response = await self._control.get_json(path, caller, proof)
        if response.status_code == 404:
            return None
        if response.status_code == 403:
            raise errors.Forbidden("this API key may not see this call")
        if response.is_error:
            raise errors.Unavailable(
                f"the control plane answered {response.status_code}", retry_after_s=2
            )
        body: dict[str, Any] = response.json()
        if not is_of_app(caller, body.get("labels", {})) or (
            isinstance(caller, FunctionPrincipal) and body["environment"] != caller.environment
        ):
            return None
        if "app" in body:
            caller.check_reach(
                environment=body["environment"], app=body["app"], function=body["function"]
            )
        return body

    async def _is_answered_by_sibling(self, request: Request, caller: Principal, path: str) -> bool:
        """Forward the request of a call that is not pending here: it may be pending at another
        activator, which knows it before the controller does."""
        if self.siblings is None:
            return False
        call_id = path.removesuffix(":cancel").removesuffix("/stream")
        if self._held.find_for(caller, call_id) is not None:
            return False
        if PASSED_ON in request.headers:
            raise unknown(call_id)  # the activator that forwarded it asks the controller itself
        return await self.siblings.forward(request, caller.tenant)

    async def _wait(self, caller: Principal, call_id: str, seconds: float) -> None:
        """Wait up to `seconds` for a call that is pending here to end (long polling)."""
        held = self._held.find_for(caller, call_id)
        if held is None or seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                while held.record.state not in FINAL:
                    await held.changed.wait()
        except TimeoutError:
            return

    async def _finished(self, request: Request, caller: Principal, call_id: str) -> dict[str, Any]:
        """Return a call that is not pending here, as JSON. Raises NotFound, and Unavailable for one
        that has not ended."""
        record = await self.find(request, caller, call_id) or await self.find(
            request, caller, namespaced_call_id(caller.tenant, call_id)
        )
        if record is None:
            raise unknown(call_id)
        if record["state"] not in FINAL:
            raise errors.Unavailable(
                f"the activator that runs call {call_id} is being restarted: retry",
                retry_after_s=1,
            )
        return record

    async def _cancel(self, request: Request, caller: Principal, call_id: str) -> None:
        """End a call; of one that has ended, say how."""
        held = self._held.find_for(caller, call_id)
        if held is None:
            record = await self._finished(request, caller, call_id)
        else:
            await self._cancel_held(held)
            record = held.record.to_json()
        outcome = {name: record[name] for name in ("status", "outcome")}
        await request.respond_json(200, {**receipt_of(record), "id": call_id, **outcome})

    async def _stream(self, request: Request, caller: Principal, call_id: str) -> None:
        """Send the events of a call (`result_stream`) from the reader's position on. Raises
        NotFound, InvalidInput, Unavailable."""
        position = position_of(request)
        held = self._held.find_for(caller, call_id)
        record = await self._finished(request, caller, call_id) if held is None else None
        headers = call_stream_headers(request)
        async with SseResponse(request, every_s=self._heartbeat_s, head=lambda: headers) as stream:
            await stream.begin(headers)
            reader = StreamSubscriber(stream, position)
            if held is not None:
                await reader.follow(held)
            elif record is not None:
                await reader.finish(record)


def methods_of(path: str) -> tuple[str, ...]:
    """Return the HTTP methods of a path below `/v1/calls/`."""
    if path.endswith((":cancel", ":redrive")):
        return ("POST",)
    return ("GET",) if path.endswith("/stream") else ("GET", "PUT")
