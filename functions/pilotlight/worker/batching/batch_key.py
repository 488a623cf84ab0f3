"""Which calls may share a batch: those of one method and priority, of about the same length, whose
arrays have the same shape.

Arrays are what has a `shape` and a `dtype` (numpy, torch, and whatever looks like them), as an
argument or as a value of a dictionary: a batch of them is stacked, so one odd shape would break it
for all. Lists are no arrays: to pad them is the body's business, and `buckets` keep those of very
different lengths apart."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

from pilotlight.spec.policies import BatchPolicy

PRIORITIES = {"realtime": 0, "standard": 1, "batch": 2}
"""By the header's word; lower goes first."""

Shapes = tuple[tuple[str, str, tuple[int, ...]], ...]


class BatchKey(NamedTuple):
    """What calls of one batch have in common.

    Attributes:
        method: its name.
        rank: of the calls' priority.
        bucket: number of the length bucket, 0 without any.
        shapes: of the arrays, by the place where they are.
    """

    method: str
    rank: int
    bucket: int
    shapes: Shapes

    @property
    def costs_like(self) -> tuple[str, int]:
        """Kinds with the same of this share what is known of the cost."""
        return self.method, self.bucket


def batch_key_for(
    method: str, policy: BatchPolicy, values: tuple[Any, ...], priority: bytes | None = None
) -> BatchKey:
    """The kind of a call with these values, one for each parameter; `priority` as its header says
    it."""
    rank = PRIORITIES.get(priority.decode("latin-1"), 1) if priority is not None else 1
    bucket = bisect_left(policy.buckets, _length(values[0])) if policy.buckets else 0
    return BatchKey(
        method, rank, bucket, tuple(sorted(_shapes(values, is_bucketed=bool(policy.buckets))))
    )


def _length(value: Any) -> int:
    """Of a text, a list, the first axis of an array; 0 where there is none."""
    try:
        return len(value) if isinstance(value, Sized) else 0
    except TypeError:  # an array without axes
        return 0


def _shapes(
    values: tuple[Any, ...], *, is_bucketed: bool
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for i, value in enumerate(values):
        # lengths within a bucket differ, and are padded by the body
        first_axis = 1 if is_bucketed and i == 0 else 0
        if (shape := _shape_of(value)) is not None:
            yield str(i), str(value.dtype), shape[first_axis:]
        elif isinstance(value, Mapping):
            for name, part in value.items():
                if (shape := _shape_of(part)) is not None:
                    yield f"{i}.{name}", str(part.dtype), shape[first_axis:]


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """Of an array; None for anything else, which may have a `shape` of another kind."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return None
    try:
        shape = tuple(value.shape)
        hash(shape)
    except (TypeError, ValueError):
        return None
    return shape
