"""The gRPC service, on a real server: what peers may hold of it, and that strangers, and callers who
do not read, keep no others out."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import httpx
import pytest

from activator.open_inference.grpc import admission
from activator.open_inference.grpc.activator_client import ActivatorClient
from activator.open_inference.grpc.admission import Admission, Party
from activator.open_inference.grpc.messages import SERVICE, message_class
from activator.open_inference.grpc.relay import ABSTRACT, Relay
from activator.open_inference.grpc.server import new_server
from activator.open_inference.grpc.service import Service
from activator.open_inference.grpc.statuses import Refused

MAX_MESSAGE_BYTES = 1024 * 1024
READY = message_class("ModelReadyRequest")(name="app/f").SerializeToString()
INFER = message_class("ModelInferRequest")(
    model_name="app/f",
    inputs=[{"name": "x", "datatype": "UINT8", "shape": [1]}],
    raw_input_contents=[b"1"],
).SerializeToString()
KNOWN = (("authorization", "Bearer pl_known"),)


class Activator(ActivatorClient):
    """An activator that knows one key, and answers inferences with `size` bytes."""

    def __init__(self, *, size: int = 1) -> None:
        self.size = size

    async def get(self, path: str, headers: Mapping[str, str], *, caller: str) -> httpx.Response:
        if headers.get("authorization") != KNOWN[0][1]:
            return httpx.Response(401, json={"detail": "no API key"})
        return httpx.Response(200, json={"ready": True})

    async def post(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        caller: str,
        acquire: Callable[[int], None],
    ) -> httpx.Response:
        acquire(self.size)
        size = {"binary_data_size": self.size}
        output = {"name": "y", "datatype": "UINT8", "shape": [self.size], "parameters": size}
        document = httpx.Response(
            200, json={"model_name": "app/f", "model_version": "1", "outputs": [output]}
        ).content
        return httpx.Response(
            200,
            content=document + bytes(self.size),
            headers={"inference-header-content-length": str(len(document))},
        )

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def serving(
    activator: Activator, *, pause_s: float = 30.0, max_bytes: int = 2**30
) -> AsyncIterator[tuple[str, Admission]]:
    """The address of a service, and its admission."""
    name = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    relay, admitted = Relay(name, max_per_address=64), Admission(max_bytes=max_bytes)
    service = Service(activator, connections=relay, admission=admitted, pause_s=pause_s)
    server = new_server(service.handler(), max_message_bytes=MAX_MESSAGE_BYTES)
    server.add_insecure_port(f"{ABSTRACT}{name}")
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    accepting = await relay.accept(listener)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", admitted
    finally:
        accepting.close()
        await server.stop(0)


def connect(address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1), *options]
    return grpc.aio.insecure_channel(address, [*own, ("grpc.max_receive_message_length", -1)])


def call_of(method: str, message: bytes) -> bytes:
    """What a peer sends that calls a method, and never opens its window for more of the answer (RFC
    9113; headers are those of RFC 7541 without compression)."""

    def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
        return len(data).to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, stream]) + data

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    path = b"\x04" + text(f"/{SERVICE}/{method}".encode())
    kind = b"\x00" + text(b"content-type") + text(b"application/grpc")
    head = b"\x83\x86\x01" + text(b"x") + path + kind + b"\x00" + text(b"te") + text(b"trailers")
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    return preface + frame(1, 4, 1, head) + frame(0, 1, 1, body)


async def test_a_compressed_message_becomes_no_more_than_a_plain_one_may_be() -> None:
    async with serving(Activator()) as (address, _), connect(address) as channel:
        ready = channel.unary_unary(f"/{SERVICE}/ModelReady")
        gzip = grpc.Compression.Gzip
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ready(bytes(64 * MAX_MESSAGE_BYTES), metadata=KNOWN, compression=gzip)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ready(READY, metadata=KNOWN, compression=gzip)


async def test_strangers_who_send_no_message_keep_out_no_known_caller() -> None:
    async with serving(Activator()) as (address, admitted), connect(address) as channel:
        ready = channel.unary_unary(f"/{SERVICE}/ModelReady")
        assert await ready(READY, metadata=KNOWN)

        strangers = [connect(address) for _ in range(6)]
        silent = [
            one.stream_unary(f"/{SERVICE}/ModelReady")() for one in strangers for _ in range(95)
        ]
        for each in silent:
            await each.wait_for_connection()
        while f"{admission.MAX_CALLS // 2} calls" not in repr(admitted):
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ready(READY)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ready(READY, metadata=KNOWN, timeout=5)
        for each in strangers:
            await each.close()


async def test_a_caller_who_does_not_read_its_answer_is_disconnected() -> None:
    size = 4 * 2**20
    async with serving(Activator(size=size), pause_s=0.2, max_bytes=4 * size) as (address, held):
        _, peer = await asyncio.open_connection(*address.split(":"))
        peer.write(call_of("ModelInfer", INFER))
        while "1 calls" not in repr(held):
            await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        while "0 calls" not in repr(held):
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began > 0.15
        peer.close()
        async with connect(address) as channel:
            answer = await channel.unary_unary(f"/{SERVICE}/ModelInfer")(INFER)
            assert len(answer) > size
        assert "0 calls, 0 bytes" in repr(held)


def test_one_caller_gets_half_of_the_bytes_and_calls() -> None:
    admitted = Admission(max_bytes=100)
    one, other = Party("a", is_known=True), Party("b", is_known=True)
    with admitted.call(one) as mine, admitted.call(other) as theirs:
        mine.reserve(30)
        with pytest.raises(Refused, match="waiting_bytes"):
            mine.reserve(30)
        theirs.reserve(50)
    with admitted.call(one) as mine:
        mine.reserve(5000)  # alone
    assert repr(admitted) == "<Admission 0 calls, 0 bytes>"


def test_a_network_is_one_caller_until_its_key_is_known() -> None:
    admitted = Admission(max_bytes=100)
    of = admitted.party_of
    assert of("2001:db8::1", "") == of("2001:db8::2", "Bearer pl_wrong")
    admitted.remember("Bearer pl_known")
    assert of("2001:db8::1", "Bearer pl_known").is_known
    assert not of("2001:db8::1", "").is_known
    for number in range(admission.MAX_KNOWN):
        admitted.remember(f"Bearer {number}")
    assert not of("2001:db8::1", "Bearer pl_known").is_known
