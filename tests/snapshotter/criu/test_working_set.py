"""Working sets: from recorded accesses to ranges, and in a manifest."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import pytest

from snapshotter.criu import working_set
from snapshotter.shim.pages import page_files

PAGE, PID = 4096, 7


def accesses(*addresses: int) -> bytes:
    return b"".join(page_files.ACCESS.pack(PID, address) for address in addresses)


def ranges(data: bytes) -> list[tuple[int, ...]]:
    return [one[1:] for one in page_files.WORKING_SET_RANGE.iter_unpack(data)]


def test_neighbours_are_one_range_and_ranges_come_in_the_order_of_their_first_access(
    tmp_path: Path,
) -> None:
    far, near = 900 * PAGE, 10 * PAGE
    (tmp_path / page_files.RECORD).write_bytes(
        accesses(far, near + 2 * PAGE, near, near, near + PAGE)
    )
    assert ranges(working_set.recorded(tmp_path)) == [
        (far, far + PAGE),
        (near, near + 3 * PAGE),
    ]


def test_a_small_gap_is_brought_along_and_memory_that_is_not_in_the_image_is_not(
    tmp_path: Path,
) -> None:
    empty = 1
    (tmp_path / page_files.RECORD).write_bytes(
        accesses(0, 3 * PAGE, 50 * PAGE | empty, 51 * PAGE | empty, 53 * PAGE | empty)
    )
    assert ranges(working_set.recorded(tmp_path)) == [
        (0, 4 * PAGE),
        (50 * PAGE | empty, 52 * PAGE),
        (53 * PAGE | empty, 54 * PAGE),
    ]


def test_an_access_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    (tmp_path / page_files.RECORD).write_bytes(accesses(PAGE, 2 * PAGE)[:-3])
    assert ranges(working_set.recorded(tmp_path)) == [(PAGE, 2 * PAGE)]


def test_without_a_record_there_is_no_working_set(tmp_path: Path) -> None:
    assert working_set.recorded(tmp_path) == b""


def test_it_comes_back_from_text() -> None:
    data = page_files.WORKING_SET_RANGE.pack(PID, 0, PAGE) * 1000
    text = working_set.encode(data)
    assert working_set.decode(text) == data
    assert len(text) < len(data) / 10
    assert working_set.decode(working_set.encode(b"")) == b""


@pytest.mark.parametrize(
    "text",
    [
        "no base64!",
        base64.b64encode(b"no zlib").decode(),
        working_set.encode(bytes(24))[:-8],
        base64.b64encode(zlib.compress(bytes(23))).decode(),
        base64.b64encode(zlib.compress(bytes(9 * 1024 * 1024))).decode(),
    ],
)
def test_text_that_is_damaged_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="working set"):
        working_set.decode(text)


def test_a_file_of_ranges_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ranges"
    path.write_bytes(page_files.WORKING_SET_RANGE.pack(PID, 0, PAGE)[:-1])
    with path.open("rb") as f, pytest.raises(page_files.PagesLost, match="not whole"):
        page_files.read_working_set(f.fileno())
