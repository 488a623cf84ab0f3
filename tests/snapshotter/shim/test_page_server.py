"""Which pieces of a working set are still brought after the process has changed its memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from snapshotter.shim.pages.missing_pages import MissingPages
from snapshotter.shim.pages.page_server import Memory, Piece

PAGE = 4096
REMAP, REMOVE, UNMAP = 0x14, 0x15, 0x16
"""Events of linux/userfaultfd.h."""


@pytest.mark.parametrize(
    "event, words, wanted",
    [
        pytest.param(REMOVE, (4 * PAGE, 8 * PAGE, 0), [0, 8], id="discards"),
        pytest.param(UNMAP, (5 * PAGE, 6 * PAGE, 0), [0, 8], id="unmaps a part"),
        pytest.param(REMAP, (0, 8 * PAGE, 4 * PAGE), [4], id="moves to where another one was"),
        pytest.param(REMOVE, (12 * PAGE, 16 * PAGE, 0), [0, 4, 8], id="discards something else"),
    ],
)
def test_what_the_process_discards_is_not_brought_with_the_working_set(
    event: int, words: tuple[int, int, int], wanted: list[int]
) -> None:
    unused: Any = None  # nothing is copied
    memory = Memory(
        pid=7,
        uffd=-1,
        image=unused,
        missing=MissingPages([(0, 12 * PAGE, 0)]),
        wanted=deque(Piece(at * PAGE, (at + 4) * PAGE, bytearray()) for at in (0, 4, 8)),
    )
    memory.on_change(event, words)
    assert [piece.start // PAGE for piece in memory.wanted] == wanted
