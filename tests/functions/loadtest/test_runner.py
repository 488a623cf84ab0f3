"""The generator against a real server: it waits for no answer before its next request, and sees
each piece when it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pilotlight.loadtest import distributions, runner
from pilotlight.loadtest.requests import FunctionCalls, ModelCalls, PreparedRequest, StreamReader
from pilotlight.profile import Profile

Answer = Callable[[dict[str, str], bytes, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[Profile]:
    """An HTTP/1.1 server that answers one request per connection."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            with contextlib.suppress(
                ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
            ):
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                await answer(
                    headers, await reader.readexactly(int(headers.get("content-length", 0))), writer
                )
                await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = listening.sockets[0].getsockname()[1]
        yield Profile(url=f"http://127.0.0.1:{port}", api_key="secret")
    finally:
        listening.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)
        await listening.wait_closed()


def whole(body: bytes, status: str = "200 OK") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\npilotlight-start: "
        f"WARM\r\npilotlight-cost: 0.5\r\n"
    )
    return head.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body


class Counted:
    """Makes requests of 1,000 bytes, and knows how many."""

    def __init__(self) -> None:
        self.made = 0

    def make(self, source: random.Random) -> PreparedRequest:
        self.made += 1
        return PreparedRequest(path="/", body=b"1" * 1000, is_stream=False)

    def describe(self) -> dict[str, Any]:
        return {}


CALLS = FunctionCalls(path="/v1/functions/a/f:invoke", arguments=[{"x": 1}])


async def test_requests_go_out_when_they_are_due_whether_or_not_others_were_answered() -> None:
    """No answer comes before the last request is there: a generator that waits would never send
    it."""
    all_there, seen = asyncio.Event(), 0

    async def answer(headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            all_there.set()
        await all_there.wait()
        writer.write(whole(b"{}"))

    async with server(answer) as profile:
        results, _ = await runner.run(profile, CALLS, [0.0] * 5, timeout_s=30)

    assert [result.is_good for result in results] == [True] * 5
    assert [(result.start, result.cost) for result in results] == [("WARM", "0.5")] * 5


async def test_it_says_who_asks_and_sends_what_was_prepared() -> None:
    found: list[tuple[dict[str, str], bytes]] = []

    async def answer(headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        found.append((headers, body))
        writer.write(whole(b"{}"))

    async with server(answer) as profile:
        await runner.run(profile, CALLS, [0.0], timeout_s=30)

    headers, body = found[0]
    assert headers["authorization"] == "bearer secret"
    assert json.loads(body) == {"x": 1}


async def test_pieces_of_a_stream_are_seen_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends the next piece only after the one before was seen: the gaps are the server's
    own."""
    seen = asyncio.Semaphore(0)

    class Watched(StreamReader):
        def feed(self, data: bytes) -> int:
            pieces = super().feed(data)
            for _ in range(pieces):
                seen.release()
            return pieces

    monkeypatch.setattr(runner, "StreamReader", Watched)

    async def answer(headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n: "
            b"waiting\n\n"
        )
        for _ in range(3):
            writer.write(b'data: {"choices":[{"text":"la"}]}\n\n')
            await writer.drain()
            await seen.acquire()
            await asyncio.sleep(0.03)
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
        writer.write(
            usage + b"data: [DONE]\n\nevent: end\ndata: "
            b'{"cost":"0.01","finish_reason":"length","start":"RESTORE"}\n\n'
        )

    async with server(answer) as profile:
        results, _ = await runner.run(profile, CALLS, [0.0], timeout_s=30)

    result = results[0]
    assert result.is_good
    assert len(result.gaps_ms) == 2
    assert all(gap >= 20 for gap in result.gaps_ms)
    assert (result.tokens_in, result.tokens_out, result.cost, result.start) == (
        7,
        3,
        "0.01",
        "RESTORE",
    )


async def test_failures_are_results_with_a_word() -> None:
    async def answer(headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        match json.loads(body)["x"]:
            case 503:
                writer.write(whole(b"{}", "503 Service Unavailable"))
            case "silent":
                await asyncio.sleep(60)
            case "cut":
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
                    b"100\r\n\r\n{"
                )

    async with server(answer) as profile:
        words = []
        for x in (503, "silent", "cut"):
            calls = FunctionCalls(path="/", arguments=[{"x": x}])
            results, _ = await runner.run(
                profile, calls, [0.0], timeout_s=0.3 if x == "silent" else 30
            )
            words.append((results[0].status, results[0].error))
    nobody, _ = await runner.run(
        Profile(url="http://127.0.0.1:9", api_key=""), CALLS, [0.0], timeout_s=30
    )

    assert words == [(503, ""), (0, "timeout"), (200, "broken")]
    assert nobody[0].error == "connect"


async def test_a_stream_that_only_beats_is_given_up_when_patience_is_over() -> None:
    async def answer(headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )
        while True:
            writer.write(b": waiting\n\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with server(answer) as profile, asyncio.timeout(20):
        (result,), _ = await runner.run(profile, CALLS, [0.0], timeout_s=0.5)

    assert result.error == "timeout"


async def test_a_test_that_is_broken_off_has_what_came_back_until_then() -> None:
    is_second, came_back = asyncio.Event(), asyncio.Event()

    def told(sent: int, answered: int, failed: int) -> None:
        if answered:
            came_back.set()

    async def answer(headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        if is_second.is_set():
            await came_back.wait()
            running.cancel()
            await asyncio.sleep(30)
        is_second.set()
        writer.write(whole(b"{}"))

    async with server(answer) as profile:
        running = asyncio.create_task(
            runner.run(profile, CALLS, [0.0, 0.1, 60.0], timeout_s=30, on_progress=told)
        )
        results, elapsed_s = await running

    assert [result.is_good for result in results] == [True]
    assert elapsed_s < 60


async def test_what_waits_for_a_connection_was_sent_late() -> None:
    async def answer(headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(whole(b"{}"))

    async with server(answer) as profile:
        results, _ = await runner.run(profile, CALLS, [0.0, 0.0], timeout_s=30, most_open=1)

    assert max(result.late_ms for result in results) >= 250
    assert max(result.latency_ms for result in results) >= 550


async def test_large_tests_make_their_requests_as_they_go() -> None:
    """Memory is for so many bytes of them ahead, not for all."""
    recipe, made_then = Counted(), list[int]()

    async def answer(headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        made_then.append(recipe.made)
        writer.write(whole(b"{}"))

    async with server(answer) as profile:
        results, _ = await runner.run(
            profile, recipe, [0.0, *([1.0] * 20)], timeout_s=30, ahead_bytes=3000
        )

    assert len(results) == recipe.made == 21
    assert made_then[0] < 10


def test_the_piece_that_only_says_who_speaks_is_no_token() -> None:
    reader = StreamReader()

    assert reader.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n') == 0
    assert reader.feed(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n') == 1
    assert reader.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":"b"}}]}\n\n') == 1


def test_an_error_inside_a_stream_is_seen() -> None:
    reader = StreamReader()

    assert (
        reader.feed(b'data: {"choices":[{"text":"a"}]}\n\ndata: {"error": {"message": "died"}}\n\n')
        == 1
    )
    assert reader.error == "broken"


def test_events_that_come_in_parts_count_once() -> None:
    reader, text = StreamReader(), b'data: {"choices":[{"text":"a"}]}\r\n\r\n: ping\n\ndata: 5\n\n'

    assert sum(reader.feed(text[i : i + 1]) for i in range(len(text))) == 2


def test_prompts_have_their_lengths_and_share_their_begin_within_a_group() -> None:
    calls = ModelCalls(
        model="llm/a",
        prompt=distributions.parse_distribution("40", option=""),
        output=distributions.parse_distribution("8", option=""),
        shared=30,
        groups=2,
    )
    source = random.Random(5)

    bodies = [json.loads(calls.make(source).body) for _ in range(40)]

    assert {len(body["prompt"]) for body in bodies} == {40}
    assert {body["max_tokens"] for body in bodies} == {8}
    assert len({tuple(body["prompt"][:30]) for body in bodies}) == 2
    assert len({tuple(body["prompt"]) for body in bodies}) == 40


def test_chats_are_of_words() -> None:
    calls = ModelCalls(
        model="m",
        prompt=distributions.parse_distribution("6", option=""),
        output=distributions.parse_distribution("8", option=""),
        by_ids=False,
    )

    prepared = calls.make(random.Random(1))

    assert prepared.path == "/v1/chat/completions"
    assert len(json.loads(prepared.body)["messages"][0]["content"].split()) == 6


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_makes_the_same_requests(seed: int) -> None:
    calls = ModelCalls(
        model="m",
        prompt=distributions.parse_distribution("lognormal:9,1", option=""),
        output=distributions.parse_distribution("8", option=""),
    )

    assert [calls.make(random.Random(seed)).body for _ in range(2)] == [
        calls.make(random.Random(seed)).body for _ in range(2)
    ]
