"""What of a slot is in nobody else's reach through a snapshot of it: its images, and the host's
files."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.slots.replies import BootFailed
from tests.fakes.slot_workshop import Workshop

pytestmark = pytest.mark.root


async def test_a_directory_that_became_a_link_out_of_the_slot_is_not_restored(
    shop: Workshop, tmp_path: Path
) -> None:
    """CRIU would open what is there, as root."""
    image = await shop.dump(await shop.boot(boot=["write:kept.txt=early"]))
    way = tarfile.TarInfo("work/way")
    way.type, way.linkname = tarfile.SYMTYPE, "/root"
    swapped = tmp_path / "files.tar"
    with tarfile.open(swapped, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(way)

    with pytest.raises(BootFailed, match="leads out of the slot's directories: 'work/way'"):
        await shop.restore(replace(image, files=swapped))


async def test_an_image_is_for_root_alone(shop: Workshop) -> None:
    image = await shop.dump(await shop.boot())
    assert {path.stat().st_mode & 0o077 for path in image.directory.iterdir()} == {0}
