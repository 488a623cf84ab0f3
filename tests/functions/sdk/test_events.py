"""Events as they are read, and what a submitted call's stream means."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from pilotlight.client.pickling import dumps
from pilotlight.client.responses import (
    CallResponse,
    NdjsonItemReader,
    call_headers,
    item_reader_for,
    may_unpickle,
    parse_record_result,
    parse_result,
)
from pilotlight.client.sse import CallStreamItems, ServerSentEvent, SseParser
from pilotlight.client.stream_resume import MAX_DISCONNECTS, reconnect_attempts
from pilotlight.errors import (
    ClientClosedRequest,
    DeadlineExceeded,
    FunctionRaised,
    PilotlightError,
    RemoteError,
    Unavailable,
)
from pilotlight.protocol import CONTENT_PICKLE, PROBLEM_BASE, CallRecord
from tests.fakes.marking_pickle import MarkingPickle

STREAM = (
    b": waiting\n\nevent: state\ndata: {}\n\nid: 1-1\ndata: 1\n\nid: 1-2\r\ndata: a\r\ndata: "
    b"b\r\n\r\nevent: end\ndata:{}\n\ndata: half"
)
PROBLEM = {"type": PROBLEM_BASE + "function-raised", "status": 500, "detail": "no"}
RECORD = CallRecord(
    id="req-1",
    tenant="t",
    environment="main",
    app="a",
    function="f",
    method="",
    state="SUCCEEDED",
    sequence=1,
    submitted_at=0.0,
)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_are_read_however_their_bytes_come(size: int) -> None:
    reader = SseParser("0-0")
    events = [
        event for at in range(0, len(STREAM), size) for event in reader.feed(STREAM[at : at + size])
    ]

    assert [(event.name, event.data, event.id) for event in events] == [
        ("state", "{}", "0-0"),
        ("", "1", "1-1"),
        ("", "a\nb", "1-2"),
        ("end", "{}", "1-2"),
    ]


def event(data: Any, name: str = "", id: str = "") -> ServerSentEvent:
    return ServerSentEvent(
        name=name, data=data if isinstance(data, str) else json.dumps(data), id=id
    )


def end(reason: str) -> ServerSentEvent:
    return event({"finish_reason": reason}, "end")


def read(*events: ServerSentEvent) -> list[Any]:
    items = CallStreamItems("req-1")
    return [item for one in events for item in items.of(one)]


def test_items_are_values_of_json_or_of_pickles() -> None:
    pickled = base64.b64encode(dumps({1, 2})).decode()

    assert read(
        event({"a": 1}, id="1-1"), event(pickled, "pickle"), event("[DONE]"), end("stop")
    ) == [{"a": 1}, {1, 2}]


def test_a_call_that_returns_has_one_item() -> None:
    record = {
        **RECORD.to_json(),
        "content_type": "application/json",
        "result": base64.b64encode(b"7").decode(),
        "status": 200,
    }

    assert read(event({}, "state"), event(record, "result"), end("stop")) == [7]


@pytest.mark.parametrize(
    "events, raised",
    [
        ([event(PROBLEM, "error"), end("error")], FunctionRaised),
        (
            [event(base64.b64encode(dumps(KeyError("x"))).decode(), "exception"), end("error")],
            KeyError,
        ),
        (
            [
                event({"type": PROBLEM_BASE + "deadline-exceeded", "status": 504}, "error"),
                end("error"),
            ],
            DeadlineExceeded,
        ),
        ([end("cancelled")], ClientClosedRequest),
        ([end("length")], PilotlightError),
    ],
)
def test_what_a_call_raised_is_raised_at_its_end(
    events: list[ServerSentEvent], raised: type[Exception]
) -> None:
    items = CallStreamItems("req-1")
    assert list(items.of(event(1, id="1-1"))) == [1]
    for one in events[:-1]:
        assert list(items.of(one)) == []
    with pytest.raises(raised):
        list(items.of(events[-1]))
    assert items.is_over


def test_an_attempt_that_failed_and_was_made_again_is_no_failure() -> None:
    assert read(
        event(1), event(PROBLEM, "error"), event({}, "state"), event(1), event(2), end("stop")
    ) == [1, 1, 2]


class Resumed:
    after = ""
    is_over = False


def test_a_stream_that_breaks_off_is_asked_for_again_while_it_brings_something() -> None:
    items = Resumed()
    turns = 0
    for _ in reconnect_attempts(items):
        turns += 1
        items.after = str(turns)
        items.is_over = turns == 5 * MAX_DISCONNECTS
    assert turns == 5 * MAX_DISCONNECTS


def test_one_that_brings_nothing_is_given_up() -> None:
    with pytest.raises(Unavailable, match="broke off"):
        list(reconnect_attempts(Resumed()))


def pickles(*items: Any) -> bytes:
    return b"".join(len(data).to_bytes(4, "big") + data for data in map(dumps, items))


def finished(content_type: str, body: bytes, **more: Any) -> CallRecord:
    return CallRecord.from_json(
        {
            **RECORD.to_json(),
            "content_type": content_type,
            "result": base64.b64encode(body).decode(),
            **more,
        }
    )


def test_the_result_of_a_generator_is_the_list_of_its_items() -> None:
    assert parse_record_result(
        finished("application/vnd.pilotlight.pickle-stream", pickles(1, {2}))
    ) == [1, {2}]
    assert parse_record_result(finished("application/x-ndjson", b'1\n{"a":2}\n')) == [1, {"a": 2}]


def test_the_result_of_a_generator_that_raised_raises() -> None:
    error = dumps(KeyError("x"))
    raised = pickles(1) + b"\xff\xff\xff\xff" + len(error).to_bytes(4, "big") + error
    failed = {"state": "FAILED", "status": 500, "outcome": "raised"}

    with pytest.raises(KeyError):
        parse_record_result(finished("application/vnd.pilotlight.pickle-stream", raised, **failed))
    with pytest.raises(FunctionRaised, match="no"):
        parse_record_result(
            finished(
                "application/x-ndjson", b"1\n" + json.dumps(PROBLEM).encode() + b"\n", **failed
            )
        )


# -- pickles that the call did not ask for ---------------------------------------------------------
@pytest.fixture(name="marking")
def _marking(tmp_path: Path) -> MarkingPickle:
    return MarkingPickle(tmp_path / "opened")


@pytest.mark.parametrize(
    "status, outcome", [(200, "ok"), (500, "raised"), (200, "raised"), (500, "ok")]
)
@pytest.mark.parametrize("content_type", [CONTENT_PICKLE, f"{CONTENT_PICKLE}; a=b"])
def test_an_answer_is_not_unpickled_where_a_pickle_was_not_asked_for(
    marking: MarkingPickle, status: int, outcome: str, content_type: str
) -> None:
    headers = {"content-type": content_type, "pilotlight-outcome": outcome}
    with pytest.raises(PilotlightError):
        parse_result(status, headers, marking.body, pickles=False)
    with pytest.raises(PilotlightError):
        CallResponse(status=status, headers=headers, body=marking.body).value()
    assert not marking.was_opened


@pytest.mark.parametrize("content_type", [CONTENT_PICKLE, f"{CONTENT_PICKLE}-stream"])
@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED"])
def test_neither_is_a_submitted_calls_result(
    marking: MarkingPickle, content_type: str, state: str
) -> None:
    body = (
        len(marking.body).to_bytes(4, "big") + marking.body
        if content_type.endswith("stream")
        else marking.body
    )
    record = finished(content_type, body, state=state)
    with pytest.raises(PilotlightError):
        parse_record_result(record, pickles=False)

    data = base64.b64encode(marking.body).decode()
    streams = [
        [event(data, "pickle")],
        [event(data, "exception"), end("error")],
        [event(json.dumps(record.to_json()), "result")],
    ]
    for events in streams:
        items = CallStreamItems("req-1", pickles=False)
        with pytest.raises(PilotlightError):
            _ = [item for one in events for item in items.of(one)]
    with pytest.raises(PilotlightError):
        item_reader_for(content_type, pickles=False)
    assert not marking.was_opened


def test_only_a_pickle_to_a_function_of_ones_own_is_answered_with_one() -> None:
    assert may_unpickle(call_headers(streams=False), "")
    assert not may_unpickle(call_headers(streams=False), "acme")
    assert not may_unpickle(call_headers(streams=False, pickles=False), "")
    assert not may_unpickle({"accept": CONTENT_PICKLE}, "")


def test_lines_are_read_in_whatever_pieces_they_come() -> None:
    reader = NdjsonItemReader()
    assert [
        item for piece in (b'1\n{"a"', b": 2}", b'\n\n"x"\n[') for item in reader.feed(piece)
    ] == [1, {"a": 2}, "x"]
    with pytest.raises(RemoteError, match="in the middle of an item"):
        reader.close()
    assert list(reader.feed(b"]\n")) == [[]]
    reader.close()
    with pytest.raises(PilotlightError):
        list(reader.feed(json.dumps(PROBLEM).encode() + b"\n"))
