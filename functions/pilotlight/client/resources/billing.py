"""Client methods for billing: reports, prices, invoices, corrections and usage records."""

from __future__ import annotations

from collections.abc import Iterator

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment
from pilotlight.protocol import HEADER_REQUEST_ID, new_call_id

_PATH = "/v1/billing"


class BillingResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for billing."""

    def billing_report(self, **filters: str | float | None) -> Json:
        """Return usage and its cost. `filters`: `by`, `since`, `until`, `environment`, `app`,
        `function`, `customer`, `key`, and for platform administrators `tenant`, the name of another
        tenant."""
        return self._get(f"{_PATH}/report", **filters)

    def billing_rates(self) -> Json:
        """Return the current prices (`current`), and all price lists used so far (`lists`)."""
        return self._get(f"{_PATH}/rates")

    def invoices(self, *, tenant: str | None = None) -> list[Json]:
        """List invoices, newest month first; an open month has a draft. `tenant`: name of another
        tenant, for platform administrators."""
        return self._list(f"{_PATH}/invoices", "invoices", tenant=tenant)

    def invoice(
        self,
        invoice: str,
        *,
        currency: str | None = None,
        tenant: str | None = None,
        customer: str | None = None,
        key: str | None = None,
    ) -> Json:
        """Return an invoice by its id or month, such as `2026-11`; with `customer` or `key` the
        statement of these. Raises NotFound."""
        return self._get(
            _invoice(invoice), currency=currency, tenant=tenant, customer=customer, key=key
        )

    def invoice_file(
        self,
        invoice: str,
        *,
        format: str = "csv",
        currency: str | None = None,
        tenant: str | None = None,
        customer: str | None = None,
        key: str | None = None,
    ) -> bytes:
        """Return an invoice as a file, in format `csv` or `json`; with `customer` or `key` the
        statement of these."""
        asked = {"currency": currency, "tenant": tenant, "customer": customer, "key": key}
        params = {"format": format, **without_none(asked)}
        return bytes(self._transport.request("GET", _invoice(invoice), params=params).content)

    def issue_invoices(self, month: str, *, tenant: str | None = None) -> list[Json]:
        """Issue the invoices of a past month, for one tenant or all, and return those not issued
        before. For platform administrators."""
        body = without_none({"month": month, "tenant": tenant})
        return list(
            self._transport.request("POST", f"{_PATH}/invoices", json=body).json()["invoices"]
        )

    def correct(self, record: str, amount: str, *, note: str) -> Json:
        """Add `amount` (a decimal; negative refunds) to the cost of a record, and return the
        correcting record. For platform administrators."""
        body = {"record": record, "amount": amount, "note": note}
        # makes a retry safe: requests with the same id are the same correction
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
        customer: str | None = None,
    ) -> Iterator[bytes]:
        """Yield usage records in order of time, as pieces of a file in format `ndjson`, `csv` or
        `cloudevents`. `cursor` is the id of the last record already exported; `customer`: only
        those of this one."""
        asked = {
            "since": since,
            "until": until,
            "month": month,
            "environment": environment,
            "cursor": cursor,
            "limit": limit,
            "tenant": tenant,
            "customer": customer,
        }
        with self._transport.stream(
            "GET", f"{_PATH}/records", params={"format": format, **without_none(asked)}
        ) as response:
            yield from response.iter_bytes()

    def verify_ledger(self) -> Json:
        """Compare the sums used by reports with the records: `differences` is empty if they
        agree, and `invoices` if these agree with them. `archives`, for platform administrators: the
        number of the last archive."""
        return self._get(f"{_PATH}/verification")

    def verify_archive(self, number: int) -> Json:
        """Check an archive of usage records: `problem` is "" if it is as it was written, and
        follows the one before. For platform administrators."""
        return self._get(f"{_PATH}/archives/{number}/verification")

    def rebuild_rollups(self) -> Json:
        """Rebuild the sums used by reports from the records, for all tenants. For platform
        administrators."""
        return dict(
            self._transport.request("POST", f"{_PATH}/rollups:rebuild", repeatable=True).json()
        )


def _invoice(name: str) -> str:
    return f"{_PATH}/invoices/{path_segment(name)}"
