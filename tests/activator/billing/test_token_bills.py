"""Tokens on records and bills: priced when a call is closed, whatever its end; set aside in
budgets; nothing of them after a kill."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.billing.budgets.budgets import Budgets, token_picos
from activator.billing.instance_account import Charge, InstanceAccount, OpenRecord
from activator.billing.instance_time import BillingTerms
from activator.billing.journal import Journal
from activator.billing.usage_pricing import PICO, UsageTemplate
from activator.quotas.token_reservation import TokenReservation
from pilotlight import errors
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import BUSY, Rates
from tests.activator.billing_world import (
    FOOTPRINT,
    RATES,
    SECOND,
    Wall,
    budget,
    open_attempt,
    records_on_disk,
    subject,
)
from tests.fakes.reference_prices import price_usage
from tests.hypothesis_profiles import examples

MS = 1_000_000
BY_TOKEN = replace(RATES, token_in=Decimal("0.0000005"), token_out=Decimal("0.0000015"))
LIMIT_S = 10


class Engine:
    """One instance's books, and a budget where a test makes one."""

    def __init__(self, directory: Path, rates: Rates = BY_TOKEN) -> None:
        self.directory = directory
        self.wall = Wall(1_000_000 * SECOND)
        self.budgets = Budgets(wall_ns=self.wall)
        self.journal = Journal.open(directory, activator="a-1", sync_s=0.0, wall_ns=self.wall)[0]
        self.books = InstanceAccount(
            self.journal,
            subject=subject(),
            terms=BillingTerms(
                footprint=FOOTPRINT, rates=rates, free_ns=60 * SECOND, limit_ns=LIMIT_S * SECOND
            ),
            started_ns=0,
            budgets=self.budgets,
        )

    def open(self, use: TokenReservation | None, call: str = "c1") -> OpenRecord:
        return open_attempt(self.books, call=call, at_ns=self.wall.now_ns, tokens=use)

    def close(self, ticket: OpenRecord, *, status: int = 200, outcome: str = "ok") -> Charge:
        return self.books.close(
            ticket, status=status, outcome=outcome, now_ns=SECOND, at_ns=self.wall.now_ns + SECOND
        )

    def records(self) -> list[UsageRecord]:
        return [UsageRecord.from_json(record) for record in records_on_disk(self.directory)]


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.journal.close()


def use(estimated_in: int = 100, max_out: int = 50) -> TokenReservation:
    return TokenReservation(estimated_in=estimated_in, max_out=max_out, began_ns=10 * MS)


def counted(ticket: OpenRecord) -> OpenRecord:
    """The engine said what it took."""
    one = ticket.tokens
    assert one is not None
    one.on_piece(25 * MS)
    one.on_usage(90, 12, 64)
    one.on_finish("stop")
    return ticket


def test_a_record_says_what_a_call_took_and_its_cost_is_that_of_the_list(engine: Engine) -> None:
    bill = engine.close(counted(engine.open(use())))
    [record] = engine.records()
    assert (
        record.tokens_in,
        record.tokens_out,
        record.tokens_cached,
        record.finish,
        record.first_token_ms,
    ) == (90, 12, 64, "stop", 15)
    assert Decimal(bill.cost) == Decimal(record.cost) == price_usage(record, BY_TOKEN)
    assert (
        Decimal(record.cost)
        == Decimal("0.004001") + 90 * BY_TOKEN.token_in + 12 * BY_TOKEN.token_out
    )


@given(
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.decimals(0, 1, places=28),
    st.decimals(0, 1, places=11),
)
def test_the_books_price_tokens_as_the_list_does(
    tokens_in: int, tokens_out: int, token_in: Decimal, token_out: Decimal
) -> None:
    rates = replace(RATES, token_in=token_in, token_out=token_out)
    template = UsageTemplate(subject(), footprint=FOOTPRINT, rates=rates)
    record = UsageRecord(
        **template.fixed,
        id="",
        call="",
        attempt=1,
        start_kind="WARM",
        started_at=0.0,
        queued_ms=0,
        start_ms=0,
        exec_ms=0,
        billed_ns=7,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
    )
    assert Decimal(template.picos(7, tokens_in, tokens_out)) / PICO == price_usage(record, rates)


@pytest.mark.parametrize(
    "ended, seen, tokens, finish",
    [
        pytest.param(
            (502, "error"), (90, 12), (90, 12), "error", id="the engine died after twelve tokens"
        ),
        pytest.param(
            (502, "error"), (90, 0), (0, 0), "error", id="the engine died before the first one"
        ),
        pytest.param((504, "error"), (90, 3), (90, 3), "error", id="a clock cut it off"),
        pytest.param(
            (499, "cancelled"),
            None,
            (100, 0),
            "cancelled",
            id="the caller left in the middle of the prefill",
        ),
        pytest.param(
            (499, "cancelled"),
            (90, 12),
            (90, 12),
            "cancelled",
            id="the caller left in the middle of the answer",
        ),
        pytest.param((400, "error"), None, (0, 0), "", id="the engine refused it"),
        pytest.param((503, BUSY), None, (0, 0), "", id="the engine was busy"),
    ],
)
def test_only_what_was_delivered_is_billed(
    engine: Engine,
    ended: tuple[int, str],
    seen: tuple[int, int] | None,
    tokens: tuple[int, int],
    finish: str,
) -> None:
    one = use()
    ticket = engine.open(one)
    if seen is not None:
        one.on_usage(*seen)
    engine.close(ticket, status=ended[0], outcome=ended[1])
    [record] = engine.records()
    assert (record.tokens_in, record.tokens_out, record.finish) == (*tokens, finish)
    assert Decimal(record.cost) == price_usage(record, BY_TOKEN)


def test_a_call_of_another_kind_says_nothing_of_tokens(engine: Engine) -> None:
    engine.close(engine.open(None))
    [body] = records_on_disk(engine.directory)
    assert not {"tokens_cached", "finish", "first_token_ms"} & set(body)


def test_what_a_kill_left_open_is_lost_and_took_no_tokens(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    counted(engine.open(use()))
    engine.journal.abandon()
    journal, recovered = Journal.open(tmp_path, activator="a-1", wall_ns=engine.wall)
    journal.close()
    assert len(recovered.lost) == 1
    [record] = engine.records()
    assert (record.outcome, record.tokens_in, record.tokens_out, record.finish) == (
        "lost",
        0,
        0,
        "",
    )
    assert Decimal(record.cost) == price_usage(record, BY_TOKEN)


# -- budgets ---------------------------------------------------------------------------------------
WORST = Decimal("0.040201")
"""Of the clock and the request; see test_budgets."""


def reserved(engine: Engine) -> Decimal:
    return Decimal(engine.budgets.balances["b-1"].reserved) / PICO


def spent(engine: Engine) -> Decimal:
    return Decimal(engine.budgets.balances["b-1"].spent) / PICO


def test_a_budget_sets_the_tokens_of_a_call_aside_and_settles_to_what_it_took(
    engine: Engine,
) -> None:
    engine.budgets.apply("b-1", budget(amount="1"))
    ticket = engine.open(use(max_out=1000))
    assert reserved(engine) == WORST + 100 * BY_TOKEN.token_in + 1000 * BY_TOKEN.token_out
    bill = engine.close(counted(ticket))
    assert (reserved(engine), spent(engine)) == (Decimal(0), Decimal(bill.cost))


def test_a_call_whose_tokens_do_not_fit_is_refused_before_it_runs(engine: Engine) -> None:
    engine.budgets.apply("b-1", budget(amount="0.041"))
    with pytest.raises(errors.OverBudget):
        engine.open(use(max_out=1000))
    assert engine.open(use(max_out=100)).is_billed
    with pytest.raises(errors.BudgetReserved):
        engine.open(use(max_out=100), call="c2")


def test_the_reserve_of_tokens_is_their_price() -> None:
    assert token_picos(BY_TOKEN, 1000, 10) == 515_000_000


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(
            st.integers(1, 200), st.integers(1, 200), st.integers(1, 400), st.integers(0, 200)
        ),
        max_size=12,
    )
)
def test_a_budget_is_exceeded_by_no_more_than_prompts_were_longer_than_estimated(
    calls: list[tuple[int, int, int, int]],
) -> None:
    rates = replace(BY_TOKEN, cpu_core_s=Decimal(0), memory_gib_s=Decimal(0), request=Decimal(0))
    with TemporaryDirectory(prefix="pl") as directory:
        engine = Engine(Path(directory), rates)
        engine.budgets.apply("b-1", budget(amount="0.001"))
        running: list[tuple[OpenRecord, TokenReservation, int, int]] = []
        beyond = 0
        for n, (estimated_in, max_out, tokens_in, tokens_out) in enumerate(calls):
            one = use(estimated_in, max_out)
            with contextlib.suppress(errors.OverBudget, errors.BudgetReserved):
                running.append(
                    (engine.open(one, call=f"c{n}"), one, tokens_in, min(tokens_out, max_out))
                )
                beyond += max(0, tokens_in - estimated_in)
        for ticket, one, tokens_in, tokens_out in running:
            one.on_usage(tokens_in, tokens_out)
            engine.close(ticket)
        assert spent(engine) <= Decimal("0.001") + beyond * rates.token_in
        engine.journal.close()
