"""The end of an activator: a loop that lost its cancellation is named, and cancelled again."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pilotlight.core.background_tasks import cancel_again


async def test_a_loop_that_lost_its_cancellation_is_named_and_ends_with_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def loses_one() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    tasks = [
        asyncio.create_task(loses_one(), name="deaf"),
        asyncio.create_task(asyncio.sleep(60), name="prompt"),
    ]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await cancel_again(tasks, after_s=0.05)
    await asyncio.wait(tasks, timeout=10)
    assert [task.cancelled() for task in tasks] == [True, True]
    assert "name=deaf" in caplog.text
    assert "name=prompt" not in caplog.text
