"""kill -9 at each step: what the next agent finds is the whole snapshot or nothing, and nothing is
left lying about."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.snapshots.catalog import Catalog
from snapshotter.types import SnapshotState
from tests.snapshotter.snapshots.shapes import KEY, NO_BINDS, identity, publish, ready

_DIES = """
import asyncio, os, signal, sys
from pathlib import Path
from snapshotter.snapshots.catalog import Catalog
from tests.snapshotter.snapshots.shapes import KEY, ready

def step(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    catalogue = Catalog(Path(sys.argv[1]), key=KEY, max_bytes=None, step=step)
    if sys.argv[2] == "dumped":
        async with catalogue.stage() as stage:
            (stage.images / "pages-1.img").write_bytes(b"half a dump")
            step("dumped")
    await ready(catalogue)

asyncio.run(main())
"""


def killed_at(step: str, directory: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", _DIES, str(directory), step],
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("step", ["dumped", "hashed", "manifest_written"])
async def test_killed_before_it_has_its_name_there_is_nothing(tmp_path: Path, step: str) -> None:
    await asyncio.to_thread(killed_at, step, tmp_path)
    assert list(tmp_path.glob(".tmp-*"))
    catalogue = Catalog(tmp_path, key=KEY, max_bytes=None)
    assert list(catalogue) == []
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    await ready(catalogue)
    assert await catalogue.usable(identity(), NO_BINDS) is not None
    await catalogue.aclose()


@pytest.mark.parametrize(
    "step, state", [("published", SnapshotState.PROVING), ("proof_written", SnapshotState.READY)]
)
async def test_killed_afterwards_it_is_whole(
    tmp_path: Path, step: str, state: SnapshotState
) -> None:
    await asyncio.to_thread(killed_at, step, tmp_path)
    catalogue = Catalog(tmp_path, key=KEY, max_bytes=None)
    (snapshot,) = catalogue
    assert snapshot.state is state
    await catalogue.verify(snapshot, None)
    assert not list(tmp_path.glob(".tmp-*"))
    await catalogue.aclose()


async def test_killed_while_it_was_quarantined_it_is_found_damaged_again(tmp_path: Path) -> None:
    catalogue = Catalog(tmp_path, key=KEY, max_bytes=None)
    snapshot = await ready(catalogue)
    await catalogue.aclose()
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / f"{snapshot.id}.00000000.json").write_text(
        '{"reason": "written before the move"}'
    )
    again = Catalog(tmp_path, key=KEY, max_bytes=None)
    assert again.quarantined == []
    assert list((tmp_path / "quarantine").iterdir()) == []
    await again.aclose()


async def test_quarantine_survives_a_restart_with_its_reason(tmp_path: Path) -> None:
    catalogue = Catalog(tmp_path, key=KEY, max_bytes=None)
    snapshot = await ready(catalogue)
    await catalogue.quarantine(snapshot.id, "failed three times", now=77.0)
    await catalogue.aclose()
    again = Catalog(tmp_path, key=KEY, max_bytes=None)
    (info,) = again.infos({"app": "demo"})
    assert (info.reason, info.revision, info.last_used_at) == (
        "failed three times",
        "fn-1@r1",
        77.0,
    )
    assert await again.usable(identity(), NO_BINDS) is None
    assert await again.delete(snapshot.id)
    assert again.used_bytes == 0
    await again.aclose()


async def test_a_directory_without_a_manifest_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "sn-0123456789abcdef").mkdir()
    catalogue = Catalog(tmp_path, key=KEY, max_bytes=None)
    assert [q.reason for q in catalogue.quarantined] == ["it has no manifest"]
    await catalogue.aclose()


async def test_the_same_content_twice_is_one_snapshot(tmp_path: Path) -> None:
    catalogue = Catalog(tmp_path, key=KEY, max_bytes=None)
    one, two = await publish(catalogue), await publish(catalogue)
    assert one.id == two.id
    assert len(list(catalogue)) == 1
    await catalogue.aclose()


async def test_a_cancelled_publish_leaves_nothing_or_a_whole_one(tmp_path: Path) -> None:
    for steps in range(12):
        catalogue = Catalog(tmp_path / str(steps), key=KEY, max_bytes=None)
        publishing = asyncio.create_task(publish(catalogue))
        for _ in range(steps):
            await asyncio.sleep(0.004)
        publishing.cancel()
        await asyncio.wait([publishing])
        for snapshot in catalogue:
            await catalogue.verify(snapshot, None)
        names = {p.name for p in catalogue.directory.iterdir()}
        assert names == {".lock", *(s.id for s in catalogue)}
        await catalogue.aclose()


async def test_a_publish_that_is_cancelled_while_its_directory_is_made_leaves_none(
    tmp_path: Path,
) -> None:
    catalogue = Catalog(tmp_path, key=KEY, max_bytes=None)
    for _ in range(20):
        publishing = asyncio.create_task(publish(catalogue))
        while not any(tmp_path.glob(".tmp-*")):  # without a pause: the thread has not told us yet
            await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.wait([publishing])
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}
    await catalogue.aclose()


@pytest.fixture
def tiny_disk(short_tmp: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = short_tmp / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.root
async def test_a_full_disk_while_publishing_leaves_nothing(tiny_disk: Path) -> None:
    catalogue = Catalog(tiny_disk / "snapshots", key=KEY, max_bytes=10_000_000)
    kept = await ready(catalogue)
    with pytest.raises(OSError, match="No space left"):
        await publish(catalogue, images={"pages-1.img": b"x" * 300_000}, created_at=2.0)
    filled = 256 * 1024 - sum(p.stat().st_size for p in tiny_disk.rglob("*")) - 4096 * 12
    with pytest.raises(OSError, match="No space left"):  # the images fit, the manifest does not
        await publish(
            catalogue,
            images={"pages-1.img": b"x" * filled},
            labels={"long": "x" * 60_000},
            created_at=3.0,
        )
    assert [s.id for s in catalogue] == [kept.id]
    assert {p.name for p in catalogue.directory.iterdir()} == {".lock", kept.id}
    assert await catalogue.usable(identity(), NO_BINDS) == kept
    await catalogue.aclose()
