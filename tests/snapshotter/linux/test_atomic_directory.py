"""Directories that are staged in threads, whose callers are cancelled at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

from snapshotter.linux.atomic_directory import staged_in_thread


async def test_who_is_cancelled_while_the_directory_is_made_leaves_none(tmp_path: Path) -> None:
    async def stage() -> None:
        async with staged_in_thread(tmp_path / "final"):
            await asyncio.Event().wait()

    for _ in range(20):
        staging = asyncio.create_task(stage())
        while not any(tmp_path.glob(".tmp-*")):  # without a pause: the thread has not told us yet
            await asyncio.sleep(0)
        staging.cancel()
        await asyncio.wait([staging])
        assert list(tmp_path.iterdir()) == []


async def test_what_is_staged_has_its_name_at_the_end(tmp_path: Path) -> None:
    async with staged_in_thread(tmp_path / "final") as here:
        (here / "file").write_text("text")
    assert (tmp_path / "final" / "file").read_text() == "text"
