"""The wire's serving side: a peer that floods it has no loop for itself, and an error always
arrives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.rpc import (
    MAX_CALLS,
    MAX_CALLS_BYTES,
    RpcClient,
    RpcRemoteError,
    RpcTransportError,
    SendPart,
    serve_rpc,
)

FRAMES = 50_000


async def test_frames_that_come_at_once_are_handled_in_many_turns_of_the_loop(
    short_tmp: Path,
) -> None:
    turns = 0

    async def count(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return {"turns": turns}

    server = await serve_rpc(short_tmp / "s", {"count": count}, lambda _: None)
    reader, writer = await asyncio.open_unix_connection(short_tmp / "s")
    writer.write(b'{"id":0,"op":"cancel"}\n' * FRAMES + b'{"id":1,"op":"count"}\n')
    answer = asyncio.create_task(reader.readline())
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    writer.close()
    server.close()
    assert json.loads(await answer)["ok"]["turns"] > FRAMES / 100


async def test_a_stream_that_nobody_reads_stops_at_its_source(short_tmp: Path) -> None:
    sent = 0

    async def flood(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        nonlocal sent
        while sent < FRAMES:
            sent += 1
            await part({"text": "x" * 10_000})
        return {}

    server = await serve_rpc(short_tmp / "s", {"flood": flood}, lambda _: None)
    client = await RpcClient.open(short_tmp / "s", max_queued_frames=10)
    async with contextlib.aclosing(client.stream("flood", {})) as stream:
        await anext(stream)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 5000, "what the buffers between them hold"
        for _ in range(100):
            assert (await anext(stream))["text"]
    await client.aclose()
    server.close()


async def test_a_lost_connection_is_told_to_a_reader_with_a_full_inbox(short_tmp: Path) -> None:
    async def some(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        for n in range(100):
            await part({"n": n})
        raise ConnectionResetError

    server = await serve_rpc(short_tmp / "s", {"some": some}, lambda _: ("lost", "lost", {}))
    client = await RpcClient.open(short_tmp / "s", max_queued_frames=2)
    stream = client.stream("some", {})
    await anext(stream)
    await asyncio.sleep(0.05)
    await client.aclose()
    with pytest.raises(RpcTransportError, match="closed the connection"):
        async for _ in stream:
            pass
    server.close()


@pytest.mark.parametrize(
    "message, detail",
    [("failed", {"log_tail": ["\0" * 65_536] * 40}), ("failed" + "\0" * 4_000_000, {})],
)
async def test_an_error_that_is_too_long_for_a_frame_arrives_without_its_detail(
    short_tmp: Path, message: str, detail: Mapping[str, Any]
) -> None:
    async def fail(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        raise ValueError

    server = await serve_rpc(
        short_tmp / "s", {"fail": fail}, lambda _: ("too_long", message, detail)
    )
    client = await RpcClient.open(short_tmp / "s")
    async with asyncio.timeout(30):
        with pytest.raises(RpcRemoteError) as failed:
            await client.call("fail", {})
    assert (failed.value.code, str(failed.value)[:6], failed.value.detail) == (
        "too_long",
        "failed",
        {},
    )
    await client.aclose()
    server.close()


async def test_calls_of_a_connection_at_once_are_bounded_and_one_can_be_cancelled(
    short_tmp: Path,
) -> None:
    running, most = 0, 0

    async def wait(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(60)
        finally:
            running -= 1
        return {}

    async def ping(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return {}

    server = await serve_rpc(short_tmp / "s", {"wait": wait, "ping": ping}, lambda _: None)
    client = await RpcClient.open(short_tmp / "s")
    calls = [asyncio.create_task(client.call("wait", {})) for _ in range(MAX_CALLS + 10)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    refused = done.pop().exception()
    assert isinstance(refused, RpcRemoteError)
    assert refused.code == "too_many_calls"
    assert f"at most {MAX_CALLS}" in str(refused)
    assert most <= MAX_CALLS
    calls[0].cancel()
    async with asyncio.timeout(30):
        while running >= MAX_CALLS:
            await asyncio.sleep(0.01)
        assert await client.call("ping", {}) == {}, "there is room again"
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await client.aclose()
    server.close()


async def test_requests_of_a_connection_at_once_are_bounded_in_bytes(short_tmp: Path) -> None:
    async def wait(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        await asyncio.sleep(60)
        return {}

    server = await serve_rpc(short_tmp / "s", {"wait": wait}, lambda _: None)
    client = await RpcClient.open(short_tmp / "s")
    piece = {"text": "x" * (MAX_CALLS_BYTES // 10)}
    calls = [asyncio.create_task(client.call("wait", piece)) for _ in range(10)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    assert [getattr(call.exception(), "code", None) for call in done] == ["too_many_calls"]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await client.aclose()
    server.close()


async def test_an_id_that_is_in_use_ends_the_connection_and_all_its_calls(short_tmp: Path) -> None:
    begun, ended = 0, 0

    async def wait(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        nonlocal begun, ended
        begun += 1
        try:
            await asyncio.sleep(60)
        finally:
            ended += 1
        return {}

    server = await serve_rpc(short_tmp / "s", {"wait": wait}, lambda _: None)
    reader, writer = await asyncio.open_unix_connection(short_tmp / "s")
    writer.write(b'{"id":1,"op":"wait"}\n')
    async with asyncio.timeout(30):
        while not begun:
            await asyncio.sleep(0)
        writer.write(b'{"id":1,"op":"wait"}\n')
        assert await reader.read() == b""
    assert (begun, ended) == (1, 1)
    writer.close()
    server.close()
