"""What one tenant's volumes cost others: uploads, downloads, and the database's only writer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from pilotlight.controller.context import DOWNLOADS_AT_ONCE, UPLOADS_AT_ONCE
from pilotlight.controller.identity import tenants
from pilotlight.controller.volumes import volumes
from pilotlight.core.volumes.entries import Entry
from pilotlight.errors import StorageFull
from tests.functions.controller.conftest import Controller
from tests.functions.controller.test_volumes import Story, digest_of, entry, upload

PATIENCE_S = 20.0


@pytest.fixture(name="story")
async def _story(controller: Controller, tmp_path: Path) -> Story:
    assert (await controller.http.put("/v1/volumes/data")).status_code == 200
    return Story(controller, await controller.tenant(), tmp_path)


async def test_slow_uploads_of_one_tenant_hold_none_of_anothers(story: Story) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    async def whole() -> AsyncIterator[bytes]:
        yield b"theirs"

    with story.controller.context.store.write() as write:
        other = tenants.create(write, name="other", uid_base=20_000, actor="k").id
    held = [
        asyncio.create_task(story.service.upload(story.tenant, digest_of(b"x"), slow()))
        for _ in range(4 * UPLOADS_AT_ONCE)
    ]
    try:
        await asyncio.wait(held, timeout=0.2)
        async with asyncio.timeout(PATIENCE_S):
            assert await story.service.upload(other, digest_of(b"theirs"), whole()) == 6
        incoming = list(story.controller.context.files.incoming.iterdir())
        assert len(incoming) == UPLOADS_AT_ONCE
    finally:
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    assert list(story.controller.context.files.incoming.iterdir()) == []


async def test_chunks_leave_the_journals_their_disk(story: Story) -> None:
    files = story.controller.context.files
    files.floor.floor_bytes = 2**62
    with pytest.raises(StorageFull):
        await upload(story, b"x")
    assert await files.objects.keys("volumes/") == []


async def test_downloads_that_are_not_read_hold_few_chunks_in_memory(story: Story) -> None:
    await upload(story, b"content")
    put = [Entry.from_json(entry("a", b"content"))]
    await story.service.commit_client(story.scope, "data", put=put, remove=[], remove_trees=[])
    downloads = [
        (await story.service.content(story.scope, "data", "a"))[1]
        for _ in range(DOWNLOADS_AT_ONCE + 2)
    ]
    first = [asyncio.ensure_future(anext(one)) for one in downloads]
    begun, waiting = await asyncio.wait(first, timeout=1.0)
    assert (len(begun), len(waiting)) == (DOWNLOADS_AT_ONCE, 2)
    for task, download in zip(first, downloads, strict=True):
        if task in begun:
            await download.aclose()
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*waiting) == [b"content"] * 2
    for download in downloads:
        await download.aclose()


async def test_nobody_waits_while_all_manifests_of_a_tenant_are_read(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upload(story, b"content")
    put = [Entry.from_json(entry("a", b"content"))]
    await story.service.commit_client(story.scope, "data", put=put, remove=[], remove_trees=[])
    store, real, written = story.controller.context.store, volumes.chunks_of_tenant, []

    def reading(sql: sa.Connection, *, tenant: str) -> set[str]:
        def write() -> None:
            with store.write():
                written.append(tenant)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive(), "another one's change waits"
        return real(sql, tenant=tenant)

    monkeypatch.setattr(volumes, "chunks_of_tenant", reading)
    await story.service.delete(story.scope, "data")
    assert written == [story.tenant]
    assert await story.use() == 0
