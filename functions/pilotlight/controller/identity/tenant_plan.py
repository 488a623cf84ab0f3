"""The plan of one tenant: a plan's name, and overrides of some of its settings. Pure.

platform.yaml defines plans; the database stores names and overrides, so that a change there applies
to all tenants of the plan."""

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
    """A tenant's plan.

    Attributes:
        plan: a plan's name.
        overrides: settings that differ for this tenant; None removes a limit.
        plans: every plan by its name.
        prices: versions of the existing price lists; None = not checked.
    """

    plan: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, Plan] = field(default_factory=lambda: BUILT_IN_PLANS, repr=False)
    prices: Collection[str] | None = field(default=None, repr=False)

    def resolve(self) -> Plan:
        """Return the plan with the overrides. Raises InvalidInput naming key, value and limit."""
        known = self.plans.get(self.plan)
        if known is None:
            raise InvalidInput(
                f"plan {self.plan!r} does not exist; available: {', '.join(self.plans)}",
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
                f"prices = {plan.prices!r}: no such price list; available: "
                f"{', '.join(self.prices)}",
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
        """Return the changed terms: `clear` removes overrides, `overrides` adds or replaces some.
        Raises InvalidInput."""
        if unknown := sorted(set(clear) - set(self.overrides)) if clear != "all" else []:
            raise InvalidInput(
                f"clear = {unknown[0]!r}: not overridden; overridden: "
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
    """Return the plan of a tenant's row."""
    return TenantPlan(
        plan=row.plan, overrides=json.loads(row.overrides), plans=plans, prices=prices
    )
