"""Layers of a container image that a tenant pushed, unpacked by root: what they say, and nothing
outside of their directory."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.disk_floor import BelowFloor, DiskFloor, no_floor
from pilotlight.core.tar_stream import ReadableStream
from snapshotter.errors import BundleUnavailable
from snapshotter.images.oci.layers import MAX_DEPTH, RootFilesystem


def layer(*entries: tuple[str, str, Any]) -> io.BytesIO:
    """An archive of (name, kind, content or target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, value in entries:
            info = tarfile.TarInfo(name)
            info.type = {
                "file": tarfile.REGTYPE,
                "program": tarfile.REGTYPE,
                "dir": tarfile.DIRTYPE,
                "link": tarfile.SYMTYPE,
                "hard": tarfile.LNKTYPE,
                "device": tarfile.CHRTYPE,
                "pipe": tarfile.FIFOTYPE,
            }[kind]
            data = value.encode() if kind in ("file", "program") else b""
            info.size = len(data)
            info.linkname = value if kind in ("link", "hard") else ""
            info.mode = 0o4755 if kind == "program" else 0o600
            archive.addfile(info, io.BytesIO(data))
    out.seek(0)
    return out


def file(name: str, text: str = "x") -> tuple[str, str, Any]:
    return name, "file", text


def link(name: str, target: str) -> tuple[str, str, Any]:
    return name, "link", target


def made(root: Path, *layers: ReadableStream, **bounds: Any) -> RootFilesystem:
    """The layers, applied."""
    values: dict[str, Any] = {"max_bytes": 10**8, "max_entries": 1000, "floor": no_floor()}
    found = RootFilesystem(root, **{**values, **bounds})
    for one in layers:
        found.apply(one)
    return found


def listed(root: Path) -> dict[str, str]:
    """Files and links below a directory, with their text or target."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_later_layers_replace_hide_and_add(tmp_path: Path) -> None:
    made(
        tmp_path,
        layer(
            file("a/kept"),
            file("a/replaced", "old"),
            file("a/hidden"),
            file("b/c/d"),
            link("l", "a"),
        ),
        layer(
            file("./a/replaced", "new"),
            file("a/.wh.hidden", ""),
            file("b", "a file in place of a directory"),
            file("/m", ""),
            file("a/.wh.never-there", ""),
        ),
    )
    assert listed(tmp_path) == {
        "a/kept": "x",
        "a/replaced": "new",
        "b": "a file in place of a directory",
        "l": "a",
        "m": "",
    }


def test_an_opaque_directory_keeps_what_its_own_layer_put_there(tmp_path: Path) -> None:
    made(
        tmp_path,
        layer(file("d/old"), file("d/sub/old"), file("e/kept")),
        layer(file("d/new"), file("d/sub/new"), file("d/.wh..wh..opq", "")),
    )
    assert sorted(listed(tmp_path)) == ["d/new", "d/sub/new", "e/kept"]


def test_set_id_bits_devices_and_pipes_are_left_out(tmp_path: Path) -> None:
    made(
        tmp_path,
        layer(("su", "program", "x"), ("dev/mem", "device", None), ("p", "pipe", None), file("f")),
        layer(("again", "hard", "su"), ("sub/f", "hard", "./f")),
    )
    assert {path.name: oct(path.stat().st_mode & 0o7777) for path in tmp_path.iterdir()} == {
        "su": "0o755",
        "again": "0o755",
        "f": "0o644",
        "sub": "0o755",
    }
    assert (tmp_path / "again").stat().st_ino == (tmp_path / "su").stat().st_ino


@pytest.mark.parametrize(
    "layers, why",
    [
        ([[file("../out")]], "leads out of the image"),
        ([[file("a/../../out")]], "leads out of the image"),
        ([[link("l", "/OUT"), file("l/file")]], "is below 'l', which is a link"),
        ([[link("l", "/OUT")], [file("l/file")]], "is below 'l', which is a link"),
        ([[link("l", "/OUT")], [file("l/.wh.victim", "")]], "is below 'l', which is a link"),
        ([[link("l", "/OUT")], [file("l/.wh..wh..opq", "")]], "is below 'l', which is a link"),
        ([[link("l", "/OUT/victim")], [("h", "hard", "l")]], "which is no file"),
        ([[link("l", "/OUT")], [("h", "hard", "l/victim")]], "which is no file"),
        ([[("h", "hard", "../OUT/victim")]], "leads out of the image"),
        ([[file("f"), file("f/g")]], "is below 'f', which is a file"),
        ([[file("d/.wh...", "")]], "is a whiteout of no name"),
        ([[file("d/" * MAX_DEPTH + "e/f")]], "is deeper than"),
        ([[link("l", "")]], "is a link to no valid path"),
    ],
)
def test_nothing_is_written_removed_or_linked_through_a_link(
    tmp_path: Path, layers: list[list[tuple[str, str, Any]]], why: str
) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "victim").write_text("untouched")
    (root := tmp_path / "root").mkdir()
    there = [
        [(name, kind, str(value).replace("/OUT", str(out))) for name, kind, value in entries]
        for entries in layers
    ]
    with pytest.raises(BundleUnavailable, match=why.replace("'", ".")):
        made(root, *(layer(*entries) for entries in there))
    assert listed(out) == {"victim": "untouched"}


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "victim").write_text("untouched")
    (root := tmp_path / "root").mkdir()
    made(
        root,
        layer(link("f", str(out / "victim")), link("d", str(out))),
        layer(file("f", "mine"), ("d", "dir", None), file("d/victim", "mine")),
    )
    assert listed(root) == {"d/victim": "mine", "f": "mine"}
    assert listed(out) == {"victim": "untouched"}


def test_size_entries_and_opaque_walks_are_bounded(tmp_path: Path) -> None:
    for number, (bounds, entries) in enumerate(
        [
            ({"max_bytes": 3 * 4096}, [file("f", "x" * 4097), file("g", "x" * 4097)]),
            ({"max_entries": 10}, [file(f"f{n}") for n in range(11)]),
            ({"max_entries": 10}, [file("a/b/c/d/e/f/g/h/i/j/k")]),
        ]
    ):
        (root := tmp_path / str(number)).mkdir()
        with pytest.raises(BundleUnavailable, match=r"the image (unpacks|has)"):
            made(root, layer(*entries), **bounds)
    (root := tmp_path / "walks").mkdir()
    many = [file(f"d/{n}") for n in range(40)] + [file("d/.wh..wh..opq", "")] * 50
    with pytest.raises(BundleUnavailable, match="too many opaque"):
        made(root, layer(*many), max_entries=95)


def test_the_disks_floor_is_kept(tmp_path: Path) -> None:
    with pytest.raises(BelowFloor):
        made(tmp_path, layer(file("f")), floor=DiskFloor(tmp_path, 1 << 60))


class Zeros:
    """The content of an entry, which a packed layer has a thousand times smaller. `served`: bytes
    that were read of it."""

    def __init__(self, name: str, size: int) -> None:
        info = tarfile.TarInfo(name)
        info.size = size
        self._head = info.tobuf()
        self._left = size + -size % 512 + 1024
        self.served = 0

    def read(self, size: int) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        data = bytes(min(size, self._left))
        self._left -= len(data)
        self.served += len(data)
        return data


@pytest.mark.parametrize("name", ["./", "a/.wh.b", "a/.wh..wh..opq"])
def test_what_no_file_gets_counts_too(tmp_path: Path, name: str) -> None:
    """A layer of 100 MB could be read for hours, in the only thread of all tenants."""
    big = Zeros(name, 10**9)
    with pytest.raises(BundleUnavailable, match="unpacks to more than 1000000 bytes"):
        made(tmp_path, big, max_bytes=10**6)
    assert big.served < 10**6
    small = Zeros(name, 10**5)
    (tmp_path / "small").mkdir()
    assert made(tmp_path / "small", small, max_bytes=10**6).size_bytes >= 10**5


def test_a_build_that_has_ended_stops_the_unpacking(tmp_path: Path) -> None:
    def ended() -> None:
        raise BundleUnavailable("the build has ended")

    endless = Zeros("./", 10**9)
    with pytest.raises(BundleUnavailable, match="the build has ended"):
        made(tmp_path, endless, max_bytes=2 * 10**9, check=ended)
    assert endless.served < 10**8


def test_what_is_remembered_of_an_entry_does_not_grow_with_its_path(tmp_path: Path) -> None:
    deep = "/".join("d" * 240 for _ in range(12))
    # files are not counted: 1,000 paths of 2.9 KB are 2.9 MB
    archive = layer(*(file(f"{deep}/f{number}") for number in range(1000)))
    filesystem = RootFilesystem(tmp_path, max_bytes=1024**3, max_entries=2000, floor=no_floor())
    filesystem.apply(layer(file(f"{deep}/first")))
    tracemalloc.start()
    try:
        filesystem.apply(archive)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1_000_000
