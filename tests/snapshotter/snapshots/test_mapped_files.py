"""Files that a process needs again: which of them may change, and whether they did."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotter.snapshots.hash_cache import HashCache
from snapshotter.snapshots.mapped_files import BindMounts, is_known, is_same, paths_of, record

ROOT = "/run/pilotlight/slot"
BINDS = BindMounts.of(
    [("/opt/py", "python"), ("/home/site", "env/0"), ("/data/code", "code"), ("/w/m", "weights/m")],
    built_image=False,
)

MAPS = f"""\
55d0-55d1 r--p 00000000 08:01 11 {ROOT}/python/bin/python3.11
55d1-55d2 r-xp 00001000 08:01 11 {ROOT}/python/bin/python3.11
55d2-55d3 rw-p 00000000 00:00 0 [heap]
7f00-7f01 r--s 00000000 08:01 12 {ROOT}/weights/m/model.safetensors
7f01-7f02 rw-p 00000000 00:00 0
7f02-7f03 r--p 00000000 08:01 13 /usr/lib/x86_64/a lib.so
7f03-7f04 rw-s 00000000 00:05 14 /dev/zero (deleted)
7f04-7f05 rw-s 00000000 00:05 15 /memfd:buffer (deleted)
"""


def test_paths_come_from_maps_and_descriptors() -> None:
    found = paths_of(
        MAPS,
        ["pipe:[5]", "socket:[6]", "/usr/share/x", "/tmp/gone (deleted)", "anon_inode:[eventpoll]"],
    )
    mapped = (f"{ROOT}/python/bin/python3.11", f"{ROOT}/weights/m/model.safetensors")
    assert found == (*mapped, "/usr/lib/x86_64/a lib.so", "/usr/share/x")


@pytest.mark.parametrize(
    "path, host",
    [
        (f"{ROOT}/python/lib/a.so", "/opt/py/lib/a.so"),
        (f"{ROOT}/env/0/torch/x.so", "/home/site/torch/x.so"),
        ("/usr/lib/a.so", "/usr/lib/a.so"),
        (f"{ROOT}/pythonic", None),
        (f"{ROOT}/work/a", None),
    ],
)
def test_binds_lead_to_the_host(path: str, host: str | None) -> None:
    assert BINDS.host_path(path) == host


@pytest.mark.parametrize(
    "path", [f"{ROOT}/python/lib/a.so", f"{ROOT}/env/0/a.so", "/usr/lib/a.so", "/etc/passwd"]
)
def test_files_of_the_host_may_change(path: str) -> None:
    assert BINDS.may_change(path)


@pytest.mark.parametrize(
    "path",
    [
        f"{ROOT}/code/a",
        f"{ROOT}/weights/m/a",
        f"{ROOT}/work/a",
        f"{ROOT}/launch.json",
        "/tmp/a",
        "/dev/null",
        "/run/x",
        "/proc/self/maps",
    ],
)
def test_what_is_named_by_its_content_or_the_slots_own_does_not(path: str) -> None:
    assert not BINDS.may_change(path)


def test_a_built_images_packages_do_not_change() -> None:
    assert not BindMounts.of(BINDS.pairs, built_image=True).may_change(f"{ROOT}/env/0/a.so")


async def test_content_is_recorded_and_compared(tmp_path: Path) -> None:
    library = tmp_path / "a.so"
    library.write_bytes(b"one")
    os.utime(library, (1, 1))
    binds, memory, path = (
        BindMounts(((str(tmp_path), "python"),)),
        HashCache(),
        f"{ROOT}/python/a.so",
    )
    marks = await record([path, f"{ROOT}/python", f"{ROOT}/work/x", "/dev/null"], binds, memory)
    assert list(marks) == [path]
    assert await is_same(path, marks[path], binds, memory)
    library.write_bytes(b"two")
    assert not is_known(path, marks[path], binds, memory)
    assert not await is_same(path, marks[path], binds, memory)
    library.unlink()
    assert not await is_same(path, marks[path], binds, memory)
    assert not await is_same(f"{ROOT}/elsewhere", marks[path], binds, memory)


async def test_a_file_that_is_gone_already_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await record([f"{ROOT}/python/a.so"], BindMounts(((str(tmp_path), "python"),)), HashCache())


async def test_the_same_file_is_read_once_and_links_are_followed(tmp_path: Path) -> None:
    library = tmp_path / "a.so.1"
    library.write_bytes(b"one")
    (tmp_path / "a.so").symlink_to(library)
    memory = HashCache()
    marks = await memory.marks([tmp_path / "a.so"], follow=True, settle=True)
    assert await memory.marks([library], settle=True) == {library: marks[tmp_path / "a.so"]}
    with pytest.raises(OSError, match="symbolic links"):
        await memory.marks([tmp_path / "a.so"])


async def test_what_changed_within_the_last_tick_is_not_remembered(tmp_path: Path) -> None:
    fresh, memory = tmp_path / "fresh", HashCache()
    fresh.write_bytes(b"one")
    mark = (await memory.marks([fresh]))[fresh]
    assert not memory.knows(str(fresh), mark)
    assert (await memory.marks([fresh], settle=True))[fresh] == mark
    assert memory.knows(str(fresh), mark)
    assert repr(memory) == "<HashCache 1 files>"
