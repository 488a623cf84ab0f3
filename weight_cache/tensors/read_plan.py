"""Splits a file's tensors into pieces to read. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weight_cache.types import Tensor

PIECE_BYTES = 16 * 1024 * 1024
"""The size of a chunk of the store: large enough for the disk's full speed, small enough that a few
of them fit in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """A part of one tensor inside a piece: at `at_bytes` of the piece and `from_bytes` of the
    tensor, `length_bytes` long."""

    tensor: Tensor
    at_bytes: int
    from_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPiece:
    """A range of a file that is read at once, and the tensors in it."""

    offset_bytes: int
    length_bytes: int
    parts: tuple[TensorSlice, ...]


def contiguous_runs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of adjacent tensors; empty tensors are omitted."""
    run: list[Tensor] = []
    for tensor in sorted((t for t in tensors if t.length_bytes), key=lambda t: t.offset_bytes):
        if run and run[-1].offset_bytes + run[-1].length_bytes != tensor.offset_bytes:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def plan_reads(tensors: Iterable[Tensor], *, piece_bytes: int = PIECE_BYTES) -> Iterator[ReadPiece]:
    """Pieces that end at the file's chunk boundaries and contain only these tensors."""
    for run in contiguous_runs(tensors):
        begin, end = run[0].offset_bytes, run[-1].offset_bytes + run[-1].length_bytes
        waiting = list(reversed(run))
        while begin < end:
            stop = min(end, (begin // piece_bytes + 1) * piece_bytes)
            yield ReadPiece(
                offset_bytes=begin,
                length_bytes=stop - begin,
                parts=tuple(_tensor_slices(waiting, begin, stop)),
            )
            begin = stop


def _tensor_slices(waiting: list[Tensor], begin: int, stop: int) -> Iterator[TensorSlice]:
    """Split the bytes from `begin` to `stop` by tensor. `waiting` is a stack; tensors that end
    before `stop` are removed."""
    while waiting and waiting[-1].offset_bytes < stop:
        tensor = waiting[-1]
        first, end = (
            max(begin, tensor.offset_bytes),
            min(stop, tensor.offset_bytes + tensor.length_bytes),
        )
        yield TensorSlice(
            tensor=tensor,
            at_bytes=first - begin,
            from_bytes=first - tensor.offset_bytes,
            length_bytes=end - first,
        )
        if tensor.offset_bytes + tensor.length_bytes > stop:
            return
        waiting.pop()
