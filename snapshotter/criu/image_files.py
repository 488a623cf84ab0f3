"""The parts of CRIU's images that this package reads and writes: which pages they contain, and the
mappings of the process.

Formats (`images/*.proto` of its source): two magic numbers, then protobuf messages, each preceded
by its length. `pagemap-<pid>.img`: a head with the number of the pages file, then runs of pages;
`pages-<n>.img`: the pages, run after run; `mm-<pid>.img`: one message with the mappings."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PAGE = mmap.PAGESIZE
_COMMON_MAGIC, _PAGEMAP_MAGIC, _MM_MAGIC = 0x54564319, 0x56084025, 0x57492820
PRESENT, LAZY = 1 << 2, 1 << 1
"""Flags of a run: its pages are in this image's file; they may be restored lazily."""
_PLAIN, _ANONYMOUS = 1 << 0 | 1 << 1 | 1 << 5, 1 << 9
"""Status of a mapping: regular, stack, heap; and private anonymous."""
_VMAS = 14
ERRORS = (struct.error, IndexError)
"""What reading a damaged image raises, beside NotUnderstood."""


class NotUnderstood(Exception):
    """Raised when an image does not have the expected format."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """A number of pages at an address; `flags` as in the image."""

    address: int
    pages: int
    flags: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapping of the process; `status` as in the image."""

    start: int
    end: int
    status: int

    @property
    def is_plain(self) -> bool:
        """Whether it is ordinary private anonymous memory."""
        return bool(self.status & _ANONYMOUS) and not self.status & ~(_PLAIN | _ANONYMOUS)


def pagemap(data: bytes) -> tuple[int, list[PageRun]]:
    """The number of the pages file, and the runs. Raises NotUnderstood."""
    messages = _messages(data, _PAGEMAP_MAGIC)
    if not messages or set(head := dict(_fields(messages[0]))) != {1}:
        raise NotUnderstood("head")
    runs = []
    for message in messages[1:]:
        fields = dict(_fields(message))
        # 2: the field in which older versions stored the count
        if not {1, 2, 4, 5} == fields.keys() or fields[2] != 0:
            raise NotUnderstood("run")
        runs.append(PageRun(_number(fields[1]), _number(fields[5]), _number(fields[4])))
    return _number(head[1]), runs


def encode_pagemap(number: int, runs: Iterable[PageRun]) -> bytes:
    out = bytearray(struct.pack("<II", _COMMON_MAGIC, _PAGEMAP_MAGIC))
    messages = [_varints({1: number})]
    messages += [_varints({1: run.address, 2: 0, 4: run.flags, 5: run.pages}) for run in runs]
    for message in messages:
        out += struct.pack("<I", len(message)) + message
    return bytes(out)


def mappings(data: bytes) -> list[Mapping]:
    """The mappings of the process, by address. Raises NotUnderstood."""
    (message,) = _messages(data, _MM_MAGIC) or [b""]
    found = []
    for field, value in _fields(message):
        if field == _VMAS and isinstance(value, bytes):
            vma = dict(_fields(value))
            found.append(Mapping(_number(vma[1]), _number(vma[2]), _number(vma[7])))
    if not found:
        raise NotUnderstood("mappings")
    return sorted(found, key=lambda one: one.start)


def _messages(data: bytes, magic: int) -> list[bytes]:
    if struct.unpack_from("<II", data) != (_COMMON_MAGIC, magic):
        raise NotUnderstood("magic")
    found, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(data):
        raise NotUnderstood("length")
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of one message: varints as numbers, the rest as bytes. Raises NotUnderstood,
    IndexError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        length, at = (8, at) if kind == 1 else (4, at) if kind == 5 else _varint(message, at)
        if kind not in (1, 2, 5) or at + length > len(message):
            raise NotUnderstood("field")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varints(fields: dict[int, int]) -> bytes:
    out = bytearray()
    for number, value in fields.items():
        for one in (number << 3, value):
            while one >= 0x80:
                out.append(one & 0x7F | 0x80)
                one >>= 7
            out.append(one)
    return bytes(out)


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise NotUnderstood("number")
    return value
