"""Rows to replay: of a prediction log, or of a file of lines.

Of a row, only arguments and result are used, as JSON values; nothing in them is opened, followed or
executed."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pilotlight.errors import InvalidInput
from pilotlight.spec.prediction_log import REST, SCRUBBED
from pilotlight.validation.json_documents import parse_document

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

AT_ONCE: Final = 100
"""Rows of a log that are fetched at once: each has at most 512 KiB of content."""
MAX_LINE_BYTES: Final = 16 * 1024**2
"""Longest line of a file."""
_ERRORS: Final = 400
_SCRUBBED_TEXT: Final = json.dumps(SCRUBBED)
_SAMPLE_DIGITS: Final = 8
"""Hexadecimal digits of a hash that decide whether a row is drawn."""
_COLUMNS: Final = (
    *("request_id", "method", "version", "status", "degraded", "input", "output"),
    *("latency_ms", "exec_ms", "cost", "currency", "has_json_input", "has_json_output"),
)
_SELECT: Final = """
SELECT request_id, method, version, status, degraded, input, output, latency_ms, exec_ms, cost,
  currency, feature_hash IS NOT NULL, output_summary IS NOT NULL
FROM predictions
"""


class Reason(enum.StrEnum):
    """Why a row is not replayed."""

    FAILED = "the logged call failed"
    DEGRADED = "the logged answer was degraded"
    INPUT_NOT_JSON = "the input is not JSON, or over 256 KiB"
    NO_INPUT = "the log has no full input"
    NO_OUTPUT = "the log has no full output"
    OUTPUT_NOT_JSON = "the output is a stream, not JSON, over 256 KiB, or not logged"
    SCRUBBED_INPUT = "the input is scrubbed"
    SCRUBBED_OUTPUT = "the whole output is scrubbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """A call to make again.

    Attributes:
        id: of the logged call, or of the line.
        method: of a class; "" for a function.
        arguments: JSON, as the call sends them.
        output: what the answer is compared with.
        version: the revision that answered; "" for a line.
        latency_ms, exec_ms, cost: of the logged call; None for a line.
    """

    id: str
    method: str
    arguments: bytes
    output: Any
    version: str = ""
    latency_ms: float | None = None
    exec_ms: float | None = None
    cost: Decimal | None = None
    currency: str = ""


class SkippedRow(NamedTuple):
    """A row that cannot be replayed."""

    id: str
    reason: Reason


Row = ReplayRow | SkippedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """Which rows of a log are replayed.

    Attributes:
        since, until: seconds since the epoch; None = without end.
        version: the revision that answered, or the beginning of its name up to a hyphen; "" = any.
        sample: share of the rows; the same ones each time.
        with_scrubbed: also rows whose arguments are scrubbed.
    """

    since: float
    until: float | None = None
    version: str = ""
    sample: float = 1.0
    with_scrubbed: bool = False

    def where(self) -> tuple[str, dict[str, Any]]:
        """The condition as SQL, and its parameters."""
        conditions = ["epoch(started_at) >= $since"]
        values: dict[str, Any] = {"since": self.since}
        if self.until is not None:
            conditions.append("epoch(started_at) < $until")
            values["until"] = self.until
        if self.version:
            conditions.append("(version = $version OR starts_with(version, $version || '-'))")
            values["version"] = self.version
        if self.sample < 1:
            conditions.append("md5(request_id) < $drawn")
            values["drawn"] = f"{int(self.sample * 16**_SAMPLE_DIGITS):0{_SAMPLE_DIGITS}x}"
        return " AND ".join(conditions), values


def read_log(database: DuckDBPyConnection, selection: LogSelection) -> tuple[int, Iterator[Row]]:
    """Return the number of the selected rows of the view `predictions`, and the rows, the newest
    first. Raises duckdb.Error; InvalidInput while rows are read."""
    import duckdb

    where, values = selection.where()
    found = database.execute(f"SELECT count(*) FROM predictions WHERE {where}", values).fetchone()
    sql = f"{_SELECT} WHERE {where} ORDER BY started_at DESC, request_id"

    def rows() -> Iterator[Row]:
        try:
            result = database.execute(sql, values)
            while some := result.fetchmany(AT_ONCE):
                for row in some:
                    named = dict(zip(_COLUMNS, row, strict=True))
                    yield row_of_log(named, with_scrubbed=selection.with_scrubbed)
        except duckdb.Error as e:
            raise InvalidInput(f"the log cannot be read: {e}") from e

    return (found[0] if found is not None else 0), rows()


def row_of_log(row: Mapping[str, Any], *, with_scrubbed: bool = False) -> Row:
    """Return the call of a row of a prediction log, or why it cannot be made again."""
    reason = _missing(row)
    if reason is not None:
        return SkippedRow(row["request_id"], reason)
    try:
        arguments, output = _arguments(row["input"]), parse_document(row["output"])
    except (ValueError, RecursionError):
        return SkippedRow(row["request_id"], Reason.INPUT_NOT_JSON)
    if not with_scrubbed and _SCRUBBED_TEXT in row["input"]:
        return SkippedRow(row["request_id"], Reason.SCRUBBED_INPUT)
    if output == SCRUBBED:
        return SkippedRow(row["request_id"], Reason.SCRUBBED_OUTPUT)
    return ReplayRow(
        id=row["request_id"],
        method=row["method"],
        arguments=arguments,
        output=output,
        version=row["version"],
        latency_ms=row["latency_ms"],
        exec_ms=row["exec_ms"],
        cost=row["cost"],
        currency=row["currency"],
    )


def read_file(path: Path, *, with_scrubbed: bool = False) -> Iterator[Row]:
    """Yield the calls of a file with `{"input": …, "output": …}` in each line, and optionally
    `request_id` and `method`. Raises InvalidInput naming the line."""
    try:
        with path.open("rb") as lines:
            number = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    yield _row_of_line(line, path, number, with_scrubbed=with_scrubbed)
    except OSError as e:
        raise InvalidInput(f"{path}: {e.strerror}", parameter="from") from e


def take(rows: Iterable[Row], limit: int) -> Iterator[Row]:
    """Yield rows up to the last of `limit` calls."""
    for row in rows:
        yield row
        limit -= isinstance(row, ReplayRow)
        if limit <= 0:
            return


def _missing(row: Mapping[str, Any]) -> Reason | None:
    if row["status"] >= _ERRORS:
        return Reason.FAILED
    if row["degraded"]:
        return Reason.DEGRADED
    if row["input"] is None:
        return Reason.NO_INPUT if row["has_json_input"] else Reason.INPUT_NOT_JSON
    if row["output"] is None:
        return Reason.NO_OUTPUT if row["has_json_output"] else Reason.OUTPUT_NOT_JSON
    return None


def _arguments(text: str) -> bytes:
    """Return the arguments of a row as a call sends them: those beyond the named parameters go by
    position, and so do all before them."""
    given = json.loads(text)
    if isinstance(given, dict) and isinstance(given.get(REST), list):
        text = json.dumps([*(value for name, value in given.items() if name != REST), *given[REST]])
    return text.encode()


def _row_of_line(line: bytes, path: Path, number: int, *, with_scrubbed: bool) -> Row:
    what = f"{path}, line {number}"
    if len(line) > MAX_LINE_BYTES:
        raise InvalidInput(f"{what}: longer than {MAX_LINE_BYTES} bytes", parameter="from")
    try:
        row = json.loads(line)
        arguments = json.dumps(row["input"], ensure_ascii=False)
        output = parse_document(json.dumps(row["output"]))
        name, method = row.get("request_id", f"line {number}"), row.get("method", "")
        if not (isinstance(name, str) and isinstance(method, str)):
            raise TypeError
        body = arguments.encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise InvalidInput(
            f'{what}: not a row such as {{"input": …, "output": …}}', parameter="from"
        ) from e
    if not with_scrubbed and _SCRUBBED_TEXT in arguments:
        return SkippedRow(name, Reason.SCRUBBED_INPUT)
    if output == SCRUBBED:
        return SkippedRow(name, Reason.SCRUBBED_OUTPUT)
    return ReplayRow(id=name, method=method, arguments=body, output=output)
