"""Where in a pod things are mounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.pods.mounts import demand_places

PLACES = ("run", "dev/shm", "tmp", "var/tmp")


def image(root: Path) -> Path:
    for place in PLACES:
        (root / place).mkdir(parents=True)
    return root


def test_directories_are_places_to_mount_over(tmp_path: Path) -> None:
    demand_places(str(image(tmp_path)))
    demand_places(str(tmp_path / "nothing-is-there-yet"))


@pytest.mark.parametrize("place", [*PLACES, "var"])
def test_an_image_whose_directory_leads_elsewhere_is_not_restored_into(
    tmp_path: Path, place: str
) -> None:
    link = image(tmp_path) / place
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        demand_places(str(tmp_path))
