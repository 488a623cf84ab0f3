"""One pod's line: a pod that says much at once has no loop for itself."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from snapshotter.pods.pod_session import MAX_LINE_BYTES, PodServices, PodSession

LINES = 200_000


async def test_lines_that_come_at_once_are_heard_in_many_turns_of_the_loop() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        line = PodSession(
            reader,
            writer,
            tenant="t-1",
            holds=cast(Any, None),
            services=PodServices(memory=cast(Any, None)),
            own_uid=0,
        )
        reader.feed_data(b"{}\n" * LINES)
        reader.feed_eof()
        listening, turns = asyncio.create_task(line._listen()), 0
        while not listening.done():
            await asyncio.sleep(0)
            turns += 1
        await listening
        writer.close()
    assert turns > LINES / 100
