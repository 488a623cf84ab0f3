"""Prepaid credit, on SQLite and on PostgreSQL alike: which grant pays, what expires, that a record
counts once, that the ledger of credit never changes, and that a tenant has its own."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.billing import corrections, invoices, usage_ingestion
from pilotlight.controller.billing.credits import accounts, consumption, grants
from pilotlight.controller.billing.credits.accounts import CreditAccount, CreditEntry
from pilotlight.controller.billing.credits.definition import GrantDefinition
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.audit_trail import AuditQuery
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import BudgetState, UsageRecord
from pilotlight.spec.pricing import picos_text
from tests.functions.controller.parts import ManualClock, usage

NOW = 1_800_000_000.0
DAY_S = 86_400.0


@pytest.fixture
def tenant(store: Store, clock: ManualClock) -> str:
    clock.now = NOW
    return new_tenant(store, "acme")


def new_tenant(store: Store, name: str) -> str:
    with store.write() as write:
        return tenants.create(write, name=name, uid_base=None, actor="platform").id


def grant(
    store: Store, tenant: str, amount: str, customer: str = "ana", **more: Any
) -> tuple[CreditEntry, bool]:
    picos = int(Decimal(amount) * 10**12)
    terms = GrantDefinition(picos=picos, currency="USD", **more)
    with store.write() as write:
        return grants.grant(write, tenant=tenant, customer=customer, terms=terms, actor="k-1")


def withdraw(store: Store, tenant: str, entry: str, amount: str | None = None) -> CreditEntry:
    picos = None if amount is None else int(Decimal(amount) * 10**12)
    with store.write() as write:
        return grants.withdraw(
            write,
            tenant=tenant,
            customer="ana",
            grant_id=entry,
            amount=picos,
            note="a mistake",
            actor="k-1",
        )


def record(name: str, cost: str, at: float = NOW, **more: Any) -> UsageRecord:
    values = {"customer": "ana", "started_at": at, **more}
    return usage(f"{name}/1", cost=f"{Decimal(cost):.12f}", **values)


def use(store: Store, tenant: str, *records: UsageRecord) -> dict[str, BudgetState]:
    rows = [{**one.to_json(), "tenant": tenant} for one in records]
    with store.write() as write:
        return usage_ingestion.ingest_usage(write, rows)[1]


def account_of(store: Store, tenant: str, customer: str = "ana") -> CreditAccount:
    with store.read() as sql:
        found = accounts.find(sql, (tenant, customer, "USD"))
    assert found is not None
    return found


def balance(store: Store, tenant: str, at: float = NOW) -> str:
    return shown(account_of(store, tenant).balance(at))


def shown(picos: int) -> str:
    return f"{Decimal(picos_text(picos)).normalize():f}"


def ledger(store: Store, tenant: str) -> list[tuple[str, str]]:
    with store.read() as sql:
        found = accounts.entries(sql, tables.credit_entries.c.tenant == tenant)
    return [(one.kind, shown(one.amount)) for one in found][::-1]


def fed(store: Store) -> list[str | None]:
    """What activators are told, the oldest change first."""
    feed = tables.feed.c
    with store.read() as sql:
        query = sa.select(feed.value).where(feed.kind == "credit").order_by(feed.seq)
        return list(sql.execute(query).scalars())


def test_usage_draws_on_the_grant_that_expires_first(store: Store, tenant: str) -> None:
    grant(store, tenant, "10")
    grant(store, tenant, "2", expires_at=NOW + 20 * DAY_S)
    grant(store, tenant, "1", expires_at=NOW + 10 * DAY_S)
    states = use(store, tenant, record("a", "2.5"), record("b", "1", customer="ben"))
    (state,) = states.values()
    assert (state.period, state.spent, state.batch, state.amount) == (
        "credit",
        "2.500000000000",
        "2.500000000000",
        "13.000000000000",
    )
    assert state.expiring == ((NOW + 20 * DAY_S, "0.500000000000"),)
    left = [one.unused for one in account_of(store, tenant).grants]
    assert left == [5 * 10**11, 10 * 10**12]
    assert balance(store, tenant) == "10.5"


def test_a_record_that_is_sent_again_counts_once(store: Store, tenant: str) -> None:
    grant(store, tenant, "10")
    first, second = record("a", "1"), record("b", "2")
    use(store, tenant, first)
    (state,) = use(store, tenant, first, second).values()
    assert (state.spent, state.batch) == ("3.000000000000", "3.000000000000")
    (state,) = use(store, tenant, first, second).values()
    assert (state.spent, state.batch) == ("3.000000000000", "3.000000000000")
    assert balance(store, tenant) == "7"


def test_what_exceeds_credit_is_paid_by_the_next_grant(store: Store, tenant: str) -> None:
    grant(store, tenant, "1")
    use(store, tenant, record("a", "1.25"))
    assert balance(store, tenant) == "-0.25"
    grant(store, tenant, "1")
    account = account_of(store, tenant)
    assert (account.debt, [one.unused for one in account.grants]) == (0, [75 * 10**10])
    assert balance(store, tenant) == "0.75"


def test_expired_credit_pays_for_calls_that_began_before(
    store: Store, tenant: str, clock: ManualClock
) -> None:
    ends_at = NOW + 10.0
    grant(store, tenant, "5")
    grant(store, tenant, "2", expires_at=ends_at)
    clock.now = NOW + 60.0
    assert balance(store, tenant, clock.now) == "5"
    use(store, tenant, record("late", "1.5", ends_at - 0.001), record("next", "1", ends_at))
    assert balance(store, tenant, clock.now) == "4", "the later call is paid by the other grant"
    clock.now = ends_at + grants.LATE_S + 1.0
    with store.write() as write:
        assert [grants.settle_expired(write), grants.settle_expired(write)] == [1, 0]
    assert ledger(store, tenant) == [("grant", "5"), ("grant", "2"), ("expiry", "-0.5")]
    use(store, tenant, record("too-late", "0.25", ends_at - 0.001))
    assert balance(store, tenant, clock.now) == "3.75"


def test_a_grant_with_a_known_reference_is_not_made_again(store: Store, tenant: str) -> None:
    made, is_new = grant(store, tenant, "5", reference="pay-1")
    again, is_new_again = grant(store, tenant, "5", reference="pay-1", note="a retry")
    assert (again.id, is_new, is_new_again) == (made.id, True, False)
    for amount, customer in (("6", "ana"), ("5", "ben")):
        with pytest.raises(Conflict, match="was used for another entry"):
            grant(store, tenant, amount, customer, reference="pay-1")
    grant(store, new_tenant(store, "other"), "7", reference="pay-1")
    assert balance(store, tenant) == "5"


def test_a_grant_is_corrected_by_a_further_entry(store: Store, tenant: str) -> None:
    made, _ = grant(store, tenant, "50")
    use(store, tenant, record("a", "1"))
    withdraw(store, tenant, made.id, "45")
    assert balance(store, tenant) == "4"
    with pytest.raises(InvalidInput, match=r"4\.0+ USD of grant"):
        withdraw(store, tenant, made.id, "4.5")
    withdraw(store, tenant, made.id)
    with pytest.raises(Conflict, match="nothing of grant"):
        withdraw(store, tenant, made.id)
    assert ledger(store, tenant) == [("grant", "50"), ("withdrawal", "-45"), ("withdrawal", "-4")]
    assert balance(store, tenant) == "0"
    for change in (
        sa.update(tables.credit_entries).values(amount="1"),
        sa.delete(tables.credit_entries),
    ):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"), store.write() as write:
            write.sql.execute(change)


def test_another_tenant_has_no_part_in_it(store: Store, tenant: str) -> None:
    made, _ = grant(store, tenant, "5")
    other = new_tenant(store, "other")
    with pytest.raises(NotFound):
        withdraw(store, other, made.id)
    with pytest.raises(NotFound), store.write() as write:
        grants.close(write, tenant=other, customer="ana", currency="USD", actor="k-2")
    grant(store, other, "1")
    use(store, other, record("theirs", "0.5"))
    assert (balance(store, tenant), balance(store, other)) == ("5", "0.5")
    month = "2027-01"
    with store.read() as sql:
        mine = consumption.uses(sql, tenant=tenant, customer="ana", month=month)
        theirs = consumption.uses(sql, tenant=other, customer="ana", month=month)
    assert (mine, [one.picos for one in theirs]) == ([], [5 * 10**11])


def test_changes_are_audited_and_activators_hear_of_them(store: Store, tenant: str) -> None:
    made, _ = grant(store, tenant, "5", note="order 7")
    withdraw(store, tenant, made.id, "1")
    use(store, tenant, record("a", "1"))
    (known,) = fed(store)
    assert known is not None
    assert '"amount":"4.000000000000"' in known
    assert '"version":2' in known
    with store.write() as write:
        grants.close(write, tenant=tenant, customer="ana", currency="USD", actor="k-1")
    assert fed(store) == [None]
    with store.read() as sql:
        found = audit_trail.entries(sql, AuditQuery(tenant=tenant, action="credit.*"), limit=10)
    assert [one["action"] for one in found] == [
        "credit.close",
        "credit.withdraw",
        "credit.grant",
    ]
    assert {one["subject"] for one in found} == {"customer ana"}
    assert (found[-1]["after"]["amount"], found[-1]["after"]["note"]) == (
        "5.000000000000",
        "order 7",
    )


def test_a_customer_whose_credit_is_closed_can_be_prepaid_again(
    store: Store, tenant: str, clock: ManualClock
) -> None:
    grant(store, tenant, "5")
    use(store, tenant, record("a", "2"))
    clock.now += 60.0
    with store.write() as write:
        grants.close(write, tenant=tenant, customer="ana", currency="USD", actor="k-1")
    assert use(store, tenant, record("b", "9", clock.now - 0.5)) == {}
    clock.now += 1.0
    grant(store, tenant, "1")
    use(store, tenant, record("c", "0.5", clock.now + 1.0), record("d", "9", NOW + 1.0))
    assert balance(store, tenant, clock.now) == "0.5"
    assert ledger(store, tenant) == [("grant", "5"), ("withdrawal", "-3"), ("grant", "1")]


def test_calls_before_the_first_grant_are_not_charged(store: Store, tenant: str) -> None:
    use(store, tenant, record("before", "3", NOW - 10.0), record("at-once", "1", NOW - 0.5))
    grant(store, tenant, "5")
    assert balance(store, tenant) == "4", "an activator's clock may be behind by a second"
    use(store, tenant, record("late", "3", NOW - 10.0))
    assert balance(store, tenant) == "4"


def test_a_correction_gives_credit_back(store: Store, tenant: str) -> None:
    grant(store, tenant, "5", expires_at=NOW + 10 * DAY_S)
    use(store, tenant, record("a", "5.5"))
    with store.write() as write:
        corrections.correct(write, record="a/1", amount="-2", note="an outage", actor="k-0")
    account = account_of(store, tenant)
    assert (account.spent, account.debt) == (55 * 10**11, 0), "what is spent never falls"
    assert balance(store, tenant) == "1.5"
    with store.write() as write:
        corrections.correct(write, record="a/1", amount="0.5", note="a fee", actor="k-0")
    assert balance(store, tenant) == "1"
    assert ledger(store, tenant) == [("grant", "5"), ("refund", "2")]


def test_a_statement_says_what_credit_paid(store: Store, tenant: str) -> None:
    use(store, tenant, record("before", "3", NOW - 10.0))
    grant(store, tenant, "5")
    use(store, tenant, record("a", "2"), record("b", "1", app="other"))

    def statement(**part: str) -> dict[str, Any]:
        with store.read() as sql:
            return invoices.statement(sql, tenant=tenant, which="2027-01", part=part, now=NOW)

    found = statement(customer="ana")
    assert (found["total"], found["credit"]) == (
        "6.000000000000",
        {"used": "3.000000000000", "due": "3.000000000000"},
    )
    assert "credit" not in statement(customer="ben")
    with store.read() as sql:
        found_uses = consumption.uses(sql, tenant=tenant, customer="ana", month="2027-01")
    assert [(one.app, one.picos) for one in found_uses] == [
        ("other", 10**12),
        ("search", 2 * 10**12),
    ]


def test_accounts_and_grants_are_bounded(
    store: Store, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "MAX_ACCOUNTS", 2)
    monkeypatch.setattr(grants, "MAX_OPEN_GRANTS", 2)
    grant(store, tenant, "1")
    grant(store, tenant, "1")
    with pytest.raises(Conflict, match="2 grants that are not used up"):
        grant(store, tenant, "1")
    use(store, tenant, record("a", "1"))
    grant(store, tenant, "1")
    grant(store, tenant, "1", "ben")
    with pytest.raises(Conflict, match="2 customers have prepaid credit"):
        grant(store, tenant, "1", "eve")
    monkeypatch.setattr(grants, "MAX_TENANT_GRANTS", 3)
    with pytest.raises(Conflict, match="has 3 grants of credit"):
        grant(store, tenant, "1", "ben")


@pytest.mark.slow  # a hundred transactions
def test_any_history_adds_up(store: Store, tenant: str, clock: ManualClock) -> None:
    chance = random.Random(7)
    sent: list[UsageRecord] = []
    for step in range(60):
        clock.now += chance.random() * 3600.0
        match chance.choice(("grant", "use", "use", "use", "again", "withdraw", "settle")):
            case "grant":
                expires = chance.choice((None, clock.now + chance.random() * 2 * DAY_S))
                grant(store, tenant, f"{chance.random():.6f}", expires_at=expires)
            case "use":
                cost = Decimal(f"{chance.random() / 4:.12f}")
                sent.append(record(f"r-{step}", str(cost), clock.now - chance.random() * 600.0))
                use(store, tenant, sent[-1])
            case "again" if sent:
                use(store, tenant, *chance.sample(sent, min(3, len(sent))))
            case "withdraw" if ledger(store, tenant):
                valid = [
                    one for one in account_of(store, tenant).grants if one.is_valid_at(clock.now)
                ]
                if valid:
                    withdraw(store, tenant, chance.choice(valid).id)
            case "settle":
                with store.write() as write:
                    grants.settle_expired(write)
    account = account_of(store, tenant)
    with store.read() as sql:
        every = accounts.entries(sql, tables.credit_entries.c.tenant == tenant)
    assert account.granted == sum(one.amount for one in every)
    assert len(every) == account.version
    unused = sum(one.unused for one in account.grants)
    assert account.granted - account.spent == unused - account.debt
    records = sa.select(tables.usage.c.cost_picos).where(
        tables.usage.c.started_at >= account.opened_at
    )
    with store.read() as sql:
        assert account.spent == sum(sql.execute(records).scalars())
