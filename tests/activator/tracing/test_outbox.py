"""Kept traces reach the controller; while it is away they wait within a bound, and what is lost is
counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from activator.tracing.outbox import BATCH, Outbox
from activator.tracing.trace_builder import Json


class Store:
    """Takes traces, unless `errors` says what happens first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.batches: list[list[Json]] = []
        self.taken = asyncio.Event()

    async def put(self, traces: Sequence[Json]) -> None:
        """See TraceStore."""
        if self.errors:
            raise self.errors.pop(0)
        self.batches.append(list(traces))
        self.taken.set()


def answered(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://controller")
    return httpx.HTTPStatusError(
        "no", request=request, response=httpx.Response(status, request=request)
    )


def numbers(store: Store) -> list[Any]:
    return [trace["id"] for batch in store.batches for trace in batch]


async def test_traces_go_in_batches_in_their_order() -> None:
    store = Store()
    outbox = Outbox(store)
    for n in range(BATCH + 5):
        outbox.put({"id": n})
    await outbox.flush()
    assert numbers(store) == list(range(BATCH + 5))
    assert [len(batch) for batch in store.batches] == [BATCH, 5]
    assert (outbox.sent, outbox.dropped) == (BATCH + 5, 0)


async def test_the_oldest_go_where_there_is_no_room() -> None:
    store = Store()
    outbox = Outbox(store, max_held=3)
    for n in range(5):
        outbox.put({"id": n})
    await outbox.flush()
    assert numbers(store) == [2, 3, 4]
    assert outbox.dropped == 2


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("nobody"), answered(503)], ids=["away", "failing"]
)
async def test_a_controller_that_is_away_gets_them_later(error: Exception) -> None:
    store = Store(error)
    outbox = Outbox(store, gather_s=0)
    outbox.put({"id": 1})
    with pytest.raises(httpx.HTTPError):
        await outbox.flush()
    outbox.put({"id": 2})
    await outbox.flush()
    assert numbers(store) == [1, 2]
    assert outbox.dropped == 0


async def test_what_comes_while_a_batch_fails_keeps_its_place_behind_it() -> None:
    outbox = Outbox(Store(httpx.ConnectError("nobody")), max_held=2)
    outbox.put({"id": 1})
    outbox.put({"id": 2})
    with pytest.raises(httpx.ConnectError):
        await outbox.flush()
    outbox.put({"id": 3})
    assert repr(outbox) == "<Outbox 2 held, 0 sent, 1 dropped>"


async def test_what_the_controller_refuses_is_not_sent_for_ever() -> None:
    store = Store(answered(400))
    outbox = Outbox(store)
    outbox.put({"id": 1})
    await outbox.flush()
    assert (outbox.sent, outbox.dropped, numbers(store)) == (0, 1, [])


async def test_it_sends_by_itself_what_comes() -> None:
    store = Store()
    outbox = Outbox(store, gather_s=0)
    task = asyncio.create_task(outbox.run())
    outbox.put({"id": 1})
    await store.taken.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert numbers(store) == [1]


async def test_at_the_end_what_nobody_takes_is_counted() -> None:
    outbox = Outbox(Store(httpx.ConnectError("nobody")))
    outbox.put({"id": 1})
    await outbox.flush_or_drop()
    assert outbox.dropped == 1
