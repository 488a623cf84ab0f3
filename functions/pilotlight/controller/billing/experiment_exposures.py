"""Exposures to experiments: one row per unit and arm, with sums over its calls, updated in the
transaction that adds usage to the ledger.

Confidence intervals need only sums per unit: calls of one unit are not independent of each other,
units are. A unit counts for the arm of its first exposure. If it was also exposed to another arm
(because its arm was stopped), its calls there are excluded."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from pilotlight.controller.billing.ledger import LedgerRow
from pilotlight.controller.billing.usage_aggregation import AT, CALL
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.spec.observations import latency_bucket
from pilotlight.spec.pricing import CACHED, NOT_RUN

log = logging.getLogger(__name__)

LOST, WARM = "lost", "WARM"
FAILED = 500
_Key = tuple[str, str, str]
"""(experiment, unit, arm)."""


@dataclass(slots=True)
class _Unit:
    """The additions of a batch to one unit in one arm."""

    first_at: float
    counts: Counter[str] = field(default_factory=Counter)
    buckets: Counter[int] = field(default_factory=Counter)


def record_exposures(write: Write, rows: Sequence[LedgerRow]) -> None:
    """Count new records of calls in experiments. An attempt in which nothing ran (`NOT_RUN`)
    does not count, and a retried call counts each time.

    A request without a unit (no such header) got an arm drawn for that request alone: it is no
    evidence about units, and is excluded."""
    calls = [
        row
        for row in rows
        if row[AT["kind"]] == CALL and row[AT["outcome"]] not in NOT_RUN and row[AT["unit"]]
    ]
    revisions = _revisions(write.sql, {row[AT["experiment"]] for row in calls})
    units: dict[_Key, _Unit] = {}
    for row in calls:
        experiment, arm, at = row[AT["experiment"]], row[AT["arm"]], row[AT["started_at"]]
        if experiment not in revisions:
            log.warning(
                "event=exposure_of_no_experiment experiment=%s call=%s", experiment, row[AT["call"]]
            )
            continue
        unit = units.setdefault((experiment, row[AT["unit"]], arm), _Unit(first_at=at))
        unit.first_at = min(unit.first_at, at)
        _count(unit, row, revision=revisions[experiment].get(arm))
    if units:
        _store(write, units)


def _count(unit: _Unit, row: LedgerRow, *, revision: str | None) -> None:
    """Add a record to a unit. A degraded answer comes from another revision on purpose; every other
    answer must come from the arm's revision."""
    counts, status = unit.counts, row[AT["status"]]
    counts["calls"] += 1
    counts["errors"] += status >= FAILED or row[AT["outcome"]] == LOST
    counts["degraded"] += bool(row[AT["degraded"]])
    counts["mistagged"] += row[AT["revision"]] != revision and not row[AT["degraded"]]
    counts["cold"] += row[AT["start_kind"]] not in (WARM, CACHED)
    for name in ("exec_ms", "cost_picos", "tokens_in", "tokens_out"):
        counts[name] += row[AT[name]]
    # exclude rejections: they are fast, but do not speak for a version
    if row[AT["start_kind"]] == WARM and 0 < status < 400:
        took_ms = row[AT["queued_ms"]] + row[AT["start_ms"]] + row[AT["exec_ms"]]
        counts["warm"] += 1
        counts["warm_ms"] += took_ms
        unit.buckets[latency_bucket(took_ms)] += 1


def _store(write: Write, units: Mapping[_Key, _Unit]) -> None:
    names = ("experiment", "unit", "arm")
    table = tables.exposures
    values = [
        {
            **dict(zip(names, key, strict=True)),
            "first_at": unit.first_at,
            **{name: unit.counts[name] for name in tables.EXPOSURE_COUNTS},
        }
        for key, unit in sorted(units.items())
    ]
    insert = write.insert(table)
    earlier = sa.case(
        (insert.excluded.first_at < table.c.first_at, insert.excluded.first_at),
        else_=table.c.first_at,
    )
    grown = {name: table.c[name] + insert.excluded[name] for name in tables.EXPOSURE_COUNTS}
    write.sql.execute(
        insert.on_conflict_do_update(index_elements=names, set_={**grown, "first_at": earlier}),
        values,
    )
    table = tables.exposure_latency
    values = [
        {**dict(zip(names, key, strict=True)), "bucket": bucket, "calls": calls}
        for key, unit in sorted(units.items())
        for bucket, calls in sorted(unit.buckets.items())
    ]
    if values:
        insert = write.insert(table)
        more = {"calls": table.c.calls + insert.excluded.calls}
        write.sql.execute(
            insert.on_conflict_do_update(
                index_elements=["experiment", "arm", "unit", "bucket"], set_=more
            ),
            values,
        )


def _revisions(sql: sa.Connection, experiments: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return experiment → arm → revision."""
    table = tables.experiments
    rows = sql.execute(
        sa.select(table.c.id, table.c.document).where(table.c.id.in_(sorted(experiments)))
    )
    return {
        row.id: {arm["name"]: arm["revision"] for arm in json.loads(row.document)["arms"]}
        for row in rows
    }
