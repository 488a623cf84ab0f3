"""The process: `python -m weight_cache` serves its socket, says when it is ready, and comes back after a kill."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.origins import MemoryOrigin
from tests.weight_cache.models import put_model
from weight_cache.client import WeightCacheClient
from weight_cache.configuration import WeightCacheSettings
from weight_cache.errors import ChunkCorrupt, OriginUnavailable, ProtocolError, StoreFull
from weight_cache.manifest import build_manifest
from weight_cache.protocol import RemoteFailure, RpcClient
from weight_cache.server import serve_store
from weight_cache.settings import SettingsInvalid, load
from weight_cache.store import Store
from weight_cache.types import LoadProgress, WeightsLease

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def home() -> Iterator[Path]:
    """Short: Unix sockets allow 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="pl"))
    (folder / "platform.yaml").write_text(f"platform: {{home: {folder}/h, run: {folder}/r}}\nweight_cache: {{metrics_listen: null}}\n")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def origin() -> MemoryOrigin:
    return MemoryOrigin()


@pytest.fixture
async def client(home: Path, origin: MemoryOrigin) -> AsyncIterator[WeightCacheClient]:
    store = Store.open(home / "w", origin=origin, max_bytes=100_000, clock=lambda: 5.0)
    server = await serve_store(store, home / "s")
    asked = WeightCacheClient(home / "s")
    yield asked
    await asked.aclose()
    server.close()
    store.close()


async def test_lease_travels_with_its_progress(client: WeightCacheClient, origin: MemoryOrigin) -> None:
    name = put_model(origin, {"a": b"x" * 1000})
    seen: list[LoadProgress] = []
    lease = await client.lease_with_progress(name, holder="slot-1", on_progress=seen.append)
    assert (lease.path / "a").stat().st_size == 1000
    assert all(p.total_bytes == 1000 for p in seen)
    assert await client.lease(name, holder="slot-1") == lease
    assert [(held.id, held.holder) for held in await client.leases()] == [(lease.lease_id, "slot-1")]
    assert [(m.manifest, m.leases) for m in await client.models()] == [(name, 1)]
    await client.release(lease.lease_id)
    await client.release(lease.lease_id)
    assert (await client.stat()).leases == 0
    assert await client.verify(name) == []
    assert repr(client).endswith("connected>")


async def test_errors_keep_their_class(client: WeightCacheClient, origin: MemoryOrigin) -> None:
    with pytest.raises(OriginUnavailable, match="no blob"):
        await client.lease("0" * 64, holder="s")
    with pytest.raises(StoreFull):
        await client.prefetch(put_model(origin, {"a": b"x" * 200_000}))
    name = put_model(origin, {"a": b"x"})
    origin.damaged[name] = 1
    with pytest.raises(ChunkCorrupt):
        await client.lease(name, holder="s")


async def test_wrong_arguments_are_named(client: WeightCacheClient, home: Path) -> None:
    rpc = await RpcClient.open(home / "s")
    with pytest.raises(RemoteFailure, match="manifest = 7"):
        await rpc.call("lease", {"manifest": 7})
    await rpc.aclose()


async def test_caller_that_leaves_ends_the_fetching(client: WeightCacheClient, origin: MemoryOrigin) -> None:
    origin.gate = asyncio.Event()
    ask = asyncio.create_task(client.lease(put_model(origin, {"a": b"x"}), holder="s"))
    await origin.asked.wait()
    ask.cancel()
    await asyncio.wait([ask])
    assert (await client.stat()).arriving == 0


async def test_nobody_there_is_said_so(home: Path) -> None:
    with pytest.raises(ProtocolError, match="nobody answers"):
        await WeightCacheClient(home / "none").stat()


@pytest.mark.parametrize("text, said", [("max_bytes: 5", "max_bytes = 5: must be at least"), ("metrics_listen: x", "expected host:port")])
def test_wrong_settings_name_key_and_bound(home: Path, text: str, said: str) -> None:
    (home / "c.yaml").write_text(f"weight_cache:\n  {text}\n")
    with pytest.raises(SettingsInvalid, match=said):
        load(WeightCacheSettings, "weight_cache", home / "c.yaml")


async def start(home: Path) -> asyncio.subprocess.Process:
    """The process, once it says that it serves (or has died)."""
    ready, tell = os.pipe()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weight_cache", "--config", str(home / "platform.yaml"), "--ready-fd", str(tell)),
        cwd=REPOSITORY,
        pass_fds=[tell],
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(tell)
    await asyncio.to_thread(os.read, ready, 1)
    os.close(ready)
    return child


def upload(home: Path) -> str:
    """A model in the blob directory."""
    model = home / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"w" * 100_000)
    manifest = build_manifest(model)
    for digest, content in ((manifest.digest, manifest.to_bytes()), (manifest.files[0].digest, b"w" * 100_000)):
        blob = home / "h" / "blobs" / digest[:2] / digest
        blob.parent.mkdir(parents=True)
        blob.write_bytes(content)
    return manifest.digest


async def scrape(socket_path: Path) -> str:
    reader, writer = await asyncio.open_unix_connection(socket_path)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    body = await reader.read()
    writer.close()
    return body.decode()


@pytest.mark.e2e
@pytest.mark.slow
async def test_killed_process_comes_back_with_its_leases(home: Path) -> None:
    name = upload(home)
    child = await start(home)
    client = WeightCacheClient(home / "r" / "weight_cache.sock")
    try:
        lease: WeightsLease = await client.lease(name, holder="slot-1")
        assert "pilotlight_weights_leases 1.0" in await scrape(home / "r" / "metrics-weight_cache.sock")
        rival = await start(home)
        _, said = await rival.communicate()
        assert rival.returncode == 2
        assert f"belongs to process {child.pid}" in said.decode()
        child.send_signal(signal.SIGKILL)
        await child.wait()
        assert (lease.path / "weights").stat().st_size == 100_000
        child = await start(home)
        assert [held.id for held in await client.leases()] == [lease.lease_id]
        assert await client.lease(name, holder="slot-1") == lease
        await client.aclose()
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
    finally:
        await client.aclose()
        if child.returncode is None:
            child.kill()
            await child.wait()
