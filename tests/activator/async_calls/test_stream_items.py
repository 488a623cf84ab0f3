"""What a streamed result consists of."""

from __future__ import annotations

import json
import struct

import pytest

from activator.async_calls.stream_items import cutter_of
from pilotlight.protocol import PROBLEM_BASE


def pickles(*items: bytes, raised: bytes | None = None) -> bytes:
    out = b"".join(struct.pack(">I", len(item)) + item for item in items)
    return out if raised is None else out + struct.pack(">II", 0xFFFFFFFF, len(raised)) + raised


PROBLEM = json.dumps(
    {"error": {"type": "ValueError"}, "type": PROBLEM_BASE + "function-raised", "status": 500}
).encode()
QUOTED = b'{"type": "%s"}' % PROBLEM_BASE.encode()
LINES, EVENTS, PICKLES = (
    "application/x-ndjson",
    "text/event-stream; charset=utf-8",
    "application/vnd.pilotlight.pickle-stream",
)
PICKLED = [b"event: pickle\ndata: YWJj", b"event: pickle\ndata: ", b"event: exception\ndata: bm8="]
FAILED = [b"data: 1", b"event: error\ndata: {}"]
STREAMS = [
    pytest.param(LINES, b'1\n{"a":2}\n', [b"data: 1", b'data: {"a":2}'], id="lines"),
    pytest.param(
        LINES,
        b"1\n" + PROBLEM + b"\n",
        [b"data: 1", b"event: error\ndata: " + PROBLEM],
        id="a problem",
    ),
    pytest.param(
        LINES,
        b"[" * 100_000 + PROBLEM + b"\n",
        [b"data: " + b"[" * 100_000 + PROBLEM],
        id="an item nested without end",
    ),
    pytest.param(LINES, QUOTED + b"\n", [b"data: " + QUOTED], id="an item that quotes one"),
    pytest.param(
        EVENTS, b"data: 1\n\n: waiting\n\nevent: error\ndata: {}\n\n", FAILED, id="events"
    ),
    pytest.param(
        EVENTS,
        b"event: pickle\r\nid: 9-9\ndata: a\n\nevent:exception\ndata: b\n\nevent: own\ndata: c\n\n"
        b"data: d\nevent: res\rult\n\nid: 1\n\nevent:  end\ndata: e\n\n",
        [b"data: a", b"data: b", b"event: own\ndata: c", b"data: d", b"event:  end\ndata: e"],
        id="events that only the platform sends",
    ),
    pytest.param(PICKLES, pickles(b"abc", b"", raised=b"no"), PICKLED, id="pickles"),
]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("content_type, stream, items", STREAMS)
def test_items_are_found_however_they_come(
    content_type: str, stream: bytes, items: list[bytes], size: int
) -> None:
    cutter = cutter_of(content_type)
    assert cutter is not None

    assert [
        item for at in range(0, len(stream), size) for item in cutter.feed(stream[at : at + size])
    ] == items


def test_a_single_value_has_no_items() -> None:
    assert cutter_of("application/json") is None
