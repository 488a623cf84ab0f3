"""Budgets, as typed methods of the client."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources

_PATH = "/v1/budgets"


class BudgetResources(NodeResources):
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    def budgets(self) -> list[Json]:
        """Budgets with what was spent, the forecast and the alerts of the period that runs."""
        return self._list(_PATH, "budgets")

    def budget(self, budget: str) -> Json:
        """One budget by its id. Raises NotFound."""
        return self._get(_path(budget))

    def budget_alerts(self, budget: str) -> list[Json]:
        """Its alerts of all periods, newest first."""
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
    ) -> Json:
        """Make or change the budget of that environment, app, function ("" = all), period and
        currency, whole.

        `amount` is a decimal as text. `webhook_secret` in the answer is shown this one time. Raises
        InvalidInput."""
        body = {
            "amount": amount,
            "environment": environment,
            "app": app,
            "function": function,
            "period": period,
            "hard": hard,
            "new_secret": new_secret,
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
        """Remove a budget and its alerts. Raises NotFound."""
        self._transport.request("DELETE", _path(budget))

    def test_budget(self, budget: str) -> Json:
        """Post a signed example to its webhook: `{"status", "error", "url", "headers", "body",
        "elapsed_ms"}`. Raises Conflict."""
        return dict(self._transport.request("POST", f"{_path(budget)}:test").json())


def _path(budget: str) -> str:
    return f"{_PATH}/{quote(budget, safe='')}"
