"""Heads that no node of ours writes."""

from __future__ import annotations

import asyncio

import pytest

from weight_cache.peers import http1


def heard(text: str) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=http1.MAX_HEAD_BYTES)
    reader.feed_data(text.encode("latin-1"))
    reader.feed_eof()
    return reader


@pytest.mark.parametrize("length", ["\xb2", "9" * 5000, "-1", "+1", "1_0", "", "0x1"])
async def test_a_length_that_is_none_is_the_peers_fault_and_not_ours(length: str) -> None:
    with pytest.raises(http1.ProtocolViolation):
        await http1.read_head(heard(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"))


@pytest.mark.parametrize("status", ["\xb2", "9" * 5000, "OK"])
async def test_a_status_that_is_none(status: str) -> None:
    with pytest.raises(http1.ProtocolViolation):
        await http1.read_head(heard(f"HTTP/1.1 {status} OK\r\nContent-Length: 0\r\n\r\n"))


async def test_what_our_nodes_write() -> None:
    head = await http1.read_head(
        heard(http1.response_head(303, 7, {"Pilotlight-At": "n"}).decode())
    )
    assert (head.status, head.length_bytes, head.headers["pilotlight-at"]) == (303, 7, "n")
