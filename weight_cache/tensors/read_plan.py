"""How a file's tensors are cut into the pieces that are read at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weight_cache.types import Tensor

PIECE_BYTES = 16 * 1024 * 1024
"""As long as a chunk of the store: long enough for the disk's full speed, short enough that a few
of them fit beside everything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """A stretch of one tensor inside a piece: from `at_bytes` of the piece, `from_bytes` of the
    tensor, `length_bytes` long."""

    tensor: Tensor
    at_bytes: int
    from_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPiece:
    """Bytes of a file that are read at once, and whose they are."""

    offset_bytes: int
    length_bytes: int
    parts: tuple[TensorSlice, ...]


def contiguous_runs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those that lie side by side, together; empty ones nowhere."""
    run: list[Tensor] = []
    for tensor in sorted((t for t in tensors if t.length_bytes), key=lambda t: t.offset_bytes):
        if run and run[-1].offset_bytes + run[-1].length_bytes != tensor.offset_bytes:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def plan_reads(tensors: Iterable[Tensor], *, piece_bytes: int = PIECE_BYTES) -> Iterator[ReadPiece]:
    """Pieces that end where the file's own chunks do, and that hold nothing but these tensors."""
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
    """Whose the bytes from `begin` to `stop` are; those that end before `stop` leave `waiting`,
    whose next is its last."""
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
