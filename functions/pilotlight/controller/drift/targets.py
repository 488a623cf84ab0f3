"""Monitored functions and their terms: those of the revision with the most traffic."""

from __future__ import annotations

import json
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.serving_revisions import select_serving
from pilotlight.errors import NotFound
from pilotlight.spec.monitor import MonitorSpec
from pilotlight.spec.record_json import from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredFunction:
    """A function, and what is watched of it."""

    function_id: str
    tenant: str
    environment: str
    app: str
    function: str
    revision: str
    terms: MonitorSpec

    @property
    def name(self) -> str:
        """`app/function`."""
        return f"{self.app}/{self.function}"


def find_targets(sql: sa.Connection, *where: sa.ColumnElement[bool]) -> list[MonitoredFunction]:
    """Return the monitored functions among those that the conditions on `functions` select, by
    name."""
    found: dict[str, MonitoredFunction | None] = {}
    for row in sql.execute(select_serving(*where)):
        if row.id in found:
            continue
        terms = monitor_of(row.spec)
        found[row.id] = None
        if terms is not None:
            found[row.id] = MonitoredFunction(
                function_id=row.id,
                tenant=row.tenant,
                environment=row.environment,
                app=row.app,
                function=row.name,
                revision=row.revision,
                terms=terms,
            )
    return [one for one in found.values() if one is not None]


def monitor_of(spec: str) -> MonitorSpec | None:
    """Return the terms in a stored spec; None without monitoring."""
    body = (json.loads(spec).get("log") or {}).get("monitor")
    return None if body is None else from_json(MonitorSpec, body, "monitor")


def find_target(
    sql: sa.Connection, *, tenant: str, environment: str, app: str, function: str
) -> MonitoredFunction:
    """Return a monitored function. Raises NotFound."""
    c = tables.functions.c
    of_it = (c.tenant == tenant, c.environment == environment, c.app == app, c.name == function)
    for target in find_targets(sql, *of_it):
        return target
    raise NotFound(
        f"{app}/{function} is not monitored in environment {environment!r}",
        hint="Deploy it with log=pilotlight.PredictionLog(…) and monitor=pilotlight.Monitor(…).",
    )
