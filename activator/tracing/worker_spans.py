"""Parses a worker's report of a call: its own time, and the spans of user code. The worker runs
user code, so everything is validated."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_BYTES = 8192
MAX_SPANS = 64
MAX_ATTRIBUTES = 16
MAX_CHARS = 256
MAX_MS = 7 * 86_400_000.0
_RESERVED = ("pilotlight.", "faas.", "http.", "url.")
"""Reserved attribute prefixes; user code's attributes with them are dropped."""
_ID = re.compile(r"(?!0{16})[0-9a-f]{16}\Z")


class ReportedSpan(NamedTuple):
    """One span of user code; times in ms from the begin of the call in the worker."""

    id: str
    parent: str
    name: str
    begin_ms: float
    ms: float
    error: str
    attributes: Mapping[str, str | int | float | bool]


class WorkerSpans(NamedTuple):
    """The worker's time for the call, its spans, and the number of dropped ones."""

    ms: float
    spans: tuple[ReportedSpan, ...]
    dropped: int


def parse(value: bytes) -> WorkerSpans | None:
    """Parse the header's value; None if it is empty or invalid."""
    if not value or len(value) > MAX_BYTES:
        return None
    try:
        body = json.loads(base64.b64decode(value, validate=True))
        rows = body["spans"][:MAX_SPANS]
        spans = tuple(_span(row) for row in rows)
        if len({span.id for span in spans}) < len(spans):
            return None
        return WorkerSpans(_time(body["ms"]), spans, min(_count(body["dropped"]), 10**6))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _span(row: Any) -> ReportedSpan:
    identity, parent, name, begin_ms, ms, error, attributes = row
    if not _ID.match(identity) or (parent and not _ID.match(parent)):
        raise ValueError("no id")
    named = ((_text(key), value) for key, value in list(attributes.items())[:MAX_ATTRIBUTES])
    own = {key: _attribute(value) for key, value in named if not key.startswith(_RESERVED)}
    return ReportedSpan(
        identity, parent, _text(name), _time(begin_ms), _time(ms), _text(error), own
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    # terminals display it, too
    return "".join(char if char.isprintable() else "?" for char in value[:MAX_CHARS])


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no time")
    return min(max(0.0, float(value)), MAX_MS)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("no count")
    return value


def _attribute(value: Any) -> str | int | float | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _text(value)
