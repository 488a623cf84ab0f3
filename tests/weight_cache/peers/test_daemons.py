"""Daemons on one machine: what one has the others take from it, without an origin; and go on with
the origin when it dies or lies."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.fakes.ports import free_ports
from weight_cache.client import WeightCacheClient
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.peers import http1
from weight_cache.sources.manifest_builder import build_manifest
from weight_cache.types import LoadProgress

REPOSITORY = Path(__file__).parents[3]
PATIENTLY = """
import runpy
from weight_cache.peers import fetcher
fetcher.WAIT_S = 60.0
runpy.run_module("weight_cache", run_name="__main__", alter_sys=True)
"""
"""The daemon; it waits for a neighbour that is about to have a chunk, however busy the machine
is."""


class Daemon:
    """A weight cache with a home of its own."""

    def __init__(
        self, folder: Path, *, blobs: Path, ports: list[int], own: int, extra: str = ""
    ) -> None:
        self.folder = folder
        self.port = ports[own]
        peers = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
        folder.mkdir()
        (folder / "h").mkdir()
        (folder / "h" / "platform.key").write_bytes(base64.urlsafe_b64encode(b"k" * 32))
        (folder / "platform.yaml").write_text(
            f"platform: {{home: {folder}/h, run: {folder}/r, blobs: {blobs}}}\n"
            f"weight_cache: {{metrics_listen: null, peer_listen: '127.0.0.1:{self.port}', peers: "
            f"[{peers}], peer_timeout_s: 20{extra}}}\n"
        )
        self.process: asyncio.subprocess.Process | None = None
        self.client = WeightCacheClient(folder / "r" / "weight_cache.sock")

    async def start(self) -> None:
        ready, tell = os.pipe()
        with (self.folder / "log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-c",
                    PATIENTLY,
                    "--config",
                    str(self.folder / "platform.yaml"),
                    "--ready-fd",
                    str(tell),
                ),
                cwd=REPOSITORY,
                pass_fds=[tell],
                stderr=log,
            )
        os.close(tell)
        assert await asyncio.to_thread(os.read, ready, 1) == b"\n", (
            self.folder / "log"
        ).read_text()
        os.close(ready)

    async def fetch(self, name: str) -> Path:
        opened = await self.client.open(name, holder="test", pid=os.getpid())
        return (await self.client.wait(opened.lease_id)).path

    async def figures(self) -> str:
        """Its metrics."""
        reader, writer = await asyncio.open_unix_connection(
            self.folder / "r" / "metrics-weight_cache.sock"
        )
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        body = await reader.read()
        writer.close()
        return body.decode()

    async def stop(self) -> None:
        await self.client.aclose()
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            await self.process.wait()


def different_ports(count: int) -> list[int]:
    first = free_ports(count)
    return list(range(first, first + count))


def upload(blobs: Path, model: Path, content: bytes) -> str:
    model.mkdir()
    (model / "weights").write_bytes(content)
    manifest = build_manifest(model)
    for digest, blob in (
        (manifest.digest, manifest.to_bytes()),
        (manifest.files[0].digest, content),
    ):
        path = blobs / digest[:2] / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob)
    return manifest.digest


async def status_without_ticket(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http1.request_head("/v1/holdings", {"Host": "x"}))
    head = await http1.read_head(reader)
    writer.close()
    return head.status


@pytest.mark.e2e
@pytest.mark.slow
async def test_the_second_daemon_has_no_origin_and_gets_the_model_from_the_first(
    folder: Path,
) -> None:
    name = upload(folder / "blobs", folder / "model", os.urandom(CHUNK_BYTES + 1000))
    ports = different_ports(2)
    first = Daemon(folder / "1", blobs=folder / "blobs", ports=ports, own=0)
    second = Daemon(folder / "2", blobs=folder / "empty", ports=ports, own=1)
    try:
        await first.start()
        path = await first.fetch(name)
        await second.start()
        assert (await second.fetch(name) / "weights").read_bytes() == (
            path / "weights"
        ).read_bytes()
        told = await second.client.stat()
        assert (told.fetched_bytes, told.given_bytes) == (0, CHUNK_BYTES + 1000)
        assert await status_without_ticket(first.port) == 401
    finally:
        await first.stop()
        await second.stop()
    assert [
        daemon.process.returncode for daemon in (first, second) if daemon.process is not None
    ] == [0, 0]


@pytest.mark.e2e
@pytest.mark.slow
async def test_a_daemon_that_is_killed_midway_is_replaced_by_the_origin(folder: Path) -> None:
    content = os.urandom(4 * CHUNK_BYTES)
    name = upload(folder / "blobs", folder / "model", content)
    ports = different_ports(2)
    slowly = f", peer_upload_bytes_per_s: {2 * CHUNK_BYTES}, peer_uploads_at_once: 1"
    first = Daemon(folder / "1", blobs=folder / "blobs", ports=ports, own=0, extra=slowly)
    second = Daemon(folder / "2", blobs=folder / "blobs", ports=ports, own=1)
    killed = asyncio.Event()

    def kill(progress: LoadProgress) -> None:
        if progress.done_bytes and not killed.is_set():
            assert first.process is not None
            first.process.kill()
            killed.set()

    try:
        await first.start()
        await first.fetch(name)
        await second.start()
        opened = await second.client.open(name, holder="test", pid=os.getpid())
        lease = await second.client.wait(opened.lease_id, on_progress=kill)
        assert first.process is not None
        await first.process.wait()
        assert (lease.path / "weights").read_bytes() == content
        assert killed.is_set()
        told = await second.client.stat()
        assert told.fetched_bytes + told.given_bytes == len(content)
    finally:
        await first.stop()
        await second.stop()


@pytest.mark.e2e
@pytest.mark.slow
async def test_cold_daemons_read_the_origin_about_once_together_and_a_disk_that_rots_is_found_out(
    folder: Path,
) -> None:
    content = os.urandom(3 * CHUNK_BYTES + 1000)
    name = upload(folder / "blobs", folder / "model", content)
    ports = different_ports(3)
    fleet = [Daemon(folder / str(n), blobs=folder / "blobs", ports=ports, own=n) for n in range(3)]
    try:
        for daemon in fleet[:2]:
            await daemon.start()
        for daemon in fleet[:2]:
            while 'pilotlight_weights_peers{state="asked"} 1.0' not in await daemon.figures():
                await asyncio.sleep(0.1)  # a node that has just come is met within a second
        paths = await asyncio.gather(*(daemon.fetch(name) for daemon in fleet[:2]))
        assert all((path / "weights").read_bytes() == content for path in paths)
        told = [await daemon.client.stat() for daemon in fleet[:2]]
        assert sum(each.fetched_bytes + each.given_bytes for each in told) == 2 * len(content)
        assert sum(each.fetched_bytes for each in told) <= len(content) + CHUNK_BYTES  # about once
        for path in paths:
            rot(path / "weights")
        await fleet[2].start()
        assert (await fleet[2].fetch(name) / "weights").read_bytes() == content
        assert (await fleet[2].client.stat()).fetched_bytes == len(content)
        figures = await fleet[2].figures()
        assert 'pilotlight_weights_peer_distrusted{peer="127.0.0.1:' in figures
    finally:
        for daemon in fleet:
            await daemon.stop()


def rot(file: Path) -> None:
    """Every byte changes, and nothing that can be seen without reading it."""
    before = file.stat()
    file.chmod(0o644)
    file.write_bytes(bytes(before.st_size))
    file.chmod(before.st_mode)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
