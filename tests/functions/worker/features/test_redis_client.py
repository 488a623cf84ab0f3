"""The client of a Redis that serves, dies, hangs and lies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest
import redis

from pilotlight.worker.features.redis_client import ReadFailed, RedisAddress, RedisClient
from pilotlight.worker.features.replies import (
    MAX_LINE_BYTES,
    MAX_REPLY_BYTES,
    MAX_VALUE_BYTES,
    ProtocolError,
    ReplyError,
    ReplyReader,
    command,
    require_values,
)
from tests.fakes.redis_server import MortalRedis

LONG_S = 20.0


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[RedisClient]:
    client = RedisClient(RedisAddress.parse(url), name="FEATURES")
    try:
        yield client
    finally:
        client.close()


async def reason_of(client: RedisClient, *, within_s: float = LONG_S) -> str:
    with pytest.raises(ReadFailed) as failed:
        await client.mget(["k"], within_s=within_s)
    return failed.value.reason


async def test_many_reads_share_one_connection(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as server:
        server.mset({f"k{n}": f"v{n}" for n in range(50)})
        before = server.info("stats")["total_connections_received"]
        async with client_of(redis_url) as client:
            found = await asyncio.gather(
                *(client.mget([f"k{n}", "none"], within_s=LONG_S) for n in range(50))
            )
        assert found == [[f"v{n}".encode(), None] for n in range(50)]
        assert server.info("stats")["total_connections_received"] == before + 1


async def test_a_database_and_a_password(mortal_redis: MortalRedis) -> None:
    with redis.Redis.from_url(mortal_redis.url) as server:
        server.config_set("requirepass", "se:cret")
        server.auth("se:cret")
        server.select(3)
        server.set("k", "v")
    path = mortal_redis.url.removeprefix("unix://")
    async with client_of(f"unix://:se%3Acret@{path}?db=3") as client:
        assert await client.mget(["k"], within_s=LONG_S) == [b"v"]
    async with client_of(f"unix://:wrong@{path}?db=3") as client:
        assert await reason_of(client) == "unavailable"


async def test_a_killed_server_is_unavailable_at_once_and_used_again_when_it_is_back(
    mortal_redis: MortalRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(mortal_redis.url) as client:
        assert await client.mget(["k"], within_s=LONG_S) == [None]
        mortal_redis.freeze()
        reading = asyncio.create_task(reason_of(client))
        await asyncio.sleep(0.05)  # the command is with the frozen server
        mortal_redis.kill()
        assert await reading == "unavailable"
        assert await reason_of(client) == "unavailable"
        await asyncio.to_thread(mortal_redis.start)
        assert await eventually(client) == [None]
    said = capsys.readouterr().err
    assert "features: FEATURES is not reachable" in said
    assert "features: FEATURES is reachable again" in said
    assert "q.sock" not in said


async def test_a_hung_server_costs_each_call_its_deadline_and_then_nothing(
    mortal_redis: MortalRedis,
) -> None:
    async with client_of(mortal_redis.url) as client:
        assert await client.mget(["k"], within_s=LONG_S) == [None]
        mortal_redis.freeze()
        assert await reason_of(client, within_s=0.02) == "deadline"
        await asyncio.sleep(1.1)  # SILENT_S
        assert await reason_of(client) == "unavailable"
        began = time.monotonic()
        for _ in range(500):  # known to be down: nobody waits, but who tries it again
            await reason_of(client, within_s=0.02)
        assert time.monotonic() - began < 5.0, "half of the time if all waited"
        mortal_redis.thaw()
        assert await eventually(client) == [None]


async def test_a_late_reply_is_not_that_of_the_next_read(mortal_redis: MortalRedis) -> None:
    with redis.Redis.from_url(mortal_redis.url) as server:
        server.mset({"k": "old", "other": "new"})
        async with client_of(mortal_redis.url) as client:
            await client.mget(["k"], within_s=LONG_S)
            mortal_redis.freeze()
            assert await reason_of(client, within_s=0.02) == "deadline"
            mortal_redis.thaw()
            assert await client.mget(["other"], within_s=LONG_S) == [b"new"]


async def test_a_connection_that_the_server_closed_is_made_again_within_the_call(
    redis_url: str,
) -> None:
    async with client_of(redis_url) as client:
        assert await client.mget(["k"], within_s=LONG_S) == [None]
        with redis.Redis.from_url(redis_url) as server:
            server.client_kill_filter(_type="normal", skipme=True)
        assert await client.mget(["k"], within_s=LONG_S) == [None]


async def test_a_read_that_is_cancelled_does_no_harm(mortal_redis: MortalRedis) -> None:
    async with client_of(mortal_redis.url) as client:
        await client.mget(["k"], within_s=LONG_S)
        mortal_redis.freeze()
        reading = asyncio.create_task(client.mget(["k"], within_s=LONG_S))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        mortal_redis.thaw()
        assert await client.mget(["k"], within_s=LONG_S) == [None]


LIES = {
    "too few values": b"*0\r\n",
    "too many values": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "no list": b"+OK\r\n",
    "not Redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a number in the list": b"*1\r\n:1\r\n",
    "a value without its end": b"*1\r\n$1\r\nabc\r\n",
    "a huge list": b"*1000000\r\n",
    "a huge value": b"*1\r\n$%d\r\n" % (MAX_VALUE_BYTES + 1),
    "a negative size": b"*1\r\n$-7\r\n",
    "no size": b"*1\r\n$\r\n",
    "an endless line": b"+" + b"x" * (2 * MAX_LINE_BYTES),
    "an error": b"-MOVED 1 10.0.0.1:6379\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_is_no_reply_is_unavailable(lie: str, short_tmp: Path) -> None:
    async with LyingServer(short_tmp, LIES[lie]) as server, client_of(server.url) as client:
        assert await reason_of(client) == "unavailable"


async def test_a_connection_with_a_reply_too_many_is_not_used_again(short_tmp: Path) -> None:
    async with (
        LyingServer(short_tmp, b"*1\r\n$1\r\na\r\n" * 2) as server,
        client_of(server.url) as client,
    ):
        for number in (1, 2):
            assert await client.mget(["k"], within_s=LONG_S) == [b"a"]
            assert server.connections == number


async def test_a_peer_that_greets_with_rubbish_is_unavailable(short_tmp: Path) -> None:
    server = LyingServer(short_tmp, b"", greeting=b"*0\r\n")
    async with server, client_of(server.url) as client:
        assert await reason_of(client) == "unavailable"


class LyingServer:
    """Greets as Redis does, answers a read with a lie, and hangs up."""

    def __init__(self, directory: Path, reply: bytes, *, greeting: bytes = b"+PONG\r\n") -> None:
        self._path = directory / "l.sock"
        self._reply = reply
        self._greeting = greeting
        self._served: list[asyncio.StreamWriter] = []
        self.url = f"unix://{self._path}"

    @property
    def connections(self) -> int:
        return len(self._served)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._served:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served.append(writer)
        with contextlib.suppress(OSError):
            await reader.read(1000)
            writer.write(self._greeting)
            if await reader.read(1000) and self._reply:
                writer.write(self._reply)
                await reader.read(1000)
        writer.close()


async def eventually(client: RedisClient) -> object:
    until = time.monotonic() + 30
    while True:
        try:
            return await client.mget(["k"], within_s=1.0)
        except ReadFailed:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)


def test_replies_come_in_any_pieces() -> None:
    data = b"+PONG\r\n-ERR no\r\n*2\r\n$3\r\na\r\n\r\n$-1\r\n*0\r\n"
    for size in range(1, len(data) + 1):
        reader = ReplyReader()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        found = [reply for piece in pieces for reply in reader.feed(piece)]
        pong, error, values, none = found
        assert (pong, values, none) == (b"PONG", [b"a\r\n", None], [])
        assert isinstance(error, ReplyError)
        with pytest.raises(ReplyError, match="ERR no"):
            require_values(error, 1)


def test_a_reply_has_a_bound() -> None:
    reader = ReplyReader()
    list(reader.feed(b"*64\r\n"))
    value = b"$%d\r\n%b\r\n" % (MAX_VALUE_BYTES, b"x" * MAX_VALUE_BYTES)
    for _ in range(7):
        assert list(reader.feed(value)) == []
    with pytest.raises(ProtocolError, match=str(MAX_REPLY_BYTES)):
        list(reader.feed(value))


def test_commands_have_lengths_in_bytes() -> None:
    assert command("MGET", "ä") == b"*2\r\n$4\r\nMGET\r\n$2\r\n\xc3\xa4\r\n"


@pytest.mark.parametrize(
    "url, wanted",
    [
        ("redis://cache", RedisAddress(host="cache")),
        (
            "rediss://ada:p%40ss@cache:7000/2",
            RedisAddress(
                host="cache", port=7000, is_tls=True, credentials=("ada", "p@ss"), database=2
            ),
        ),
        (
            "redis://:secret@[::1]:6380",
            RedisAddress(host="::1", port=6380, credentials=("secret",)),
        ),
        ("unix:///run/r.sock?db=4", RedisAddress(path="/run/r.sock", database=4)),
    ],
)
def test_addresses(url: str, wanted: RedisAddress) -> None:
    assert RedisAddress.parse(url) == wanted
    assert "secret" not in repr(RedisAddress.parse(url))


@pytest.mark.parametrize(
    "url", ["", "cache:6379", "http://cache", "redis://", "redis://c/x", "redis://c:99999", "unix:"]
)
def test_addresses_that_are_none_are_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError) as refused:
        RedisAddress.parse(url)
    assert "cache" not in str(refused.value)
