"""Content codings of bodies (RFC 9110, section 8.4): of requests, decoded within their limit, and
of JSON answers, compressed for callers that accept it.

Both work in steps of a millisecond or less, between which the event loop runs other tasks."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from pilotlight import errors

ACCEPTED: Final = "gzip, deflate"
"""Content codings of request bodies, for the header `Accept-Encoding` of a 415."""
MIN_COMPRESSED_BYTES: Final = 8 * 1024
"""Smaller answers are sent as they are: they save at most some packets."""
MAX_COMPRESSED_BYTES: Final = 1024 * 1024
"""Larger answers are sent as they are: they would take 10 ms and more of the processor."""
_WINDOW: Final = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""zlib's `wbits`: deflate is the zlib format (RFC 9110, section 8.4.1.2)."""
_LEVEL: Final = 1
_IN_BYTES: Final = 64 * 1024
_OUT_BYTES: Final = 256 * 1024
_NOT_ACCEPTED: Final = frozenset({b"q=0", b"q=0.0", b"q=0.00", b"q=0.000"})


def coding_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the content coding of a request's body; b"" for none. Raises UnsupportedMediaType."""
    given = headers.get(b"content-encoding", b"").strip().lower()
    if given in (b"", b"identity"):
        return b""
    if given not in _WINDOW:
        shown = given[:80].decode("latin-1")
        raise errors.UnsupportedMediaType(
            f"content-encoding {shown!r} is not supported: send one of {ACCEPTED}, or none",
            parameter="content-encoding",
            accept_encoding=ACCEPTED,
        )
    return given


async def decode(
    body: bytes, coding: bytes, *, limit_bytes: int, acquire: Callable[[int], None] | None
) -> bytes:
    """Return the decoded body. `limit_bytes`: of the decoded body. `acquire`: reserves memory for
    each part of it.

    Raises TooLarge as soon as it exceeds its limit, InvalidInput for anything but one complete
    stream of that coding, and what `acquire` raises."""
    decoder = zlib.decompressobj(wbits=_WINDOW[coding])
    parts: list[bytes] = []
    size = 0
    try:
        for at in range(0, len(body), _IN_BYTES):
            rest = body[at : at + _IN_BYTES]
            while True:
                part = decoder.decompress(rest, _OUT_BYTES)
                size += len(part)
                if size > limit_bytes:
                    raise errors.TooLarge(
                        f"the body is larger than {limit_bytes} bytes when decoded "
                        f"(activator.max_body_bytes, or quota body_bytes): send a reference to the "
                        f"data instead",
                        limit_bytes=limit_bytes,
                    )
                if acquire is not None and part:
                    acquire(len(part))
                parts.append(part)
                rest = decoder.unconsumed_tail
                await asyncio.sleep(0)
                if len(part) < _OUT_BYTES and not rest:
                    break
            if decoder.eof and (decoder.unused_data or at + _IN_BYTES < len(body)):
                raise _invalid(coding, "there are bytes after its end")
    except zlib.error as e:
        raise _invalid(coding, str(e)) from e
    if not decoder.eof:
        raise _invalid(coding, "it is incomplete")
    return b"".join(parts)


def accepts_gzip(accept_encoding: bytes) -> bool:
    """Whether a caller's `Accept-Encoding` names gzip (RFC 9110, section 12.5.3)."""
    for choice in accept_encoding.lower().split(b","):
        name, _, weight = choice.partition(b";")
        if name.strip() in (b"gzip", b"x-gzip"):
            return weight.replace(b" ", b"") not in _NOT_ACCEPTED
    return False


def is_compressible(content_type: bytes, size_bytes: int) -> bool:
    """Whether an answer is JSON of a size that is worth compressing, and not too large for it."""
    media_type = content_type.partition(b";")[0].strip()
    return MIN_COMPRESSED_BYTES <= size_bytes <= MAX_COMPRESSED_BYTES and (
        media_type == b"application/json" or media_type.endswith(b"+json")
    )


async def compress(body: bytes) -> bytes:
    """Return the body in gzip."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[b"gzip"])
    parts = []
    for at in range(0, len(body), _IN_BYTES):
        parts.append(compressor.compress(body[at : at + _IN_BYTES]))
        await asyncio.sleep(0)
    return b"".join([*parts, compressor.flush()])


def _invalid(coding: bytes, why: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"the body is not valid {coding.decode()} (content-encoding): {why}",
        parameter="content-encoding",
    )
