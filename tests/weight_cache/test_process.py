"""The process: `python -m weight_cache` serves its socket, says when it is ready, and comes back
after a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.core.settings import SettingsInvalid, load_section
from tests.fakes.trees import remove_tree
from weight_cache.client import WeightCacheClient
from weight_cache.settings import WeightCacheSettings
from weight_cache.sources.manifest_builder import build_manifest
from weight_cache.types import Tier

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def home() -> Iterator[Path]:
    """Short: Unix sockets allow 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="pl"))
    (folder / "platform.yaml").write_text(
        f"platform: {{home: {folder}/h, run: {folder}/r}}\nweight_cache: {{metrics_listen: null}}\n"
    )
    yield folder
    remove_tree(folder)


@pytest.mark.parametrize(
    "text, said",
    [
        ("max_bytes: 5", "max_bytes = 5: must be at least"),
        ("metrics_listen: x", "expected host:port"),
    ],
)
def test_wrong_settings_name_key_and_bound(home: Path, text: str, said: str) -> None:
    (home / "c.yaml").write_text(f"weight_cache:\n  {text}\n")
    with pytest.raises(SettingsInvalid, match=said):
        load_section(WeightCacheSettings, "weight_cache", home / "c.yaml")


async def start(home: Path) -> asyncio.subprocess.Process:
    """The process, once it says that it serves (or has died)."""
    ready, tell = os.pipe()
    child = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "weight_cache",
            "--config",
            str(home / "platform.yaml"),
            "--ready-fd",
            str(tell),
        ),
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
    for digest, content in (
        (manifest.digest, manifest.to_bytes()),
        (manifest.files[0].digest, b"w" * 100_000),
    ):
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
        opened = await client.open(name, holder="slot-1", pid=os.getpid())
        assert (opened.ready, opened.tier) == (False, Tier.ORIGIN)
        lease = await client.wait(opened.lease_id)
        figures = await scrape(home / "r" / "metrics-weight_cache.sock")
        assert "pilotlight_weights_leases 1.0" in figures
        assert 'pilotlight_weights_leases_served_total{tier="origin"} 1.0' in figures
        rival = await start(home)
        _, said = await rival.communicate()
        assert rival.returncode == 2
        assert f"is in use by process {child.pid}" in said.decode()
        child.send_signal(signal.SIGKILL)
        await child.wait()
        assert (lease.path / "weights").stat().st_size == 100_000
        child = await start(home)
        assert [held.id for held in await client.leases()] == [lease.lease_id]
        again = await client.open(name, holder="slot-1", pid=os.getpid())
        assert (again.ready, again.path, again.lease_id, again.tier) == (
            True,
            lease.path,
            lease.lease_id,
            Tier.DRAM,
        )
        await client.aclose()
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
        assert b"origin" in (home / "h" / "weights" / "bandwidth.json").read_bytes()
    finally:
        await client.aclose()
        if child.returncode is None:
            child.kill()
            await child.wait()
