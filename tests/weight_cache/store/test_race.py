"""Processes that ask for the same model at the same moment: one fetch, one copy, a lease each; a
second cache is refused by name."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.trees import remove_tree
from tests.weight_cache.models import chunked, put_model
from tests.weight_cache.served import Node
from weight_cache.client import WeightCacheClient
from weight_cache.errors import StoreOwned
from weight_cache.store.store import Store

REPOSITORY = Path(__file__).parents[3]
CONTENT = chunked(b"a", b"b")

_ASK = """
import asyncio, sys
from pathlib import Path
from weight_cache.client import WeightCacheClient

async def main():
    client = WeightCacheClient(Path(sys.argv[1]))
    await client.stat()
    print("up", flush=True)
    sys.stdin.readline()
    lease = await client.wait((await client.open(sys.argv[2], holder=sys.argv[3])).lease_id)
    print((lease.path / "w").stat().st_size, flush=True)
    await client.aclose()

asyncio.run(main())
"""


@pytest.fixture
async def node() -> AsyncIterator[tuple[Node, WeightCacheClient]]:
    home = Path(tempfile.mkdtemp(prefix="pl"))
    opened = Node(home)
    cache = await opened.start(max_bytes=10**8)
    client = WeightCacheClient(opened.socket)
    yield opened, client
    await client.aclose()
    await cache.aclose()
    remove_tree(home)


@pytest.mark.e2e
async def test_processes_at_once_read_each_byte_once(node: tuple[Node, WeightCacheClient]) -> None:
    opened, client = node
    name, pipe = put_model(opened.origin, {"w": CONTENT}), asyncio.subprocess.PIPE
    askers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _ASK, str(opened.socket), name, f"s{i}"),
            cwd=REPOSITORY,
            stdin=pipe,
            stdout=pipe,
        )
        for i in range(3)
    ]
    for asker in askers:
        assert asker.stdout is not None
        assert await asker.stdout.readline() == b"up\n"
    told = await asyncio.gather(*(asker.communicate(b"\n") for asker in askers))
    assert [int(out) for out, _ in told] == [len(CONTENT)] * 3
    assert opened.origin.read_bytes == len(CONTENT) + len(opened.origin.blobs[name])
    assert {lease.holder for lease in await client.leases()} == {"s0", "s1", "s2"}


async def test_second_cache_of_the_directory_is_refused_and_told_who_the_first_is(
    node: tuple[Node, WeightCacheClient],
) -> None:
    opened, _ = node
    with pytest.raises(StoreOwned, match=f"is in use by process {os.getpid()}"):
        Store.open(opened.home / "w", origin=opened.origin, max_bytes=None, clock=time.time)
