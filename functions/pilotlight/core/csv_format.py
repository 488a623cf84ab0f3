"""CSV (RFC 4180) that is safe to open in a spreadsheet.

Spreadsheets treat a cell that begins with =, +, - or @ as a formula, and names are written by
users: such text is prefixed with an apostrophe, which spreadsheets take as text (CWE-1236). Numbers
are unchanged."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

CONTENT_CSV = "text/csv; charset=utf-8"
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_is_number = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?").fullmatch


def csv_cell(value: Any) -> Any:
    """Escape a value for a cell."""
    if isinstance(value, str) and value.startswith(_FORMULA) and not _is_number(value):
        return "'" + value
    return value


def csv_lines(
    columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, with_head: bool = True
) -> Iterator[str]:
    """Header and rows as lines; keys without a column are omitted, missing keys are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    if with_head:
        writer.writerow(columns)
    for row in rows:
        writer.writerow([csv_cell(row.get(name, "")) for name in columns])
        yield _drain(out)
    yield _drain(out)


def _drain(out: io.StringIO) -> str:
    text = out.getvalue()
    out.seek(0)
    out.truncate()
    return text
