"""Where in a pod things are mounted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapshotter.pods.mounts import change_root, detach_rootfs, require_places

PLACES = ("run", "dev/shm", "tmp", "var/tmp")


def image(root: Path) -> Path:
    for place in PLACES:
        (root / place).mkdir(parents=True)
    return root


def test_directories_are_places_to_mount_over(tmp_path: Path) -> None:
    require_places(str(image(tmp_path)))
    require_places(str(tmp_path / "nothing-is-there-yet"))


@pytest.mark.parametrize("place", [*PLACES, "var"])
def test_an_image_whose_directory_leads_elsewhere_is_not_restored_into(
    tmp_path: Path, place: str
) -> None:
    link = image(tmp_path) / place
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        require_places(str(tmp_path))


def in_a_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process that may do to its mounts what it likes."""
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            answer = work()
        except OSError as e:
            answer = str(e)
        os.write(writable, json.dumps(answer).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def rootfs(root: Path) -> Path:
    """Of an image that a tenant pushed."""
    for place in (*PLACES, "dev", "proc", "sys", "etc", "scratch"):
        (root / place).mkdir(parents=True, exist_ok=True)
    (root / "etc/resolv.conf").touch()
    (root / "etc/hosts").symlink_to("/scratch/hosts")
    (root / "mine").write_text("a tenant's")
    return root


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A directory of the pod."""
    (there := tmp_path / "of-the-pod").mkdir()
    (there / "hosts").write_text("never mounted over, and never written")
    return there


def entered(root: Path, *directories: str) -> Any:
    """What a worker finds whose root that is."""

    def work() -> dict[str, Any]:
        change_root(detach_rootfs(str(root)), directories=directories)
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        found = {line.split()[4]: line.split()[5] for line in lines}
        try:
            Path("/new").touch()
        except OSError as e:
            found["touch"] = e.strerror or ""
        return {
            "root": sorted(os.listdir("/")),
            "mounts": found,
            "null": Path("/dev/null").is_char_device(),
            "resolver": Path("/etc/resolv.conf").read_text(),
            "hosts": os.readlink("/etc/hosts"),
        }

    return in_a_child(work)


@pytest.mark.root
def test_a_root_directory_of_its_own_is_read_only_and_has_the_pods_devices_and_resolver(
    tmp_path: Path,
) -> None:
    found = entered(rootfs(tmp_path / "root"))
    assert set(found["root"]) == {
        *("dev", "etc", "mine", "proc", "run", "scratch", "sys", "tmp", "var")
    }
    mounts = found["mounts"]
    assert mounts["touch"] == "Read-only file system"
    assert {"ro", "nosuid", "nodev"} <= set(mounts["/"].split(","))
    outside = [path for path in mounts if not path.startswith(("/dev", "/proc", "/sys", "/etc"))]
    assert set(outside) == {"/", "touch"}, "nothing of the pod's root is left"
    assert found["null"]
    assert found["resolver"] == Path("/etc/resolv.conf").read_text()
    assert (found["hosts"], "/etc/hosts" in mounts) == ("/scratch/hosts", False)


@pytest.mark.root
def test_directories_of_the_pod_are_where_they_were(tmp_path: Path, scratch: Path) -> None:
    (root := rootfs(tmp_path / "root")).joinpath(str(scratch)[1:]).mkdir(parents=True)
    assert str(scratch) in entered(root, str(scratch))["mounts"]
    assert "/not-there" not in entered(root, "/not-there")["mounts"]


@pytest.mark.root
@pytest.mark.parametrize("place", ["dev", "proc", "sys", "etc", "scratch"])
def test_nothing_is_mounted_where_an_image_has_a_link(
    tmp_path: Path, scratch: Path, place: str
) -> None:
    root = rootfs(tmp_path / "root")
    link = root.joinpath(str(scratch)[1:]) if place == "scratch" else root / place
    root.joinpath(str(scratch)[1:]).mkdir(parents=True)
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    said = entered(root, str(scratch))
    assert isinstance(said, str)
    assert "Not a directory" in said


@pytest.mark.root
def test_a_link_of_the_pod_is_not_followed(tmp_path: Path, scratch: Path) -> None:
    (link := tmp_path / "link").symlink_to(scratch)
    assert "Not a directory" in entered(rootfs(tmp_path / "root"), str(link))
