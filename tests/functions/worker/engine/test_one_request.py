"""The heads of the one request of a connection to a web server."""

from __future__ import annotations

import json

from pilotlight.worker.engine.one_request import OneRequest, refusal


def asked(verb: bytes = b"GET") -> OneRequest:
    """One whose request was sent."""
    one = OneRequest()
    one.request(verb + b" /asgi/x HTTP/1.1\r\nhost: a\r\n\r\n")
    return one


def test_the_server_sees_its_own_path_and_one_request() -> None:
    head = b"POST /asgi/jobs?a=/asgi HTTP/1.1\r\nHost: a\r\nKeep-Alive: 5\r\nconnection: x\r\n\r\n"
    assert OneRequest().request(head) == (
        b"POST /jobs?a=/asgi HTTP/1.1\r\nHost: a\r\nconnection: close\r\n\r\n"
    )
    for target, seen in ((b"/asgi", b"/"), (b"/asgi?a=1", b"/?a=1"), (b"/asgi//b", b"//b")):
        assert OneRequest().request(b"GET " + target + b" HTTP/1.1\r\n\r\n").split()[1] == seen


def test_a_websocket_stays_one_in_both_directions() -> None:
    one = OneRequest()
    head = b"GET /asgi/s HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert one.request(head) == head.replace(b"/asgi", b"")
    answer = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n\r\n\x81\x02hi"
    assert one.response(answer) + one.response(b"\x88\x00") + one.end() == answer + b"\x88\x00"


def test_a_response_with_a_length_ends_its_connection() -> None:
    one = asked()
    whole = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\ncontent-length: 2\r\n\r\nok"
    got = b"".join(one.response(whole[at : at + 1]) for at in range(len(whole))) + one.end()
    assert got == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"


def test_a_response_that_ends_with_its_connection_is_chunked() -> None:
    one = asked()
    got = one.response(b"HTTP/1.0 200 OK\r\n\r\nhello") + one.response(b" you") + one.end()
    assert got == (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        b"5\r\nhello\r\n4\r\n you\r\n0\r\n\r\n"
    )


def test_a_response_without_a_body_is_not() -> None:
    for one, first in ((asked(b"HEAD"), b"HTTP/1.0 200 OK"), (asked(), b"HTTP/1.1 304 Same")):
        assert one.response(first + b"\r\n\r\n") == first + b"\r\nconnection: close\r\n\r\n"
        assert one.end() == b""


def test_an_interim_response_is_followed_by_another() -> None:
    one = asked(b"POST")
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    got = one.response(interim + b"HTTP/1.1 204 Done\r\n") + one.response(b"\r\n")
    assert got == interim + b"HTTP/1.1 204 Done\r\nconnection: close\r\n\r\n"


def test_what_is_not_http_is_forwarded_as_it_is() -> None:
    one, other = asked(), asked()
    assert one.response(b"x" * 70_000) + one.response(b"y") + one.end() == b"x" * 70_000 + b"y"
    assert other.response(b"220 ready") + other.end() == b"220 ready"


def test_a_call_of_a_method_is_refused() -> None:
    head, _, body = refusal(b"POST /invoke/rank HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert b"content-length: %d\r\n" % len(body) in head
    assert "web server" in json.loads(body)["detail"]
    assert refusal(b"GET /asgi?x HTTP/1.1\r\n\r\n") == b""
    assert refusal(b"GET /asgis HTTP/1.1\r\n\r\n") != b""
