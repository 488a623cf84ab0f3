"""Layout of a trace as rows: spans below their parents in order of their begin, each with its share
of the total time. Pure.

Invalid API responses are tolerated: a span with a missing parent becomes a root, a cycle is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 32
"""Deeper spans are shown at this depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRow:
    """One row.

    Attributes:
        depth: 0 for a root.
        begin, width: shares of the whole time, 0 to 1.
    """

    span: Mapping[str, Any]
    depth: int
    begin: float
    width: float


def layout_spans(trace: Mapping[str, Any]) -> list[SpanRow]:
    """The rows of a trace (response of `GET /v1/traces/{id}`)."""
    spans: Sequence[Mapping[str, Any]] = trace["spans"]
    whole_ms = max((span["begin_ms"] + span["ms"] for span in spans), default=0.0) or 1.0
    return [
        SpanRow(
            span=span,
            depth=min(depth, MAX_DEPTH),
            begin=min(span["begin_ms"] / whole_ms, 1.0),
            width=min(span["ms"] / whole_ms, 1.0),
        )
        for depth, span in _ordered(spans)
    ]


def _ordered(spans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    ids = {span["id"] for span in spans}
    children: dict[str, list[Mapping[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: float(span["begin_ms"])):
        parent = span["parent"] if span["parent"] in ids and span["parent"] != span["id"] else ""
        children.setdefault(parent, []).append(span)
    shown: set[int] = set()
    waiting = [(0, span) for span in reversed(children.get("", []))]
    left = iter(spans)  # spans in a cycle: the first of them becomes its root
    while True:
        while waiting:
            depth, span = waiting.pop()
            if id(span) in shown:
                continue
            shown.add(id(span))
            yield depth, span
            waiting += [(depth + 1, child) for child in reversed(children.get(span["id"], []))]
        rest = next((span for span in left if id(span) not in shown), None)
        if rest is None:
            return
        waiting.append((0, rest))
