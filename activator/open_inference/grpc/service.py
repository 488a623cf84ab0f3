"""The gRPC service: each call becomes a request over HTTP to the activator, with the caller's
address, credentials and deadline; its answer, or its error, comes back.

A message is read within bounds (`admission`), and an answer sent: each within a time. A caller that
does not read its answer is disconnected, because nothing else frees the memory of it."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import httpx

from activator.open_inference.grpc import translation
from activator.open_inference.grpc.activator_client import ActivatorClient
from activator.open_inference.grpc.admission import Admission, Room
from activator.open_inference.grpc.messages import SERVICE, message_class
from activator.open_inference.grpc.statuses import Refused, Status, status_of, trailing_metadata
from activator.open_inference.grpc.translation import InvalidMessage

log = logging.getLogger(__name__)

CANCEL_S: Final = 5.0
GARBAGE_BYTES: Final = 32 * 1024 * 1024
_PASSED_ON: Final = frozenset({"authorization", "traceparent", "tracestate", "x-forwarded-for"})
_PREFIX: Final = "pilotlight-"
_TIMEOUT: Final = "pilotlight-timeout"
_HEAD_BYTES: Final = "inference-header-content-length"

Context = Any
"""`grpc.aio.ServicerContext`, which is generic only for type checkers."""
Answer = Callable[["Caller", bytes], Awaitable[Any]]


class Connections(Protocol):
    """The connections of clients (`relay.Relay`)."""

    def caller_of(self, peer: str) -> str | None:
        """Return the address behind a peer of the server; None for one that is no client's."""

    def disconnect(self, peer: str) -> None:
        """End the connection of a peer."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller: its address, the headers of requests on its behalf, and what its call holds."""

    address: str
    headers: Mapping[str, str]
    context: Context
    room: Room


class Service:
    """Answers calls. Owner: the event loop."""

    def __init__(
        self,
        client: ActivatorClient,
        *,
        connections: Connections,
        admission: Admission,
        pause_s: float,
    ) -> None:
        """`pause_s`: how long a caller may take to send its message, and to read its answer."""
        self._client = client
        self._connections = connections
        self._admission = admission
        self._pause_s = pause_s
        self._garbage_bytes = 0

    def __repr__(self) -> str:
        return f"<Service {self._admission!r}>"

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the service's methods. Messages are not read before a method
        runs."""
        methods: dict[str, Answer] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        handlers = {
            # on the wire one answer is a stream of one, whose end can be waited for
            name: grpc.stream_stream_rpc_method_handler(
                self._method(answer), response_serializer=lambda m: m.SerializeToString()
            )
            for name, answer in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _method(self, answer: Answer) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
        async def run(messages: AsyncIterator[bytes], context: Context) -> None:
            try:
                await self._run(answer, messages, context)
            except InvalidMessage as e:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
            except Refused as e:
                status = e.status
                await context.abort(status.code, status.text, status.metadata)
            except httpx.HTTPError as e:
                log.warning("activator does not answer error=%s", type(e).__name__)
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE, "the activator does not answer: try again"
                )

        return run

    async def _run(self, answer: Answer, messages: AsyncIterator[bytes], context: Context) -> None:
        address, headers = self._connections.caller_of(context.peer()), _headers(context)
        if address is None:
            raise Refused(
                Status(grpc.StatusCode.PERMISSION_DENIED, "connect to activator.grpc_listen")
            )
        party = self._admission.party_of(address, headers.get("authorization", ""))
        with self._admission.call(party) as room:
            caller = Caller(address, headers, context, room)
            data = await self._message(caller, messages)
            try:
                await self._send(caller, await answer(caller, data))
            finally:
                self._collect(len(data))

    async def _message(self, caller: Caller, messages: AsyncIterator[bytes]) -> bytes:
        """Read the only message of a call."""
        async with self._admission.reading(caller.room.party, self._pause_s):
            try:
                async with asyncio.timeout(self._pause_s):
                    data = await anext(aiter(messages), None)
            except TimeoutError as e:
                text = f"the message did not arrive within {self._pause_s:g} s"
                raise Refused(Status(grpc.StatusCode.INVALID_ARGUMENT, text)) from e
        if data is None:
            raise InvalidMessage("the call has no message")
        caller.room.reserve(len(data))
        return data

    async def _send(self, caller: Caller, message: Any) -> None:
        try:
            async with asyncio.timeout(self._pause_s):
                await caller.context.write(message)
        except TimeoutError:
            log.warning("caller does not read its answer address=%s", caller.address)
            self._connections.disconnect(caller.context.peer())
            await asyncio.sleep(CANCEL_S)  # the server cancels the calls of a connection that ends

    def _collect(self, size: int) -> None:
        """Collect garbage each GARBAGE_BYTES of messages: cycles of calls hold them, of which the
        collector counts the objects, not the bytes."""
        self._garbage_bytes += size
        if self._garbage_bytes >= GARBAGE_BYTES:
            self._garbage_bytes = 0
            gc.collect()

    async def _get(self, caller: Caller, path: str) -> Any:
        response = await self._client.get(path, caller.headers, caller=caller.address)
        _require_ok(response)
        return response.json()

    async def _get_model(self, caller: Caller, path: str) -> Any:
        """Raises Refused. Only those whom the activator knows get an answer about a model."""
        document = await self._get(caller, path)
        self._admission.remember(caller.headers.get("authorization", ""))
        return document

    async def _server_live(self, caller: Caller, data: bytes) -> Any:
        document = await self._get(caller, "/v2/health/live")
        return message_class("ServerLiveResponse")(live=document["live"])

    async def _server_ready(self, caller: Caller, data: bytes) -> Any:
        document = await self._get(caller, "/v2/health/ready")
        return message_class("ServerReadyResponse")(ready=document["ready"])

    async def _server_metadata(self, caller: Caller, data: bytes) -> Any:
        document = await self._get(caller, "/v2")
        return message_class("ServerMetadataResponse")(
            name=document["name"], version=document["version"], extensions=document["extensions"]
        )

    async def _model_ready(self, caller: Caller, data: bytes) -> Any:
        asked = translation.parse("ModelReadyRequest", data)
        path = translation.model_path(asked.name, asked.version)
        document = await self._get_model(caller, f"{path}/ready")
        return message_class("ModelReadyResponse")(ready=document["ready"])

    async def _model_metadata(self, caller: Caller, data: bytes) -> Any:
        asked = translation.parse("ModelMetadataRequest", data)
        path = translation.model_path(asked.name, asked.version)
        return translation.metadata_response(await self._get_model(caller, path))

    async def _model_infer(self, caller: Caller, data: bytes) -> Any:
        asked = translation.parse_infer(data)
        path = translation.model_path(asked.model_name, asked.model_version)
        head_bytes, body = translation.http_body(asked)
        del asked, data
        headers = {
            **caller.headers,
            "content-type": "application/octet-stream",
            _HEAD_BYTES: str(head_bytes),
        }
        response = await self._client.post(
            f"{path}/infer", headers, body, caller=caller.address, acquire=caller.room.reserve
        )
        _require_ok(response)
        self._admission.remember(caller.headers.get("authorization", ""))
        caller.context.set_trailing_metadata(trailing_metadata(response.headers))
        given = response.headers.get(_HEAD_BYTES, "")
        answer = response.content
        return translation.infer_response(answer, int(given) if given else len(answer))


def _require_ok(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise Refused(status_of(response.status_code, response.headers, response.content))


def _headers(context: Context) -> dict[str, str]:
    """Return the headers of requests on behalf of a caller. Raises Refused past its deadline."""
    headers = {
        name: value
        for name, value in context.invocation_metadata() or ()
        if (name in _PASSED_ON or name.startswith(_PREFIX)) and isinstance(value, str)
    }
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return headers
    if remaining_s <= 0:
        raise Refused(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed"))
    # a caller without a deadline has one in the far future
    if remaining_s < MAX_DEADLINE_S and _TIMEOUT not in headers:
        headers[_TIMEOUT] = f"{remaining_s:.3f}"
    return headers


MAX_DEADLINE_S: Final = 7 * 86_400
"""Longer deadlines are as none: the activator accepts up to that."""
