"""The end of an activator: a loop that lost its cancellation is named, and cancelled again."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from activator import __main__ as process


async def test_a_loop_that_lost_its_cancellation_is_named_and_ends_with_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "LOOPS_END_S", 0.05)

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
    await process._cancel_again(tasks)
    await asyncio.wait(tasks, timeout=10)
    assert [task.cancelled() for task in tasks] == [True, True]
    assert "name=deaf" in caplog.text
    assert "name=prompt" not in caplog.text
