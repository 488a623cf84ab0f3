"""What was used and what it cost, as typed methods of the client: reports, prices, invoices,
corrections, records."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.protocol import HEADER_REQUEST_ID, new_call_id

_PATH = "/v1/billing"


class BillingResources(NodeResources):
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    def billing_report(self, **filters: str | float | None) -> Json:
        """What was used and what it cost; `filters`: `by`, `since`, `until`, `environment`, `app`,
        `function`, and `tenant`, another one by name (operator)."""
        return self._get(f"{_PATH}/report", **filters)

    def billing_rates(self) -> Json:
        """The prices that apply now (`current`), and every list that priced something before
        (`lists`)."""
        return self._get(f"{_PATH}/rates")

    def invoices(self, *, tenant: str | None = None) -> list[Json]:
        """Invoices, newest month first; months that are open have a draft. `tenant`: another one's,
        by name (operator)."""
        return self._list(f"{_PATH}/invoices", "invoices", tenant=tenant)

    def invoice(
        self, invoice: str, *, currency: str | None = None, tenant: str | None = None
    ) -> Json:
        """An invoice by its id, or that of a month such as `2026-11`. Raises NotFound."""
        return self._get(_invoice(invoice), currency=currency, tenant=tenant)

    def invoice_file(
        self,
        invoice: str,
        *,
        format: str = "csv",
        currency: str | None = None,
        tenant: str | None = None,
    ) -> bytes:
        """The same as a file: `csv` or `json`."""
        params = without_none({"format": format, "currency": currency, "tenant": tenant})
        return bytes(self._transport.request("GET", _invoice(invoice), params=params).content)

    def issue_invoices(self, month: str, *, tenant: str | None = None) -> list[Json]:
        """Issue the invoices of a month that is over, of one tenant or of all (operator); returns
        those that were not issued before."""
        body = without_none({"month": month, "tenant": tenant})
        return list(
            self._transport.request("POST", f"{_PATH}/invoices", json=body).json()["invoices"]
        )

    def correct(self, record: str, amount: str, *, note: str) -> Json:
        """Add `amount` (a decimal; negative gives back) to what a record costs (operator); returns
        the record that does."""
        body = {"record": record, "amount": amount, "note": note}
        # what makes it safe to send again: the same request is the same correction
        headers = {HEADER_REQUEST_ID: new_call_id()}
        return dict(
            self._transport.request(
                "POST", f"{_PATH}/corrections", json=body, headers=headers, repeatable=True
            ).json()
        )

    def export_records(
        self,
        *,
        format: str = "ndjson",
        since: float | None = None,
        until: float | None = None,
        month: str | None = None,
        environment: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        tenant: str | None = None,
    ) -> Iterator[bytes]:
        """Usage records by time, as they arrive; `cursor` is the id of the last record that one has
        already."""
        asked = {
            "since": since,
            "until": until,
            "month": month,
            "environment": environment,
            "cursor": cursor,
            "limit": limit,
            "tenant": tenant,
        }
        with self._transport.stream(
            "GET", f"{_PATH}/records", params={"format": format, **without_none(asked)}
        ) as response:
            yield from response.iter_bytes()

    def verify_ledger(self) -> Json:
        """Compare the sums that reports read with the records: `differences` is empty when they
        agree."""
        return self._get(f"{_PATH}/verification")

    def rebuild_rollups(self) -> Json:
        """Make those sums of all tenants anew from the records (operator)."""
        return dict(
            self._transport.request("POST", f"{_PATH}/rollups:rebuild", repeatable=True).json()
        )


def _invoice(name: str) -> str:
    return f"{_PATH}/invoices/{quote(name, safe='')}"
