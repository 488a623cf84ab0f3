"""The activator's edge, over raw sockets. An input is what a client writes; `%%PAUSE%%` parts one
write from the next."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fakes.trees import remove_tree
from tests.fuzz.edge import PATIENCE_S, PAUSE, STILL_S, Answers, Listener, listening
from tests.fuzz.edge_words import AUTHORIZATION, BODIES, HEADERS, PATHS, WORDS
from tests.fuzz.fuzzing import Fuzzer, mutated, seeds


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    verb = draw(
        st.sampled_from(
            (
                b"POST",
                b"POST",
                b"GET",
                b"HEAD",
                b"PUT",
                b"OPTIONS",
                b"CONNECT",
                b"TRACE",
                b"get",
                b"M-SEARCH",
                b"X",
                b"",
            )
        )
    )
    version = draw(
        st.sampled_from(
            (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"")
        )
    )
    end = draw(st.sampled_from((b"\r\n", b"\r\n", b"\r\n", b"\n")))
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=6))
    head = (
        end.join([b" ".join((verb, draw(st.sampled_from(PATHS)), version)), *headers]) + end + end
    )
    return head + draw(st.sampled_from((b"", b"", PAUSE))) + draw(st.sampled_from(BODIES))


REQUESTS = st.lists(_request(), min_size=1, max_size=4).map(b"".join)


@pytest.fixture(name="exchange", scope="module")
def _exchange() -> Iterator[Exchange]:
    directory = Path(tempfile.mkdtemp(prefix="plfz"))
    with asyncio.Runner() as runner:
        context = listening(directory)
        listener = runner.run(context.__aenter__())
        yield Exchange(runner, listener)
        runner.run(context.__aexit__(None, None, None))
    remove_tree(directory)


class Exchange:
    """Call it with an input. `listener.received` is what workers were given.

    is_answered: there is an answer to wait for, however long it takes.
    """

    def __init__(self, runner: asyncio.Runner, listener: Listener) -> None:
        self._runner = runner
        self.listener = listener

    def __call__(self, data: bytes, *, is_answered: bool = False) -> Answers:
        return self._runner.run(
            self.listener.exchange(data, still_s=PATIENCE_S if is_answered else STILL_S)
        )


def test_corpus(seed_of_edge: bytes, exchange: Exchange) -> None:
    exchange(seed_of_edge)


def test_edge(fuzzer: Fuzzer, exchange: Exchange) -> None:
    def check(data: bytes) -> None:
        exchange(data)

    fuzzer.run("edge", REQUESTS | mutated(seeds("edge"), WORDS), check)


_CALL = b"POST /v1/functions/shop/hello:invoke HTTP/1.1\r\nhost: a\r\n" + AUTHORIZATION + b"\r\n"
_PAGE = b"POST /fn/shop/page/ HTTP/1.1\r\nhost: a\r\n" + AUTHORIZATION + b"\r\n"
_SECOND = b"POST /fn/shop/page/second HTTP/1.1\r\nhost: a\r\n" + AUTHORIZATION + b"\r\n\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 4\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 4",
        b"content-length: 4\r\ncontent-length: 5",
        b"content-length: 4\r\ncontent-length: 4",
        b"content-length: 4, 4",
        b"content-length: +4",
        b"content-length: 0x4",
        b"content-length: 4 4",
        b"content-length : 4",
        b"content-length: -4",
        b"content-length: 18446744073709551620",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding: identity",
        b"transfer-encoding: xchunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
        b"transfer-encoding: identity\r\ntransfer-encoding: chunked",
        b"transfer-encoding: \x0bchunked",
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding : chunked",
        b"x: y\r\n transfer-encoding: chunked",
        b"host: b",
        b"x: y\nz: w",
        b"x: y\rz: w",
        b"x: y\0",
        b"x y: z",
        b"content-length: 4\r\nx\0: y",
    ],
)
@pytest.mark.parametrize("head", [_CALL, _PAGE], ids=["call", "page"])
def test_a_request_whose_end_or_host_can_be_read_in_two_ways_is_refused(
    exchange: Exchange, head: bytes, fields: bytes
) -> None:
    answers = exchange(head + fields + b"\r\n\r\n" + b"0\r\n\r\n" + _SECOND, is_answered=True)

    assert answers.statuses == [400]
    assert exchange.listener.received == []


@pytest.mark.parametrize("head", [_CALL, _PAGE], ids=["call", "page"])
@pytest.mark.parametrize(
    "version, host, status",
    [(b"1.1", b"", 400), (b"1.1", b"host:\r\n", 200), (b"1.0", b"", 200)],
    ids=["1.1 without", "1.1 with an empty one", "1.0 without"],
)
def test_http_1_1_needs_a_host(
    exchange: Exchange, head: bytes, version: bytes, host: bytes, status: int
) -> None:
    """RFC 9112, section 3.2."""
    head = head.replace(b"HTTP/1.1", b"HTTP/" + version).replace(b"host: a\r\n", host)

    assert exchange(head + b'content-length: 7\r\n\r\n{"x":1}', is_answered=True).statuses == [
        status
    ]


@pytest.mark.parametrize(
    "second",
    [
        b"\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
@pytest.mark.parametrize("pause", [b"", PAUSE])
@pytest.mark.parametrize("head", [_CALL, _PAGE], ids=["call", "page"])
def test_what_is_wrong_behind_a_request_is_not_its_answer(
    exchange: Exchange, head: bytes, pause: bytes, second: bytes
) -> None:
    """Answers are known by their order alone (RFC 9112, section 9.3.2)."""
    answers = exchange(
        head + b'content-length: 7\r\n\r\n{"x":1}' + pause + second, is_answered=True
    )

    assert answers.statuses[0] == 200
    assert answers.statuses[1:] in ([], [400], [431])


def test_a_body_that_is_wrong_is_the_answer_of_its_request(exchange: Exchange) -> None:
    assert exchange(
        _CALL + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n" + PAUSE + b"zz\r\n",
        is_answered=True,
    ).statuses == [400]
