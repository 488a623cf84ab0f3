"""W3C trace context (https://www.w3.org/TR/trace-context/): the trace that a caller's request
belongs to.

A call without one begins its own trace, whose ids are derived from the call's id: so they cost
nothing, the worker computes them itself, and the call's id identifies the trace. (The last 80 bits
of a call's id are random, as level 2 of the recommendation requires.) Immutable, standard library
only."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

MAX_STATE_BYTES = 512
"""Limit of a propagated `tracestate`; the recommendation requires at least this (§3.3.1.5)."""
MAX_MEMBER_BYTES = 128
"""Longer members are removed first if there is too much."""
_MAX_MEMBERS = 32
_PARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-|\Z)"
)
_LENGTH = 55
"""Length of version 00; later versions may continue after another dash."""
_ODD = frozenset("13579bdf")
_KEY = rb"(?:[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}|[a-z0-9][a-z0-9_\-*/]{0,255})"
_MEMBER = re.compile(
    _KEY + rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]\Z"
)
_CALL = re.compile(r"req-(?!0{32})[0-9a-f]{32}\Z")
_NO_SPAN = "0" * 16
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: its first 2^64 multiples modulo 2^64 are distinct (Knuth,
vol. 3, §6.4)."""
_SILVER = 0xD1B54A32D192ED03
"""Another odd number, so that ids of attempts and children do not collide."""
_MASK = 2**64 - 1


class TraceParent(NamedTuple):
    """The calling span: ids as lower-case hex of 32 and 16 digits."""

    trace_id: str
    span_id: str
    is_sampled: bool
    """The caller keeps this trace: the lowest bit of the flags."""


def parse_traceparent(traceparent: bytes) -> TraceParent | None:
    """Parse a `traceparent` header; None if it is invalid (§3.2.2): then a new trace begins, and
    `tracestate` is ignored."""
    value = traceparent.strip(b" \t")
    if _PARENT.match(value) is None or (len(value) > _LENGTH and value.startswith(b"00")):
        return None
    text = value[:_LENGTH].decode()
    return TraceParent(text[3:35], text[36:52], text[54] in _ODD)


def forwarded_tracestate(tracestate: bytes) -> bytes:
    """The part of a `tracestate` to propagate: all of it, or whole members up to MAX_STATE_BYTES;
    nothing if it is invalid."""
    members = [member.strip(b" \t") for member in tracestate.split(b",")]
    members = [member for member in members if member]
    keys = {member.partition(b"=")[0] for member in members}
    if (
        len(members) > _MAX_MEMBERS
        or len(keys) < len(members)
        or not all(map(_MEMBER.match, members))
    ):
        return b""
    if len(b",".join(members)) > MAX_STATE_BYTES:
        members = [member for member in members if len(member) <= MAX_MEMBER_BYTES]
    while len(b",".join(members)) > MAX_STATE_BYTES:
        members.pop()
    return b",".join(members)


def trace_id_for_call(call_id: str) -> str:
    """The id of the trace that a call begins if its caller has none."""
    return (
        call_id[4:]
        if _CALL.match(call_id)
        else hashlib.blake2b(call_id.encode(), digest_size=16).hexdigest()
    )


def root_span_id(call_id: str) -> str:
    """The id of the span of the whole call."""
    return trace_id_for_call(call_id)[16:]


def attempt_span_id(call_id: str, attempt: int = 1) -> str:
    """The id of the span of one attempt's execution, the parent of the function's own spans."""
    span_id = trace_id_for_call(call_id)[12:28]
    if attempt == 1 and span_id != _NO_SPAN:
        return span_id
    first = int(span_id, 16)
    return f"{(first + (attempt - 1) * _SILVER) & _MASK or 1:016x}"


def child_span_id(span_id: str, number: int) -> str:
    """The id of the `number`th child of a span, from 1."""
    return f"{(int(span_id, 16) + number * _GOLDEN) & _MASK or 1:016x}"


def format_traceparent(trace_id: str, span_id: str, *, is_sampled: bool) -> str:
    """Format a `traceparent` header."""
    return f"00-{trace_id}-{span_id}-{'01' if is_sampled else '00'}"
