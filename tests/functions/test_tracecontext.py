"""`format_traceparent` and `tracestate` are read as the W3C's recommendation says:
https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.core.tracing.trace_context import (
    TraceParent,
    attempt_span_id,
    child_span_id,
    format_traceparent,
    forwarded_tracestate,
    parse_traceparent,
    root_span_id,
    trace_id_for_call,
)
from pilotlight.protocol import new_call_id

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def header(
    version: str = "00", trace: str = TRACE, span: str = SPAN, flags: str = "01", rest: str = ""
) -> bytes:
    return f"{version}-{trace}-{span}-{flags}{rest}".encode()


@pytest.mark.parametrize(
    "flags, is_sampled", [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_only_the_first_bit_of_the_flags_says_sampled(flags: str, is_sampled: bool) -> None:
    assert parse_traceparent(header(flags=flags)) == TraceParent(TRACE, SPAN, is_sampled)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"00",
        header(version="ff"),
        header(version="0"),
        header(version="0g"),
        header(trace="0" * 32),
        header(span="0" * 16),
        header(trace=TRACE.upper()),
        header(trace=TRACE[:-1]),
        header(span=SPAN + "0"),
        header(flags="1"),
        header(flags="0x"),
        header(rest="-more"),  # version 00 ends here
        header(rest="."),
        header(version="01", rest="more"),
        header() + b"\n" + header(),
        header() + b"," + header(),
        b"\xff" * 55,
    ],
)
def test_what_is_no_traceparent_is_none(broken: bytes) -> None:
    assert parse_traceparent(broken) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert (
        parse_traceparent(header(version="cc"))
        == parse_traceparent(header(version="cc", rest="-what-the-future-brings"))
        == TraceParent(TRACE, SPAN, True)
    )


def test_blanks_around_the_value_are_no_part_of_it() -> None:
    assert parse_traceparent(b" \t" + header() + b" ") == TraceParent(TRACE, SPAN, True)


@given(st.binary(max_size=80))
def test_no_bytes_break_the_parser(text: bytes) -> None:
    found = parse_traceparent(text)
    assert (
        found is None
        or parse_traceparent(format_traceparent(*found[:2], is_sampled=found.is_sampled).encode())
        == found
    )


@pytest.mark.parametrize(
    "state",
    [
        b"congo=t61rcWkgMzE",
        b"rojo=1,congo=2",
        b"tenant@vendor=x",
        b"a_-*/1=!~",
        b"k=v with blanks",
        b"0=1",
    ],
)
def test_a_good_state_goes_on_as_it_came(state: bytes) -> None:
    assert forwarded_tracestate(state) == state


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"  ",
        b",",
        b"A=1",
        b"a=1,a=2",
        b"a=1;b=2,=3",
        b"a",
        b"a=\x00",
        b"a=b=c",
        b"k" * 257 + b"=1",
    ],
)
def test_a_broken_state_is_dropped_whole(state: bytes) -> None:
    assert forwarded_tracestate(state) == b""


def test_empty_members_and_blanks_between_members_are_allowed() -> None:
    assert forwarded_tracestate(b"a=1 , ,b=2,") == b"a=1,b=2"


def test_a_state_of_more_than_32_members_is_dropped() -> None:
    assert forwarded_tracestate(b",".join(b"k%d=1" % n for n in range(33))) == b""


def test_a_long_state_loses_its_long_members_first_then_the_last() -> None:
    members = [b"k%d=" % n + b"x" * 40 for n in range(10)]
    long = b"long=" + b"x" * 200
    kept = forwarded_tracestate(b",".join([long, *members])).split(b",")
    assert kept == members
    kept = forwarded_tracestate(
        b",".join([*members, *(b"m%d=" % n + b"y" * 40 for n in range(10))])
    ).split(b",")
    assert kept == [*members, b"m0=" + b"y" * 40]


def test_a_call_that_is_in_no_trace_begins_the_one_of_its_own_id() -> None:
    call = new_call_id()
    assert trace_id_for_call(call) == call.removeprefix("req-")
    assert root_span_id(call) == call[-16:]


def test_any_id_of_a_call_makes_valid_ids() -> None:
    for odd in ("", "req-", "req-" + "0" * 32, "mine", "req-" + "G" * 32):
        assert (
            parse_traceparent(
                format_traceparent(
                    trace_id_for_call(odd), root_span_id(odd), is_sampled=True
                ).encode()
            )
            is not None
        )


def test_spans_of_attempts_and_their_children_differ() -> None:
    call = new_call_id()
    attempts = [attempt_span_id(call, n) for n in range(1, 40)]
    children = [
        child_span_id(one, n) for one in (root_span_id(call), *attempts) for n in range(1, 70)
    ]
    assert len({*attempts, *children, root_span_id(call)}) == len(attempts) + len(children) + 1
