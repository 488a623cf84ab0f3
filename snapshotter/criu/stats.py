"""CRIU's own measurements of a dump or a restore (`stats-dump`, `stats-restore` in its work
directory).

An image file has two magic numbers, a length, and one protobuf message. Only the fields used here
are described, under their numbers in images/stats.proto; unknown fields are skipped, as in
protobuf."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_HEAD = struct.Struct("<III")
"""Magic of image files, magic of statistics, bytes of the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStats:
    """Measurements of a dump. `frozen_ms`: how long the processes were stopped. `pages_bytes`:
    memory written by value, including shared memory."""

    pages_bytes: int = 0
    freezing_ms: float = 0.0
    frozen_ms: float = 0.0
    memory_dump_ms: float = 0.0
    memory_write_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStats:
    """Measurements of a restore inside CRIU: creating the processes (`fork_ms`), and in total."""

    fork_ms: float = 0.0
    restore_ms: float = 0.0


def read_dump(work: int) -> DumpStats:
    """Read from the work directory `work` (a descriptor); zeros if CRIU left nothing readable."""
    found = _read(work, "stats-dump")
    if found is None:
        return DumpStats()
    return DumpStats(
        pages_bytes=(found.dump.pages_written + found.dump.shpages_written) * _PAGE_BYTES,
        freezing_ms=found.dump.freezing_time / 1e3,
        frozen_ms=found.dump.frozen_time / 1e3,
        memory_dump_ms=found.dump.memdump_time / 1e3,
        memory_write_ms=found.dump.memwrite_time / 1e3,
    )


def read_restore(work: int) -> RestoreStats:
    """Read from the work directory `work` (a descriptor); zeros if CRIU left nothing readable."""
    found = _read(work, "stats-restore")
    if found is None:
        return RestoreStats()
    return RestoreStats(
        fork_ms=found.restore.forking_time / 1e3, restore_ms=found.restore.restore_time / 1e3
    )


def _read(work: int, name: str) -> Any:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=work)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as f:
        raw = f.read(4096)
    try:
        length = _HEAD.unpack_from(raw)[2]
        return _ENTRY.FromString(raw[_HEAD.size : _HEAD.size + length])
    except (struct.error, message.DecodeError):
        return None


_DUMP = {
    "freezing_time": 1,
    "frozen_time": 2,
    "memdump_time": 3,
    "memwrite_time": 4,
    "pages_written": 7,
    "shpages_written": 14,
}
_RESTORE = {"forking_time": 3, "restore_time": 4}


def _entry_class() -> type[message.Message]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="pilotlight-criu-stats", package="pilotlight", syntax="proto2"
    )
    entry = file.message_type.add(name="Stats")
    for number, (name, fields) in enumerate({"dump": _DUMP, "restore": _RESTORE}.items(), start=1):
        part = file.message_type.add(name=name.title())
        for key, tag in fields.items():
            part.field.add(name=key, number=tag, type=field.TYPE_UINT64, label=field.LABEL_OPTIONAL)
        kind = f".pilotlight.{name.title()}"
        entry.field.add(
            name=name,
            number=number,
            type=field.TYPE_MESSAGE,
            type_name=kind,
            label=field.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pilotlight.Stats"))


_ENTRY = _entry_class()
