"""Events as they are read, and what a submitted call's stream means."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from pilotlight.errors import ClientClosedRequest, DeadlineExceeded, FunctionRaised, PilotlightError, Unavailable
from pilotlight.protocol import PROBLEM_BASE, CallRecord
from pilotlight.sdk.answers import value_of_record
from pilotlight.sdk.events import CallItems, EventReader, ServerEvent
from pilotlight.sdk.pickling import dumps
from pilotlight.sdk.resumed import MAX_BREAKS, broken_streams

STREAM = (
    b": waiting\n\nevent: state\ndata: {}\n\nid: 1-1\ndata: 1\n\nid: 1-2\r\ndata: a\r\ndata: b\r\n\r\nevent: end\ndata:{}\n\ndata: half"
)
PROBLEM = {"type": PROBLEM_BASE + "function-raised", "status": 500, "detail": "no"}
RECORD = CallRecord(
    id="req-1", tenant="t", environment="main", app="a", function="f", method="", state="SUCCEEDED", sequence=1, submitted_at=0.0
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_are_read_however_their_bytes_come(size: int) -> None:
    reader = EventReader("0-0")
    events = [event for at in range(0, len(STREAM), size) for event in reader.feed(STREAM[at : at + size])]

    assert [(event.name, event.data, event.id) for event in events] == [
        ("state", "{}", "0-0"), ("", "1", "1-1"), ("", "a\nb", "1-2"), ("end", "{}", "1-2"),
    ]  # fmt: skip


def event(data: Any, name: str = "", id: str = "") -> ServerEvent:
    return ServerEvent(name=name, data=data if isinstance(data, str) else json.dumps(data), id=id)


def end(reason: str) -> ServerEvent:
    return event({"finish_reason": reason}, "end")


def read(*events: ServerEvent) -> list[Any]:
    items = CallItems("req-1")
    return [item for one in events for item in items.of(one)]


def test_items_are_values_of_json_or_of_pickles() -> None:
    pickled = base64.b64encode(dumps({1, 2})).decode()

    assert read(event({"a": 1}, id="1-1"), event(pickled, "pickle"), event("[DONE]"), end("stop")) == [{"a": 1}, {1, 2}]


def test_a_call_that_returns_has_one_item() -> None:
    record = {**RECORD.to_json(), "content_type": "application/json", "result": base64.b64encode(b"7").decode(), "status": 200}

    assert read(event({}, "state"), event(record, "result"), end("stop")) == [7]


@pytest.mark.parametrize(
    "events, raised",
    [
        ([event(PROBLEM, "error"), end("error")], FunctionRaised),
        ([event(base64.b64encode(dumps(KeyError("x"))).decode(), "exception"), end("error")], KeyError),
        ([event({"type": PROBLEM_BASE + "deadline-exceeded", "status": 504}, "error"), end("error")], DeadlineExceeded),
        ([end("cancelled")], ClientClosedRequest),
        ([end("length")], PilotlightError),
    ],
)
def test_what_a_call_raised_is_raised_at_its_end(events: list[ServerEvent], raised: type[Exception]) -> None:
    items = CallItems("req-1")
    assert list(items.of(event(1, id="1-1"))) == [1]
    for one in events[:-1]:
        assert list(items.of(one)) == []
    with pytest.raises(raised):
        list(items.of(events[-1]))
    assert items.is_over


def test_an_attempt_that_failed_and_was_made_again_is_no_failure() -> None:
    assert read(event(1), event(PROBLEM, "error"), event({}, "state"), event(1), event(2), end("stop")) == [1, 1, 2]


class Resumed:
    after = ""
    is_over = False


def test_a_stream_that_breaks_off_is_asked_for_again_while_it_brings_something() -> None:
    items = Resumed()
    turns = 0
    for _ in broken_streams(items):
        turns += 1
        items.after = str(turns)
        items.is_over = turns == 5 * MAX_BREAKS
    assert turns == 5 * MAX_BREAKS


def test_one_that_brings_nothing_is_given_up() -> None:
    with pytest.raises(Unavailable, match="broke off"):
        list(broken_streams(Resumed()))


def pickles(*items: Any) -> bytes:
    return b"".join(len(data).to_bytes(4, "big") + data for data in map(dumps, items))


def finished(content_type: str, body: bytes, **more: Any) -> CallRecord:
    return CallRecord.from_json({**RECORD.to_json(), "content_type": content_type, "result": base64.b64encode(body).decode(), **more})


def test_the_result_of_a_generator_is_the_list_of_its_items() -> None:
    assert value_of_record(finished("application/vnd.pilotlight.pickle-stream", pickles(1, {2}))) == [1, {2}]
    assert value_of_record(finished("application/x-ndjson", b'1\n{"a":2}\n')) == [1, {"a": 2}]


def test_the_result_of_a_generator_that_raised_raises() -> None:
    error = dumps(KeyError("x"))
    raised = pickles(1) + b"\xff\xff\xff\xff" + len(error).to_bytes(4, "big") + error
    failed = {"state": "FAILED", "status": 500, "outcome": "raised"}

    with pytest.raises(KeyError):
        value_of_record(finished("application/vnd.pilotlight.pickle-stream", raised, **failed))
    with pytest.raises(FunctionRaised, match="no"):
        value_of_record(finished("application/x-ndjson", b"1\n" + json.dumps(PROBLEM).encode() + b"\n", **failed))
