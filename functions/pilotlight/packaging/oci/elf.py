"""Parser of the run-time dependencies of ELF files: loader, libraries, and search paths."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"\x7fELF"
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 15, 29
_MOST_SEGMENTS = 256
_MOST_BYTES = 1 << 20
"""Maximum size of one table: a dynamic section has some dozen entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elf:
    """A dynamic executable or library. `search`: its RUNPATH or RPATH, with `$ORIGIN` not
    expanded."""

    interpreter: str | None = None
    needed: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    machine: int = 0


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


def read_elf(path: Path) -> Elf | None:
    """Parse `path`; None if it is not a valid 64-bit little-endian ELF file. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:4] != MAGIC or head[4:6] != b"\x02\x01":
            return None
        try:
            return _parse(file, head)
        except (struct.error, ValueError):
            return None


def _parse(file: BinaryIO, head: bytes) -> Elf:
    def at(offset: int, size: int) -> bytes:
        if not 0 <= size <= _MOST_BYTES:
            raise ValueError("a table is too large")
        file.seek(offset)
        return file.read(size)

    machine = struct.unpack_from("<H", head, 18)[0]
    table, entry_bytes, count = (
        struct.unpack_from("<Q", head, 32)[0],
        *struct.unpack_from("<HH", head, 54),
    )
    if count > _MOST_SEGMENTS or entry_bytes < 56:
        raise ValueError("invalid program headers")
    raw = at(table, entry_bytes * count)
    segments = [_segment(raw, i * entry_bytes) for i in range(count)]
    interpreter = next(
        (at(s.offset, s.size).rstrip(b"\0").decode() for s in segments if s.kind == _PT_INTERP),
        None,
    )
    dynamic = next((s for s in segments if s.kind == _PT_DYNAMIC), None)
    if dynamic is None:
        return Elf(interpreter=interpreter, machine=machine)
    tags = list(_tags(at(dynamic.offset, dynamic.size)))
    strings = _offset_of(next(value for tag, value in tags if tag == _DT_STRTAB), segments)

    def text(at_byte: int) -> str:
        raw = at(strings + at_byte, 4096)
        return raw.partition(b"\0")[0].decode()

    paths = {tag: text(value) for tag, value in tags if tag in (_DT_RPATH, _DT_RUNPATH)}
    search = paths.get(_DT_RUNPATH, paths.get(_DT_RPATH, ""))
    return Elf(
        interpreter=interpreter,
        needed=tuple(text(value) for tag, value in tags if tag == _DT_NEEDED),
        search=tuple(part for part in search.split(":") if part),
        machine=machine,
    )


def _segment(raw: bytes, at: int) -> _Segment:
    kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", raw, at)
    return _Segment(kind, offset, address, size)


def _tags(raw: bytes) -> Iterator[tuple[int, int]]:
    for tag, value in struct.iter_unpack("<qQ", raw[: len(raw) - len(raw) % 16]):
        if tag == _DT_NULL:
            return
        yield tag, value


def _offset_of(address: int, segments: list[_Segment]) -> int:
    for s in segments:
        if s.kind == _PT_LOAD and s.address <= address < s.address + s.size:
            return s.offset + address - s.address
    raise ValueError("the string table is in no segment")
