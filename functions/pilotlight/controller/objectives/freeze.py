"""Refuses releases while an error budget is spent, for functions that request it
(`Objectives.freeze`)."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.objectives import standing
from pilotlight.controller.objectives.burn import FAST, Sli, Spent, spent
from pilotlight.errors import NotFound, ReleaseFrozen


def spent_budgets(sql: sa.Connection, promise: standing.Promise, *, now: float) -> dict[Sli, Spent]:
    """Return the budgets that are spent, on enough calls."""
    observed = standing.over_budget_window(sql, promise, now=now)
    found = {sli: spent(observed, promise.objectives, sli) for sli in Sli}
    return {sli: one for sli, one in found.items() if is_empty(one)}


def is_empty(one: Spent) -> bool:
    """Whether a budget is spent, on enough calls."""
    return (
        one.total >= FAST.min_total
        and one.bad >= FAST.min_bad_long
        and one.left is not None
        and one.left <= 0
    )


def demand(sql: sa.Connection, function_id: str, *, now: float) -> None:
    """Raise ReleaseFrozen while a budget of the function is spent, if its serving revision requests
    the freeze."""
    try:
        promise = standing.promise(sql, function_id)
    except NotFound:
        return  # nothing serves yet, so there are no objectives
    if not promise.objectives.freeze:
        return
    empty = spent_budgets(sql, promise, now=now)
    if empty:
        days = promise.objectives.window_days
        names = ", ".join(
            f"{sli} ({one.bad} of {one.total} calls were bad, {one.budget:.3%} are allowed)"
            for sli, one in empty.items()
        )
        raise ReleaseFrozen(
            f"{promise.app}/{promise.function} has spent its error budget of {days} days: {names}. "
            f"Releases are refused until it recovers: see "
            f"`pilotlight slo show {promise.app}/{promise.function}`; `--override-freeze` "
            f"(scope admin) releases anyway",
            function=f"{promise.app}/{promise.function}",
            slis=[str(sli) for sli in empty],
            until=f"less than the budget is spent in {days} days",
        )
