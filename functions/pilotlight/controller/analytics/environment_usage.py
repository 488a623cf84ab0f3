"""One tenant's usage of one environment over a span, read once and then grouped in several ways."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import sqlalchemy as sa

from pilotlight.controller.analytics import rollup_queries
from pilotlight.controller.analytics.rollup_queries import UsageCell, UsageSums
from pilotlight.controller.analytics.time_range import TimeRange
from pilotlight.spec.identifiers import without_run
from pilotlight.spec.pricing import CACHED
from snapshotter.types import StartKind

START_KINDS = (CACHED, *(kind.value for kind in StartKind))
"""What answers of calls begin with: CACHED, where nothing ran, and kinds of starts."""
KINDS = ("CALL", "START", "IDLE", "RESERVED", "CPU", "BUILD", "STORAGE", "ADJUSTMENT")
"""Kinds of records that may cost something, in the stacking order of charts."""
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class EnvironmentUsage:
    """All cells that the pages of one environment sum.

    Attributes:
        currency: the currency of costs; records in another currency count with their usage but not
            with their cost.
        others: further currencies in which something was spent.
    """

    span: TimeRange
    cells: tuple[UsageCell, ...]
    currency: str
    others: tuple[str, ...] = ()

    def by(
        self, key: Callable[[UsageCell], _Key], *, calls_only: bool = False
    ) -> dict[_Key, UsageSums]:
        """Return sums grouped by `key`; `calls_only` excludes everything but calls."""
        return rollup_queries.gather(
            (c for c in self.cells if not calls_only or c.kind == "CALL"), key
        )

    @cached_property
    def total(self) -> UsageSums:
        """Sums of all records."""
        return rollup_queries.total(self.cells)

    @cached_property
    def calls(self) -> UsageSums:
        """Sums of calls only."""
        return rollup_queries.total(c for c in self.cells if c.kind == "CALL")

    @property
    def is_empty(self) -> bool:
        """Whether there are no records."""
        return not self.cells


def read(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    span: TimeRange,
    currency: str,
    function_id: str | None = None,
) -> EnvironmentUsage:
    """Read the usage of an environment, or of one of its functions, over a span."""
    table = span.table
    where = [table.c.tenant == tenant, span.covers(table), table.c.environment == environment]
    if function_id is not None:
        where.append(table.c.function_id == function_id)
    found = rollup_queries.cells(sql, table, span.unit, *where)
    others = sorted({c.currency for c in found if c.sums.picos} - {currency})
    for cell in found:
        if cell.currency != currency:
            cell.sums.picos = 0
    return EnvironmentUsage(span=span, cells=tuple(found), currency=currency, others=tuple(others))


def with_runs_added(usage: EnvironmentUsage) -> EnvironmentUsage:
    """Return the usage with that of all temporary deployments of an app (`pilotlight run`) under
    one name, `hello-run-*`: they are removed after a call, and there may be many."""
    return replace(
        usage,
        cells=tuple(
            cell
            if (app := without_run(cell.app)) == cell.app
            else replace(cell, app=app, function_id=f"{app}/{cell.function}")
            for cell in usage.cells
        ),
    )


def stacked(
    usage: EnvironmentUsage, key: Callable[[UsageCell], str], *, most: int
) -> dict[str, list[UsageSums]]:
    """Return sums per unit of the `most` names with the highest cost, with all others combined as
    "other"; the most expensive first.

    Names are ranked by cost, then by records, so that a platform without prices shows its busiest
    first."""
    whole = usage.by(key)
    ranked = sorted(whole, key=lambda name: (-whole[name].picos, -whole[name].records, name))
    top = ranked if len(ranked) <= most else ranked[: most - 1]
    series = {
        name: [UsageSums() for _ in usage.span.units]
        for name in [*top, *(["other"] if len(top) < len(ranked) else [])]
    }
    separate = set(top)
    for cell in usage.cells:
        name = key(cell)
        series[name if name in separate else "other"][cell.unit - usage.span.first].add(cell.sums)
    return series
