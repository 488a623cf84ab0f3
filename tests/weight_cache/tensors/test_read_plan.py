"""Pieces hold every byte of the tensors that are wanted, once, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weight_cache.tensors.read_plan import contiguous_runs, plan_reads
from weight_cache.types import Tensor


def laid_out(lengths: list[int], *, begin: int) -> list[Tensor]:
    tensors = []
    for n, length in enumerate(lengths):
        tensors.append(
            Tensor(
                name=str(n), dtype="U8", shape=(length,), offset_bytes=begin, length_bytes=length
            )
        )
        begin += length
    return tensors


def test_pieces_end_where_chunks_of_the_file_do() -> None:
    (a, b) = laid_out([10, 7], begin=5)
    pieces = list(plan_reads([b, a], piece_bytes=8))
    assert [(p.offset_bytes, p.length_bytes) for p in pieces] == [(5, 3), (8, 8), (16, 6)]
    assert [
        (part.tensor.name, part.at_bytes, part.from_bytes, part.length_bytes)
        for p in pieces
        for part in p.parts
    ] == [
        ("0", 0, 0, 3),
        ("0", 0, 3, 7),
        ("1", 7, 0, 1),
        ("1", 0, 1, 6),
    ]


def test_what_lies_apart_is_read_apart() -> None:
    (a, _, c) = laid_out([10, 100, 10], begin=0)
    assert [[t.name for t in run] for run in contiguous_runs([a, c])] == [["0"], ["2"]]
    assert list(plan_reads([])) == []


@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    begin=st.integers(0, 30),
    piece_bytes=st.integers(1, 32),
    wanted=st.sets(st.integers(0, 11)),
)
def test_every_wanted_byte_is_in_one_piece_once(
    lengths: list[int], begin: int, piece_bytes: int, wanted: set[int]
) -> None:
    tensors = [t for t in laid_out(lengths, begin=begin) if int(t.name) in wanted]
    seen: list[tuple[str, int]] = []
    for piece in plan_reads(tensors, piece_bytes=piece_bytes):
        assert 0 < piece.length_bytes <= piece_bytes
        at = 0
        for part in piece.parts:
            assert part.at_bytes == at  # no byte of a piece is nobody's
            assert part.tensor.offset_bytes + part.from_bytes == piece.offset_bytes + at
            seen += [(part.tensor.name, part.from_bytes + n) for n in range(part.length_bytes)]
            at += part.length_bytes
        assert at == piece.length_bytes
    assert sorted(seen) == sorted((t.name, n) for t in tensors for n in range(t.length_bytes))
