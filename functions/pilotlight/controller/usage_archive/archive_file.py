"""The file of an archive: gzip (RFC 1952) of lines of canonical JSON (RFC 8785 as far as numbers of
Python are written so): a head, then a line for each record. Pure.

The SHA-256 of the content (before compression) names the archive; the head has the number of the
archive and the hash of the one before, so that none can be changed, left out or moved unnoticed."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

from pilotlight.controller.billing.usage_aggregation import AT, COLUMNS
from pilotlight.spec.record_json import canonical_json

FORMAT: Final = 1
GENESIS: Final = "0" * 64
"""Stands for the hash of the archive before the first one."""
MAX_FILE_BYTES: Final = 256 * 1024**2
"""Of an object; one has some MiB."""
MAX_CONTENT_BYTES: Final = 1024**3
LedgerRow = tuple[Any, ...]
"""A record as the ledger stores it, in the order of `COLUMNS`."""


_key = itemgetter(*(AT[name] for name in ("tenant", "day", "month", "currency", "customer")))


class ArchiveDamaged(ValueError):
    """Raised when a file is not the archive that was written; its text says in what."""


class DayKey(NamedTuple):
    """A part of the ledger's sums; `has_customer`: of the records that name a customer."""

    tenant: str
    day: int
    month: str
    currency: str
    has_customer: bool


class DaySum(NamedTuple):
    """Number and cost of records."""

    records: int
    picos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFile:
    """The content of an archive."""

    number: int
    previous: str
    rows: Sequence[LedgerRow]

    def content(self) -> bytes:
        """The lines."""
        head = {
            "format": FORMAT,
            "archive": self.number,
            "previous": self.previous,
            "records": len(self.rows),
            "cost_picos": str(sum(row[AT["cost_picos"]] for row in self.rows)),
            "columns": list(COLUMNS),
        }
        lines = [canonical_json(head), *(canonical_json(list(row)) for row in self.rows)]
        return b"".join(line + b"\n" for line in lines)

    def ids(self) -> list[str]:
        """Ids of the records."""
        return [row[AT["id"]] for row in self.rows]


def object_key(number: int) -> str:
    """The key of an archive's object."""
    return f"usage-archives/{number:08}.ndjson.gz"


def sha256(content: bytes) -> str:
    """The hash that names a content."""
    return hashlib.sha256(content).hexdigest()


def pack(content: bytes) -> bytes:
    """Compress a content; the same one always gives the same file."""
    return gzip.compress(content, mtime=0)


def unpack(data: bytes, *, number: int, digest: str, previous: str) -> ArchiveFile:
    """Read a file, and check that it is archive `number` with this hash, which follows the one with
    the hash `previous`. Raises ArchiveDamaged."""
    content = _decompressed(data, number)
    if (found := sha256(content)) != digest:
        raise ArchiveDamaged(
            f"archive {number} was changed: its SHA-256 is {found}, and was {digest}"
        )
    try:
        first, *lines = content.splitlines()
        head = json.loads(first)
        archive = ArchiveFile(
            number=int(head["archive"]),
            previous=str(head["previous"]),
            rows=[tuple(json.loads(line)) for line in lines],
        )
        columns = tuple(head["columns"])
    except (ValueError, KeyError, TypeError) as e:
        raise ArchiveDamaged(f"archive {number} is no archive of usage records: {e!r}") from e
    if archive.number != number:
        raise ArchiveDamaged(f"archive {number} has the content of archive {archive.number}")
    if archive.previous != previous:
        raise ArchiveDamaged(
            f"archive {number} follows one with the SHA-256 {archive.previous}, and archive "
            f"{number - 1} has {previous}"
        )
    if columns != COLUMNS[: len(columns)] or any(len(row) != len(columns) for row in archive.rows):
        raise ArchiveDamaged(f"archive {number} has records of unknown columns")
    return archive


def day_sums(rows: Sequence[LedgerRow]) -> Mapping[DayKey, DaySum]:
    """The sums of records."""
    counts: Counter[DayKey] = Counter()
    picos: Counter[DayKey] = Counter()
    for row in rows:
        tenant, day, month, currency, customer = _key(row)
        key = DayKey(tenant, day, month, currency, has_customer=bool(customer))
        counts[key] += 1
        picos[key] += row[AT["cost_picos"]]
    return {key: DaySum(counts[key], picos[key]) for key in counts}


def _decompressed(data: bytes, number: int) -> bytes:
    try:
        reader = zlib.decompressobj(zlib.MAX_WBITS | 16)
        content = reader.decompress(data, MAX_CONTENT_BYTES)
    except zlib.error as e:
        raise ArchiveDamaged(f"archive {number} cannot be decompressed: {e}") from e
    if not reader.eof or reader.unconsumed_tail or reader.unused_data:
        raise ArchiveDamaged(f"archive {number} is cut off, or has more than one file")
    return content
