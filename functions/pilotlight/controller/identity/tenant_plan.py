"""The terms of one tenant: a plan by its name, and overrides of single keys of it. Pure.

Plans are platform.yaml's; the database keeps names and overrides, so that a plan that is changed
there changes for all who have it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import sqlalchemy as sa

from pilotlight.errors import InvalidInput
from pilotlight.spec.quotas import BUILT_IN_PLANS, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPlan:
    """What a tenant was promised.

    Attributes:
        plan: a plan's name.
        overrides: keys of it that are otherwise for this tenant; None lifts a bound.
        plans: every plan by its name.
        prices: versions of the price lists that there are; None = not checked.
    """

    plan: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, Plan] = field(default_factory=lambda: BUILT_IN_PLANS, repr=False)
    prices: Collection[str] | None = field(default=None, repr=False)

    def resolve(self) -> Plan:
        """The plan as it is for this tenant. Raises InvalidInput naming key, value and bound."""
        known = self.plans.get(self.plan)
        if known is None:
            raise InvalidInput(
                f"plan {self.plan!r}: there is none; there are {', '.join(self.plans)}",
                parameter="plan",
            )
        try:
            plan = known.with_overrides(self.overrides)
        except ValueError as e:
            raise InvalidInput(
                f"plan {self.plan!r} with overrides: {e}", parameter="overrides"
            ) from e
        if plan.prices is not None and self.prices is not None and plan.prices not in self.prices:
            raise InvalidInput(
                f"prices = {plan.prices!r}: no such price list; there are {', '.join(self.prices)}",
                parameter="prices",
            )
        return plan

    def changed(
        self,
        *,
        plan: str | None,
        overrides: Mapping[str, Any],
        clear: Collection[str] | Literal["all"],
    ) -> TenantPlan:
        """Other terms: `clear` takes overrides away, `overrides` adds or changes some. Raises
        InvalidInput."""
        if unknown := sorted(set(clear) - set(self.overrides)) if clear != "all" else []:
            raise InvalidInput(
                f"clear = {unknown[0]!r}: is not overridden; what is: "
                f"{', '.join(self.overrides) or 'nothing'}",
                parameter="clear",
            )
        kept = (
            {}
            if clear == "all"
            else {key: value for key, value in self.overrides.items() if key not in clear}
        )
        return replace(self, plan=plan or self.plan, overrides={**kept, **overrides})


DEFAULT_TENANT_PLAN = TenantPlan(plan="standard")


def tenant_plan_of(
    row: sa.Row[Any], plans: Mapping[str, Plan], prices: Collection[str] | None = None
) -> TenantPlan:
    """The terms in a tenant's row."""
    return TenantPlan(
        plan=row.plan, overrides=json.loads(row.overrides), plans=plans, prices=prices
    )
