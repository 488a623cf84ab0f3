"""A function's status against its objectives: what it spent of its budgets in each window."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.serving_revisions import select_serving
from pilotlight.controller.slo import observations
from pilotlight.controller.slo.burn_rate import (
    DAY,
    MEASURED,
    WINDOWS_S,
    BudgetSpend,
    Sli,
    compute_budget_spend,
)
from pilotlight.errors import NotFound
from pilotlight.spec.observations import UNCOUNTED_ARMS, Observation, sum_observations
from pilotlight.spec.policies import DEFAULT_OBJECTIVES, Objectives
from pilotlight.spec.record_json import from_json

BY_MINUTE_S = 2 * 3600
"""Windows up to this length, in seconds, are read by the minute; longer ones mostly by the
summed-up hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """A function and the objectives of its revision with the most traffic.

    Attributes:
        is_declared: whether the revision declares objectives; otherwise these are the defaults.
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
    def alerting_slis(self) -> frozenset[Sli]:
        """The indicators that raise alarms."""
        return frozenset(Sli) if self.is_declared else MEASURED


def slo_target(sql: sa.Connection, function_id: str) -> SloTarget:
    """Return a function's objectives. Raises NotFound if it does not exist or has no traffic."""
    row = sql.execute(select_serving(tables.functions.c.id == function_id).limit(1)).first()
    if row is None:
        raise NotFound(f"there is no function {function_id} with traffic", function=function_id)
    document = json.loads(row.spec).get("objectives")
    return SloTarget(
        function_id=function_id,
        tenant=row.tenant,
        environment=row.environment,
        app=row.app,
        function=row.name,
        revision=row.revision,
        objectives=from_json(Objectives, document) if document is not None else DEFAULT_OBJECTIVES,
        is_declared=document is not None,
    )


def total_observation(found: Mapping[tuple[str, str], Observation]) -> Observation | None:
    """Add up all revisions and arms, except UNCOUNTED_ARMS."""
    return sum_observations(one for (_, arm), one in found.items() if arm not in UNCOUNTED_ARMS)


def observations_by_window(
    sql: sa.Connection, function_id: str, *, now: float
) -> dict[int, Observation | None]:
    """Return the observations in each alarm window, by its length in seconds. Reads rings, so each
    minute is read once."""
    found: dict[int, Observation | None] = {}
    ring_end_s, sum_so_far = now, None
    for length_s in WINDOWS_S:
        read = observations.window if length_s <= BY_MINUTE_S else observations.long_window
        ring = total_observation(
            read(sql, function_id=function_id, since_s=now - length_s, until_s=ring_end_s)
        )
        sum_so_far = sum_observations(one for one in (sum_so_far, ring) if one is not None)
        found[length_s] = sum_so_far
        ring_end_s = now - length_s
    return found


def budget_window_observation(
    sql: sa.Connection, promise: SloTarget, *, now: float
) -> Observation | None:
    """Return the observations in the window of the function's error budgets."""
    return total_observation(
        observations.long_window(
            sql,
            function_id=promise.function_id,
            since_s=now - promise.objectives.window_days * DAY,
            until_s=now,
        )
    )


def spent_by_window(
    windows: Mapping[int, Observation | None], objectives: Objectives, sli: Sli
) -> dict[int, BudgetSpend]:
    """Return what was spent of one budget, by window."""
    return {
        length_s: compute_budget_spend(observation, objectives, sli)
        for length_s, observation in windows.items()
    }
