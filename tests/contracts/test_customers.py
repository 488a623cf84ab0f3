"""Sums by customer of a tenant, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import pytest

from pilotlight.controller.analytics import usage_reports
from pilotlight.controller.billing import corrections, invoices, ledger, ledger_totals
from pilotlight.controller.billing.usage_exports import ExportQuery, pages
from pilotlight.controller.database.store import Store
from pilotlight.errors import InvalidInput
from pilotlight.protocol import UsageRecord
from tests.functions.controller.parts import usage

NOVEMBER_1, DECEMBER_1 = 1_793_491_200.0, 1_796_083_200.0  # 2026, UTC


def add(store: Store, *records: UsageRecord) -> None:
    with store.write() as write:
        ledger.add(write, list(records))


def call(id: str, cost: str, customer: str = "", **more: object) -> UsageRecord:
    values = {"started_at": NOVEMBER_1 + 60.0, "customer": customer, **more}
    return usage(id, cost=cost, **values)


def test_a_statement_is_the_part_of_an_invoice_that_is_of_a_customer_or_a_key(
    store: Store,
) -> None:
    add(
        store,
        call("1/1", "0.5", "ana"),
        call("2/1", "0.25", "ana", key="k-2"),
        call("3/1", "2", "bob", key="k-2"),
        call("4/1", "4"),
        call("5/1", "8", "ana", tenant="t-2"),
        call("6/1", "16", "ana", started_at=DECEMBER_1),
    )
    with store.write() as write:
        corrections.correct(
            write, record="1/1", amount="-0.125", note="too slow", actor="k", request="r"
        )

    def total(**part: str) -> str:
        with store.read() as sql:
            found = invoices.statement(
                sql, tenant="t-1", which="2026-11", part=part, now=DECEMBER_1
            )
        assert found["status"] == "statement"
        assert part.items() <= found.items()
        return str(found["total"])

    assert total(customer="ana") == "0.625000000000"
    assert total(customer="bob") == "2.000000000000"
    assert total(key="k-2") == "2.250000000000"
    assert total(customer="ana", key="k-2") == "0.250000000000"
    assert total(customer="eve") == "0.000000000000"
    with store.read() as sql:
        (correction,) = invoices.statement(
            sql, tenant="t-1", which="2026-11", part={"customer": "ana"}, now=DECEMBER_1
        )["corrections"]
    assert correction["corrects"] == "1/1"


def test_what_names_no_customer_is_a_line_of_its_own(store: Store) -> None:
    add(store, call("1/1", "0.5", "ana"), call("2/1", "0.25"), call("3/1", "1", kind="IDLE"))
    with store.read() as sql:
        lines = usage_reports.report(
            sql, tenant="t-1", by="customer", since=None, until=None, environment=None
        )
    assert [(line.group["customer"], line.kind, str(line.cost)) for line in lines] == [
        ("", "CALL", "0.250000000000"),
        ("", "IDLE", "1.000000000000"),
        ("ana", "CALL", "0.500000000000"),
    ]


def test_a_report_of_too_many_customers_is_refused_and_that_of_one_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_totals, "MAX_CUSTOMERS", 2)
    for hour in range(3):  # in parts of the period that are read from different tables
        at = NOVEMBER_1 + 3600.0 * 23.5 * hour
        add(store, call(f"{hour}/1", "1", f"c-{hour}", started_at=at))

    def report(where: dict[str, str]) -> list[usage_reports.ReportLine]:
        with store.read() as sql:
            return usage_reports.report(
                sql,
                tenant="t-1",
                by="customer",
                since=NOVEMBER_1 - 60.0,
                until=NOVEMBER_1 + 86_400.0 * 2,
                environment=None,
                where=where,
            )

    with pytest.raises(InvalidInput, match="more than 2 customers"):
        report({})
    assert [line.records for line in report({"customer": "c-1"})] == [1]


def test_an_export_is_cut_to_a_customer(store: Store) -> None:
    add(store, call("1/1", "1", "ana"), call("2/1", "1", "bob"), call("3/1", "1", "ana"))
    wanted = ExportQuery(tenant="t-1", customer="ana")
    (page,) = pages(store, wanted, after=None, limit=None)
    assert [(row["id"], row["customer"]) for row in page] == [("1/1", "ana"), ("3/1", "ana")]
