"""Client methods for budgets."""

from __future__ import annotations

from collections.abc import Sequence

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment

_PATH = "/v1/budgets"


class BudgetResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for budgets."""

    def budgets(self, *, customer: str | None = None) -> list[Json]:
        """List budgets with the spending, forecast and alerts of the current period; with
        `customer` those of this one, also what it has of a budget for each customer."""
        return self._list(_PATH, "budgets", customer=customer)

    def budget(self, budget: str) -> Json:
        """Return a budget by its id. Raises NotFound."""
        return self._get(_path(budget))

    def budget_alerts(self, budget: str) -> list[Json]:
        """List the alerts of a budget in all periods, newest first."""
        return self._list(f"{_path(budget)}/alerts", "alerts")

    def set_budget(
        self,
        amount: str,
        *,
        environment: str = "",
        app: str = "",
        function: str = "",
        period: str = "month",
        currency: str | None = None,
        hard: bool = True,
        alerts: Sequence[int] | None = None,
        webhook: str | None = None,
        new_secret: bool = False,
        customer: str = "",
    ) -> Json:
        """Create or replace the budget of an environment, app, function, customer ("" = all),
        period and currency. `customer` "*": each customer without an own one gets such a budget.

        `amount` is a decimal string. `webhook_secret` in the response is shown only once. Raises
        InvalidInput."""
        body = {
            "amount": amount,
            "environment": environment,
            "app": app,
            "function": function,
            "period": period,
            "hard": hard,
            "new_secret": new_secret,
            "customer": customer,
            **without_none(
                {
                    "currency": currency,
                    "alerts": None if alerts is None else list(alerts),
                    "webhook": webhook,
                }
            ),
        }
        return dict(self._transport.request("PUT", _PATH, json=body).json())

    def delete_budget(self, budget: str) -> None:
        """Delete a budget and its alerts. Raises NotFound."""
        self._transport.request("DELETE", _path(budget))

    def test_budget(self, budget: str) -> Json:
        """Send a signed example to the webhook of a budget and return the outcome: `{"status",
        "error", "url", "headers", "body", "elapsed_ms"}`. Raises Conflict."""
        return dict(self._transport.request("POST", f"{_path(budget)}:test").json())


def _path(budget: str) -> str:
    return f"{_PATH}/{path_segment(budget)}"
