"""JSON documents: parsed as the prediction log has them, and with values at paths replaced."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pilotlight.validation.json_paths import Segment


def parse_document(body: bytes | str) -> Any:
    """Parse a document. What is no JSON (NaN, infinities), and a number beyond the doubles, is
    null. Raises ValueError; RecursionError for one that is nested too deep."""
    return json.loads(body, parse_constant=lambda _: None, parse_float=_finite)


def replace_values(document: Any, paths: Iterable[Sequence[Segment]], value: Any) -> Any:
    """Return the document with the values at these paths replaced. May change it in place."""
    holder = [document]
    for path in paths:
        _replace(holder, (Segment(0), *path), value)
    return holder[0]


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _replace(holder: Any, segments: Sequence[Segment], value: Any) -> None:
    """Replace what the segments lead to, below `holder`. Visits each value at most once for each
    segment."""
    level = [holder]
    for segment in segments[:-1]:
        found = (parent[key] for parent, key in _locations(level, segment))
        level = list({id(one): one for one in found if isinstance(one, dict | list)}.values())
    for parent, key in list(_locations(level, segments[-1])):
        parent[key] = value


def _locations(values: list[Any], segment: Segment) -> Iterator[tuple[Any, Any]]:
    """Yield (parent, key) of what a segment leads to from objects and lists."""
    for value in _descendants(values) if segment.is_deep else values:
        if isinstance(value, dict):
            keys = list(value) if segment.key is None else [segment.key]
            yield from ((value, key) for key in keys if key in value)
        elif segment.key is None:
            yield from ((value, index) for index in range(len(value)))
        elif isinstance(segment.key, int) and segment.key < len(value):
            yield value, segment.key


def _descendants(values: list[Any]) -> Iterator[Any]:
    """Yield these objects and lists and all in them, each once."""
    ahead, seen = list(values), set[int]()
    while ahead:
        value = ahead.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            inner = value.values() if isinstance(value, dict) else value
            ahead += [each for each in inner if isinstance(each, dict | list)]
