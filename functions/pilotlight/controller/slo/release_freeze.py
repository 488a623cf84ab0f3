"""Refuses releases while an error budget is spent, for functions that request it
(`Objectives.freeze`)."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.slo import error_budget
from pilotlight.controller.slo.burn_rate import FAST, BudgetSpend, Sli, compute_budget_spend
from pilotlight.errors import NotFound, ReleaseFrozen


def spent_budgets(
    sql: sa.Connection, promise: error_budget.SloTarget, *, now: float
) -> dict[Sli, BudgetSpend]:
    """Return the budgets that are spent, on enough calls."""
    observed = error_budget.budget_window_observation(sql, promise, now=now)
    found = {sli: compute_budget_spend(observed, promise.objectives, sli) for sli in Sli}
    return {sli: one for sli, one in found.items() if is_exhausted(one)}


def is_exhausted(one: BudgetSpend) -> bool:
    """Whether a budget is spent, on enough calls."""
    return (
        one.total >= FAST.min_total
        and one.bad >= FAST.min_bad_long
        and one.left is not None
        and one.left <= 0
    )


def require_error_budget(sql: sa.Connection, function_id: str, *, now: float) -> None:
    """Raise ReleaseFrozen while a budget of the function is spent, if its serving revision requests
    the freeze."""
    try:
        promise = error_budget.slo_target(sql, function_id)
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
