"""Pages of zeros in an image: what is cut out, what stays, and what is not understood is left
alone."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import pytest

from snapshotter.criu import zero_pages
from snapshotter.criu.image_files import PAGE, pagemap
from snapshotter.criu.zero_pages import BLOCK_PAGES

HEAP, LIBRARY = 0x10000000, 0x70000000
PRIVATE_ANONYMOUS, PRIVATE_FILE = 1 | 1 << 9, 1 | 1 << 6
FULL, EMPTY = b"x" * PAGE, bytes(PAGE)
MANY = 4 * BLOCK_PAGES


def message(fields: Iterable[tuple[int, int | bytes]]) -> bytes:
    """Protobuf."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            out += varint(number << 3) + varint(value)
    return out


def varint(value: int) -> bytes:
    """One number."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def file(magic: int, *messages: bytes) -> bytes:
    """One image file."""
    return struct.pack("<II", 0x54564319, magic) + b"".join(
        struct.pack("<I", len(m)) + m for m in messages
    )


def write(images: Path, runs: list[tuple[int, bytes]], *, flags: int = 4) -> None:
    """An image of one process: runs of pages at addresses, a heap and a library mapped."""
    vma = [
        (HEAP, HEAP + 1000 * PAGE, PRIVATE_ANONYMOUS),
        (LIBRARY, LIBRARY + 1000 * PAGE, PRIVATE_FILE),
    ]
    vmas = [
        (14, message([(1, start), (2, end), (3, 0), (4, 0), (5, 3), (6, 34), (7, status), (8, 0)]))
        for start, end, status in vma
    ]
    (images / "mm-7.img").write_bytes(file(0x57492820, message([(1, 0), (12, 1), *vmas])))
    entries = [
        message([(1, address), (2, 0), (4, flags), (5, len(data) // PAGE)])
        for address, data in runs
    ]
    (images / "pagemap-7.img").write_bytes(file(0x56084025, message([(1, 3)]), *entries))
    (images / "pages-3.img").write_bytes(b"".join(data for _, data in runs))


def read(images: Path) -> dict[int, bytes]:
    """Address → page, as CRIU would bring them back."""
    _, runs = pagemap((images / "pagemap-7.img").read_bytes())
    data, found, at = (images / "pages-3.img").read_bytes(), {}, 0
    for run in runs:
        for i in range(run.pages):
            found[run.address + i * PAGE] = data[at : at + PAGE]
            at += PAGE
    assert at == len(data)
    return found


def test_a_long_run_of_zeros_is_cut_out_and_all_else_stays_where_it_was(tmp_path: Path) -> None:
    block, end = FULL * BLOCK_PAGES, HEAP + (BLOCK_PAGES + MANY) * PAGE
    write(tmp_path, [(HEAP, block + EMPTY * MANY + FULL * 2), (HEAP + 900 * PAGE, FULL)])

    assert zero_pages.drop_zero_pages(tmp_path) == MANY * PAGE

    there = {*(HEAP + i * PAGE for i in range(BLOCK_PAGES)), end, end + PAGE, HEAP + 900 * PAGE}
    assert read(tmp_path) == dict.fromkeys(there, FULL)


@pytest.mark.parametrize(
    "pages",
    [EMPTY * MANY + FULL, FULL + EMPTY * MANY, FULL + EMPTY * MANY + FULL + EMPTY * MANY + FULL],
)
def test_zeros_at_any_place_of_a_run_are_cut_out(tmp_path: Path, pages: bytes) -> None:
    write(tmp_path, [(HEAP, pages)])
    zero_pages.drop_zero_pages(tmp_path)
    assert sum(page == EMPTY for page in read(tmp_path).values()) < 4 * BLOCK_PAGES
    assert sum(page == FULL for page in read(tmp_path).values()) == pages.count(FULL)


def test_nothing_but_zeros_is_nothing(tmp_path: Path) -> None:
    write(tmp_path, [(HEAP, EMPTY * MANY)])
    assert zero_pages.drop_zero_pages(tmp_path) == MANY * PAGE
    assert read(tmp_path) == {}


def test_short_runs_are_not_worth_a_cut(tmp_path: Path) -> None:
    write(tmp_path, [(HEAP, FULL + EMPTY * (BLOCK_PAGES - 1) + FULL)])
    assert zero_pages.drop_zero_pages(tmp_path) == 0
    assert len(read(tmp_path)) == BLOCK_PAGES + 1


def test_zeros_that_cover_a_file_stay(tmp_path: Path) -> None:
    write(tmp_path, [(LIBRARY, EMPTY * MANY)])
    assert zero_pages.drop_zero_pages(tmp_path) == 0
    assert len(read(tmp_path)) == MANY


@pytest.mark.parametrize("name", ["mm-7.img", "pages-3.img"])
def test_without_a_part_of_it_an_image_is_left_alone(tmp_path: Path, name: str) -> None:
    write(tmp_path, [(HEAP, EMPTY * MANY)])
    (tmp_path / name).unlink()
    before = (tmp_path / "pagemap-7.img").read_bytes()

    assert zero_pages.drop_zero_pages(tmp_path) == 0
    assert (tmp_path / "pagemap-7.img").read_bytes() == before


@pytest.mark.parametrize("flags", [1, 0])
def test_pages_that_are_elsewhere_leave_the_image_alone(tmp_path: Path, flags: int) -> None:
    write(tmp_path, [(HEAP, EMPTY * MANY)], flags=flags)
    assert zero_pages.drop_zero_pages(tmp_path) == 0


@pytest.mark.parametrize(
    "broken",
    [b"", b"1234", struct.pack("<II", 1, 2), struct.pack("<III", 0x54564319, 0x56084025, 900)],
)
def test_what_is_not_understood_is_left_alone(tmp_path: Path, broken: bytes) -> None:
    write(tmp_path, [(HEAP, EMPTY * MANY)])
    (tmp_path / "pagemap-7.img").write_bytes(broken)

    assert zero_pages.drop_zero_pages(tmp_path) == 0
    assert (tmp_path / "pagemap-7.img").read_bytes() == broken
