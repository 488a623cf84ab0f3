"""What a node agent and an activator say to each other about the calls of a pod."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.core.transport.pod_calls import (
    END,
    Answer,
    FrameReader,
    PodAnswer,
    PodStatement,
    frame,
)

UID = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"


def test_statements_and_answers_are_parsed_as_they_were_sent() -> None:
    statement = PodStatement("t-1", UID)
    assert PodStatement.parse(statement.to_line()) == statement
    answer = PodAnswer(Answer.REFUSED, "x" * 600)
    assert PodAnswer.parse(answer.to_line()) == PodAnswer(Answer.REFUSED, "x" * 500)


@pytest.mark.parametrize("line", [b"", b"1", b"{}", b'{"answer": "maybe"}', b"\xff"])
def test_what_is_no_answer_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        PodAnswer.parse(line)


@given(st.lists(st.binary(min_size=1, max_size=50)), st.binary(max_size=9), st.integers(1, 20))
def test_frames_arrive_whole_however_they_are_cut(
    pieces: list[bytes], after: bytes, step: int
) -> None:
    sent = b"".join(map(frame, pieces)) + END + after
    reader, payload, rest = FrameReader(), b"", b""
    for at in range(0, len(sent), step):
        part = sent[at : at + step]
        if reader.is_complete:
            rest += part
        else:
            got, rest = reader.feed(part)
            payload += got
    assert (payload, rest) == (b"".join(pieces), after)
    assert reader.is_complete


def test_a_large_write_is_several_frames_and_a_frame_over_the_limit_is_refused() -> None:
    large = b"x" * 600_000
    assert FrameReader().feed(frame(large)) == (large, b"")
    with pytest.raises(ValueError, match="over the limit"):
        FrameReader().feed(b"\xff\xff\xff\xff")
