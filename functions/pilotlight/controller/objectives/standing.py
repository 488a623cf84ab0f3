"""Where a function stands: what it promised, what it spent of it in each window, and what is
left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller import observations, tables
from pilotlight.controller.objectives.burn import DAY, MEASURED, WINDOWS_S, Sli, Spent, spent
from pilotlight.errors import NotFound
from pilotlight.observations import SHADOW_ARM, Observation, added
from pilotlight.policies import DEFAULT_OBJECTIVES, Objectives
from pilotlight.spec import from_json

BY_MINUTE_S = 2 * 3600
"""Windows up to this are read by the minute; of longer ones the hours that are summed up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A function, and what its heaviest revision promises.

    Attributes:
        is_declared: the revision says so itself; otherwise these are the defaults.
    """

    function_id: str
    tenant: str
    environment: str
    app: str
    function: str
    revision: str
    objectives: Objectives
    is_declared: bool

    @property
    def told(self) -> frozenset[Sli]:
        """Indicators of which somebody is told."""
        return frozenset(Sli) if self.is_declared else MEASURED


def promise(sql: sa.Connection, function_id: str) -> Promise:
    """What a function promises. Raises NotFound for one that there is not, or that takes no
    traffic."""
    functions, revisions, traffic = tables.functions, tables.revisions, tables.traffic
    same = (revisions.c.function == traffic.c.function) & (revisions.c.name == traffic.c.revision)
    query = (
        sa.select(functions, revisions.c.spec, revisions.c.name.label("revision"))
        .join(traffic, traffic.c.function == functions.c.id)
        .join(revisions, same)
        .where(functions.c.id == function_id, functions.c.removed_at.is_(None))
        .order_by(traffic.c.weight.desc(), revisions.c.name.desc())
        .limit(1)
    )
    row = sql.execute(query).first()
    if row is None:
        raise NotFound(
            f"there is no function {function_id} that takes traffic", function=function_id
        )
    document = json.loads(row.spec).get("objectives")
    return Promise(
        function_id=function_id,
        tenant=row.tenant,
        environment=row.environment,
        app=row.app,
        function=row.name,
        revision=row.revision,
        objectives=from_json(Objectives, document) if document is not None else DEFAULT_OBJECTIVES,
        is_declared=document is not None,
    )


def total(found: Mapping[tuple[str, str], Observation]) -> Observation | None:
    """The sum over revisions and arms, without what shadows answered."""
    return added(one for (_, arm), one in found.items() if arm != SHADOW_ARM)


def by_window(sql: sa.Connection, function_id: str, *, now: float) -> dict[int, Observation | None]:
    """What was observed in each window of the alarms, by its length in seconds: read as rings, each
    minute once."""
    found: dict[int, Observation | None] = {}
    ring_end_s, sum_so_far = now, None
    for length_s in WINDOWS_S:
        read = observations.window if length_s <= BY_MINUTE_S else observations.long_window
        ring = total(read(sql, function_id=function_id, since_s=now - length_s, until_s=ring_end_s))
        sum_so_far = added(one for one in (sum_so_far, ring) if one is not None)
        found[length_s] = sum_so_far
        ring_end_s = now - length_s
    return found


def over_budget_window(sql: sa.Connection, made: Promise, *, now: float) -> Observation | None:
    """What was observed in the window of its error budgets."""
    return total(
        observations.long_window(
            sql,
            function_id=made.function_id,
            since_s=now - made.objectives.window_days * DAY,
            until_s=now,
        )
    )


def spent_in(
    windows: Mapping[int, Observation | None], objectives: Objectives, sli: Sli
) -> dict[int, Spent]:
    """What was spent of one budget, by window."""
    return {
        length_s: spent(observation, objectives, sli) for length_s, observation in windows.items()
    }
