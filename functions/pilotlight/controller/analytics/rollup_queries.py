"""Sums of usage records, read from the rollups in any grouping: the query behind most figures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

import sqlalchemy as sa

from pilotlight.spec.pricing import COST_QUANTUM, GIB

HALF = 10**9
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True, kw_only=True)
class UsageSums:
    """Sums of some records. Owner: the caller that adds them up, in one thread.

    Attributes:
        errors: calls answered with 500 or above.
        picos: cost in picounits of the selected currency.
        billed_ns: instance time covered by the records.
        memory_byte_s, gpu_s: that time multiplied by the instances' resources.
    """

    records: int = 0
    errors: int = 0
    queued_ms: int = 0
    start_ms: int = 0
    exec_ms: int = 0
    billed_ns: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    picos: int = 0
    memory_byte_s: float = 0.0
    gpu_s: float = 0.0

    def add(self, other: UsageSums) -> None:
        """Add another's values to this. Written out for speed: a page adds tens of thousands."""
        self.records += other.records
        self.errors += other.errors
        self.queued_ms += other.queued_ms
        self.start_ms += other.start_ms
        self.exec_ms += other.exec_ms
        self.billed_ns += other.billed_ns
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out
        self.picos += other.picos
        self.memory_byte_s += other.memory_byte_s
        self.gpu_s += other.gpu_s

    @property
    def cost(self) -> Decimal:
        """The exact cost."""
        return COST_QUANTUM * self.picos

    @property
    def billed_s(self) -> float:
        """Instance time in seconds."""
        return self.billed_ns / 1e9

    @property
    def memory_gib_s(self) -> float:
        """Memory in GiB-seconds."""
        return self.memory_byte_s / GIB

    @property
    def tokens(self) -> int:
        """Input and output tokens."""
        return self.tokens_in + self.tokens_out


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCell:
    """Sums of one unit of time, function, record kind, start kind and kind of granted GPU."""

    unit: int
    app: str
    function: str
    function_id: str
    kind: str
    start_kind: str
    currency: str
    sums: UsageSums
    gpu: str = ""

    @property
    def name(self) -> str:
        """`app/function`; records without a function (storage) are named by their kind."""
        return f"{self.app}/{self.function}" if self.function else self.kind.lower()


_GROUPS = ("app", "function", "function_id", "kind", "start_kind", "currency", "gpu")


def cells(
    sql: sa.Connection, table: sa.Table, unit: str, *where: sa.ColumnElement[bool]
) -> list[UsageCell]:
    """Return a rollup's matching rows, summed by unit, function, kind, start kind and GPU."""
    groups = [table.c[unit].label("unit"), *(table.c[name] for name in _GROUPS)]
    query = sa.select(*groups, *summed(table)).where(*where).group_by(*groups)
    return [
        UsageCell(
            **dict(zip(_CELL, row[: len(_CELL)], strict=True)), sums=sums_of_row(row[len(_CELL) :])
        )
        for row in sql.execute(query)
    ]


_CELL = ("unit", *_GROUPS)
_READ = (
    "records",
    "errors",
    "queued_ms",
    "start_ms",
    "exec_ms",
    "tokens_in",
    "tokens_out",
    "high",
    "low",
    "memory_byte_s",
    "gpu_s",
)


def summed(table: sa.Table) -> list[sa.ColumnElement[int]]:
    """Return the columns that `sums_of_row` reads. Nanoseconds are summed in halves, as in
    totals.py."""
    billed = table.c.billed_ns
    return [
        *(sa.func.sum(table.c[name]) for name in _READ),
        sa.func.sum(billed // HALF),
        sa.func.sum(billed % HALF),
    ]


def sums_of_row(row: Sequence[int | float]) -> UsageSums:
    """Build Sums from the columns of `summed`. PostgreSQL returns sums of integers as decimals."""
    records, errors, queued, start, execution, tokens_in, tokens_out, high, low = map(int, row[:9])
    return UsageSums(
        records=records,
        errors=errors,
        queued_ms=queued,
        start_ms=start,
        exec_ms=execution,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        billed_ns=int(row[11]) * HALF + int(row[12]),
        picos=high * HALF + low,
        memory_byte_s=float(row[9]),
        gpu_s=float(row[10]),
    )


def gather(found: Iterable[UsageCell], key: Callable[[UsageCell], _Key]) -> dict[_Key, UsageSums]:
    """Group cells by `key` and add them up, in order of first appearance."""
    sums: dict[_Key, UsageSums] = {}
    for cell in found:
        sums.setdefault(key(cell), UsageSums()).add(cell.sums)
    return sums


def total(found: Iterable[UsageCell]) -> UsageSums:
    """Add up all cells."""
    out = UsageSums()
    for cell in found:
        out.add(cell.sums)
    return out
