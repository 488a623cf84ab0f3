"""The working set of a snapshot: the memory that its first calls access, in the order of the
accesses (REAP, ASPLOS 2021). It is recorded by the proof and kept in the signed manifest."""

from __future__ import annotations

import base64
import binascii
import zlib
from pathlib import Path

from snapshotter.shim.pages import page_files

_MAX_BYTES = 8 * 1024 * 1024
"""Of the ranges of a working set. At most `page_files.MAX_RECORDED` accesses are ranges."""


def recorded(work: Path) -> bytes:
    """The working set that a page server has recorded in its work directory; b"" if there is none.
    Raises OSError."""
    try:
        accesses = (work / page_files.RECORD).read_bytes()
    except FileNotFoundError:
        return b""
    whole = len(accesses) - len(accesses) % page_files.ACCESS.size
    if whole >= page_files.MAX_RECORDED * page_files.ACCESS.size:
        return b""  # the process uses more than is worth bringing first
    return b"".join(
        page_files.WORKING_SET_RANGE.pack(*one) for one in page_files.ranges_of(accesses[:whole])
    )


def encode(ranges: bytes) -> str:
    """As text, for the manifest."""
    return base64.b64encode(zlib.compress(ranges)).decode() if ranges else ""


def decode(text: str) -> bytes:
    """The reverse of `encode`. Raises ValueError if it is not a working set."""
    if not text:
        return b""
    try:
        decompress = zlib.decompressobj()
        ranges = decompress.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
    except (zlib.error, binascii.Error) as e:
        raise ValueError(f"the working set cannot be decoded: {e}") from e
    if not decompress.eof or len(ranges) % page_files.WORKING_SET_RANGE.size:
        raise ValueError("the working set is not whole, or too long")
    return ranges
