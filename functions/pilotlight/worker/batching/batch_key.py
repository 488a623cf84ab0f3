"""Determines which calls may share a batch: those of one method and priority, of similar length,
whose arrays have the same shape.

Arrays are objects with a `shape` and a `dtype` (numpy, torch and similar), as an argument or as a
value of a dictionary: a batch of them is stacked, so one different shape would fail the whole
batch. Lists are not arrays: the body pads them, and `buckets` separate those of very different
lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

from pilotlight.spec.policies import BatchPolicy

PRIORITIES = {"realtime": 0, "standard": 1, "batch": 2}
"""Header value → rank; lower ranks run first."""

Shapes = tuple[tuple[str, str, tuple[int, ...]], ...]


class BatchKey(NamedTuple):
    """Common properties of the calls of one batch.

    Attributes:
        method: its name.
        rank: rank of the calls' priority.
        bucket: number of the length bucket; 0 without buckets.
        shapes: shapes of the arrays, by their position.
    """

    method: str
    rank: int
    bucket: int
    shapes: Shapes


def batch_key_for(
    method: str, policy: BatchPolicy, values: tuple[Any, ...], priority: bytes | None = None
) -> BatchKey:
    """The batch key of a call with these values, one per parameter; `priority` is the header's
    value."""
    rank = PRIORITIES.get(priority.decode("latin-1"), 1) if priority is not None else 1
    bucket = bisect_left(policy.buckets, _length(values[0])) if policy.buckets else 0
    return BatchKey(
        method, rank, bucket, tuple(sorted(_shapes(values, is_bucketed=bool(policy.buckets))))
    )


def _length(value: Any) -> int:
    """Length of a text, a list, or an array's first axis; 0 if there is none."""
    try:
        return len(value) if isinstance(value, Sized) else 0
    except TypeError:  # an array without axes
        return 0


def _shapes(
    values: tuple[Any, ...], *, is_bucketed: bool
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for i, value in enumerate(values):
        # lengths within a bucket differ; the body pads them
        first_axis = 1 if is_bucketed and i == 0 else 0
        if (shape := _shape_of(value)) is not None:
            yield str(i), str(value.dtype), shape[first_axis:]
        elif isinstance(value, Mapping):
            for name, part in value.items():
                if (shape := _shape_of(part)) is not None:
                    yield f"{i}.{name}", str(part.dtype), shape[first_axis:]


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """Shape of an array; None for other objects, whose `shape` may have another meaning."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return None
    try:
        shape = tuple(value.shape)
        hash(shape)
    except (TypeError, ValueError):
        return None
    return shape
