"""Client methods for prepaid credit of customers."""

from __future__ import annotations

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment
from pilotlight.protocol import HEADER_IDEMPOTENCY_KEY, new_call_id

_PATH = "/v1/credits"


class CreditResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for prepaid credit."""

    def credits(self, *, after: str | None = None, limit: int | None = None) -> list[Json]:
        """List customers with prepaid credit and their balances, by id, beginning after one."""
        return self._list(_PATH, "credits", after=after, limit=limit)

    def credit(self, customer: str) -> list[Json]:
        """Return the prepaid credit of a customer, in each currency, with its grants; [] if it has
        none."""
        return self._list(_path(customer), "credits")

    def credit_entries(
        self, customer: str, *, before: str | None = None, limit: int | None = None
    ) -> Json:
        """Return a page of the ledger of a customer's credit, newest first: `{"entries",
        "before"}`."""
        return self._get(f"{_path(customer)}/entries", before=before, limit=limit)

    def credit_uses(self, customer: str, *, month: str | None = None) -> Json:
        """Return what used a customer's credit on the invoice of a month, by day and function:
        `{"month", "uses"}`. Default: this month."""
        return self._get(f"{_path(customer)}/uses", month=month)

    def grant_credit(
        self,
        customer: str,
        amount: str,
        *,
        currency: str | None = None,
        expires_at: float | None = None,
        note: str = "",
        reference: str | None = None,
    ) -> Json:
        """Grant credit to a customer; `amount` is a decimal string. A `reference` of your own that
        was used before returns the first grant (`created` is false). Raises InvalidInput,
        Conflict."""
        more = {"currency": currency, "expires_at": expires_at, "reference": reference}
        return self._post_credit(
            f"{_path(customer)}/grants", {"amount": amount, "note": note, **without_none(more)}
        )

    def withdraw_credit(
        self, customer: str, grant: str, *, amount: str | None = None, note: str = ""
    ) -> Json:
        """Withdraw what is left of a grant, or this much of it. Raises NotFound, Conflict,
        InvalidInput."""
        body = {"grant": grant, "note": note, **without_none({"amount": amount})}
        return self._post_credit(f"{_path(customer)}/withdrawals", body)

    def close_credit(self, customer: str, *, currency: str | None = None) -> None:
        """Withdraw what is left of a customer's credit, and no longer limit its calls by it. Raises
        NotFound."""
        params = without_none({"currency": currency})
        self._transport.request("DELETE", _path(customer), params=params)

    def _post_credit(self, path: str, body: Json) -> Json:
        # makes a retry safe: requests with the same key are one change
        headers = {HEADER_IDEMPOTENCY_KEY: new_call_id()}
        return dict(
            self._transport.request(
                "POST", path, json=body, headers=headers, repeatable=True
            ).json()
        )


def _path(customer: str) -> str:
    return f"{_PATH}/{path_segment(customer)}"
