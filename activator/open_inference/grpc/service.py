"""The gRPC service: each call becomes a request over HTTP to the activator, with the caller's
address, credentials and deadline; its answer, or its error, comes back.

A message is read within bounds: few at once, of an address fewer, each within a time, and as much
as fits beside those that wait for their answers."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc
import grpc.aio
import httpx

from activator.open_inference.grpc import translation
from activator.open_inference.grpc.activator_client import ActivatorClient
from activator.open_inference.grpc.messages import SERVICE, message_class
from activator.open_inference.grpc.statuses import (
    Status,
    refused,
    status_of,
    trailing_metadata,
)
from activator.open_inference.grpc.translation import InvalidMessage

log = logging.getLogger(__name__)

MAX_CALLS: Final = 1024
MAX_CALLS_OF_ADDRESS: Final = 512
MAX_READING: Final = 64
MAX_READING_OF_ADDRESS: Final = 16
"""Messages that are read at the same time: each may take the largest size of a message."""
GARBAGE_BYTES: Final = 32 * 1024 * 1024
_PASSED_ON: Final = frozenset({"authorization", "traceparent", "tracestate", "x-forwarded-for"})
_PREFIX: Final = "pilotlight-"
_TIMEOUT: Final = "pilotlight-timeout"
_HEAD_BYTES: Final = "inference-header-content-length"

Context = Any
"""`grpc.aio.ServicerContext`, which is generic only for type checkers."""
Answer = Callable[["Caller", bytes], Awaitable[Any]]


class Refused(Exception):
    """Raised for a call that ends with this status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller: its address, and the headers of requests on its behalf."""

    address: str
    headers: Mapping[str, str]
    context: Context


class Service:
    """Answers calls. Owner: the event loop."""

    def __init__(
        self,
        client: ActivatorClient,
        *,
        caller_of: Callable[[str], str | None],
        read_timeout_s: float,
        waiting_bytes: int,
    ) -> None:
        """`caller_of`: the address behind a peer of the server; None = it is not a client's.
        `read_timeout_s`: how long a caller may take to send its message. `waiting_bytes`: of
        messages whose calls have not been answered."""
        self._client = client
        self._caller_of = caller_of
        self._read_timeout_s = read_timeout_s
        self._max_waiting_bytes = waiting_bytes
        self._waiting_bytes = self._garbage_bytes = 0
        self._calls: Counter[str] = Counter()
        self._reading = asyncio.Semaphore(MAX_READING)
        self._reading_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<Service {self._calls.total()} calls, {self._waiting_bytes} bytes>"

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
            name: grpc.stream_unary_rpc_method_handler(
                self._method(answer), response_serializer=lambda m: m.SerializeToString()
            )
            for name, answer in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _method(self, answer: Answer) -> Callable[[AsyncIterator[bytes], Context], Awaitable[Any]]:
        async def run(messages: AsyncIterator[bytes], context: Context) -> Any:
            try:
                with self._counted(context) as caller:
                    async with self._message(caller, messages) as data:
                        return await answer(caller, data)
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

    @contextmanager
    def _counted(self, context: Context) -> Iterator[Caller]:
        address = self._caller_of(context.peer())
        if address is None:
            raise Refused(
                Status(grpc.StatusCode.PERMISSION_DENIED, "connect to activator.grpc_listen")
            )
        if self._calls.total() >= MAX_CALLS or self._calls[address] >= MAX_CALLS_OF_ADDRESS:
            raise Refused(
                refused(
                    f"too many calls run: at most {MAX_CALLS_OF_ADDRESS} of an address, "
                    f"{MAX_CALLS} in all"
                )
            )
        self._calls[address] += 1
        try:
            yield Caller(address, _headers(context), context)
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]

    @asynccontextmanager
    async def _message(
        self, caller: Caller, messages: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Read the only message of a call, and count it until the call ends."""
        own = self._reading_of.setdefault(caller.address, asyncio.Semaphore(MAX_READING_OF_ADDRESS))
        async with own, self._reading:
            try:
                async with asyncio.timeout(self._read_timeout_s):
                    data = await anext(aiter(messages), None)
            except TimeoutError as e:
                text = f"the message did not arrive within {self._read_timeout_s:g} s"
                raise Refused(Status(grpc.StatusCode.INVALID_ARGUMENT, text)) from e
        if data is None:
            raise InvalidMessage("the call has no message")
        if self._waiting_bytes and self._waiting_bytes + len(data) > self._max_waiting_bytes:
            raise Refused(refused("messages of waiting calls use all of activator.waiting_bytes"))
        self._waiting_bytes += len(data)
        try:
            yield data
        finally:
            self._waiting_bytes -= len(data)
            self._collect(len(data))

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
        document = await self._get(caller, f"{path}/ready")
        return message_class("ModelReadyResponse")(ready=document["ready"])

    async def _model_metadata(self, caller: Caller, data: bytes) -> Any:
        asked = translation.parse("ModelMetadataRequest", data)
        path = translation.model_path(asked.name, asked.version)
        return translation.metadata_response(await self._get(caller, path))

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
        response = await self._client.post(f"{path}/infer", headers, body, caller=caller.address)
        _require_ok(response)
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
