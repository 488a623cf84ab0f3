"""Datagrams with descriptors, and the queue in front of a slow peer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from snapshotter.shim import seqpacket
from snapshotter.shim.seqpacket import MessageTooLong, SendQueue


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_descriptors_travel_and_ours_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    readable, writable = os.pipe()
    SendQueue(pair[0]).push({"op": "start"}, [writable])
    message, fds = seqpacket.receive(pair[1])
    os.write(fds[0], b"through")

    assert message == {"op": "start"}
    assert os.read(readable, 10) == b"through"
    seqpacket.close_all(fds)
    assert os.read(readable, 10) == b""  # nobody else holds the writing end
    os.close(readable)


def test_a_slow_peer_makes_messages_wait_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    outbox = SendQueue(pair[0])
    for number in range(20):
        outbox.push({"n": number, "filler": "x" * 50_000})
    assert outbox
    got: list[int] = []
    while len(got) < 20:
        message, _ = seqpacket.receive(pair[1])
        assert message is not None
        got.append(message["n"])
        outbox.flush()
    assert got == list(range(20))


def test_a_peer_that_never_reads_is_cut_off(pair: tuple[socket.socket, socket.socket]) -> None:
    outbox = SendQueue(pair[0], limit=5)

    def flood() -> None:
        for _ in range(20):
            outbox.push({"filler": "x" * 100_000})

    with pytest.raises(OSError, match="does not read"):
        flood()
    assert not outbox


def test_a_message_too_long_is_refused_and_its_descriptors_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(MessageTooLong):
        SendQueue(pair[0]).push({"filler": "x" * seqpacket.MAX_DATAGRAM_BYTES}, [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_what_is_not_our_json_is_an_error_and_the_end_is_none(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    for raw in (b"[1]", b"{"):
        pair[0].send(raw)
        with pytest.raises(ValueError):
            seqpacket.receive(pair[1])
    pair[0].close()
    assert seqpacket.receive(pair[1]) == (None, [])


def test_brackets_without_end_are_no_message_and_their_descriptors_are_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    readable, writable = os.pipe()
    seqpacket.send(pair[0], b"[" * seqpacket.MAX_DATAGRAM_BYTES, [writable])
    os.close(writable)
    with pytest.raises(ValueError):
        seqpacket.receive(pair[1])
    assert os.read(readable, 1) == b""
    os.close(readable)
