"""What the SDK makes of a submitted call's stream: items, as they come, over as many connections as
it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pilotlight.client.async_client import AsyncClient
from pilotlight.client.client import Client
from pilotlight.client.pickling import dumps
from pilotlight.profile import Profile
from tests.activator.conftest import KEY, Edge
from tests.activator.streams.test_call_streams import submit
from tests.activator.streams.world import GENERATOR, Released
from tests.activator.test_gateway import until
from tests.fakes.fake_controller import FakeController
from tests.fakes.routes import route_of, spec_of


@pytest.fixture(autouse=True)
def _controller_is_up(controller: FakeController) -> None:
    """Where results go."""


def profile(edge: Edge) -> Profile:
    return Profile(url=edge.url, api_key=KEY, environment="main")


@pytest.fixture(name="client")
async def _client(edge: Edge) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(profile(edge)) as client:
        yield client


async def test_items_come_as_they_are_made(
    generator: Edge, worker: Released, client: AsyncClient
) -> None:
    call_id = await submit(generator)
    items = client.call_stream(call_id)
    for n in range(5):
        worker.put(b"%d\n" % n)
        assert await anext(items) == n
    worker.put(None)

    assert [item async for item in items] == []


async def test_a_connection_that_is_lost_is_made_again_and_nothing_is_lost_or_read_twice(
    generator: Edge, worker: Released, client: AsyncClient
) -> None:
    call_id = await submit(generator)
    items = client.call_stream(call_id)
    read = []
    for n in range(6):
        worker.put(b"%d\n" % n)
        read.append(await anext(items))
        for connection in list(generator.limits.connections):
            connection.transport.abort()
    worker.put(None)

    assert read + [item async for item in items] == list(range(6))


async def test_a_thread_reads_the_same(generator: Edge, worker: Released) -> None:
    call_id = await submit(generator)
    worker.put(b"0\n", b"1\n", None)
    with Client(profile(generator)) as client:
        assert await asyncio.to_thread(lambda: list(client.call_stream(call_id))) == [0, 1]
        assert await asyncio.to_thread(lambda: list(client.call_stream(call_id, after="1-1"))) == [
            1
        ]


async def test_a_pickled_generator_raises_what_it_raised(
    edge: Edge, worker: Released, controller: FakeController, client: AsyncClient
) -> None:
    edge.add(route_of(spec_of(methods=GENERATOR)))
    call_id = await client.submit("shop", "hello", dumps(((), {})))
    error = dumps(KeyError("x"))
    item = dumps({1, 2})
    worker.content_type = "application/vnd.pilotlight.pickle-stream"
    worker.trailers = ("pilotlight-finish: error",)
    worker.put(
        len(item).to_bytes(4, "big") + item,
        b"\xff\xff\xff\xff" + len(error).to_bytes(4, "big") + error,
        None,
    )
    items = client.call_stream(call_id)

    assert await anext(items) == {1, 2}
    with pytest.raises(KeyError):
        await anext(items)
    await until(lambda: all(held.record.finished_at for held in edge.calls.pending))
    assert (await client.call(call_id)).state == "FAILED"
