"""Alarms of objectives: rows that are opened, updated and closed, with the webhook events, in one
transaction.

There is at most one open alarm per function, indicator and severity, and no ticket is opened while
a page is open. An alarm is closed once nothing has fired for `QUIET_S`, so that a rate that
oscillates around its bound is one alarm. A window without calls neither opens nor closes an alarm,
until its long window is empty too."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.slo.burn_rate import (
    BURN_RATE_ALERTS,
    MINUTE,
    BudgetSpend,
    Severity,
    Sli,
    is_firing,
)
from pilotlight.controller.slo.error_budget import SloTarget, spent_by_window
from pilotlight.controller.webhooks import deliveries
from pilotlight.spec.observations import Observation
from pilotlight.spec.policies import STAGES

QUIET_S = {Severity.PAGE: 5 * MINUTE, Severity.TICKET: 30 * MINUTE}
NOTE_S = 60.0
"""How often an open alarm's row is updated while it fires, in seconds."""
KEPT_S = 100 * 86_400.0
EVENTS = {Severity.PAGE: "slo.page", Severity.TICKET: "slo.ticket"}
RESOLVED = "slo.resolved"
LATENCIES = frozenset({Sli.WARM_LATENCY, Sli.FIRST_TOKEN, Sli.COLD_LATENCY})


@dataclass(frozen=True, slots=True, kw_only=True)
class FiringAlert:
    """An alarm that fires now, with what was spent in its long window.

    Attributes:
        window: such as `1h/5m`.
        stage: for a latency, the stage that most calls of the long window overran; "" if none.
    """

    sli: Sli
    severity: Severity
    window: str
    factor: float
    long: BudgetSpend
    short: BudgetSpend
    stage: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "window": self.window,
            "factor": self.factor,
            "burn_rate": _rounded(self.long.burn),
            "burn_rate_now": _rounded(self.short.burn),
            "bad": self.long.bad,
            "total": self.long.total,
            "budget": self.long.budget,
            "stage": self.stage,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SloAlert:
    """A row of `slo_alerts`. Times are in seconds since the epoch; `ended_at` None: the alarm is
    open."""

    id: str
    tenant: str
    function: str
    sli: str
    severity: str
    window: str
    document: Mapping[str, Any]
    began_at: float
    ended_at: float | None


def firing_alerts(
    promise: SloTarget, windows: Mapping[int, Observation | None]
) -> list[FiringAlert]:
    """Return what fires for a function: the strongest alarm per indicator and severity. Pure."""
    found: dict[tuple[Sli, Severity], FiringAlert] = {}
    for sli in Sli:
        if sli not in promise.alerting_slis:
            continue
        by_window = spent_by_window(windows, promise.objectives, sli)
        for alarm in BURN_RATE_ALERTS:
            if (sli, alarm.severity) not in found and is_firing(alarm, by_window):
                found[sli, alarm.severity] = FiringAlert(
                    sli=sli,
                    severity=alarm.severity,
                    window=alarm.name,
                    factor=alarm.factor,
                    long=by_window[alarm.long_s],
                    short=by_window[alarm.short_s],
                    stage=worst_stage(windows[alarm.long_s]) if sli in LATENCIES else "",
                )
    return list(found.values())


def worst_stage(observation: Observation | None) -> str:
    """Return the stage that most calls overran; "" if none."""
    overruns = observation.overruns if observation is not None else {}
    return max(
        (stage for stage in STAGES if overruns.get(stage)),
        key=lambda stage: overruns[stage],
        default="",
    )


def quiet_alerts(
    promise: SloTarget, windows: Mapping[int, Observation | None]
) -> frozenset[tuple[str, str]]:
    """Return the (indicator, severity) pairs with calls in a short window, or with none even in the
    longest: the alarms that may be closed. Pure."""
    known = set()
    for sli in Sli:
        by_window = spent_by_window(windows, promise.objectives, sli)
        for severity in Severity:
            pairs = [alarm for alarm in BURN_RATE_ALERTS if alarm.severity == severity]
            is_seen = any(by_window[alarm.short_s].total for alarm in pairs)
            if is_seen or not any(by_window[alarm.long_s].total for alarm in pairs):
                known.add((sli.value, severity.value))
    return frozenset(known)


def open_alerts(sql: sa.Connection, function_id: str | None = None) -> list[SloAlert]:
    """Return the open alarms of a function; None: of all functions."""
    table = tables.slo_alerts
    where = [table.c.ended_at.is_(None)] + (
        [table.c.function == function_id] if function_id is not None else []
    )
    return [
        _alarm(row)
        for row in sql.execute(sa.select(table).where(*where).order_by(table.c.began_at))
    ]


def listing(
    sql: sa.Connection, *, functions: Sequence[str], since: float, limit: int = 200
) -> list[SloAlert]:
    """Return these functions' alarms that are open or were closed since then, newest first."""
    table = tables.slo_alerts
    recent = table.c.ended_at.is_(None) | (table.c.ended_at >= since)
    query = (
        sa.select(table)
        .where(table.c.function.in_(list(functions)), recent)
        .order_by(table.c.began_at.desc())
        .limit(limit)
    )
    return [_alarm(row) for row in sql.execute(query)]


def _alarm(row: Any) -> SloAlert:
    return SloAlert(
        **{name: getattr(row, name) for name in SloAlert.__slots__ if name != "document"},
        document=json.loads(row.document),
    )


def has_changes(alarms: Sequence[SloAlert], found: Sequence[FiringAlert], *, now: float) -> bool:
    """Whether `reconcile_alerts` has anything to do: an alarm opens or may close, or a firing one
    is due for an update."""
    last = {(alarm.sli, alarm.severity): float(alarm.document["last_at"]) for alarm in alarms}
    firing = {(one.sli.value, one.severity.value) for one in found}
    return last.keys() != firing or any(abs(now - at) >= NOTE_S for at in last.values())


def reconcile_alerts(
    write: Write, promise: SloTarget, found: Sequence[FiringAlert], seen: frozenset[tuple[str, str]]
) -> list[str]:
    """Open, update and close alarms, and enqueue their webhook events. Returns the events.

    Args:
        seen: the alarms that may be closed, from `quiet_alerts`.
    """
    events: list[str] = []
    by_key = {(one.sli.value, one.severity.value): one for one in found}
    paged: set[str] = {one.sli.value for one in found if one.severity is Severity.PAGE}
    for alarm in open_alerts(write.sql, promise.function_id):
        one = by_key.pop((alarm.sli, alarm.severity), None)
        if one is not None:
            _update(write, alarm, {**one.to_json(), "last_at": write.now}, window=one.window)
        elif _may_close(alarm, seen, now=write.now):
            events.append(_close(write, promise, alarm))
        elif alarm.severity == Severity.PAGE:
            paged.add(alarm.sli)
        # the clock was set back: restart the quiet period
        if one is None and float(alarm.document["last_at"]) > write.now:
            _update(write, alarm, {**alarm.document, "last_at": write.now}, window=alarm.window)
    # a page makes a ticket unnecessary
    begin = [
        one
        for one in by_key.values()
        if one.severity is Severity.PAGE or one.sli.value not in paged
    ]
    return events + [_open(write, promise, one) for one in begin]


def _may_close(alarm: SloAlert, seen: frozenset[tuple[str, str]], *, now: float) -> bool:
    quiet_s = now - float(alarm.document["last_at"])
    return (alarm.sli, alarm.severity) in seen and quiet_s >= QUIET_S[Severity(alarm.severity)]


def end_alerts(write: Write, promise: SloTarget) -> list[str]:
    """Close all alarms of a function that was removed or has no traffic."""
    return [_close(write, promise, alarm) for alarm in open_alerts(write.sql, promise.function_id)]


def _open(write: Write, promise: SloTarget, one: FiringAlert) -> str:
    document = {**one.to_json(), "last_at": write.now}
    row = {
        "id": f"slo-{secrets.token_hex(12)}",
        "tenant": promise.tenant,
        "function": promise.function_id,
        "sli": one.sli.value,
        "severity": one.severity.value,
        "window": one.window,
        "document": json.dumps(document),
        "began_at": write.now,
    }
    write.sql.execute(sa.insert(tables.slo_alerts).values(**row))
    return _enqueue_event(write, promise, EVENTS[one.severity], {**row, **one.to_json()})


def _update(write: Write, alarm: SloAlert, document: Mapping[str, Any], *, window: str) -> None:
    table = tables.slo_alerts
    write.sql.execute(
        sa.update(table)
        .where(table.c.id == alarm.id)
        .values(document=json.dumps(dict(document)), window=window)
    )


def _close(write: Write, promise: SloTarget, alarm: SloAlert) -> str:
    table = tables.slo_alerts
    write.sql.execute(sa.update(table).where(table.c.id == alarm.id).values(ended_at=write.now))
    row = {"id": alarm.id, "sli": alarm.sli, "severity": alarm.severity, "began_at": alarm.began_at}
    return _enqueue_event(
        write, promise, RESOLVED, {**row, **alarm.document, "ended_at": write.now}
    )


def _enqueue_event(write: Write, promise: SloTarget, event: str, row: Mapping[str, Any]) -> str:
    body = {
        name: value
        for name, value in row.items()
        if name not in ("document", "last_at", "tenant", "function")
    }
    body |= {
        "app": promise.app,
        "function": promise.function,
        "environment": promise.environment,
        "revision": promise.revision,
    }
    deliveries.enqueue(
        write,
        tenant=promise.tenant,
        environment=promise.environment,
        event=event,
        body=body,
        once=f"{row['id']}/{event}",
    )
    return event


def delete_old_alerts(write: Write) -> None:
    """Delete alarms that were closed more than KEPT_S ago."""
    table = tables.slo_alerts
    write.sql.execute(sa.delete(table).where(table.c.ended_at < write.now - KEPT_S))


def _rounded(burn: float | None) -> float | None:
    return None if burn is None else round(min(burn, 1e6), 2)
