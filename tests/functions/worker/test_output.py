"""Marked lines on a real pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from pilotlight.worker.user_code import output
from pilotlight.worker.user_code.output import CALL, MAX_PENDING, PIPE_BUF, LineWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, LineWriter]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, LineWriter(writing)
    for descriptor in (reading, writing):
        os.close(descriptor)


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return b""


def test_lines_are_written_whole_and_at_once(pipe: tuple[int, LineWriter]) -> None:
    reading, stream = pipe
    print("a", 1, file=stream)
    assert read(reading) == b"a 1\n"
    stream.write("half")
    assert read(reading) == b""
    stream.write(" and half\nrest")
    assert read(reading) == b"half and half\n"
    stream.end_call("")
    assert read(reading) == b"rest\n"


def test_each_line_of_a_call_is_marked_and_calls_do_not_mix(pipe: tuple[int, LineWriter]) -> None:
    reading, stream = pipe
    token = CALL.set("req-1")
    stream.write("one\ntwo\nthree")
    CALL.reset(token)
    stream.write("outside\n")
    assert read(reading) == b"\x1ereq-1\x1fone\n\x1ereq-1\x1ftwo\noutside\n"
    stream.end_call("req-1")
    assert read(reading) == b"\x1ereq-1\x1fthree\n"


def test_of_a_progress_bar_the_last_state_stays(pipe: tuple[int, LineWriter]) -> None:
    reading, stream = pipe
    for i in range(100):
        stream.write(f"\r{i} %")
    stream.write("\n")
    assert read(reading) == b"99 %\n"


def test_an_endless_line_is_not_kept_for_ever(pipe: tuple[int, LineWriter]) -> None:
    reading, stream = pipe
    stream.write("x" * (MAX_PENDING + 1))
    assert len(read(reading)) == MAX_PENDING + 2


def test_many_lines_are_cut_between_lines(pipe: tuple[int, LineWriter]) -> None:
    reading, stream = pipe
    stream.write("y" * 99 + "\n" + ("x" * 99 + "\n") * (PIPE_BUF // 100 * 2))
    assert read(reading).count(b"\n") == 1 + PIPE_BUF // 100 * 2


def test_the_byte_side_and_odd_text(pipe: tuple[int, LineWriter]) -> None:
    reading, stream = pipe
    stream.buffer.write(b"bytes \xff\n")
    stream.write("\ud800\n")
    assert read(reading) == b"bytes \\xff\n\\ud800\n"


def test_a_reader_that_is_gone_does_not_break_a_print() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = LineWriter(writing)
    stream.write("nobody hears this\n")
    os.close(writing)


def test_the_end_of_a_call_leaves_other_streams_alone(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, LineWriter]
) -> None:
    reading, stream = pipe
    monkeypatch.setattr(sys, "stdout", stream)
    stream.write("open")
    output.end_call("some other call")
    assert read(reading) == b""
    output.finish()
    assert read(reading) == b"open\n"
