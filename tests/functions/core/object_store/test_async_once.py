"""What is made once."""

from __future__ import annotations

import asyncio

import pytest

from pilotlight.core.object_store.async_once import AsyncOnce


async def test_all_who_need_it_get_the_same() -> None:
    made: list[object] = []

    async def make() -> object:
        await asyncio.sleep(0)
        made.append(object())
        return made[-1]

    once = AsyncOnce(make)
    assert once.value is None
    assert set(await asyncio.gather(*(once.get() for _ in range(5)))) == set(made)
    assert len(made) == 1
    assert await once.get() is once.value is made[0]


async def test_a_caller_that_leaves_does_not_stop_it() -> None:
    go = asyncio.Event()

    async def make() -> str:
        await go.wait()
        return "it"

    once = AsyncOnce(make)
    first, second = asyncio.create_task(once.get()), asyncio.create_task(once.get())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    go.set()
    assert await second == "it"


async def test_what_failed_is_made_again() -> None:
    tries = 0

    async def make() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError("not now")
        return "it"

    once = AsyncOnce(make)
    with pytest.raises(OSError, match="not now"):
        await once.get()
    assert await once.get() == "it"
