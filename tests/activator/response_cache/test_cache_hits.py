"""Bills of calls that the response cache answers, over `kill -9` too."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from activator.billing.budgets.budgets import Budgets
from activator.billing.errors import JournalFull
from activator.billing.journal import Journal
from activator.billing.usage_pricing import to_picos
from activator.response_cache.cache_hits import CacheHit, CacheHitAccount
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec.pricing import Rates
from tests.activator.billing_world import budget, records_on_disk
from tests.fakes.routes import TENANT, route_of, spec_of

AT_NS = 1_790_000_000 * 10**9
RATES = Rates(version="test", request=Decimal("0.5"), cache_hit=Decimal("0.001"), minimum_ms=100)
HIT = CacheHit(
    call="req-1",
    attempt=1,
    key="k-1",
    method="",
    caller="",
    at_ns=AT_NS,
    queued_ms=3,
    status=200,
    bytes_in=7,
    bytes_out=9,
)


def target_of(rates: Rates = RATES) -> CallTarget:
    return CallTarget(route_of(spec_of()), "v1-abcdef", rates)


def opened(directory: Path) -> Journal:
    journal, _ = Journal.open(directory, activator="a-0")
    return journal


def test_a_hit_costs_its_own_price_and_no_other(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    charge = CacheHitAccount(journal, Budgets()).charge(target_of(), HIT)
    (record,) = records_on_disk(tmp_path)
    assert (charge.cost, charge.picos, charge.billed_ns) == ("0.001000000000", 10**9, 0)
    expected = {
        "id": "req-1/1",
        "kind": "CALL",
        "start_kind": "CACHED",
        "cost": "0.001000000000",
        "price_version": "test",
        "queued_ms": 3,
        "exec_ms": 0,
        "bytes_in": 7,
        "bytes_out": 9,
        "instance": "",
        "memory_bytes": 0,
    }
    assert {name: record[name] for name in expected} == expected
    assert Decimal(record["rate_per_s"]) == 0
    journal.close()


def test_each_caller_has_its_own_records(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    account = CacheHitAccount(journal, Budgets())
    for number, caller in enumerate(("", "t-2", "")):
        account.charge(target_of(), replace(HIT, call=f"req-{number}", caller=caller))
    assert [one["caller"] for one in records_on_disk(tmp_path)] == ["", "t-2", ""]
    assert repr(account) == "<CacheHitAccount 2 templates>"
    journal.close()


def test_a_killed_process_loses_no_record_and_has_no_open_one(tmp_path: Path) -> None:
    """Before the record is written there is neither record nor answer; after it, both."""
    journal = opened(tmp_path)
    CacheHitAccount(journal, Budgets()).charge(target_of(), HIT)
    journal.abandon()
    again, recovered = Journal.open(tmp_path, activator="a-0")
    assert (recovered.lost, recovered.unfinished) == ((), ())
    assert again.statistics().unshipped == 1
    assert [one["id"] for one in records_on_disk(tmp_path)] == ["req-1/1"]
    again.close()


def test_a_hit_is_charged_to_hard_budgets(tmp_path: Path) -> None:
    journal, budgets = opened(tmp_path), Budgets(wall_ns=lambda: AT_NS)
    budgets.apply("b-1", budget(amount="0.0025", tenant=TENANT))
    account = CacheHitAccount(journal, budgets)
    for number in range(2):
        account.charge(target_of(), replace(HIT, call=f"req-{number}"))
    with pytest.raises(errors.OverBudget):
        account.charge(target_of(), replace(HIT, call="req-2"))
    assert len(records_on_disk(tmp_path)) == 2
    free = target_of(replace(RATES, version="free", cache_hit=Decimal(0)))
    account.charge(free, replace(HIT, call="req-3"))
    balance = budgets.balances["b-1"]
    assert (balance.spent, balance.reserved) == (to_picos("0.002"), 0)
    journal.close()


@pytest.mark.parametrize("is_served", [False, True])
def test_a_full_disk_refuses_a_hit_or_serves_it_unbilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_served: bool
) -> None:
    journal, budgets, unbilled = opened(tmp_path), Budgets(wall_ns=lambda: AT_NS), []
    budgets.apply("b-1", budget(amount="1", tenant=TENANT))
    account = CacheHitAccount(
        journal, budgets, on_unbilled=(lambda: unbilled.append(1)) if is_served else None
    )

    def full(record: bytes, *, at_ns: int) -> None:
        raise JournalFull("no space left")

    monkeypatch.setattr(journal, "append_call", full)
    if is_served:
        assert account.charge(target_of(), HIT).cost == "0"
    else:
        with pytest.raises(JournalFull):
            account.charge(target_of(), HIT)
    assert len(unbilled) == is_served
    assert budgets.balances["b-1"].reserved == 0
    journal.close()
