"""Nothing is released while an error budget is spent, where a function asks for that
(`Objectives.freeze`)."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.objectives import standing
from pilotlight.controller.objectives.burn import FAST, Sli, Spent, spent
from pilotlight.errors import NotFound, ReleaseFrozen


def spent_budgets(sql: sa.Connection, made: standing.Promise, *, now: float) -> dict[Sli, Spent]:
    """Budgets of the window of which nothing is left, on enough calls to say so."""
    observed = standing.over_budget_window(sql, made, now=now)
    found = {sli: spent(observed, made.objectives, sli) for sli in Sli}
    return {sli: one for sli, one in found.items() if is_empty(one)}


def is_empty(one: Spent) -> bool:
    """Whether nothing is left of a budget, on enough calls to say so."""
    return (
        one.total >= FAST.min_total
        and one.bad >= FAST.min_bad_long
        and one.left is not None
        and one.left <= 0
    )


def demand(sql: sa.Connection, function_id: str, *, now: float) -> None:
    """Raises ReleaseFrozen while a budget of the function is spent, where the revision that serves
    asks for the freeze."""
    try:
        made = standing.promise(sql, function_id)
    except NotFound:
        return  # nothing serves yet, and nothing was promised
    if not made.objectives.freeze:
        return
    empty = spent_budgets(sql, made, now=now)
    if empty:
        days = made.objectives.window_days
        names = ", ".join(
            f"{sli} ({one.bad} of {one.total} calls, {one.budget:.3%} may be)"
            for sli, one in empty.items()
        )
        raise ReleaseFrozen(
            f"{made.app}/{made.function} has spent its error budget of {days} days: {names}. "
            f"Nothing is released until it recovers; "
            f"`pilotlight slo show {made.app}/{made.function}` shows it, `--override-freeze` "
            f"(scope admin) releases all the same",
            function=f"{made.app}/{made.function}",
            slis=[str(sli) for sli in empty],
            until=f"less than the budget is spent in {days} days",
        )
