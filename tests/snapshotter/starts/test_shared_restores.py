"""Starts that wait for the restore of another one, without processes."""

from __future__ import annotations

import asyncio

import pytest

from snapshotter.errors import StartFailed
from snapshotter.starts.shared_restores import SharedRestores
from snapshotter.types import RevisionKey

KEY = RevisionKey("f@v1")


async def followers(restores: SharedRestores, count: int) -> list[asyncio.Task[bool]]:
    """So many starts that wait."""
    running = restores.get(KEY)
    assert running is not None
    tasks = [asyncio.create_task(running.follow()) for _ in range(count)]
    await asyncio.sleep(0)
    assert running.followers == count
    return tasks


@pytest.mark.parametrize("has_failed", [False, True])
async def test_all_hear_how_it_ended(has_failed: bool) -> None:
    restores = SharedRestores()
    with restores.lead(KEY) as shared:
        waiting = await followers(restores, 3)
        assert repr(restores) == "<SharedRestores 1 running, 3 starts wait>"
        shared.has_failed = has_failed

    assert await asyncio.gather(*waiting) == [not has_failed] * 3
    assert restores.get(KEY) is None


async def test_an_error_of_the_start_is_everybodys() -> None:
    restores = SharedRestores()
    waiting: list[asyncio.Task[bool]] = []

    async def lead() -> None:
        with restores.lead(KEY):
            waiting.extend(await followers(restores, 2))
            raise StartFailed("its weights are gone")

    with pytest.raises(StartFailed):
        await lead()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in found] == ["its weights are gone"] * 2


async def test_a_start_that_is_cancelled_leaves_it_to_the_others() -> None:
    restores = SharedRestores()

    async def lead() -> None:
        with restores.lead(KEY):
            await asyncio.Event().wait()

    leading = asyncio.create_task(lead())
    await asyncio.sleep(0)
    waiting = await followers(restores, 2)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    running = restores.get(KEY)
    assert running is not None
    assert running.followers == 1

    leading.cancel()

    assert await waiting[1]
    assert restores.get(KEY) is None
