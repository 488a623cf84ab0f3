"""Hard budgets, as diaries: an instance of 2 cores and a GiB costs 0.004 a second, a call 0.000001,
and its clock is 10 s."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activator.billing.budgets.applicable import CLOCK_STEP_NS, Subject
from activator.billing.budgets.balance import BudgetBalance
from activator.billing.budgets.budgets import Budgets
from activator.billing.instance_account import InstanceAccount, OpenRecord
from activator.billing.journal import Journal
from activator.billing.usage_pricing import PICO
from pilotlight import errors
from pilotlight.protocol import BudgetRecord, BudgetState
from tests.activator.billing_world import (
    SECOND,
    Wall,
    account,
    budget,
    open_attempt,
    records_on_disk,
)
from tests.hypothesis_profiles import examples

MIDNIGHT = 1_795_219_200 * SECOND
"""2026-11-21T00:00:00Z."""
NOON = MIDNIGHT + 12 * 3600 * SECOND
WORST = Decimal("0.040201")
"""10 s and the step of 0.05 s at 0.004, and the request."""


class World:
    """Instances of one function under budgets, and a clock."""

    def __init__(self, directory: Path, *, now_ns: int = NOON) -> None:
        self.directory = directory
        self.wall = Wall(now_ns)
        self.budgets = Budgets(wall_ns=self.wall)
        self.journal = Journal.open(directory, activator="a-1", sync_s=0.0, wall_ns=self.wall)[0]
        self.budgets.end_of_journal = lambda: self.journal.end
        self.instances: dict[str, InstanceAccount] = {}
        self.up_ns = 0
        self._calls = 0

    def pass_s(self, seconds: float) -> int:
        """Time goes by on both clocks; returns the wall's."""
        self.up_ns += int(seconds * SECOND)
        return self.wall.pass_s(seconds)

    def set(self, record: BudgetRecord) -> BudgetBalance:
        """Make or change a budget."""
        self.budgets.apply(record.id, record)
        return self.budgets.balances[record.id]

    def instance(self, name: str = "i-1") -> InstanceAccount:
        if name not in self.instances:
            self.instances[name] = account(self.journal, name, budgets=self.budgets)
        return self.instances[name]

    def open(self, instance: str = "i-1", *, limit_s: float | None = None) -> OpenRecord:
        self._calls += 1
        return open_attempt(
            self.instance(instance),
            call=f"c{self._calls}",
            now_ns=self.up_ns,
            at_ns=self.wall.now_ns,
            limit_ns=None if limit_s is None else int(limit_s * SECOND),
        )

    def close(self, ticket: OpenRecord, instance: str = "i-1", *, after_s: float = 0.0) -> Decimal:
        at_ns = self.pass_s(after_s)
        return Decimal(
            self.instance(instance)
            .close(ticket, status=200, outcome="ok", now_ns=self.up_ns, at_ns=at_ns)
            .cost
        )


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


def money(picos: int) -> Decimal:
    return Decimal(picos) / PICO


def test_a_call_reserves_its_worst_case_and_pays_what_it_cost(world: World) -> None:
    purse = world.set(budget(amount="1"))
    ticket = world.open()
    assert (purse.spent, money(purse.reserved), money(purse.left)) == (0, WORST, 1 - WORST)
    cost = world.close(ticket, after_s=2)
    assert cost == Decimal("0.008001")
    assert (money(purse.spent), purse.reserved, money(purse.left)) == (cost, 0, 1 - cost)
    assert (
        repr(purse)
        == "<BudgetBalance b-1 2026-11-21 spent 0.008001000000, reserved 0.000000000000 of 1 USD>"
    )


def test_a_spent_budget_answers_402_and_says_what_to_do(world: World) -> None:
    world.set(budget(amount="0.0402015"))
    world.close(world.open(), after_s=1)
    with pytest.raises(
        errors.OverBudget, match="next period begins at 2026-11-22T00:00:00Z; raise the budget"
    ) as refused:
        world.open()
    assert refused.value.status == 402
    assert dict(refused.value.detail) == {
        "budget": "b-1",
        "period": "2026-11-21",
        "amount": "0.0402015",
        "spent": "0.004001000000",
        "until": "2026-11-22T00:00:00Z",
        "needed": "0.040201000000",
    }
    world.close(world.open(limit_s=5), after_s=1)  # one that promises to be short still fits


def test_a_short_call_that_came_after_a_long_one_is_the_first_that_must_have_ended(
    world: World,
) -> None:
    world.set(budget(amount="0.06"))
    world.open()
    short = world.open("i-2", limit_s=4)
    with pytest.raises(errors.BudgetReserved) as refused:
        world.open("i-3")
    assert refused.value.retry_after_s == 4.0
    world.close(short, "i-2", after_s=1)


def test_a_budget_that_is_only_reserved_answers_429_until_the_first_call_must_have_ended(
    world: World,
) -> None:
    purse = world.set(budget(amount="0.1"))
    first = world.open()
    world.pass_s(3)
    second = world.open("i-2")
    with pytest.raises(errors.BudgetReserved) as refused:
        world.open("i-3")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 7.0)
    assert refused.value.detail["reserved"] == "0.080402000000"
    world.close(first, after_s=0.5)
    third = world.open("i-3")
    world.close(second, "i-2")
    world.close(third, "i-3")
    assert purse.reserved == 0


def test_a_refused_call_leaves_no_trace(world: World) -> None:
    purse, other = world.set(budget(amount="1")), world.set(budget("b-2", amount="0.01"))
    with pytest.raises(errors.OverBudget):
        world.open()
    assert (purse.left, other.left) == (PICO, PICO // 100)
    assert (world.journal.statistics().open_calls, world.instance().meter.in_flight) == (0, 0)


def test_a_soft_budget_stops_nothing_and_a_hard_one_stops_only_what_it_covers(world: World) -> None:
    scopes: tuple[dict[str, Any], ...] = (
        {"hard": False},
        {"tenant": "t-2"},
        {"environment": "test"},
        {"app": "other"},
        {"function": "Other"},
        {"currency": "EUR"},
    )
    for n, scope in enumerate(scopes):
        world.budgets.apply(f"b-{n}", budget(f"b-{n}", amount="0", **scope))
    world.close(world.open())
    world.set(budget("b-9", amount="0", environment="main", app="search", function="Embedder"))
    with pytest.raises(errors.OverBudget):
        world.open()
    world.budgets.apply("b-9", None)
    world.close(world.open())


def test_a_day_begins_at_midnight_in_utc_and_a_call_belongs_to_the_day_it_began_in(
    world: World,
) -> None:
    world.wall.now_ns = MIDNIGHT - 2 * SECOND
    day, month = (
        world.set(budget(amount="0.05")),
        world.set(budget("m", amount="1", period="month")),
    )
    over_midnight = world.open()
    world.wall.now_ns = MIDNIGHT + SECOND
    today = world.open("i-2")
    assert (day.period.name, month.period.name) == ("2026-11-21", "2026-11")
    yesterdays = world.close(over_midnight)
    assert (day.spent, money(day.reserved)) == (0, WORST)
    todays = world.close(today, "i-2", after_s=1)
    assert money(day.spent) == todays
    assert money(month.spent) == yesterdays + todays


def test_a_call_of_yesterday_that_did_not_run_gives_today_nothing(world: World) -> None:
    world.wall.now_ns = MIDNIGHT - SECOND
    day = world.set(budget(amount="1"))
    cover = world.budgets.cover(Subject("t-1", "main", "app", "f", "USD"))
    turn = cover.reserve("late", PICO, at_ns=world.wall.now_ns, ends_ns=world.wall.now_ns)
    world.pass_s(2)
    today = cover.reserve("now", PICO, at_ns=world.wall.now_ns, ends_ns=world.wall.now_ns)
    cover.release("late", PICO, turn=turn)
    assert (day.left, day.reserved, list(cover.open)) == (0, PICO, ["now"])
    cover.release("now", PICO, turn=today)
    assert (day.left, day.reserved) == (PICO, 0)


@pytest.mark.parametrize("how", ["answer", "states"])
@pytest.mark.parametrize("spent", ["much", "", None])
def test_a_state_of_the_ledger_that_is_no_amount_changes_its_budget_only_by_what_was_sent(
    world: World, caplog: pytest.LogCaptureFixture, how: str, spent: Any
) -> None:
    first, second = world.set(budget("b-1")), world.set(budget("b-2"))
    first.mark = None  # its own records were counted
    first.charge(PICO // 4)
    states = {
        "b-1": BudgetState(period=first.period.name, spent=spent),
        "b-2": BudgetState(period=second.period.name, spent="0.5"),
    }
    if how == "answer":
        record = (
            b'{"tenant":"t-1","environment":"main","app":"app","function":"f","currency":"USD",'
            b'"cost":"0.25","started_at":%d}' % (NOON // SECOND)
        )
        others = record.replace(b"t-1", b"t-2")
        world.budgets.apply_answer(states, [record, others])
        assert (first.ledger, first.own) == (PICO // 4, 0)
    else:
        world.budgets.apply_states(states)
        assert (first.ledger, first.own) == (0, PICO // 4)
    assert (first.spent, second.ledger) == (PICO // 4, PICO // 2)
    assert [r.message for r in caplog.records if "b-1" in r.message]


def test_a_month_begins_on_its_first_day(world: World) -> None:
    purse = world.set(budget(amount="0.05", period="month"))
    world.close(world.open(), after_s=4)
    with pytest.raises(errors.OverBudget, match="2026-12-01T00:00:00Z"):
        world.open()
    world.wall.now_ns = MIDNIGHT + 10 * 86_400 * SECOND
    world.close(world.open())
    assert purse.period.name == "2026-12"


def test_a_clock_that_steps_back_over_midnight_stays_in_the_later_day(world: World) -> None:
    world.wall.now_ns = MIDNIGHT + SECOND
    purse = world.set(budget(amount="0.0402015"))
    world.wall.now_ns = MIDNIGHT - 3600 * SECOND
    world.close(world.open(), after_s=1)
    assert purse.period.name == "2026-11-21"
    with pytest.raises(errors.OverBudget):
        world.open()
    world.wall.now_ns = MIDNIGHT + 2 * SECOND
    with pytest.raises(errors.OverBudget):
        world.open()


def test_a_clock_that_steps_back_under_a_call_charges_what_the_meter_saw(world: World) -> None:
    purse = world.set(budget(amount="1"))
    ticket = world.open()
    world.wall.now_ns -= 100 * SECOND
    bill = world.instance().close(
        ticket, status=200, outcome="ok", now_ns=SECOND, at_ns=world.wall.now_ns
    )
    assert (bill.exec_ms, bill.cost, purse.spent) == (0, "0.004001000000", bill.picos)


def test_another_amount_counts_at_once_and_keeps_what_was_spent(world: World) -> None:
    purse = world.set(budget(amount="0.05"))
    world.close(world.open(), after_s=5)
    with pytest.raises(errors.OverBudget):
        world.open()
    assert world.set(budget(amount="0.1")) is purse
    ticket = world.open()
    world.set(budget(amount="0.02"))
    assert purse.left < 0
    world.close(ticket)
    with pytest.raises(errors.OverBudget, match="is spent"):
        world.open()


def test_a_feed_that_is_told_anew_keeps_the_numbers(world: World) -> None:
    purse = world.set(budget())
    world.close(world.open(), after_s=1)
    ticket = world.open()
    world.budgets.apply("b-1", None)
    world.budgets.apply("b-1", budget())
    assert world.budgets.balances["b-1"] is purse
    world.close(ticket, after_s=1)
    assert (money(purse.spent), purse.reserved) == (Decimal("0.008002"), 0)


def test_a_budget_that_was_away_while_money_was_spent_begins_anew(world: World) -> None:
    purse = world.set(budget())
    world.budgets.apply("b-1", None)
    world.close(world.open(), after_s=1)
    again = world.set(budget())
    assert again is not purse
    assert again.is_stale


def test_a_budget_that_comes_while_a_call_runs_is_paid_by_it(world: World) -> None:
    ticket = world.open()
    purse = world.set(budget())
    cost = world.close(ticket, after_s=1)
    assert (money(purse.spent), purse.reserved) == (cost, 0)


@pytest.mark.parametrize(
    "broken",
    [
        {"amount": "-1"},
        {"amount": "NaN"},
        {"amount": "many"},
        {"amount": "1e30"},
        {"period": "year"},
    ],
)
def test_a_broken_budget_is_refused_and_the_last_good_one_stays(
    world: World, broken: dict[str, str]
) -> None:
    purse = world.set(budget())
    with pytest.raises(ValueError, match=r"decimal|amount|period"):
        world.budgets.apply("b-1", budget(**broken))
    assert world.budgets.balances["b-1"] is purse
    assert purse.amount == PICO


def test_idle_time_and_starts_are_paid_when_they_come_and_are_all_that_can_overshoot(
    world: World,
) -> None:
    purse = world.set(budget(amount="0.1"))
    books = world.instance()
    books.started(start_kind="COLD", billed_ns=3 * SECOND, at_ns=world.wall.now_ns)
    books.reserve(is_reserved=True, now_ns=0)
    assert books.settle_idle(now_ns=60 * SECOND, at_ns=world.wall.now_ns) == 1
    assert money(purse.spent) == Decimal("0.24"), "60 s at 0.004; the list does not charge starts"
    with pytest.raises(errors.OverBudget, match="is spent"):
        world.open()
    start, reserved = records_on_disk(world.directory)
    assert (start["kind"], start["start_kind"], start["exec_ms"], start["cost"]) == (
        "START",
        "COLD",
        3000,
        "0.000000000000",
    )
    assert start["id"] == f"i-1/START/{(NOON - 3 * SECOND) // 1000}"
    assert (reserved["kind"], reserved["rate_per_s"], reserved["cost"]) == (
        "RESERVED",
        "0.0040",
        "0.240000000000",
    )


calls = st.lists(
    st.tuples(
        st.sampled_from(("open", "open", "close", "idle", "start")),
        st.sampled_from(("i-1", "i-2", "i-3")),
        st.integers(0, 10_050),
    ),
    max_size=60,
)


@settings(
    deadline=None,
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(diary=calls, amount=st.integers(0, 400))
def test_whatever_the_interleaving_spent_is_the_sum_of_the_costs_and_calls_never_overshoot(
    tmp_path_factory: pytest.TempPathFactory, diary: list[tuple[str, str, int]], amount: int
) -> None:
    world = World(tmp_path_factory.mktemp("j"))
    purse = world.set(budget(amount=f"{amount / 1000}"))
    running: dict[str, list[OpenRecord]] = {"i-1": [], "i-2": [], "i-3": []}
    spans = Decimal(0)
    for what, name, ms in diary:
        # no call outlives its clock and the step it is looked at in
        for tickets in running.values():
            late = [
                t
                for t in tickets
                if world.wall.now_ns + ms * 1_000_000 > t.at_ns + 10 * SECOND + CLOCK_STEP_NS
            ]
            for ticket in late:
                world.close(ticket, ticket.template.instance)
                tickets.remove(ticket)
        world.pass_s(ms / 1000)
        if what == "open":
            room = purse.amount - purse.spent - purse.reserved
            try:
                running[name].append(world.open(name))
            except (errors.OverBudget, errors.BudgetReserved):
                assert money(room) < WORST
            else:
                assert money(room) >= WORST
        elif what == "close" and running[name]:
            world.close(running[name].pop(0), name)
        elif what == "idle":
            before = purse.spent
            world.instance(name).settle_idle(now_ns=world.up_ns, at_ns=world.wall.now_ns)
            spans += money(purse.spent - before)
        assert purse.reserved == sum(t.worst for tickets in running.values() for t in tickets)
        assert money(purse.spent) <= Decimal(amount) / 1000 + spans
    costs = sum((Decimal(r["cost"]) for r in records_on_disk(world.directory)), Decimal(0))
    assert money(purse.spent) == costs
    world.journal.abandon()
